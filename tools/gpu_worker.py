"""The worker of ``tools/gpu_check.py``: ``gpu_worker.py PIPE all-reduce|restart cuda|cpu MODEL_BYTES``.

It reports each step through the pipe in one line: ``WHAT MONOTONIC_NS RANK PID VALUE``.
"""

import os
import sys
import time

FORKED = "torch" in sys.modules  # this script has not imported it yet, so a template has
PIPE = os.open(sys.argv[1], os.O_WRONLY)


def tell(what: str, value: object = "-") -> None:
    rank = os.environ["RANK"]
    os.write(PIPE, f"{what} {time.monotonic_ns()} {rank} {os.getpid()} {value}\n".encode())


def main() -> None:
    tell("up", "warm" if FORKED else "cold")
    mode, kind, size = sys.argv[2], sys.argv[3], int(sys.argv[4])
    if kind == "cuda":
        import torch

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if mode == "all-reduce":
        all_reduce(kind)
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


if __name__ == "__main__":
    main()
