"""Programs that tests start and that are downloaded once, into the cache of ``tools/environment.py``.

``find_tool.py`` chooses a program, and where to get it. The functions here put limits on a network that swallows
packets, say in one line why a download failed, and fill a folder of the cache completely or not at all.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import environment

LIMIT_S = 300.0  # for a download; both tools have shorter limits for a silent network
# A question to a network that swallows packets must not hold `make test` up.
PIP = ["--quiet", "--timeout=15", "--retries=2", "--no-deps"]
APT = ["-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=15", "-o", "Acquire::https::Timeout=15"]


class NotHereError(Exception):
    """This way does not lead to a program. The text says why, in one line."""


def become(command: Callable[[], list[str]]) -> NoReturn:
    """Run a downloaded program in the place of this one, with this one's arguments."""
    try:
        found = command()
    except NotHereError as error:
        sys.exit(f"error: {error}")
    os.execvp(found[0], [*found, *sys.argv[1:]])


def first_of(ways: Sequence[Callable[[], Path]], missing: str) -> Path | None:
    """Return what the first of these ways leads to, or say why none does.

    Args:
        ways: raise ``NotHereError`` if they do not lead there.
        missing: what the user reads before the reasons.
    """
    reasons = []
    for way in ways:
        try:
            return way()
        except NotHereError as error:
            reasons.append(str(error))
    print(f"    {missing} These ways failed:")
    for reason in reasons:
        print(f"      {reason}")
    return None


def kept(folder: Path, pins: str, said: str, install: Callable[[Path], None], works: Callable[[Path], bool]) -> Path:
    """Return this folder of the cache, filled by ``install`` first if it is not complete.

    Args:
        folder: what ``environment.cached`` has named.
        pins: what the folder holds, written into it at the end.
        said: what the user reads before a download.
        install: fills the empty folder.
        works: whether the programs in it run on this machine.
    """
    if not (folder / environment.STAMP).exists():
        with environment.incomplete(folder) as lock:
            if lock is not None:
                print(f"    installing {said} into {folder} (once)", flush=True)
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                install(folder)
                if not works(folder):
                    raise NotHereError(f"{said} in {folder} does not run on this machine")
                (folder / environment.STAMP).write_text(pins)
    return folder


def debian(folder: Path, packages: Sequence[str], *, needed: bool = False, options: Sequence[str] = ()) -> None:
    """Download packages of Debian and unpack them into the folder. Nothing is installed, and root is not needed.

    apt-get checks their hashes.

    Args:
        folder: where to.
        packages: their names.
        needed: also what they depend on and this machine lacks.
        options: of apt-get.
    """
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise NotHereError(f"Debian's {packages[0]}: there is no {tool}")
    if needed:
        plan = run(["apt-get", *options, "--simulate", "--no-install-recommends", "install", *packages])
        packages = re.findall(r"^Inst (\S+)", plan, re.MULTILINE)
    if not packages:
        raise NotHereError("Debian's packages are installed already")
    run(["apt-get", *APT, *options, "--quiet", "download", *packages], folder)
    for package in folder.glob("*.deb"):
        run(["dpkg-deb", "--extract", package, folder])
        package.unlink()


def debian_source(folder: Path, path: str, sha256: str) -> Path:
    """Download a file of a source package into the folder. No list of source packages is needed.

    Args:
        folder: where to.
        path: of the file in Debian's archive.
        sha256: its hash, which apt's downloader checks.
    """
    helper = Path("/usr/lib/apt/apt-helper")
    if shutil.which("apt-get") is None or not helper.exists():
        raise NotHereError(f"Debian's {Path(path).name}: there is no apt-get with {helper}")
    target = folder / Path(path).name
    mirrors = run(["apt-get", "indextargets", "--format", "$(REPO_URI)", "Origin: Debian"]).split()
    mirror = next((uri for uri in mirrors if uri.rstrip("/").endswith("/debian")), "http://deb.debian.org/debian")
    run([helper, *APT, "download-file", f"{mirror.rstrip('/')}/{path}", target, f"SHA256:{sha256}"])
    return target


def run(command: Sequence[str | Path], cwd: Path | None = None, limit_s: float = LIMIT_S) -> str:
    """Run a command, and return what it printed."""
    shown = f"`{Path(command[0]).name} {' '.join(map(str, command[1:4]))} …`"
    try:
        result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise NotHereError(f"{shown} has not ended in {limit_s:.0f} s") from None
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        raise NotHereError(f"{shown}: {lines[-1]}")
    return result.stdout
