"""Signatures, docstrings and examples of the public names, and the file that has them all."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
from helpers.public import callables, is_ours, methods_of, public_names

ROOT = Path(__file__).parents[3]
API = ROOT / "tools" / "api.py"


def signature_of(value: Any) -> inspect.Signature | None:
    """Return the signature. None for a class that takes what its base of another package takes, as exceptions do."""
    if isinstance(value, type) and not any(is_ours(base) and "__init__" in vars(base) for base in value.__mro__):
        if value.__module__ == "elastic_rs._elastic_rs":
            return inspect.signature(value)
        return None
    return inspect.signature(value)


def is_exception(value: Any) -> bool:
    """Whether it is a class of exceptions: these take any arguments, and the root describes the attributes."""
    return isinstance(value, type) and issubclass(value, BaseException)


def test_each_public_callable_has_a_signature() -> None:
    without = []
    for name, value in callables().items():
        try:
            signature = signature_of(value)
        except (TypeError, ValueError) as error:
            without.append(f"{name}: {error}")
            continue
        if signature is not None and is_ours(value):
            kinds = {parameter.kind for parameter in signature.parameters.values()}
            if inspect.Parameter.VAR_POSITIONAL in kinds and not is_exception(value):
                without.append(f"{name}{signature}: takes anything")
    assert without == []


def test_calls_have_the_signature_that_they_take() -> None:
    import elastic_rs

    assert str(inspect.signature(elastic_rs.step)) == "(n: 'int | None' = None, /) -> 'None'"
    assert str(inspect.signature(type(elastic_rs.step))) == "() -> 'None'"
    assert list(inspect.signature(elastic_rs.EtcdClient).parameters) == ["options"]
    assert list(inspect.signature(elastic_rs.EtcdClient.put).parameters) == ["self", "key", "value", "lease"]
    assert "read_timeout_s" in inspect.signature(elastic_rs.EtcdOptions).parameters
    assert str(inspect.signature(elastic_rs.TCPStore.set)) == "(self, key: 'str', value: 'str | bytes', /) -> 'None'"


@pytest.mark.parametrize("operation", ["add", "append", "check", "compare_set", "get", "queue_pop", "set", "wait"])
def test_the_signatures_of_stores_operations_have_pytorchs_parameters(operation: str) -> None:
    """PyTorch's own are in its docstrings alone."""
    import elastic_rs

    theirs = (getattr(elastic_rs.TCPStore.__base__, operation).__doc__ or "").strip()
    lines = re.findall(rf"(?:\d\. )?{operation}\(self: [^,)]+(?:, )?(.*)\) ->", theirs)
    counts = {len([part for part in re.split(r", (?=\w+: )", line) if part]) for line in lines}
    ours = inspect.signature(getattr(elastic_rs.TCPStore, operation)).parameters
    required = [p for p in ours.values() if p.default is inspect.Parameter.empty]
    assert max(counts) == len(ours) - 1
    assert min(counts) == len(required) - 1 or operation == "queue_pop"


def documented(value: Any) -> str:
    return inspect.getdoc(value) or ""


def test_each_public_name_has_a_docstring() -> None:
    without = []
    for name, value in public_names().items():
        if isinstance(value, ModuleType) or callable(value):
            if not documented(value):
                without.append(name)
            if isinstance(value, type) and is_ours(value):
                if not value.__doc__:
                    without.append(f"{name}: the class itself")
                without += [
                    f"{name}.{method}"
                    for method, attribute in methods_of(value).items()
                    if (callable(attribute) or isinstance(attribute, property | staticmethod | classmethod))
                    and not documented(getattr(value, method))
                ]
    assert without == []


def undescribed(value: Any) -> list[str]:
    """Return the parameters that a docstring does not describe. A private constructor's need none."""
    if isinstance(value, type) and (vars(value).get("__init__", value).__doc__ or "").startswith("Private:"):
        return []
    signature, text = signature_of(value), documented(value)
    names = [name for name in signature.parameters if name not in {"self", "cls"}] if signature else []
    if is_exception(value) and "__init__" not in vars(value):
        return []
    sections = re.findall(r"^(?:Args|Attributes):\n((?:[ ].*\n?|\n)+)", text, re.MULTILINE)
    described = set(re.findall(r"^ +(\w+):", "".join(sections), re.MULTILINE))
    # The core's docstrings, and short ones, describe parameters in sentences.
    return [name for name in names if name not in described and f"``{name}``" not in text]


def is_stores(name: str) -> bool:
    """Whether a method is an operation of PyTorch's stores, which documents its parameters."""
    method = name.rpartition(".")[2]
    return "Store." in name and (hasattr(dist.TCPStore, method) or method in {"getNumKeys", "deleteKey"})


def test_docstrings_describe_each_parameter() -> None:
    without = [
        f"{name}: {', '.join(missing)}"
        for name, value in callables().items()
        if is_ours(value) and not is_stores(name) and (missing := undescribed(value))
    ]
    assert without == []


EXAMPLES = (
    "elastic_rs.should_checkpoint",
    "elastic_rs.step",
    "elastic_rs.install",
    "elastic_rs.TCPStore",
    "elastic_rs.aio.TCPStore",
    "elastic_rs.DynamicRendezvousHandler",
    "elastic_rs.create_handler",
    "elastic_rs.LocalElasticAgent",
    "elastic_rs.elastic.run",
    "elastic_rs.elastic.TorchState",
    "elastic_rs.elastic.ElasticSampler",
    "elastic_rs.discovery.HostDiscovery",
)

RUN = """
import doctest, importlib, sys
module, _, name = sys.argv[1].rpartition(".")
found = getattr(importlib.import_module(module), name)
if name == "step":
    found = type(found)
test = doctest.DocTestParser().get_doctest(found.__doc__, {}, sys.argv[1], None, 0)
assert len(test.examples) >= 2, "no example"
sys.exit(doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed)
"""


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_do_what_they_say(name: str, tmp_path: Path) -> None:
    """They need no network but loopback, and no port of their own."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN, name]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_change_of_the_public_api_is_named_and_called_a_decision(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import api, pathlib; api.PAGE = pathlib.Path(sys.argv[2]); "
        "sys.exit(api.main(['--check']))"
    )
    page = tmp_path / "api.txt"
    text = (ROOT / "docs" / "api.txt").read_text()
    assert "\nelastic_rs.uninstall() -> None\n" in text
    page.write_text(text.replace("\nelastic_rs.uninstall() -> None\n", "\nelastic_rs.uninstall(now: bool) -> None\n"))
    command = [sys.executable, "-c", code, str(API.parent), str(page)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode == 3:
        pytest.skip(done.stdout)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "-elastic_rs.uninstall(now: bool) -> None\n" in done.stdout
    assert "+elastic_rs.uninstall() -> None\n" in done.stdout
    assert "A change of it is a decision (docs/policy.md)" in done.stdout
