"""Command lines of ``elastic-run``: endpoints, scripts, configuration, devices."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest
from elastic_rs import _signal_options, run
from elastic_rs._elastic_rs import ProgressPattern
from elastic_rs._signal_options import Given
from elastic_rs.run import _flags, _node, _options, _path
from elastic_rs.run._usage import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from elastic_rs._elastic_rs import WorkerOptions
from helpers.command_lines import ENDED, said


def test_the_command_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_rendezvous_endpoint_follows_from_the_flags_as_in_torchrun() -> None:
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
def test_an_ipv6_address_without_brackets_is_an_error(capsys: pytest.CaptureFixture[str], endpoint: str) -> None:
    # PyTorch takes the text after the last colon for the port. `::1` is port 1 of `:`, which it tries for minutes.
    for flags in (["--rdzv-backend=c10d"], ["--nnodes=2"]):
        text = said(capsys, *flags, f"--rdzv-endpoint={endpoint}", "x")
        assert f"is `{endpoint}`, must have brackets around an IPv6 address: [{endpoint}]" in text


def test_the_error_suggests_no_brackets_where_they_would_not_help(capsys: pytest.CaptureFixture[str]) -> None:
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
    ("flags", "result"),
    [
        (["--nnodes=2"], True),
        (["--nnodes=1:4"], True),
        (["--nnodes=2", "--rdzv-endpoint=localhost"], False),
        (["--nnodes=1"], False),
    ],
)
def test_several_nodes_without_an_endpoint_get_a_warning_that_only_this_machine_finds_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, flags: list[str], result: bool
) -> None:
    monkeypatch.setattr(_node, "_take_part", lambda *_, **__: ENDED)
    with caplog.at_level("WARNING", "elastic_rs"):
        assert run.main(["--rdzv-backend=c10d", *flags, "--no-python", "true"]) == 0
    expected = "no --rdzv-endpoint is given: this node meets others at localhost:29400, where only"
    assert any(text.startswith(expected) for text in caplog.messages) == result


@pytest.mark.parametrize(
    ("flags", "result"),
    [
        (["--rdzv-backend=c10d", "--nnodes=1:2", "--rdzv-endpoint=127.0.0.1:29400"], "127.0.0.1:29400 is on loopback"),
        (["--rdzv-backend=c10d", "--nnodes=2", "--rdzv-endpoint=localhost"], "localhost:29400 is on loopback"),
        (["--rdzv-backend=c10d", "--nnodes=2", "--rdzv-endpoint=[::1]:77"], "[::1]:77 is on loopback"),
        (["--nnodes=2"], "127.0.0.1:29500 is on loopback"),  # torchrun's default of --master-addr
        (["--nnodes=2", "--node-rank=1"], "127.0.0.1:29500 is on loopback"),
        (["--rdzv-backend=c10d", "--nnodes=2", "--rdzv-endpoint=192.0.2.1"], None),
        (["--rdzv-backend=c10d", "--nnodes=1", "--rdzv-endpoint=127.0.0.1"], None),
        (["--nnodes=1"], None),
        # A driver has chosen the endpoint for an agent on its own machine.
        (["--rdzv-backend=c10d", "--nnodes=2", "--rdzv-endpoint=127.0.0.1", "--rdzv-conf=host_name=a"], None),
    ],
)
def test_several_nodes_that_meet_on_loopback_are_warned_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, flags: list[str], result: str | None
) -> None:
    monkeypatch.setattr(_node, "_take_part", lambda *_, **__: ENDED)
    assert run.main([*flags, "--no-python", "true"]) == 0
    found = [text for text in caplog.messages if "loopback" in text]
    assert [text.startswith(f"the endpoint {result}") for text in found] == ([True] if result else [])
    if result:
        assert found[0].endswith("with an address of one node")
        assert ("--master-addr" if "29500" in result else "--rdzv-endpoint") in found[0]


def test_a_name_that_is_on_loopback_here_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Debian gives a machine's own name the address 127.0.1.1."""
    from elastic_rs.rendezvous import _config

    monkeypatch.setattr(_config, "only_on_loopback", lambda host: ["127.0.1.1"] if host == "node0" else [])
    monkeypatch.setattr(_node, "_take_part", lambda *_, **__: ENDED)
    flags = ["--rdzv-backend=c10d", "--nnodes=2", "--rdzv-endpoint=node0"]
    assert run.main([*flags, "--no-python", "true"]) == 0
    expected = "the endpoint node0:29400 is 127.0.1.1 here, on loopback: this node takes it for its own."
    assert [text.startswith(expected) for text in caplog.messages if "loopback" in text] == [True]


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "[::0]"])
@pytest.mark.parametrize("flags", [["--rdzv-backend=c10d"], ["--nnodes=2", "--node-rank=1"]])
def test_an_endpoint_that_means_all_addresses_is_an_error_on_a_node_that_does_not_host(
    capsys: pytest.CaptureFixture[str], flags: list[str], host: str
) -> None:
    text = said(capsys, *flags, f"--rdzv-endpoint={host}:29400", "x")
    assert f"the rendezvous endpoint is `{host.strip('[]')}`, which means all addresses of a machine; it must" in text
    assert "--rdzv-conf is_host=1 on that node alone" in text
    assert _options.rendezvous_of(
        _flags.parse(["--rdzv-backend=c10d", "--rdzv-conf=is_host=1", f"--rdzv-endpoint={host}:29400", "x"])
    ).host == host.strip("[]")


