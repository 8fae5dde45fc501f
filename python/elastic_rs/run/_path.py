"""What a worker of ``elastic-run --run-path`` executes: the script, by ``runpy.run_path``.

torchrun calls a function of its own for this, whose exceptions PyTorch records; so they are here.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import time
from typing import Any


def main() -> None:
    """Run the script, with the first entry of the launcher's ``sys.path``."""
    if not sys.flags.safe_path:
        # Otherwise it would be this package's folder, whose modules must not be found by their bare names.
        sys.path[0] = sys.argv[1]
    sys.argv = sys.argv[2:]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except Exception as error:
        import traceback

        record(f"{type(error).__name__}: {error}", traceback.format_exc())
        raise


def record(message: str, stack: str) -> None:
    """Write an error to ``TORCHELASTIC_ERROR_FILE``, as ``ErrorHandler.record_exception`` of PyTorch does."""
    extra = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    write_error_file({"message": {"message": message, "extraInfo": extra}})


def write_error_file(data: Any) -> None:
    """Write this to ``TORCHELASTIC_ERROR_FILE``, if it is set. If that fails, warn, as PyTorch does.

    Its caller has an error to report, which another one must not replace.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    import json
    from pathlib import Path

    try:
        Path(file).write_text(json.dumps(data), encoding="utf-8")
    except (OSError, ValueError, RecursionError) as error:
        warning = f"elastic-run: warning: cannot write the error to TORCHELASTIC_ERROR_FILE (`{file}`): {error}\n"
        with contextlib.suppress(AttributeError, OSError, ValueError):
            sys.stderr.write(warning)


if __name__ == "__main__":
    main()
