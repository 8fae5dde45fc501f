"""The command line of ``elastic-run`` compared with the installed torchrun's: parsed values, and errors."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from elastic_rs import run
from elastic_rs.rendezvous._config import RendezvousConfig
from elastic_rs.run import _flags, _host_flags, _node, _options, _script
from elastic_rs.run._usage import UsageError
from torch.distributed.run import get_args_parser

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
from helpers.command_lines import ENDED, said

VALUES = ("0", "1", "3", "2:4", "2.5", "-1", "", "text", "fork", "node", "core-complex", "a,,b,c", "GPU", "9" * 30)
SCRIPT = ["train.py", "--lr", "1", "--", "--nnodes=9"]


OWN = {
    "version",
    "warm_start",
    "warm_modules",
    "omp_threads",
    "in_place",
    "standby",
    "no_restart_on",
    "exit_code",
    "first_signal",
    "forward_signals",
    "health_check",
    "preempt_notice",
    "preempt_deadline",
    "preempt_signal",
    "hang",
    "hang_timeout",
    "on_hang",
    "progress_log",
    "ranks_filter",
    "store_tunnel",
    *_host_flags.FLAGS,
}
"""Flags that torchrun does not have."""


def flags_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {action.dest: action for action in parser._actions}


def outcome(parse: Callable[[Sequence[str]], argparse.Namespace], argv: Sequence[str]) -> dict[str, Any] | str:
    """Return the parsed command line, or that it is an error. The wording of errors is not compared."""
    with contextlib.suppress(SystemExit, ValueError):
        hidden = {*OWN, "signals_named", "variables"}
        return {name: value for name, value in vars(parse(argv)).items() if name not in hidden}
    return "refused"


def theirs(argv: Sequence[str]) -> argparse.Namespace:
    return get_args_parser().parse_args(argv)


ACTIONS = [action for action in flags_of(get_args_parser()).values() if action.dest not in {"help", "print_completion"}]
FLAGS = [pytest.param(action, id=action.dest) for action in ACTIONS if action.option_strings]


def test_every_flag_of_torchrun_is_there_with_all_its_spellings() -> None:
    ours, others = flags_of(_flags.parser()), flags_of(get_args_parser())
    assert ours.keys() == others.keys() | OWN
    spellings = _flags.parser().flags
    for dest, other in others.items():
        own = ours[dest]
        assert {name for name in spellings if spellings[name].dest == dest} == set(other.option_strings), dest
        if not other.option_strings:
            continue  # SCRIPT, which the parser does not read
        alike = ("default", "nargs", "const", "required")
        assert {name: getattr(own, name) for name in alike} == {name: getattr(other, name) for name in alike}, dest
        assert (own.choices and list(own.choices)) == (other.choices and list(other.choices)), dest


def test_signals_are_named_by_flag_or_variable_if_only_those_of_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    default = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    assert [_flags.parse([*argv, *SCRIPT]).signals_named for argv in ([], [default])] == [False, True]
    monkeypatch.setenv("PET_SIGNALS_TO_HANDLE", "SIGTERM")
    assert _flags.parse(SCRIPT).signals_named


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
            # The command line takes precedence.
            argv = [f"{flag}=1", *SCRIPT]
            assert outcome(_flags.parse, argv) == outcome(theirs, argv), value


@pytest.mark.parametrize(
    "argv",
    [
        ["--nproc-per=2", *SCRIPT],
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


def test_the_two_spellings_of_a_flag_do_not_make_its_abbreviation_ambiguous() -> None:
    # argparse of Python 3.11 says so, and later ones do not.
    assert _flags.parse(["--nproc", "2", *SCRIPT]).nproc_per_node == "2"


@pytest.mark.parametrize("rest", [["--r=16"], ["--start=5"], ["--in="], ["--warm="], ["--rdzv-="], ["--standalone=x"]])
@pytest.mark.parametrize("head", [["train.py"], ["--", "train.py"], ["--tee", "3", "-m", "train"], ["-mt3", "train"]])
def test_the_scripts_own_flags_may_look_like_abbreviations_of_ours(head: list[str], rest: list[str]) -> None:
    args = _flags.parse([*head, *rest, "--", "-np", "--help"])
    assert (args.training_script, args.training_script_args) == (head[-1], [*rest, "--", "-np", "--help"])


@pytest.mark.parametrize("flags", [["--standalone"], ["--standalone", "--event-log-handler=console"]])
def test_a_script_gets_its_arguments_as_they_are(tmp_path: Path, flags: list[str]) -> None:
    """Torchrun's own parser, which runs the job with ``--event-log-handler``, would call ``--r=16`` ambiguous."""
    script = tmp_path / "train.py"
    script.write_text("import json, sys; print(json.dumps(sys.argv[1:]))")
    rest = ["--r=16", "--start=5", "--in=", "--warm=", "--", "--nnodes=2", "-np", "4"]
    command = [sys.executable, "-m", "elastic_rs.run", *flags, str(script), *rest]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert json.loads(done.stdout) == rest, done.stderr


