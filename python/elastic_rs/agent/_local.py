"""``LocalElasticAgent``: PyTorch's agent with our insides.

The core decides and supervises; this class is its front end for PyTorch's launcher: it joins through the rendezvous
handler, says which programs or functions the workers are, and turns how it ended into PyTorch's results and exceptions.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import logging
import os
import signal
import socket
import sys
from typing import Any, Literal, cast

from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent as TorchLocalElasticAgent
from torch.distributed.elastic.events import record
from torch.distributed.elastic.events.api import EventSource
from torch.distributed.elastic.metrics.api import put_metric
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
)

from elastic_rs import _elastic_rs, _hang_options, _health_options
from elastic_rs._durations import Duration, as_seconds
from elastic_rs._elastic_rs import Agent, Failure, Placement, Step
from elastic_rs._exit_codes import Run, of_end
from elastic_rs._host_name import spare_torch_the_wait, wait_for_readers
from elastic_rs._python import leader_first
from elastic_rs.agent._consoles import Consoles
from elastic_rs.agent._exit_code import set_exit_code
from elastic_rs.agent._failures import failures_of
from elastic_rs.agent._functions import Functions
from elastic_rs.agent._generation import Generation, line_prefixes, start_programs
from elastic_rs.agent._metrics import measured
from elastic_rs.agent._placements import placement_of, workers_of
from elastic_rs.agent._signals import Ended, EndedProcess, Handlers, SignalError, is_torchrun, meanings
from elastic_rs.agent._worker_logs import ByGeneration, remove_temporary
from elastic_rs.rendezvous._node_handler import NodeHandler

logger = logging.getLogger("elastic_rs.agent")

TIMER_FILE = "TORCHELASTIC_TIMER_FILE"
"""Where workers find PyTorch's watchdog, if there is one."""


def _script_of(spec: WorkerSpec) -> str:
    """Return the name of what workers run, as ``_get_entrypoint_name`` in torch's ``launcher/api.py``."""
    if not isinstance(spec.entrypoint, str):
        return str(getattr(spec.entrypoint, "__qualname__", ""))
    if spec.entrypoint == sys.executable:
        return next((str(arg) for arg in spec.args if not str(arg).startswith("-")), "")
    return spec.entrypoint


class _NotGiven(enum.Enum):
    """Stands for an argument that the caller has not given."""

    NOT_GIVEN = enum.auto()

    def __repr__(self) -> str:
        return "<not given>"


