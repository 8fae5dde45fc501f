"""What the handlers of this package have in common: one node's part in a rendezvous, as PyTorch's agents use it."""

from __future__ import annotations

import atexit
import inspect
import logging
import os
import signal
import socket
import sys
import weakref
from typing import TYPE_CHECKING, TypeVar

from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.events import construct_and_record_rdzv_event
from torch.distributed.elastic.events.api import NodeState
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from elastic_rs import _elastic_rs
from elastic_rs._host_name import host_name, spare_torch_the_wait, wait_for_readers
from elastic_rs._torch_private import worker_group_of
from elastic_rs.errors import RendezvousClosedError, RendezvousGracefulExitError
from elastic_rs.rendezvous._node import shares_store
from elastic_rs.rendezvous._round_store import RoundStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta
    from types import FrameType

    from elastic_rs._elastic_rs import Agent, Failure, NodeOptions, Placement, RendezvousConfig, Session, View
    from elastic_rs._torch_private import Store

logger = logging.getLogger("elastic_rs.rendezvous")

T = TypeVar("T")


class _WithdrawnError(Exception):
    """The agent leaves, and joins no round."""


class NodeHandler(RendezvousHandler):
    """What the handlers of this package have in common: one node's session, whatever it is with.

    A subclass makes the session and says which store the agents share.
    """

    _ranks_as_asked = False
    """Whether ranks are those that nodes ask for, and the workers' store is the endpoint's."""

    def __init__(self, *, run_id: str, config: RendezvousConfig, name: str) -> None:
        spare_torch_the_wait()
        # The program may have configured logging since this package was imported.
        _elastic_rs.reset_log_levels()
        self._run_id = run_id
        self._config = config
        self._name = name
        self._local_addr: str | None = None
        self._waiting = 0
        self._must_rejoin = False
        self._ended = False
        # A program may launch a job while it handles an exception, which is not how that job ends.
        self._handled_before = sys.exc_info()[1]
        self._max_restarts: int | None = None
        self._workers: tuple[str, int, str] | None = None
        # An agent that is ended by a signal does not call shutdown(); a goodbye spares the others the wait for a lease.
        _say_goodbye_at_exit(self)

    @property
    def use_agent_store(self) -> bool:
        """Whether workers share the store at ``MASTER_ADDR:MASTER_PORT``, which then already listens.

        True unless the environment has ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``, as in PyTorch's ``c10d`` backend.
        """
        return shares_store()

    def serve_agent(self, role: str, local_world_size: int, max_restarts: int, script: str) -> None:
        """Serve an agent of ours: workers get their ranks with the place, and restarts are the job's.

        Call it before the session is first used.

        Args:
            role: of the workers.
            local_world_size: number of this node's workers.
            max_restarts: how often workers may be restarted.
            script: the name of what they run, for messages.
        """
        self._workers = (role, local_world_size, script)
        if self._config.job_counts:
            self._max_restarts = max_restarts

    @property
    def keeps_master(self) -> bool:
        """Whether ``MASTER_ADDR`` and ``MASTER_PORT`` are the same in all rounds. The store there is empty in each."""
        return self._ranks_as_asked

    @property
    def counts_restarts(self) -> bool:
        """Whether restarts are the job's, for an agent of ours."""
        return self._max_restarts is not None

    @property
    def config(self) -> RendezvousConfig:
        """Return the values of ``--rdzv-conf``."""
        return self._config

    @property
    def session(self) -> Session:
        """This node's session."""
        raise NotImplementedError

    def join(self, agent: Agent | None = None) -> Placement | Failure | None:
        """Join the next round for an agent of ours, which needs no store of the agents.

        Args:
            agent: it hears meanwhile that its machine is taken away, which withdraws the join.

        Returns:
            The place, with the ranks of this node's workers; or the failure because of which the job has ended. None:
            the join was withdrawn.

        Raises:
            RendezvousGracefulExitError: also if the job had succeeded before this node came.
            The other exceptions of :meth:`next_rendezvous`.
        """
        try:
            return self._join(lambda _: None, workers=self._workers, agent=agent)[0]
        except _WithdrawnError:
            return None
        except RendezvousClosedError as error:
            view = self.session.view()
            if view.over and view.failure is None:
                logger.warning("[%s] %s; this node has nothing to do, and ends with 0", self._run_id, error)
                raise RendezvousGracefulExitError(str(error), round=error.round) from None
            # The failure of a job that was over before this node came is not this job's.
            if view.cause is None or view.over:
                raise
            return view.cause

    def next_rendezvous(self) -> RendezvousInfo:
        """Take part in the next round and block until it has completed.

        Raises:
            RendezvousTimeoutError: no round completed within ``join_timeout``.
            RendezvousClosedError: the job is over.
            RendezvousGracefulExitError: the job ended and this node, a spare, was not needed.
            RendezvousConnectionError: the coordinator cannot be reached.
        """
        placement, store = self._join(self.store_of)
        bootstrap = RendezvousStoreInfo(placement.master_addr, placement.master_port)
        return RendezvousInfo(store, placement.rank, placement.world_size, bootstrap)

    def _join(
        self,
        then: Callable[[Placement], T],
        *,
        workers: tuple[str, int, str] | None = None,
        agent: Agent | None = None,
    ) -> tuple[Placement, T]:
        """Join the next round, and return what ``then`` makes of the place, which has ranks of ``workers`` if given."""
        self._record(f"The node '{self._name}' attempts to join the next round of the rendezvous '{self._run_id}'.")
        try:
            placement = self.session.join(workers=workers, agent=agent)
            if placement is None:
                raise _WithdrawnError("this node's machine is taken away")
            result = then(placement)
        except BaseException as error:
            self._explain(error)
            self._record(f"{type(error).__name__}: {error}", NodeState.FAILED)
            raise
        self._waiting, self._must_rejoin = 0, False
        self._record(
            f"The node '{self._name}' has joined round {placement.round} of the rendezvous '{self._run_id}' as rank "
            f"{placement.rank} in a world of size {placement.world_size}.",
            rank=placement.rank,
        )
        return placement, result

    def is_closed(self) -> bool:
        """Whether the rendezvous was closed, as far as this node knows. Sends no request."""
        return self._view().closed

    def set_closed(self) -> None:
        """End the rendezvous for everybody: nobody is admitted any more. Running workers are not disturbed."""
        self._close()

    def num_nodes_waiting(self) -> int:
        """Return above zero when the world must re-form: nodes wait to join, or a member was lost. Asks nobody.

        Also when this node was cut off from the coordinator for its whole lease (unless ``on_partition=continue``):
        the others may go on without it, and its workers must have stopped by then.

        Raises:
            RendezvousClosedError: the job failed on another node; the message names it and the cause.
            RendezvousConnectionError: the coordinator has been away for longer than ``coordinator_timeout``.
        """
        view = self._view()
        if view.failure is not None:
            # PyTorch's agent does not look at `closed` while its workers run (pytorch #76287): raising stops it.
            rank = None if view.cause is None else view.cause.global_rank
            raise RendezvousClosedError(f"the rendezvous is {view.failure}", rank=rank)
        if view.waiting != self._waiting:
            self._waiting = view.waiting
            if view.waiting:
                logger.info("[%s] %s: the world must re-form: %s", self._run_id, self.session.addr, view.reason)
        return max(view.waiting, int(self._must_rejoin))

    def get_run_id(self) -> str:
        """Return the run id (``--rdzv-id``)."""
        return self._run_id

    def shutdown(self) -> bool:
        """End this node's part, and the job's where that is due.

        PyTorch's launcher calls this in a ``finally``. The exception that is under way, if any, shows how the agent
        ended: none, the job succeeded and is closed for all; ``ChildFailedError``, it failed for good and all others
        stop; any other is a fault of this node alone, which leaves the rendezvous open for the rest.
        """
        error = sys.exc_info()[1]
        if error is self._handled_before:
            error = None
        if not self._ended and error is None and _agent_without_success(inspect.currentframe()):
            return True  # its launcher calls again
        self.end(error)
        return True

    def end(self, error: BaseException | None) -> None:
        """End this node's part as :meth:`shutdown`, for an agent that met this exception, or none.

        A launcher of ours knows it. The exception under way may be another: one that its caller is handling.

        Args:
            error: what the agent raised. None: the job has succeeded.
        """
        self._handled_before = None
        if self._ended:
            return
        limit = self._config.close_timeout
        if isinstance(error, ChildFailedError):
            self._close(_first_cause(error))
            self._leave("its workers failed", limit)
        elif error is None:
            self._close()
            self._leave("the job is over", limit)
        else:
            reason, number = _farewell(error)
            self._leave(reason, limit, number)
        self._record(f"The node '{self._name}' has left the rendezvous '{self._run_id}'.", NodeState.SUCCEEDED)

    def _leave(self, reason: str, timeout: float, signal: int | None = None) -> None:
        """Say goodbye, then stay for the others if this process serves them. A signal is what ended this process."""
        if not self._ended:
            self._ended = True
            self.session.leave(reason, timeout_s=timeout, signal=signal)

    def _node_options(self, local_addr: str | None, nodes: tuple[int, int]) -> NodeOptions:
        """Return the session's options, with what an agent of ours has said."""
        return _elastic_rs.NodeOptions(
            run_id=self._run_id,
            name=self._name,
            local_addr=local_addr,
            nodes=nodes,
            config=self._config,
            max_restarts=self._max_restarts,
            ranks_as_asked=self._ranks_as_asked,
            use_agent_store=self.use_agent_store,
        )

    def _close(self, cause: str | None = None) -> None:
        """End the rendezvous for everybody. With a cause, the job failed."""
        raise NotImplementedError

    def _view(self) -> View:
        """How things stand."""
        return self.session.view()

    def store_of(self, placement: Placement) -> Store:
        """Connect to the store that the agents share in this round.

        Args:
            placement: what :meth:`join` has returned.
        """
        raise NotImplementedError

    def _round_store(self, store: Store, number: int, world_size: int, timeout: timedelta) -> Store:
        """Give each round a prefix of its own, as PyTorch's handler does."""
        return RoundStore(
            f"torch.rendezvous.{self._run_id}.{number}",
            store,
            world_size=world_size,
            timeout=timeout,
            must_reform=lambda: self.num_nodes_waiting() > 0,
            on_stand_in=self._rejoin,
        )

    def _explain(self, error: BaseException) -> None:
        """Add to an error of a join what this handler knows."""

    def _rejoin(self) -> None:
        self._must_rejoin = True

    def _record(self, message: str, node_state: NodeState = NodeState.RUNNING, rank: int | None = None) -> None:
        wait_for_readers("dynamic_rendezvous")
        construct_and_record_rdzv_event(
            name=f"{type(self).__name__}.{sys._getframe(1).f_code.co_name}",  # noqa: SLF001 - as torch names its events
            run_id=self._run_id,
            message=message,
            node_state=node_state,
            hostname=self._local_addr or host_name(),
            pid=os.getpid(),
            rank=rank,
        )


