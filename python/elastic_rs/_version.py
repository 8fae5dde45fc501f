"""The versions of this package, of Python and of PyTorch. Does not import torch."""

from __future__ import annotations

import argparse
from typing import Any

from elastic_rs._elastic_rs import COMMIT, VERSION
from elastic_rs._terminal import print_line

__all__ = ["ShowVersion", "__version__", "line"]

__version__ = VERSION


def line(program: str) -> str:
    """Return ``PROGRAM VERSION (commit COMMIT, Python VERSION, torch VERSION)``."""
    import platform

    from elastic_rs._doctor._node import find_torch

    version, where = find_torch()
    torch = f"torch {version or 'of unknown version'}" if where else "no torch"
    return f"{program} {__version__} (commit {COMMIT}, Python {platform.python_version()}, {torch})"


class ShowVersion(argparse.Action):
    """``--version``: print the versions and exit."""

    def __init__(self, option_strings: list[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, **kwargs)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print the line of the program that was called."""
        print_line(line(parser.prog.split(maxsplit=1)[0]))
        parser.exit()
