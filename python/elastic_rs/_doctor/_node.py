"""The checks of ``elastic-run doctor`` on the node itself: rules, and code that reads the facts for them."""

from __future__ import annotations

import errno
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

from elastic_rs import _elastic_rs
from elastic_rs._doctor._findings import Finding, asked, mend, note, ok
from elastic_rs.run._devices import OTHERS
from elastic_rs.run._script import other_environment

MIB = 1 << 20
PYTHON_FROM = (3, 11)
TORCH_FROM, TORCH_TO = (2, 6), (2, 15)
THREADS_OF_A_WORKER = 100
"""A rough number for PyTorch's thread pools, watchdogs, NCCL's threads and a few DataLoader workers."""
CHECK_S = 35.0
"""The core ends a health check after 30 s."""
SPARE_DESCRIPTORS = 128
"""Descriptors that an agent has open besides connections: logs, pipes, libraries."""
STRANGERS = 6 * 256
"""Descriptors that connections without a proof may take, where sessions are protected (``src/open_files.rs``)."""


def findings(
    nproc: str,
    workers: int | None,
    most_nodes: int,
    folder: str | None,
    limit_s: float,
    *,
    tunnel: bool,
    protected: bool,
    peers: str,
) -> Iterator[Finding]:
    """Check this node. The GPUs' driver may take ``limit_s``."""
    yield python(sys.version_info[:3], sys.executable)
    if other := other_environment():
        yield note("environment", other)
    yield package(_elastic_rs.VERSION, _installed("elastic_rs"))
    yield torch(*find_torch(), os.environ.get("PYTHON_EXEC"))
    yield _gpus(nproc, workers, limit_s)
    count = workers or _workers_of(nproc, limit_s)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield descriptors(soft, hard, count, most_nodes, tunnel=tunnel, protected=protected)
    yield processes(*process_limit(), count)
    yield _supervision(limit_s)
    yield stacks(_elastic_rs.why_stacks_are_unknown())
    if peers == "same-user":
        unknown = asked(_elastic_rs.why_users_are_unknown, limit_s)
        yield users(unknown.error, *(unknown.value or ("", "")))
    yield clock(time.time())
    yield from _free_spaces(None if folder == os.devnull else folder, limit_s)


def python(version: tuple[int, ...], executable: str) -> Finding:
    text = f"{'.'.join(map(str, version))}, {executable}"
    if version < PYTHON_FROM:
        return mend("python", f"{text}: too old", "install Python 3.11 or later, and elastic_rs in it")
    return ok("python", text)


def package(compiled: str, installed: str | None) -> Finding:
    """Judge this package: its Python part and its compiled part must have one version."""
    if installed is not None and installed != compiled:
        return mend(
            "elastic_rs",
            f"{installed}, but its compiled part is {compiled}: two installations are mixed",
            "pip install --force-reinstall --no-deps elastic_rs",
        )
    return ok("elastic_rs", f"{compiled}, {Path(__file__).parent}")


def torch(version: str | None, where: str | None, other_python: str | None) -> Finding:
    """Judge PyTorch, which workers need and the agent does not."""
    if other_python:
        return note("torch", f"not checked: workers run PYTHON_EXEC={other_python}, which has its own packages")
    if where is None:
        return note("torch", f"not found by {sys.executable}: elastic-run does not need it, scripts that import it do")
    found = re.match(r"(\d+)\.(\d+)", version or "")
    if found is None:
        return mend(
            "torch",
            f"{where} is not PyTorch: it has no version",
            "remove or rename it if it hides the real torch; otherwise reinstall torch",
        )
    number = (int(found[1]), int(found[2]))
    if number < TORCH_FROM:
        return mend("torch", f"{version}, {where}: older than 2.6", "pip install 'torch>=2.6'")
    if number > TORCH_TO:
        return note("torch", f"{version}, {where}: newer than 2.15, the latest that elastic_rs was tested with")
    return ok("torch", f"{version}, {where}")


def find_torch() -> tuple[str | None, str | None]:
    """Return version and folder of PyTorch, without importing it."""
    try:
        spec = util.find_spec("torch")
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return None, None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    where = folders[0] if folders else Path(spec.origin or "torch")
    try:
        # From the folder that an import would use. The metadata may be another installation's.
        text = (where / "version.py").read_text(errors="replace")
    except OSError:
        text = ""
    found = re.search(r"""^__version__[^='"]*=\s*['"]([^'"]+)""", text, re.MULTILINE)
    return found and found[1], str(where)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpus(nproc: str, workers: int | None, limit_s: float) -> Finding:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = asked(lambda: _elastic_rs.visible_gpus(None), limit_s)
    seen = asked(lambda: _elastic_rs.visible_gpus(chosen), limit_s) if there.value else there
    if there.late or seen.late:
        return mend(
            "gpus",
            f"NVIDIA's driver has not answered within {limit_s:g} s",
            "check whether nvidia-smi answers, and dmesg for Xid errors; workers would hang too",
        )
    others = [path for path in OTHERS if os.path.exists(path)]  # noqa: PTH110 - as run/_devices
    return gpus(
        there.value or 0,
        seen.value or 0,
        chosen=chosen,
        nproc=nproc,
        workers=workers,
        why_none=there.error,
        others=others,
    )


