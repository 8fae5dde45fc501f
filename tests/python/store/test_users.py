"""Users of a store in PyTorch on our store: RPC and DistributedDataParallel, in real processes."""

import signal
import sys
from pathlib import Path

import pytest
from helpers.procs import Job

pytestmark = pytest.mark.torchrun

# RPC makes its store from `env://`. If the agent's store is given, every rank is a client of it.
RPC = """
import os
import sys

import torch
import torch.distributed.rpc as rpc

rank = int(os.environ["RANK"])


def add(a, b):
    return a + b


# Use loopback, because tensorpipe otherwise resolves the machine's host name, which may fail.
options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=60)
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
other = f"worker{1 - rank}"
assert rpc.rpc_sync(other, add, args=(torch.ones(2), rank)).tolist() == [rank + 1.0] * 2
future = rpc.rpc_async(other, add, args=(1, 2))
assert future.wait() == 3
remote = rpc.remote(other, add, args=(torch.zeros(1), 5))
assert remote.to_here().item() == 5
rpc.shutdown()
print("done", flush=True)
"""

DDP = """
import os
from datetime import timedelta

import torch
import torch.distributed as dist

import elastic_rs

rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
store = elastic_rs.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
torch.manual_seed(rank)  # DDP makes the parameters equal
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.full((2, 3), float(rank + step))).sum().backward()
    optimizer.step()
sums = [None, None]
dist.all_gather_object(sums, [p.sum().item() for p in model.parameters()])
assert sums[0] == sums[1], sums
alone = dist.new_group([rank], use_local_synchronization=True)
dist.barrier(group=alone)
dist.destroy_process_group()
print("done", flush=True)
"""


@pytest.mark.parametrize("script", [RPC, DDP], ids=["rpc", "ddp"])
def test_two_processes_meet_through_our_server(script: str, job: Job, tmp_path: Path) -> None:
    path = tmp_path / "rank.py"
    path.write_text(script)
    with_server = [sys.executable, "-m", "elastic_rs", "store", "serve", "--host=127.0.0.1", "--port=0"]
    server = job.start(with_server, name="server")
    port = server.line(r"^listening on 127\.0\.0\.1:(\d+)$")[1]
    env = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TP_SOCKET_IFNAME": "lo",
    }
    ranks = [
        job.start([sys.executable, str(path)], name=f"rank{rank}", env={**env, "RANK": str(rank)}) for rank in (0, 1)
    ]
    for process in ranks:
        process.line("^done$")
        assert process.wait() == 0
    server.signal(signal.SIGTERM)
    assert server.wait() == 0


def test_ours_cannot_be_pickled_or_copied_as_pytorchs_cannot() -> None:
    import copy
    import pickle

    import elastic_rs
    import torch.distributed as dist

    for kind in (dist.TCPStore, elastic_rs.TCPStore):
        store = kind("127.0.0.1", 0, is_master=True)
        for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="cannot pickle"):
                attempt(store)
