"""The public names of the package: modules without an underscore, and what their ``__all__`` has."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import elastic_rs


def _modules() -> Iterator[str]:
    yield elastic_rs.__name__
    for found in pkgutil.walk_packages(elastic_rs.__path__, "elastic_rs."):
        if not any(part.startswith("_") for part in found.name.split(".")):
            yield found.name


MODULES = sorted(_modules())


def names_of(module: str) -> list[str]:
    return sorted(getattr(importlib.import_module(module), "__all__", ()))


def public_names() -> dict[str, Any]:
    """Return each public name, with its module, and what it stands for."""
    return {
        f"{module}.{name}": getattr(importlib.import_module(module), name)
        for module in MODULES
        for name in names_of(module)
    }


def is_ours(value: Any) -> bool:
    """Whether a class or a function is defined in this package."""
    return str(getattr(value, "__module__", "") or "").startswith("elastic_rs")


def methods_of(kind: type) -> dict[str, Any]:
    """Return the public attributes of a class that this package defines, also in a base: methods and properties."""
    found: dict[str, Any] = {}
    for base in kind.__mro__:
        if is_ours(base):
            for name, value in vars(base).items():
                if not name.startswith("_"):
                    found.setdefault(name, value)
    return found


def callables() -> dict[str, Callable[..., Any]]:
    """Return each public callable: functions, classes, and methods of classes, by its name."""
    found: dict[str, Callable[..., Any]] = {}
    for name, value in public_names().items():
        if isinstance(value, ModuleType) or not callable(value):
            continue
        if not getattr(value, "_is_protocol", False):
            found[name] = value
        if isinstance(value, type) and is_ours(value):
            for method in methods_of(value):
                attribute = getattr(value, method)
                if callable(attribute):
                    found[f"{name}.{method}"] = attribute
    return found