def test_a_missing_program_is_a_one_line_error_before_any_start(tmp_path: Path) -> None:
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
def test_existing_programs_are_accepted(tmp_path: Path, argv: list[str]) -> None:
    script = tmp_path / "main.py"
    script.write_text(f"#!{sys.executable}\nprint('ran')\n")
    script.chmod(0o755)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text("import os; os.write(1, b'ran\\n')")
    with zipfile.ZipFile(tmp_path / "folder.zip", "w") as archive:
        archive.writestr("__main__.py", "print('ran')")
    env = {**os.environ, "PATH": f"{os.environ['PATH']}:{tmp_path}"}
    command = [sys.executable, "-m", "elastic_rs.run", "--standalone", *argv]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")


@pytest.mark.parametrize("name", ["train_${local_rank}.py", "train_$local_rank.py"])
def test_a_script_name_with_a_substitution_is_accepted(tmp_path: Path, name: str) -> None:
    for local_rank in range(2):
        (tmp_path / f"train_{local_rank}.py").write_text("import os; os.write(1, b'ran\\n')")
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


def test_a_module_that_only_workers_find_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "only_workers.py").write_text("import os; os.write(1, b'ran\\n')")
    where = os.path.dirname(os.path.dirname(os.path.dirname(run.__file__)))  # noqa: PTH120
    code = f"import sys; sys.path.insert(0, {where!r}); from elastic_rs import run; sys.exit(run.main(sys.argv[1:]))"
    command = [sys.executable, "-I", "-c", code, "--standalone", "-m", "only_workers"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")


def test_arguments_of_another_interpreter_are_not_checked(tmp_path: Path) -> None:
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


def test_a_job_of_one_machine_needs_no_localhost_in_the_hosts_file(tmp_path: Path) -> None:
    for name, text in {"nsswitch.conf": "hosts: files\n", "hosts": "192.0.2.1 other\n"}.items():
        (tmp_path / name).write_text(text)
    mounts = " && ".join(f"mount --bind {tmp_path / name} /etc/{name}" for name in ("nsswitch.conf", "hosts"))
    under = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "sh"]
    if subprocess.run([*under, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine does not allow mount namespaces")
    known = subprocess.run([*under, "getent", "ahosts", "localhost"], capture_output=True, check=False)
    assert known.returncode != 0, "localhost is not resolved"
    command = [*under, sys.executable, "-m", "elastic_rs.run", "--standalone", "--no-python", "echo", "ran"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")


def test_torch_is_not_imported() -> None:
    code = (
        "import sys; from elastic_rs.run import main; code = main(['--standalone', '--no-python', 'true']); "
        "print(code, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "0 False False\n"


@pytest.mark.parametrize("command", [["--standalone"], ["doctor"]])
def test_another_environment_than_the_launchers_is_named(tmp_path: Path, command: list[str]) -> None:
    script = tmp_path / "a.py"
    script.write_text("")

    def lines(active: Path | str, **env: str) -> list[str]:
        argv = [sys.executable, "-m", "elastic_rs.run", *command, str(script)]
        variables = {**os.environ, "VIRTUAL_ENV": str(active), **env}
        done = subprocess.run(argv, env=variables, capture_output=True, text=True, timeout=120, check=False)
        return [line for line in (done.stdout + done.stderr).splitlines() if "VIRTUAL_ENV" in line]

    (result,) = lines(tmp_path / "venv")
    assert f"the active environment (VIRTUAL_ENV) is `{tmp_path}/venv`, and workers run `{sys.executable}`" in result
    assert f"start this with `{tmp_path}/venv/bin/python -m elastic_rs.run`" in result
    (tmp_path / "link").symlink_to(sys.prefix)
    assert lines(tmp_path / "link") == lines(sys.prefix) == lines("") == []
    assert lines(tmp_path / "venv", PYTHON_EXEC=f"{tmp_path}/venv/bin/python") == []


# Devices. The core counts the driver's devices, and its tests have the rules.


def test_cpus_are_those_that_this_process_may_use() -> None:
    from torch._utils import cpu_count

    assert _options.workers_of("cpu") == cpu_count()


def test_the_number_of_devices_is_that_of_torchrun(
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
    # No device is visible then.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "Cuda is not available" in said(capsys, "--nproc-per-node=gpu", "x")


def test_signals_have_the_names_that_python_knows() -> None:
    known = {name: number for name, number in signal.Signals.__members__.items() if name not in {"SIGKILL", "SIGSTOP"}}
    assert _signal_options.numbers_of("--signals-to-handle", ", ".join(known)) == list(known.values())


@pytest.mark.parametrize(
    ("flag", "variable", "expected"),
    [
        (None, "", []),
        (None, "USR1, SIGUSR2", [signal.SIGUSR1, signal.SIGUSR2]),
        ("WINCH", "USR1", [signal.SIGWINCH]),
        ("", "USR1", []),
        ("USR1,SIGUSR1,TERM", "", [signal.SIGUSR1]),
        ("KILL", "", "--forward-signals has `SIGKILL`, which no process can handle"),
        ("CHLD", "", "--forward-signals has SIGCHLD, which an agent gets from its own processes"),
        (None, "USR3", "ELASTIC_RS_FORWARD_SIGNALS has `SIGUSR3`, must be names such as SIGTERM,SIGUSR1; did you mean"),
        ("USR1,", "", "--forward-signals has `SIG`, must be names"),
        ("\udcff", "", "--forward-signals has `"),
    ],
)
def test_signals_that_are_passed_on_end_nothing(
    monkeypatch: pytest.MonkeyPatch, flag: str | None, variable: str, expected: list[int] | str
) -> None:
    monkeypatch.setenv("ELASTIC_RS_FORWARD_SIGNALS", variable)
    given = Given(forward_signals=flag)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=re.escape(expected)):
            _signal_options.meanings_of(given, ending=[signal.SIGTERM])
    else:
        assert _signal_options.meanings_of(given, ending=[signal.SIGTERM]).forwarded == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (None, None, None, 30.0, None)),
        ({"preempt_notice": "signal:USR1@120"}, ((10, 120.0), None, None, 30.0, None)),
        ({"preempt_notice": "signal:SIGUSR2", "preempt_deadline": "9.5"}, ((12, 9.5), None, None, 9.5, None)),
        ({"preempt_notice": "file:/a:b@3", "preempt_signal": "USR1"}, (None, "/a:b@3", None, 30.0, 10)),
        (
            {"preempt_notice": "curl -s http://me"},
            (None, None, ("curl -s http://me", "--preempt-notice `curl -s http://me`"), 30.0, None),
        ),
        (
            {"preempt_notice": "signal:USR1@0"},
            "--preempt-notice has `0` for seconds, must be above 0, and a day at",
        ),
        ({"preempt_notice": "signal:USR1@"}, "--preempt-notice has `` for seconds"),
        ({"preempt_notice": "signal:USR9@1"}, "--preempt-notice has `SIGUSR9`, must be names"),
        ({"preempt_notice": "signal:KILL"}, "--preempt-notice has `SIGKILL`, which no process can handle"),
        ({"preempt_notice": "file:"}, "--preempt-notice is `file:`, must name a file"),
        ({"preempt_notice": "a\0b"}, "must be a text without a zero byte"),
        ({"preempt_deadline": "soon"}, "--preempt-deadline has `soon` for seconds"),
        ({"preempt_deadline": "86401"}, "--preempt-deadline has `86401` for seconds"),
        ({"preempt_deadline": "nan"}, "--preempt-deadline has `nan` for seconds"),
        ({"preempt_signal": "STOP"}, "--preempt-signal has `SIGSTOP`, which no process can handle"),
    ],
)
def test_where_notices_come_from(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: tuple[object, ...] | str
) -> None:
    def found(given: Given) -> tuple[object, ...]:
        preempt = _signal_options.meanings_of(given, ending=[signal.SIGTERM]).preempt
        file = None if preempt.notice_file is None else str(preempt.notice_file)
        return preempt.notice_signal, file, preempt.notice_command, preempt.deadline_s, preempt.signal

    if isinstance(expected, str):
        with pytest.raises(ValueError, match=re.escape(expected)):
            found(Given(**given))
        return
    assert found(Given(**given)) == expected
    for name, value in given.items():
        monkeypatch.setenv(f"ELASTIC_RS_{name.upper()}", value)
    assert found(Given())[3:] == expected[3:]


def test_a_provider_is_watched_by_a_program_of_ours() -> None:
    meanings = _signal_options.meanings_of(Given(preempt_notice="aws"), ending=[])
    assert meanings.preempt.notice_command is not None
    command, name = meanings.preempt.notice_command
    assert (command.split()[0], command.split()[-1], name) == (sys.executable, "aws", "--preempt-notice aws")


def test_of_a_signal_with_several_meanings_the_first_counts(caplog: pytest.LogCaptureFixture) -> None:
    given = Given(forward_signals="USR1,TERM,USR2", preempt_notice="signal:USR2@9")
    meanings = _signal_options.meanings_of(given, ending=[signal.SIGTERM])
    assert (meanings.forwarded, meanings.passed_on) == ([signal.SIGUSR1], [signal.SIGUSR1, signal.SIGUSR2])
    assert "SIGTERM ends the agent, so that --forward-signals has no effect on it" in caplog.text
    assert "SIGUSR2 is a notice, so that --forward-signals has no effect on it" in caplog.text
    meanings = _signal_options.meanings_of(given, ending=[signal.SIGUSR2])
    assert (meanings.forwarded, meanings.preempt.notice_signal) == ([signal.SIGUSR1, signal.SIGTERM], None)
    assert "SIGUSR2 ends the agent, so that --preempt-notice has no effect on it" in caplog.text


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--on-hang="], "--on-hang is `''`, must be a command of the shell"),
        (["--on-hang= "], "--on-hang is `' '`, must be a command of the shell"),
        (["--progress-log=step"], "--progress-log is given, and --tee is `0`, so no line is looked at: add --tee=3"),
        (["--progress-log=", "--tee=3"], "--progress-log is empty, must be a regular expression: `step [0-9]+`"),
        (["--progress-log=(", "--tee=3"], "--progress-log is `(`, must be a regular expression: "),
        ([f"--progress-log={'x' * 1001}", "--tee=3"], "--progress-log has 1001 bytes, must be a regular expression "),
        (["--progress-log=\udcff", "--tee=3"], "--progress-log is `\\xff`, must be UTF-8"),
    ],
)
def test_what_says_who_is_told_of_a_hang_is_checked_before_anything_starts(flags: list[str], expected: str) -> None:
    parsed = _flags.parse([*flags, "x"])
    for check in (_options.launch_options_of, _options.check_output):
        with pytest.raises(UsageError) as refused:
            check(parsed)
        assert str(refused.value).startswith(expected)


