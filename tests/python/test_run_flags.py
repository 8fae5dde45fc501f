"""The command line of ``elastic-run`` beside the installed torchrun's: what is read, and what is said of mistakes."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
from elastic_rs import run
from elastic_rs.rendezvous._config import RendezvousConfig
from elastic_rs.run import _flags, _options, _path
from torch.distributed.run import get_args_parser

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

VALUES = ("0", "1", "3", "2:4", "2.5", "-1", "", "text", "fork", "node", "core-complex", "a,,b,c", "GPU", "9" * 30)
SCRIPT = ["train.py", "--lr", "1", "--", "--nnodes=9"]


OWN = {"warm_start"}
"""Flags that torchrun has not."""


def flags_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {action.dest: action for action in parser._actions}


def outcome(parse: Callable[[Sequence[str]], argparse.Namespace], argv: Sequence[str]) -> dict[str, Any] | str:
    """What a command line comes to. How a mistake is worded is another matter."""
    with contextlib.suppress(SystemExit, ValueError):
        return {name: value for name, value in vars(parse(argv)).items() if name not in OWN}
    return "refused"


def theirs(argv: Sequence[str]) -> argparse.Namespace:
    return get_args_parser().parse_args(argv)


ACTIONS = [action for action in flags_of(get_args_parser()).values() if action.dest not in {"help", "print_completion"}]
FLAGS = [pytest.param(action, id=action.dest) for action in ACTIONS if action.option_strings]


def test_every_flag_of_torchrun_is_there_with_all_its_spellings() -> None:
    ours, others = flags_of(_flags.parser()), flags_of(get_args_parser())
    assert ours.keys() == others.keys() | OWN
    for dest, other in others.items():
        own = ours[dest]
        assert set(own.option_strings) == set(other.option_strings), dest
        alike = ("default", "nargs", "const", "required")
        assert {name: getattr(own, name) for name in alike} == {name: getattr(other, name) for name in alike}, dest
        assert (own.choices and list(own.choices)) == (other.choices and list(other.choices)), dest


@pytest.mark.parametrize("action", FLAGS)
def test_a_flag_is_read_as_torchrun_reads_it(action: argparse.Action) -> None:
    for name in action.option_strings:
        assert outcome(_flags.parse, [name]) == outcome(theirs, [name]) == "refused", "there is no script"
        if action.nargs == 0:
            assert outcome(_flags.parse, [name, *SCRIPT]) == outcome(theirs, [name, *SCRIPT])
            continue
        for value in VALUES:
            for argv in ([name, value, *SCRIPT], [f"{name}={value}", *SCRIPT]):
                assert outcome(_flags.parse, argv) == outcome(theirs, argv), argv


@pytest.mark.parametrize("action", FLAGS)
def test_a_variable_stands_for_a_flag_where_it_does_in_torchrun(
    action: argparse.Action, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = action.option_strings[-1]
    for value in VALUES:
        monkeypatch.setenv(f"PET_{action.dest.upper()}", value)
        assert outcome(_flags.parse, SCRIPT) == outcome(theirs, SCRIPT), value
        if action.nargs != 0:
            # What the command line says goes first.
            argv = [f"{flag}=1", *SCRIPT]
            assert outcome(_flags.parse, argv) == outcome(theirs, argv), value


@pytest.mark.parametrize(
    "argv",
    [
        ["--nproc-per=2", *SCRIPT],
        ["--nproc", "2", *SCRIPT],
        ["-t3", "-r", "0:1", *SCRIPT],
        ["-mnumpy", "x"],
        ["--rdzv", "x", *SCRIPT],
        ["--", "train.py"],
        ["train.py", "--nnodes=2", "--help"],
        [],
    ],
)
def test_other_ways_to_write_a_command_line_are_read_alike(argv: list[str]) -> None:
    assert outcome(_flags.parse, argv) == outcome(theirs, argv)


@pytest.mark.parametrize(
    ("argv", "modules"),
    [
        ([], None),
        (["--warm-start"], "torch"),
        (["--warm_start=torch,numpy"], "torch,numpy"),
        (["--warm-start=a", "--warm-start"], "torch"),
        (["--warm-start="], ""),
    ],
)
def test_modules_of_a_warm_start_come_behind_an_equals_sign(argv: list[str], modules: str | None) -> None:
    rest = ["--warm-start=x", "--warm_start=a=b", "--warm-start"]
    args = _flags.parse([*argv, "train.py", *rest])
    assert (args.warm_start, args.training_script, args.training_script_args) == (modules, "train.py", rest)


def test_a_variable_asks_for_warm_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_WARM_START", "numpy")
    assert _flags.parse(SCRIPT).warm_start == "numpy"
    assert _flags.parse(["--warm-start", *SCRIPT]).warm_start == "torch"


def test_a_warm_start_needs_this_python(caplog: pytest.LogCaptureFixture) -> None:
    assert _options.warm_of("torch", ["/bin/echo", "hello"]) is None
    expected = "--warm-start has no effect: their program is `/bin/echo`, not this Python, `"
    assert caplog.messages[0].startswith(expected)
    assert _options.warm_of("torch", [sys.executable, "-u", "train.py"]) is not None
    assert _options.warm_of(None, [sys.executable, "-u", "train.py"]) is None


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What is said of a command line that is refused."""
    with pytest.raises(SystemExit) as ended:
        run.main(argv)
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("elastic-run: error: ")
    assert lines[1:] == ["elastic-run --help lists all flags"]
    return lines[0].removeprefix("elastic-run: error: ")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--warm-stat", "x"], "unknown flag `--warm-stat`: did you mean `--warm-start`?"),
        (["--warm-stat=a", "x"], "unknown flag `--warm-stat`: did you mean `--warm-start`?"),
        (
            ["--standalone", "--warm-start=train.py,a-b", "x"],
            "--warm-start is `train.py,a-b`, must be names of modules: torch,torch.distributed",
        ),
        (["--nprocs-per-node=2", "x"], "unknown flag `--nprocs-per-node`: did you mean `--nproc-per-node`?"),
        (["--zzz", "x"], "unknown flag `--zzz`: flags of the script come after it"),
        ([], "no script is given; it comes after the flags: elastic-run [flags] SCRIPT [the script's arguments]"),
        (["--max_restarts=x", "x"], "--max-restarts: `x` is not a whole number"),
        (["--max-restarts=-1", "x"], "--max-restarts is `-1`, must be from 0 to 4294967295"),
        (["--start-method=thread", "x"], "--start-method: invalid choice: 'thread' (choose from "),
        (
            ["--nnodes=a", "x"],
            "--nnodes is `a`, must be a number from 1 to 4294967295, or MIN:MAX with MIN not above MAX",
        ),
        (
            ["--nnodes=3:2", "x"],
            "--nnodes is `3:2`, must be a number from 1 to 4294967295, or MIN:MAX with MIN not above MAX",
        ),
        (["--nnodes=0", "x"], "--nnodes is `0`, must be"),
        (
            ["--standalone", "--nnodes=2", "x"],
            "--standalone is given and --nnodes is `2`, must be 1: others cannot find",
        ),
        (["--nproc-per-node=0", "x"], "--nproc-per-node is `0`, must be from 1 to 65535, or auto, cpu, gpu, xpu"),
        (["--nproc-per-node=2.5", "x"], "--nproc-per-node is `2.5`, must be a number, auto, cpu, gpu or xpu"),
        (
            ["--rdzv-backend=c10", "x"],
            "--rdzv-backend is `c10`, must be c10d or rust-c10d, which are the same here, or",
        ),
        (["--rdzv-backend=etcd", "x"], "torchrun knows PyTorch's others"),
        (
            ["--rdzv-conf=join_timeuot=1", "x"],
            "--rdzv-conf has the unknown key `join_timeuot`: did you mean `join_timeout`?",
        ),
        (
            ["--rdzv-conf=join_timeout", "x"],
            "--rdzv-conf has the entry `join_timeout`, must be KEY=VALUE,KEY=VALUE,...",
        ),
        (["--rdzv-conf=agent=torch", "x"], "--rdzv-conf agent is `torch`, must be `rust` here"),
        (
            ["--rdzv-backend=c10d", "--rdzv-endpoint=a:x", "x"],
            "--rdzv-endpoint: the rendezvous endpoint is `a:x`, must be HOST,",
        ),
        (["--rdzv-backend=c10d", "--rdzv-id=", "x"], "--rdzv-id is empty, must be the job's name"),
        (["--nnodes=2", "--node-rank=2", "x"], "--node-rank is `2`, must be from 0 to 1, since --nnodes is `2`"),
        (["--nnodes=2", "--master-port=0", "x"], "--master-addr and --master-port: the port is `0`, must be one that"),
        (
            ["--nnodes=2", "--rdzv-endpoint=a", "x"],
            "--rdzv-endpoint: the rendezvous endpoint is `a`, must name a port: a:PORT",
        ),
        (["--tee=5", "x"], "--tee is `5`, must be 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or"),
        (["-r", "0:x", "x"], "--redirects is `0:x`, must be"),
        (["--local-ranks-filter=a", "x"], "--local-ranks-filter is `a`, must be local ranks: 0,1,2"),
        (
            ["--log-dir=/dev/null/logs", "x"],
            "--log-dir is `/dev/null/logs`, must be a folder, or what can be made one:",
        ),
        (
            ["--signals-to-handle=SIGTREM", "x"],
            "--signals-to-handle has `SIGTREM`, must be names such as SIGTERM,SIGUSR1; did",
        ),
        (
            ["--signals-to-handle=SIGKILL", "x"],
            "--signals-to-handle has `SIGKILL`, which the kernel lets nobody handle",
        ),
        (
            ["--shutdown-timeout=-1", "x"],
            "--shutdown-timeout is `-1`, must be a whole number of seconds from 0 to 315360000",
        ),
        ([f"--shutdown-timeout={10**25}", "x"], f"--shutdown-timeout is `{10**25}`, must be a whole number"),
        (["--max-restarts=99999999999", "x"], "--max-restarts is `99999999999`, must be from 0 to 4294967295"),
        (["-r", "99999999999999:3", "x"], "--redirects is `99999999999999:3`, must be 0 (none)"),
        (["-t", "65535:3", "x"], "local rank from 0 to 65534: 0:3,1:1"),
        (["--nnodes=1:2:3", "x"], "--nnodes is `1:2:3`, must be"),
        (["--lr", "0.1", "x"], "unknown flag `--lr`: flags of the script come after it"),
        (["--rdzv-=x", "y"], "could match --rdzv-backend, --rdzv-endpoint, --rdzv-id, --rdzv-conf"),
        (["--warm=x", "y"], "ambiguous option: --warm=x could match --warm-start"),
        (["--rdzv-backend=c10d", "--rdzv-id=\udcff", "x"], "--rdzv-id is `\\xff`, must be UTF-8"),
        (["--role=\udcff", "x"], "--role is `\\xff`, must be UTF-8"),
        (["--local-addr=\udcff", "x"], "--local-addr is `\\xff`, must be UTF-8"),
        (["--log-line-prefix-template=a\udcff", "x"], "--log-line-prefix-template is `a\\xff`, must be UTF-8"),
        (["--duplicate-stdout-filters=a,\udcff", "x"], "--duplicate-stdout-filters is `\\xff`, must be UTF-8"),
        (["--duplicate-stderr-filters=\udcff", "x"], "--duplicate-stderr-filters is `\\xff`, must be UTF-8"),
        (["--no-python", "--module", "x"], "--no-python and --module are given, must be one of them at most"),
    ],
)
def test_a_mistake_is_told_with_flag_value_and_what_is_allowed(
    capsys: pytest.CaptureFixture[str], argv: list[str], text: str
) -> None:
    assert text in said(capsys, *argv)


