"""``elastic-run doctor`` with real servers, strangers and silent addresses."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from elastic_rs import _elastic_rs, run
from elastic_rs._doctor import _net as net
from helpers.certificates import certificates, end
from helpers.foreign_servers import answering, swallowing

if TYPE_CHECKING:
    from helpers.procs import Job

BIN = Path(sys.executable).parent
RUN = str(BIN / "elastic-run")
JOB = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=job")
GUEST = (*JOB, "--rdzv-conf=is_host=0")

AT_HOME = ["127.0.1.1"]


Doctor = Callable[..., list[str]]


@pytest.fixture
def doctor(job: Job) -> Doctor:
    """Run the command, and return its lines. Asserts that the exit code agrees with the verdicts."""

    def doctor(*flags: str, env: dict[str, str] | None = None) -> list[str]:
        process = job.start([RUN, "doctor", *flags], env=env)
        code = process.wait()
        to_mend = sum(line.startswith("mend ") for line in process.lines)
        # Other findings about this machine do not matter here.
        assert process.lines[-1] == (f"{to_mend} to mend" if to_mend else "nothing has to be mended")
        assert code == (1 if to_mend else 0)
        return process.lines

    return doctor


def about(check: str, lines: list[str]) -> str:
    return next(line for line in lines if re.match(rf"(ok|note|mend) +{check} ", line))


def test_a_node_by_itself(doctor: Doctor) -> None:
    lines = doctor()
    checks = ["python", "elastic_rs", "torch", "gpus", "descriptors", "processes", "supervision", "stacks", "users"]
    for check in [*checks, "clock", "/dev/shm", "temporary", "own name"]:
        assert about(check, lines)
    assert "none is needed" in about("endpoint", lines)
    assert about("rank order", lines) == "ok    rank order   0: the only node"


def test_a_coordinator(doctor: Doctor, job: Job) -> None:
    serve = job.start([str(BIN / "elastic-rs"), "store", "serve", "--host=127.0.0.1", "--port=0"])
    port = int(serve.line(r"^listening on 127\.0\.0\.1:(\d+)$")[1])
    said = about("endpoint", doctor(*JOB, f"--rdzv-endpoint=127.0.0.1:{port}"))
    assert said.startswith("ok ")
    assert f"in use by pid {serve.pid} (" in said
    said = about("endpoint", doctor(*GUEST, env={"PET_RDZV_ENDPOINT": f"127.0.0.1:{port}"}))
    assert said.startswith("ok ")
    assert "a coordinator answers" in said
    # Node 0 hosts the coordinator itself.
    said = about("endpoint", doctor("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}"))
    assert said.startswith("mend ")
    assert "this node must host it" in said
    serve.signal(signal.SIGTERM)
    assert serve.wait() == 0


def test_a_coordinator_with_a_token(doctor: Doctor, job: Job, tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    for path, token in ((right, "a" * 64), (wrong, "b" * 64)):
        path.touch(mode=0o600)
        path.write_text(token)
    command = [str(BIN / "elastic-rs"), "store", "serve", "--host=127.0.0.1", "--port=0"]
    serve = job.start(command, env={"ELASTIC_RS_TOKEN_FILE": str(right)})
    port = int(serve.line(r"^listening on 127\.0\.0\.1:(\d+)$")[1])
    plain = job.start(command)
    plain_port = int(plain.line(r"^listening on 127\.0\.0\.1:(\d+)$")[1])
    for token_file, to, verdict, text in [
        (None, port, "mend", "the coordinator requires a token or certificates, and this node has none"),
        (wrong, port, "mend", "authentication with the coordinator failed"),
        (right, port, "ok", "and both ends are proven"),
        (right, plain_port, "mend", "the coordinator has no token or certificates"),
    ]:
        env = {"ELASTIC_RS_TOKEN_FILE": str(token_file)} if token_file else None
        lines = doctor(*GUEST, f"--rdzv-endpoint=127.0.0.1:{to}", env=env)
        said = about("endpoint", lines)
        assert said.startswith(f"{verdict} "), said
        assert text in said
        said = about("protection", lines)
        assert ("both ends prove the token" in said) == (token_file is not None), said
    for process in (serve, plain):
        process.signal(signal.SIGTERM)
        assert process.wait() == 0


def test_a_coordinator_with_certificates(doctor: Doctor, job: Job, tmp_path: Path) -> None:
    own, other = certificates(tmp_path / "own", "node"), certificates(tmp_path / "other", "stranger", "ca", "other-ca")
    elsewhere = certificates(tmp_path / "elsewhere", "elsewhere")
    unneeded = certificates(tmp_path / "unneeded", "node", "ca", "expired")
    ended = certificates(tmp_path / "ended", "node")
    end(Path(ended["ELASTIC_RS_TLS_CA"]))
    command = [str(BIN / "elastic-rs"), "store", "serve", "--host=127.0.0.1", "--port=0"]
    serving = [job.start(command, env=env) for env in (own, elsewhere)]
    for serve in serving:
        serve.line("sessions are protected by the certificate of CN=")
    ports = [int(serve.line(r"^listening on 127\.0\.0\.1:(\d+)$")[1]) for serve in serving]
    for env, to, verdict, text in [
        ({}, ports[0], "mend", "the coordinator requires a token or certificates, and this node has none"),
        (other, ports[0], "mend", "no CA of that end (ELASTIC_RS_TLS_CA) has issued it"),
        (own, ports[0], "ok", "and both ends are proven"),
        (unneeded, ports[0], "ok", "and both ends are proven"),
        (ended, ports[0], "ok", "and both ends are proven"),
        (own, ports[1], "mend", "is not for `localhost`, which this end has connected to, but for elsewhere.example"),
    ]:
        lines = doctor(*GUEST, f"--rdzv-endpoint=localhost:{to}", env=env)
        said = about("endpoint", lines)
        assert said.startswith(f"{verdict} "), said
        assert text in said
        said = about("protection", lines)
        if env:
            shown = r"both ends prove the certificate of CN=\w+, O=elastic_rs tests for .* \(\d+ days left\)"
            assert re.search(shown, said), said
            assert "any certificate of the CA may join any run" in said
            tells_end = r"CA file `.*` \(ELASTIC_RS_TLS_CA\) .*, which ended \d+ days ago, at 2020-02-01T"
            assert bool(re.search(tells_end, said)) == (env is ended), said
    for serve in serving:
        serve.signal(signal.SIGTERM)
        assert serve.wait() == 0


def test_a_free_port(doctor: Doctor, port: int) -> None:
    said = about("endpoint", doctor(*JOB, f"--rdzv-endpoint=127.0.0.1:{port}"))
    assert said.startswith("ok ")
    assert "the port is free: this node would host the coordinator" in said
    with socket.create_server(("127.0.0.1", port)):
        pass  # the port is still free
    said = about("endpoint", doctor(*GUEST, f"--rdzv-endpoint=127.0.0.1:{port}"))
    assert said.startswith("note ")
    assert "no process listens there yet" in said


def test_port_0_is_unknown_to_other_nodes(doctor: Doctor) -> None:
    said = about("endpoint", doctor(*JOB, "--rdzv-endpoint=[::1]:0"))
    assert said == "mend  endpoint     [::1]:0: this node would take any free port, which no other node can know"
    assert about("endpoint", doctor(*JOB, "--nnodes=1", "--rdzv-endpoint=127.0.0.1:0")).startswith("ok ")


def test_a_port_that_is_bound_but_not_listening(doctor: Doctor) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        said = about("endpoint", doctor(*JOB, f"--rdzv-endpoint=127.0.0.1:{holder.getsockname()[1]}"))
    assert said.startswith("mend ")
    assert "cannot be listened on: Address already in use" in said


def test_a_stranger(doctor: Doctor) -> None:
    with answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        for flags in (JOB, GUEST):
            said = about("endpoint", doctor(*flags, f"--rdzv-endpoint=127.0.0.1:{port}"))
            assert said.startswith("mend ")
            assert "it says `HTTP/1.1 400 Bad Request`" in said


def test_a_black_hole(doctor: Doctor) -> None:
    with swallowing() as port:
        lines = doctor(*GUEST, f"--rdzv-endpoint=127.0.0.1:{port}", "--network-timeout=0.3")
    said = about("endpoint", lines)
    assert said.startswith("mend ")
    assert "nothing came back within 0.3 s" in said
    assert "to mend: check that the host is up" in lines[lines.index(said) + 1]


def test_a_silent_name_server_delays_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    release = threading.Event()

    def swallow(*_: object, **__: object) -> None:
        release.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", swallow)
    monkeypatch.setattr(socket, "getnameinfo", swallow)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    began = time.monotonic()
    try:
        assert run.main(["doctor", *JOB, "--rdzv-endpoint=node0.test:29400", "--network-timeout=1.5"]) == 1
    finally:
        release.set()
    assert time.monotonic() - began < 30
    said = capsys.readouterr().out.splitlines()
    assert "node0.test:29400 cannot be resolved: no answer within 1.5 s" in about("endpoint", said)
    assert [line.split("  ")[1].strip() for line in said if line.startswith("mend ")] == ["own name", "endpoint"], said
    assert said[-1] == "2 to mend"


@pytest.mark.parametrize(
    ("flags", "verdict"),
    [
        (("--nnodes=2",), "mend"),
        (("--nnodes=2", "--rdzv-backend=c10d"), "mend"),
        (("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost"), "ok"),
        (("--nnodes=1",), "ok"),
    ],
)
def test_a_name_that_resolves_to_loopback_must_be_mended_with_several_nodes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], verdict: str
) -> None:
    monkeypatch.setattr(net, "addresses_of", lambda _: AT_HOME)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    run.main(["doctor", *flags])
    lines = capsys.readouterr().out.splitlines()
    assert about("own name", lines).startswith(verdict)
    found = [line for line in lines if line.startswith("mend  endpoint") and "loopback address" in line]
    assert len(found) == ("--nnodes=2" in flags)
    if verdict == "mend":
        assert "names no other address: nodes" in found[0]


def test_an_endpoint_whose_name_is_on_loopback_here_must_be_mended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Debian's `127.0.1.1`: where the name is each machine's own, each meets itself."""
    monkeypatch.setattr(net, "addresses_of", lambda _: ["127.0.1.1"])
    assert run.main(["doctor", *JOB, "--rdzv-endpoint=node0.test:29400", "--network-timeout=5"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("mend  endpoint     node0.test is 127.0.1.1 here, on loopback") for line in lines), lines


def test_a_missing_script_must_be_mended(doctor: Doctor, tmp_path: Path) -> None:
    missing, there = tmp_path / "trian.py", tmp_path / "train.py"
    there.touch()
    assert about("script", doctor("--standalone", str(missing))).startswith("mend  script       the script `")
    assert about("script", doctor("--standalone", str(there))) == f"ok    script       {there}"


def test_a_missing_driver_is_reported(doctor: Doctor) -> None:
    if _has_driver():
        pytest.skip("this machine has NVIDIA's driver")
    assert "none: no NVIDIA driver is installed here" in about("gpus", doctor())


def _has_driver() -> bool:
    try:
        _elastic_rs.visible_gpus(None)
    except RuntimeError as error:
        return "no NVIDIA driver answers" in str(error) and "shared object" not in str(error)
    return True


def test_an_invalid_command_line_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, text in (
        (["--nnodes=x"], "--nnodes is `x`"),
        (["--network-timeout=0"], "--network-timeout is `0`, must be above 0 s and at most 600"),
        (["--network-timout=1"], "did you mean `--network-timeout`?"),
        (["--nproc-per-node=0"], "--nproc-per-node is `0`"),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=a:b"], "--rdzv-endpoint"),
    ):
        with pytest.raises(SystemExit) as ended:
            run.main(["doctor", *argv])
        assert ended.value.code == 2
        found = capsys.readouterr()
        assert text in found.err
        assert not found.out, "nothing is printed before the command line is understood"


def test_its_help_lists_the_flags_that_it_uses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run.main(["doctor", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "--rdzv-endpoint" in text
    assert "--network-timeout" in text
    assert "--max-restarts" not in text


def shell(command: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = f"set -o pipefail; {command.replace('doctor', f'{RUN} doctor')}"
    return subprocess.run(
        ["bash", "-c", command], env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


def test_the_exit_code_is_right_although_the_reader_of_stdout_has_gone() -> None:
    # The reader closes the pipe after the first line.
    for folder, code in (("/proc/self/environ", 1), ("/tmp", shell("doctor").returncode)):
        result = shell(f"doctor --log-dir={folder} | head -1")
        assert result.stdout.startswith("ok    python")
        assert (result.returncode, result.stderr) == (code, "")


def test_a_write_error_is_not_reported_as_healthy() -> None:
    result = shell("doctor > /dev/full")
    assert result.returncode == 1
    assert result.stderr == "elastic-run: error: cannot write to standard output: No space left on device\n"


def test_any_terminal_shows_the_findings() -> None:
    result = shell(r"doctor --log-dir=$'/tmp/\xff\xc3\xa4'", PYTHONIOENCODING="ascii")
    assert not result.stderr
    assert r"/tmp/\xff\xe4 is writable" in about("logs", result.stdout.splitlines())


def test_an_interrupt_ends_it_at_once(job: Job) -> None:
    with answering(b"") as port:
        process = job.start([RUN, "doctor", *GUEST, f"--rdzv-endpoint=127.0.0.1:{port}", "--network-timeout=600"])
        process.line("^ok +temporary|^mend +temporary|^note +temporary")
        process.signal(signal.SIGINT)
        assert process.wait() == 130
    assert "Traceback" not in process.tail()


def test_a_complete_command_line_may_follow(doctor: Doctor) -> None:
    assert doctor("--standalone", "--max-restarts=3", "--warm-modules=torch", "train.py", "--lr", "0.1", "--nnodes=x")


@pytest.mark.parametrize("argv", [["./doctor"], ["--", "doctor"], ["--no-python", "./doctor"]])
def test_a_script_of_that_name_can_be_run(job: Job, tmp_path: Path, argv: list[str]) -> None:
    script = tmp_path / "doctor"
    script.write_text(f"#!{sys.executable}\nprint('the script')\n")
    script.chmod(0o755)
    command = ["sh", "-c", 'cd "$0" && exec "$@"', str(tmp_path), RUN, *argv]
    process = job.start(command)
    assert process.wait() == 0
    assert "the script" in process.lines


def test_torch_is_not_imported() -> None:
    code = "import sys; from elastic_rs import run; run.main(['doctor']); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "False"
