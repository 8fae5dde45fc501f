"""Compare elastic_rs with torchrun on a machine with NVIDIA GPUs. Prints a table and writes docs/gpu.md.

    make gpu-check                                    # builds elastic_rs, and uses the PyTorch of `make setup`
    make gpu-check GPU_PYTHON=/opt/venv/bin/python    # builds nothing: that Python has torch and elastic_rs
    make gpu-check GPU_CHECK_ARGS='--repetitions 10'

No network is needed. Nothing else should use the GPUs meanwhile. ``--device cpu`` is a rehearsal: it shows that this
program works, and writes no page. Exit codes: 0, all checks passed; 1, a check failed; 2, the command line is invalid;
3, there is no GPU, and nothing was done.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from gpu_jobs import (
    COLD,
    LAUNCHERS,
    STOCK,
    TORCHRUN,
    WARM,
    CheckError,
    DeviceMemory,
    Event,
    Job,
    Restart,
    resident,
    restarts,
)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "gpu.md"
PASSED, FAILED, NO_GPU = 0, 1, 3
GIB = 1 << 30
MIB = 1 << 20
REHEARSAL = "rehearsal, no GPU"
COUNT = "from elastic_rs.run._devices import count_of; print(count_of({kind!r}))"
# A module that initialises the device at import, after which no fork can use it. Without a device it starts a thread.
INITIALISES = {
    "cuda": "import torch\ntorch.zeros(1, device='cuda')\n",
    "cpu": "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n",
}
REFUSAL = "workers are started cold"
# The name of torch's implementation by which it is chosen, and what the table calls it. In torch 2.15 `nccl` is another
# implementation than before, and `nccl-legacy` is the one before.
NCCL2, LEGACY = "nccl2", "nccl-legacy"
# How much more memory may be in use after the last resize in place than after the first one. A communicator that is not
# freed would take more each time.
GROWTH = 32 * MIB
# How often groups are made again in place.
RESIZES = 10
# Where the last rank of the job that hangs stands, and what the others have entered.
STANDS = re.compile(r"stand_still gpu_worker\.py:\d+")
COLLECTIVE = re.compile(r"all_reduce #\d+ of default_pg")


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    theirs: str
    """The result of torchrun or PyTorch."""
    ours: str
    passed: bool


class Check:
    """All checks, on one kind of device."""

    def __init__(self, kind: str, workers: int, folder: Path, repetitions: int, size: int) -> None:
        self.kind, self.workers, self.folder = kind, workers, folder
        self.repetitions, self.size = repetitions, size
        self._took: dict[str, float] = {}
        self._used = DeviceMemory().used if kind == "cuda" else resident

    def rows(self) -> Iterator[Row]:
        """Yield the row of each check, and make the check on demand. A check that cannot be made is a row too."""
        for what, check in (
            ("devices counted", self._count),
            ("doctor", self._doctor),
            *((f"all-reduce, {name}", lambda name=name: self._all_reduce(name)) for name in (TORCHRUN, COLD, WARM)),
            ("warm start refused after initialisation", self._refused),
            *(
                (f"resizes in place, {label}", lambda backend=backend, label=label: self._resized(backend, label))
                for backend, label in resized_backends(self.kind, *torchs_nccl())
            ),
            *(
                (f"a hang, {label}", lambda backend=backend, label=label: self._hang(backend, label))
                for backend, label in resized_backends(self.kind, *torchs_nccl())
            ),
        ):
            yield _told(what, check)
        measured: dict[str, list[Restart] | CheckError] = {}
        for name in (STOCK, COLD, WARM):
            try:
                measured[name] = self._restarts(name)
            except CheckError as error:
                measured[name] = error
        for name in (COLD, WARM):
            yield from _restart_rows(name, measured[STOCK], measured[name])

    def _count(self) -> Row:
        kind = "gpu" if self.kind == "cuda" else "cpu"
        ours = _output([sys.executable, "-c", COUNT.format(kind=kind)])
        if self.kind == "cuda":
            theirs = _output([sys.executable, "-c", "import torch; print(torch.cuda.device_count())"])
        else:
            ask = "from torch.distributed.run import determine_local_world_size as ask; print(ask('cpu'))"
            theirs = _output([sys.executable, "-c", ask])
        return Row(f"`--nproc-per-node={kind}`", theirs, ours, passed=theirs == ours)

    def _doctor(self) -> Row:
        kind = "gpu" if self.kind == "cuda" else "cpu"
        result = subprocess.run(
            [sys.executable, "-m", "elastic_rs.run", "doctor", f"--nproc-per-node={kind}"],
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        found = re.search(r"^(?:ok|note|mend) +gpus +(.*)$", result.stdout, re.MULTILINE)
        text = found[1] if found else f"no line about GPUs: {result.stdout[-200:]}{result.stderr[-200:]}"
        theirs = str(self.workers) if self.kind == "cuda" else "0"
        passed = text.startswith(f"{theirs} of ") if self.kind == "cuda" else found is not None
        return Row("`elastic-run doctor`: GPUs", theirs, text, passed=passed)

    def _all_reduce(self, name: str) -> Row:
        # The first job of all reads PyTorch from the disk, which takes any launcher longer.
        for one in [*([] if self._took else [STOCK]), *({STOCK, name} - self._took.keys())]:
            with self._job(one, "all-reduce") as job:
                events = job.events("reduced")
                kinds = {event.value for event in events if event.what == "up"}
                self._took[one] = job.wait()
                if kinds != {"warm" if one == WARM else "cold"}:
                    raise CheckError(f"{one}: its workers were started {', '.join(sorted(kinds))}: {job.tail()}")
        backend = "NCCL" if self.kind == "cuda" else "Gloo"
        what = f"{backend} all-reduce, {self.workers} ranks, {name}: start to end"
        return Row(what, f"{self._took[STOCK]:.1f} s", f"{self._took[name]:.1f} s", passed=True)

    def _refused(self) -> Row:
        module = "gpu_check_initialises"
        (self.folder / f"{module}.py").write_text(INITIALISES[self.kind])
        launcher = [*LAUNCHERS[COLD], f"--warm-modules={module}"]
        with Job(launcher, self.folder, self.workers, ["all-reduce", self.kind, self.size]) as job:
            kinds = {event.value for event in job.events("reduced") if event.what == "up"}
            job.wait()
            said = next((line for line in job.log().splitlines() if REFUSAL in line), "nothing said")
        passed = kinds == {"cold"} and REFUSAL in said
        text = f"workers started {', '.join(sorted(kinds))}: {said.rpartition(' WARNING ')[2]}"
        return Row("`--warm-start` of a module that has initialised the device", "-", text, passed=passed)

    def _resized(self, backend: str, label: str) -> Row:
        in_place = "nccl" if self.kind == "cuda" else "gloo"
        launcher = [*LAUNCHERS[COLD], f"--in-place={in_place}", f"--max-restarts={RESIZES}"]
        with Job(launcher, self.folder, self.workers, ["resize", self.kind, self.size, backend, RESIZES]) as job:
            events = job.events("resized")
            job.wait()
        if wrong := [event.value for event in events if event.what == "wrong"]:
            raise CheckError(f"wrong sums or weights: {', '.join(wrong)}")
        if len({event.pid for event in events}) > self.workers:
            raise CheckError("workers were restarted, not kept")
        return resize_row(events, label, self.workers)

    def _hang(self, backend: str, label: str) -> Row:
        launcher, task = [*LAUNCHERS[COLD], "--hang-timeout=5"], ["hang", self.kind, self.size, backend]
        # With port 0 a job of one node has a token that nobody else knows.
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        with Job(launcher, self.folder, self.workers, task, port) as job:
            job.events("trains")
            job.line("training stands still for ")
            endpoint = f"localhost:{port}"
            status, seen = _answer("status", endpoint), _answer("stacks", endpoint)
            rank = _answer("stacks", endpoint, f"--rank={self.workers - 1}")
        return hang_row(label, self.workers, status["state"]["hang"], seen, rank)

    def _restarts(self, name: str) -> list[Restart]:
        with self._job(name, "restart", f"--max-restarts={self.repetitions}") as job:
            return restarts(job, self.repetitions, self._used, self.size)

    def _job(self, name: str, mode: str, *flags: str) -> Job:
        return Job([*LAUNCHERS[name], *flags], self.folder, self.workers, [mode, self.kind, self.size])


def resized_backends(kind: str, names: Collection[str], goes_back: bool) -> list[tuple[str, str]]:
    """Return the backends whose groups are made again in place, each with its name in the table.

    Args:
        kind: of the device, ``cuda`` or ``cpu``.
        names: the backends that this torch registers. One before 2.15 has no ``nccl-legacy``: its ``nccl`` is that.
        goes_back: whether ``TORCH_DIST_USE_NCCL2=0`` is set, with which ``nccl`` is ``nccl-legacy`` in 2.15 too.
    """
    if kind != "cuda":
        return [("gloo", "Gloo")]
    if LEGACY not in names:
        return [("cpu:gloo,cuda:nccl", "NCCL")]
    first = LEGACY if goes_back else NCCL2
    return [
        ("cpu:gloo,cuda:nccl", f"NCCL (`nccl`, that is `{first}`)"),
        (f"cpu:gloo,cuda:{LEGACY}", f"NCCL (`{LEGACY}`)"),
    ]


def torchs_nccl() -> tuple[Collection[str], bool]:
    """Return the backends of this torch, and whether its ``nccl`` is the one before 2.15."""
    # torch 2.15 registers them when they are used.
    names = {one.name for one in metadata.entry_points(group="torch.distributed.backends")}
    return names, os.environ.get("TORCH_DIST_USE_NCCL2") == "0"


def resize_row(events: list[Event], backend: str, workers: int = 1) -> Row:
    """Return the row of rank 0, which has told each ``world``, with its memory, and when each one ``fails``."""
    worlds = [event for event in events if event.what == "world" and event.rank == 0]
    fails = [event.at for event in events if event.what == "fails" and event.rank == 0]
    _, first, *_, last = [int(event.value) for event in worlds]
    took = [after.at - failed for failed, after in zip(fails, worlds[1:], strict=True)]
    more = (last - first) / MIB
    text = f"{_median(took)}; memory after the last: {more:+.0f} MiB"
    ranks = "1 rank" if workers == 1 else f"{workers} ranks"
    what = f"{backend} group ended and made again in place, {ranks}, {len(fails)} times"
    return Row(what, "-", text, passed=last - first <= GROWTH)


def hang_row(
    backend: str, workers: int, hang: dict[str, Any] | None, seen: dict[str, Any], rank: dict[str, Any]
) -> Row:
    """Return the row of a job whose last rank stands still.

    Args:
        backend: of its group, as the table calls it.
        workers: how many ranks it has. One alone waits for a kernel, and not in a collective.
        hang: what ``status`` says of it.
        seen: what ``stacks`` says of all ranks.
        rank: what ``stacks`` says of the last rank.
    """
    wrong, last = [], workers - 1
    lines = [] if hang is None else hang["lines"]
    named = [last] if workers > 1 else []  # nobody waits for one that is alone
    if hang is None or hang["ranks"] != named or not any(map(STANDS.search, lines)):
        wrong.append(f"`status` does not say where rank {last} stands: {' / '.join(lines) or 'no hang'}")
    of_last = next((line for line in seen["lines"] if re.match(rf"1 rank +{last} ", line)), "")
    if not STANDS.search(of_last):
        wrong.append(f"`stacks` does not say where rank {last} stands: {' / '.join(seen['lines'])}")
    others = [line for line in seen["lines"] if line != of_last]
    if workers > 1 and not (others and all(map(COLLECTIVE.search, others))):
        wrong.append(f"`stacks` does not name the collective of the others: {' / '.join(seen['lines'])}")
    entered = [group["last"] for group in rank["view"]["groups"]]
    if not any(number >= 10 for number in entered):
        wrong.append(f"the last rank has entered 10 collectives, and its recorder knows of {entered}")
    named_s = 0.0 if hang is None else hang["still_s"]
    text = "; ".join(wrong) or f"named after {named_s:.1f} s: {' '.join(of_last.split())}"
    what = (
        f"{backend} job of {workers} ranks, the last one sleeps" if workers > 1 else f"{backend} rank behind a kernel"
    )
    return Row(what, "-", text, passed=not wrong)


def _answer(*question: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "elastic_rs", *question, "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    try:
        answer: dict[str, Any] = json.loads(result.stdout)
    except ValueError:
        raise CheckError(f"`elastic-rs {' '.join(question)}` says {result.stdout}{result.stderr}") from None
    return answer


def _told(what: str, check: object) -> Row:
    try:
        return check()  # type: ignore[operator]
    except (CheckError, OSError, ValueError, subprocess.SubprocessError) as error:
        return Row(what, "-", f"not carried out: {error}", passed=False)


def _restart_rows(name: str, theirs: list[Restart] | CheckError, ours: list[Restart] | CheckError) -> Iterator[Row]:
    """Return the rows of restarts. torchrun's results are only shown; ours may fail the check."""
    if isinstance(ours, CheckError):
        yield Row(f"restart, {name}", "-", f"not carried out: {ours}", passed=False)
        return
    stock = [] if isinstance(theirs, CheckError) else theirs
    back = [one.given_back for one in ours]
    in_time = all(one.given_back is not None and one.given_back <= one.up for one in ours)
    yield Row(
        f"killed worker's memory is free, {name}", _median([one.given_back for one in stock]), _median(back), in_time
    )
    yield Row(
        f"next worker's first line, {name}",
        _median([one.up for one in stock]),
        _median([one.up for one in ours]),
        passed=True,
    )
    what = f"next workers have context and model, {name}"
    yield Row(what, _median([one.ready for one in stock]), _median([one.ready for one in ours]), passed=True)