def test_a_variable_that_is_no_number_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_STANDALONE", "yes")
    assert said(capsys, "x") == "PET_STANDALONE is `yes`, must be 0 or 1: it sets --standalone"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--standalone", "--nnodes=2"], "--standalone is given and --nnodes is `2`, must be 1"),
        (["--tee=9"], "--tee is `9`, must be 0 (none)"),
        (["--nnodes=2", "--node-rank=2"], "--node-rank is `2`, must be from 0 to 1"),
        (["--rdzv-backend=bogus"], "--rdzv-backend is `bogus`, must be one of c10d, "),
        (["--event-log-handler=nobody"], "--event-log-handler is `nobody`, must be one of console, "),
        (["--logs-specs=nobody"], "--logs-specs is `nobody`, must be "),
        (["--warm-start"], "--warm-start and --event-log-handler cannot be combined"),
    ],
)
def test_a_mistake_is_told_before_pytorch_takes_over(
    capsys: pytest.CaptureFixture[str], argv: list[str], text: str
) -> None:
    assert text in said(capsys, "--event-log-handler=console", *argv, "x")


@pytest.mark.parametrize("seconds", ["inf", "1e30", "nan", "-1", "x", ""])
def test_a_sleep_without_end_is_not_looked_for(monkeypatch: pytest.MonkeyPatch, seconds: str) -> None:
    monkeypatch.setenv("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", seconds)
    assert _options.launch_options_of(_flags.parse(SCRIPT)).uninterruptible_sleep_s == 0


