"""The processes of benches/store.py: servers, the names that they see, and the clients that load them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

ROOT = Path(__file__).resolve().parents[1]
LOAD = ROOT / "target/release/examples/store_load"
SERVER_CPU, LOAD_CPU = 0, 1

OURS, PYTORCH = "ours", "pytorch"
SERVERS = {
    PYTORCH: "d.TCPStore('127.0.0.1', 0, is_master=True)",
    OURS: "_elastic_rs.StoreServer.listen(None, 0)",
}
# A server process. The import is not part of the measured start. It ends when its standard input is closed.
SERVER = """
import sys, time
{imports}
began = time.perf_counter()
s = {make}
print(s.port, (time.perf_counter() - began) * 1e3, flush=True)
sys.stdin.read()
"""
IMPORTS = {PYTORCH: "import torch.distributed as d", OURS: "from elastic_rs import _elastic_rs"}

AT_ONCE, SLOW, BLACK_HOLED = "at once", "20 ms", "black-holed"
SLOW_ANSWER_S = 0.02
# An unused loopback address, because the resolver's port cannot be chosen.
NAME_SERVER = ("127.99.99.99", 53)


class NameServer:
    """A name server that knows no name. It answers after a delay, or never."""

    def __init__(self, *, answers: bool) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(NAME_SERVER)
        self._thread = threading.Thread(target=self._serve, daemon=True) if answers else None
        if self._thread:
            self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                query, peer = self._socket.recvfrom(4096)
                if not query:
                    return
                time.sleep(SLOW_ANSWER_S)
                # The request as a response: recursion available, no such name.
                self._socket.sendto(query[:2] + bytes([query[2] | 0x80, 0x83]) + query[4:], peer)

    def close(self) -> None:
        if self._thread:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
                end.sendto(b"", NAME_SERVER)
            self._thread.join()
        self._socket.close()


@contextlib.contextmanager
def names(dns: str) -> Iterator[list[str]]:
    """Yield the prefix for a command in which reverse look-ups take that long.

    The command sees other files as /etc/nsswitch.conf and /etc/resolv.conf.
    """
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        switch, resolver = Path(directory, "nsswitch.conf"), Path(directory, "resolv.conf")
        switch.write_text("hosts: files\n" if dns == AT_ONCE else "hosts: files dns\n")
        resolver.write_text(f"nameserver {NAME_SERVER[0]}\n")
        if dns != AT_ONCE:
            server = NameServer(answers=dns == SLOW)
            stack.callback(server.close)
        mounts = f"mount --bind {switch} /etc/nsswitch.conf && mount --bind {resolver} /etc/resolv.conf"
        yield ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "sh"]


def why_no_names(dns: str) -> str | None:
    """Return why a process cannot have such names here, or None."""
    try:
        with names(dns) as prefix:
            done = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{NAME_SERVER[0]}:{NAME_SERVER[1]}: {error.strerror}"
    return done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else None


@contextlib.contextmanager
def pinned(cpu: int) -> Iterator[None]:
    """Restrict processes that are started meanwhile to this CPU."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Child:
    """A process that answers lines with lines. It is gone at the end of ``with``."""

    def __init__(self, command: list[str], cpu: int) -> None:
        with pinned(cpu):
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # PyTorch's server logs each connection that is dropped
                text=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Killed, because after a burst that timed out PyTorch's server would continue to look up names.
        self.process.kill()
        self.process.communicate()

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"error: {self.process.args!r} has ended")
        return line

    def ask(self, *words: object) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self.line()


class Server(Child):
    """A store's server on a separate CPU."""

    def __init__(self, name: str, prefix: list[str]) -> None:
        program = SERVER.format(imports=IMPORTS[name], make=SERVERS[name])
        super().__init__([*prefix, sys.executable, "-c", program], SERVER_CPU)
        port, start_ms = self.line().split()
        self.port, self.start_ms = int(port), float(start_ms)

    def resident_bytes(self) -> int:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) * 1024


class Load(Child):
    """A load generator with its connections."""

    def __init__(self, port: int, cpu: int = LOAD_CPU) -> None:
        super().__init__([str(LOAD), str(port)], cpu)

    def result(self, *words: object) -> dict[str, float]:
        result: dict[str, float] = json.loads(self.ask(*words))
        return result


# A client process. For each operation it prints the median round trip in microseconds.
CLIENT = """
import statistics, sys, time
import torch.distributed as d
s = d.TCPStore("127.0.0.1", int(sys.argv[1]))
s.set("k", b"v" * 64)
keys = [f"m{i}" for i in range(100)]
s.multi_set(keys, [b"v" * 64] * 100)
calls = {"get": lambda: s.get("k"), "add": lambda: s.add("n", 1), "multi_get": lambda: s.multi_get(keys)}
for line in sys.stdin:
    call, took = calls[line.strip()], []
    for _ in range(3000):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    print(statistics.median(took[500:]) * 1e6, flush=True)
"""


class Client(Child):
    """PyTorch's own client, on the server's CPU."""

    def __init__(self, port: int, prefix: list[str]) -> None:
        super().__init__([*prefix, sys.executable, "-c", CLIENT, str(port)], SERVER_CPU)