def gpus(
    there: int, seen: int, *, chosen: str | None, nproc: str, workers: int | None, why_none: str, others: list[str]
) -> Finding:
    """Judge NVIDIA's GPUs: ``there`` exist, of which ``CUDA_VISIBLE_DEVICES`` leaves ``seen``."""
    variable = "CUDA_VISIBLE_DEVICES is not set" if chosen is None else f"CUDA_VISIBLE_DEVICES is `{chosen}`"
    if there == 0 and others:
        return note("gpus", f"none of NVIDIA's, but {others[0]} exists: PyTorch is asked for the number of devices")
    if there == 0:
        text = f"none: {why_none or 'the driver knows none'}{'' if chosen is None else f'; {variable}'}"
        if nproc != "gpu":
            return ok("gpus", text)
        remedy = "install the driver, or give the container its GPUs (docker run --gpus=all); or --nproc-per-node=auto"
        return mend("gpus", f"--nproc-per-node is `gpu`, but there is {text}", remedy)
    text = f"{seen} of {there} seen by processes, {variable}"
    if seen == 0:
        remedy = (
            "unset CUDA_VISIBLE_DEVICES, or list existing devices only: the first that does not exist ends the list"
        )
        return mend("gpus", text, remedy) if nproc == "gpu" else note("gpus", text)
    if workers is not None and workers > seen:
        return note("gpus", f"{text}: fewer than the {workers} workers of --nproc-per-node")
    return ok("gpus", text)


def _workers_of(nproc: str, limit_s: float) -> int:
    """Return the number of workers that devices determine. Devices that only PyTorch can count are taken for one."""
    seen = asked(lambda: _elastic_rs.visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")), limit_s).value
    return seen or (len(os.sched_getaffinity(0)) if nproc == "auto" else 1)


def descriptors(
    soft: int, hard: int, workers: int, most_nodes: int, *, tunnel: bool = False, protected: bool = False
) -> Finding:
    """Judge the limit of open files for the node that hosts coordinator and store.

    Each agent and each worker may have a connection there, and a second one while they restart. With a tunnel, the
    connection of a worker takes three descriptors of rank 0's agent: the tunnel's two, and the store's. Where sessions
    are protected, the agent raises its limit by what connections without a proof may take. If the hard limit does not
    allow that, they take up to a quarter of the limit.
    """
    need = 2 * most_nodes * (workers * (3 if tunnel else 1) + 1) + SPARE_DESCRIPTORS
    who = f"{most_nodes} node{'s' * (most_nodes > 1)} with {workers} worker{'s' * (workers > 1)} each"
    pending = ""
    if protected and hard != resource.RLIM_INFINITY and hard < soft + STRANGERS:
        need = need * 4 // 3 + 1
        pending = ", with pending handshakes"
    text = f"{_limit(soft)} (hard limit {_limit(hard)}); the host of {who} may need {need}{pending}"
    if soft == resource.RLIM_INFINITY or soft >= need:
        return ok("descriptors", text)
    if hard == resource.RLIM_INFINITY or hard >= need:
        return mend("descriptors", text, f"ulimit -n {need} before elastic-run")
    remedy = (
        f"raise the hard limit: nofile in /etc/security/limits.conf, LimitNOFILE={need} in the systemd unit, "
        f"or docker run --ulimit nofile={need}; then ulimit -n {need}"
    )
    return mend("descriptors", text, remedy)


def processes(limit: int | None, whose: str, workers: int) -> Finding:
    """Judge the limit on processes and threads. None: no limit."""
    if limit is None:
        return ok("processes", "no limit on processes and threads")
    need = workers * THREADS_OF_A_WORKER
    text = f"{limit} processes and threads ({whose}); {workers} worker{'s' * (workers > 1)} may start {need}"
    if limit >= need:
        return ok("processes", text)
    how = f"docker run --pids-limit={need}, or the pod's podPidsLimit" if "pids" in whose else f"ulimit -u {need}"
    return mend("processes", text, f"{how}; or fewer threads: OMP_NUM_THREADS=1 and fewer DataLoader workers")


def process_limit() -> tuple[int | None, str]:
    """Return the lower of this user's limit and the container's, and where it is set."""
    limits = []
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:  # which does not hold for root
        limits.append((soft, "ulimit -u"))
    for path in ("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            limits.append((int(text), path))
    return min(limits, default=(None, ""))


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def script(name: str, why_not: str) -> Finding:
    if why_not:
        return mend("script", why_not, "copy it to this node, or correct the name; paths start at the current folder")
    return ok("script", name)


def _supervision(limit_s: float) -> Finding:
    # Without site packages, so that it starts within milliseconds.
    tried = asked(lambda: _elastic_rs.rehearse([sys.executable, "-I", "-S", "-c", ""]), limit_s)
    return supervision(tried.error, _why_no_pidfds())


def supervision(error: str, why_no_pidfds: str) -> Finding:
    """Judge whether a worker can be started and supervised. An empty ``error``: a trial process was, and has ended."""
    if error:
        remedy = (
            "allow the named system call in the sandbox or its seccomp profile (docker run --security-opt "
            "seccomp=unconfined shows whether that is the cause), or use a kernel that has it"
        )
        return mend("supervision", error, remedy)
    text = "a process was started like a worker, and its end was noticed"
    if why_no_pidfds:
        text += f"; without pidfds (pidfd_open: {why_no_pidfds}), which are not needed"
    return ok("supervision", text)


def stacks(why_unknown: str | None) -> Finding:
    """Judge whether an agent here can read where its workers stand. A job runs without that."""
    if why_unknown is not None:
        return note("stacks", f"`elastic-rs stacks` shows no Python lines of this node: {why_unknown}")
    return ok("stacks", "an agent can read the Python stacks of its workers")


def users(error: str, why_unknown: str, remedy: str) -> Finding:
    """Judge whether a worker store can refuse other users of this machine, for which the kernel has to name them."""
    if error:
        return mend("users", f"the user of a local connection cannot be looked up: {error}", "ulimit -n 65536")
    if why_unknown:
        return mend("users", f"worker stores cannot refuse other users of this machine: {why_unknown}", remedy)
    return ok("users", "the kernel names the user of each connection from this machine")


def _why_no_pidfds() -> str:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def joins(command: str | None) -> Finding:
    """Run the checks of a join: the built-in ones, then the command, if there is one. Takes 30 s at most."""
    found = asked(lambda: _elastic_rs.check_health(command), CHECK_S)
    return health(*(found.value or ("unknown", found.error)))


def health(verdict: str, text: str) -> Finding:
    """Judge what the check of a join has found."""
    if verdict == "ill":
        return mend("health", text, "mend that, or use another machine: with --health-check this one is in no world")
    if verdict == "unknown":
        return note("health", f"--health-check says nothing, so this machine would count as well: {text}")
    return ok("health", "--health-check finds nothing")


def clock(now_s: float) -> Finding:
    shown = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now_s))
    return ok("clock", f"{shown}; used for times in logs only: all waiting uses the monotonic clock")


