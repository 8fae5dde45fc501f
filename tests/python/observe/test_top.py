"""``elastic-rs top``: its screen, and a real terminal."""

from __future__ import annotations

import curses
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
from elastic_rs._observe import _top
from elastic_rs._observe._top import SORTS, View, highlights, screen

from .test_story import Log, formed, recovered, state

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elastic_rs._observe._events import Event
    from helpers.procs import Job

PLAIN = View()


def test_the_screen_has_the_job_its_nodes_and_its_time() -> None:
    log = formed()
    recovered(log)
    log.add("node.lost", 120.0, node="n2:5", round=2, data={"how": "silence"})
    lines = screen(log.events(), {**state(), "mono_us": 200 * 10**6}, (110, 14), PLAIN)
    assert len(lines) == 14
    assert lines[0].startswith("job  RUNNING  round 2")
    table = next(at for at, line in enumerate(lines) if line.startswith("NODE"))
    assert re.fullmatch(
        r"NODE +STATE +LAG +STOP +RENDEZVOUS +START +IMPORT +FIRST_STEP +GONE +\|[.]+=+X+=+\|", lines[table]
    )
    rows = [line.split() for line in lines[table + 1 : table + 3]]
    assert rows[0][:2] == ["n2", "lost"]
    assert rows[0][-1] == "1"
    assert rows[1][:2] == ["n41", "running"], "the slowest"
    assert lines[-1] == "q quit  p pause  s sort (state)  w why"


@pytest.mark.parametrize("size", [(20, 5), (80, 24), (300, 2), (1, 1), (200, 60)])
def test_the_screen_fits_every_terminal(size: tuple[int, int]) -> None:
    log = formed()
    for number in range(500):
        log.add("node.joined", 3.0, node=f"n{number}.example.org:1")
    recovered(log)
    for why in (False, True):
        lines = screen(log.events(), {**state(), "mono_us": 200 * 10**6}, size, View(why=why))
        assert len(lines) <= max(1, size[1])
        assert all(len(line) <= size[0] for line in lines)


def test_keys_sort_scroll_and_explain() -> None:
    log = formed()
    recovered(log)
    view = View()
    assert view.press("s")
    assert SORTS[view.sort] == "node"
    while SORTS[view.sort] != "stop":
        view.press("s")
    lines = screen(log.events(), None, (110, 20), view)
    table = next(at for at, line in enumerate(lines) if line.startswith("NODE"))
    assert lines[table + 1].startswith("n41 ")
    view.press("j")
    assert screen(log.events(), None, (110, 20), view)[table + 1].startswith("n2 ")
    view.press("k")
    view.press("w")
    assert any("root cause; 1 consequence" in line for line in screen(log.events(), None, (110, 20), view))
    view.press("p")
    assert view.paused
    assert not view.press("q")


def test_nodes_that_are_behind_are_first() -> None:
    log = formed()
    recovered(log)
    log.add("node.joined", 119.0, node="n9:5", round=2)
    log.add("node.lost", 120.0, node="n9:5", round=2, data={"how": "silence"})

    def rows(step_time_us: int | None, view: View) -> list[list[str]]:
        behind = [["n2:5", 2], ["n9:5", 7], ["gone:1", 8]]
        now = {**state(behind=behind, step_time_us=step_time_us), "mono_us": 200 * 10**6}
        lines = screen(log.events(), now, (110, 20), view)
        table = next(at for at, line in enumerate(lines) if line.startswith("NODE"))
        return [line.split()[:3] for line in lines[table + 1 : table + 4]]

    assert rows(1_920_000, PLAIN)[:2] == [["n9", "lost", "-"], ["n2", "running", "+3.84"]]
    assert rows(None, PLAIN)[1] == ["n2", "running", "+2"]
    by_lag = View(sort=SORTS.index("lag"))
    assert rows(None, by_lag)[0] == ["n2", "running", "+2"]
    assert {lag for _, _, lag in rows(None, by_lag)[1:]} == {"-"}