@pytest.mark.parametrize(
    ("argv", "modules"),
    [
        ([], None),
        (["--warm-start"], "torch"),
        (["--warm_modules=torch,numpy"], "torch,numpy"),
        (["--warm-start", "--warm-modules", "a"], "a"),
        (["--warm-modules="], ""),
    ],
)
def test_modules_of_a_warm_start_have_a_flag_of_their_own(argv: list[str], modules: str | None) -> None:
    rest = ["--warm-modules=x", "--warm_start=a=b", "--warm-start"]
    args = _flags.parse([*argv, "train.py", *rest])
    assert _options.warm_modules_of(args) == modules
    assert (args.training_script, args.training_script_args) == ("train.py", rest)


def test_a_variable_asks_for_warm_starts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_WARM_START", "1")
    assert _options.warm_modules_of(_flags.parse(SCRIPT)) == "torch"
    monkeypatch.setenv("PET_WARM_MODULES", "numpy")
    assert _options.warm_modules_of(_flags.parse(SCRIPT)) == "numpy"
    monkeypatch.setenv("PET_WARM_START", "numpy")
    expected = "PET_WARM_START is `numpy`, must be 0 or 1: it sets --warm-start; PET_WARM_MODULES takes a value"
    assert said(capsys, "x") == expected


def test_a_warm_start_needs_this_python(caplog: pytest.LogCaptureFixture) -> None:
    assert _options.warm_of("torch", ["/bin/echo", "hello"]) is None
    expected = "--warm-start and --warm-modules have no effect: the workers' program is `/bin/echo`, not this Python, `"
    assert caplog.messages[0].startswith(expected)
    assert _options.warm_of("torch", [sys.executable, "-u", "train.py"]) is not None
    assert _options.warm_of(None, [sys.executable, "-u", "train.py"]) is None


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--warm-stat", "x"], "unknown flag `--warm-stat`: did you mean `--warm-start`?"),
        (["--warm-stat=a", "x"], "unknown flag `--warm-stat`: did you mean `--warm-start`?"),
        (
            ["--warm-start=torch,numpy", "x"],
            "--warm-start takes no value, and `--warm-start=torch,numpy` gives it one; --warm-modules=torch,numpy",
        ),
        (["--standalone=1", "x"], "--standalone takes no value, and `--standalone=1` gives it one"),
        (["-mtrain", "x"], "--tee is `rain`, must be 0 (none)"),
        (["-mnumpy", "x"], "--module takes no value, and `-mnumpy` gives it one"),
        (
            ["--standalone", "--warm-modules=train.py,a-b", "x"],
            "--warm-modules is `train.py,a-b`, must be names of modules, such as torch,torch.distributed",
        ),
        (["--nprocs-per-node=2", "x"], "unknown flag `--nprocs-per-node`: did you mean `--nproc-per-node`?"),
        (["--zzz", "x"], "unknown flag `--zzz`: flags of the script come after it"),
        ([], "no script is given; it comes after the flags: elastic-run [flags] SCRIPT [the script's arguments]"),
        (["--max_restarts=x", "x"], "--max-restarts: `x` is not a whole number"),
        (
            ["--max-restarts=3/1parsec", "x"],
            "--max-restarts: `3/1parsec` is neither a whole number nor N/WINDOW, such as",
        ),
        (["--max-restarts=3/", "x"], "--max-restarts: `3/` is neither a whole number nor N/WINDOW, such as"),
        (["--max-restarts=-1/1h", "x"], "--max-restarts: `-1/1h` is neither a whole number nor N/WINDOW, such as"),
        (
            ["--max-restarts=3/0s", "x"],
            "--rdzv-conf restart_window is `0`, must be a number of seconds, 1 or more, at most 2592000",
        ),
        (["--max-restarts=3/365d", "x"], "--rdzv-conf restart_window is `31536000`, must be a number of seconds"),
        (
            ["--max-restarts=3/1h", "--rdzv-conf=restart_window=60", "x"],
            "--max-restarts says within 3600 s, and --rdzv-conf restart_window=60: give one of them",
        ),
        (
            ["--max-restarts=3/1h", "--rdzv-conf=restart_budget=node", "x"],
            "--rdzv-conf has `restart_window` and `restart_budget=node`, which cannot be combined: each node",
        ),
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
        (
            ["--nproc-per-node=gpu:0,1", "x"],
            "must be a number, auto, cpu, gpu or xpu; CUDA_VISIBLE_DEVICES=0,1 with --nproc-per-node=gpu chooses GPUs",
        ),
        (["--nproc-per-node=2.5", "x"], "--nproc-per-node is `2.5`, must be a number, auto, cpu, gpu or xpu"),
        (
            ["--rdzv-backend=c10", "x"],
            "--rdzv-backend is `c10`, must be c10d or rust-c10d, etcd or rust-etcd, or static; did you mean `c10d`?",
        ),
        (["--rdzv-backend=zeus", "x"], "torchrun can use those of other packages"),
        (
            ["--rdzv-conf=join_timeuot=1", "x"],
            "--rdzv-conf has the unknown key `join_timeuot`: did you mean `join_timeout`?",
        ),
        (
            ["--rdzv-conf=join_timeout", "x"],
            "--rdzv-conf has the entry `join_timeout`, must be KEY=VALUE,KEY=VALUE,...",
        ),
        (
            ["--in-place=off", "--rdzv-conf=in_place=gloo", "x"],
            "--in-place is `off`, and --rdzv-conf says in_place=gloo: give one of them",
        ),
        (
            ["--store-tunnel", "--rdzv-conf=store_tunnel=no", "x"],
            "--store-tunnel is given, and --rdzv-conf says store_tunnel=no: give one of them",
        ),
        (["--in-place=mpi", "x"], "--in-place: invalid choice: 'mpi' (choose from"),
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
            "--signals-to-handle has `SIGKILL`, which no process can handle",
        ),
        (["--signals-to-handle=SIGTERM,\udcff", "x"], "--signals-to-handle is `SIGTERM,\\xff`, must be UTF-8"),
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
        # The command lines of other launchers.
        (
            ["-np", "4", "python", "x"],
            "unknown flag `-np`: it is the number of all workers. Here hosts say it, `-H HOST",
        ),
        (["-np4", "python", "x"], "unknown flag `-np4`: it is the number of all workers"),
        (["-r", "3", "--num-proc=4", "x"], "unknown flag `--num-proc`: it is the number of all workers"),
        (["-n", "4", "x"], "unknown flag `-n`: it is the number of all workers"),
        (["--slots", "2", "x"], "unknown flag `--slots`: use `--slots-per-host`"),
        (["--network-interface", "eth0", "x"], "unknown flag `--network-interface`: set GLOO_SOCKET_IFNAME and"),
        (["-p", "2222", "x"], 'unknown flag `-p`: use `--ssh="ssh -p PORT"`'),
        (["-i", "key", "x"], 'unknown flag `-i`: use `--ssh="ssh -i FILE"`'),
        (["--output-filename", "logs", "x"], "unknown flag `--output-filename`: use `--log-dir=FOLDER --redirects=3`"),
        (["--tee", "3", "--verbose", "x"], "unknown flag `--verbose`: set ELASTIC_RS_LOG=info"),
        (["--mpi-args=--a b --c", "x"], "unknown flag `--mpi-args`: leave it out: there is no MPI here"),
        (["-hostfile", "hosts", "x"], "unknown flag `-hostfile`: use `--hostfile`"),
        (["--fusion-threshold-mb=32", "x"], "unknown flag `--fusion-threshold-mb`: it tunes Horovod's own collectives"),
        (["--fusion_threshold_mb=32", "x"], "unknown flag `--fusion_threshold_mb`: it tunes Horovod's own collectives"),
        (["--gpus", "4", "x"], "unknown flag `--gpus`: use `--nproc-per-node` for the workers of a node"),
        (["--num_processes=4", "x"], "unknown flag `--num_processes`: use `--nproc-per-node`"),
        (["--num_machines=4", "x"], "unknown flag `--num_machines`: use `--nnodes`"),
        (["--nproc=2", "-n", "2", "x"], "unknown flag `-n`: it is the number of all workers"),
        (["-cb"], "unknown flag `-cb`: use `elastic-run doctor`"),
        (["-prefix-timestamp", "x"], "unknown flag `-prefix-timestamp`: use `--log-line-prefix-template`"),
        (["-machinefile", "hosts", "x"], "unknown flag `-machinefile`: use `--hostfile`"),
        (["--tune", "x"], "unknown flag `--tune`: it tunes Horovod's own collectives"),
        (["--gpu_ids=0,1", "x"], "unknown flag `--gpu_ids`: set CUDA_VISIBLE_DEVICES"),
        (["--launcher", "pytorch", "x"], "unknown flag `--launcher`: leave it out: `elastic-run` starts agents by ssh"),
        (
            ["--standalone", "python", "x", "--y"],
            "the script is `python`: leave it out, since workers are run by Python",
        ),
        (["/usr/bin/python3.12", "x", "--y"], "since workers are run by Python anyway: elastic-run [flags] x --y"),
        (["python3", "-u", "x", "-u"], "since workers are run by Python anyway: elastic-run [flags] x -u;"),
        (["python", "-u", "-m", "x"], "since workers are run by Python anyway: elastic-run [flags] -m x;"),
        (
            ["python", "-u", "-O", "x"],
            "the script is `python`, with the option `-O` of Python: elastic-run [flags] --no-python python -u -O x",
        ),
        (["--rdzv-=x", "y"], "could match --rdzv-backend, --rdzv-endpoint, --rdzv-id, --rdzv-conf"),
        (["--start=x", "y"], "--start-method: invalid choice: 'x' (choose from "),
        (["--st", "y"], "ambiguous option: --st could match --standalone, --start-method"),
        (["--nnodes 2", "x"], "unknown flag `--nnodes 2`: did you mean `--nnodes`?"),
        (["--rdzv-backend=c10d", "--rdzv-id=\udcff", "x"], "--rdzv-id is `\\xff`, must be UTF-8"),
        (["--role=\udcff", "x"], "--role is `\\xff`, must be UTF-8"),
        (["--local-addr=\udcff", "x"], "--local-addr is `\\xff`, must be UTF-8"),
        (["--log-line-prefix-template=a\udcff", "x"], "--log-line-prefix-template is `a\\xff`, must be UTF-8"),
        (["--duplicate-stdout-filters=a,\udcff", "x"], "--duplicate-stdout-filters is `\\xff`, must be UTF-8"),
        (["--duplicate-stderr-filters=\udcff", "x"], "--duplicate-stderr-filters is `\\xff`, must be UTF-8"),
        (
            ["--nnodes=2", "--rdzv-conf=store_members=strict", "--no-python", "true"],
            "--rdzv-conf store_members=strict needs a store that the agents serve: it cannot be used with",
        ),
        (["--no-python", "--module", "x"], "--no-python and --module are given, must be one of them at most"),
    ],
)
def test_an_error_names_the_flag_the_value_and_what_is_allowed(
    capsys: pytest.CaptureFixture[str], argv: list[str], text: str
) -> None:
    assert text in said(capsys, *argv)