def test_what_torchrun_reads_as_numbers_is_read_alike() -> None:
    def shown(ranks: str) -> Any:
        args = _flags.parse([f"--local-ranks-filter={ranks}", *SCRIPT])
        return _options.log_options_of(args).shown_ranks

    assert [shown(ranks) for ranks in ("", "-1", "99999999999", " 1 ,1_0")] == [None, [], [], [1, 10]]
    assert _options.nodes_of("1_0") == (10, 10)
    assert _options.nodes_of(" 1: 2") == (1, 2)


def test_an_empty_address_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _options.local_addr_of(_flags.parse(["--local-addr=", *SCRIPT])) is None
    monkeypatch.setenv("PET_LOCAL_ADDR", "")
    assert _options.local_addr_of(_flags.parse(SCRIPT)) is None
    assert _options.local_addr_of(_flags.parse(["--local-addr=127.0.0.2", *SCRIPT])) == "127.0.0.2"


@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full"])
def test_a_mistake_that_cannot_be_told_ends_alike(stderr: str) -> None:
    shell = f'exec "$0" -m elastic_rs.run --nope x {stderr}'
    assert subprocess.run(["sh", "-c", shell, sys.executable], check=False, timeout=60).returncode == 2


def test_a_script_whose_name_is_not_utf8_runs(tmp_path: Path) -> None:
    script = os.fsencode(tmp_path) + b"/\xff.py"
    with open(script, "w") as file:  # noqa: PTH123 - the name is bytes
        file.write("import sys; print('ran', *sys.argv[1:]); sys.exit(7)")
    command = [sys.executable, "-m", "elastic_rs.run", "--standalone", script, "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "ran 1\n")
    assert "/\ufffd.py FAILED" in done.stderr


@pytest.mark.parametrize("limit", [9, 12, 14])
def test_what_a_process_without_descriptors_cannot_do_is_one_line(limit: int) -> None:
    shell = f'ulimit -n {limit}; exec "$0" -m elastic_rs.run --standalone --no-python true'
    done = subprocess.run(["sh", "-c", shell, sys.executable], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("elastic-run: error: ")]


def test_an_interrupt_while_modules_are_imported_is_no_traceback() -> None:
    code = (
        "import sys\nclass Interrupt:\n    def find_spec(self, name, *_):\n"
        "        if name == 'argparse': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\nfrom elastic_rs.run import main"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_help_shows_every_flag_once_in_groups_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for action in ACTIONS:
        for name in action.option_strings:
            count = len(re.findall(rf"^  (?:-\w, )?{name}(?= |,|$)", text, re.MULTILINE))
            assert count == (0 if "_" in name else 1), name
    for heading in ("size of the job:", "how nodes find each other:", "output of workers:", "examples:", "exit codes:"):
        assert f"\n{heading}\n" in text
    assert max(map(len, text.splitlines())) <= 140


@pytest.mark.parametrize("argv", [["--help"], ["doctor", "--help"]])
def test_help_says_by_itself_what_rdzv_conf_takes(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(argv)
    text = capsys.readouterr().out
    for key, default in RendezvousConfig().values().items():
        value = "" if default is None else f"={default:g}" if isinstance(default, float) else f"={default}"
        assert re.search(rf"[ (]{key}{value}[,\n]", text), key
    assert "docs/" not in text, "a wheel has no such folder"


def test_what_a_command_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(*argv: str) -> tuple[str, list[str]]:
        return _options.command_of(_flags.parse(argv))

    python = sys.executable
    assert command("a.py", "-x", "1") == ("a.py", [python, "-u", "a.py", "-x", "1"])
    assert command("-m", "pkg.a", "-x") == ("pkg.a", [python, "-u", "-m", "pkg.a", "-x"])
    assert command("--no-python", "true", "-x") == ("true", ["true", "-x"])
    run_path = [python, "-u", _path.__file__, sys.path[0], "/a.py", "x"]
    assert command("--run-path", "--no-python", "/a.py", "x") == ("/a.py", run_path)
    monkeypatch.setenv("PYTHON_EXEC", "/opt/python")
    assert command("a.py") == ("/opt/python", ["/opt/python", "-u", "a.py"])


def test_where_nodes_meet_is_what_torchrun_makes_of_the_flags() -> None:
    def meeting(*flags: str) -> _options.Rendezvous:
        return _options.rendezvous_of(_flags.parse([*flags, "x"]))

    for alone in ([], ["--standalone"], ["--standalone", "--rdzv-backend=etcd", "--rdzv-id=a"]):
        found = meeting(*alone)
        assert (found.host, found.port, found.nodes, found.fixed) == ("localhost", 0, (1, 1), False)
        assert len(found.run_id) == 36
    found = meeting("--rdzv-backend=c10d", "--nnodes=2:4", "--rdzv-endpoint=node0", "--rdzv-id=job")
    assert (found.run_id, found.host, found.port, found.nodes, found.fixed) == ("job", "node0", 29400, (2, 4), False)
    found = meeting("--rdzv-backend=rust-c10d", "--rdzv-endpoint=[::1]:77")
    assert (found.host, found.port) == ("::1", 77)
    assert meeting("--rdzv-backend=c10d").port == 0, "a job of one node needs no port of its own"
    found = meeting("--nnodes=1:3", "--node-rank=2", "--master-addr=[::1]")
    assert (found.host, found.port, found.nodes, found.fixed) == ("::1", 29500, (3, 3), True)
    assert (found.config.node_rank, found.config.is_host, found.config.join_timeout) == (2, False, 900)
    found = meeting("--nnodes=2", "--rdzv-endpoint=h:1", "--rdzv-conf=join_timeout=5")
    assert (found.host, found.port, found.config.is_host, found.config.join_timeout) == ("h", 1, True, 5)
    assert meeting("--nnodes=2", "--rdzv-conf=read_timeout=5").config.join_timeout == 900
    assert meeting("--master-port=7").port == 7, "a port was asked for"


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "a",
        " a:1 ",
        "a.b-c_d:65535",
        "a:65536",
        "a:",
        "a:x",
        ":1",
        "[::1]",
        "[::1]:5",
        "::1:5",
        "a b:1",
        "a/b:1",
        "1.2.3.4:0",
    ],
)
def test_an_endpoint_is_read_as_pytorch_reads_it(endpoint: str) -> None:
    from elastic_rs.rendezvous._config import parse_endpoint
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    def read(parse: Callable[[str, int], tuple[str, int]]) -> tuple[str, int] | None:
        with contextlib.suppress(ValueError):
            return parse(endpoint, 29400)
        return None

    assert read(parse_endpoint) == read(parse_rendezvous_endpoint)


@pytest.mark.parametrize("endpoint", ["::1", "::", "2001:db8::1", "1:2:3:4:5:6:7:8", "::ffff:10.0.0.1", "fe80::1:abcd"])
def test_an_ipv6_address_without_brackets_is_told_at_once(capsys: pytest.CaptureFixture[str], endpoint: str) -> None:
    # PyTorch takes what follows the last colon for the port: `::1` is port 1 of `:`, which it tries for minutes.
    for flags in (["--rdzv-backend=c10d"], ["--nnodes=2"]):
        text = said(capsys, *flags, f"--rdzv-endpoint={endpoint}", "x")
        assert f"is `{endpoint}`, must have brackets around an IPv6 address: [{endpoint}]" in text


def test_no_brackets_are_asked_for_where_they_would_not_help(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "--rdzv-backend=c10d", "--rdzv-endpoint=fe80::1%eth0", "x")
    assert "is `fe80::1%eth0`, must be an address without a zone" in text


def test_a_port_behind_an_ipv6_address_without_brackets_is_read_as_pytorch_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from elastic_rs.rendezvous._config import parse_endpoint

    assert parse_endpoint("2001:db8::1:29400", 1) == ("2001:db8::1", 29400)
    assert not caplog.records, "a part of an address has four digits at most"
    assert parse_endpoint("2001:db8::1:2940", 1) == ("2001:db8::1", 2940)
    assert caplog.messages == [
        "the rendezvous endpoint `2001:db8::1:2940` is read as port 2940 of `2001:db8::1`; brackets make it clear: "
        "[2001:db8::1]:2940, or [2001:db8::1:2940] for the address"
    ]


@pytest.mark.parametrize("address", ["::1", "[::1]", "2001:db8::1"])
def test_a_master_address_of_ipv6_needs_no_brackets(caplog: pytest.LogCaptureFixture, address: str) -> None:
    args = _flags.parse(["--nnodes=2", f"--master-addr={address}", "--master-port=2950", "x"])
    meeting = _options.rendezvous_of(args)
    assert (meeting.host, meeting.port) == (address.strip("[]"), 2950)
    assert not caplog.records


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--nnodes=2"], True),
        (["--nnodes=1:4"], True),
        (["--nnodes=2", "--rdzv-endpoint=localhost"], False),
        (["--nnodes=1"], False),
    ],
)
def test_several_nodes_without_an_endpoint_are_told_that_only_this_machine_finds_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, flags: list[str], told: bool
) -> None:
    monkeypatch.setattr(run, "_take_part", lambda *_: 0)
    with caplog.at_level("WARNING", "elastic_rs"):
        assert run.main(["--rdzv-backend=c10d", *flags, "--no-python", "true"]) == 0
    expected = "no --rdzv-endpoint is given: this node meets others at localhost:29400, where only"
    assert any(text.startswith(expected) for text in caplog.messages) == told


