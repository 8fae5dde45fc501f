"""Trees of dicts, lists, tuples, tensors and other objects, such as a ``state_dict``: copies of them, and their shapes.

A *saved* tree lies in host memory and shares nothing with the live one. A *described* tree has a :class:`Slot` in the
place of each tensor, so that a process can make the same tree and receive the tensors apart.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elastic_rs._torch_private import keep_versions


class Slot(NamedTuple):
    """The position of a tensor in a described tree."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    """The type of its device."""


class Copier:
    """Copies live trees into host memory, into the buffers of an earlier copy where they fit.

    Copies from a device into pinned memory may still be under way: :func:`synchronize` waits for them.
    """

    def __init__(self) -> None:
        self.devices: set[torch.device] = set()
        """From which devices it has copied."""

    @torch.no_grad()
    def copy(self, live: Any, spare: Any = None) -> Any:
        """Return a deep copy of a live tree.

        Args:
            live: the tree.
            spare: an earlier copy that nobody needs any more. Its tensors are overwritten and used again.
        """
        if isinstance(live, Tensor):
            return self._copy_tensor(live, spare)
        return _map(live, spare, self.copy)

    def _copy_tensor(self, live: Tensor, spare: Any) -> Tensor:
        refuse_sharded(live)
        if live.layout is not torch.strided or live.is_quantized:
            return live.detach().to("cpu", copy=True)
        fits = (
            isinstance(spare, Tensor)
            and spare.dtype == live.dtype
            and spare.shape == live.shape
            and spare.stride() == live.stride()
        )
        on_host = live.device.type == "cpu"
        buffer = spare if fits else torch.empty_like(live, device="cpu", pin_memory=not on_host, requires_grad=False)
        buffer.copy_(live, non_blocking=not on_host)
        if not on_host:
            self.devices.add(live.device)
        return buffer


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait until these devices have done what they were given to do."""
    for device in devices:
        torch.get_device_module(device).synchronize(device)


@torch.no_grad()
def fill(saved: Any, live: Any) -> Any:
    """Return a live tree with the contents of a saved one, in the live tensors where they fit.

    The result shares no memory with the saved tree.
    """
    if isinstance(saved, Tensor):
        if not _same(live, saved.shape, saved.dtype):
            return saved.clone()
        live.copy_(saved)
        return live
    return _map(saved, live, fill)


def describe(live: Any, tensors: list[Tensor]) -> Any:
    """Return the tree with slots for tensors, and append its tensors to the list in the order of the tree."""
    if isinstance(live, Tensor):
        refuse_sharded(live)
        tensors.append(live)
        return Slot(tuple(live.shape), live.dtype, live.device.type)
    return _map(live, None, lambda value, _: describe(value, tensors))


def build(described: Any, live: Any, tensors: list[Tensor]) -> Any:
    """Return the tree that was described, and append its tensors to the list in the order of the tree.

    The tensors of the live tree are taken where they fit. Others are new, with arbitrary contents.
    """
    if isinstance(described, Slot):
        fits = _same(live, described.shape, described.dtype) and live.device.type == described.device
        tensor = live if fits else torch.empty(described.shape, dtype=described.dtype, device=described.device)
        tensors.append(tensor)
        return tensor
    return _map(described, live, lambda value, beside: build(value, beside, tensors))


def shallow(tree: Any) -> Any:
    """Return a copy of a dict of any kind, in its order, with the same values, and with the versions of a module."""
    new = copy.copy(tree)
    keep_versions(tree, new)
    return new


def refuse_sharded(tensor: Tensor) -> None:
    """Raise if this worker holds a part of the tensor only."""
    if hasattr(tensor, "placements") and hasattr(tensor, "device_mesh"):
        raise ValueError(
            "a TorchState cannot hold a DTensor: when a worker dies its shards are lost. Load a checkpoint of "
            "torch.distributed.checkpoint in each world, and keep its name in an ObjectState (docs/frameworks.md)"
        )


def _same(live: Any, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    # Parameters of lazy modules have no shape before the first batch.
    if not isinstance(live, Tensor) or torch.nn.parameter.is_lazy(live):
        return False
    if live.layout is not torch.strided or live.is_quantized:
        return False
    return live.dtype == dtype and tuple(live.shape) == tuple(shape)


def _map(tree: Any, beside: Any, leaf: Callable[[Any, Any], Any]) -> Any:
    """Return the tree with each child replaced by ``leaf(child, the child at that place of the tree beside it)``."""
    if isinstance(tree, dict):
        others = beside if isinstance(beside, dict) else {}
        new = shallow(tree)
        for key, value in tree.items():
            new[key] = leaf(value, others.get(key))
        return new
    if isinstance(tree, (list, tuple)) and not isinstance(tree, Slot):
        others_in_order = (
            beside if isinstance(beside, (list, tuple)) and len(beside) == len(tree) else [None] * len(tree)
        )
        children = [leaf(value, other) for value, other in zip(tree, others_in_order, strict=True)]
        if isinstance(tree, list):
            return children
        return type(tree)(*children) if hasattr(tree, "_fields") else tuple(children)
    return tree if type(tree) in _UNCHANGEABLE else copy.deepcopy(tree)


_UNCHANGEABLE = {bool, bytes, complex, float, int, str, type(None)}