def _free_spaces(folder: str | None, limit_s: float) -> Iterator[Finding]:
    yield _free_space("/dev/shm", "/dev/shm", limit_s, least=64 * MIB, enough=1024 * MIB)  # noqa: S108 - it is meant
    if folder is not None:
        yield _free_space("logs", folder, limit_s, least=64 * MIB, enough=256 * MIB)
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError as error:
        yield mend("temporary", str(error), "make one of them writable, or set TMPDIR to a folder that is")
        return
    yield _free_space("temporary", temporary, limit_s, least=64 * MIB, enough=256 * MIB)


def _free_space(check: str, folder: str, limit_s: float, *, least: int, enough: int) -> Finding:
    # A file system whose server is gone blocks a caller for as long as it is gone.
    answer = asked(lambda: _room_for(folder), limit_s)
    free, why_not = answer.value or (0, answer.error)
    return free_space(check, folder, free, why_not, least=least, enough=enough)


def _room_for(folder: str) -> tuple[int, str]:
    """Check the folder or, if it does not exist yet, the nearest existing folder above it."""
    where = Path(folder).absolute()
    above = (room(str(one)) for one in (where, *where.parents))
    return next(found for found in above if found != (0, os.strerror(errno.ENOENT)))


def room(folder: str) -> tuple[int, str]:
    """Return the number of free bytes, and why nothing can be written, if so."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"doctor")
            file.flush()
        found = os.statvfs(folder)
    except OSError as error:
        return 0, error.strerror or str(error)
    return found.f_bavail * found.f_frsize, ""


def free_space(check: str, folder: str, free: int, why_not: str, *, least: int, enough: int) -> Finding:
    """Judge a folder that the job writes to."""
    container = "give the container more: docker run --shm-size=8g, or an emptyDir of medium Memory in a pod"
    elsewhere = "make room there, or name another folder: TMPDIR, --log-dir"
    remedy = container if check == "/dev/shm" else elsewhere  # noqa: S108 - it is meant
    if why_not:
        return mend(check, f"{folder} cannot be written to: {why_not}", remedy)
    text = f"{folder} is writable, {free // MIB} MiB are free"
    if free < least:
        return mend(check, text, remedy)
    if free < enough:
        what = "DataLoader workers and NCCL share memory there" if check == "/dev/shm" else "logs grow"  # noqa: S108
        return note(check, f"{text}, which may not be enough, since {what}: {remedy}")
    return ok(check, text)
