"""Durations that callers give: a ``timedelta``, or a number of seconds. The whole public API takes either."""

from __future__ import annotations

import math
from datetime import timedelta

Duration = timedelta | float
"""A ``timedelta``, or seconds: an ``int`` or a ``float``."""


def as_timedelta(name: str, value: Duration, *, signed: bool = False) -> timedelta:
    """Return a duration as a ``timedelta``.

    Args:
        name: of the caller's argument, for errors.
        value: the caller's.
        signed: whether a negative duration has a meaning.

    Raises:
        TypeError: it is another type. A bool is refused: ``timeout=False`` would be 0 s.
        ValueError: it is negative without a meaning, not finite, or longer than a ``timedelta`` can be.
    """
    if isinstance(value, timedelta):
        length = value
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is `{value!r}`, must be a timedelta, or a number of seconds")
    else:
        length = _length(name, value)
    if length < timedelta() and not signed:
        raise ValueError(f"{name} is `{value}`, must be zero or more seconds")
    return length


def _length(name: str, value: float) -> timedelta:
    try:
        if not math.isfinite(value):
            raise ValueError(f"{name} is `{value}`, must be a finite number of seconds")
        return timedelta(seconds=value)
    except OverflowError:
        raise ValueError(f"{name} is `{value}` seconds, must be at most {timedelta.max.days} days") from None


def as_seconds(name: str, value: Duration, *, signed: bool = False) -> float:
    """Return a duration as a number of seconds, checked as by :func:`as_timedelta`."""
    return as_timedelta(name, value, signed=signed).total_seconds()
