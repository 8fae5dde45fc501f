"""Show a job whose hosts come, go and fail: ``make demo DEMO_ARGS=--hosts``.

One command, ``elastic-run --host-discovery-script``, trains examples/digits_elastic.py on the hosts that a script
names. While it trains, a host is added, a bad one is added that is kept out and comes back, and the first host is
removed. A "host" is a name for a loopback address at which an SSH server of this machine listens.

The exit code is 0 only if all of this happened, and the network recognises at least 95 % of the test images.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from demo_nodes import MARKER, processes_of

SCRIPT = Path(__file__).resolve().with_name("digits_elastic.py")
TOOLS = SCRIPT.parents[1] / "tools"
REQUIRED_ACCURACY = 0.95
EPOCH = r"epoch (\d+)/(\d+)  world (\d+)  loss [\d.]+  test accuracy ([\d.]+)"


class DemoError(Exception):
    """The job did not do what the demo shows."""


class Demo:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.folder = folder
        self.marker = uuid.uuid4().hex
        self.began = time.monotonic()
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.list = folder / "hosts"
        self.driver: subprocess.Popen[str] | None = None

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f}  {text}", flush=True)

    def hosts(self, *hosts: str) -> None:
        """Change what the script prints."""
        new = self.list.with_suffix(".new")
        new.write_text("".join(f"{host}\n" for host in hosts))
        new.rename(self.list)
        self.say(f"--- the script prints: {' '.join(hosts)}")

    def start(self, ssh: str) -> None:
        command = [
            *(sys.executable, "-m", "elastic_rs.run", f"--host-discovery-script=cat {shlex.quote(str(self.list))}"),
            *("--min-np=2", "--max-np=6", "--host-failures=1", "--blacklist-cooldown-range", "4", "60"),
            *("--rdzv-conf=last_call_timeout=0.5", f"--ssh={ssh}", str(SCRIPT), f"--epochs={self.args.epochs}"),
            *(f"--checkpoint={self.folder / 'digits.pt'}", "--min-epoch-time=0.3"),
        ]
        self.say(f"$ elastic-run {shlex.join(command[3:])}")
        env = os.environ | {
            MARKER: self.marker,
            "ELASTIC_RS_LOG": "info",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        self.driver = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.driver is not None
        assert self.driver.stdout is not None
        for line in self.driver.stdout:
            self.lines.put(line.rstrip("\n"))
        self.lines.put(None)

    def until(self, pattern: str) -> re.Match[str]:
        """Wait for a line, and show what matters meanwhile."""
        while True:
            left_s = self.began + self.args.time_limit - time.monotonic()
            try:
                line = self.lines.get(timeout=max(0.0, left_s))
            except queue.Empty:
                raise DemoError(
                    f"no line like `{pattern}` within {self.args.time_limit:.0f} s (--time-limit)"
                ) from None
            if line is None:
                raise DemoError(f"the job has ended without a line like `{pattern}`")
            number = re.search(EPOCH, line)
            if number is None or int(number[1]) % 10 == 0:
                shown = re.sub(r"\[elastic_rs\] [\d:.]+ ", "", line)
                if number or re.search(r"discovery: |training from epoch|rror", shown):
                    self.say(shown)
            if match := re.search(pattern, line):
                return match

    def world(self, size: int) -> None:
        """Wait until a world of that size trains."""
        found = self.until(rf"epoch \d+/\d+  world {size} ")
        self.say(f"--- {size} workers train: {found[0].strip()}")

    def run(self, server: object) -> None:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))  # and does not listen
            ports = {"node2": nobody.getsockname()[1]}
            ssh = server.command(ports=ports)  # type: ignore[attr-defined]
            self.hosts("node0:2")
            self.start(ssh)
            self.world(2)
            self.hosts("node0:2", "node1:2")
            self.world(4)
            self.hosts("node0:2", "node1:2", "node2:2")
            self.until(r"host `node2`: ssh cannot connect.*; it is out for 4 s")
            self.say("--- node2 is out for a while, and the others train on; it is mended now")
            server.command()  # type: ignore[attr-defined]  # ssh reads its configuration each time
        self.world(6)
        self.hosts("node1:2", "node2:2")
        self.until("the agent on node0:2 has left")
        self.world(4)
        last = self.until(rf"epoch {self.args.epochs}/{self.args.epochs}  world 4 .*test accuracy ([\d.]+)")
        assert self.driver is not None
        code = self.driver.wait(60)
        if code:
            raise DemoError(f"elastic-run has ended with exit code {code}")
        if float(last[1]) < REQUIRED_ACCURACY:
            raise DemoError(f"test accuracy {last[1]}, must be at least {REQUIRED_ACCURACY}")
        self.say(f"--- all epochs were trained: test accuracy {last[1]}")

    def stop(self) -> None:
        """End whatever is left."""
        if self.driver is not None and self.driver.poll() is None:
            self.driver.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.driver.wait(15)
        while left := [pid for pid, _ in processes_of(self.marker)]:
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


@contextlib.contextmanager
def serving(folder: Path, marker: str) -> Iterator[object]:
    sys.path.insert(0, str(TOOLS))
    from ssh_server import CannotServeError, SshServer

    program = os.environ.get("SSHD")
    if not program:
        raise DemoError("there is no SSH server: SSHD=/path/to/sshd names one, tools/find_tool.py finds it")
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        port = probe.getsockname()[1]
    try:
        server = SshServer(program, folder, port, {MARKER: marker})
    except CannotServeError as error:
        raise DemoError(str(error)) from None
    try:
        yield server
    finally:
        server.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description="A job whose hosts come, go and fail.")
    parser.add_argument("--epochs", type=int, default=250, help="epochs to train (default: %(default)s)")
    parser.add_argument("--time-limit", type=float, default=300, metavar="SECONDS", help="(default: %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="elastic_rs-demo-") as name:
        folder = Path(name)
        (folder / "ssh").mkdir()
        demo = Demo(args, folder)
        try:
            with serving(folder / "ssh", demo.marker) as server:
                try:
                    demo.run(server)
                finally:
                    demo.stop()
        except DemoError as error:
            print(f"FAILED: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