def test_in_place_is_refused_if_gloo_connects_late(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    for flags, given in ((["--in-place=gloo"], "gloo"), (["--rdzv-conf=in_place=nccl"], "nccl")):
        found = said(capsys, *flags, "x")
        assert found.startswith(f"in_place={given} and TORCH_GLOO_LAZY_INIT=1 cannot be combined: ")
        assert found.endswith("; unset the variable")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train.py --nproc-per-node=8", "elastic-run --nproc-per-node=8 train.py"),
        ("train.py --lr 1 --nproc_per_node 8 --x", "elastic-run --nproc_per_node 8 train.py"),
        ("train.py --standalone --lr 1", "elastic-run --standalone train.py"),
        ("train.py --rdzv-backend=c10d", "elastic-run --rdzv-backend=c10d train.py"),
        ("train.py --nnodes", "elastic-run --nnodes train.py"),
        ("train.py --node 2 --nproc 8", ""),
        ("train.py x -- --nnodes 2", ""),
        ("--nnodes=1 train.py nnodes", ""),
    ],
)
def test_a_launchers_flag_behind_the_script_is_warned_of(words: str, said: str) -> None:
    text = _flags.misplaced(_flags.parse(words.split()))
    assert text.endswith(said)
    assert bool(text) == bool(said)


