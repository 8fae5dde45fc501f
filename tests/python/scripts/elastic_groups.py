"""A worker of `elastic_rs.elastic` for tests: in each world it makes a process group in another way, and hangs.

The agent is whoever started it. Each argument says what happens in one world, as WAY or WAY-making: how the group is
made, and whether the highest rank stops before it is made, and not in a collective after that. After these worlds the
worker ends.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from elastic_rs import elastic
from torch.distributed import distributed_c10d, new_group, split_group  # before they could be replaced
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--name")
parser.add_argument("worlds", nargs="*")
args = parser.parse_args()
TIMEOUT = timedelta(seconds=240)


def say(what: str, **values: Any) -> None:
    # One write for the whole line, because the workers of a node share a pipe.
    os.write(1, f"{what} {json.dumps(values)}\n".encode())


class Service:
    """A server of the program's own, and connections to it, which have to outlive all process groups."""

    def __init__(self) -> None:
        self.clients: list[socket.socket] = []
        self._address: Any = None
        self._listens = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()
        self._listens.wait()

    async def _serve(self) -> None:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(100):
                writer.write(data)

        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        self._address = server.sockets[0].getsockname()
        self._listens.set()
        await server.serve_forever()

    def connect(self) -> None:
        self.clients.append(socket.create_connection(self._address))
        self.check()

    def check(self) -> None:
        for client in self.clients:
            client.sendall(b"alive")
            assert client.recv(100) == b"alive"


def in_child(_: int) -> None:
    dist.ProcessGroupGloo(dist.HashStore(), 0, 1, TIMEOUT)


def by_mesh() -> Any:
    return init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("one", "all")).get_group("all")


def by_split() -> Any:
    return split_group(None, [list(range(dist.get_world_size()))])


def by_threads(count: int) -> Any:
    """Make groups in threads, without `torch.distributed`'s functions, as other libraries do."""
    made: list[Any] = [None] * count
    failed: list[RuntimeError] = []
    # While a thread waits in a store, no other can use it.
    stores = [distributed_c10d._get_default_store()]
    stores += [dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])) for _ in range(1, count)]

    def make(number: int) -> None:
        own = dist.PrefixStore(f"thread {number}", stores[number])
        try:
            made[number] = dist.ProcessGroupGloo(own, dist.get_rank(), dist.get_world_size(), TIMEOUT)
        except RuntimeError as error:
            failed.append(error)

    threads = [threading.Thread(target=make, args=[number]) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return made


WAYS: dict[str, Callable[[], Any]] = {
    "new_group": new_group,
    "mesh": by_mesh,
    "split": by_split,
    "thread": lambda: by_threads(1),
    "threads": lambda: by_threads(2),
}


def reduce(group: Any) -> None:
    if isinstance(group, list):
        for one in group:
            one.allreduce([torch.ones(1)]).wait()
    else:
        dist.all_reduce(torch.ones(1), group=group)


@elastic.run(timeout=TIMEOUT)
def train(state: Any) -> None:
    service.check()
    if state.world == len(args.worlds):
        return
    way, _, making = args.worlds[state.world].partition("-")
    state.world += 1
    state.commit()
    if way == "split" and torch.__version__ < "2.13":
        way = "new_group"  # `split_group` is for GPUs alone there
    stops = dist.get_rank() == dist.get_world_size() - 1

    def stop() -> None:
        if stops:
            say("STOPPED")
            os.kill(os.getpid(), signal.SIGSTOP)

    if making:
        stop()
        say("MAKES", world=state.world, way=way)
    service.connect()
    group = WAYS[way]()
    service.connect()
    other = new_group()
    reduce(group)
    dist.destroy_process_group(other)
    # Processes that inherit the connections, and may have groups of their own.
    loader = DataLoader(range(3), num_workers=1, worker_init_fn=in_child)  # type: ignore[arg-type,var-annotated]
    assert [int(one) for one in loader] == [0, 1, 2]
    say("MADE", world=state.world, way=way)
    stop()
    reduce(group)


if __name__ == "__main__":  # the processes of a DataLoader import the script
    service = Service()
    state = elastic.ObjectState(world=0)
    train(state)
    say("END", pid=os.getpid())