def _first_cause(error: ChildFailedError) -> str:
    """Name the failure that came first: host, rank, and what ended the process."""
    rank, failure = error.get_first_failure()
    ended = f"exit code {failure.exitcode}" if failure.exitcode >= 0 else f"signal {failure.signal_name()}"
    who = f"rank {rank} (local rank {failure.local_rank}, pid {failure.pid}) on {socket.gethostname()}"
    text = f"{who} ended with {ended}"
    said: object = failure.message  # annotated as str by torch, and a dict when `@record` has written it
    if isinstance(said, dict):
        text += f": {said.get('message', '')}"
    return text


def _farewell(error: BaseException | None) -> tuple[str, int | None]:
    """Say why an agent goes that has met this exception, and which signal that stands for."""
    number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else getattr(error, "sigval", None)
    if isinstance(error, (KeyboardInterrupt, SignalException)) and number is not None:
        return f"its agent got {signal.Signals(number).name}", int(number)
    return f"{type(error).__name__}: {error}" if error else "its process ended", None


def _say_goodbye_at_exit(handler: NodeHandler) -> None:
    reference = weakref.ref(handler)
    pid = os.getpid()

    def goodbye() -> None:
        handler = reference()
        if handler is not None and os.getpid() == pid:
            reason, number = _farewell(getattr(sys, "last_value", None))
            handler._leave(reason, 1.0, number)  # noqa: SLF001 - this function is the handler's own

    atexit.register(goodbye)


def _agent_without_success(called: FrameType | None) -> bool:
    """Whether an agent of torch 2.6 calls, which does so before its launcher knows that workers have failed."""
    caller = called.f_back if called else None
    group = worker_group_of(caller.f_locals.get("self")) if caller else None
    return group is not None and group.state != WorkerState.SUCCEEDED
