"""Print the path of an SSH server for tests, and get one first if needed.

The first of these that runs:

1. the one that ``SSHD`` names, by its path or as a program on PATH;
2. the program ``sshd`` on PATH, or in ``/usr/sbin``;
3. the one in Debian's package ``openssh-server``, by ``apt-get download``, unpacked into the cache of
   ``tools/environment.py``. Nothing is installed.

stderr says which server it is and its version. If there is none, stderr says why, nothing is printed, and the exit code
is 0: tests that need it are then skipped. The exit code is 1 only if the program that ``SSHD`` names does not run.
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

PACKAGES = ["openssh-server", "libwrap0"]
SAID = "an SSH server"
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
    if named := os.environ.get("SSHD"):
        path = shutil.which(named)
        if path is None or version_of(path) is None:
            sys.exit(
                f"error: SSHD is `{named}`, must be an OpenSSH server that runs here; unset it to let make get one"
            )
        return chosen(path)
    missing = "no sshd: tests that need it are skipped. SSHD=/path/to/sshd names one."
    found = downloads.first_of((from_path, from_debian), missing)
    return None if found is None else chosen(found)


def chosen(path: str | Path) -> Path:
    print(f"    {version_of(path)}: {path}")
    return Path(path).absolute()


def version_of(program: str | Path) -> str | None:
    """Return the server's version, or None if it does not run as OpenSSH's."""
    try:
        told = subprocess.run([program, "-V"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    # Servers before 9.2 do not know -V, and say their version in the usage that follows.
    found = re.search(r"OpenSSH_[\w.]+", told.stdout + told.stderr)
    return found[0] if found else None


def from_path() -> Path:
    path = shutil.which("sshd") or shutil.which("/usr/sbin/sshd")
    if path is None:
        raise NotHereError("PATH: it has no program `sshd`")
    if version_of(path) is None:
        raise NotHereError(f"PATH: {path} does not run as OpenSSH's sshd")
    return Path(path)


def from_debian() -> Path:
    def install(folder: Path) -> None:
        downloads.debian(folder, PACKAGES)
        libraries = ":".join(map(str, sorted({path.parent for path in folder.glob("**/libwrap.so.*")})))
        wrapper = folder / "sshd"
        wrapper.write_text(WRAPPER.format(libraries=libraries, program=folder / "usr/sbin/sshd"))
        wrapper.chmod(0o755)

    def works(folder: Path) -> bool:
        return version_of(folder / "sshd") is not None

    pins = f"{' '.join(PACKAGES)} {platform.machine()}"
    return downloads.kept(environment.cached("sshd-debian", pins), pins, SAID, install, works) / "sshd"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
