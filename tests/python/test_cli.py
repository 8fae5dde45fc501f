"""`elastic-rs store serve`: a real process, from its command line to its exit code."""

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from elastic_rs import _cli, _elastic_rs
from helpers.procs import Job, Process

COMMAND = str(Path(sys.executable).parent / "elastic-rs")
Serve = Callable[..., Process]


@pytest.fixture
def serve(job: Job) -> Serve:
    def serve(*args: str, port: int = 0) -> Process:
        return job.start([COMMAND, "store", "serve", "--host=127.0.0.1", f"--port={port}", *args])

    return serve


def port_of(process: Process) -> int:
    return int(process.line(r"^listening on 127\.0\.0\.1:(\d+)$")[1])


def test_it_serves_until_sigterm(serve: Serve) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        process = serve()
        client = _elastic_rs.StoreClient("127.0.0.1", port_of(process))
        client.set("k", "v")
        assert client.get("k") == b"v"
        del client
        process.signal(number)
        assert process.wait() == 0


OPEN = "is not protected: anyone who can reach it can end the job"


@pytest.mark.parametrize("case", ["open", "on loopback", "protected"])
def test_a_coordinator_that_is_open_to_other_machines_logs_one_warning(
    job: Job, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ELASTIC_RS_TOKEN_FILE", raising=False)
    if case == "protected":
        token = tmp_path / "token"
        token.touch(mode=0o600)
        token.write_text("4f" * 32)
        monkeypatch.setenv("ELASTIC_RS_TOKEN_FILE", str(token))
    host = "127.0.0.1" if case == "on loopback" else "0.0.0.0"
    process = job.start([COMMAND, "store", "serve", f"--host={host}", "--port=0"])
    process.line("^listening on ")
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    said = [line for line in process.lines if OPEN in line]
    assert len(said) == (case == "open"), process.tail()
    assert all("`elastic-rs token new`" in line for line in said)


def test_it_drains_and_serves_meanwhile(serve: Serve) -> None:
    process = serve("--drain-timeout=60")
    port = port_of(process)
    first = _elastic_rs.StoreClient("127.0.0.1", port)
    process.signal(signal.SIGTERM)
    process.line("SIGTERM: waiting for 0 nodes and 1 clients to go")
    late = _elastic_rs.StoreClient("127.0.0.1", port)
    late.set("k", "v")
    assert first.get("k") == b"v"
    assert process.running
    del first, late
    assert process.wait() == 0


def test_the_drain_has_a_time_limit(serve: Serve) -> None:
    process = serve("--drain-timeout=0.2")
    client = _elastic_rs.StoreClient("127.0.0.1", port_of(process))
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    assert "elastic-rs: 0 nodes and 1 clients are left after 0.2 s" in process.lines
    del client


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(serve: Serve, second: signal.Signals) -> None:
    process = serve("--drain-timeout=1000")
    client = _elastic_rs.StoreClient("127.0.0.1", port_of(process))
    process.signal(signal.SIGTERM)
    process.line("SIGTERM: waiting")
    while process.running:  # a signal that comes too early merges with the first one
        process.signal(second)
        time.sleep(0.05)
    assert process.wait() == 128 + second
    del client


def test_no_thread_takes_a_signal_that_is_waited_for(serve: Serve) -> None:
    process = serve()
    port_of(process)
    tasks = [task for task in Path(f"/proc/{process.pid}/task").iterdir() if task.name != str(process.pid)]
    blocked = [re.search(r"SigBlk:\s*(\w+)", (task / "status").read_text()) for task in tasks]
    both = 1 << signal.SIGTERM - 1 | 1 << signal.SIGINT - 1
    assert len(blocked) >= 2  # the threads of log and host
    assert all(found and int(found[1], 16) & both == both for found in blocked), blocked
    process.signal(signal.SIGTERM)
    assert process.wait() == 0


def test_a_signal_that_is_delivered_twice_is_one(serve: Serve) -> None:
    process = serve("--drain-timeout=1000")
    client = _elastic_rs.StoreClient("127.0.0.1", port_of(process))
    process.signal(signal.SIGTERM)
    process.signal(signal.SIGTERM)
    process.line("SIGTERM: waiting")
    del client
    assert process.wait() == 0


def test_a_taken_port_is_exit_code_1_and_names_its_owner(serve: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = serve(port=port)
        assert process.wait() == 1
        said = f"elastic-rs: error: port {port} on 127.0.0.1 is already in use by pid {os.getpid()}"
        assert any(line.startswith(said) for line in process.lines), process.lines


def test_limits_are_taken_from_the_command_line(serve: Serve) -> None:
    process = serve("--max-key-bytes=16", "--max-value-bytes=1K", "--hello-timeout=0.1", "--max-keys=2")
    port = port_of(process)

    def refused(key: str, value: str, limit: str) -> None:
        client = _elastic_rs.StoreClient("127.0.0.1", port)
        client.set(key, value)  # not acknowledged
        process.line(f"connection rejected .*{limit}")

    refused("k" * 16, "v", "key_bytes = 16")  # the client adds a slash
    refused("k", "v" * 1025, "value_bytes = 1024")
    client = _elastic_rs.StoreClient("127.0.0.1", port)
    client.multi_set(["a", "b"], ["v" * 1024, ""])
    assert client.num_keys() == 2
    refused("c", "", "keys = 2")
    with socket.create_connection(("127.0.0.1", port)) as silent:
        assert silent.recv(1) == b""
    process.line("connection rejected .*hello_timeout")
    del client
    process.signal(signal.SIGTERM)
    assert process.wait() == 0


def test_keep_alive_is_taken_from_the_command_line(serve: Serve) -> None:
    process = serve("--keepalive-idle=1234", "--keepalive-interval=7")
    port = port_of(process)
    client = _elastic_rs.StoreClient("127.0.0.1", port)
    client.set("k", "v")
    assert client.get("k") == b"v"  # the connection is accepted, and has its options
    # The kernel shows each connection's timer: its kind, and its remaining time in hundredths of a second. It is the
    # retransmission timer (01) until the last reply is acknowledged, then the keep-alive timer (02).
    server_end, established, deadline = f":{port:04X}", "01", time.monotonic() + 30
    kind, left = "", 0
    while kind != "02":
        assert time.monotonic() < deadline, kind
        rows = [line.split() for line in Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]]
        row = next(row for row in rows if row[1].endswith(server_end) and row[3] == established)
        kind, left = row[5][:2], int(row[5][3:], 16)
    assert 110_000 < left <= 123_400
    del client
    process.signal(signal.SIGTERM)
    assert process.wait() == 0


def test_the_log_period_is_taken_from_the_command_line(serve: Serve) -> None:
    process = serve("--log-period=0.5")
    port = port_of(process)
    for _ in range(25):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"SSH-2.0-stranger\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
    # The summary comes half a second after the first record. With the default it would be a minute.
    process.line("further messages of this kind were not logged")
    process.signal(signal.SIGTERM)
    assert process.wait() == 0


@pytest.mark.parametrize("name", ["keepalive_idle_s", "keepalive_interval_s"])
@pytest.mark.parametrize("value", [0.0, 32_768.0])
def test_keep_alive_that_the_kernel_would_not_take_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value:g}, must be from 1 to 32767 seconds, which is"):
        _elastic_rs.StoreLimits(**{name: value})


