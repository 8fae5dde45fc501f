"""Agents listen only on the addresses where workers look for their store."""

import ipaddress
import signal
import socket
from pathlib import Path

import pytest
from helpers.procs import Process
from helpers.workers import place

from .conftest import Start

pytestmark = [pytest.mark.torchrun]

LISTENS = "0A"


def listens_on(node: Process) -> set[tuple[str, int]]:
    """Return the addresses and ports on which a process accepts TCP connections, as ``ss -ltnp`` shows them."""
    links = [descriptor.readlink().name for descriptor in Path(f"/proc/{node.pid}/fd").iterdir()]
    inodes = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{node.pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENS and rest[5] in inodes:
                address, _, port = local.partition(":")
                words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
                found.add((str(ipaddress.ip_address(b"".join(words))), int(port, 16)))
    return found


def end(*nodes: Process) -> None:
    for node in nodes:
        node.signal(signal.SIGTERM)
    for node in nodes:
        node.wait()


def own_address() -> str:
    """Return an address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(probe.getsockname()[0])


def test_a_job_of_one_node_listens_only_on_loopback(start: Start) -> None:
    node = start(2, "--quiet", nnodes="1", local_addr=False)
    address, _, port = place(node, 1)["master"].partition(":")
    listening = listens_on(node)
    assert (address, int(port)) in listening
    assert {ip for ip, _ in listening} == {"127.0.0.1"}
    end(node)


@pytest.mark.parametrize("agent", ["rust", "run"], indirect=True)
def test_a_job_of_one_node_has_its_worker_store_on_loopback_even_with_a_public_endpoint(start: Start) -> None:
    own = own_address()
    node = start(2, "--quiet", nnodes="1", local_addr=False, endpoint=own)
    address, _, port = place(node, 1)["master"].partition(":")
    assert address == "127.0.0.1"
    assert {ip for ip, at in listens_on(node) if at == int(port)} == {"127.0.0.1"}
    end(node)


@pytest.mark.parametrize("agent", ["rust", "run"], indirect=True)
def test_a_node_without_local_addr_listens_where_other_nodes_look_for_it(start: Start) -> None:
    own = own_address()
    nodes = [start(number, "--quiet", nnodes="2", local_addr=False, endpoint=own) for number in (2, 3)]
    masters = {place(node, 2)["master"] for node in nodes}
    assert {master.partition(":")[0] for master in masters} == {own}
    assert {ip for node in nodes for ip, _ in listens_on(node)} == {own}
    end(*nodes)


@pytest.mark.parametrize("agent", ["rust", "run"], indirect=True)
def test_a_local_addr_that_is_a_name_makes_the_store_listen_on_all_addresses(start: Start) -> None:
    node = start(2, "--quiet", nnodes="1:2", local_addr=False, options=["--local-addr=localhost"])
    line = node.line(r"workers listen on all addresses, since others find it at `localhost`: a name may mean")
    assert line
    assert place(node, 1)["master"].startswith("localhost:")
    assert any(ip in {"::", "0.0.0.0"} for ip, _ in listens_on(node))
    end(node)
