"""Run PyTorch's own tests on its own classes (*stock*) and on ours, test by test, and compare.

    build/venv-torch-2.6.0/bin/python tests/upstream/run.py --set store
    … run.py --impl ours test_store.py::TCPStoreTest

The interpreter that runs this has torch and elastic_rs. ``plan.toml`` has the sets, and what does not count. The exit
code is 0 if everything that counts has passed on ours, 1 if not, and 2 if nothing could be run.

A *unit* is what one pytest process runs: tests of one file, or one test of a file that starts agents. A test that takes
too long ends its process, and the rest of the unit runs in another one. What a process leaves is killed: its processes
have a token in their environment.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from plan import PLAN, excuse

HERE = Path(__file__).resolve().parent
PACKAGES = HERE.parents[1] / "build" / "upstream"
SETS = ("other", "store", "rendezvous", "launcher", "agent")

# Seconds, times --timeout-scale. The longest test that counts takes 100 s on two idle cores.
TEST_S, START_S, EXIT_S = 180.0, 120.0, 15.0
# A user's settings must not reach the tests, and a job around them even less.
NOT_INHERITED = re.compile(
    r"(PET_|TORCHELASTIC_|TORCH_ELASTIC|TORCHRUN_|PYTEST_|UPSTREAM_|ELASTIC_RS_(?!CACHE)).*|MASTER_(ADDR|PORT)|"
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE))|USE_LIBUV|CI|PYTHONPATH|OMP_NUM_THREADS"
)


@dataclass
class Result:
    outcome: str  # pass, fail, skip, timeout or crash
    seconds: float
    why: str
    attempts: int = 1


class CannotRunError(Exception):
    """No test says anything: torch, the tests or ``install()`` are not what they must be."""


class Runner:
    """Runs units of one implementation, ``stock`` or ``ours``."""

    def __init__(self, impl: str, args: argparse.Namespace) -> None:
        self.impl = impl
        self.args = args
        self.results: dict[str, Result] = {}
        self.left_out: set[str] = set()
        self.notes: list[str] = []
        self.lock = threading.Lock()
        self.live: set[subprocess.Popen[bytes]] = set()
        self.is_stopped = False

    def run_all(self, chosen: list[str]) -> None:
        with ThreadPoolExecutor(self.args.jobs) as pool:
            try:
                for future in [pool.submit(self.run, unit) for unit in self.units(chosen)]:
                    future.result()
            except BaseException:  # a signal, or a unit that cannot run
                self.is_stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(self.live):
                    process.kill()  # its unit ends the rest
                raise

    def units(self, chosen: list[str]) -> list[list[str]]:
        shared: dict[str, list[str]] = {}
        alone: list[list[str]] = []
        for entry in chosen:
            file, _, inside = entry.partition("::")
            if file not in PLAN["alone"]:
                shared.setdefault(file, []).append(entry)
            elif "::" in inside:
                alone.append([entry])
            else:
                events = self.pytest([entry], ["--collect-only"], f"collect {file}")[0]
                alone += [[test] for test in self.collected(events)]
        return [*shared.values(), *alone]

    def run(self, unit: list[str]) -> None:
        done = self.run_once(unit, 1)
        for test in [test for test, result in done.items() if result.outcome not in {"pass", "skip"}]:
            if self.impl == "ours":  # a test that counts seconds may fail on a loaded machine
                done |= self.run_once([test], 2)
        with self.lock:
            self.results |= done
            for test, result in done.items():
                line = f"{self.impl:6}{result.outcome:8}{result.seconds:6.1f} s  {short(test)}"
                print(line, file=sys.stderr, flush=True)

    def run_once(self, tests: list[str], attempt: int) -> dict[str, Result]:
        """Run tests in one process, or in several if some of them end it."""
        done: dict[str, Result] = {}
        while tests:
            events, code, printed = self.pytest(tests, [], f"{tests[0]} {attempt}")
            before, last = len(done), None
            for event in events:
                if event["event"] == "start":
                    last = event["test"]
                elif event["event"] == "finish":
                    done[last] = Result(event["outcome"], event["seconds"], event["why"], attempt)
            if last is not None and last not in done:
                _, too_long, stacks = printed.partition("+ Timeout +")
                outcome = "timeout" if too_long or code == -signal.SIGKILL else "crash"
                done[last] = Result(outcome, 0.0, (stacks or printed)[-1500:], attempt)
            tests = [test for test in self.collected(events) if test not in done] if len(done) > before else []
        return done

    def collected(self, events: list[dict[str, Any]]) -> list[str]:
        event = next(event for event in events if event["event"] == "collected")
        with self.lock:
            self.left_out |= set(event["left_out"])
        return list(event["tests"])

    def pytest(self, tests: list[str], options: list[str], name: str) -> tuple[list[dict[str, Any]], int, str]:
        """Run pytest. Return what the plugin has written, the exit code, and what was printed."""
        with tempfile.TemporaryDirectory(prefix="ut", ignore_cleanup_errors=True) as temporary:
            token, file, out = uuid.uuid4().hex, Path(temporary) / "events", Path(temporary) / "out"
            file.touch()
            with out.open("wb") as stream:
                process = subprocess.Popen(
                    self.command(tests, options),
                    cwd=self.args.tests,
                    env=self.environment(tests[0], token, file),
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self.live.add(process)
                try:
                    if not self.is_stopped:
                        self.wait(process, file)
                finally:
                    end_all(process, token)
                    self.live.remove(process)
            if self.is_stopped:
                raise CannotRunError("the run was stopped")
            printed, events, code = out.read_text(errors="replace"), read(file), process.returncode
        if folder := self.args.keep_logs:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / re.sub(r"\W+", "_", f"{self.impl} {name}")[-150:]).write_text(printed)
        kinds = {event["event"] for event in events}
        if why := next((event["why"] for event in events if event["event"] in {"refused", "uncollected"}), None):
            raise CannotRunError(why)
        if "collected" not in kinds or (self.impl == "ours" and "installed" not in kinds):
            raise CannotRunError(f"pytest did not begin with {tests[0]}:\n{printed[-2000:]}")
        # Threads that a test of PyTorch's has left may keep its process from exiting.
        if events[-1]["event"] == "done" and code < 0 and not events[-1]["threads"]:
            how = "did not exit" if code == -signal.SIGKILL else f"was ended by {signal.Signals(-code).name}"
            self.notes.append(f"{self.impl}: the process of {tests[0]} {how} after its last test")
        return events, code, printed

    def wait(self, process: subprocess.Popen[bytes], events: Path) -> None:
        """Wait until pytest exits, or nothing has happened for too long. pytest-timeout ends tests before that."""
        scale = self.args.timeout_scale
        limits = {True: EXIT_S * max(1.0, scale), False: START_S * max(1.0, scale) + TEST_S * scale}
        while process.poll() is None:
            over = any(event["event"] == "done" for event in read(events))
            left = limits[over] - (time.time() - events.stat().st_mtime)
            if left <= 0:
                return
            try:
                process.wait(min(left, EXIT_S))  # what was written meanwhile moves the limit
            except subprocess.TimeoutExpired:
                continue

    def command(self, tests: list[str], options: list[str]) -> list[str]:
        ids = [test if test.startswith("distributed/") else f"distributed/{test}" for test in tests]
        plugins = ["-p", "upstream_plugin", "-p", "no:cacheprovider", "-p", "no:xdist"]
        limits = [f"--timeout={TEST_S * self.args.timeout_scale:.1f}", "--timeout-method=thread"]
        pytest = [sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={self.args.tests}", "--noconftest"]
        return ["nice", "-n", "19", *pytest, *plugins, *limits, "-q", "-s", "--tb=short", *options, *ids]

    def environment(self, test: str, token: str, events: Path) -> dict[str, str]:
        # PyTorch runs each file as a script, so the file's folder is on its path.
        file = self.args.tests / "distributed" / test.removeprefix("distributed/").partition("::")[0]
        inherited = {name: value for name, value in os.environ.items() if not NOT_INHERITED.fullmatch(name)}
        return inherited | {
            "PYTHONPATH": os.pathsep.join(map(str, [HERE, file.parent, *self.args.path, PACKAGES])),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TMPDIR": str(events.parent),
            "TORCHELASTIC_ETCD_BINARY_PATH": os.environ.get("ETCD", ""),
            "UPSTREAM_IMPL": self.impl,
            "UPSTREAM_EVENTS": str(events),
            "UPSTREAM_UNIT": token,
        }


def read(events: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in events.read_text().splitlines(keepends=True) if line.endswith("\n")]


def end_all(process: subprocess.Popen[bytes], token: str) -> None:
    """Kill pytest and all that its tests have left, also in sessions of their own."""
    mark = f"UPSTREAM_UNIT={token}".encode()
    if process.poll() is None:
        process.kill()
        process.wait()
    while found := [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and has(entry, mark)]:
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def has(process: Path, mark: bytes) -> bool:
    try:
        return mark in (process / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return False


def short(test: str) -> str:
    return test.removeprefix("distributed/")


def compare(ours: Runner, stock: Runner | None) -> bool:
    """Print what counts and has not passed, and the figures. Return whether all of it has passed."""
    tally: Counter[str] = Counter(why.partition(":")[0] for test in ours.left_out if (why := excuse(test)))
    for test, result in sorted(ours.results.items()):
        theirs = stock.results.get(test) if stock else None
        if theirs is not None and theirs.outcome != "pass":
            tally[f"{theirs.outcome} on stock too"] += 1
            print(f"not counted, {theirs.outcome} on stock too: {short(test)}")
        elif result.outcome == "skip" and theirs is None:
            tally["skipped"] += 1
        else:
            tally["counted"] += 1
            tally["passed"] += result.outcome == "pass"
            if result.outcome != "pass":
                print(f"{result.outcome.upper()}: {short(test)}\n    " + result.why.strip().replace("\n", "\n    "))
            elif result.attempts > 1:
                print(f"passed at the second attempt: {short(test)}")
    for note in ours.notes:
        print(note)
    others = ", ".join(f"{count} {kind}" for kind, count in tally.items() if kind not in {"counted", "passed"})
    print(f"{tally['passed']} of {tally['counted']} tests that count have passed; not counted: {others or 'none'}")
    return 0 < tally["counted"] == tally["passed"] and not ours.notes


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("chosen", nargs="*", metavar="TEST", help="file, file::Class or file::Class::test")
    parser.add_argument("--set", default="all", choices=["all", *PLAN["sets"]], help="if no TEST is named (all)")
    parser.add_argument("--impl", default="both", choices=["both", "ours", "stock"])
    folder = os.environ.get("TORCH_TESTS") or None
    parser.add_argument("--tests", type=Path, default=folder, help="PyTorch's folder `test` (TORCH_TESTS)")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once (2); each may start twenty others")
    parser.add_argument("--timeout-scale", type=float, default=1.0, help="for a loaded machine")
    parser.add_argument("--path", type=Path, action="append", default=[], help="folder with another elastic_rs")
    parser.add_argument("--out", type=Path, help="file for all results, one JSON object a line")
    parser.add_argument("--keep-logs", type=Path, help="folder for what each process has printed")
    args = parser.parse_args()
    if args.tests is None:
        parser.error("--tests is not given, nor is TORCH_TESTS; tools/find_tool.py gets PyTorch's tests")
    names = SETS if args.set == "all" else [args.set]
    args.chosen = args.chosen or [entry for name in names for entry in PLAN["sets"][name]]
    return args


def stop(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)  # through `finally`, which ends what the tests have started


def main() -> int:
    signal.signal(signal.SIGTERM, stop)
    args = arguments()
    runners = {impl: Runner(impl, args) for impl in ("stock", "ours") if args.impl in {impl, "both"}}
    try:
        for runner in runners.values():
            runner.run_all(args.chosen)
    except CannotRunError as error:
        print(f"error: {error}")
        return 2
    if args.out:
        rows = [{"impl": i, "test": short(t), **vars(r)} for i in runners for t, r in runners[i].results.items()]
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if args.impl == "stock":
        print(f"stock: {dict(Counter(result.outcome for result in runners['stock'].results.values()))}")
        return 0
    return 0 if compare(runners["ours"], runners.get("stock")) else 1


if __name__ == "__main__":
    sys.exit(main())