def test_a_limit_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(TypeError, match="`key_length` is not a limit, must be one of connections, keys, "):
        _elastic_rs.StoreLimits(key_length=1)


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("--port=65536", "argument --port: `65536` is not a port, must be from 0 to 65535"),
        ("--max-keys=many", "argument --max-keys: `many` must be a whole number above zero, such as 4096, 64K or 8M"),
        ("--max-keys=0", "argument --max-keys: `0` must be"),
        ("--hello-timeout=-1", "argument --hello-timeout: `-1` is not a number of seconds, zero or more"),
        ("--drain-timeout=nan", "argument --drain-timeout: `nan` is not"),
        ("--keepalive-idle=0.5", "argument --keepalive-idle: `0.5` must be from 1 to 32767 seconds"),
        ("--keepalive-interval=32768", "argument --keepalive-interval: `32768` must be from 1 to 32767 seconds"),
        ("--hots=x", "unknown flag `--hots`; did you mean `--host`?"),
    ],
)
def test_a_wrong_argument_is_exit_code_2(argument: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        _cli.main(["store", "serve", argument])
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("serve", "unknown command `serve`; it is `elastic-rs store serve`\nelastic-rs --help has its arguments"),
        ("stauts x", "unknown command `stauts`; did you mean `status`?"),
        ("token nwe", "unknown command `nwe`; did you mean `new`?\nelastic-rs token --help has its arguments"),
        ("frobnicate", "unknown command `frobnicate`; there are doctor, status, why, events,"),
        ("", "no command is given; there are doctor, status,"),
        ("store", "no command is given; there are serve"),
        ("status --jsn x", "unknown flag `--jsn`; did you mean `--json`?\nelastic-rs status --help has its arguments"),
        ("status --js x", "unknown flag `--js`"),
        ("status a b", "`b` is one argument too many"),
        ("page --json x", "unknown flag `--json`"),
        ("top --events x", "unknown flag `--events`"),
        ("status \x1b[2J --\x1b[1m", "unknown flag `-- [1m`"),
    ],
)
def test_a_word_that_is_not_known_names_the_nearest_one(
    words: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        _cli.main(words.split(" ") if words else [])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"elastic-rs: error: {text}"), said.err
    assert len(said.err.splitlines()) == 2
    assert not said.out


