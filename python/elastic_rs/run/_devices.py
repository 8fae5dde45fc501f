"""``--nproc-per-node=gpu`` and the like: how many devices this node has.

NVIDIA's are counted here, without torch. What only PyTorch knows is asked of it in a process of its own, so that the
agent stays small.
"""

from __future__ import annotations

import os
import subprocess
import sys

from elastic_rs import _elastic_rs
from elastic_rs._python import arguments
from elastic_rs.run._cpus import allowed_cpus
from elastic_rs.run._usage import UsageError

FLAG = "--nproc-per-node"
# Devices of accelerators that NVIDIA's driver does not know: AMD's, Intel's, and the kernel's class "accel".
OTHERS = ("/dev/kfd", "/dev/dri/renderD128", "/dev/accel", "/dev/davinci0")
# Importing PyTorch and waking a driver take a while. A device that hangs never answers.
ASK_S = 120.0
ASK = "import sys; from torch.distributed.run import determine_local_world_size as ask; print(ask(sys.argv[1]))"


def count_of(kind: str) -> int:
    """Return the number of devices of a kind, as torchrun counts them.

    Raises:
        UsageError: there is none, or nobody knows what the kind is.
    """
    if kind == "cpu":
        return allowed_cpus()
    if kind in {"gpu", "auto"}:
        return _gpus(kind)
    if kind.isidentifier():
        return _ask_torch(kind)  # `xpu`, or a backend that another package has registered with PyTorch
    name, colon, chosen = kind.partition(":")
    hint = f"; CUDA_VISIBLE_DEVICES={chosen} with {FLAG}=gpu chooses GPUs" if colon and name in {"gpu", "cuda"} else ""
    raise UsageError(f"{FLAG} is `{kind}`, must be a number, auto, cpu, gpu or xpu{hint}")


def _gpus(kind: str) -> int:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        count = _elastic_rs.visible_gpus(chosen)
        why = f"CUDA_VISIBLE_DEVICES is `{chosen}`"
        # Only CUDA understands older names of MIG instances (`MIG-GPU-UUID/1/0`).
        unknown = (chosen or "").startswith("MIG-")
    except RuntimeError as error:
        count, why, unknown = 0, str(error), False
    if count > 0:
        return count
    if unknown or any(os.path.exists(path) for path in OTHERS):  # noqa: PTH110 - False on any error
        try:
            return _ask_torch(kind)
        except UsageError:
            if kind == "gpu":
                raise
    if kind == "auto":
        return allowed_cpus()
    raise UsageError(
        f"{FLAG} is `gpu`, but Cuda is not available: {why}. Give a number, or auto, which then means one per CPU"
    )


def _ask_torch(kind: str) -> int:
    try:
        done = subprocess.run(
            [sys.executable, *arguments(ASK, kind)], check=False, capture_output=True, text=True, timeout=ASK_S
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"{FLAG} is `{kind}`: PyTorch did not report the number within {ASK_S:.0f} s") from None
    if done.returncode != 0 or not done.stdout.split():
        said = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        raise UsageError(f"{FLAG} is `{kind}`, must be a number, auto, cpu, gpu or xpu; PyTorch says: {said}")
    return int(done.stdout.split()[-1])
