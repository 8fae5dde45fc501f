"""Jobs whose workers reach the store of rank 0's node through their agents."""

import contextlib
import os
import re
import signal
import socket
from pathlib import Path

import pytest
from helpers.procs import Process
from helpers.workers import place

from .conftest import SCRIPTS, Start
from .test_in_place import ended_well, worlds_after_a_kill

pytestmark = pytest.mark.torchrun

EXAMPLES = Path(__file__).parents[3] / "examples"
OURS = pytest.mark.parametrize("agent", ["rust", "run"], indirect=True)
CONF = "last_call_timeout=1,store_tunnel=1"


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("4f" * 32)
    return {"ELASTIC_RS_TOKEN_FILE": str(token)}


def tunnels(pids: list[int]) -> list[str]:
    """Return the tunnel threads of these processes."""
    names = [comm.read_text().strip() for pid in pids for comm in Path(f"/proc/{pid}/task").glob("*/comm")]
    return sorted(name for name in names if name.startswith("tunnel-"))


def doors(node: Process, since: int = 0) -> tuple[str, int]:
    """Wait for the next round of rank 0's node, and return where other nodes' agents prove themselves."""
    found = node.line(r"other nodes come through a tunnel at (\S+):(\d+)\)", since=since)
    return found[1], int(found[2])


@pytest.mark.parametrize("agent", ["rust", pytest.param("run", marks=pytest.mark.long)], indirect=True)
def test_a_process_group_of_two_nodes_meets_through_the_tunnel_and_again_after_a_failure(
    start: Start, env: dict[str, str], tmp_path: Path
) -> None:
    done = tmp_path / "done"
    nodes = [start(number, "--torch", "--until", done, nnodes="2", nproc=2, conf=CONF, env=env) for number in (2, 3)]
    places = [place(node, 4) for node in nodes]
    assert {at["master"].partition(":")[0] for at in places} == {"127.0.0.1"}
    assert places[0]["master"] != places[1]["master"], "each node's workers connect to their own agent"
    for node in nodes:
        node.line(r"SUM rank=\d world=4")
    first = next(node for node in nodes if any("other nodes come through" in line for line in node.lines))
    address, port = doors(first)
    assert address in {"127.0.0.2", "127.0.0.3"}
    agents = [node.pid for node in nodes]
    assert len(tunnels(agents)) == 2
    # A stranger with a c10d client gets nothing.
    with socket.create_connection((address, port)) as stranger:
        stranger.sendall(b"\x00\xce\xf7\x85\x3c\x0d\x01\x02\x03\x04")
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(4096) == b""
    first.line("a c10d client has connected without its agent's tunnel")
    before = [len(node.lines) for node in nodes]
    os.kill(int(places[1]["pid"]), signal.SIGKILL)
    again = [place(node, 4, since=since) for node, since in zip(nodes, before, strict=True)]
    assert {at["master"].partition(":")[0] for at in again} == {"127.0.0.1"}
    for node, since in zip(nodes, before, strict=True):
        node.line(r"SUM rank=\d world=4", since=since)
    assert len(tunnels(agents)) == 2, "the last round's have ended"
    done.touch()
    assert [node.wait() for node in nodes] == [0, 0]


@pytest.mark.parametrize("agent", ["run"], indirect=True)
def test_ddp_trains_through_the_tunnel(start: Start, env: dict[str, str], tmp_path: Path) -> None:
    flags = ["--epochs", 2, "--checkpoint", tmp_path / "digits.pt"]
    script = EXAMPLES / "digits_ddp.py"
    nodes = [start(number, *flags, nnodes="2", script=script, conf=CONF, env=env) for number in (2, 3)]
    assert [node.wait() for node in nodes] == [0, 0], [node.tail() for node in nodes]
    rank0 = next(node for node in nodes if any("other nodes come through a tunnel" in line for line in node.lines))
    assert any("epoch 2/2  world 2  loss" in line for line in rank0.lines), rank0.tail()


@pytest.mark.parametrize("agent", ["run"], indirect=True)
def test_survivors_get_the_next_rounds_tunnel(start: Start, env: dict[str, str], tmp_path: Path) -> None:
    done, script = tmp_path / "done", SCRIPTS / "steps.py"
    nodes = [
        start(number, "--until", done, nnodes="2", nproc=2, script=script, conf=CONF, env=env) for number in (2, 3)
    ]
    worlds_after_a_kill(nodes)
    ended_well(done, *nodes)


@OURS
def test_a_tunnel_without_a_token_is_an_error(start: Start) -> None:
    node = start(2, nnodes="2", conf=CONF)
    assert node.wait() != 0
    assert any("--rdzv-conf store_tunnel=1 needs a token" in line for line in node.lines), node.tail()


@OURS
def test_a_node_without_the_tunnel_is_refused_with_both_values(
    start: Start, env: dict[str, str], tmp_path: Path
) -> None:
    done = tmp_path / "done"
    nodes = [start(number, "--until", done, nnodes="2:3", conf=CONF, env=env) for number in (2, 3)]
    for node in nodes:
        place(node, 2)
    without = start(4, nnodes="2:3", conf="last_call_timeout=1,is_host=0,store_tunnel=0", env=env)
    assert without.wait() != 0
    why = "has `store_tunnel=0`, but run `job` was opened with `store_tunnel=1`: give every node the same `--rdzv-conf"
    assert any(why in line for line in without.lines), without.tail()
    done.touch()
    assert [node.wait() for node in nodes] == [0, 0]


@OURS
def test_a_token_that_the_user_names_means_a_tunnel_and_a_c10d_client_gets_nothing(
    start: Start, env: dict[str, str], tmp_path: Path
) -> None:
    done = tmp_path / "done"
    # Those that say it and those that do not agree.
    confs = ("last_call_timeout=1", CONF)
    nodes = [
        start(number, "--until", done, nnodes="2", conf=conf, env=env)
        for number, conf in zip((2, 3), confs, strict=True)
    ]
    assert {place(node, 2)["master"].partition(":")[0] for node in nodes} == {"127.0.0.1"}
    first = next(node for node in nodes if any("other nodes come through" in line for line in node.lines))
    with socket.create_connection(doors(first)) as stranger:
        stranger.sendall(b"\x00\xce\xf7\x85\x3c\x0d\x01\x02\x03\x04")
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(4096) == b""
    done.touch()
    assert [node.wait() for node in nodes] == [0, 0]


@OURS
def test_a_token_without_a_store_of_the_agents_is_one_warning(start: Start, env: dict[str, str]) -> None:
    env = env | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    nodes = [start(number, "--quiet", nnodes="2", env=env) for number in (2, 3)]
    assert {place(node, 2)["master"].partition(":")[0] for node in nodes} <= {"127.0.0.2", "127.0.0.3"}
    for node in nodes:
        node.signal(signal.SIGTERM)
    for node in nodes:
        node.wait()
        said = [line for line in node.lines if "do not protect the workers' store" in line]
        assert len(said) == 1, node.tail()


@pytest.mark.parametrize("agent", ["run"], indirect=True)
def test_the_flag_means_the_key(start: Start, env: dict[str, str], tmp_path: Path) -> None:
    done = tmp_path / "done"
    nodes = [start(number, "--until", done, nnodes="2", options=["--store-tunnel"], env=env) for number in (2, 3)]
    hosts = [place(node, 2)["master"] for node in nodes]
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", host) for host in hosts)
    done.touch()
    assert [node.wait() for node in nodes] == [0, 0]
