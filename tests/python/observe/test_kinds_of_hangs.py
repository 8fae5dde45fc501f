"""Kinds of hangs, of a random rank at a random step: who holds the others up, and where, is named.

``ELASTIC_RS_HANG_RUNS=5`` runs each 5 times. Before PyTorch 2.8 gloo has no flight recorder: who holds others up is a
guess then, from where the ranks stand.

Gloo ends the other kinds by itself: a rank that ends, or that sends more bytes than others ask for (another type, much
larger tensors, larger ones in a broadcast or an all_gather), makes its peers fail. test_story.py has these.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import time
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers.observe import ask

if TYPE_CHECKING:
    from helpers.procs import Job

TRAINS = Path(__file__).parents[1] / "scripts" / "hangs_in_training.py"
SOURCE = TRAINS.read_text().splitlines()
RUNS = int(os.environ.get("ELASTIC_RS_HANG_RUNS", "1"))
RANKS = 4
LIMIT_S = 60.0
RECORDS = tuple(map(int, version("torch").split(".")[:2])) >= (2, 8)
"""Gloo's collectives are recorded."""

pytestmark = [pytest.mark.torchrun, pytest.mark.long]


@dataclass(frozen=True)
class Named:
    """What is said of a kind."""

    kind: str
    cause: str
    """Of the second line, behind the rank."""
    at: str | None = None
    """A part of the line of the script at which the rank stands. None: it stands in none, or goes on to any."""
    victims: int = RANKS
    """Only ranks below this one hang so."""
    stands_alone: bool = True
    """No other rank stands at its line."""


LATE = r"has not entered all_reduce #\d+ of default_pg \(\[3\] Float\)"
MOST = r"the 3 others all_reduce \[3\] Float"
KINDS = {
    "stop": Named("stopped", r"was stopped by a signal \(state T\)", "signal.SIGSTOP)"),
    "sleep": Named("not_entered", rf"{LATE}; it sleeps", "time.sleep(0.05)"),
    "gil": Named("gil_held", "holds the GIL in C", "PyDLL"),
    "re": Named("gil_held", "holds the GIL in C", "re.match"),
    "order": Named("mismatch", rf"entered broadcast \[7\] Float as #\d+ of default_pg, {MOST}", "too early"),
    "operation": Named("mismatch", rf"entered broadcast \[3\] Float as #\d+ of default_pg, {MOST}", "not all_reduce"),
    "uneven": Named("mismatch", rf"entered barrier as #\d+ of default_pg, {MOST}", "dist.barrier()"),
    "size": Named("mismatch", rf"entered all_reduce \[2\] Float as #\d+ of default_pg, {MOST}", stands_alone=False),
    "swallowed": Named(
        "mismatch",
        rf"entered all_reduce \[5\] Float as #\d+ of default_pg, {MOST}",
        "whatever was raised",
        stands_alone=False,
    ),
    "ended": Named("ended", "has ended; another thread keeps the process alive"),
    "loader": Named("not_entered", r"waits for its data worker \d+: read_shard ", "time.sleep(0.05)"),
    "loader_stopped": Named(
        "not_entered",
        r"waits for its data worker \d+, which was stopped by a signal \(state T\)",
        "only the data worker",
    ),
    "input": Named("not_entered", f"{LATE}; it reads standard input", "input()"),
    "pdb": Named("not_entered", f"{LATE}; it reads standard input", "pdb.set_trace()"),
    "fifo": Named("not_entered", rf"{LATE}; it sleeps in openat\(/.*/fifo", "fifo.read_text()"),
    "lock": Named("not_entered", f"{LATE}; it sleeps in futex", "the second time"),
    "thread": Named("not_entered", f"{LATE}; it sleeps in futex", "which the other thread holds"),
    "busy": Named("not_entered", f"{LATE}(; it computes)?$", "itertools.count()"),
    "full_pipe": Named("not_entered", rf"{LATE}; it sleeps in write\(pipe\)", "os.write("),
    "crossed": Named(
        "crossed", "entered group b before a, other than in its last 3 turns", "in either order", 2, stands_alone=False
    ),
    "messages": Named("not_entered", "has not (come to a message|entered all_reduce)", "time.sleep(0.05)", 3),
    "first_use": Named(
        "not_entered", r"has not entered all_reduce #1 of late \(\[2\] Float\); it sleeps", "time.sleep(0.05)", 3
    ),
    "new_group": Named(
        "not_entered", "has not come to a message or a new process group; it sleeps", "time.sleep(0.05)"
    ),
    "tp_dp": Named("not_entered", r"has not entered all_reduce #\d+ of (tp|dp)[01]", "time.sleep(0.05)"),
}


@pytest.mark.parametrize("run", range(RUNS))
@pytest.mark.parametrize("name", KINDS)
def test_who_hangs_is_named(job: Job, port: int, tmp_path: Path, name: str, run: int) -> None:
    kind = KINDS[name] if RECORDS else without_recorder(KINDS[name])
    chosen = random.Random(f"{name} {run}")
    rank, step = chosen.randrange(kind.victims), chosen.randrange(8, 20)
    command = [
        *(sys.executable, "-m", "elastic_rs.run", "--nnodes=1", f"--nproc-per-node={RANKS}"),
        *("--rdzv-backend=rust-c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job"),
        *(f"--log-dir={tmp_path / 'logs'}", "--warm-start", "--hang-timeout=5"),
        *(str(TRAINS), name, str(rank), str(step)),
    ]
    node = job.start(command, name="node", env={"GO": str(tmp_path / "go")})
    node.line(r"training stands still for [\d.]+ s ")
    hang = found(port)
    shown = "\n".join(hang["lines"])
    assert (hang["kind"], hang["ranks"]) == (kind.kind, [rank]), shown
    assert re.search(rf"(^|\s)rank {rank} {kind.cause}", hang["lines"][1]), shown
    if kind.at is not None:
        assert f"{TRAINS.name}:{line_of(kind.at)}" in hang["lines"][2].split(), shown
    job.kill_leftovers()


def without_recorder(named: Named) -> Named:
    """Return what is said if nobody knows the collectives."""
    if not named.stands_alone:
        pytest.skip("without a flight recorder nobody is named: other ranks stand at the same line")
    match named.kind:
        case "mismatch":
            return replace(named, kind="odd", cause="stands elsewhere than the 3 others")
        case "not_entered" if "message" not in named.cause:
            return replace(named, kind="outside", cause="is outside of torch.distributed, the others are inside")
    return named


def found(port: int) -> Any:
    """Return what `status` says of the hang, once it is one."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        answer = ask("status", f"127.0.0.1:{port}", "--json")
        assert answer.returncode == 0, answer
        hang = json.loads(answer.stdout)["state"].get("hang")
        if hang and hang["found"]:
            return hang
        assert time.monotonic() < deadline, answer.stdout


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(SOURCE, 1) if text in line)