def test_a_module_in_the_place_of_the_script_is_what_warm_start_once_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    hint = r"`torch` does not exist.*; --warm-start takes no value: --warm-modules=torch train.py"
    with pytest.raises(UsageError, match=hint):
        _script.check(_flags.parse(["--warm-start", "torch", "train.py"]))
    with pytest.raises(UsageError, match=r"`torch` does not exist in `[^`]*`$"):
        _script.check(_flags.parse(["torch", "train.py"]))


def test_flags_of_the_script_are_its_own() -> None:
    argv = ["--tee", "3", "train.py", "-np", "4", "--gpus=2", "--verbose"]
    assert _flags.parse(argv).training_script_args == argv[3:]
    assert _flags.parse(["--", "-n", "4"]).training_script == "-n"


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("NNODES", "a", "--nnodes is `a`, must be a number from 1 to 4294967295, or MIN:MAX with MIN not above MAX"),
        ("MAX_RESTARTS", "x", "--max-restarts: `x` is not a whole number"),
        ("NODE_RANK", "7", "--node-rank is `7`, must be from 0 to 1, since --nnodes is `2`"),
        ("RDZV_CONF", "nothing", "--rdzv-conf has the entry `nothing`, must be KEY=VALUE,KEY=VALUE,..."),
        ("IN_PLACE", "mpi", "--in-place is `mpi`, must be one of off, gloo, nccl"),
        ("HOSTS", "a:0", "-H: entry 1 is `a:0`, its slots must be a number from 1 to 65535"),
        ("NPROC_PER_NODE", "many things", "--nproc-per-node is `many things`, must be a number"),
    ],
)
def test_an_error_names_the_variable_that_sets_the_flag(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: str, value: str, text: str
) -> None:
    monkeypatch.setenv(f"PET_{variable}", value)
    flags = ["--nnodes=2"] if variable == "NODE_RANK" else []
    shown = "-H" if variable == "HOSTS" else f"--{variable.lower().replace('_', '-')}"
    found = said(capsys, *flags, "x")
    assert found.startswith(text)
    assert found.endswith(f"; PET_{variable} sets {shown}")
    # A flag takes precedence, so that its own value is wrong, or none is.
    if value == "a":
        assert "PET_" not in said(capsys, "--nnodes=b", "x")


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("PET_NNODE", "no flag has this variable; did you mean PET_NNODES?"),
        ("PET_NPROC", "no flag has this variable; did you mean PET_NPROC_PER_NODE?"),
        ("PET_RDVZ_ENDPOINT", "no flag has this variable; did you mean PET_RDZV_ENDPOINT?"),
        ("PET_nnodes", "no flag has this variable; did you mean PET_NNODES?"),
        ("PET_NUMA_BINDING", "--numa-binding is read from the command line only, as by torchrun"),
        ("PET_SHOP_URL", None),
        ("PET_NNODES", None),
        ("XPET_NNODE", None),
    ],
)
def test_a_misspelt_variable_is_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, variable: str, text: str | None
) -> None:
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(_node, "_take_part", lambda *_, **__: ENDED)
    assert run.main(["--standalone", "--no-python", "true"]) == 0
    assert caplog.messages == ([f"{variable} is set and has no effect: {text}"] if text else [])