def test_what_does_not_exist_is_one_line_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "plain").touch(mode=0o644)
    for argv, text in (
        (["trian.py"], f"the script `trian.py` does not exist in `{tmp_path}`"),
        ([str(tmp_path / "a.py")], f"the script `{tmp_path}/a.py` does not exist"),
        (["plain/a.py"], "the script `plain/a.py` cannot be opened: Not a directory"),
        (["folder"], "the script `folder` is a folder without __main__.py"),
        (["--run-path", str(tmp_path / "a.py")], f"the script `{tmp_path}/a.py` does not exist"),
        (["-m", "trian.main"], f"no module named `trian`, neither in `{tmp_path}` nor for {sys.executable}"),
        (["--no-python", "trian"], "the program `trian` is in no folder of PATH"),
        (["--no-python", "./trian"], f"the program `./trian` does not exist in `{tmp_path}`"),
        (["--no-python", "./plain"], "the program `./plain` is not executable"),
        (["--event-log-handler=console", "trian.py"], f"the script `trian.py` does not exist in `{tmp_path}`"),
    ):
        command = [sys.executable, "-m", "elastic_rs.run", "--nproc-per-node=2", "--nnodes=2", *argv]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"elastic-run: error: {text}\n")


@pytest.mark.parametrize(
    "argv",
    [
        ["main.py"],
        ["folder"],
        ["folder.zip"],
        ["-m", "main"],
        ["-m", "folder"],
        ["--", "-c", "print('ran')"],
        ["--no-python", "./main.py"],
        ["--no-python", "main.py"],
        ["--run-path", "main.py"],
    ],
)
def test_what_can_be_run_is_run(tmp_path: Path, argv: list[str]) -> None:
    script = tmp_path / "main.py"
    script.write_text(f"#!{sys.executable}\nprint('ran')\n")
    script.chmod(0o755)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text("print('ran')")
    with zipfile.ZipFile(tmp_path / "folder.zip", "w") as archive:
        archive.writestr("__main__.py", "print('ran')")
    env = {**os.environ, "PATH": f"{os.environ['PATH']}:{tmp_path}"}
    command = [sys.executable, "-m", "elastic_rs.run", "--standalone", *argv]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")


