"""pytest's plugin for PyTorch's own tests: puts elastic_rs in PyTorch's place, and writes what happens to a file.

``run.py`` passes it to pytest, with the variables ``UPSTREAM_IMPL`` (``stock`` or ``ours``) and ``UPSTREAM_EVENTS`` (a
file, one JSON object a line).

With ``ours``, ``install()`` runs before pytest imports a test, and each name that it promises must be another object
afterwards: an ``install()`` that does nothing ends pytest. Processes that a test forks inherit that, and those that it
spawns call ``install()`` before their function is imported. Workers of a job stay PyTorch's, as a user's do.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import pickle
import sys
import threading
from multiprocessing.process import BaseProcess
from typing import Any

from plan import excuse

OURS = os.environ.get("UPSTREAM_IMPL") == "ours"
PID = os.getpid()

RENDEZVOUS = "torch.distributed.elastic.rendezvous"
AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent"
PROMISED = [
    ("torch.distributed", "TCPStore"),
    ("torch.distributed.rendezvous", "TCPStore"),
    (f"{RENDEZVOUS}.static_tcp_rendezvous", "TCPStore"),
    (f"{RENDEZVOUS}.c10d_rendezvous_backend", "C10dRendezvousBackend"),
    (f"{RENDEZVOUS}.dynamic_rendezvous", "DynamicRendezvousHandler"),
    (f"{RENDEZVOUS}.registry", "create_handler"),
    (AGENT, "LocalElasticAgent"),
    ("torch.distributed.launcher.api", "LocalElasticAgent"),
]
"""What ``install()`` replaces, by modules that hold the name."""
HANDLERS = ("c10d", "etcd", "etcd-v2")


def write(**event: object) -> None:
    with open(os.environ["UPSTREAM_EVENTS"], "ab", buffering=0) as file:  # noqa: PTH123 - one write for each line
        file.write(json.dumps(event).encode() + b"\n")


def present() -> dict[str, Any]:
    """Return the object behind each promised name."""
    found = {f"{module}.{name}": getattr(importlib.import_module(module), name) for module, name in PROMISED}
    handlers = importlib.import_module(f"{RENDEZVOUS}.api").rendezvous_handler_registry._registry
    return found | {f"the handler of {name}": handlers[name] for name in HANDLERS}


def install() -> None:
    before = present()
    import elastic_rs

    elastic_rs.install()
    after = present()
    if left := [name for name in before if after[name] is before[name]]:
        raise RuntimeError(f"install() has left PyTorch's own in place: {', '.join(left)}")
    if importlib.import_module("torch.distributed").TCPStore is not elastic_rs.TCPStore:
        raise RuntimeError("torch.distributed.TCPStore is not elastic_rs.TCPStore")
    write(event="installed", pid=os.getpid())
    carry_to_spawned()


class Installed:
    """The function of a spawned process. To unpickle it imports this module, which installs, and then it."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.__name__ = getattr(function, "__name__", "function")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuilt, (pickle.dumps(self.function),)


def rebuilt(pickled: bytes) -> Installed:
    return Installed(pickle.loads(pickled))


def carry_to_spawned() -> None:
    """Have processes that a test spawns install too. Those that torch or elastic_rs spawn are workers."""
    plain: Any = BaseProcess.__init__

    def init(self: Any, group: None = None, target: Any = None, *args: Any, **kwargs: Any) -> None:
        method = getattr(self, "_start_method", None) or multiprocessing.get_start_method()
        home = (getattr(target, "__module__", None) or "").partition(".")[0]
        if target is not None and method != "fork" and home not in {"torch", "elastic_rs"}:
            target = Installed(target)
        plain(self, group, target, *args, **kwargs)

    BaseProcess.__init__ = init  # type: ignore[method-assign]


if OURS:
    try:
        install()
    except BaseException as error:
        write(event="refused", why=f"{type(error).__name__}: {error}")
        raise


def pytest_collection_modifyitems(items: list[Any]) -> None:
    left_out = [item.nodeid for item in items if excuse(item.nodeid)]
    items[:] = [item for item in items if item.nodeid not in left_out]
    write(event="collected", tests=[item.nodeid for item in items], left_out=left_out)


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        write(event="uncollected", why=f"{report.nodeid}: {str(report.longrepr)[-500:]}")


results: dict[str, dict[str, Any]] = {}


def pytest_runtest_logstart(nodeid: str) -> None:
    if os.getpid() == PID:
        results[nodeid] = {"outcome": "pass", "why": "", "seconds": 0.0}
        write(event="start", test=nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    if os.getpid() != PID:
        return
    result = results[report.nodeid]
    result["seconds"] += report.duration
    if report.failed and result["outcome"] != "fail":  # also one of several subtests
        crash = getattr(report.longrepr, "reprcrash", None)
        result.update(outcome="fail", why=str(crash.message if crash else report.longrepr).strip()[:500])
    elif report.skipped and result["outcome"] == "pass":
        result.update(outcome="skip", why=str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else ""))


def pytest_runtest_logfinish(nodeid: str) -> None:
    if os.getpid() == PID:
        stolen = [name for name, value in present().items() if str(value.__module__).startswith("elastic_rs")]
        if not OURS and stolen:
            results[nodeid].update(outcome="fail", why=f"elastic_rs is installed in a stock run: {', '.join(stolen)}")
        write(event="finish", test=nodeid, **results.pop(nodeid))


def pytest_sessionfinish() -> None:
    if os.getpid() == PID:
        others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
        write(event="done", threads=[thread.name for thread in others if not thread.daemon])
        sys.stdout.flush()