def test_every_command_has_an_example_that_it_understands(capsys: pytest.CaptureFixture[str]) -> None:
    for name, example in _cli.EXAMPLES.items():
        with pytest.raises(SystemExit):
            _cli.main([*name.split()[1:], "--help"])
        assert example in capsys.readouterr().out, name
        words = shlex.split(example, comments=True)
        assert _cli._parser().parse_args(words[1:]).run


def test_help_names_every_limit_with_its_default_and_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        _cli.main(["store", "serve", "--help"])
    assert ended.value.code == 0
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    for shown in ("--max-key-bytes BYTES length of a key (default: 8K)", "(default: 8M)", "(default: no limit)"):
        assert shown in text
    for code in ("0 ended as asked", "1 cannot listen", "2 the command line", "3 the server", "130, 143 ended"):
        assert code in text


def test_sizes_are_powers_of_1024() -> None:
    assert [_cli._amount(text) for text in ("1", "4K", "8MiB", "2G", "1TB")] == [1, 4096, 8 << 20, 2 << 30, 1 << 40]
    assert [_cli._shown("bytes", value) for value in (1, 1000, 4096, 8 << 20, 3 << 29, None)] == [
        *("1", "1000", "4K", "8M", "1536M", "no limit"),
    ]
    assert _cli._shown("seconds", 30.0) == "30"


def test_it_starts_without_torch(job: Job) -> None:
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "numpy"}:
            raise AssertionError(f"imported {name}")
sys.meta_path.insert(0, Refuse())
from elastic_rs import _cli
sys.exit(_cli.main(["store", "serve", "--host=127.0.0.1", "--port=0"]))
"""
    process = job.start([sys.executable, "-c", code])
    process.line("listening on ")
    process.signal(signal.SIGTERM)
    assert process.wait() == 0, process.tail()


@pytest.mark.skipif(os.geteuid() != 0, reason="a process id namespace needs a privilege")
def test_it_ends_as_process_1(job: Job) -> None:
    # The kernel drops signals for process 1 that have no handler. A container would be killed after its grace period.
    probe = subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"no process id namespace here: {probe.stderr.decode().strip()}")
    command = ["unshare", "--pid", "--fork", COMMAND, "store", "serve", "--host=127.0.0.1", "--port=0"]
    process = job.start(command)
    port_of(process)
    served = [pid for pid in job.pids() if pid != process.pid]
    assert len(served) == 1
    os.kill(served[0], signal.SIGTERM)
    assert process.wait() == 0
