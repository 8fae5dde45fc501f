"""One generation of workers on this node, as the front end knows it."""

from __future__ import annotations

import inspect
import os
import socket
from dataclasses import dataclass
from string import Template
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.utils.api import macros

from elastic_rs._elastic_rs import WorkerCommand

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import Worker, WorkerSpec

    from elastic_rs._elastic_rs import Agent
    from elastic_rs.agent._consoles import Consoles
    from elastic_rs.agent._worker_logs import ByGeneration


@dataclass
class Generation:
    """Parameters of the workers, by local rank."""

    spec: WorkerSpec
    logs_specs: ByGeneration
    envs: dict[int, dict[str, str]]
    """Variables that override the inherited environment."""
    prefixes: dict[int, str] | None
    """Prefixes of teed lines; None for PyTorch's default."""

    @property
    def args(self) -> dict[int, tuple[Any, ...]]:
        """Arguments of the workers, with ``${local_rank}`` replaced."""
        return {i: tuple(macros.substitute(list(self.spec.args), str(i))) for i in self.envs}


def line_prefixes(template: str | None, role: str, workers: list[Worker]) -> dict[int, str] | None:
    """Fill in the template of ``--log-line-prefix-template``."""
    if not template:
        return None
    known = {"role_name": role, "hostname": socket.gethostname()}
    return {
        worker.local_rank: Template(template).safe_substitute(
            known, rank=worker.global_rank, local_rank=worker.local_rank
        )
        for worker in workers
    }


def start_programs(agent: Agent, generation: Generation, consoles: Consoles) -> dict[int, int]:
    """Start the entry point, a program. Return process ids, if all could be started."""
    spec, prefixes = generation.spec, generation.prefixes
    logs = generation.logs_specs.reify(generation.envs)
    args = generation.args
    commands = [
        WorkerCommand(
            i,
            _bound([str(spec.entrypoint), *map(str, args[i])], i, spec),
            os.environ | env,
            stdout=logs.stdouts[i],
            stderr=logs.stderrs[i],
            tee_stdout=i in _teed(logs.tee_stdouts),
            tee_stderr=i in _teed(logs.tee_stderrs),
            prefix=f"[{spec.role}{i}]:" if prefixes is None else prefixes[i],
        )
        for i, env in generation.envs.items()
    ]
    error_files = {i: file for i, file in logs.error_files.items() if file != os.devnull}
    # Older versions of torch do not have them.
    out, err = getattr(spec, "duplicate_stdout_filters", None), getattr(spec, "duplicate_stderr_filters", None)
    with consoles.of(stdout=bool(_teed(logs.tee_stdouts)), stderr=bool(_teed(logs.tee_stderrs))) as (stdout, stderr):
        return agent.start(
            commands,
            error_files=error_files,
            stdout_filter=(logs.filtered_stdout, out) if out else None,
            stderr_filter=(logs.filtered_stderr, err) if err else None,
            stdout_fd=stdout,
            stderr_fd=stderr,
        )


def _teed(files: dict[int, str]) -> set[int]:
    """Return which streams of workers are shown, besides going to a file."""
    return {local_rank for local_rank, file in files.items() if file != os.devnull}


def _bound(command: list[str], local_rank: int, spec: WorkerSpec) -> list[str]:
    """Prepend the command that binds a process to a NUMA node, if requested."""
    options = getattr(spec, "numa_options", None)
    if options is None:
        return command
    from torch.numa import binding

    # The name differs between versions. 2.9 has none: it binds the thread that starts workers, which inherit that.
    names = ("_maybe_wrap_command_args_with_numa_binding", "maybe_wrap_command_with_numa_bindings")
    wrap = next((wrap for name in names if (wrap := getattr(binding, name, None))), None)
    if wrap is None:
        bind: Any = binding.maybe_temporarily_apply_numa_binding_to_current_thread  # type: ignore[attr-defined]
        with bind(gpu_index=local_rank, numa_options=options):
            cpus = sorted(os.sched_getaffinity(0))
        return ["taskset", "--cpu-list", ",".join(map(str, cpus)), *command]
    index = "device_index" if "device_index" in inspect.signature(wrap).parameters else "gpu_index"
    bound = wrap(command_args=tuple(command), numa_options=options, **{index: local_rank})
    return [str(word) for word in bound or command]
