"""Copies of trees of tensors."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from elastic_rs.elastic import _tree
from torch import Tensor


def test_tensors_of_all_kinds_are_saved() -> None:
    live: dict[str, Any] = OrderedDict(
        bf16=torch.randn(3).bfloat16(),
        boolean=torch.tensor([True, False]),
        empty=torch.empty(0),
        scalar=torch.tensor(3),
        channels_last=torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        expanded=torch.randn(1, 3).expand(4, 3),
        strided=torch.randn(6, 4)[::2, 1:],
        complex=torch.randn(2, dtype=torch.complex64),
        sparse=torch.eye(3).to_sparse(),
        nested=[(torch.ones(1), {"a": "b"}), None],
    )
    for spare in (None, _tree.Copier().copy(live)):
        saved = _tree.Copier().copy(live, spare)
        assert list(saved) == list(live)
        for name, value in live.items():
            if isinstance(value, Tensor):
                assert saved[name].dtype == value.dtype
                assert torch.equal(saved[name].to_dense(), value.to_dense())
        assert saved["channels_last"].stride() == live["channels_last"].stride()
        assert saved["nested"][0][1] == {"a": "b"}
    # A buffer that does not fit is not used.
    grown = {**live, "bf16": torch.zeros(5), "nested": [1]}
    saved = _tree.Copier().copy(grown, saved)
    assert torch.equal(saved["bf16"], torch.zeros(5))
    assert saved["nested"] == [1]