def test_keys_that_come_together_all_count() -> None:
    view = View()
    assert all(map(view.press, ["j", "j", "KEY_DOWN", "k", "KEY_UP", "j"]))
    assert view.skip == 2
    assert not all(map(view.press, "jqp"))
    assert (view.skip, view.paused) == (3, False)


def test_a_pause_keeps_what_is_shown_and_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    log = formed()
    keys = ["p", "j", "p", "q"]
    asked: list[int] = []
    screens: list[str] = []
    now = {**state(), "mono_us": 5 * 10**6}

    class Live:
        def read(self) -> tuple[list[Event], dict[str, Any]]:
            asked.append(len(keys))
            if len(keys) == 3:
                log.add("node.joined", 3.0, node="late:1")
                return log.events()[-1:], now
            return (log.events() if len(asked) == 1 else []), now

    def written(events: Sequence[Event], now: dict[str, Any] | None, size: tuple[int, int], view: View) -> list[str]:
        screens.append("\n".join(screen(events, now, size, view)))
        return []

    class Window:
        def getmaxyx(self) -> tuple[int, int]:
            return 24, 80

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_: None

    monkeypatch.setattr(_top, "screen", written)
    monkeypatch.setattr(_top, "_keys", lambda _: keys.pop(0))
    monkeypatch.setattr(_top, "curses", Mock(error=curses.error))
    assert _top._watch(Window(), Live()) == 0  # type: ignore[arg-type]
    assert asked == [4, 3, 2, 1]
    assert ["late" in one for one in screens] == [False, False, False, True]


def test_nodes_are_in_natural_order() -> None:
    log = Log()
    names = ["n1", "n2", "n10", "n" + "9" * 5000]
    for name in reversed(names):
        log.add("node.joined", node=f"{name}:1")
    for sort in ("state", "node", "stop"):
        view = View(sort=SORTS.index(sort))
        rows = screen(log.events(), None, (110, 20), view)
        first = next(at for at, row in enumerate(rows) if row.startswith("NODE")) + 1
        assert [row[:16].split()[0] for row in rows[first : first + 4]] == [*names[:3], "n" + "9" * 15]


def table(log: Log) -> dict[str, str]:
    """Return the states of the nodes."""
    lines = screen(log.events(), None, (110, 20), PLAIN)
    heading = next(at for at, line in enumerate(lines) if line.startswith("NODE"))
    return dict(line.split()[:2] for line in lines[heading + 1 : -1] if line)


def test_a_node_beside_a_full_world_is_a_spare() -> None:
    log = Log()
    names = [f"n{number}:1" for number in range(3)]
    for node in names:
        log.add("node.joined", 1.0, node=node)
    assert set(table(log).values()) == {"waiting"}
    text = "round 1 is complete with 2 nodes: all are here (10.0.0.1 (n0:1), 10.0.0.2 (n1:1))"
    done = log.add("round.completed", 2.0, data={"nodes": 2}, text=text)
    assert table(log) == {"n0": "running", "n1": "running", "n2": "spare"}
    # One of the members is lost, and the spare steps in. A text that is too long names nobody, but members tell phases.
    log.add("node.lost", 3.0, node="n1:1", data={"how": "silence"})
    log.add("node.joined", 3.5, node="n9:1")
    done = log.add("round.completed", 4.0, round=2, data={"nodes": 2}, text="round 2 is complete")
    for node in ("n0:1", "n2:1"):
        log.add("phase", 4.1, cause=done, round=2, node=node, data={"start_us": 5})
    assert table(log) == {"n0": "running", "n1": "lost", "n2": "running", "n9": "spare"}
    log.add("node.withdrew", 5.0, node="n9:1", round=2)
    assert table(log)["n9"] == "left"
    log.add("node.joined", 6.0, node="n1:2", round=2)
    log.add("round.completed", 7.0, round=3, data={"nodes": 3}, text="round 3 is complete")
    assert table(log) == {"n0": "running", "n1": "running", "n2": "running", "n9": "left"}


