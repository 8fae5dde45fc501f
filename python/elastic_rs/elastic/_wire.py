"""Broadcasting tensors and objects within the default process group. Without one there is nobody else."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_rs.elastic import _tree
from elastic_rs.elastic._exceptions import TensorMismatchError

# Smaller tensors travel together up to this size: a broadcast of a few bytes takes as long as one of 100 kB.
BUCKET_BYTES = 4 << 20
# Larger ones travel in parts, which bounds what a backend has to buffer.
PART_BYTES = 256 << 20


def group_exists() -> bool:
    return dist.is_available() and dist.is_initialized()


def send_object(value: Any, source: int) -> Any:
    """Return the source's object on every rank.

    ``torch.distributed`` pickles it. That is as safe as the process group: whoever can join the group can also send
    wrong gradients. The group's members are workers of one job, placed by its agents.
    """
    if not group_exists():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=source)
    return values[0]


def barrier() -> None:
    """Wait until all ranks are here."""
    if not group_exists() or dist.get_world_size() == 1:
        return
    here = torch.ones(1, device=_carriers()[0])
    dist.all_reduce(here)
    here.item()  # on a device the collective has only been queued


def check_equal(tensor: Tensor) -> None:
    """Raise on every rank if shapes or types of the ranks' tensors differ. gloo would end the process.

    It is a small collective before each one that it guards. Equal tensors of an earlier call do not spare it: a rank
    that leaves it out would meet the other ranks inside it with its own tensor.

    Raises:
        TensorMismatchError: it has the shape and type on each rank.
    """
    mine = f"{tuple(tensor.shape)} of {tensor.dtype}"
    digest = int.from_bytes(hashlib.blake2b(mine.encode(), digest_size=7).digest(), "big")
    # The largest number, and the negative of the smallest one.
    ends = torch.tensor([digest, -digest], device=_carriers()[0])
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    largest, smallest = ends.tolist()
    if largest != -smallest:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        shown = ", ".join(f"rank {rank} has {what}" for rank, what in enumerate(every))
        raise TensorMismatchError(
            f"the tensors of an allreduce must have the same shape and type on all ranks: {shown}"
        )


def send_tree(live: Any, source: int, part_done: Callable[[], None] = lambda: None) -> Any:
    """Return the source's tree on every rank. On the source it is the live tree itself.

    One message describes the tree. Then the tensors follow. They are received in the tensors of this rank's live tree
    where those fit. ``part_done`` is called after each message.
    """
    if not group_exists():
        return live
    tensors: list[Tensor] = []
    if dist.get_rank() == source:
        described = _tree.describe(live, tensors)
        devices = [tensor.device.type for tensor in tensors]
        send_object((described, devices), source)
        received = live
    else:
        described, devices = send_object(None, source)
        received = _tree.build(described, live, tensors)
    part_done()
    broadcast_tensors(tensors, source, devices, part_done)
    return received


@torch.no_grad()
def broadcast_tensors(
    tensors: Sequence[Tensor],
    source: int,
    devices: Sequence[str] | None = None,
    part_done: Callable[[], None] = lambda: None,
) -> None:
    """Overwrite the tensors with the source's. All ranks give as many tensors, of the same shapes and types, in order.

    Args:
        tensors: on any device, of any type of numbers.
        source: the rank whose tensors they are.
        devices: the types of the source's devices, if they may differ from this rank's. They decide over which device
            a tensor travels, which must be the same on all ranks.
        part_done: called after each broadcast.
    """
    if not group_exists():
        return
    carriers = _carriers()
    buckets: dict[str, list[Tensor]] = {}
    sizes: dict[str, int] = {}
    for tensor, device in zip(tensors, devices or [tensor.device.type for tensor in tensors], strict=True):
        carrier = device if device in carriers else carriers[0]
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes >= BUCKET_BYTES:
            _broadcast_large(tensor, carrier, source, part_done)
            continue
        bucket = buckets.setdefault(carrier, [])
        if sizes.get(carrier, 0) + nbytes > BUCKET_BYTES:
            _broadcast_bucket(bucket, carrier, source)
            part_done()
            bucket.clear()
            sizes[carrier] = 0
        if nbytes:
            bucket.append(tensor)
            sizes[carrier] = sizes.get(carrier, 0) + nbytes
    for carrier, bucket in buckets.items():
        if bucket:
            _broadcast_bucket(bucket, carrier, source)
            part_done()


def _carriers() -> list[str]:
    """Return the types of the devices over which the group can send."""
    return [part.partition(":")[0] for part in dist.get_backend_config().split(",")]


def _broadcast_large(tensor: Tensor, carrier: str, source: int, part_done: Callable[[], None]) -> None:
    direct = tensor.is_contiguous() and tensor.device.type == carrier
    carried = tensor.detach() if direct else tensor.detach().to(carrier).contiguous()
    whole = _bytes(carried)
    for start in range(0, whole.numel(), PART_BYTES):
        dist.broadcast(whole[start : start + PART_BYTES], src=source)
        part_done()
    if not direct and dist.get_rank() != source:
        tensor.copy_(carried)


def _broadcast_bucket(bucket: list[Tensor], carrier: str, source: int) -> None:
    flat = torch.cat([_bytes(tensor.detach().contiguous()).to(carrier) for tensor in bucket])
    dist.broadcast(flat, src=source)
    if dist.get_rank() == source:
        return
    for tensor, part in zip(bucket, _cut(flat, bucket), strict=True):
        if tensor.is_contiguous():
            _bytes(tensor.detach()).copy_(part)
        else:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            _bytes(whole).copy_(part)
            tensor.copy_(whole)


def _bytes(contiguous: Tensor) -> Tensor:
    """Return a view of a contiguous tensor's bytes: every backend can broadcast bytes, and not every one booleans."""
    return contiguous.reshape(-1).view(torch.uint8)


def _cut(flat: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    start = 0
    for tensor in like:
        nbytes = tensor.numel() * tensor.element_size()
        yield flat[start : start + nbytes]
        start += nbytes
