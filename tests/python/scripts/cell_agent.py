"""An agent over a backend that is a file: ``cell_agent.py FILE NODE MIN MAX WORKERS MAX_RESTARTS -- PROGRAM ARGS``.

The variable ``LOG_DIR`` is torchrun's ``--log-dir``.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from elastic_rs import DynamicRendezvousHandler, LocalElasticAgent, RendezvousTimeout
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend


class File(RendezvousBackend):
    """A backend whose state is a file. The token is the state itself."""

    name = "file"

    def __init__(self, path: Path) -> None:
        self.path = path

    def get_state(self) -> tuple[bytes, Any] | None:
        state = self.path.read_bytes() if self.path.exists() else b""
        return (state, state) if state else None

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        with self.path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            there = self.get_state()
            if (there[1] if there else None) != token:
                return None if there is None else (*there, False)
            new = self.path.with_suffix(f".{os.getpid()}")
            new.write_bytes(state)
            new.replace(self.path)
            return state, state, True


def main() -> None:
    path, node, min_nodes, max_nodes, workers, restarts, _, program, *args = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    handler = DynamicRendezvousHandler.from_backend(
        "job",
        dist.HashStore(),
        File(Path(path)),
        int(min_nodes),
        int(max_nodes),
        node,
        RendezvousTimeout(last_call=timedelta(seconds=1)),
    )
    spec = WorkerSpec(
        role="trainer",
        local_world_size=int(workers),
        entrypoint=program,
        args=tuple(args),
        rdzv_handler=handler,
        max_restarts=int(restarts),
    )
    code = 0
    try:
        result = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=os.environ.get("LOG_DIR"))).run()
        if result.is_failed():
            error = ChildFailedError("cell_agent", result.failures)
            os.write(1, f"failed: {error.get_first_failure()}\n".encode())
            code = 1
            raise error
    except ChildFailedError:
        pass
    finally:
        handler.shutdown()
    os.write(1, f"ended {code}\n".encode())
    sys.exit(code)


if __name__ == "__main__":
    main()
