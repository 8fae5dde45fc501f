"""``main``: the agent on a host, which a driver started by ``ssh``.

Its standard input has a line for this agent, a line for all agents of the job, and then requests of the driver, one in
each line. The end of the input means that the driver or the connection is gone: the node leaves the job then. The agent
reports on standard output. A token distinguishes its reports from its workers' output.

It reports that it runs before it imports what only the job needs.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from elastic_rs import _elastic_rs, _python
from elastic_rs._threads import start_daemon
from elastic_rs.rendezvous import _protection

Report = Callable[[str], None]


def main() -> int:
    requests = _take_input()
    try:
        own = json.loads(requests.readline())
        token: str = own["token"]
        _report(token, f'{{"up": {{"version": "{_elastic_rs.VERSION}"}}}}')
        job = json.loads(requests.readline())
    except ValueError:
        return 1  # the driver has gone
    return _serve(requests, own, job)


def _serve(requests: IO[bytes], own: dict[str, Any], job: dict[str, Any]) -> int:
    def report_to_driver(outcome: str) -> None:
        if outcome == "lacks_script" and not job["lacks_script"]:
            return  # another host has it
        ended = f'{{"ended": {{"outcome": "{outcome}"}}}}'  # a word of the core's
        _report(own["token"], '"accepted"' if outcome == "accepted" else ended)

    report: Report = report_to_driver
    _enter(job)
    os.environ["ELASTIC_RS_HOST"] = own["host"]  # for workers, as HOROVOD_HOSTNAME
    if job["detach"]:
        if _detach(job, own, report):
            return 0
        requests.close()
        report = _report_to_nobody
    else:
        start_daemon(lambda: _obey(requests, int(job["leave"]), job["passed_on"]), "elastic_rs-requests")
    from elastic_rs import run

    return run.main(command_line(own, job, _endpoint(own, job)), report=report)


def _take_input() -> IO[bytes]:
    """Move standard input elsewhere, since workers would inherit it."""
    requests = os.fdopen(os.dup(0), "rb")
    _replace(0, os.open(os.devnull, os.O_RDONLY))
    return requests


def _replace(descriptor: int, by: int) -> None:
    os.dup2(by, descriptor)
    os.close(by)


def _report(token: str, what: str) -> None:
    with contextlib.suppress(OSError):  # the driver has gone
        # One write, because a worker may write at the same time.
        os.write(1, f"elastic_rs-agent {token} {what}\n".encode())


def _report_to_nobody(_: str) -> None:
    """A detached agent has no driver."""


def _enter(job: dict[str, Any]) -> None:
    """Change to the driver's working folder, and take its variables and the job's token."""
    _protection.give(job.pop("token"))

    try:
        os.chdir(job["cwd"])
    except OSError as error:
        shown = os.fsencode(job["cwd"]).decode(errors="replace")
        sys.exit(f"elastic-run: error: cannot go to the driver's folder `{shown}`: {error.strerror}")
    _python.enter(job["cwd"])
    # Flags and certificates are the job's affair, as its token is: a host's own variables say nothing about them.
    own = [name for name in os.environ if name.startswith("PET_") or name in _protection.TLS_VARIABLES]
    for name in own:
        del os.environ[name]
    os.environ.update(job["env"])


def _detach(job: dict[str, Any], own: dict[str, Any], report: Report) -> bool:
    """Fork a process that goes on without the connection, and whose output goes to a file. True in the parent."""
    path = Path(job["cwd"], f"{job['log']}-{own['age']}.log")
    try:
        log = _open_log(path)
    except OSError as error:
        sys.exit(f"elastic-run: error: cannot write the agent's output to `{path}`: {error.strerror}")
    child = os.fork()
    if child:
        sys.stderr.write(f"elastic-run: the agent is pid {child}, and its output is in {path}\n")
        report("detached")
        return True
    os.setsid()
    os.dup2(log, 1)
    _replace(2, log)
    return False


def _open_log(path: Path) -> int:
    """Open a log whose name others can guess, in a folder that they may write into. It is never another file."""
    # A pipe that nobody reads would be waited for.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        log = os.open(path, flags, 0o644)
        if stat.S_ISREG(os.fstat(log).st_mode):
            os.set_blocking(log, True)
            return log
        os.close(log)
    except OSError as error:
        if error.errno not in {errno.ELOOP, errno.ENXIO}:
            raise
    raise OSError(errno.EINVAL, "it is a symbolic link, or no file: remove it, or go to another folder")


def _endpoint(own: dict[str, Any], job: dict[str, Any]) -> str:
    """Return where the coordinator is."""
    if job["endpoint"]:
        given: str = job["endpoint"]
        return given
    # "client-address client-port server-address server-port": the driver, as this host sees it.
    driver = os.environ.get("SSH_CONNECTION", "").split(" ", 1)[0] if own["remote"] else ""
    driver = driver.partition("%")[0] or "127.0.0.1"
    return f"[{driver}]:{own['port']}" if ":" in driver else f"{driver}:{own['port']}"


def command_line(own: dict[str, Any], job: dict[str, Any], endpoint: str) -> list[str]:
    # Of a list each agent finds out itself whether one of the endpoints is its own.
    is_host = "" if "," in endpoint else f",is_host={int(own['hosts_coordinator'])}"
    conf = f"{job['conf']},host_name={own['host']},node_rank={own['age']}{is_host}"
    ours = [f"--nproc-per-node={own['slots']}", f"--rdzv-endpoint={endpoint}", f"--rdzv-conf={conf}"]
    # The parser takes a `--` before the script, or else one that follows it at once, for its own.
    script = job["script"]
    marked = script[0].startswith("-") or script[1:2] == ["--"]
    return [*job["flags"], *ours, *(["--"] if marked else []), *script]


def _obey(requests: IO[bytes], leave: int, passed_on: list[int]) -> None:
    """Carry out the driver's requests. Leave when their stream ends.

    The agent leaves at its first signal, and kills its workers at the second one. So only the driver's own second
    signal may become the agent's second one. Requests may arrive closer to one another than they were sent. Those of
    `passed_on` do not end it.
    """
    leaving, signals, last = False, 0, -_elastic_rs.SAME_SIGNAL_S

    def send(number: int) -> None:
        nonlocal leaving, last
        leaving = True
        # A second one that comes at once would count as the first.
        time.sleep(max(0.0, last + 1.1 * _elastic_rs.SAME_SIGNAL_S - time.monotonic()))
        last = time.monotonic()
        os.kill(os.getpid(), number)

    for line in requests:
        word, _, number = line.decode(errors="replace").strip().partition(" ")
        if word == "leave" and not leaving:
            send(leave)
        elif word == "signal" and number.isdecimal() and int(number) in signal.valid_signals():
            if int(number) in passed_on:
                os.kill(os.getpid(), int(number))
                continue
            signals += 1
            if signals > 1 or not leaving:
                send(int(number))
    if not leaving:
        send(leave)
