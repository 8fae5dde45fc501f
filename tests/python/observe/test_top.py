"""``elastic-rs top``: its screen, and a real terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from typing import TYPE_CHECKING

import pytest
from elastic_rs.observe._top import SORTS, View, screen

from .test_story import formed, recovered, state

if TYPE_CHECKING:
    from helpers.procs import Job

PLAIN = View(colours=False)


def test_the_screen_has_the_job_its_nodes_and_its_time() -> None:
    log = formed()
    recovered(log)
    log.add("node.lost", 120.0, node="n2:5", round=2, data={"how": "silence"})
    lines = screen(log.events(), {**state(), "mono_us": 200 * 10**6}, (110, 14), PLAIN)
    assert len(lines) == 14
    assert lines[0].startswith("job  RUNNING  round 2")
    table = next(at for at, line in enumerate(lines) if line.startswith("NODE"))
    assert re.fullmatch(r"NODE +STATE +STOP +RENDEZVOUS +START +IMPORT +FIRST_STEP +GONE +\|[.]+=+X+=+\|", lines[table])
    rows = [line.split() for line in lines[table + 1 : table + 3]]
    assert rows[0][:2] == ["n2", "lost"]
    assert rows[0][-1] == "1"
    assert rows[1][:2] == ["n17", "running"]
    assert lines[-1] == "q quit  p pause  s sort (state)  w why"


@pytest.mark.parametrize("size", [(20, 5), (80, 24), (300, 2), (1, 1), (200, 60)])
def test_the_screen_fits_every_terminal(size: tuple[int, int]) -> None:
    log = formed()
    for number in range(500):
        log.add("node.joined", 3.0, node=f"n{number}.example.org:1")
    recovered(log)
    for why in (False, True):
        lines = screen(log.events(), {**state(), "mono_us": 200 * 10**6}, size, View(colours=False, why=why))
        assert len(lines) <= max(1, size[1])
        assert all(len(line) <= size[0] for line in lines)


def test_keys_sort_scroll_and_explain() -> None:
    log = formed()
    recovered(log)
    view = View(colours=False)
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
    assert any("first; 1 follows from it" in line for line in screen(log.events(), None, (110, 20), view))
    view.press("p")
    assert view.paused
    assert not view.press("q")


def test_colours_surround_words_and_hide_nothing() -> None:
    log = formed()
    recovered(log)
    coloured = screen(log.events(), None, (110, 20), View())
    assert any("\x1b[" in line for line in coloured)
    assert [re.sub(r"\x1b\[\d+m", "", line) for line in coloured] == screen(log.events(), None, (110, 20), PLAIN)


def test_top_uses_a_terminal_and_gives_it_back(job: Job, port: int) -> None:
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
        os.environ["NO_COLOR"] = "1"
        os.execv(command[0], command)
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        before = termios.tcgetattr(terminal)
        seen = _until(terminal, b"", b"q quit")
        assert b"\x1b[?1049h" in seen
        assert b"job  WAITING  round 0" in seen
        os.write(terminal, b"q")
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
