"""The jobs of ``tools/gpu_check.py``: launchers, reports of their workers, and memory in use on devices."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("gpu_worker.py")
LIMIT_S = 300.0
LOOK_S = 0.002
MARKER = "ELASTIC_RS_GPU_CHECK"
STOCK, TORCHRUN, COLD, WARM = "torchrun", "torchrun, rust-c10d", "elastic-run", "elastic-run, warm"
LAUNCHERS = {
    STOCK: ["torch.distributed.run", "--rdzv-backend=c10d"],
    TORCHRUN: ["torch.distributed.run", "--rdzv-backend=rust-c10d"],
    COLD: ["elastic_rs.run", "--rdzv-backend=c10d"],
    WARM: ["elastic_rs.run", "--rdzv-backend=c10d", "--warm-start"],
}


class CheckError(Exception):
    """A check failed or could not be made. The message says why."""


@dataclass(frozen=True)
class Event:
    """A report of a worker."""

    what: str
    at: float
    rank: int
    pid: int
    value: str


class Job:
    """A job of one node. Leaving the ``with`` block ends it and its descendants."""

    def __init__(
        self,
        launcher: Sequence[str],
        folder: Path,
        workers: int,
        task: Sequence[object],
        port: int = 0,
    ) -> None:
        self.id, self.workers, self._unread = uuid.uuid4().hex, workers, b""
        pipe, self._log = folder / f"{self.id}.pipe", folder / f"{self.id}.log"
        os.mkfifo(pipe)
        self._reader = os.open(pipe, os.O_RDWR)
        command = [sys.executable, "-m", *launcher, f"--rdzv-endpoint=localhost:{port}", f"--rdzv-id={self.id}"]
        command += [f"--nproc-per-node={workers}", str(WORKER), str(pipe), *map(str, task)]
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "ELASTIC_RS_LOG": "info", MARKER: self.id}
        self.began = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def events(self, what: str, meanwhile: Callable[[], None] | None = None) -> list[Event]:
        """Wait until all workers have reported ``what``. Returns all reports since. ``meanwhile`` is called often."""
        found: list[Event] = []
        deadline = time.monotonic() + LIMIT_S
        while sum(event.what == what for event in found) < self.workers:
            if meanwhile is not None:
                meanwhile()
            if select.select([self._reader], [], [], LOOK_S if meanwhile else 0.2)[0]:
                *lines, self._unread = (self._unread + os.read(self._reader, 1 << 16)).split(b"\n")
                found += map(_event, lines)
                continue
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise CheckError(f"no `{what}` of all {self.workers} workers; the log ends with: {self.tail()}")
        return found

    def wait(self) -> float:
        """Wait for the job's success, and return the seconds since its start."""
        try:
            code = self._process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise CheckError(f"it has not ended in {LIMIT_S:.0f} s; the log ends with: {self.tail()}") from None
        if code != 0:
            raise CheckError(f"exit code {code}; the log ends with: {self.tail()}")
        return time.monotonic() - self.began

    def line(self, pattern: str) -> re.Match[str]:
        """Wait until a line of the output matches, and return that."""
        deadline = time.monotonic() + LIMIT_S
        while (found := re.search(pattern, self.log(), re.MULTILINE)) is None:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise CheckError(f"no line matches `{pattern}`; the log ends with: {self.tail()}")
            time.sleep(0.05)
        return found

    def log(self) -> str:
        """Return the output of the launcher and the workers."""
        return self._log.read_text(errors="replace")

    def tail(self) -> str:
        """Return the end of the output, in one line."""
        return " | ".join(self.log().strip().splitlines()[-5:])

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        for pid in _marked(self.id):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.close(self._reader)


def _event(line: bytes) -> Event:
    what, at, rank, pid, value = line.decode().split()
    return Event(what, int(at) * 1e-9, int(rank), int(pid), value)


def _marked(job: str) -> list[int]:
    needle, found = f"{MARKER}={job}".encode(), []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and needle in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


@dataclass(frozen=True)
class Restart:
    """Times after the kill of a worker, in seconds."""

    given_back: float | None
    """When the killed worker's memory was free again. None: not before the next workers were ready."""
    up: float
    """When the first of the next workers ran its first line."""
    ready: float
    """When all of the next workers had a context and the model on the device."""


def restarts(job: Job, count: int, used: Callable[[list[int]], int], size: int) -> list[Restart]:
    """Kill a worker ``count`` times, and measure. ``used`` returns the bytes that these or all processes have."""
    first = job.events("ready")
    pids = _pids(first)
    found = []
    for number in range(count):
        full = used(pids)
        seen: list[float] = []

        def look(pids: list[int] = pids, full: int = full, seen: list[float] = seen) -> None:
            # The agent stops all workers after one has died, so the memory of all must be freed.
            if not seen and used(pids) <= full - 0.9 * size * len(pids):
                seen.append(time.monotonic())

        victim = pids[number % len(pids)]
        began = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        events = job.events("ready", look)
        ups = [event.at for event in events if event.what == "up"]
        ready = max(event.at for event in events if event.what == "ready")
        found.append(Restart(seen[0] - began if seen else None, min(ups) - began, ready - began))
        pids = _pids(events)
    return found


def _pids(events: list[Event]) -> list[int]:
    return [event.pid for event in sorted(events, key=lambda event: event.rank) if event.what == "ready"]


class DeviceMemory:
    """The memory in use on all GPUs of this machine, from the driver's library (NVML). It opens no CUDA context."""

    def __init__(self) -> None:
        try:
            self._library: Any = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise CheckError(f"NVIDIA's management library cannot be loaded: {error}") from None
        self._do("nvmlInit_v2")
        count = ctypes.c_uint()
        self._do("nvmlDeviceGetCount_v2", ctypes.byref(count))
        self._devices = []
        for number in range(count.value):
            device = ctypes.c_void_p()
            self._do("nvmlDeviceGetHandleByIndex_v2", number, ctypes.byref(device))
            self._devices.append(device)

    def used(self, _: list[int]) -> int:
        """Return the bytes in use, of all processes."""
        total = 0
        for device in self._devices:
            memory = (ctypes.c_ulonglong * 3)()  # total, free, used
            self._do("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
            total += memory[2]
        return total

    def driver(self) -> str:
        """Return the driver's version."""
        text = ctypes.create_string_buffer(96)
        self._do("nvmlSystemGetDriverVersion", text, ctypes.c_uint(len(text)))
        return text.value.decode()

    def _do(self, name: str, *args: Any) -> None:
        code = getattr(self._library, name)(*args)
        if code != 0:
            raise CheckError(f"NVIDIA's management library: {name} returned {code}")


def resident(pids: list[int]) -> int:
    """Return the main memory of these processes, which stands for a device's memory in a rehearsal."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    return total
