"""Fixtures and helpers for tests with real torchrun processes."""

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from helpers.procs import Job, Process

SCRIPTS = Path(__file__).parents[1] / "scripts"
WORKER = SCRIPTS / "worker.py"
FAMILY = SCRIPTS / "family.py"


Start = Callable[..., Process]


@functools.cache
def _flags_of_torchrun() -> set[str]:
    from torch.distributed.run import get_args_parser

    return {flag for action in get_args_parser()._actions for flag in action.option_strings}


def shutdown_timeout(seconds: int, agent: str) -> list[str]:
    """Return the option, or nothing for a torchrun that does not have it. Its grace is 30 s."""
    known = agent == "run" or "--shutdown-timeout" in _flags_of_torchrun()
    return [f"--shutdown-timeout={seconds}"] if known else []


def older_lacks(*flags: str) -> None:
    """Skip the test if the installed torchrun does not have these flags."""
    if lacking := [flag for flag in flags if flag not in _flags_of_torchrun()]:
        pytest.skip(f"this torchrun has no {', '.join(lacking)}")


RENDEZVOUS_ALONE = {"test_host", "test_host_of_its_own", "test_listening", "test_rendezvous", "test_other_users"}
"""Files that try the rendezvous or its host, which any agent uses alike. With PyTorch's agent they are long."""
CORE_ALONE = {"test_host", "test_host_of_its_own", "test_process_1", "test_silent_names", "test_without_pidfd"}
"""Files that try what the core does alike for torchrun and for elastic-run. With torchrun they are long."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        agent, file = params.get("agent"), item.path.stem
        if (agent == "torch" and file in RENDEZVOUS_ALONE) or (agent == "rust" and file in CORE_ALONE):
            item.add_marker(pytest.mark.long)


@pytest.fixture(params=["rust", "torch", "run"])
def agent(request: pytest.FixtureRequest) -> str:
    """Return the launcher: torchrun with our agent, torchrun with PyTorch's agent on our rendezvous, or elastic-run."""
    return str(request.param)


@pytest.fixture
def endpoints(free_port: Callable[[], int]) -> list[str]:
    """Return three endpoints."""
    return [f"127.0.0.1:{free_port()}" for _ in range(3)]


@pytest.fixture
def start(job: Job, port: int, agent: str) -> Start:
    """Return a function that starts one node: ``start(last octet of its address, worker arguments, nnodes=...)``.

    ``options`` are further options of torchrun, ``wrong`` options of ``scripts/launch.py``, and ``under`` is a command
    before it. ``by`` selects another launcher than ``agent`` for this node.
    """

    def start(
        number: int,
        *worker: str | Path,
        nnodes: str,
        nproc: int = 1,
        restarts: int = 3,
        conf: str = "last_call_timeout=1",
        script: Path = WORKER,
        run_id: str = "job",
        endpoint: str = "127.0.0.1",
        local_addr: bool = True,
        options: Sequence[str] = (),
        wrong: Sequence[str] = (),
        under: Sequence[str] = (),
        env: dict[str, str] | None = None,
        by: str = agent,
    ) -> Process:
        assert not (wrong and by == "run"), "scripts/launch.py runs torchrun only"
        run = "elastic_rs.run" if by == "run" else "torch.distributed.run"
        module = [str(SCRIPTS / "launch.py"), *wrong] if wrong else ["-m", run]
        command = [
            *under,
            sys.executable,
            *module,
            f"--nnodes={nnodes}",
            f"--nproc-per-node={nproc}",
            f"--max-restarts={restarts}",
            "--rdzv-backend=rust-c10d",
            f"--rdzv-endpoint={endpoint if ':' in endpoint else f'{endpoint}:{port}'}",
            f"--rdzv-id={run_id}",
            f"--rdzv-conf={conf},agent={'torch' if by == 'torch' else 'rust'}",
            *([f"--local-addr=127.0.0.{number}"] if local_addr else []),
            *options,
            str(script),
            *map(str, worker),
        ]
        return job.start(command, name=f"node{number}", env={"ELASTIC_RS_LOG": "info", **(env or {})})

    return start
