"""What observers show of a hang, and of what gloo's messages explain: in words, on the page, in `top`, and for real."""

from __future__ import annotations

import json
import re
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from elastic_rs._observe import _text
from elastic_rs._observe._commands import _facts
from elastic_rs._observe._otlp import traces
from elastic_rs._observe._page import page
from elastic_rs._observe._story import story_of
from elastic_rs._observe._top import SORTS, View, screen
from elastic_rs._observe._trace import chrome_trace
from helpers.observe import ask

from .test_story import Log, exited, formed, recovered, state, still

if TYPE_CHECKING:
    from collections.abc import Iterator

    from helpers.procs import Job

LINES = [
    "training stands still for 183 s (step 1841; a step took 0.21 s): 31 of 32 ranks wait for rank 3 (n17, pid 4242)",
    "  rank 3 has not entered all_reduce #5127 of default_pg ([63310] Float); it sleeps in read(/data/shard-17, nfs4)",
    "  at load_batch train.py:88 < main train.py:41",
    "  others: main train.py:45 in all_reduce",
    "  more: elastic-rs why node0:29400",
    "  nothing is stopped (--hang=report)",
]
ROOT = f"the training hung: {LINES[1].strip()}"
SCRIPT = Path(__file__).parents[1] / "scripts" / "wrong_collectives.py"


