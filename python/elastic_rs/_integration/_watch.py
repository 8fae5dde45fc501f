"""The entry point that ``import torch`` loads at its end, in every process of an environment with this package.

PyTorch makes an exception of an entry point a failed ``import torch``, so nothing leaves this module.
"""

from __future__ import annotations

import os
import sys


def autoload() -> None:
    """Have this process answer its agent, if it is a worker's. Imports nothing elsewhere."""
    if "ELASTIC_RS_WATCH" not in os.environ:
        return
    try:
        if not _is_of_multiprocessing():
            from elastic_rs._watch import start

            start()
    except Exception:  # noqa: BLE001 - a binary that is missing or of another Python, say: the script does not need it
        return


def _is_of_multiprocessing() -> bool:
    """Whether this is a child of a worker, such as a data worker. A spawned one is no child yet while it imports."""
    process = sys.modules.get("multiprocessing.process")
    is_child = process is not None and process.parent_process() is not None
    return is_child or any(argument.startswith("from multiprocessing.") for argument in sys.orig_argv)
