"""``elastic_rs._hosted``: how an agent begins that a driver starts."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from elastic_rs import _elastic_rs, _hosted, run
from elastic_rs.run import _driver, _flags
from hypothesis import given
from hypothesis import strategies as st

OWN = {"token": "f00d", "host": "a", "slots": 1, "age": 0, "hosts_coordinator": False, "port": 1, "remote": False}
FIRST = json.dumps(OWN, separators=(",", ":"))
SLOW = {
    *("argparse", "contextlib", "dataclasses", "enum", "functools", "inspect", "json", "logging", "re", "runpy"),
    *("shutil", "signal", "threading", "typing"),
}
"""Modules of the standard library that take a part of a start that can be noticed."""


def python(code: str, *flags: str, text: str = "") -> str:
    command = [sys.executable, *flags, "-c", code]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True, timeout=60).stdout


def slow(code: str, text: str = "") -> set[str]:
    """Return which slow modules a program imports that Python itself does not."""
    shown = "import sys; sys.stderr.flush(); print('\\n', *sys.modules)"
    both = [set(python(f"{begin}; {shown}", text=text).splitlines()[-1].split()) for begin in (code, "pass")]
    return (both[0] - both[1]) & SLOW


def test_an_agent_reports_before_it_imports_what_only_the_job_needs() -> None:
    code = "from elastic_rs import _hosted; _hosted._serve = lambda *_: 0; _hosted.main()"
    assert python(code, text=f"{FIRST}\n").startswith('elastic_rs-agent f00d {"up": {"version": "')
    assert slow(code, f"{FIRST}\n") == set()


def test_a_launcher_that_has_nothing_to_say_imports_no_logging() -> None:
    code = "from elastic_rs import run; run.main(['--nproc-per-node=1', '--no-python', 'true'])"
    # What else runs in this environment may have imported some of them.
    assert slow(code) <= {"argparse", "contextlib", "enum", "functools", "re"}


@pytest.mark.parametrize("text", ["", "\n", "junk\n", '{"token":""}\n', f"{FIRST}\n", f"{FIRST}\njunk\n"])
def test_an_agent_whose_driver_has_gone_ends(text: str) -> None:
    code = "import sys; from elastic_rs._hosted import main; sys.exit(main())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (1, "")


PLANTED = ("elastic_rs/__init__.py", "elastic_rs/_hosted.py", "argparse.py", "json.py", "torch/__init__.py")


def planted(folder: Path) -> Path:
    """Fill a folder with modules that an agent imports, and return where they would say that they were."""
    told = folder / "told"
    for name in PLANTED:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"open({str(told)!r}, 'a').write(__name__)\nraise SystemExit(99)\n")
    return told


@pytest.mark.parametrize("host", ["localhost", "node1"])
def test_modules_that_lie_in_the_folder_of_an_agent_are_not_imported(tmp_path: Path, host: str) -> None:
    """The folder is ssh's first one, or the driver's, which others may write into (``/tmp``)."""
    told = planted(tmp_path)
    # What `ssh` is given last goes to a shell there.
    command = driver().command(host) if host == "localhost" else ["sh", "-c", driver().command(host)[-1]]
    job = {"token": "f" * 64, "cwd": str(tmp_path), "env": {}, "without": [], "detach": False, "leave": 15}
    job |= {"endpoint": "127.0.0.1:1", "flags": [], "parsed": {}, "conf": "", "script": ["x"]}
    done = subprocess.run(
        command,
        input=f"{FIRST}\n{json.dumps(job)}\n",
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout.startswith('elastic_rs-agent f00d {"up": {"version": "'), done
    assert not told.exists(), told.read_text()


def driver() -> _elastic_rs.Driver:
    args = _flags.parse(["-H", "localhost:1", "x"])
    return _elastic_rs.Driver(_driver._options_of(args, 1, fixed=True, job="{}", port=1))


@pytest.mark.parametrize("link", ["symlink", "fifo"])
def test_the_log_of_a_detached_agent_is_no_way_into_another_file(tmp_path: Path, link: str) -> None:
    """Its name can be guessed, and others may write into the folder."""
    victim, log = tmp_path / "victim", tmp_path / "elastic-run-job-0.log"
    victim.write_text("mine\n")
    if link == "symlink":
        log.symlink_to(victim)
    else:
        os.mkfifo(log)
    code = (
        "import sys; from elastic_rs import _hosted; "
        f"_hosted._detach({{'cwd': {str(tmp_path)!r}, 'log': 'elastic-run-job'}}, {{'age': 0}}, print)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (1, ""), done
    assert f"cannot write the agent's output to `{log}`: " in done.stderr
    assert "remove it" in done.stderr, done.stderr
    assert victim.read_text() == "mine\n"


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        (["leave"], ["SIGTERM"]),
        (["leave", "leave"], ["SIGTERM"]),
        (["signal 2"], ["SIGINT"]),
        (["signal 2", "leave"], ["SIGINT"]),
        (["signal 2", "signal 2"], ["SIGINT", "SIGINT"]),
        (["leave", "signal 2"], ["SIGTERM"]),
        (["leave", "signal 2", "signal 2"], ["SIGTERM", "SIGINT"]),
        (["signal 999", "junk"], ["SIGTERM"]),
        ([], ["SIGTERM"]),
    ],
)
def test_only_the_drivers_second_signal_takes_their_grace_from_workers(
    monkeypatch: pytest.MonkeyPatch, requests: list[str], expected: list[str]
) -> None:
    """The agent kills its workers at its second signal. Being told to leave is its first one."""
    sent: list[str] = []
    monkeypatch.setattr("os.kill", lambda _, number: sent.append(signal.Signals(number).name))
    _hosted._obey(io.BytesIO("".join(f"{line}\n" for line in requests).encode()), signal.SIGTERM)
    assert sent == expected


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--tee=9", ["refused"]),
        ("--log-dir=/dev/null/logs", []),
        ("--nproc-per-node=gpu", []),
        ("--nproc-per-node=0", ["refused"]),
        ("--no-such-script", ["lacks_script"]),
    ],
)
def test_an_agent_says_refused_only_of_what_the_command_line_alone_shows(
    monkeypatch: pytest.MonkeyPatch, flag: str, expected: list[str]
) -> None:
    """Folders and devices of another host may be in order."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    told: list[str] = []
    lacks = flag == "--no-such-script"
    argv = ["none.py"] if lacks else [flag, __file__]
    parsed = _flags.parse(argv)
    setattr(parsed, run.LACKS_SCRIPT, lacks)
    with pytest.raises(SystemExit, match="2"):
        run.main(argv, told=told.append, parsed=parsed)
    assert told == expected


JOBS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.floats(allow_nan=False, width=32),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JOBS)
def test_a_job_is_read_as_json_reads_it(job: Any) -> None:
    line = json.dumps(job).encode()
    assert _hosted._parsed(line) == json.loads(line)


def test_variables_that_are_not_utf8_are_read_too() -> None:
    assert _hosted._parsed(json.dumps({"X": "\udcff"}).encode()) == {"X": "\udcff"}
    for line in (b"", b"{", b"nobody\n", b"[1,]"):
        with pytest.raises(ValueError, match=r"."):
            _hosted._parsed(line)