def test_a_variable_says_what_a_flag_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def workers(*flags: str) -> WorkerOptions:
        return _options.launch_options_of(_flags.parse([*flags, "x"])).workers

    none = workers()
    assert (none.on_hang, none.progress_log) == (None, None)
    monkeypatch.setenv("ELASTIC_RS_ON_HANG", "page oncall")
    monkeypatch.setenv("ELASTIC_RS_PROGRESS_LOG", "step")
    found = workers("--tee=0:1")
    assert (found.on_hang, found.progress_log) == ("page oncall", ProgressPattern("step"))
    found = workers("--tee=3", "--on-hang=mail me", "--progress-log=loss")
    assert (found.on_hang, found.progress_log) == ("mail me", ProgressPattern("loss"))
    with pytest.raises(UsageError, match=r"^ELASTIC_RS_PROGRESS_LOG is given, and --tee is `0`"):
        workers()
    monkeypatch.setenv("ELASTIC_RS_PROGRESS_LOG", "*")
    with pytest.raises(UsageError, match=r"^ELASTIC_RS_PROGRESS_LOG is `\*`, must be a regular expression: "):
        workers("--tee=3")
    monkeypatch.setenv("ELASTIC_RS_PROGRESS_LOG", "")
    assert workers().progress_log is None


CODES = "1 to 32 exit codes from 1 to 255, each once and joined by +, such as 3+4"


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--exit-code=kind"], "--exit-code: invalid choice: 'kind'"),
        (["--rdzv-conf=exit_code=kind"], "--rdzv-conf exit_code is `kind`, must be `worker` or `class`"),
        (["--rdzv-conf=first_signal=all"], "--rdzv-conf first_signal is `all`, must be `leader` or `group`"),
        (
            ["--exit-code=class", "--rdzv-conf=exit_code=worker"],
            "--exit-code is `class`, and --rdzv-conf says exit_code=worker: give one of them",
        ),
        *(
            ([f"--no-restart-on={codes.replace('+', ',')}"], f"--rdzv-conf no_restart_on is `{codes}`, must be {CODES}")
            for codes in ("0", "3+256", "abc", "-9", "3+4+3", "", "+".join(map(str, range(1, 34))))
        ),
        (
            ["--no-restart-on=3,4", "--rdzv-conf=no_restart_on=3"],
            "--no-restart-on is `3+4`, and --rdzv-conf says no_restart_on=3: give one of them",
        ),
        (
            ["--no-restart-on=3", "--rdzv-conf=restart_budget=node"],
            "--rdzv-conf has `no_restart_on` and `restart_budget=node`, which cannot be combined: ",
        ),
    ],
)
def test_what_is_said_of_a_jobs_end_is_checked_before_anything_starts(
    capsys: pytest.CaptureFixture[str], flags: list[str], error: str
) -> None:
    assert said(capsys, "--standalone", *flags, "--no-python", "true").startswith(error)


def test_codes_are_the_same_by_flag_and_by_key() -> None:
    def config(*flags: str) -> Mapping[str, object]:
        return _options.rendezvous_of(_flags.parse(["--standalone", *flags, "x"])).config.values()

    for flags in (
        ["--no-restart-on=4,3", "--exit-code=class"],
        ["--rdzv-conf=no_restart_on=3+4,exit_code=class"],
        ["--no-restart-on=3,4", "--exit-code=class", "--rdzv-conf=no_restart_on=3+4,exit_code=class"],
    ):
        values = config(*flags)
        assert (values["no_restart_on"], values["exit_code"]) == ("3+4", "class")
    assert config()["no_restart_on"] is None
