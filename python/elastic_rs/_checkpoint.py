"""``should_checkpoint`` and ``checkpointed``: a script saves before the world changes, and is started anew."""

from __future__ import annotations

import logging
import os

from elastic_rs._elastic_rs import WorkerChannel
from elastic_rs.elastic import _decisions
from elastic_rs.elastic._membership import CONNECT_LIMIT_S, MEMBERSHIP

_log = logging.getLogger("elastic_rs")


class _Checks:
    """This process's connection to its agent, from its first call on."""

    def __init__(self) -> None:
        self._channel: WorkerChannel | None = None
        self._has_begun = False
        self._saves = False
        """Whether a check was true."""

    def should_checkpoint(self) -> bool:
        if not self._has_begun:
            self._channel = _connect()
            self._has_begun = True
        if self._channel is None:
            return False
        try:
            self._saves = self._channel.check() == _decisions.CHANGED
        except ConnectionError as error:
            # Whoever has ended the connection ends this process too, if the world changes.
            _log.warning("should_checkpoint() is false from now on: %s", error)
            self._channel = None
        return self._saves

    def checkpointed(self) -> None:
        if self._channel is None or not self._saves:
            return
        try:
            self._channel.park(None)
        except ConnectionError as error:
            _log.info("this worker ends: %s", error)
        raise SystemExit(0)


def _connect() -> WorkerChannel | None:
    if MEMBERSHIP.has_begun:
        raise RuntimeError(
            "this process has called elastic.init or elastic.run, which keep it when the world changes: "
            "state.commit() and state.check_host_updates() do there what should_checkpoint() does in other scripts"
        )
    MEMBERSHIP.saves = True
    path = os.environ.get(_decisions.AGENT)
    if not path or os.environ.get(_decisions.IN_PLACE, "off") == "off":
        return None
    try:
        channel = WorkerChannel.connect(path, CONNECT_LIMIT_S)
        channel.saves()
        channel.world()  # checks are counted from here on
    except ConnectionError as error:
        _log.warning("should_checkpoint() is never true in this worker: %s", error)
        return None
    return channel


_CHECKS = _Checks()


def should_checkpoint() -> bool:
    """Return whether to save now, because the world is about to change: a machine is taken away, or a node joins.

    It is true for all ranks at the same call, so all must call it equally often, at the same place of their loop. A
    script saves then, also by collectives, and calls :func:`checkpointed`. The agents start it anew in the next world,
    and it goes on from what it has saved. Saving may take ten minutes, and until a machine is taken away.

    A call takes a fraction of a microsecond while nothing is about to change. It is never true without an agent of
    elastic_rs, over etcd, and with ``in_place=off``.

    Returns:
        ``bool``. True at most once, at the last call.

    Raises:
        RuntimeError: this process uses :mod:`elastic_rs.elastic`, or was forked from the one that called this before.

    >>> import elastic_rs
    >>> elastic_rs.should_checkpoint()  # without an agent
    False
    """
    return _CHECKS.should_checkpoint()


def checkpointed() -> None:
    """Say that this rank has saved, and wait for the end of this process. See :func:`should_checkpoint`.

    Returns only if that was not true. What the script writes must be written before.

    Raises:
        SystemExit: the next world is there, and this process ends, with exit code 0.

    >>> import elastic_rs
    >>> if elastic_rs.should_checkpoint():
    ...     elastic_rs.checkpointed()
    """
    _CHECKS.checkpointed()
