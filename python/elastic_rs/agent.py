"""``LocalElasticAgent``: PyTorch's agent with our insides.

The core decides and runs the workers; this class is its front end for PyTorch's launcher: it joins through the rendezvous
handler, says which programs or functions the workers are, and turns how it all ended into PyTorch's results and exceptions.
"""

from __future__ import annotations

import inspect
import logging
import os
import signal
import socket
import threading
from string import Template
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic import events
from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, Worker, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent as TorchLocalElasticAgent
from torch.distributed.elastic.events import EventSource
from torch.distributed.elastic.metrics import put_metric
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import _terminate_process_handler
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError
from torch.distributed.elastic.utils import macros

from elastic_rs import _elastic_rs
from elastic_rs._failures import failures_of
from elastic_rs._functions import Functions
from elastic_rs._worker_logs import ByGeneration, remove_temporary
from elastic_rs.rendezvous import RustC10dRendezvousHandler

if TYPE_CHECKING:
    from elastic_rs._elastic_rs import Agent, Placement, Step

__all__ = ["LocalElasticAgent"]

logger = logging.getLogger(__name__)


class LocalElasticAgent(TorchLocalElasticAgent):
    """Runs the workers of one node, as ``torch.distributed.elastic.agent.server.LocalElasticAgent``.

    Args:
        spec: role, entry point, number of workers, restarts and rendezvous handler. ``monitor_interval`` matters only with
            another handler than ours, which has to be asked for waiting nodes; nothing else is polled.
        logs_specs: where the workers' output goes.
        start_method: of ``torch.multiprocessing``, for entry points that are functions: ``spawn``, ``fork``, ``forkserver``.
        exit_barrier_timeout: seconds to wait for the other nodes' workers once ours have succeeded.
        log_line_prefix_template: of teed lines; ``${role_name}``, ``${rank}``, ``${local_rank}``, ``${hostname}``.
        shutdown_timeout: seconds between the first signal and SIGKILL whenever workers are stopped: at a restart, at the
            end, and when the agent itself gets a signal.
        health_check_server: passed through to PyTorch's hook.
        uninterruptible_state_timeout: seconds a worker may spend in uninterruptible sleep before the job is given up.
            Default: ``TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT``, else never.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        start_method: str = "spawn",
        exit_barrier_timeout: float = 300,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: int = 30,
        health_check_server: Any = None,
        uninterruptible_state_timeout: float | None = None,
    ) -> None:
        given = {
            "start_method": start_method,
            "exit_barrier_timeout": exit_barrier_timeout,
            "log_line_prefix_template": log_line_prefix_template,
            "shutdown_timeout": shutdown_timeout,
            "health_check_server": health_check_server,
            "uninterruptible_state_timeout": uninterruptible_state_timeout,
        }
        # Older versions of torch do not have the last three.
        known = inspect.signature(TorchLocalElasticAgent.__init__).parameters
        super().__init__(spec, logs_specs, **{name: value for name, value in given.items() if name in known})
        self._shutdown_timeout = shutdown_timeout
        self._sleep_limit_s: float = getattr(self, "_uninterruptible_state_timeout", 0.0)
        self._handler = spec.rdzv_handler if isinstance(spec.rdzv_handler, RustC10dRendezvousHandler) else None
        self._agent: Agent | None = None
        self._functions: Functions | None = None
        self._signal: SignalException | None = None
        self._error_files: dict[int, str] = {}
        if self._handler is not None:
            self._handler.serve_agent(spec.role, spec.local_world_size, spec.max_restarts)

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        spec = self._worker_group.spec
        logger.info("[%s] starting workers for entrypoint: %s", spec.role, spec.get_entrypoint_name())
        _handle_signals()
        self._agent = agent = self._new_agent(spec)
        poll = spec.monitor_interval if self._handler is None else None
        result: RunResult | None = None
        while result is None:
            try:
                step = agent.next(timeout_s=poll)
                if step is not None:
                    result = self._do(agent, step)
                elif self._worker_group.state == WorkerState.HEALTHY and spec.rdzv_handler.num_nodes_waiting() > 0:
                    agent.interrupted("the rendezvous says that nodes wait")
            except SignalException as error:
                logger.warning("received %s: stopping the workers", signal.Signals(error.sigval).name)
                self._signal = error
                agent.signal(error.sigval)
            except RendezvousGracefulExitError as error:
                # A spare that was not needed. PyTorch's agent returns None here, on which its launcher fails.
                logger.info("[%s] %s", spec.role, error)
                return RunResult(state=WorkerState.SUCCEEDED)
        return result

    def _new_agent(self, spec: WorkerSpec) -> Agent:
        job_counts = self._handler is not None and self._handler.counts_restarts
        return _elastic_rs.Agent(
            session=None if self._handler is None else self._handler.session,
            name=f"{socket.gethostname()}:{os.getpid()}",
            run_id=spec.rdzv_handler.get_run_id(),
            role=spec.role,
            local_world_size=spec.local_world_size,
            max_restarts=spec.max_restarts,
            restarts_left=None if job_counts else self._remaining_restarts,
            grace_s=self._shutdown_timeout,
            exit_barrier_timeout_s=self._exit_barrier_timeout,
            use_agent_store=spec.rdzv_handler.use_agent_store,
            virtual_local_rank=getattr(spec, "virtual_local_rank", False),
            uninterruptible_sleep_s=self._sleep_limit_s,
        )

    def _do(self, agent: Agent, step: Step) -> RunResult | None:
        """Carry out a step; a result at the end."""
        match step.kind:
            case "join":
                self._enter(WorkerState.STOPPED if self._worker_group.group_rank is not None else WorkerState.INIT)
                self._end_functions()
                if (ended := self._join(agent)) is not None:
                    return ended
            case "start":
                assert step.placement is not None
                self._remaining_restarts = self._worker_group.spec.max_restarts - agent.restarts
                self._start(agent, step.placement)
                self._enter(WorkerState.HEALTHY)
            case "reap":
                assert step.local_rank is not None
                assert self._functions is not None
                agent.reaped(step.local_rank, self._functions.returncode(step.local_rank))
            case "barrier":
                self._enter(WorkerState.SUCCEEDED)
                self._exit_barrier()
                agent.all_done()
            case _:
                return self._end(agent, step)
        return None

    def _join(self, agent: Agent) -> RunResult | None:
        wg = self._worker_group
        if self._handler is None:
            self._rendezvous(wg)
            agent.placed(self._foreign_placement())
            return None
        placement = self._handler.join()
        if isinstance(placement, _elastic_rs.Failure):
            # The job failed for good while this node waited for its place.
            return RunResult(WorkerState.FAILED, failures=failures_of(placement, [], 0, {}, None))
        first_rank, first_role_rank, world_size, role_world_size = placement.workers or (0, 0, 0, 0)
        wg.workers = [
            Worker(i, first_rank + i, first_role_rank + i, world_size, role_world_size)
            for i in range(wg.spec.local_world_size)
        ]
        wg.group_rank, wg.group_world_size = placement.rank, placement.world_size
        wg.master_addr, wg.master_port = placement.master_addr, placement.master_port
        agent.placed(placement)
        return None

    def _foreign_placement(self) -> Placement:
        """Say what PyTorch's way of assigning ranks, through the handler's store, has come to."""
        wg = self._worker_group
        first = wg.workers[0]
        self._rounds = getattr(self, "_rounds", 0) + 1
        return _elastic_rs.Placement(
            round=self._rounds,
            rank=wg.group_rank,
            world_size=wg.group_world_size,
            master_addr=wg.master_addr,
            master_port=wg.master_port,
            first_rank=first.global_rank,
            first_role_rank=first.role_rank,
            worker_count=first.world_size,
            role_worker_count=first.role_world_size,
        )

    def _start(self, agent: Agent, placement: Placement) -> None:
        wg = self._worker_group
        spec = wg.spec
        envs = {worker.local_rank: agent.environment(placement, worker.local_rank) for worker in wg.workers}
        args = {i: tuple(macros.substitute(list(spec.args), str(i))) for i in envs}
        prefixes = self._prefixes()
        self._setup_local_watchdog(envs=envs)
        self._setup_healthcheck()
        logs_specs = ByGeneration(self._logs_specs, placement.round)
        first_rank = wg.workers[0].global_rank
        if isinstance(spec.entrypoint, str):
            pids = self._start_programs(agent, logs_specs, envs, args, prefixes, first_rank)
        else:
            self._functions = Functions(spec, logs_specs, envs, args, prefixes, self._start_method)
            try:
                pids = self._functions.start()
            except SignalException:
                raise
            except Exception as error:
                agent.not_started(0, f"{type(error).__name__}: {error}", first_rank=first_rank)
                return
            self._error_files = self._functions.error_files
            agent.adopt(pids, first_rank=first_rank, error_files=self._error_files)
        for local_rank, pid in pids.items():
            wg.workers[local_rank].id = pid
            event = self._construct_event("START", EventSource.WORKER, wg.workers[local_rank])
            events.record(event, spec.event_log_handler)

    def _start_programs(
        self,
        agent: Agent,
        logs_specs: LogsSpecs,
        envs: dict[int, dict[str, str]],
        args: dict[int, tuple[Any, ...]],
        prefixes: dict[int, str] | None,
        first_rank: int,
    ) -> dict[int, int]:
        spec = self._worker_group.spec
        logs = logs_specs.reify(envs)
        commands = [
            _elastic_rs.WorkerCommand(
                i,
                _bound([spec.entrypoint, *map(str, args[i])], i, spec),
                os.environ | env,
                stdout=logs.stdouts[i],
                stderr=logs.stderrs[i],
                tee_stdout=logs.tee_stdouts.get(i, os.devnull) != os.devnull,
                tee_stderr=logs.tee_stderrs.get(i, os.devnull) != os.devnull,
                prefix=f"[{spec.role}{i}]:" if prefixes is None else prefixes[i],
            )
            for i, env in envs.items()
        ]
        self._error_files = {i: file for i, file in logs.error_files.items() if file != os.devnull}
        out, err = getattr(spec, "duplicate_stdout_filters", None), getattr(spec, "duplicate_stderr_filters", None)
        return agent.start(
            commands,
            first_rank=first_rank,
            error_files=self._error_files,
            stdout_filter=(logs.filtered_stdout, out) if out else None,
            stderr_filter=(logs.filtered_stderr, err) if err else None,
        )

    def _prefixes(self) -> dict[int, str] | None:
        if not self._log_line_prefix_template:
            return None
        template = Template(self._log_line_prefix_template)
        role, host = self._worker_group.spec.role, socket.gethostname()
        return {
            w.local_rank: template.safe_substitute(
                role_name=role, rank=w.global_rank, local_rank=w.local_rank, hostname=host
            )
            for w in self._worker_group.workers
        }

    def _end(self, agent: Agent, step: Step) -> RunResult:
        wg = self._worker_group
        self._remaining_restarts = max(0, wg.spec.max_restarts - agent.restarts)
        match step.outcome:
            case "succeeded":
                self._enter(WorkerState.SUCCEEDED)
                values = self._functions.return_values if self._functions else dict.fromkeys(range(len(wg.workers)))
                result = RunResult(WorkerState.SUCCEEDED, {wg.workers[i].global_rank: v for i, v in values.items()})
                remove_temporary(self._logs_specs)
            case "not_needed":
                result = RunResult(state=WorkerState.SUCCEEDED)
            case "failed":
                self._enter(WorkerState.FAILED)
                exits, first_rank = agent.exits(), wg.workers[0].global_rank
                failures = failures_of(step.failure, exits, first_rank, self._error_files, step.reason)
                result = RunResult(WorkerState.FAILED, failures=failures)
            case "signal":
                assert self._signal is not None
                raise _Ended(self._signal)
            case _:
                assert step.error is not None
                raise step.error
        self._end_functions()
        return result

    def _enter(self, state: WorkerState) -> None:
        """Take note of a state, and emit the metrics that PyTorch's agent emits at each of its looks."""
        wg = self._worker_group
        wg.state = state
        put_metric(f"workers.{wg.spec.role}.remaining_restarts", self._remaining_restarts)
        put_metric(f"workers.{wg.spec.role}.{state.name.lower()}", 1)

    def _end_functions(self) -> None:
        if self._functions is not None:
            self._functions.close()
            self._functions = None

    def _stop_workers(self, *_: Any, **__: Any) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Leave nothing behind. The core has stopped the workers by then, unless an exception ended :meth:`run` early."""
        super()._shutdown(death_sig, timeout)  # watchdog and health check
        # Workers end with it.
        self._agent = None
        self._end_functions()

    def _record_worker_events(self, result: RunResult) -> None:
        if self._worker_group.group_rank is not None:  # a spare has had no workers
            super()._record_worker_events(result)


class _Ended(SignalException, SystemExit):
    """A signal ended the agent. The process's exit code, if nobody catches it, is 128 + the signal's number."""

    def __init__(self, error: SignalException) -> None:
        super().__init__(str(error), error.sigval)
        self.code = 128 + error.sigval


def _bound(command: list[str], local_rank: int, spec: WorkerSpec) -> list[str]:
    """Put what binds a process to a NUMA node before its command, if that is asked for."""
    options = getattr(spec, "numa_options", None)
    if options is None:
        return command
    from torch.numa import binding

    bound = binding._maybe_wrap_command_args_with_numa_binding(  # noqa: SLF001 - torch's own subprocess handler calls it
        tuple(command), device_index=local_rank, numa_options=options
    )
    return [str(word) for word in bound]


def _handle_signals() -> None:
    """Let the signals that torchrun lists in the environment raise ``SignalException``, as PyTorch does for its workers."""
    if threading.current_thread() is not threading.main_thread():
        logger.warning("signals are not handled: the agent does not run in the main thread")
        return
    for name in os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT").split(","):
        try:
            signal.signal(signal.Signals[name.strip()], _terminate_process_handler)
        except (KeyError, ValueError, OSError) as error:
            logger.warning("signal `%s` cannot be handled: %s", name, error)
