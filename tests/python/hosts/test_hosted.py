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

OWN = {"token": "f00d", "host": "a", "slots": 1, "age": 0, "hosts_coordinator": False, "port": 1, "remote": False}
FIRST = json.dumps(OWN)
JOB: dict[str, Any] = {"token": "f" * 64, "env": {}, "detach": False, "leave": 15, "endpoint": "127.0.0.1:1"}
JOB |= {"flags": [], "conf": "join_timeout=9", "script": ["x"], "lacks_script": False, "passed_on": []}
NOT_FOR_AN_EMPTY_SCRIPT = {"asyncio", "concurrent.futures", "http", "json", "multiprocessing", "ssl", "torch"}
"""Modules whose import takes longer than all that `elastic-run` needs before it starts its workers."""


def test_elastic_run_starts_at_once(tmp_path: Path) -> None:
    """What it imports decides how long it takes, on any machine."""
    script = tmp_path / "empty.py"
    script.touch()
    run = ["-m", "elastic_rs.run", "--standalone", "--nproc-per-node=1", str(script)]
    command = [sys.executable, "-X", "importtime", *run]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "elastic_rs.run" in imported
    assert not imported & NOT_FOR_AN_EMPTY_SCRIPT


def test_an_agent_reports_before_it_imports_what_only_the_job_needs() -> None:
    code = (
        "import sys; from elastic_rs import _hosted; main = _hosted.main; "
        "_hosted._serve = lambda *_: print('elastic_rs.run' in sys.modules); main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=f"{FIRST}\n{{}}\n", capture_output=True, text=True, check=True, timeout=60
    )
    up, imported = done.stdout.splitlines()
    assert up.startswith('elastic_rs-agent f00d {"up": {"version": "')
    assert imported == "False"


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
    job = JOB | {"cwd": str(tmp_path)}
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


def test_flags_and_certificates_are_the_drivers_and_not_the_hosts_own(tmp_path: Path) -> None:
    job = JOB | {"cwd": str(tmp_path), "env": {"PET_MAX_RESTARTS": "2"}}
    code = (
        f"import os; from elastic_rs import _hosted; _hosted._enter({job!r}); "
        "print({name: value for name, value in os.environ.items() if name.startswith(('PET_', 'ELASTIC_RS_TLS'))})"
    )
    env = os.environ | {"PET_TEE": "3", "PET_MAX_RESTARTS": "9", "ELASTIC_RS_TLS_CERT": "mine"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "{'PET_MAX_RESTARTS': '2'}\n"


def driver() -> _elastic_rs.Driver:
    args = _flags.parse(["-H", "localhost:1", "x"])
    return _elastic_rs.Driver(_driver._options_of(args, 1, fixed=True, job="{}", port=1, run_id="job", passed_on=[]))


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
        (["signal 10", "signal 10", "leave", "signal 10"], ["SIGUSR1", "SIGUSR1", "SIGTERM", "SIGUSR1"]),
        (["signal 10", "signal 2", "signal 2"], ["SIGUSR1", "SIGINT", "SIGINT"]),
        ([], ["SIGTERM"]),
    ],
)
def test_only_the_drivers_second_signal_takes_their_grace_from_workers(
    monkeypatch: pytest.MonkeyPatch, requests: list[str], expected: list[str]
) -> None:
    """The agent kills its workers at its second signal. A request to leave is its first one."""
    sent: list[str] = []
    monkeypatch.setattr("os.kill", lambda _, number: sent.append(signal.Signals(number).name))
    _hosted._obey(io.BytesIO("".join(f"{line}\n" for line in requests).encode()), signal.SIGTERM, [signal.SIGUSR1])
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
    argv = ["none.py"] if flag == "--no-such-script" else [flag, __file__]
    with pytest.raises(SystemExit, match="2"):
        run.main(argv, report=told.append)
    assert told == expected


@pytest.mark.parametrize("lacks", [True, False])
def test_a_script_that_the_driver_has_is_no_reason_to_give_up(tmp_path: Path, lacks: bool) -> None:
    # The end of the input is no reason to leave here.
    job = JOB | {"cwd": str(tmp_path), "lacks_script": lacks, "leave": 0}
    code = f"import io; from elastic_rs import _hosted; _hosted._serve(io.BytesIO(), {OWN!r}, {job!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "the script `x` does not exist" in done.stderr
    assert ('"lacks_script"' in done.stdout) == lacks
