"""PyTorch's process groups on our store, in real processes, also when only C++ still holds the store."""

import sys
from pathlib import Path

import pytest
from helpers.procs import Job

RANK = """
import gc
import socket
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import elastic_rs

rank, port, keep = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "keep"
limit = timedelta(seconds=120)
listen_fd = None
if rank == 0:
    listener = socket.create_server(("", 0))
    port, listen_fd = listener.getsockname()[1], listener.detach()
    print("port", port, flush=True)
store = elastic_rs.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=limit, master_listen_fd=listen_fd)
server = store._server  # a handle, which does not keep the server alive once a connection owns it
dist.init_process_group("gloo", store=dist.PrefixStore("x", store), rank=rank, world_size=2, timeout=limit)
if not keep:
    del store
    gc.collect()


def check(group=None):
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == 3.0, tensor
    dist.barrier(group=group)
    gathered = [None, None]
    dist.all_gather_object(gathered, {"rank": rank}, group=group)
    assert gathered == [{"rank": 0}, {"rank": 1}], gathered


check()
# Each new group uses the store again.
for _ in range(3):
    check(dist.new_group([0, 1]))
if server is not None:
    assert not server.stopped
dist.barrier()
dist.destroy_process_group()
gc.collect()
if server is not None and not keep:
    # C++ has released the store, so its connection is closed, and the server ends.
    deadline = time.monotonic() + 60
    while not server.stopped and time.monotonic() < deadline:
        time.sleep(0.005)
    assert server.stopped
    print("server ended", flush=True)
print("done", flush=True)
"""


@pytest.mark.torchrun
@pytest.mark.parametrize("keep", ["keep", "forget"])
def test_a_process_group_works_through_our_store(keep: str, job: Job, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)

    # Rank 0 picks the port, and publishes it before it waits for rank 1.
    first = job.start([sys.executable, str(script), "0", "0", keep], name="rank0")
    port = first.line(r"^port (\d+)$")[1]
    second = job.start([sys.executable, str(script), "1", port, keep], name="rank1")
    for process in (first, second):
        process.line("^done$")
        assert process.wait() == 0
    assert ("server ended" in first.lines) == (keep == "forget")
