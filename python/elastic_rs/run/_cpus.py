"""How many CPUs this node's workers may use, and how many threads each of them gets (``--omp-threads``)."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from elastic_rs.run._usage import UsageError

logger = logging.getLogger("elastic_rs.agent")

FLAG = "--omp-threads"
VARIABLE = "OMP_NUM_THREADS"


def allowed_cpus() -> int:
    """Return the number of CPUs that this process may run on (``sched_getaffinity``)."""
    return len(os.sched_getaffinity(0))


def usable_cpus(proc: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> int:
    """Return how many CPUs this process can keep busy: its affinity, or the quota of its cgroups if that is less."""
    return max(1, min([allowed_cpus(), *_quotas(proc, root)]))


def _quotas(proc: str, root: str) -> list[int]:
    """Return the CPUs' worth of time of each cgroup around this process, of version 2 or 1."""
    quotas = []
    for line in _read(proc).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounted = f"{root}/cpu" if controllers else root
        # In a container the path may be one that only its host has; the mount's own root is the container's then.
        while True:
            quotas += _quota(f"{mounted}{path}", version=1 if controllers else 2)
            if not path.strip("/"):
                break
            path = path.rpartition("/")[0]
    return quotas


def _quota(folder: str, version: int) -> list[int]:
    if version == 1:
        texts = [_read(f"{folder}/cpu.cfs_quota_us").strip(), _read(f"{folder}/cpu.cfs_period_us").strip()]
    else:
        texts = _read(f"{folder}/cpu.max").split()
    try:
        quota, period = map(int, texts)
    except ValueError:
        return []  # `max`, or no such file: no quota here
    return [quota // period] if quota > 0 and period > 0 else []


def _read(path: str) -> str:
    with contextlib.suppress(OSError), Path(path).open(encoding="utf-8", errors="replace") as file:
        return file.read(65536)
    return ""


def check_omp_threads(given: str | None) -> None:
    """Refuse a value of the flag that is neither ``auto`` nor a number.

    Raises:
        UsageError: it is neither.
    """
    number = given is not None and given.isascii() and given.isdecimal() and len(given) < 6 and int(given) > 0
    if given not in {None, "auto"} and not number:
        raise UsageError(
            f"{FLAG} is `{given}`, must be `auto` (the CPUs that this node may use, divided by its workers) or a "
            "number from 1 to 99999"
        )


def omp_threads(given: str | None, workers: int) -> dict[str, str]:
    """Return ``OMP_NUM_THREADS`` for this node's workers. Without the flag: 1 for several workers, as with torchrun."""
    if given is None and (VARIABLE in os.environ or workers <= 1):
        return {}
    cpus = usable_cpus()
    share = max(1, cpus // workers)
    if given is not None:
        return {VARIABLE: str(share) if given == "auto" else given}
    better = f"; {FLAG}=auto sets {share} here ({cpus} usable CPUs)" if share > 1 else ""
    logger.warning(
        "%s is not set: each of the %d workers gets 1, so that they do not overload this machine%s",
        VARIABLE,
        workers,
        better,
    )
    return {VARIABLE: "1"}
