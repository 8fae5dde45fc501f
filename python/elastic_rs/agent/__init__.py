"""``LocalElasticAgent``: PyTorch's agent with our insides.

Importing this package does not import torch, which workers that are functions would wait for; the name below does, on
first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic_rs import _imported

if TYPE_CHECKING:
    from elastic_rs.agent._local import LocalElasticAgent

__all__ = ["LocalElasticAgent"]


def __getattr__(name: str) -> Any:
    return _imported(__name__, {"._local": ["LocalElasticAgent"]}, name)


def __dir__() -> list[str]:
    return list(__all__)
