"""What a program sees after `import elastic_rs`: its modules and names, and how durations are given."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys
from datetime import timedelta
from typing import Any

import elastic_rs
import pytest
from elastic_rs import _durations, aio
from elastic_rs.discovery import FixedHosts, HostDiscoveryScript, HostManager
from elastic_rs.elastic import init, run


def public_modules() -> list[str]:
    """Return the names of all modules of the package that neither have an underscore nor are in one that has."""
    found = [module.name for module in pkgutil.walk_packages(elastic_rs.__path__, "elastic_rs.")]
    return ["elastic_rs", *(name for name in found if not any(part.startswith("_") for part in name.split(".")))]


def test_the_public_modules_are_these() -> None:
    assert public_modules() == [
        "elastic_rs",
        "elastic_rs.agent",
        "elastic_rs.aio",
        "elastic_rs.discovery",
        "elastic_rs.elastic",
        "elastic_rs.errors",
        "elastic_rs.rendezvous",
        "elastic_rs.rendezvous.c10d_rendezvous_backend",
        "elastic_rs.rendezvous.dynamic_rendezvous",
        "elastic_rs.rendezvous.etcd_rendezvous_backend",
        "elastic_rs.rendezvous.etcd_store",
        "elastic_rs.run",
        "elastic_rs.store",
    ]


@pytest.mark.parametrize("name", public_modules())
def test_a_public_module_lists_its_names_and_has_them(name: str) -> None:
    module = importlib.import_module(name)
    assert dir(module) == sorted(module.__all__)
    assert len(set(module.__all__)) == len(module.__all__)
    for public in module.__all__:
        assert getattr(module, public) is not None, public
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        getattr(module, "nothing")  # noqa: B009 - mypy knows that there is none


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it raises
import elastic_rs
for name in ("discovery", "elastic", "errors", "rendezvous", "run"):
    assert getattr(elastic_rs, name).__name__ == f"elastic_rs.{name}"
    assert name in dir(elastic_rs)
assert elastic_rs.errors.ElasticError is elastic_rs.ElasticError
assert issubclass(elastic_rs.discovery.DiscoveryError, elastic_rs.ElasticError)
assert elastic_rs.errors.PeerFailed is elastic_rs.elastic.PeerFailed
assert issubclass(elastic_rs.errors.EtcdError, OSError)
elastic_rs.EtcdClient, elastic_rs.install, elastic_rs.step
for name in ("aio", "store"):
    try:
        getattr(elastic_rs, name)
    except ImportError:
        print(name)
try:
    elastic_rs.errors.StoreError
except ImportError:
    print("StoreError")
"""


def test_one_import_gives_the_submodules_and_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["aio", "store", "StoreError"]), done.stderr


@pytest.mark.parametrize("name", ["elastic_rs", "elastic_rs.elastic", "elastic_rs.errors", "elastic_rs.discovery"])
def test_torch_is_not_imported_by(name: str) -> None:
    script = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize(
    ("given", "is_"),
    [(5, timedelta(seconds=5)), (0.5, timedelta(milliseconds=500)), (timedelta(minutes=1), timedelta(minutes=1))],
)
def test_a_duration_is_a_timedelta_or_a_number_of_seconds(given: _durations.Duration, is_: timedelta) -> None:
    assert _durations.as_timedelta("timeout", given) == is_
    assert _durations.as_seconds("timeout", given) == is_.total_seconds()


BAD_DURATIONS: list[tuple[Any, type[Exception], str]] = [
    (True, TypeError, r"is `True`, must be a timedelta, or a number of seconds"),
    ("5", TypeError, r"is `'5'`, must be a timedelta, or a number of seconds"),
    (float("nan"), ValueError, r"is `nan`, must be a finite number of seconds"),
    (float("inf"), ValueError, r"is `inf`, must be a finite number of seconds"),
    (10**400, ValueError, r"seconds, must be at most 999999999 days"),
    (1e300, ValueError, r"seconds, must be at most 999999999 days"),
]


@pytest.mark.parametrize(("given", "kind", "text"), BAD_DURATIONS)
def test_what_is_no_duration_is_refused_by_the_name_of_the_argument(
    given: Any, kind: type[Exception], text: str
) -> None:
    for signed in (False, True):
        with pytest.raises(kind, match=f"^interval .*{text}"):
            _durations.as_timedelta("interval", given, signed=signed)
    for call in (
        lambda: aio.TCPStore.connect("127.0.0.1", 1, timeout=given),
        lambda: elastic_rs.TCPStore("127.0.0.1", 1, timeout=given),
        lambda: init(timeout=given),
        lambda: run(timeout=given),
        lambda: HostDiscoveryScript("true", timeout_s=given),
        lambda: HostManager(FixedHosts({}), cooldown_range=(1, given)),
    ):
        with pytest.raises(kind, match=f"^(timeout|timeout_s|cooldown_range) .*{text}"):
            call()


def test_a_negative_duration_is_for_ever_or_refused() -> None:
    assert _durations.as_seconds("timeout", -1, signed=True) == -1
    for given in (-1, -0.5, timedelta(seconds=-1)):
        with pytest.raises(ValueError, match=r"^timeout is `-.*`, must be zero or more seconds"):
            init(timeout=given)


def test_an_argument_that_was_not_given_differs_from_its_default() -> None:
    parameters = inspect.signature(elastic_rs.LocalElasticAgent).parameters
    assert repr(parameters["exit_barrier_timeout"].default) == "<not given>"