class LocalElasticAgent(TorchLocalElasticAgent):
    """Runs the workers of one node, as ``torch.distributed.elastic.agent.server.LocalElasticAgent``.

    Args:
        spec: role, entry point, number of workers, restarts and rendezvous handler. ``monitor_interval`` matters only
            with another package's handler, which has to be asked for waiting nodes; nothing else is polled.
        logs_specs: where the workers' output goes.
        start_method: of ``torch.multiprocessing``, for functions: ``spawn``, ``fork``, ``forkserver``.
        exit_barrier_timeout: how long to wait for the other nodes' workers once ours have succeeded. If it is not
            given, ``--rdzv-conf exit_barrier_timeout`` says it, or there is no limit; with another package's handler,
            300 s.
        log_line_prefix_template: of teed lines; ``${role_name}``, ``${rank}``, ``${local_rank}``, ``${hostname}``.
        shutdown_timeout: time between the first signal and SIGKILL whenever workers are stopped: at a restart, at the
            end, and when the agent itself gets a signal.
        health_check_server: passed through to PyTorch's hook.
        uninterruptible_state_timeout: how long a worker may spend in uninterruptible sleep before the job is given up.
            Default: ``TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT``, else never.

    Each of the three timeouts is a ``timedelta``, or a number of seconds.
    >>> from elastic_rs import LocalElasticAgent, create_rust_c10d_handler
    >>> from torch.distributed.elastic.agent.server import WorkerSpec
    >>> from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    >>> from torch.distributed.elastic.rendezvous import RendezvousParameters
    >>> params = RendezvousParameters("rust-c10d", "127.0.0.1:0", "job", 1, 1, local_addr="127.0.0.1", is_host=True)
    >>> handler = create_rust_c10d_handler(params)
    >>> spec = WorkerSpec("worker", 2, handler, entrypoint="true", monitor_interval=1)
    >>> agent = LocalElasticAgent(spec, DefaultLogsSpecs())
    >>> agent.run().is_failed()
    False
    >>> handler.shutdown()
    True
    """

    __module__ = "elastic_rs.agent"

    def __init__(  # noqa: PLR0917 - as torch's
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        start_method: Literal["spawn", "fork", "forkserver"] = "spawn",
        exit_barrier_timeout: Duration | _NotGiven = _NotGiven.NOT_GIVEN,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: Duration = 30,
        health_check_server: Any = None,
        uninterruptible_state_timeout: Duration | None = None,
    ) -> None:
        sleep_limit = uninterruptible_state_timeout
        given: dict[str, Any] = {
            "start_method": start_method,
            "log_line_prefix_template": log_line_prefix_template,
            "shutdown_timeout": as_seconds("shutdown_timeout", shutdown_timeout),
            "health_check_server": health_check_server,
            "uninterruptible_state_timeout": (
                None if sleep_limit is None else as_seconds("uninterruptible_state_timeout", sleep_limit)
            ),
        }
        if exit_barrier_timeout is not _NotGiven.NOT_GIVEN:
            given["exit_barrier_timeout"] = as_seconds("exit_barrier_timeout", exit_barrier_timeout)
        # Older versions of torch do not have the last three.
        known = inspect.signature(TorchLocalElasticAgent.__init__).parameters
        their_init: Any = super().__init__
        their_init(spec, logs_specs, **{name: value for name, value in given.items() if name in known})
        # Untyped in torch, and None before the first round.
        self._group: Any = self._worker_group
        spare_torch_the_wait()
        self._grace_s: float = given["shutdown_timeout"]
        self._barrier_s: float | None = given.get("exit_barrier_timeout")
        self._sleep_limit_s: float = getattr(
            self, "_uninterruptible_state_timeout", given["uninterruptible_state_timeout"] or 0.0
        )
        self._on_hang = _hang_options.on_hang_of()
        self._health_check = _health_options.health_check_of()
        self._progress_log = _hang_options.progress_log_of()
        self._meanings = meanings()
        self._handler = spec.rdzv_handler if isinstance(spec.rdzv_handler, NodeHandler) else None
        self._agent: Agent | None = None
        self._placement: Placement | None = None
        self._functions: Functions | None = None
        self._consoles = Consoles()
        self._signal: SignalException | None = None
        self._has_warned = False
        self._end_class: str | None = None
        self._returncode: int | None = None
        self._handlers: Any = None
        self._generation = 0
        self._watchdog: dict[str, str] = {}
        if self._handler is not None:
            self._handler.serve_agent(spec.role, spec.local_world_size, spec.max_restarts, _script_of(spec))

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:  # noqa: ARG002 - as in torch
        """Return the workers and their placement. Its ``store`` is the one that the agents of a round share.

        With our handler that store is connected to when somebody asks here first: this agent has no use for it.

        Args:
            role: not used, as in torch.
        """
        group = self._group
        if group.store is None and self._placement is not None and self._handler is not None:
            group.store = self._handler.store_of(self._placement)
        return cast("WorkerGroup", group)

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers until they have succeeded, or the job has failed.

        Args:
            role: not used, as in torch.

        Returns:
            The state of the workers, and what each has returned, or its failure, by global rank.

        Raises:
            SignalException: a signal ended the agent; its workers have ended. Under torchrun it is ``SystemExit`` too.
            The exceptions of the rendezvous.
        """
        try:
            result = cast("RunResult", super().run(role))
        except SignalError as ended:
            text, number = str(ended.error), ended.error.sigval
            if is_torchrun():
                raise EndedProcess(text, number, self._exit_code(otherwise=128 + number)) from None
            raise Ended(text, number) from None
        except RendezvousError as error:
            set_exit_code(self._exit_code(), error)
            raise
        finally:
            if self._handlers is not None:
                self._handlers.restore(has_ended=self._signal is not None)
        if result.is_failed():
            set_exit_code(self._exit_code(), result.failures)
        return result

    def _exit_code(self, *, otherwise: int = Run.FAILED) -> int:
        if self._handler is None:
            return otherwise
        conf = self._handler.config.values()
        return of_end(conf, self._end_class, returncode=self._returncode, otherwise=otherwise)

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:  # noqa: ARG002 - as in torch: the spec's counts
        spec = self._group.spec
        wait_for_readers(self._events)
        self._agent = agent = self._new_agent(spec)
        self._handlers = Handlers(self._meanings.passed_on, agent.heard)
        # Only another package's handler has to be asked.
        interval = spec.monitor_interval if self._handler is None else None
        result: RunResult | None = None
        received: SignalException | None = None
        while result is None:
            try:
                if received is not None:
                    error, received = received, None
                    self._pass_on(agent, error)
                step = agent.next(timeout_s=interval)
                if step is not None:
                    result = self._do(agent, step)
                elif self._group.state == WorkerState.HEALTHY and spec.rdzv_handler.num_nodes_waiting() > 0:
                    agent.interrupted("the rendezvous says that nodes wait")
            except SignalException as error:
                received = error
            except RendezvousGracefulExitError as error:
                # A spare that was not needed. PyTorch's agent returns None here, on which its launcher fails.
                logger.info("%s: %s", self._who(), error)
                result = RunResult(state=WorkerState.SUCCEEDED)
        # Whoever sends a signal wants this process to end.
        if self._signal is None:
            with contextlib.suppress(SignalException):
                agent.written()
        return result

    def _pass_on(self, agent: Agent, error: SignalException) -> None:
        """Tell the core of a signal."""
        # A second signal waits until this one has been reported.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._signal = error
            agent.signal(error.sigval)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _new_agent(self, spec: WorkerSpec) -> Agent:
        job_counts = self._handler is not None and self._handler.counts_restarts
        options = _elastic_rs.AgentOptions(
            name=f"{socket.gethostname()}:{os.getpid()}",
            run_id=spec.rdzv_handler.get_run_id(),
            workers=_elastic_rs.WorkerOptions(
                entrypoint=self._group.spec.get_entrypoint_name(),
                role=spec.role,
                local_world_size=spec.local_world_size,
                max_restarts=spec.max_restarts,
                grace_s=self._grace_s,
                leader_first=leader_first(self._first_signal(), spec.entrypoint),
                forwarded_signals=self._meanings.forwarded,
                preempt=self._meanings.preempt,
                uninterruptible_sleep_s=self._sleep_limit_s,
                virtual_local_rank=getattr(spec, "virtual_local_rank", False),
                on_hang=self._on_hang,
                health_check=self._health_check,
                progress_log=self._progress_log,
            ),
            restarts_left=None if job_counts else self._remaining_restarts,
            exit_barrier_timeout_s=self._barrier_limit(),
            use_agent_store=spec.rdzv_handler.use_agent_store,
            config=None if self._handler is None else self._handler.config,
            survives=self._survives(spec),
        )
        return _elastic_rs.Agent(None if self._handler is None else self._handler.session, options)

    def _survives(self, spec: WorkerSpec) -> bool:
        """Return whether workers may survive a change of the world: programs, with a new store in each round."""
        given = spec.master_addr or spec.master_port
        keeps = self._handler is not None and not (given and not self._handler.keeps_master)
        return keeps and isinstance(spec.entrypoint, str)

    def _first_signal(self) -> object:
        return None if self._handler is None else self._handler.config.values()["first_signal"]

    def _barrier_limit(self) -> float | None:
        """Return how many seconds to wait for the other nodes' workers; None is for as long as they run."""
        if self._handler is None:
            return self._exit_barrier_timeout
        return self._handler.config.exit_barrier_timeout if self._barrier_s is None else self._barrier_s

    def _do(self, agent: Agent, step: Step) -> RunResult | None:
        """Carry out a step; a result at the end."""
        match step.kind:
            case "join":
                self._end_functions()
                if self._generation > 0:
                    self._end_helpers()
                    self._enter(WorkerState.STOPPED)
                return self._join(agent)
            case "start":
                left = self._group.spec.max_restarts - agent.restarts
                if left < self._remaining_restarts:
                    self._remaining_restarts = left
                    self._enter(WorkerState.FAILED)
                if self._handler is not None:
                    assert step.placement is not None
                    if step.placement.round != self._generation:  # these workers are started before the join
                        self._end_helpers()
                        self._take(step.placement)
                if agent.starts_standby:
                    self._start_standby(agent)
                else:
                    self._start(agent)
                    self._enter(WorkerState.HEALTHY)
            case "reap":
                assert step.local_rank is not None
                assert self._functions is not None
                returncode = self._functions.returncode(step.local_rank)
                agent.reaped(step.local_rank, returncode, reported=self._functions.traceback(step.local_rank))
            case "barrier":
                self._enter(WorkerState.SUCCEEDED)
                barrier: Any = self._exit_barrier
                barrier()
                agent.all_done()
            case _:
                return self._end(agent, step)
        return None

    def _join(self, agent: Agent) -> RunResult | None:
        group = self._group
        if self._handler is None:
            self._rendezvous(group)
            self._generation += 1
            agent.placed(placement_of(group, self._generation))
            return None
        placement = self._join_ours(self._handler, agent)
        if placement is None:
            return None
        if isinstance(placement, _elastic_rs.Failure):
            # The job failed for good while this node waited for its placement.
            self._end_class, self._returncode = self._handler.session.view().end_class, placement.returncode
            return RunResult(
                WorkerState.FAILED,
                failures=failures_of(placement, [], 0, {}, None, failed_at=None, make=ProcessFailure),
            )
        agent.placed(placement)
        return None

    @measured("SimpleElasticAgent._rendezvous")
    def _join_ours(self, handler: NodeHandler, agent: Agent) -> Placement | Failure | None:
        with self.record_duration("RENDEZVOUS"):
            try:
                placement = handler.join(agent)
            except RendezvousClosedError:
                self._end_class = handler.session.view().end_class
                raise
            except RendezvousError:
                # Before this node was in a world nobody knows whose fault it is: the command line may be wrong.
                self._end_class = "machine" if self._generation > 0 else None
                raise
        if isinstance(placement, _elastic_rs.Placement):
            self._take(placement)
        return placement

    def _take(self, placement: Placement) -> None:
        group, spec = self._group, self._group.spec
        with self.record_duration("ASSIGN_WORKER_RANKS"):
            group.workers = workers_of(placement, placement.workers_of(spec.local_world_size))
        self._generation, self._placement, group.store = placement.round, placement, None
        group.group_rank, group.group_world_size = placement.rank, placement.world_size
        group.master_addr = spec.master_addr or placement.master_addr
        group.master_port = spec.master_port or placement.master_port

    def _start_standby(self, agent: Agent) -> None:
        """Start a standby. Whatever a user's code says to that, the workers go on."""
        try:
            self._start(agent)
        except Exception as error:  # noqa: BLE001 - of the user's LogsSpecs, or a full disk
            agent.no_standby(f"{type(error).__name__}: {error}")

    @measured("LocalElasticAgent._start_workers")
    def _start(self, agent: Agent) -> None:
        group = self._group
        spec = group.spec
        envs = agent.environments()
        for env in envs.values():  # a user may have given others than the round's
            env["MASTER_ADDR"], env["MASTER_PORT"] = group.master_addr, str(group.master_port)
        if agent.starts_standby:  # its watchdog is that of the round's workers
            for env in envs.values():
                env.update(self._watchdog)
        else:
            self._setup_local_watchdog(envs=envs)
            self._setup_healthcheck()
            timer_files = [env[TIMER_FILE] for env in envs.values() if TIMER_FILE in env]
            self._watchdog = {TIMER_FILE: timer_files[0]} if timer_files else {}
        prefixes = line_prefixes(self._log_line_prefix_template, spec.role, group.workers)
        generation = Generation(spec, ByGeneration(self._logs_specs, agent.attempt), envs, prefixes)
        if isinstance(spec.entrypoint, str):
            pids, has_lines = start_programs(agent, generation, self._consoles)
        else:
            self._functions = Functions(generation, self._start_method, self._handlers)
            pids = self._functions.start()
            agent.adopt(pids, error_files=self._functions.error_files)
            has_lines = False  # PyTorch reads them
        if self._progress_log is not None and not (has_lines or self._has_warned):
            self._has_warned = True
            logger.warning(
                "%s: %s has no effect, since no line is looked at: give --tee=3, and launch a program",
                self._who(),
                _hang_options.PROGRESS_LOG,
            )
        if self._handler is not None and generation.logs_specs.run_folder is not None:
            self._handler.session.write_events(generation.logs_specs.run_folder)
        for local_rank, pid in pids.items():
            worker = group.workers[local_rank]
            worker.id = pid
            self._record_start(worker)

    def _who(self) -> str:
        """Whom a line of the log is about, as the core's lines say it."""
        run_id = f"[{self._group.spec.rdzv_handler.get_run_id()}]"
        if self._generation == 0:
            return run_id
        return f"{run_id} round {self._generation}, node rank {self._group.group_rank}"

    def _end(self, agent: Agent, step: Step) -> RunResult:
        group = self._group
        self._remaining_restarts = max(0, group.spec.max_restarts - agent.restarts)
        self._end_class = agent.end_class(step)
        match step.outcome:
            case "succeeded":
                self._enter(WorkerState.SUCCEEDED)
                # A program returns nothing, nor does a function that leaves by `os._exit(0)`: None, as PyTorch says it.
                returned = self._functions.return_values if self._functions is not None else {}
                values = {worker.global_rank: returned.get(i) for i, worker in enumerate(group.workers)}
                result = RunResult(WorkerState.SUCCEEDED, values)
                remove_temporary(self._logs_specs)
            case "not_needed":
                result = RunResult(state=WorkerState.SUCCEEDED)
            case "failed":
                self._enter(WorkerState.FAILED)
                self._returncode = None if step.failure is None else step.failure.returncode
                exits, first_rank = agent.exits(), group.workers[0].global_rank
                failures = failures_of(
                    step.failure,
                    exits,
                    first_rank,
                    agent.error_files(),
                    step.reason,
                    failed_at=agent.failed_at,
                    make=ProcessFailure,
                )
                result = RunResult(WorkerState.FAILED, failures=failures)
            case "signal":
                if self._signal is None:  # a notice: this machine is taken away
                    self._signal = SignalException(
                        f"Process {os.getpid()} leaves, since its machine is taken away", signal.SIGTERM
                    )
                raise SignalError(self._signal)
            case _:
                assert step.error is not None
                raise step.error
        self._end_functions()
        return result

    def _enter(self, state: WorkerState) -> None:
        """Take note of a state, and emit the metrics that PyTorch's agent emits at each of its looks."""
        role = self._group.spec.role
        self._group.state = state
        put_metric(f"workers.{role}.remaining_restarts", self._remaining_restarts)
        put_metric(f"workers.{role}.{state.name.lower()}", 1)

    def _end_functions(self) -> None:
        if self._functions is not None:
            self._functions.close()
            self._functions = None

    def _record_start(self, worker: Worker) -> None:
        record(self._construct_event("START", EventSource.WORKER, worker), self._events)

    @property
    def _events(self) -> str:
        """Name PyTorch's handler of this agent's events. Older versions of torch have no choice."""
        return str(getattr(self._group.spec, "event_log_handler", "null"))

    def _stop_workers(self, *_: Any, **__: Any) -> None:
        self._shutdown()

    def _shutdown(self, *_: Any, **__: Any) -> None:
        """Leave nothing behind. The core has stopped the workers, unless an exception ended :meth:`run` early."""
        self._end_helpers()
        self._placement = None
        if self._agent is not None:
            self._agent.close()
            self._agent = None
        self._consoles.end()
        self._end_functions()

    def _end_helpers(self) -> None:
        """Stop watchdog and health check. Like PyTorch's, each generation has its own."""
        # Not by PyTorch's `_shutdown`: until 2.6 that also closes the rendezvous, for everybody.
        for name in ("_worker_watchdog", "_health_check_server"):
            helper: Any = getattr(self, name, None)
            if helper is not None:
                helper.stop()
                setattr(self, name, None)

    def _record_worker_events(self, result: RunResult) -> None:
        # A spare that was not needed has no worker events, even if it had workers in an earlier round.
        if result.return_values or result.failures:
            super()._record_worker_events(result)
