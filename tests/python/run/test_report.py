"""The final report of ``elastic-run`` compared with that of the installed torch."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from elastic_rs.run._path import record
from elastic_rs.run._report import Failure, hand_up, report, root_cause
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, get_error_handler

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    "recorded",
    [
        None,
        {"message": "told", "timestamp": "17"},
        {"message": "told"},
        {"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "Traceback\n  x", "timestamp": "19"}}},
        {"message": {"message": "ValueError: x", "extraInfo": {"timestamp": "19"}}},
    ],
)
@pytest.mark.parametrize("code", [3, -11, -99])
def test_a_failure_is_reported_as_by_pytorch(tmp_path: Path, recorded: Any, code: int) -> None:
    file = tmp_path / "error.json"
    if recorded is not None:
        file.write_text(json.dumps(recorded))
    theirs, ours = ProcessFailure(1, 7, code, str(file)), Failure(1, 7, code, str(file))
    assert (ours.message, ours.error_file) == (theirs.message, theirs.error_file)
    if recorded is not None:
        assert ours.timestamp == theirs.timestamp
    theirs.timestamp = ours.timestamp
    # Python prints the name of `ChildFailedError` before the report.
    name = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "
    assert report("x.py", {4: ours}) == name + str(ChildFailedError("x.py", {4: theirs}))


def test_a_report_of_several_failures_is_pytorchs() -> None:
    def failures(make: Any) -> dict[int, Any]:
        made = {rank: make(rank, 70 + rank, code, "<N/A>") for rank, code in ((2, 3), (0, -15), (1, -9))}
        for rank, failure in made.items():
            failure.timestamp = {2: 1000, 0: 999, 1: 1000}[rank]
        made[2].message = "x" * 90  # wider than the frame
        return made

    ours, theirs = failures(Failure), failures(ProcessFailure)
    assert root_cause(ours) == ChildFailedError("x.py", theirs).get_first_failure()[0] == 0
    assert report("x.py", ours).endswith(str(ChildFailedError("x.py", theirs)))


@pytest.mark.parametrize("code", [0, 3, -9])
def test_a_workers_record_is_copied_to_the_launchers_error_file_as_by_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    output = {"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "x", "timestamp": "19"}}}
    for recorded in (output, {"message": "told", "timestamp": "17"}):
        file, own, other = (tmp_path / name for name in ("error.json", "own.json", "theirs.json"))
        file.write_text(json.dumps(recorded))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(other))
        get_error_handler().dump_error_file(str(file), code)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(own))
        hand_up(Failure(0, 7, code, str(file)))
        assert json.loads(own.read_text()) == json.loads(other.read_text())


def test_an_unreadable_error_file_counts_as_none(tmp_path: Path) -> None:
    # PyTorch's launcher raises the read error, and does not report the failure.
    file = tmp_path / "error.json"
    for text in ("", "{", "[]", "{}", "7"):
        file.write_text(text)
        failure = Failure(0, 7, 3, str(file))
        assert failure.error_file == "<N/A>", text
        assert failure.text, text


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ('{"message": "x", "timestamp": 1e400}', "x"),
        ('{"message": "x", "timestamp": NaN}', "x"),
        ('{"message": {"message": 5, "extraInfo": {"timestamp": "99999999999999999"}}}', "5"),
        ('{"message": {"message": {"a": 1}, "extraInfo": {"timestamp": 1}}}', "{'a': 1}"),
        ('{"message": {"message": "x\\ny", "extraInfo": {"py_callstack": null, "timestamp": "1"}}}', "x\n  y"),
        ('{"message": {"message": "x", "extraInfo": 7}}', "x"),
        ('{"message": {"message": "x"}}', "x"),
        ("[" * 100_000, "To enable traceback see"),
    ],
)
def test_an_odd_error_file_is_reported_as_far_as_it_can_be_read(tmp_path: Path, text: str, output: str) -> None:
    file = tmp_path / "error.json"
    file.write_text(text)
    failure = Failure(0, 7, 3, str(file))
    assert f"  traceback : {output}" in report("x.py", {0: failure})
    # Otherwise the agent's message is used.
    assert (failure.error_file == "<N/A>") == (text[0] == "[")


def test_a_pipe_is_not_read_as_an_error_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert Failure(0, 7, 3, str(tmp_path / "pipe")).error_file == "<N/A>"


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
NAMES = st.sampled_from(["message", "extraInfo", "timestamp", "py_callstack", "errorCode"]) | st.text(max_size=3)
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=12
)


@given(
    st.fixed_dictionaries({"message": ANYTHING}, optional={"timestamp": ANYTHING}) | ANYTHING,
    st.sampled_from([0, 3, -9]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_no_error_file_keeps_the_report_from_being_printed(tmp_path: Path, recorded: Any, code: int) -> None:
    file = tmp_path / "error.json"
    file.write_text(json.dumps(recorded))
    failure = Failure(0, 7, code, str(file))
    assert "Root Cause" in report("x.py", {0: failure})
    own = tmp_path / "own.json"
    own.unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_ERROR_FILE", str(own))
        hand_up(failure)
    assert own.exists() == (failure.error_file != "<N/A>")


def test_an_error_file_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "error.json"
    file.write_text('{"message": "told", "timestamp": "17"}')
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/proc/x/y")
    for write in (lambda: record("ValueError: x", ""), lambda: hand_up(Failure(0, 7, 3, str(file)))):
        write()
        text = capsys.readouterr().err
        assert text.startswith("elastic-run: warning: cannot write the error to TORCHELASTIC_ERROR_FILE (`/proc/x/y`)")
        assert text.count("\n") == 1
