"""What signals mean to an agent: ``--signals-to-handle``, ``--forward-signals``, and the variable of the latter.

The variable is for PyTorch's launcher, which has no such flag. A flag has precedence.
"""

from __future__ import annotations

import difflib
import logging
import os
import signal
from collections.abc import Collection

from elastic_rs import _elastic_rs

FORWARD_SIGNALS = "ELASTIC_RS_FORWARD_SIGNALS"

logger = logging.getLogger("elastic_rs.agent")


def numbers_of(flag: str, text: str) -> list[int]:
    """Return the numbers of named signals.

    Raises:
        ValueError: there is no such signal, or no process can handle it. The message names the flag.
    """
    numbers = []
    for name in (part.strip() for part in text.split(",")):
        number = _number_of(name)
        if number is None:
            raise ValueError(f"{flag} has `{name}`, must be names such as SIGTERM,SIGUSR1{_near(name)}")
        if number in {signal.SIGKILL, signal.SIGSTOP}:
            raise ValueError(f"{flag} has `{name}`, which no process can handle")
        numbers.append(number)
    return numbers


def forwarded_of(given: str | None = None, *, ending: Collection[int]) -> list[int]:
    """Return the numbers of the signals that an agent passes on to its workers. Those that end it are none of them.

    Args:
        given: the flag's value. None: the variable's, or none.
        ending: the signals that end the agent.

    Raises:
        ValueError: as :func:`numbers_of`, and for SIGCHLD. The message names the flag or the variable.
    """
    name = FORWARD_SIGNALS if given is None else "--forward-signals"
    text = os.environ.get(FORWARD_SIGNALS, "") if given is None else given
    if not text:
        return []
    # `USR1` as with `kill`, whose names have no `SIG`.
    numbers = numbers_of(name, ",".join(_with_sig(part.strip()) for part in text.split(",")))
    if signal.SIGCHLD in numbers:
        raise ValueError(f"{name} has SIGCHLD, which an agent gets from its own processes")
    for number in numbers:
        if number in ending:
            logger.warning("%s ends the agent, so that %s has no effect on it", signal.Signals(number).name, name)
    return [number for number in dict.fromkeys(numbers) if number not in ending]


def _with_sig(name: str) -> str:
    return name if name.startswith("SIG") else f"SIG{name}"


def _number_of(name: str) -> int | None:
    try:
        return _elastic_rs.signal_number(name)
    except UnicodeEncodeError:
        return None


def _near(name: str) -> str:
    near = difflib.get_close_matches(name.upper(), [known.name for known in signal.Signals], n=1)
    return f"; did you mean `{near[0]}`?" if near else ""
