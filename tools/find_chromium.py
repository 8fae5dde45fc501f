"""Print the path of a Chromium for tests, and get one first if needed.

The first of these that runs:

1. the one that ``CHROMIUM`` names, by its path or as a program on PATH;
2. a Chromium or Chrome on PATH;
3. the one in Debian's package ``chromium-headless-shell``, which needs no desktop, by ``apt-get download``, unpacked
   into the cache of ``tools/environment.py``. Nothing is installed.

stderr says which one it is and its version. If there is none, stderr says why, nothing is printed, and the exit code
is 0: tests that need it are then skipped. The exit code is 1 only if the program that ``CHROMIUM`` names does not run.
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

PACKAGE = "chromium-headless-shell"
NAMES = (PACKAGE, "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SAID = "Chromium (90 MB)"
WRAPPER = """\
#!/bin/sh
LD_LIBRARY_PATH="{libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}" exec "{program}" "$@"
"""


def main() -> int:
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the path alone
        path = find()
    if path is not None:
        print(path)
    return 0


def find() -> Path | None:
    if named := os.environ.get("CHROMIUM"):
        path = shutil.which(named)
        if path is None or version_of(path) is None:
            sys.exit(f"error: CHROMIUM is `{named}`, must be a Chromium that runs here; unset it to let make get one")
        return chosen(path)
    missing = "no Chromium: tests that need it are skipped. CHROMIUM=/path/to/chromium names one."
    found = downloads.first_of((from_path, from_debian), missing)
    return None if found is None else chosen(found)


def chosen(path: str | Path) -> Path:
    print(f"    {version_of(path)}: {path}")
    return Path(path).absolute()


def version_of(program: str | Path) -> str | None:
    """Return the program's name and version, or None if it does not run as Chromium."""
    try:
        told = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"^(?:Chromium|Google Chrome)\b[^\n]*?[\d.]+", told.stdout, re.MULTILINE)
    return found[0] if found else None


def from_path() -> Path:
    present = [path for name in NAMES if (path := shutil.which(name))]
    if not present:
        raise NotHereError(f"PATH: it has none of {', '.join(NAMES)}")
    running = next((path for path in present if version_of(path) is not None), None)
    if running is None:
        raise NotHereError(f"PATH: {present[0]} does not run as Chromium")
    return Path(running)


def from_debian() -> Path:
    def install(folder: Path) -> None:
        downloads.debian(folder, [PACKAGE], needed=True)
        libraries = ":".join(map(str, sorted({path.parent for path in (folder / "usr/lib").glob("**/*.so*")})))
        wrapper = folder / "chromium"
        wrapper.write_text(WRAPPER.format(libraries=libraries, program=folder / "usr/lib/chromium" / PACKAGE))
        wrapper.chmod(0o755)

    def works(folder: Path) -> bool:
        return version_of(folder / "chromium") is not None

    pins = f"{PACKAGE} {platform.machine()} {platform.freedesktop_os_release().get('VERSION_ID', '')}"
    return downloads.kept(environment.cached("chromium-debian", pins), pins, SAID, install, works) / "chromium"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
