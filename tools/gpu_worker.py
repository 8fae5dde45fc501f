"""The worker of ``tools/gpu_check.py``: ``gpu_worker.py PIPE MODE cuda|cpu MODEL_BYTES [MORE]``.

MODE is ``all-reduce``, ``restart``, ``resize`` or ``hang``.

MORE is ``BACKEND TIMES``: ``resize`` asks TIMES for another world. BACKEND is that of its process groups, such as
``cpu:gloo,cuda:nccl-legacy``. ``hang`` has BACKEND alone.

It reports each step through the pipe in one line: ``WHAT MONOTONIC_NS RANK PID VALUE``.
"""

import os
import sys
import time
from pathlib import Path

FORKED = "torch" in sys.modules  # this script has not imported it yet, so a template has
PIPE = os.open(sys.argv[1], os.O_WRONLY)
RANK = os.environ["RANK"]


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
        resize(kind, size, sys.argv[5])
    elif mode == "hang":
        hang(kind, sys.argv[5])
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


def resize(kind: str, size: int, backend: str) -> None:
    """Leave the world and enter the next one again and again. NCCL's groups are aborted."""
    import torch
    import torch.distributed as dist
    from elastic_rs import elastic

    resizes = 0

    def used() -> int:
        if kind == "cuda":
            free, total = torch.cuda.mem_get_info()
            return total - free
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    @elastic.run(backend=backend)
    def train(state: elastic.TorchState) -> None:
        nonlocal resizes
        tensor = torch.full((1 << 20,), 3.0, device=kind)
        dist.all_reduce(tensor)
        if not bool((tensor == 3 * dist.get_world_size()).all()) or not bool((state.model.weight == 1).all()):
            tell("wrong", f"after-{resizes}-resizes")
            sys.exit(4)
        tell("world", used())
        if resizes == int(sys.argv[6]):
            return
        resizes += 1
        state.commit()
        with torch.no_grad():
            state.model.weight.fill_(7.0)  # what the restore takes back
        tell("fails")
        dist.all_reduce(tensor)
        raise elastic.HorovodInternalError("the check asks for another world")

    model = torch.nn.Linear(1, size // 4, bias=False)
    torch.nn.init.ones_(model.weight)
    train(elastic.TorchState(model=model.to(kind)))
    tell("resized")


def hang(kind: str, backend: str) -> None:
    """Train until the last rank stands still, and all others wait for it."""
    import elastic_rs
    import torch
    import torch.distributed as dist

    dist.init_process_group(backend)
    tensor = torch.ones(1 << 20, device=kind)
    for number in range(1, 11):
        dist.all_reduce(tensor)
        tensor.fill_(1.0).sum().item()  # waits for the device
        elastic_rs.step(number)
    tell("trains")
    if dist.get_rank() == dist.get_world_size() - 1:
        stand_still(kind, is_alone=dist.get_world_size() == 1)
    dist.all_reduce(tensor)
    tensor.sum().item()


def stand_still(kind: str, *, is_alone: bool) -> None:
    """Sleep until it is killed. A rank that has no others waits for a kernel that spins instead."""
    if kind == "cuda" and is_alone:
        import torch

        torch.cuda._sleep(1 << 40)  # noqa: SLF001 - so many cycles are minutes
        torch.cuda.synchronize()
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