@pytest.mark.parametrize(("nodes", "warns"), [("1:2", True), ("2", False), ("2:2", False)])
def test_a_range_of_nodes_with_fixed_ranks_is_a_warning(
    caplog: pytest.LogCaptureFixture, nodes: str, *, warns: bool
) -> None:
    _options.rendezvous_of(_flags.parse([f"--nnodes={nodes}", "--master-addr=node0", "x"]))
    expected = (
        "--nnodes is `1:2`, and --rdzv-backend=static, the default, has no range: the job begins with all 2 nodes, as "
        "with torchrun; --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT begins with 1 or more"
    )
    assert caplog.messages == ([expected] if warns else [])


def test_a_variable_that_is_not_a_number_is_an_error(
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
        (["--in-place=off"], "--in-place and --event-log-handler cannot be combined"),
        (["--on-hang=true"], "--on-hang and --event-log-handler cannot be combined"),
        (["--progress-log=x", "--tee=3"], "--progress-log and --event-log-handler cannot be combined"),
    ],
)
def test_an_error_is_reported_before_pytorch_takes_over(
    capsys: pytest.CaptureFixture[str], argv: list[str], text: str
) -> None:
    assert text in said(capsys, "--event-log-handler=console", *argv, "x")


@pytest.mark.parametrize("seconds", ["inf", "1e30", "nan", "-1", "x", ""])
def test_an_infinite_or_invalid_uninterruptible_timeout_disables_the_check(
    monkeypatch: pytest.MonkeyPatch, seconds: str
) -> None:
    monkeypatch.setenv("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", seconds)
    assert _options.launch_options_of(_flags.parse(SCRIPT)).workers.uninterruptible_sleep_s == 0


