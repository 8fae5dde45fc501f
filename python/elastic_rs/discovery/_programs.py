"""Programs that print lists of hosts: how they are run, and which limits they have."""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import signal
import threading
import time
from collections.abc import Sequence
from typing import IO

from elastic_rs._elastic_rs import start_program
from elastic_rs._terminal import plain
from elastic_rs.errors import ElasticError

MOST_BYTES = 1 << 20
"""Most bytes of a list."""
TAIL_BYTES = 4096
"""How much of the end of a program's standard error is kept."""
SHOWN = 200
"""How many characters of its last line an error repeats."""
READ_BYTES = 1 << 16
LOOK_EVERY_S = 0.02
"""How often it is looked whether a program has ended."""


_running: set[int] = set()
"""Process ids of programs that are not reaped yet: until then no other process can have such a number."""
_reaping = threading.Lock()
"""Held while ``_running`` is changed or read."""


class DiscoveryError(ElasticError, RuntimeError):
    """Hosts cannot be found now. The message says why."""

    __module__ = "elastic_rs.errors"


def printed_by(command: Sequence[str], timeout_s: float) -> str:
    """Run a program, and return what it prints.

    Its output goes through pipes, so a program that prints without end fills no disk. When the program has ended or is
    over a limit, its process group is killed.

    Raises:
        DiscoveryError: it cannot be run, failed, or is over a limit.
    """
    shown = shlex.join(command)
    with contextlib.ExitStack() as stack:
        (out, out_end), (err, err_end) = _pipe(stack), _pipe(stack)
        try:
            pid = start_program(command, stdout=out_end.fileno(), stderr=err_end.fileno())
        except OSError as error:
            raise DiscoveryError(f"`{shown}` cannot be run: {error.strerror or error}") from None
        with _reaping:
            _running.add(pid)
        try:
            out_end.close()
            err_end.close()
            printed, errors = _read_until_ended(pid, shown, timeout_s, out, err)
        finally:
            _kill(pid)
            stack.close()  # what cannot be killed does not wait for its output to be read
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            with _reaping:
                _running.discard(pid)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        words = errors.decode(errors="replace").strip().splitlines()
        said = f": {plain(words[-1][-SHOWN:])}" if words else ""
        how = f"exit code {code}" if code > 0 else _name_of(-code)
        raise DiscoveryError(f"`{shown}` has ended with {how}{said}")
    return printed.decode(errors="replace")


def kill_running() -> None:
    """Kill all programs that run, with what they have started: at the end of this process nobody waits for them."""
    with _reaping:
        for pid in _running:
            _kill(pid)


def _pipe(stack: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """Return the ends of a pipe, of which the first one does not block."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    return stack.enter_context(os.fdopen(reader, "rb", 0)), stack.enter_context(os.fdopen(writer, "wb", 0))


def _read_until_ended(pid: int, shown: str, timeout_s: float, out: IO[bytes], err: IO[bytes]) -> tuple[bytes, bytes]:
    """Read what a program prints, until it has ended. Nobody waits for what it has started in the background."""
    deadline = time.monotonic() + timeout_s
    read = {out: b"", err: b""}
    with selectors.DefaultSelector() as selector:
        for pipe in read:
            selector.register(pipe, selectors.EVENT_READ, pipe)
        while True:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            if ended:
                _kill(pid)
            left_s = deadline - time.monotonic()
            if not ended and left_s <= 0:
                raise DiscoveryError(f"`{shown}` has not ended within {timeout_s:g} s, and was killed")
            ready = selector.select(0 if ended else min(LOOK_EVERY_S, left_s))
            for pipe in (key.data for key, _ in ready):
                piece = pipe.read(READ_BYTES)
                if not piece:
                    selector.unregister(pipe)
                read[pipe] += piece
            read[err] = read[err][-TAIL_BYTES:]
            if len(read[out]) > MOST_BYTES:
                raise DiscoveryError(
                    f"`{shown}` has printed more than {MOST_BYTES} bytes, the limit of a list, and was killed"
                )
            # What is left in the pipes belongs to the list.
            if ended and (not ready or left_s <= 0):
                return read[out], read[err]


def _kill(pid: int) -> None:
    """Kill the process group of a program that is not reaped yet: until then no other group can have its number."""
    with contextlib.suppress(PermissionError):  # `sudo`
        os.killpg(pid, signal.SIGKILL)


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
