"""Print the path of Prometheus' ``promtool`` for tests, and get one first if needed.

The first of these that runs:

1. the one that ``PROMTOOL`` names, by its path or as a program on PATH;
2. the program ``promtool`` on PATH;
3. the one in Debian's package ``prometheus``, by ``apt-get download``, unpacked into the cache of
   ``tools/environment.py``. Nothing is installed.

stderr says which one it is and its version. If there is none, stderr says why, nothing is printed, and the exit code
is 0: tests that need it are then skipped. The exit code is 1 only if the program that ``PROMTOOL`` names does not run.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import downloads
import environment
from downloads import NotHereError

PACKAGE = "prometheus"
PROGRAM = "usr/bin/promtool"
SAID = "promtool (19 MB)"


def main() -> int:
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the path alone
        path = find()
    if path is not None:
        print(path)
    return 0


def find() -> Path | None:
    if named := os.environ.get("PROMTOOL"):
        path = shutil.which(named)
        if path is None or version_of(path) is None:
            sys.exit(f"error: PROMTOOL is `{named}`, must be a promtool that runs here; unset it to let make get one")
        return chosen(path)
    missing = "no promtool: tests that need it are skipped. PROMTOOL=/path/to/promtool names one."
    found = downloads.first_of((from_path, from_debian), missing)
    return None if found is None else chosen(found)


def chosen(path: str | Path) -> Path:
    print(f"    promtool {version_of(path)}: {path}")
    return Path(path).absolute()


def version_of(program: str | Path) -> str | None:
    """Return the program's version, or None if it does not run as promtool."""
    try:
        told = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"^promtool, version (\S+)", told.stdout + told.stderr, re.MULTILINE)
    return found[1] if found else None


def from_path() -> Path:
    path = shutil.which("promtool")
    if path is None:
        raise NotHereError("PATH: it has no program `promtool`")
    if version_of(path) is None:
        raise NotHereError(f"PATH: {path} does not run as promtool")
    return Path(path)


def from_debian() -> Path:
    def install(folder: Path) -> None:
        downloads.debian(folder, [PACKAGE])
        for path in (folder / "usr").glob("*/*"):  # the server itself has 100 MB
            if path.is_file() and path != folder / PROGRAM:
                path.unlink()

    def works(folder: Path) -> bool:
        return version_of(folder / PROGRAM) is not None

    pins = f"{PACKAGE} {platform.machine()}"
    return downloads.kept(environment.cached("promtool-debian", pins), pins, SAID, install, works) / PROGRAM


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
