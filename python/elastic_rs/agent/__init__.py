"""``LocalElasticAgent``: PyTorch's agent with our insides.

Importing this package does not import torch, which workers that are functions would wait for; the name below does, on
first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_rs.agent._local import LocalElasticAgent as LocalElasticAgent

__all__ = ["LocalElasticAgent"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("elastic_rs.agent._local"), name)