@pytest.mark.parametrize("name", ["train_${local_rank}.py", "train_$local_rank.py"])
def test_a_script_may_be_another_for_each_worker(tmp_path: Path, name: str) -> None:
    for local_rank in range(2):
        (tmp_path / f"train_{local_rank}.py").write_text("print('ran')")
    command = [sys.executable, "-m", "elastic_rs.run", "--standalone", "--nproc-per-node=2", name]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\nran\n", "")


@pytest.mark.parametrize("argv", [["train.py"], ["-m", "no_such_module"]])
def test_a_current_folder_that_was_removed_is_named(tmp_path: Path, argv: list[str]) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    code = "import os, sys; os.rmdir(os.getcwd()); from elastic_rs import run; sys.exit(run.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "--standalone", *argv]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    text = "in the current folder, which is not accessible (No such file or directory)"
    assert text in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_module_that_only_workers_find_is_run(tmp_path: Path) -> None:
    (tmp_path / "only_workers.py").write_text("print('ran')")
    where = os.path.dirname(os.path.dirname(os.path.dirname(run.__file__)))  # noqa: PTH120
    code = f"import sys; sys.path.insert(0, {where!r}); from elastic_rs import run; sys.exit(run.main(sys.argv[1:]))"
    command = [sys.executable, "-I", "-c", code, "--standalone", "-m", "only_workers"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")


def test_a_program_in_pythons_place_reads_its_arguments_as_it_likes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "elastic_rs.run", "--standalone", "s3://bucket/train.py"]
    env = {**os.environ, "PYTHON_EXEC": "echo"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "-u s3://bucket/train.py\n")


