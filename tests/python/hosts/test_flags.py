"""Command lines with hosts that are refused, and what is passed on to agents."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from elastic_rs import _elastic_rs, _hosted
from elastic_rs.run import _command_line, _driver, _flags, _host_flags
from helpers.command_lines import said


def test_the_list_of_flags_is_that_of_the_parser() -> None:
    made = _command_line.Parser()
    _host_flags.add_host_flags(made.section("hosts"))
    assert {flag.dest for flag in made.all()} - {"help", "version"} == set(_host_flags.FLAGS)
    assert all(flag.own for flag in made.all() if flag.dest not in ("help", "version"))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["-H", "a:2", "--hostfile=x"], "-H and --hostfile are given, must be one of them"),
        (["--min-np=2"], "--min-np is given without hosts, which -H, --hostfile, --host-discovery-script or"),
        (
            ["-H", "a:2", "--nnodes=2"],
            "--nnodes is `2`, must not be given with hosts: --min-np and --max-np count workers",
        ),
        (["-H", "a:2", "--min-np=3"], "--min-np is `3`, must not be above"),
        (["-H", "a:2", "--min-np=2", "--max-np=1"], "--min-np is `2`, must not be above --max-np"),
        (["-H", "a:0"], "-H: entry 1 is `a:0`, its slots must be a number from 1 to 65535"),
        (["-H", "a:1,a:2"], "-H: entry 2 is `a:2`, but entry 1 is that host already"),
        (["-H", "-oProxyCommand=x"], "--hosts: expected one argument"),
        (["--hosts=-oProxyCommand=x"], "-H: entry 1 is `-oProxyCommand=x`, must be HOST or HOST:SLOTS"),
        (["--hostfile=/no/file"], "--hostfile: `/no/file` cannot be read: No such file or directory"),
        (
            ["--host-discovery=nothing"],
            "--host-discovery is `nothing`, must be slurm, dns:NAME, file:PATH or MODULE:CLASS",
        ),
        (["--host-discovery=no.module:X"], "--host-discovery is `no.module:X`, which fails: ModuleNotFoundError"),
        (["--host-discovery=builtins:object"], "which has no method find_available_hosts_and_slots"),
        (["-H", "a", "--nproc-per-node=gpu"], "--nproc-per-node is `gpu`, must be a number with hosts"),
        (
            ["-H", "a", "--blacklist-cooldown-range", "10", "5"],
            "--blacklist-cooldown-range is `10.0 5.0`, must be LOW and",
        ),
        (["-H", "a", "--start-timeout=0"], "--start-timeout is `0.0`, must be above 0"),
        (["-H", "a", "--reset-limit=-1"], "--reset-limit is `-1`, must be 0 or more"),
        (["-H", "a", "--rdzv-backend=etcd"], "--rdzv-backend is `etcd`, must be c10d with hosts"),
        (["-H", "a", "--rdzv-conf=is_host=1"], "--rdzv-conf has is_host, which the driver gives the agents itself"),
        (["-H", "a", "--rdzv-conf=lat_call_timeout=1"], "last_call_timeout"),
        (["-H", "a", "--standalone"], "--standalone must not be given with hosts"),
        (["-H", "a", "--ssh="], "--ssh is empty, must be a program"),
        (["--host-discovery-script=cat hosts | grep a"], "and no shell runs it, which `|` is for: make a script of it"),
        (
            ["--host-discovery-script=true && cat hosts"],
            "which `&&` is for: make a script of it, or use sh -c 'true &&",
        ),
        (["--host-discovery-script="], "--host-discovery-script: the discovery script is empty"),
    ],
)
def test_errors_name_the_flag_the_value_and_what_is_allowed(
    capsys: pytest.CaptureFixture[str], argv: list[str], expected: str
) -> None:
    assert expected in said(capsys, *argv, "train.py")


def test_python_in_front_of_the_script_is_refused_before_an_agent_starts(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "-H", "a:2", "--ssh=/no/ssh", "python", "train.py")
    assert text.startswith("the script is `python`: leave it out")


def test_a_bad_line_of_a_host_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("node1 slots=2\nnode2 cpus=2\n")
    assert "line 2 is `node2 cpus=2`, must be HOST slots=N or HOST:N" in said(capsys, f"--hostfile={path}", "train.py")


def test_a_host_file_without_hosts_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("\ufeff# nobody\n\n", encoding="utf-8")
    assert said(capsys, f"--hostfile={path}", "train.py") == f"--hostfile: `{path}` names no host"


@pytest.mark.parametrize("reader", ["true", "head -1"])
def test_a_dry_run_whose_reader_goes_ends_without_a_traceback(reader: str) -> None:
    hosts = ",".join(f"node{number}" for number in range(500))
    shell = f'set -o pipefail; "$0" -m elastic_rs.run -H {hosts} --dry-run train.py | {reader} >/dev/null'
    done = subprocess.run(["bash", "-c", shell, sys.executable], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_variables_set_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_HOSTS", "a:2")
    monkeypatch.setenv("PET_MIN_NP", "1")
    monkeypatch.setenv("PET_BLACKLIST_COOLDOWN_RANGE", "1,5")
    args = _flags.parse(["train.py"])
    assert _host_flags.is_driver(args)
    assert (args.hosts, args.min_np, args.blacklist_cooldown_range) == ("a:2", 1, (1.0, 5.0))


def _agents(argv: list[str]) -> list[str]:
    """Return the flags that agents get."""
    return _flags.split(argv).words(without=_host_flags.FLAGS)


def test_agents_get_the_other_flags_in_their_order() -> None:
    argv = [
        *("-Ha:2", "--tee", "3", "--min_np=2", "-r", "0:3", "--blacklist-cooldown-range", "1", "5"),
        *(
            "--warm-modules=torch",
            "--max-restarts=3",
            "--ssh",
            "ssh -p 1",
            "--dry-run",
            "-m",
            "train",
            "-H",
            "--min-np=7",
        ),
    ]
    args = _flags.parse(argv)
    assert _host_flags.is_driver(args)
    assert args.training_script_args == ["-H", "--min-np=7"]
    rest = ["--tee=3", "--redirects=0:3", "--warm-modules=torch", "--max-restarts=3", "--module"]
    assert _agents(argv) == rest


# The `--` of `train.py -- x` and of `-- train.py x` is dropped, as by torchrun. The second one of `-- train.py -- x` is
# an argument.
@pytest.mark.parametrize(
    ("words", "script"),
    [
        (["train.py", "x"], ["train.py", "x"]),
        (["train.py", "--", "x"], ["train.py", "x"]),
        (["train.py", "--"], ["train.py"]),
        (["train.py", "x", "--", "y"], ["train.py", "x", "--", "y"]),
        (["--", "train.py", "x"], ["train.py", "x"]),
        (["--", "train.py", "--", "x"], ["train.py", "--", "x"]),
        (["--", "-x.py", "--", "x"], ["-x.py", "--", "x"]),
    ],
)
def test_agents_get_the_script_that_the_driver_got(words: list[str], script: list[str]) -> None:
    argv = ["-H", "a:2", "--max-restarts=3", *words]
    args = _flags.parse(argv)
    assert _host_flags.is_driver(args)
    assert [args.training_script, *args.training_script_args] == script
    assert _agents(argv) == ["--max-restarts=3"]
    own = {"remote": False, "port": 1, "hosts_coordinator": False, "host": "a", "age": 0, "slots": 2}
    job = {"flags": ["--max-restarts=3"], "conf": "join_timeout=9", "endpoint": None, "script": script}
    there = _flags.parse(_hosted.command_line(own, job, _hosted._endpoint(own, job)))
    assert there.rdzv_endpoint == "127.0.0.1:1"
    assert [there.training_script, *there.training_script_args] == script


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "660"),
        (["--elastic-timeout=3600.5"], "3661"),
        (["--elastic-timeout=5"], "600"),
        (["--elastic-timeout=2000000000"], "315360000"),
        (["--elastic-timeout=3600", "--rdzv-conf=join_timeout=7"], "7"),
        (["--elastic-timeout=3600", "--rdzv-conf=timeout=7"], None),
    ],
)
def test_agents_wait_for_a_world_for_longer_than_the_driver(flags: list[str], expected: str | None) -> None:
    args = _flags.parse(["-H", "a:2", *flags, "train.py"])
    assert _host_flags.is_driver(args)
    conf = dict(pair.split("=") for pair in _driver._conf_of(args, (2, 2))[0].split(","))
    assert conf.get("join_timeout") == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], {"host_failures": "3"}),
        (["--host-failures=0"], {"host_failures": "0"}),
        (["--reset-limit=0"], {"host_failures": "3", "reset_limit": "0"}),
        (
            ["--blacklist-cooldown-range", "1", "2"],
            {"blacklist_cooldown_min": "1", "blacklist_cooldown_max": "2"},
        ),
    ],
)
def test_limits_of_failures_and_resets_may_be_0(flags: list[str], expected: dict[str, str]) -> None:
    args = _flags.parse(["-H", "a:2", *flags, "train.py"])
    assert _host_flags.is_driver(args)
    assert _driver._judging(args) == expected
    options = _driver._options_of(args, 2, True, "{}", 1, run_id="job", passed_on=[])
    assert options.host_failures == int(expected.get("host_failures", "1"))
    _elastic_rs.Driver(options)


def test_abbreviations_of_torchruns_flags_mean_what_they_did() -> None:
    args = _flags.parse(["--stan", "--redir=3", "train.py"])
    assert (args.standalone, args.redirects) == (True, "3")
    # Without this rule `--host` and the like would take `--h` from `--help`.
    with pytest.raises(SystemExit) as ended:
        _flags.parse(["--h"])
    assert ended.value.code == 0
