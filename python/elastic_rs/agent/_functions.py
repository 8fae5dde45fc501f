"""Workers that are Python functions: started by ``torch.multiprocessing``, supervised by the core."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import MultiprocessContext

from elastic_rs._torch_private import let_workers_end, processes_of, return_queues
from elastic_rs.agent._generation import Generation
from elastic_rs.agent._signals import Handlers

logger = logging.getLogger("elastic_rs.agent")

# Only a value that was cut off in the middle takes this long.
THREAD_END_S = 5.0
# Only a worker that the kernel does not release takes this long.
REAP_S = 2

# Held by an agent that starts or reaps processes. `multiprocessing` polls all children of the program when it starts
# one, and two threads that read one exit code get a wrong one.
_children = threading.Lock()


class Functions:
    """One generation of them.

    PyTorch's own context starts them and follows their logs, but is not asked how they are: the core notices their
    ends, and a thread here waits for what they return. Each waits, before it ends, until all have returned.
    """

    def __init__(self, generation: Generation, start_method: str, handlers: Handlers) -> None:
        spec = generation.spec
        self._handlers = handlers
        names = ("duplicate_stdout_filters", "duplicate_stderr_filters")
        # Older versions of torch do not have all of them.
        options = {name: value for name in names if (value := getattr(spec, name, None)) is not None}
        # PyTorch's context would bind workers by its own rules, which need GPUs and `numactl`.
        cpus = {generation.envs[i]["RANK"]: numbers for i, numbers in generation.cpus.items() if numbers}
        self._worker = _Worker(spec.entrypoint, cpus)
        self._forks = start_method == "fork"
        self._context = MultiprocessContext(
            name=spec.role,
            entrypoint=self._worker,
            args=generation.args,
            envs=generation.envs,
            logs_specs=generation.logs_specs,
            log_line_prefixes=generation.prefixes,
            start_method=start_method,
            **options,
        )
        self.error_files: dict[int, str] = self._context.error_files
        self.return_values: dict[int, Any] = {}
        # The thread also waits for this pipe: it gets a byte for each worker that has ended.
        self._ended, self._end = os.pipe()
        self._thread = threading.Thread(target=self._collect, name="elastic_rs-returns", daemon=True)

    def start(self) -> dict[int, int]:
        """Start all workers. Return process ids by local rank."""
        with _children:
            before = {*multiprocessing.active_children()}
            try:
                with self._signals_held_back():
                    self._context.start()
                    self._handlers.install_again()
            except BaseException:
                # A signal, or an argument that cannot be pickled. The context does not know the workers that run
                # already.
                for process in {*multiprocessing.active_children()} - before:
                    process.kill()
                    process.join()
                raise
        self._thread.start()
        return self._context.pids()

    @contextmanager
    def _signals_held_back(self) -> Iterator[None]:
        """Across a fork, those with a handler.

        A child that the agent stops at once would run the agent's handler before `multiprocessing` has its hands
        on it: the exception would go up through this very stack, and the child would go on as a second agent.
        """
        if not self._forks:
            yield  # an executed worker would have them blocked during its imports
            return
        handled: set[int] = {number for number in signal.valid_signals() if callable(signal.getsignal(number))}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, handled)
        self._worker.held_back = handled - {*before}
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def returncode(self, local_rank: int) -> int:
        """Reap a worker that has ended."""
        process = processes_of(self._context).processes[local_rank]
        with _children:
            process.join()
        os.write(self._end, bytes([process.exitcode != 0]) + local_rank.to_bytes(4))
        return int(process.exitcode)

    def traceback(self, local_rank: int) -> str:
        """Return the exception of a worker that has ended, if PyTorch's wrapper of processes has recorded it.

        That also sees what happens after the function has returned: a value that cannot be pickled.
        """
        file = Path(processes_of(self._context).error_files[local_rank])
        with contextlib.suppress(Exception):  # there is no file, or its writer was killed in the middle
            text = pickle.loads(file.read_bytes())  # noqa: S301 - as PyTorch does: our own worker has written it
            file.unlink()
            # The core takes UTF-8. A file name that is not UTF-8 leaves surrogates in a message.
            return str(text).encode(errors="backslashreplace").decode()
        return ""

    def close(self) -> None:
        """Release the resources of workers that have ended."""
        os.close(self._end)
        for queue in return_queues(self._context).values():
            queue._writer.close()  # noqa: SLF001 - so that a value that was cut off ends
        if self._thread.ident is not None:
            self._thread.join(THREAD_END_S)
        if not self._thread.is_alive():
            os.close(self._ended)
        # They have ended. If an exception ended the agent, they have been killed.
        self._context.close(timeout=REAP_S)

    def _collect(self) -> None:
        """Read the return values. A worker waits for that before it ends, because a value may be larger than a pipe."""
        queues = return_queues(self._context)
        readers = {queue._reader: i for i, queue in queues.items()}  # noqa: SLF001 - what makes a queue waitable
        while readers:
            ready = connection.wait([*readers, self._ended])
            for reader in [reader for reader in readers if reader in ready]:
                local_rank = readers.pop(reader)
                try:
                    self.return_values[local_rank] = queues[local_rank].get()
                except EOFError:
                    return  # cut off: the worker was killed, which the core has noticed
                except Exception:
                    # A value that was pickled there may not be unpicklable here. Nobody must wait for it.
                    logger.exception(
                        "the return value of the worker with local rank %d cannot be unpickled; it counts as None",
                        local_rank,
                    )
                    self.return_values[local_rank] = None
            if self._ended in ready:
                end = os.read(self._ended, 5)
                if not end or end[0]:
                    return  # closed, or a worker has failed: all are stopped, and none waits for the others
                ended = int.from_bytes(end[1:])
                # The worker ended without returning: `sys.exit(0)`. PyTorch's agent waits for ever then.
                for reader in [reader for reader, i in readers.items() if i == ended and not reader.poll()]:
                    del readers[reader]
                    self.return_values[ended] = None
        let_workers_end(self._context)


class _Worker:
    """Run the entry point as a session leader: the processes that it starts belong to it and end with it."""

    def __init__(self, entrypoint: Any, cpus: dict[str, list[int]]) -> None:
        self._entrypoint = entrypoint
        self._cpus = cpus
        # Signals that were blocked when this process was forked.
        self.held_back: set[int] = set()
        self.__qualname__ = entrypoint.__qualname__
        self.__name__ = entrypoint.__name__

    def __call__(self, *args: Any) -> Any:
        from elastic_rs import _watch
        from elastic_rs._elastic_rs import follow_parent

        os.setsid()
        follow_parent()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.held_back)
        if cpus := self._cpus.get(os.environ["RANK"]):
            os.sched_setaffinity(0, cpus)
        _watch.start()  # the end of `import torch` leaves children of multiprocessing alone
        return self._entrypoint(*args)
