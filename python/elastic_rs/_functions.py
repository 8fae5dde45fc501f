"""Workers that are Python functions: started by ``torch.multiprocessing``, supervised by the core."""

from __future__ import annotations

import os
import threading
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.multiprocessing import MultiprocessContext

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import LogsSpecs


class Functions:
    """One generation of them.

    PyTorch's own context starts them and follows their logs; but it is not asked how they are: their ends are noticed by
    the core, and a thread here waits for what they return.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        envs: dict[int, dict[str, str]],
        args: dict[int, tuple[Any, ...]],
        prefixes: dict[int, str] | None,
        start_method: str,
    ) -> None:
        names = ("numa_options", "duplicate_stdout_filters", "duplicate_stderr_filters")
        # Older versions of torch do not have all of them.
        options = {name: value for name in names if (value := getattr(spec, name, None)) is not None}
        self._context = MultiprocessContext(
            name=spec.role,
            entrypoint=_Worker(spec.entrypoint),
            args=args,
            envs=envs,
            logs_specs=logs_specs,
            log_line_prefixes=prefixes,
            start_method=start_method,
            **options,
        )
        self.error_files: dict[int, str] = self._context.error_files
        self.return_values: dict[int, Any] = {}
        self._closing, self._close = os.pipe()

    def start(self) -> dict[int, int]:
        """Start them all; process ids by local rank."""
        self._context.start()
        threading.Thread(target=self._collect, name="elastic_rs-returns", daemon=True).start()
        return self._context.pids()

    def returncode(self, local_rank: int) -> int:
        """Reap a worker that has ended."""
        process = self._context._pc.processes[local_rank]  # noqa: SLF001 - torch has no other way to them
        process.join()
        return int(process.exitcode)

    def close(self) -> None:
        """Let go of what belongs to them. They have ended."""
        if self._close >= 0:
            os.close(self._close)
            self._close = -1
            self._context.close(timeout=0)

    def _collect(self) -> None:
        """Take what each returns. They wait for that before they end, since a value may be larger than a pipe."""
        queues = self._context._ret_vals  # noqa: SLF001 - as above
        readers = {queue._reader: i for i, queue in queues.items()}  # noqa: SLF001 - what makes a queue waitable
        while readers:
            ready = connection.wait([*readers, self._closing])
            if self._closing in ready:
                break
            for reader in ready:
                local_rank = readers.pop(reader)
                try:
                    self.return_values[local_rank] = queues[local_rank].get()
                except EOFError:
                    return  # it ended without returning; the core has noticed
        else:
            self._context._worker_finished_event.set()  # noqa: SLF001 - as above
        os.close(self._closing)


class _Worker:
    """The entry point, in a session of its own: what it starts belongs to it, and ends with it."""

    def __init__(self, entrypoint: Any) -> None:
        self._entrypoint = entrypoint
        self.__qualname__ = entrypoint.__qualname__
        self.__name__ = entrypoint.__name__
        self._agent = os.getpid()

    def __call__(self, *args: Any) -> Any:
        from elastic_rs._elastic_rs import follow_parent

        os.setsid()
        follow_parent()
        return self._entrypoint(*args)
