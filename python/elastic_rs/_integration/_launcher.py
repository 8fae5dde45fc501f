"""Makes ``torchrun`` run our agent: its launcher makes a ``LocalElasticAgent`` after it has made the handler."""

from __future__ import annotations

from typing import Any


def take_over() -> None:
    """Let PyTorch's launcher make our agent for handlers that want it, and its own for all others."""
    import torch.distributed.launcher.api
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    # Not if the agent was replaced already: by `install(agent=True)`, or by a user.
    launcher: Any = torch.distributed.launcher.api
    if launcher.LocalElasticAgent is LocalElasticAgent:
        launcher.LocalElasticAgent = _new_agent


def _new_agent(spec: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent as Theirs

    from elastic_rs.agent import LocalElasticAgent as Ours
    from elastic_rs.rendezvous._launcher_handler import LauncherHandler

    handler = spec.rdzv_handler
    wanted = isinstance(handler, LauncherHandler) and handler.wants_agent
    return (Ours if wanted else Theirs)(spec, *args, **kwargs)
