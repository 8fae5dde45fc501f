"""The worker of ``tools/gpu_check.py``: ``gpu_worker.py PIPE all-reduce|restart|resize cuda|cpu MODEL_BYTES``.

It reports each step through the pipe in one line: ``WHAT MONOTONIC_NS RANK PID VALUE``.
"""

import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

FORKED = "torch" in sys.modules  # this script has not imported it yet, so a template has
PIPE = os.open(sys.argv[1], os.O_WRONLY)
RANK = os.environ["RANK"]
RESIZES = 10


def tell(what: str, value: object = "-") -> None:
    os.write(PIPE, f"{what} {time.monotonic_ns()} {RANK} {os.getpid()} {value}\n".encode())


def main() -> None:
    tell("up", "warm" if FORKED else "cold")
    mode, kind, size = sys.argv[2], sys.argv[3], int(sys.argv[4])
    if kind == "cuda":
        import torch

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if mode == "all-reduce":
        all_reduce(kind)
    elif mode == "resize":
        resize(kind, size)
    else:
        restart(kind, size)


def all_reduce(kind: str) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    for number in range(1, 11):
        tensor = torch.full((1 << 20,), float(rank + number), device=kind)
        dist.all_reduce(tensor)
        expected = float(sum(range(size)) + size * number)
        if not bool((tensor == expected).all()):
            tell("wrong", f"all-reduce-{number}-gave-{tensor[0].item()}-instead-of-{expected}")
            sys.exit(4)
    tell("reduced", size)
    dist.destroy_process_group()


def restart(kind: str, size: int) -> None:
    import torch

    # As with a checkpoint, the model is on the host first, then on the device.
    model = torch.ones(size // 4).to(kind)
    if kind == "cuda":
        torch.cuda.synchronize()
    tell("ready", int(model[:8].sum().item()))
    while True:
        time.sleep(3600)  # until it is killed


class Agent:
    """The agent's end of the channel, played by the worker. Each world is of this worker alone."""

    def __init__(self) -> None:
        self.failed = threading.Event()
        self.generation = 1
        self.reason = "the check says that a peer has failed"
        self.flags = 0

    def check(self) -> int:
        return 2 if self.failed.is_set() else 0

    def failed_within(self, limit_s: float) -> bool:
        return self.failed.wait(limit_s)

    def world(self) -> SimpleNamespace:
        return SimpleNamespace(variables={}, generation=self.generation, source=0, sync=True, reason=self.reason)

    def park(self, _: int | None) -> SimpleNamespace:
        self.failed.clear()
        self.generation += 1
        return self.world()

    def guard_sockets(self) -> int:
        return 0

    def groupless(self) -> None: ...

    def mark_sockets(self) -> None: ...

    def release_sockets(self) -> None: ...


def resize(kind: str, size: int) -> None:
    """Leave the world after a failure and enter the next one, ten times. NCCL's groups are aborted."""
    import torch
    import torch.distributed as dist
    from elastic_rs import elastic
    from elastic_rs.elastic import _membership

    agent = Agent()
    _membership.WorkerChannel = SimpleNamespace(connect=lambda *_: agent)
    os.environ.update(ELASTIC_RS_AGENT="played", ELASTIC_RS_IN_PLACE="nccl")
    del os.environ["RANK"]  # then each group of one has a store of its own

    def used() -> int:
        if kind == "cuda":
            free, total = torch.cuda.mem_get_info()
            return total - free
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    @elastic.run(backend="cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    def train(state: elastic.TorchState) -> None:
        tensor = torch.full((1 << 20,), 3.0, device=kind)
        dist.all_reduce(tensor)
        if not bool((tensor == 3).all()) or not bool((state.model.weight == 1).all()):
            tell("wrong", f"after-{agent.generation - 1}-resizes")
            sys.exit(4)
        tell("world", used())
        if agent.generation > RESIZES:
            return
        with torch.no_grad():
            state.model.weight.fill_(7.0)  # what the restore takes back
        dist.all_reduce(tensor)
        tell("fails")
        agent.failed.set()
        state.check_host_updates()

    model = torch.nn.Linear(1, size // 4, bias=False)
    torch.nn.init.ones_(model.weight)
    train(elastic.TorchState(model=model.to(kind)))
    tell("resized")


if __name__ == "__main__":
    main()