def _median(values: list[float | None] | list[float]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "not seen" if values else "-"
    text = f"{statistics.median(known) * 1e3:.0f} ms (at most {max(known) * 1e3:.0f})"
    return text if len(known) == len(values) else f"{text}, {len(values) - len(known)} of {len(values)} not seen"


def _output(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if result.returncode != 0:
        raise CheckError((result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1])
    return result.stdout.split()[-1]


def table(rows: list[Row]) -> str:
    """Return the table as Markdown, which is also readable on a terminal."""
    lines = [("check", "torchrun, PyTorch", "elastic_rs", "passed"), ("---",) * 4]
    lines += [(row.what, row.theirs, row.ours, "yes" if row.passed else "**no**") for row in rows]
    escaped = [[cell.replace("|", r"\|").replace("\n", " ") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


INTRODUCTION = """\
# On NVIDIA GPUs

`make gpu-check` runs elastic_rs beside torchrun on a machine with NVIDIA GPUs, prints a table, and writes this page.
It needs no network. It works with one GPU. With several, jobs have a rank for each. With `GPU_PYTHON=/path/to/python`
it builds nothing, and uses the torch and the elastic_rs of that Python. Nothing else should use the GPUs meanwhile,
because memory is watched for whole devices. `python tools/gpu_check.py` ends with 0 if all checks passed, with 1 if one
did not, and with 3 if there is no GPU. For the last two `make` ends with 2.

The checks, and what it takes to pass them:

- **Devices.** `--nproc-per-node=gpu` and the doctor count what `torch.cuda.device_count()` counts.
- **All-reduce.** An NCCL job of ten sums, each of which is checked: under torchrun with c10d, torchrun with
  `rust-c10d`, `elastic-run`, and `elastic-run --warm-start`, whose workers initialise CUDA after the fork. The last
  one's fork server first imports what a first optimizer would, too: that pays from the first restart on.
- **Refusal.** A module of `--warm-start` initialises CUDA. Workers are executed without a fork server, and the log says
  why.
- **In place.** The script asks ten times for another world (`in_place=nccl`), on all ranks. NCCL's communicator is
  aborted, the state restored, and another communicator made, in the same processes. The sums and the model are right
  each time, no worker is restarted, and after the tenth time no more than 32 MiB more are in use than after the
  first. From torch 2.15 on this is done with each implementation of NCCL: `nccl`, which is `nccl2` there (before, and
  with `TORCH_DIST_USE_NCCL2=0`, it is the other one), and `nccl-legacy`.
- **Hang.** The last rank sleeps, and the others wait for it in a collective, with each implementation of NCCL. With
  `--hang-timeout=5`, the terminal and `elastic-rs status` name the rank, `elastic-rs stacks` also its line and the
  number of the collective in which the others wait. NCCL refuses two ranks on one GPU. So with one GPU a single rank
  waits for a kernel that spins: its line, and the collectives that it has entered before, must be shown.
- **Memory.** A worker with a CUDA context and a model of 1 GiB is killed. The memory of all workers is free again
  before the next worker runs its first line.
- **Restarts.** The time from the kill to the next worker's first line, and to the moment when all workers have a
  context and the model again: median and maximum.

## What torch's source says about abort

Read in the wheel of torch 2.15.0. It has headers, Python files and binaries, but no `.cpp` files: what their
functions do inside was not read. Paths are below `torch/`; `c10d/` is `include/torch/csrc/distributed/c10d/`.

`nccl-legacy` is the class `ProcessGroupNCCL`, made by `_create_nccl_process_group` in
`distributed/distributed_c10d.py`:

- `c10d/ProcessGroupNCCL.hpp` declares `abort() override`, "similar to ncclCommAbort". `lib/libtorch_cuda.so` has the
  text "Launching ProcessGroupNCCL abort asynchronously."
- Two threads may end the process: the watchdog, by `TORCH_NCCL_ASYNC_ERROR_HANDLING` (`ErrorHandlingMode`; 0 is
  `NoHandling`), and the monitor of its heartbeat, by `TORCH_NCCL_ENABLE_MONITORING`.

`nccl`, which is `nccl2`, is the class `ProcessGroupNCCL2`, made by `_create_nccl2_process_group`.
`_register_builtin_nccl_backend` takes the other one with `TORCH_DIST_USE_NCCL2=0`:

- `c10d/nccl2/ProcessGroupNCCL.hpp` declares `abort() override`, and of `abortNcclComm` it says: "This NEVER
  terminates the process -- a user-initiated abort()/shutdown() must be survivable". `commAbort` is in
  `c10d/nccl2/NcclApi.hpp`.
- `handleWatchdogFailure` and `abortProcess` may end the process, also by `TORCH_NCCL_ASYNC_ERROR_HANDLING`. No header
  of `c10d/nccl2/` names a monitor.
- `stopWatchdog` joins the watchdog's thread, and detaches it when it is called in that thread.

Both are aborted by `_abort_process_group` (`distributed/distributed_c10d.py`), which is private. It calls `abort()`
of each group, between the begin and the end of a coalesced call if the default group's backend supports that, so that
aborts of several communicators do not wait for one another. Its documentation asks for
`TORCH_NCCL_ASYNC_ERROR_HANDLING=0`, which elastic_rs sets ([elastic-in-place.md](elastic-in-place.md#limits)).
"""


def page(rows: list[Row], facts: list[str]) -> str:
    """Return the text of docs/gpu.md. Without rows, it says that the check has not been run."""
    if not rows:
        return (
            f"{INTRODUCTION}\n**It has not been run yet:** no machine with a GPU was at hand. There are no figures.\n"
        )
    heading = "\n".join(f"- {fact}" for fact in facts)
    return f"{INTRODUCTION}\n## Result\n\n{heading}\n\n{table(rows)}\n"


def facts_of(repetitions: int, size: int) -> list[str]:
    """Return the conditions of the figures: GPU and driver, versions, machine, date and command."""
    import torch

    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    gpus = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return [
        f"{time.strftime('%Y-%m-%d', time.gmtime())}, {gpus}, driver {DeviceMemory().driver()}",
        f"torch {torch.__version__} (CUDA {torch.version.cuda}), elastic_rs {metadata.version('elastic_rs')}, "
        f"Python {platform.python_version()}",
        f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} cores",
        f"`make gpu-check GPU_CHECK_ARGS='--repetitions {repetitions} --model-bytes {size}'`",
    ]


def why_no_gpu() -> str:
    """Return why PyTorch can use no GPU here, or an empty text if it can."""
    import torch
    from elastic_rs import _elastic_rs

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is not built for CUDA"
    if torch.cuda.is_available() and torch.cuda.device_count() > 0:
        return ""
    try:
        count = _elastic_rs.visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    except RuntimeError as error:
        return str(error)
    return f"the driver knows {count}, but torch {torch.__version__} (CUDA {torch.version.cuda}) can use none"


def main(argv: list[str] | None = None) -> int:
    """Run the checks, print the table, write the page, and return the exit code."""
    parser = argparse.ArgumentParser(prog="gpu_check.py", description="elastic_rs on NVIDIA GPUs, beside torchrun")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal without a GPU")
    parser.add_argument("--repetitions", type=int, default=5, metavar="N", help="kills of a worker per launcher (5)")
    parser.add_argument("--model-bytes", type=int, default=GIB, metavar="N", help="size of the model (1 GiB)")
    parser.add_argument("--output", type=Path, default=PAGE, metavar="FILE", help="the page (docs/gpu.md)")
    args = parser.parse_args(argv)
    if args.repetitions < 1 or args.model_bytes < MIB:
        parser.error(f"--repetitions and --model-bytes must be at least 1 and {MIB}")
    if args.device == "cuda":
        if why := why_no_gpu():
            print(f"gpu-check: there is no GPU to be checked: {why}; nothing was run, {args.output} is unchanged")
            return NO_GPU
        import torch

        workers = torch.cuda.device_count()
    else:
        print(f"gpu-check: {REHEARSAL}: figures are those of the CPU, and no page is written", flush=True)
        workers = 2
    rows = []
    try:
        facts = facts_of(args.repetitions, args.model_bytes) if args.device == "cuda" else []
    except CheckError as error:
        print(f"gpu-check: NOT OK: {error}; nothing was run")
        return FAILED
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        for row in Check(args.device, workers, Path(folder), args.repetitions, args.model_bytes).rows():
            print(f"gpu-check: {'ok' if row.passed else 'NOT OK'}: {row.what}: {row.ours}", flush=True)
            rows.append(row)
    print(f"\n{table(rows)}")
    if args.device == "cuda":
        args.output.write_text(page(rows, facts))
        print(f"\ngpu-check: {args.output} is written")
    return PASSED if all(row.passed for row in rows) else FAILED


if __name__ == "__main__":
    sys.exit(main())
