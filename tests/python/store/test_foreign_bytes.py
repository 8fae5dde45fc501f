"""Bad input at our server's port, and clients that vanish, disturb no other client."""

import random
import signal
import socket
import sys
from collections.abc import Callable

import elastic_rs
import pytest
import torch.distributed as dist
from elastic_rs import _elastic_rs
from helpers.procs import Job
from helpers.stores import HOST, LIMIT, client_of, until

VALIDATE = bytes.fromhex("00cef7853c")
PING = bytes.fromhex("0d01020304")


def length(number: int) -> bytes:
    return number.to_bytes(8, "little")


CLIENT_HELLO = bytes.fromhex("16030100c4010000c00303") + bytes(range(32)) + bytes(160)
FOREIGN: dict[str, bytes] = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "tls": CLIENT_HELLO,
    "ssh": b"SSH-2.0-OpenSSH_9.9\r\n",
    "random": random.Random(1).randbytes(4096),
    "zeros": bytes(4096),
    "another magic": bytes.fromhex("00efbeadde") + PING,
    "no validate": b"\x01" + length(1) + b"k" + length(1) + b"v",
    "validate twice": VALIDATE + VALIDATE,
    "unknown query": VALIDATE + b"\xff",
    "a key without end": VALIDATE + b"\x03" + length(2**64 - 1),
    "a value above the limit": VALIDATE + b"\x01" + length(1) + b"k" + length(8 * 1024 * 1024 + 1),
    "keys without end": VALIDATE + b"\x06" + length(2**63),
    "random after validate": VALIDATE + PING + b"\xc8" + random.Random(2).randbytes(4096),
}


def sent_to(server: _elastic_rs.StoreServer, data: bytes) -> socket.socket:
    stream = socket.create_connection((HOST, server.port), timeout=LIMIT.total_seconds())
    stream.sendall(data)
    return stream


def read_to_end(stream: socket.socket) -> bytes:
    received = b""
    try:
        while part := stream.recv(4096):
            received += part
    except ConnectionResetError:
        pass
    return received


@pytest.fixture
def undisturbed(server: _elastic_rs.StoreServer, stock: dist.TCPStore) -> Callable[[], None]:
    """Return a check that an earlier client and new clients are served."""
    stock.set("before", "there")

    def check() -> None:
        assert stock.get("before") == b"there"
        assert client_of("stock", server.port).get("before") == b"there"
        assert stock.num_keys() == 1
        assert not server.stopped

    return check


@pytest.mark.parametrize("who", FOREIGN)
def test_a_peer_that_speaks_another_protocol_is_rejected(
    who: str, server: _elastic_rs.StoreServer, undisturbed: Callable[[], None]
) -> None:
    with sent_to(server, FOREIGN[who]) as stream:
        answer = read_to_end(stream)
    assert answer in (b"", PING[1:])
    undisturbed()


HALVES = {
    "nothing": b"",
    "half a hello": VALIDATE[:3],
    "half a length": VALIDATE + b"\x01\x05\x00",
    "half a key": VALIDATE + b"\x01" + length(5) + b"ab",
    "half a value": VALIDATE + b"\x01" + length(1) + b"k" + length(1000) + bytes(10),
    "half of several": VALIDATE + b"\x0b" + length(2) + length(1) + b"k" + length(1) + b"v",
    "one of two waited for": VALIDATE + b"\x06" + length(2) + length(1) + b"k",
}


@pytest.mark.parametrize("half", HALVES)
def test_half_a_request_holds_up_nobody_and_is_never_carried_out(
    half: str, server: _elastic_rs.StoreServer, undisturbed: Callable[[], None]
) -> None:
    with sent_to(server, HALVES[half]):
        undisturbed()  # while the connection is open
    undisturbed()


def test_the_log_names_rejected_clients_and_shows_their_first_bytes(
    server: _elastic_rs.StoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", "elastic_rs"):
        _elastic_rs.reset_log_levels()
        with sent_to(server, FOREIGN["http"]) as stream:
            host, port = stream.getsockname()[:2]
            read_to_end(stream)
        until("logged", lambda: "GET / HTTP" in caplog.text)
    assert host in caplog.text
    assert str(port) in caplog.text
    assert caplog.records[0].name == "elastic_rs.store.server"


def test_a_value_above_the_limit_is_named_in_the_log_by_its_key(
    server: _elastic_rs.StoreServer, undisturbed: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    # With PyTorch's server the client gets "Connection reset by peer", and the reason is not logged.
    client = client_of("stock", server.port)
    with caplog.at_level("WARNING", "elastic_rs"):
        _elastic_rs.reset_log_levels()
        with pytest.raises(dist.DistNetworkError):  # at once, or when the reply is missing
            client.set("too big", b"SECRET" * 2_000_000)
            client.num_keys()
        until("logged", lambda: "too_long" in caplog.text)
    assert "Set announces 12000000, above the limit value_bytes = 8388608" in caplog.text
    assert 'key="/too big"' in caplog.text
    assert "127.0.0.1:" in caplog.text
    assert "SECRET" not in caplog.text
    undisturbed()


WAITS = """
import sys
from elastic_rs import _elastic_rs
client = _elastic_rs.StoreClient("127.0.0.1", int(sys.argv[1]))
client.set("before", "there")
client.wait([b"never"])
"""
STOCK_WAITS = """
import sys
import torch.distributed as dist
client = dist.TCPStore("127.0.0.1", int(sys.argv[1]))
client.set("before", "there")
client.wait(["never"])
"""


@pytest.mark.parametrize("code", [WAITS, STOCK_WAITS], ids=["core", "stock"])
def test_a_client_that_is_killed_while_it_waits_is_forgotten(
    code: str, job: Job, server: _elastic_rs.StoreServer, undisturbed: Callable[[], None]
) -> None:
    process = job.start([sys.executable, "-c", code, str(server.port)])
    until("waiting", lambda: server.waiting == 1)
    process.signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    until("forgotten", lambda: server.waiting == 0 and server.connections == 1)
    undisturbed()


HOLDS_A_PORT = """
import signal, socket
listener = socket.create_server(("", 0))
print("port", listener.getsockname()[1], flush=True)
signal.pause()
"""


def test_a_taken_port_is_an_error_that_names_the_process(job: Job) -> None:
    holder = job.start([sys.executable, "-c", HOLDS_A_PORT])
    port = int(holder.line(r"port (\d+)")[1])
    with pytest.raises(dist.DistNetworkError, match="address already in use") as caught:
        elastic_rs.TCPStore(HOST, port, is_master=True)
    assert f"port {port} on 0.0.0.0 is already in use by pid {holder.pid} (python" in str(caught.value)
    holder.signal(signal.SIGTERM)
    holder.wait()