def test_a_spare_that_steps_in_is_not_the_slowest_for_having_waited() -> None:
    log = formed()
    done = recovered(log)
    day_us = 86_400 * 10**6
    log.add("phase", 132.1, cause=done, round=2, node="n50:1", data={"rendezvous_us": day_us, "start_us": 20_000})
    lines = screen(log.events(), None, (110, 20), View(sort=SORTS.index("rendezvous")))
    assert [line.split()[4] for line in lines if line.startswith("n50 ")] == ["32.0"]


def test_the_story_of_a_recovery_scrolls() -> None:
    log = formed()
    recovered(log)
    view = View(why=True)
    size = (110, 10)
    first = screen(log.events(), None, size, view)
    view.press("j")
    second = screen(log.events(), None, size, view)
    begin = next(at for at, line in enumerate(first) if line.startswith("recovery 1"))
    assert second[begin] == first[begin + 1]
    for _ in range(100):
        view.press("j")
    last = screen(log.events(), None, size, view)
    assert last[begin].strip().startswith("start")
    assert view.skip < 100


def test_states_stand_out() -> None:
    log = formed()
    recovered(log)
    log.add("node.lost", 120.0, node="n2:5", round=2, data={"how": "silence"})
    lines = screen(log.events(), None, (110, 20), View())
    found = list(highlights(lines))
    assert all(lines[row][begin:end] == text for row, begin, end, text in found)
    assert found[0][3].startswith("NODE ")
    assert {text for *_, text in found[1:]} == {"lost", "running"}
    assert list(highlights(["job  FAILED  round 2", "n1               lost     -"])) == [(0, 5, 11, "FAILED")]
    assert not list(highlights(screen(log.events(), None, (110, 20), View(why=True))))


@pytest.mark.parametrize("term", ["xterm", "xterm-of-tomorrow"])
def test_top_uses_a_terminal_and_gives_it_back(job: Job, port: int, term: str) -> None:
    host = job.start([sys.executable, "-m", "elastic_rs", "store", "serve", "--host=127.0.0.1", f"--port={port}"])
    host.line("^listening on")
    command = [sys.executable, "-m", "elastic_rs", "top", f"127.0.0.1:{port}"]
    nobody = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert nobody.returncode == 3
    assert "no node has come to this coordinator yet" in nobody.stderr
    options = ["--nnodes=2", "--rdzv-backend=rust-c10d", "--rdzv-conf=is_host=0", "--rdzv-id=job"]
    options.append(f"--rdzv-endpoint=127.0.0.1:{port}")
    node = job.start([sys.executable, "-m", "elastic_rs.run", *options, "--no-python", "sleep", "600"])
    observed = subprocess.run(
        [sys.executable, "-c", WAIT, str(port)], capture_output=True, text=True, timeout=60, check=False
    )
    assert observed.returncode == 0, observed.stderr

    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"NO_COLOR": "1", "TERM": term}
        os.execv(command[0], command)
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        before = termios.tcgetattr(terminal)
        seen = _until(terminal, b"", b"q quit")
        assert b"\x1b[?1049h" in seen
        assert b"job  WAITING  round 0" in seen
        os.write(terminal, b"jq")
        seen = _until(terminal, seen, b"\x1b[?1049l")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert termios.tcgetattr(terminal) == before
    finally:
        os.close(terminal)
    for process in (node, host):
        process.signal(signal.SIGTERM)
        process.wait()


WAIT = """
import sys, time
from elastic_rs import _elastic_rs
end = time.monotonic() + 50
while time.monotonic() < end:
    try:
        _elastic_rs.Observer.connect("127.0.0.1", int(sys.argv[1])).ask(after=1, waits=True)
        sys.exit(0)
    except ConnectionError:
        time.sleep(0.05)
sys.exit("no node has come")
"""


def _until(terminal: int, seen: bytes, end: bytes) -> bytes:
    while end not in seen:
        seen += os.read(terminal, 65536)
    return seen
