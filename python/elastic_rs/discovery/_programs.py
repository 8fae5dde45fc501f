"""Programs that print lists of hosts: how they are run, and which limits they have."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import time
from collections.abc import Sequence

from elastic_rs._elastic_rs import start_program
from elastic_rs._terminal import plain

__all__ = ["MOST_BYTES", "DiscoveryError", "printed_by"]

MOST_BYTES = 1 << 20
"""Most bytes of a list."""
TAIL_BYTES = 4096
"""How much of the end of a program's standard error is kept."""
SHOWN = 200
"""How many characters of its last line an error repeats."""
READ_BYTES = 1 << 16
LOOK_EVERY_S = 0.02
"""How often it is looked whether a program has ended, where the kernel has no pidfds."""


class DiscoveryError(RuntimeError):
    """Hosts cannot be found now. The message says why."""


def printed_by(command: Sequence[str], timeout_s: float) -> str:
    """Run a program, and return what it prints.

    Its output goes through pipes, so a program that prints without end fills no disk. When the program has ended or is
    over a limit, its process group is killed.

    Args:
        command: the program and its arguments.
        timeout_s: limit for its run.

    Raises:
        DiscoveryError: it cannot be run, failed, or is over a limit.
    """
    shown = shlex.join(command)
    with contextlib.ExitStack() as stack:
        out, err = _Pipe(stack), _Pipe(stack)
        try:
            pid = start_program(command, stdout=out.other, stderr=err.other)
        except OSError as error:
            raise DiscoveryError(f"`{shown}` cannot be run: {error.strerror or error}") from None
        try:
            out.let_go()
            err.let_go()
            _read_until_ended(pid, shown, timeout_s, out, err, stack=stack)
        finally:
            _kill(pid)
            stack.close()  # what cannot be killed does not wait for its output to be read
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code:
            words = err.content[-TAIL_BYTES:].decode(errors="replace").strip().splitlines()
            said = f": {plain(words[-1][-SHOWN:])}" if words else ""
            how = f"exit code {code}" if code > 0 else _name_of(-code)
            raise DiscoveryError(f"`{shown}` has ended with {how}{said}")
        return out.content.decode(errors="replace")


class _Pipe:
    """A pipe, and what was read from it."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.descriptor, self.other = os.pipe()
        self.content = b""
        os.set_blocking(self.descriptor, False)
        stack.callback(os.close, self.descriptor)
        self._others = stack.enter_context(contextlib.ExitStack())
        self._others.callback(os.close, self.other)

    def let_go(self) -> None:
        """Close the end to which the program writes."""
        self._others.close()

    def read(self) -> int | None:
        """Read a piece, and return its length: 0 at the end, and None if there is nothing now."""
        try:
            piece = os.read(self.descriptor, READ_BYTES)
        except BlockingIOError:
            return None
        self.content += piece
        return len(piece)


def _read_until_ended(
    pid: int, shown: str, timeout_s: float, out: _Pipe, err: _Pipe, *, stack: contextlib.ExitStack
) -> None:
    """Read what a program prints, until it has ended. Nobody waits for what it has started in the background."""
    deadline = time.monotonic() + timeout_s
    pipes, poll = {pipe.descriptor: pipe for pipe in (out, err)}, select.poll()
    for descriptor in pipes:
        poll.register(descriptor, select.POLLIN)
    longest_s = timeout_s if _wakes_at_the_end_of(pid, poll, stack) else LOOK_EVERY_S
    while True:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        if ended:
            _kill(pid)
        left_s = deadline - time.monotonic()
        if not ended and left_s <= 0:
            raise DiscoveryError(f"`{shown}` has not ended within {timeout_s:g} s, and was killed")
        events = poll.poll(0 if ended else 1000 * min(longest_s, left_s))
        ready = [descriptor for descriptor, _ in events if descriptor in pipes]
        for descriptor in ready:
            if pipes[descriptor].read() == 0:
                poll.unregister(descriptor)
        err.content = err.content[-TAIL_BYTES:]
        if len(out.content) > MOST_BYTES:
            raise DiscoveryError(
                f"`{shown}` has printed more than {MOST_BYTES} bytes, the limit of a list, and was killed"
            )
        # What is left in the pipes belongs to the list.
        if ended and (not ready or left_s <= 0):
            return


def _wakes_at_the_end_of(pid: int, poll: select.poll, stack: contextlib.ExitStack) -> bool:
    """Let the poll report the end of a child that is not reaped yet. Returns whether it can."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:  # gVisor, old seccomp profiles, kernels before 5.3
        return False
    stack.callback(os.close, descriptor)
    poll.register(descriptor, select.POLLIN)
    return True


def _kill(pid: int) -> None:
    """Kill the process group of a program that is not reaped yet: until then no other group can have its number."""
    with contextlib.suppress(PermissionError):  # `sudo`
        os.killpg(pid, signal.SIGKILL)


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
