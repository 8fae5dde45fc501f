"""An agent of one node without a coordinator. Its workers start warm or cold.

    python warm_agent.py MODULES WORKERS RESTARTS LOGS COMMAND...

MODULES are the template's imports, or `-` for no template. LOGS is a folder, or `-` for this process's streams.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from elastic_rs import _elastic_rs
from elastic_rs._warm import _plan

FAILED = 1


def main() -> int:
    modules, workers, restarts, logs, *command = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="agent: %(message)s", stream=sys.stdout)
    _elastic_rs.reset_log_levels()
    template = None if modules == "-" else _template(command, modules.split(","))
    options = _elastic_rs.AgentOptions(
        name="agent",
        run_id="warm",
        workers=_elastic_rs.WorkerOptions(
            entrypoint=command[0],
            role="default",
            local_world_size=int(workers),
            max_restarts=int(restarts),
            grace_s=30.0,
            leader_first=False,
            uninterruptible_sleep_s=0.0,
            virtual_local_rank=False,
            forwarded_signals=[],
            preempt=_elastic_rs.PreemptOptions(
                notice_signal=None, notice_file=None, notice_command=None, deadline_s=30.0, signal=None
            ),
            on_hang=None,
            health_check=None,
            progress_log=None,
        ),
        restarts_left=int(restarts),
        exit_barrier_timeout_s=None,
        use_agent_store=True,
        config=None,
        survives=False,
    )
    agent = _elastic_rs.Agent(None, options)
    signal.signal(signal.SIGTERM, _stop)
    round_ = 0
    while True:
        try:
            step = agent.next()
        except _StoppedError:
            agent.signal(signal.SIGTERM)
            continue
        assert step is not None
        match step.kind:
            case "join":
                round_ += 1
                store = _elastic_rs.StoreServer.listen("127.0.0.1", 0)
                agent.placed(_place(round_, int(workers), store.port))
            case "start":
                _start(agent, workers=int(workers), logs=logs, command=command, template=template)
            case "barrier":
                agent.all_done()
            case _:
                break
    for ended in agent.exits():
        _say(f"agent: worker {ended.local_rank} ({ended.pid}) ended with {ended.returncode}")
    if template is not None:
        template.end()
    return 0 if step.outcome == "succeeded" else FAILED


def _say(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # in one piece: workers write there too


class _StoppedError(Exception):
    pass


def _stop(*_: object) -> None:
    raise _StoppedError


def _template(command: list[str], modules: list[str]) -> _elastic_rs.Template | None:
    plan = _plan.plan(command, modules)
    if isinstance(plan, str):
        _say(f"agent: no template: {plan}")
        return None
    return _elastic_rs.Template(command, begin=plan.begin, fixed=plan.fixed, env=dict(os.environ), what=plan.what)


def _place(round_: int, workers: int, port: int) -> _elastic_rs.Placement:
    return _elastic_rs.Placement(
        round=round_,
        rank=0,
        world_size=1,
        master_addr="127.0.0.1",
        master_port=port,
        first_rank=0,
        first_role_rank=0,
        worker_count=workers,
        role_worker_count=workers,
    )


def _start(
    agent: _elastic_rs.Agent,
    *,
    workers: int,
    logs: str,
    command: list[str],
    template: _elastic_rs.Template | None,
) -> None:
    commands, environments = [], agent.environments()
    for local_rank in range(workers):
        env = os.environ | environments[local_rank]
        if "TEST_WORKER_VARIABLE" in env:
            name, _, value = env["TEST_WORKER_VARIABLE"].partition("=")
            env[name] = value
        files: dict[str, Any] = {}
        if logs != "-":
            folder = Path(logs)
            files = {name: folder / f"{local_rank}-{agent.restarts}.{name}" for name in ("stdout", "stderr")}
        words = [word.replace("${local_rank}", str(local_rank)) for word in command]
        commands.append(_elastic_rs.WorkerCommand(local_rank, words, env, **files))
    pids = agent.start(commands, error_files={}, template=template)
    _say(f"agent: started {' '.join(map(str, pids.values()))}")


if __name__ == "__main__":
    sys.exit(main())
