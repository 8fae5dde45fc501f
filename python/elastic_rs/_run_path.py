"""What a worker of ``elastic-run --run-path`` executes: the script, by ``runpy.run_path``.

torchrun calls a function of its own for this, whose exceptions PyTorch records; so they are here.
"""

from __future__ import annotations

import os
import runpy
import sys
import time


def main() -> None:
    """Run the script that the command line names."""
    sys.argv = sys.argv[1:]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except Exception as error:
        import traceback

        record(f"{type(error).__name__}: {error}", traceback.format_exc())
        raise


def record(message: str, stack: str) -> None:
    """Write what went wrong to ``TORCHELASTIC_ERROR_FILE``, as ``ErrorHandler.record_exception`` of PyTorch does."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    import json
    from pathlib import Path

    extra = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    text = json.dumps({"message": {"message": message, "extraInfo": extra}})
    Path(file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
