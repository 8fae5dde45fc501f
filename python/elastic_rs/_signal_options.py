"""What signals and notices mean to an agent: flags, and the variables that stand for them under PyTorch's launcher.

PyTorch's launcher has no such flags. A flag has precedence over its variable. Of a signal that is named for several
purposes the first counts: it ends the agent, it is a notice, it is passed on.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
import shlex
import signal
import sys
from collections.abc import Collection
from dataclasses import dataclass

from elastic_rs import _elastic_rs, _python
from elastic_rs._elastic_rs import PreemptOptions

FORWARD_SIGNALS = "ELASTIC_RS_FORWARD_SIGNALS"
PREEMPT_NOTICE = "ELASTIC_RS_PREEMPT_NOTICE"
PREEMPT_DEADLINE = "ELASTIC_RS_PREEMPT_DEADLINE"
PREEMPT_SIGNAL = "ELASTIC_RS_PREEMPT_SIGNAL"

DEADLINE_S = 30.0
"""How much time a notice leaves that does not say it: Google's and Azure's."""
LONGEST_S = 86_400
PROVIDERS = ("aws", "gcp", "azure")
WATCH = "import sys; from elastic_rs._preempt import main; sys.exit(main(sys.argv[1]))"

logger = logging.getLogger("elastic_rs.agent")


@dataclass(frozen=True)
class Given:
    """The values of the flags. None: the variable's, or the default.

    Args:
        forward_signals: as ``--forward-signals``.
        preempt_notice: as ``--preempt-notice``.
        preempt_deadline: as ``--preempt-deadline``.
        preempt_signal: as ``--preempt-signal``.
    """

    forward_signals: str | None = None
    preempt_notice: str | None = None
    preempt_deadline: str | None = None
    preempt_signal: str | None = None


@dataclass(frozen=True)
class Meanings:
    """What an agent does at signals that do not end it, and how it gets notices."""

    forwarded: list[int]
    preempt: PreemptOptions

    @property
    def passed_on(self) -> list[int]:
        """The signals that do not end the agent."""
        return passed_on(self.forwarded, self.preempt)


def meanings_of(given: Given, *, ending: Collection[int]) -> Meanings:
    """Read the flags and variables. Warns of signals that are named for several purposes.

    Args:
        given: the flags.
        ending: the signals that end the agent.

    Raises:
        ValueError: a value is not valid. The message names the flag or the variable.
    """
    deadline_s = _deadline_of(given.preempt_deadline)
    notice, file, command = _notice_of(given.preempt_notice, deadline_s)
    if notice is not None and notice[0] in ending:
        _warn(notice[0], "ends the agent", _name("--preempt-notice", PREEMPT_NOTICE, given.preempt_notice))
        notice = None
    preempt = _elastic_rs.PreemptOptions(
        notice_signal=notice,
        notice_file=file,
        notice_command=command,
        deadline_s=deadline_s,
        signal=_signal_of(given.preempt_signal),
    )
    forwarded = []
    name = _name("--forward-signals", FORWARD_SIGNALS, given.forward_signals)
    for number in _forwarded_of(given.forward_signals, name):
        if number in ending:
            _warn(number, "ends the agent", name)
        elif notice is not None and number == notice[0]:
            _warn(number, "is a notice", name)
        else:
            forwarded.append(number)
    return Meanings(forwarded, preempt)


def passed_on(forwarded: list[int], preempt: PreemptOptions) -> list[int]:
    """Return the signals that do not end an agent."""
    return [*forwarded, *([] if preempt.notice_signal is None else [preempt.notice_signal[0]])]


def numbers_of(flag: str, text: str) -> list[int]:
    """Return the numbers of named signals.

    Raises:
        ValueError: there is no such signal, or no process can handle it. The message names the flag.
    """
    return [_number_of(flag, part.strip()) for part in text.split(",")]


def _forwarded_of(given: str | None, name: str) -> list[int]:
    text = os.environ.get(FORWARD_SIGNALS, "") if given is None else given
    return list(dict.fromkeys(_own_number_of(name, part) for part in text.split(","))) if text else []


def _notice_of(
    given: str | None, deadline_s: float
) -> tuple[tuple[int, float] | None, str | None, tuple[str, str] | None]:
    """Return the signal, the file or the command that gives notice. At most one of them is there."""
    name = _name("--preempt-notice", PREEMPT_NOTICE, given)
    text = os.environ.get(PREEMPT_NOTICE, "") if given is None else given
    kind, colon, rest = text.partition(":")
    if not text.strip():
        return None, None, None
    if "\0" in text:
        raise ValueError(f"{name} is `{text!r}`, must be a text without a zero byte")
    if kind == "signal" and colon:
        which, at, left = rest.partition("@")
        return (_own_number_of(name, which), _seconds_of(name, left) if at else deadline_s), None, None
    if kind == "file" and colon:
        if not rest:
            raise ValueError(f"{name} is `{text}`, must name a file: file:/run/preempted")
        return None, rest, None
    if text in PROVIDERS:
        watch = shlex.join([sys.executable, *_python.arguments(WATCH, text)])
        return None, None, (watch, f"{name} {text}")
    return None, None, (text, f"{name} `{text if len(text) <= 100 else text[:97] + '...'}`")


def _deadline_of(given: str | None) -> float:
    text = os.environ.get(PREEMPT_DEADLINE, "") if given is None else given
    return _seconds_of(_name("--preempt-deadline", PREEMPT_DEADLINE, given), text) if text else DEADLINE_S


def _signal_of(given: str | None) -> int | None:
    text = os.environ.get(PREEMPT_SIGNAL, "") if given is None else given
    return _own_number_of(_name("--preempt-signal", PREEMPT_SIGNAL, given), text) if text else None


def _seconds_of(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST_S:
        raise ValueError(f"{name} has `{text}` for seconds, must be above 0, and a day at most: 30")
    return seconds


def _own_number_of(name: str, text: str) -> int:
    """Read the name of a signal for a flag of ours: `USR1` as with `kill`, or `SIGUSR1`."""
    text = text.strip()
    number = _number_of(name, text if text.startswith("SIG") else f"SIG{text}")
    if number == signal.SIGCHLD:
        raise ValueError(f"{name} has SIGCHLD, which an agent gets from its own processes")
    return number


def _number_of(flag: str, name: str) -> int:
    try:
        number = _elastic_rs.signal_number(name)
    except UnicodeEncodeError:
        number = None
    if number is None:
        near = difflib.get_close_matches(name.upper(), [known.name for known in signal.Signals], n=1)
        hint = f"; did you mean `{near[0]}`?" if near else ""
        raise ValueError(f"{flag} has `{name}`, must be names such as SIGTERM,SIGUSR1{hint}")
    if number in {signal.SIGKILL, signal.SIGSTOP}:
        raise ValueError(f"{flag} has `{name}`, which no process can handle")
    return number


def _name(flag: str, variable: str, given: str | None) -> str:
    return variable if given is None else flag


def _warn(number: int, what: str, name: str) -> None:
    logger.warning("%s %s, so that %s has no effect on it", signal.Signals(number).name, what, name)
