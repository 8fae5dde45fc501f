"""Horovod's collectives by their names, over the default process group of ``torch.distributed``.

Without a process group there is one worker, and they return what they are given.

While the state is broadcast (in ``State.sync`` and ``StateHandler.sync``), ``root_rank=0`` means the rank whose state
is the newest, ``elastic.source_rank()``. Any other ``root_rank`` means itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_rs.elastic import _wire
from elastic_rs.elastic._membership import MEMBERSHIP


class ReduceOp(Enum):
    """How ``allreduce`` combines the tensors of the workers. Horovod has these as constants of its module."""

    Average = "average"
    Sum = "sum"
    Min = "min"
    Max = "max"
    Product = "product"


Average = ReduceOp.Average
Sum = ReduceOp.Sum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product

_TORCH_OPS = {
    ReduceOp.Average: dist.ReduceOp.SUM,  # and divided: gloo has no average
    ReduceOp.Sum: dist.ReduceOp.SUM,
    ReduceOp.Min: dist.ReduceOp.MIN,
    ReduceOp.Max: dist.ReduceOp.MAX,
    ReduceOp.Product: dist.ReduceOp.PRODUCT,
}


def allreduce(  # noqa: PLR0917 - Horovod's signature
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> Tensor:
    """Return the tensors of all workers, combined: their average, unless ``op`` (or ``average=False``) says otherwise.

    It is ``horovod.torch.allreduce``, over ``torch.distributed.all_reduce``.

    Args:
        tensor: of the same shape and type on all ranks. It is not changed, and no gradient flows through.
        average: Horovod's older way to say ``op=Average`` or ``op=Sum``.
        name: not used. Collectives are matched by their order.
        compression: must be None: there is no compression.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor: each tensor is multiplied by this before. Whole numbers are multiplied in float64, and what
            is behind the point is cut off.
        postscale_factor: the result is multiplied by this, likewise.
        process_set: must be None: ``torch.distributed.all_reduce`` takes a group.

    Raises:
        RuntimeError: shapes or types differ between ranks, on all of them.
        ValueError: an argument is not offered.
    """
    if compression is not None:
        raise ValueError(
            "allreduce takes no `compression`: convert the tensor before, or use DistributedDataParallel's hooks"
        )
    return allreduce_(tensor.detach().clone(), average, name, op, prescale_factor, postscale_factor, process_set)


@torch.no_grad()
def allreduce_(  # noqa: PLR0917 - Horovod's signature
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> Tensor:
    """Do as :func:`allreduce`, in place: ``horovod.torch.allreduce_``.

    Args:
        tensor: of the same shape and type on all ranks. It gets the result.
        average: Horovod's older way to say ``op=Average`` or ``op=Sum``.
        name: not used. Collectives are matched by their order.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor: each tensor is multiplied by this before.
        postscale_factor: the result is multiplied by this.
        process_set: must be None: ``torch.distributed.all_reduce`` takes a group.

    Raises:
        RuntimeError: shapes or types differ between ranks, on all of them.
        ValueError: an argument is not offered.
    """
    del name
    if average is not None and op is not None:
        raise ValueError("allreduce takes `average` or `op`, not both")
    if process_set is not None:
        raise ValueError("allreduce takes no `process_set`: torch.distributed.all_reduce takes the group of new_group")
    op = op or (ReduceOp.Sum if average is False else ReduceOp.Average)
    if not isinstance(op, ReduceOp):
        raise ValueError(
            f"allreduce was given the op `{op}`, must be {', '.join(f'hvd.{known.name}' for known in ReduceOp)}"
        )
    grouped = _wire.group_exists()
    if grouped:
        _wire.check_equal(tensor)
    _scale(tensor, prescale_factor)
    if grouped:
        dist.all_reduce(tensor, _TORCH_OPS[op])
        if op is ReduceOp.Average:
            tensor.div_(dist.get_world_size(), rounding_mode=None if _is_inexact(tensor) else "trunc")
    _scale(tensor, postscale_factor)
    return tensor


def _scale(tensor: Tensor, factor: float) -> None:
    if factor == 1.0:
        return
    if _is_inexact(tensor):
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double().mul_(factor))


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Return the root's object on every rank. It is pickled: see ``torch.distributed.broadcast_object_list``.

    Args:
        obj: the object. Only the root's counts.
        root_rank: the rank whose object it is. Inside ``State.sync`` and ``StateHandler.sync``, 0 means
            ``elastic.source_rank()``.
        name: not used.
    """
    del name
    return _wire.send_object(obj, MEMBERSHIP.root(root_rank))


def broadcast_parameters(params: Mapping[str, Any] | Iterable[Tensor | tuple[str, Tensor]], root_rank: int = 0) -> None:
    """Overwrite parameters with the root's.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``. All ranks must give the
            same names and shapes. What is not a tensor is passed over.
        root_rank: the rank whose parameters they are. Inside ``State.sync`` and ``StateHandler.sync``, 0 means
            ``elastic.source_rank()``.
    """
    values = [value for _, value in sorted(params.items())] if isinstance(params, Mapping) else params
    tensors = [value[1] if isinstance(value, tuple) else value for value in values]
    _wire.broadcast_tensors([tensor for tensor in tensors if isinstance(tensor, Tensor)], MEMBERSHIP.root(root_rank))


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: torch.nn.Module | None = None
) -> None:
    """Give the optimizer the root's state. The other ranks need not have taken a step.

    Args:
        optimizer: of the same parameters on all ranks.
        root_rank: the rank whose state it is. Inside ``State.sync`` and ``StateHandler.sync``, 0 means
            ``elastic.source_rank()``.
        model: not used. It is there because Horovod's function has it.
    """
    del model
    state = optimizer.state_dict()
    received = _wire.send_tree(state, MEMBERSHIP.root(root_rank))
    if received is not state:
        optimizer.load_state_dict(received)
