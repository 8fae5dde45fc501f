"""Workers that are Python functions: started by ``torch.multiprocessing``, supervised by the core."""

from __future__ import annotations

import os
import threading
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.multiprocessing import MultiprocessContext

if TYPE_CHECKING:
    from elastic_rs._generation import Generation


class Functions:
    """One generation of them.

    PyTorch's own context starts them and follows their logs, but is not asked how they are: the core notices their
    ends, and a thread here waits for what they return.
    """

    def __init__(self, generation: Generation, start_method: str) -> None:
        spec = generation.spec
        names = ("numa_options", "duplicate_stdout_filters", "duplicate_stderr_filters")
        # Older versions of torch do not have all of them.
        options = {name: value for name in names if (value := getattr(spec, name, None)) is not None}
        self._context = MultiprocessContext(
            name=spec.role,
            entrypoint=_Worker(spec.entrypoint),
            args=generation.args,
            envs=generation.envs,
            logs_specs=generation.logs_specs,
            log_line_prefixes=generation.prefixes,
            start_method=start_method,
            **options,
        )
        self.error_files: dict[int, str] = self._context.error_files
        self.return_values: dict[int, Any] = {}
        self._closing, self._close = os.pipe()
        self._thread = threading.Thread(target=self._collect, name="elastic_rs-returns", daemon=True)

    def start(self) -> dict[int, int]:
        """Start them all; process ids by local rank."""
        self._context.start()
        self._thread.start()
        return self._context.pids()

    def returncode(self, local_rank: int) -> int:
        """Reap a worker that has ended."""
        processes: Any = self._context._pc  # noqa: SLF001 - torch has no other way to them
        process = processes.processes[local_rank]
        process.join()
        return int(process.exitcode)

    def close(self) -> None:
        """Let go of what belongs to them. They have ended."""
        os.close(self._close)
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._closing)
        self._context.close(timeout=0)

    def _collect(self) -> None:
        """Take what each returns. They wait for that before they end, since a value may be larger than a pipe."""
        queues: dict[int, Any] = self._context._ret_vals  # noqa: SLF001 - as above
        readers = {queue._reader: i for i, queue in queues.items()}  # noqa: SLF001 - what makes a queue waitable
        while readers:
            ready = connection.wait([*readers, self._closing])
            if self._closing in ready:
                return
            for reader in ready:
                local_rank = readers.pop(reader)
                try:
                    self.return_values[local_rank] = queues[local_rank].get()
                except EOFError:
                    return  # it ended without returning, which the core has noticed
        self._context._worker_finished_event.set()  # noqa: SLF001 - as above


class _Worker:
    """The entry point, in a session of its own: what it starts belongs to it, and ends with it."""

    def __init__(self, entrypoint: Any) -> None:
        self._entrypoint = entrypoint
        self.__qualname__ = entrypoint.__qualname__
        self.__name__ = entrypoint.__name__

    def __call__(self, *args: Any) -> Any:
        from elastic_rs._elastic_rs import follow_parent

        os.setsid()
        follow_parent()
        return self._entrypoint(*args)