@pytest.mark.parametrize("conf", ["", " ", "a=1", " a = 1 , b=x=y ", "a", "a=", "=1", "a=1,,b=2", ","])
def test_a_configuration_is_read_as_pytorch_reads_it(conf: str) -> None:
    from elastic_rs.rendezvous._config import parse_conf
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

    def read(parse: Callable[[str], dict[str, str]]) -> dict[str, str] | None:
        with contextlib.suppress(ValueError):
            return parse(conf)
        return None

    assert read(parse_conf) == read(_parse_rendezvous_config)


def test_torch_is_not_imported() -> None:
    code = (
        "import sys; from elastic_rs.run import main; code = main(['--standalone', '--no-python', 'true']); "
        "print(code, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "0 False False\n"


# Devices. What the driver knows is counted in the core, whose tests have the rules.


def test_cpus_are_those_that_this_process_may_use() -> None:
    from torch._utils import cpu_count  # type: ignore[attr-defined]

    assert _options.workers_of("cpu") == cpu_count()


def test_devices_are_as_many_as_torchrun_finds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.run import determine_local_world_size

    for kind in ("auto", "gpu", "xpu", "nonsense"):
        expected: int | str
        try:
            expected = determine_local_world_size(kind)
        except ValueError as error:
            expected = str(error).rstrip(".")
        if isinstance(expected, int):
            assert _options.workers_of(kind) == expected, kind
        else:
            text = said(capsys, f"--nproc-per-node={kind}", "x")
            assert expected in text
            assert f"--nproc-per-node is `{kind}`" in text
    # Nothing is visible then, whatever there is.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "Cuda is not available" in said(capsys, "--nproc-per-node=gpu", "x")
