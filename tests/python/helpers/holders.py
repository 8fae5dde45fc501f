"""Processes that keep namespaces alive until they are let go."""

from __future__ import annotations

import subprocess

HOLD = ["sh", "-c", "echo up; exec cat"]  # runs until its stdin is closed


def hold(holders: list[subprocess.Popen[str]], *command: str) -> subprocess.Popen[str]:
    """Start a process in the namespaces that the command makes, and add it to the list. Return once it runs.

    Raises:
        OSError: the command has ended. Its process is in the list too.
    """
    holder = subprocess.Popen([*command, *HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    holders.append(holder)
    assert holder.stdout is not None
    if holder.stdout.readline() != "up\n":
        raise OSError(f"`{' '.join(command)}` ended with exit code {holder.wait()}")
    return holder
