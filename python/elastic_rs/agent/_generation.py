"""One generation of workers on this node, as the front end knows it."""

from __future__ import annotations

import functools
import os
import socket
from dataclasses import dataclass
from string import Template
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.utils.api import macros

from elastic_rs._elastic_rs import WorkerCommand
from elastic_rs._numa import cpus_of

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

    @functools.cached_property
    def cpus(self) -> dict[int, list[int]]:
        """The CPUs to which workers are bound, by local rank. Empty if nobody has asked for it (``--numa-binding``)."""
        options = getattr(self.spec, "numa_options", None)  # older versions of torch have none
        if options is None:
            return {}
        return dict(enumerate(cpus_of(options.affinity_mode.value, len(self.envs))))


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


def start_programs(agent: Agent, generation: Generation, consoles: Consoles) -> tuple[dict[int, int], bool]:
    """Start the entry point, a program. Return process ids, if all could be started, and whether a stream is teed."""
    spec, prefixes = generation.spec, generation.prefixes
    logs = generation.logs_specs.reify(generation.envs)
    args = generation.args
    commands = [
        WorkerCommand(
            i,
            [str(spec.entrypoint), *map(str, args[i])],
            os.environ | env,
            stdout=logs.stdouts[i],
            stderr=logs.stderrs[i],
            tee_stdout=i in _teed(logs.tee_stdouts),
            tee_stderr=i in _teed(logs.tee_stderrs),
            prefix=f"[{spec.role}{i}]:" if prefixes is None else prefixes[i],
            cpus=generation.cpus.get(i, []),
        )
        for i, env in generation.envs.items()
    ]
    error_files = {i: file for i, file in logs.error_files.items() if file != os.devnull}
    # Older versions of torch do not have them.
    out, err = getattr(spec, "duplicate_stdout_filters", None), getattr(spec, "duplicate_stderr_filters", None)
    tees_out, tees_err = bool(_teed(logs.tee_stdouts)), bool(_teed(logs.tee_stderrs))
    with consoles.of(stdout=tees_out, stderr=tees_err) as (stdout, stderr):
        pids = agent.start(
            commands,
            error_files=error_files,
            stdout_filter=(logs.filtered_stdout, out) if out else None,
            stderr_filter=(logs.filtered_stderr, err) if err else None,
            stdout_fd=stdout,
            stderr_fd=stderr,
        )
    return pids, tees_out or tees_err


def _teed(files: dict[int, str]) -> set[int]:
    """Return which streams of workers are shown, besides going to a file."""
    return {local_rank for local_rank, file in files.items() if file != os.devnull}