def test_numbers_are_parsed_as_by_torchrun() -> None:
    def shown(ranks: str) -> Any:
        args = _flags.parse([f"--local-ranks-filter={ranks}", *SCRIPT])
        return _options.log_options_of(args).shown_local_ranks

    assert [shown(ranks) for ranks in ("", "-1", "99999999999", " 1 ,1_0")] == [None, [], [], [1, 10]]
    assert _options.nodes_of("1_0") == (10, 10)
    assert _options.nodes_of(" 1: 2") == (1, 2)


def test_an_empty_address_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _options.local_addr_of(_flags.parse(["--local-addr=", *SCRIPT])) is None
    monkeypatch.setenv("PET_LOCAL_ADDR", "")
    assert _options.local_addr_of(_flags.parse(SCRIPT)) is None
    assert _options.local_addr_of(_flags.parse(["--local-addr=127.0.0.2", *SCRIPT])) == "127.0.0.2"


@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full"])
def test_an_error_that_cannot_be_written_has_the_same_exit_code(stderr: str) -> None:
    shell = f'exec "$0" -m elastic_rs.run --nope x {stderr}'
    assert subprocess.run(["sh", "-c", shell, sys.executable], check=False, timeout=60).returncode == 2


def test_a_script_whose_name_is_not_utf8_runs(tmp_path: Path) -> None:
    script = os.fsencode(tmp_path) + b"/\xff.py"
    with open(script, "w") as file:  # noqa: PTH123 - the name is bytes
        file.write("import sys; print('ran', *sys.argv[1:]); sys.exit(7)")
    command: list[str | bytes] = [sys.executable, "-m", "elastic_rs.run", "--standalone", script, "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "ran 1\n")
    assert "/\ufffd.py FAILED" in done.stderr


@pytest.mark.parametrize("limit", [9, 12, 14])
def test_a_lack_of_descriptors_is_a_one_line_error(limit: int) -> None:
    shell = f'ulimit -n {limit}; exec "$0" -m elastic_rs.run --standalone --no-python true'
    done = subprocess.run(["sh", "-c", shell, sys.executable], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("elastic-run: error: ")]


def test_an_interrupt_while_modules_are_imported_is_no_traceback() -> None:
    code = (
        "import sys\nclass Interrupt:\n    def find_spec(self, name, *_):\n"
        "        if name == 'elastic_rs.run._usage': raise KeyboardInterrupt\n"
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
            count = len(re.findall(rf"^  (?:-\w(?: \S+)?, )?{name}(?= |,|$)", text, re.MULTILINE))
            assert count == (0 if "_" in name else 1), name
    for heading in ("size of the job:", "how nodes find each other:", "output of workers:", "examples:", "exit codes:"):
        assert f"\n{heading}\n" in text
    assert max(map(len, text.splitlines())) <= 140


@pytest.mark.parametrize("argv", [["--help"], ["doctor", "--help"]])
def test_help_lists_the_keys_of_rdzv_conf(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(argv)
    text = capsys.readouterr().out
    for key in RendezvousConfig.table():
        spelt = f"{key.name} or {key.other}" if key.other else key.name
        value = "" if key.default is None else f"={re.escape(key.default)}"
        assert re.search(rf"[ (]{spelt}{value}[,\n]".replace(" or ", r"\s+or\s+"), text), key.name
    of_c10d, of_etcd = text.split("with rust-c10d: ")[1].split("with rust-etcd: ")
    assert "is_host" in of_c10d
    assert "password_file" in of_etcd
    assert "docs/" not in text, "a wheel has no such folder"