@pytest.fixture(autouse=True)
def utc() -> Iterator[None]:
    """Times of day are those of UTC."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def hang(log: Log, kind: str, at_s: float, **data: Any) -> int:
    usual = {"kind": "not_entered", "certain": False, "ranks": [3], "still_ms": 183_000, "waiting": 31, "lines": LINES}
    return log.add(kind, at_s, node="n17.example.org:4711", data={**usual, **data})


def broken_by_hang() -> Log:
    """A hang is found at 283 s, the workers are restarted, and the next round goes on."""
    log = formed()
    found = hang(log, "hang.found", 283.0)
    broken = log.add("round.broken", 283.5, cause=found, data={"why": "hang.found"})
    done = log.add("round.completed", 285.0, cause=broken, round=2, data={"nodes": 4, "workers": 32})
    log.add("phase", 285.1, cause=done, round=2, node="n2:5", data={"stop_us": 1_000_000, "start_us": 100_000})
    log.add("hang.over", 290.0, cause=found, round=2, data={"still_ms": 190_000})
    return log


def test_status_says_for_whom_the_others_wait_and_marks_a_hang() -> None:
    def line(**values: Any) -> str:
        return _text.status(story_of([], 1), state(hang=still(**values)))[1]

    assert line() == "waits   12 s for rank 3 at train.py:88 (usually 0.20 s)"
    assert line(found=True) == "HANGS   waits 12 s for rank 3 at train.py:88 (usually 0.20 s)"
    assert line(text="stands still for 12 s", ranks=[]) == "still   stands still for 12 s"
    without = state()
    del without["hang"]
    for shown in (state(), without):
        assert len(_text.status(story_of([], 1), shown)) == 1
    # Files have no state.
    log = formed()
    found = hang(log, "hang.found", 283.0)
    assert f"HANGS   {ROOT}" in _text.status(story_of(log.events()), None)
    log.add("hang.over", 300.0, cause=found, data={"still_ms": 200_000})
    assert not any("HANGS" in line for line in _text.status(story_of(log.events()), None))


def test_a_hang_is_the_root_of_the_recovery_that_it_causes_with_its_lines() -> None:
    log = broken_by_hang()
    story = story_of(log.events())
    assert _text.why(story) == [
        "recovery 1 of 1, round 1 to 2: 3:05 min x 32 workers, at 2026-11-22 00:48:48 UTC",
        f" {ROOT}   root cause",
        *(f"    |  {line}" for at, line in enumerate(LINES) if at != 1),
        " +- round 1 broken, all nodes notified  +0.50 s",
        "    +- round 2 complete with 4 nodes  +2.00 s",
        "       detect     3:03 min",
        "       stop       1.00 s",
        "       start      0.10 s",
        "    training goes on, after 3:10 min without progress  +7.00 s",
    ]
    assert _text.recoveries(story)[1].endswith(ROOT)
    assert any(line.startswith("last ") and ROOT in line for line in _text.status(story, None))
    facts = _facts(story)
    assert facts["recoveries"][0]["root"]["data"]["lines"] == LINES
    assert facts["recoveries"][0]["hang"]["type"] == "hang.found"
    assert [one["over"]["data"]["still_ms"] for one in facts["hangs"]] == [190_000]
    assert json.dumps(facts)
    assert json.dumps(chrome_trace(log.events()))
    (trace,) = traces(log.events(), "1")
    spans = trace["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert {"key": "elastic_rs.what", "value": {"stringValue": ROOT}} in spans[0]["attributes"]


def test_why_shows_a_hang_that_no_recovery_ended() -> None:
    log = formed()
    hang(log, "hang.waits", 110.0, still_ms=10_000)
    assert _text.why(story_of(log.events())) == ["job: no recovery so far"]
    found = hang(log, "hang.found", 283.0)
    now = ["the training hangs, found at 2026-11-22 00:48:48 UTC", *(f" {line}" for line in LINES)]
    assert _text.why(story_of(log.events())) == [*now, "job: no recovery so far"]
    log.add("hang.over", 300.0, cause=found, data={"still_ms": 200_000})
    assert _text.why(story_of(log.events())) == [
        now[0].replace("hangs", "hung"),
        *now[1:],
        " +- training goes on, after 3:20 min without progress  +17.0 s",
        "job: no recovery so far",
    ]
    recovered(log, 400.0)
    story = story_of(log.events())
    assert story.recoveries[0].hang is None, "it was over"
    assert "recovery 1 of 1" in "\n".join(_text.why(story))
    assert not any("hung" in line for line in _text.why(story, 1))


def test_why_says_that_the_training_had_hung_before_a_worker_was_killed() -> None:
    log = formed()
    hang(log, "hang.found", 283.0)
    recovered(log, 400.0)
    hang(log, "hang.found", 900.0, lines=[])
    title, root, *rest = _text.why(story_of(log.events()), 1)
    assert title.startswith("recovery 1 of 1")
    assert root.endswith('"uncorrectable ECC"   root cause; 1 consequence')
    assert rest[:3] == [f"    |  {ROOT} (found 1:57 min before)", *(f"    |  {line}" for line in LINES[2:4])]
    assert _text.why(story_of(log.events()))[:2] == [
        "the training hangs, found at 2026-11-22 00:48:48 UTC",
        " its event has no lines",
    ]


def test_a_hang_ends_with_its_world() -> None:
    log = formed()
    hang(log, "hang.found", 283.0)
    changes = log.add("round.changes", 290.0)
    log.add("round.broken", 291.0, cause=changes, data={"why": "change.failed"})
    (recovery,) = story_of(log.events()).recoveries
    assert (recovery.broken.type, recovery.hang) == ("round.broken", story_of(log.events()).hangs[0])
    assert story_of(log.events()).hangs[0].ended_us == 290_000_000
    log = formed()
    hang(log, "hang.found", 283.0)
    broken = log.add("round.broken", 290.0, data={"why": "nodes.wait"})
    log.add("round.goes_on", 291.0, cause=broken)
    assert story_of(log.events()).hangs[0].ended_us is None


def test_events_have_a_line_for_each() -> None:
    log = formed()
    hang(log, "hang.waits", 110.0)
    found = hang(log, "hang.found", 283.0)
    log.add("hang.over", 300.0, cause=found, data={"still_ms": 200_000})
    story = story_of(log.events())
    lines = [_text.event_line(event, story, 0) for event in story.events[3:]]
    assert lines == [
        f"    4 0:01:50.000 r1 hang.waits         n17          the training waits: {LINES[1].strip()}",
        f"    5 0:04:43.000 r1 hang.found         n17          {ROOT}",
        "    6 0:05:00.000 r1 hang.over                       training goes on, after 3:20 min without progress  <- 5",
    ]


def test_the_page_has_a_bar_on_the_nodes_row_and_the_lines() -> None:
    log = formed()
    log.add("node.joined", 3.0, node="n2:5")
    found = hang(log, "hang.found", 283.0, lines=[LINES[0], "  <script>", *LINES[2:]])
    html = page(log.events(), {**state(hang=still(found=True)), "mono_us": 400 * 10**6})
    assert "HANGS   waits 12 s for rank 3" in html
    assert (
        f"<h2>Hangs (1)</h2>\n<pre>the training hangs, found at 2026-11-22 00:48:48 UTC\n {LINES[0]}\n   &lt;script"
        in html
    )
    root = ET.fromstring(html[html.index("<figure ") : html.index("</figure>") + len("</figure>")])
    (bar,) = [one for one in root.iter("rect") if one.get("class") == "hang"]
    rows = {text.text: int(text.get("y", "")) for text in root.iter("text") if text.get("class") is None}
    assert int(bar.get("y", "")) - 3 == rows["n17"] - 12
    assert "".join(bar.itertext()) == "the training hung: <script>: 5:00 min"
    log.add("hang.over", 300.0, cause=found, data={"still_ms": 200_000})
    assert "the training hung, found at" in page(log.events())
    # A rank whose node is not known: all wait.
    log = formed()
    log.add("hang.found", 283.0, data={"still_ms": 10**12})
    assert re.search(r'<rect class="hang" x="[0-9.]+" y="3" ', page(log.events()))
    assert "Hangs" not in page(formed().events())


def test_a_page_of_many_hangs_is_small() -> None:
    log = formed()
    for number in range(500):
        found = hang(log, "hang.found", 1000.0 * number, lines=["x" * 400] * 40)
        log.add("hang.over", 1000.0 * number + 1, cause=found)
    assert len(page(log.events()).encode()) <= 60_000


def test_top_shows_how_long_the_others_wait_for_a_node() -> None:
    log = formed()
    done = recovered(log)
    log.add("phase", 133.0, cause=done, round=2, node="n17.example.org:4711", data={"start_us": 1})
    hang(log, "hang.waits", 140.0)

    def shown(view: View, **values: Any) -> tuple[list[str], list[str]]:
        now = {**state(hang=still(**values), behind=[["n2:5", 2]], step_time_us=None), "mono_us": 200 * 10**6}
        lines = screen(log.events(), now, (120, 20), view)
        table = next(at for at, line in enumerate(lines) if line.startswith("NODE"))
        return lines, lines[table + 1].split()

    lines, first = shown(View())
    assert "waits   12 s for rank 3 at train.py:88 (usually 0.20 s)" in lines
    assert first[:4] == ["n17", "running", "+12.3", "s"]
    _, first = shown(View(sort=SORTS.index("lag")), found=True)
    assert first[:4] == ["n17", "hangs", "+12.3", "s"]
    # The last event is about other ranks.
    assert shown(View(), ranks=[4])[1][:3] == ["n2", "running", "+2"]
    assert shown(View(), ranks=[])[1][:3] == ["n2", "running", "+2"]


CLOSED = (
    "RuntimeError: [/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:59806. This is typically"
)
RESET = (
    "RuntimeError: [/gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:62154: Connection reset by peer. This is"
)
MISMATCH = (
    "what():  [enforce fail at /gloo/transport/tcp/pair.cc:464] op.preamble.length <= op.nbytes. 2732 vs 4. Received "
    "data size doesn't match expected size. Is there a distributed collective mismatch in your code?"
)
VICTIM = (
    "    |  a mismatch of collectives: the rank that aborted is its victim, not always its cause: it got more bytes "
    "than it asked for"
)


def ended(log: Log, at_s: float, rank: int, returncode: int = 0, *, stopped: bool = False) -> int:
    data = {"rank": rank, "exit": f"exit code {returncode}", "returncode": returncode, "stopped": stopped}
    return log.add("worker.ended", at_s, node="n2:5", data=data)


@pytest.mark.parametrize("message", [CLOSED, RESET])
def test_a_worker_that_ended_early_is_the_root_of_lost_connections(message: str) -> None:
    log = formed()
    ended(log, 99.0, 5)
    ended(log, 99.5, 6)
    exit_ = log.add("worker.exited", 100.0, node="n17.example.org:4711", data=exited(3, message=message))
    broken = log.add("round.broken", 100.1, cause=exit_, data={"why": "worker.failed"})
    log.add("worker.exited", 100.2, cause=broken, node="n2:5", data=exited(4, first=False, message=message))
    ended(log, 100.3, 7)
    log.add("round.completed", 102.0, cause=broken, round=2, data={"nodes": 4, "workers": 32})
    story = story_of(log.events())
    lines = _text.why(story)
    assert lines[1:4] == [
        " n2 rank 5 ended early, with exit code 0, while others ran on   root cause; 2 consequences",
        "    |  so did n2 rank 6",
        " +- round 1 broken, all nodes notified  +1.10 s",
    ]
    assert lines[4].startswith('    |  n17 rank 3 exit code 1 "RuntimeError: [/gloo')
    assert lines[4].endswith('"  +1.00 s')
    assert lines[5].startswith("    |  n2 rank 4 exit code 1 ")
    assert lines[0].startswith("recovery 1 of 1, round 1 to 2: 2.00 s "), "from the first failure on"
    facts = _facts(story)["recoveries"][0]
    assert (facts["root"]["type"], [one["data"]["rank"] for one in facts["early"]]) == ("worker.ended", [5, 6])
    # A reader of the coordinator's events alone writes the same ids.
    (trace,) = traces(log.events(), "1")
    (other,) = traces([event for event in log.events() if event.type != "worker.ended"], "1")
    first, second = (one["resourceSpans"][0]["scopeSpans"][0]["spans"][0] for one in (trace, other))
    assert [first[key] for key in ("traceId", "startTimeUnixNano")] == [
        second[key] for key in ("traceId", "startTimeUnixNano")
    ]
    html = page(log.events())
    assert 'class="mark first"' in html
    assert html.count("<title>n2 rank") == 2, "workers that ended otherwise have no mark"


@pytest.mark.parametrize(
    ("at_s", "how", "message"),
    [
        (101.0, {}, CLOSED),
        (99.0, {"stopped": True}, CLOSED),
        (99.0, {"returncode": 1}, CLOSED),
        (99.0, {}, "uncorrectable ECC"),
        (99.0, {}, ""),
    ],
)
def test_another_end_is_no_root(at_s: float, how: dict[str, Any], message: str) -> None:
    log = formed()
    if at_s < 100:
        ended(log, at_s, 5, **how)
    exit_ = log.add("worker.exited", 100.0, node="n17.example.org:4711", data=exited(3, message=message))
    log.add("round.broken", 100.1, cause=exit_, data={"why": "worker.failed"})
    if at_s >= 100:
        ended(log, at_s, 5, **how)
    (recovery,) = story_of(log.events()).recoveries
    assert (recovery.root.type, recovery.early) == ("worker.exited", [])


@pytest.mark.parametrize(
    ("exit_", "message", "is_one"),
    [
        ("SIGABRT", MISMATCH, True),
        ("exit code 1", MISMATCH, True),
        ("SIGABRT", "terminate called after throwing an instance of 'gloo::EnforceNotMet'", True),
        ("exit code 1", "an instance of 'gloo::EnforceNotMet'", False),
        ("SIGABRT", "free(): invalid pointer", False),
    ],
)
def test_a_mismatch_of_collectives_is_said_and_its_victim(exit_: str, message: str, *, is_one: bool) -> None:
    log = formed()
    ended(log, 99.0, 5)
    failure = log.add("worker.exited", 100.0, node="n2:5", data={**exited(3, message=message), "exit": exit_})
    log.add("round.broken", 100.1, cause=failure, data={"why": "worker.failed"})
    assert (VICTIM in _text.why(story_of(log.events()))) == is_one
    # Another worker may have been faster to notice.
    log = formed()
    ended(log, 99.0, 5)
    first = log.add("worker.exited", 100.0, node="n17.example.org:4711", data=exited(4, message=CLOSED))
    log.add("round.broken", 100.1, cause=first, data={"why": "worker.failed"})
    log.add("worker.exited", 100.2, node="n2:5", data={**exited(3, first=False, message=message), "exit": exit_})
    story = story_of(log.events())
    assert (VICTIM in _text.why(story)) == is_one
    assert (story.recoveries[0].root.type == "worker.exited") == is_one


def test_the_victims_are_named_if_no_restart_was_left() -> None:
    log = formed()
    ended(log, 99.0, 5)
    exit_ = log.add("worker.exited", 100.0, node="n17.example.org:4711", data=exited(3, message=CLOSED))
    log.add("run.closed", 100.1, cause=exit_, data={"verdict": "failed"}, text="closed: no restarts left")
    _, root, victim, closed = _text.why(story_of(log.events()))
    assert root == " n2 rank 5 ended early, with exit code 0, while others ran on   root cause; 1 consequence"
    assert victim.startswith("    |  n17 rank 3 exit code 1")
    assert closed == "    +- closed: no restarts left"


@pytest.mark.torchrun
@pytest.mark.parametrize(
    ("what", "root", "explained"),
    [
        ("early", r" rank 1 ended early, with exit code 0, while others ran on   root cause; \d consequence", " rank "),
        ("mismatch", r' rank \d (SIGABRT|exit code 1) ".*root cause', VICTIM),
    ],
)
def test_real_workers_with_gloo(what: str, root: str, explained: str, job: Job, tmp_path: Path) -> None:
    flags = ["--rdzv-backend=rust-c10d", "--rdzv-id=job", "--nproc-per-node=3", f"--log-dir={tmp_path}"]
    node = job.start([sys.executable, "-m", "elastic_rs.run", *flags, str(SCRIPT), what])
    assert node.wait() != 0
    lines = ask("why", "--events", tmp_path).stdout.splitlines()
    assert re.search(root, lines[1]), lines
    assert explained in lines[2], lines
    assert lines[-1].startswith("    +- closed by "), lines
