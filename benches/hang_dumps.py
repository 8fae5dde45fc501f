"""Check what is written down before workers are killed: one dump for each, older than the kill, and no later kill.

    python benches/hang_dumps.py [--graces 1000]

Jobs of 20 workers that do not end by SIGTERM, in ten ways (hang_dumps_worker.py), by turns with a grace of 2 s, in
which it is written down where each stands, and one of 1 s, in which nothing is. SIGTERM goes to the agent. A kill is
late by the time from that moment and the grace to the end of the worker, as its pidfd shows it: the ends of 20
processes that are killed at once are a part of it.
"""

from __future__ import annotations

import argparse
import os
import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import hang_dumps_worker as worker
from measuring import RESULTS, keep, machine

OUTPUT = RESULTS / "hang_dumps.json"
WORKERS = 20
GRACE_S, GRACE_WITHOUT_S = 2, 1  # only from 2 s on there is a dump
LIMIT_S = 60.0
MOST_LATER_S = 0.05


def kind_of(local_rank: int) -> str:
    return worker.KINDS[local_rank % len(worker.KINDS)].__name__


def children_of(pid: int) -> list[int]:
    """Return the children of all threads of a process."""
    return [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]


def ended_at(pidfds: dict[int, int], until: float) -> dict[int, tuple[float, float]]:
    """Wait for the ends of these processes. Return when each was seen, on the monotonic and on the wall clock."""
    poll = select.poll()
    ranks = {pidfd: rank for rank, pidfd in pidfds.items()}
    for pidfd in ranks:
        poll.register(pidfd, select.POLLIN)
    seen: dict[int, tuple[float, float]] = {}
    while len(seen) < len(ranks) and time.monotonic() < until:
        for pidfd, _ in poll.poll((until - time.monotonic()) * 1e3):
            seen[ranks[pidfd]] = time.monotonic(), time.time()
            poll.unregister(pidfd)
    return seen


def stop_a_job(folder: Path, grace_s: int) -> tuple[list[float], list[str]]:
    """Return by how many seconds each kill was later than the grace, and what was wrong."""
    ready = folder / "ready"
    ready.mkdir()
    command = [
        *(sys.executable, "-m", "elastic_rs.run", "--standalone", f"--nproc-per-node={WORKERS}"),
        *(f"--log-dir={folder / 'logs'}", f"--shutdown-timeout={grace_s}", worker.__file__, str(ready)),
    ]
    with (folder / "log").open("wb") as log:
        agent = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        pids = workers_of(agent, ready)
        pidfds = {rank: os.pidfd_open(pid) for rank, pid in pids.items()}
        began = time.monotonic()
        agent.send_signal(signal.SIGTERM)
        seen = ended_at(pidfds, began + LIMIT_S)
        agent.wait(LIMIT_S)
    finally:
        agent.kill()  # its guards end its workers
    for pidfd in pidfds.values():
        os.close(pidfd)
    wrong = [f"rank {rank} ({kind_of(rank)}) has not ended" for rank in set(pids) - set(seen)]
    if grace_s == GRACE_S:
        wrong += [text for rank in seen if (text := wrong_dump(folder / "logs", rank, pids[rank], seen[rank][1]))]
    return [at - began - grace_s for at, _ in seen.values()], wrong


def workers_of(agent: subprocess.Popen[bytes], ready: Path) -> dict[int, int]:
    """Wait until all workers are where they stay. Return their processes by rank."""
    until = time.monotonic() + LIMIT_S
    while len(list(ready.iterdir())) < WORKERS:
        if time.monotonic() > until or agent.poll() is not None:
            sys.exit("error: the workers have not started")
        time.sleep(0.02)
    time.sleep(0.5)  # from the file on
    pids = {}
    for pid in [child for guard in children_of(agent.pid) for child in children_of(guard)]:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        pids[next(int(entry[11:]) for entry in environ if entry.startswith(b"LOCAL_RANK="))] = pid
    if len(pids) != WORKERS:
        sys.exit(f"error: the agent has the workers {pids}")
    return pids


def wrong_dump(logs: Path, rank: int, pid: int, killed: float) -> str | None:
    """Return what is wrong with the dump of a worker."""
    kind, dumps = kind_of(rank), list(logs.glob(f"*/attempt_0/{rank}/hang-*.txt"))
    if len(dumps) != 1:
        return f"{kind}: {len(dumps)} dumps"
    age = killed - dumps[0].stat().st_mtime
    if age <= 0:
        return f"{kind}: its dump is {-age:.3f} s younger than its end"
    text = dumps[0].read_text()
    state = re.search(rf"^pid {pid} \(.*\), state (\w)", text, re.MULTILINE)
    if state is None or state[1] != worker.STATES.get(kind, "S"):
        return f"{kind}: its dump has the state {state and state[1]}"
    return None if f"  {kind} ({worker.__file__}:" in text else f"{kind}: its dump does not have its frame:\n{text}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graces", type=int, default=1000, help="graces with a dump (1000)")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    late: dict[int, list[float]] = {GRACE_S: [], GRACE_WITHOUT_S: []}
    wrong: Counter[str] = Counter()
    load = [os.getloadavg()[0]]
    for _ in range(max(1, args.graces // WORKERS)):
        for grace_s, kills in late.items():
            with tempfile.TemporaryDirectory(prefix="elastic_rs-") as folder:
                ended, found = stop_a_job(Path(folder), grace_s)
            kills.extend(ended)
            wrong.update(found)
    load.append(os.getloadavg()[0])
    count = len(late[GRACE_S])
    print(
        f"{count} graces of {GRACE_S} s that ended in SIGKILL: {count - wrong.total()} right dumps, older than the kill"
    )
    for text, times in wrong.items():
        print(f"  {times} times {text}")
    for grace_s, kills in late.items():
        kills.sort()
        median, tail, most = statistics.median(kills), kills[len(kills) * 99 // 100], kills[-1]
        beyond = sum(kill > MOST_LATER_S for kill in kills)
        print(
            f"grace of {grace_s} s: killed {median * 1e3:.0f} ms later (median), {tail * 1e3:.0f} ms (99 %), "
            f"{most * 1e3:.0f} ms at most; {beyond} of {len(kills)} more than {MOST_LATER_S * 1e3:.0f} ms"
        )
    result: dict[str, Any] = {"machine": machine(), "load": load, "late_s": {str(k): v for k, v in late.items()}}
    keep(result | {"wrong": dict(wrong)}, args.output)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
