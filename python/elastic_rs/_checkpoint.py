"""``should_checkpoint`` and ``checkpointed``: a script saves before the world changes, and is started anew."""

from __future__ import annotations

import atexit
import logging
import os
import sys

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
            news = self._channel.check()
            if news not in {0, _decisions.CHANGED}:
                raise RuntimeError(f"this rank cannot save together with the others: {self._channel.reason}")
        except ConnectionError as error:
            # Whoever has ended the connection ends this process too, if the world changes.
            _log.warning("should_checkpoint() is false from now on: %s", error)
            self._channel = None
            return False
        if news == _decisions.CHANGED and not self._saves:
            self._saves = True
            atexit.register(self._park_unless_failed)
        return self._saves

    def checkpointed(self) -> None:
        if self._channel is not None and self._saves:
            self._park()
            raise SystemExit(0)

    def _park(self) -> None:
        assert self._channel is not None
        atexit.unregister(self._park_unless_failed)
        try:
            self._channel.park(None)
        except ConnectionError as error:
            _log.info("this worker ends: %s", error)

    def _park_unless_failed(self) -> None:
        """Wait for the next world although the script ends: its exit would mean that its work is done."""
        if getattr(sys, "last_type", None) is None:
            _log.warning("this script ends without checkpointed(), though should_checkpoint() was true: it has saved")
            self._park()


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
    and it goes on from what it has saved. A script that ends instead has saved, too, unless it ends by an exception.
    Saving may take ten minutes, until a machine is taken away, or until the grace of a node is over that got SIGTERM.

    A call takes a fraction of a microsecond while nothing is about to change. It is never true without an agent of
    elastic_rs, over etcd, and with ``in_place=off``.

    Returns:
        ``bool``. Once it is true, it stays so.

    Raises:
        RuntimeError: this process uses :mod:`elastic_rs.elastic`, another process of the same worker called this first,
            or the ranks have not called it equally often.

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
