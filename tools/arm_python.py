"""Python for ARM, which runs here under an emulator: qemu-user, and Debian's packages for that processor.

    python tools/arm_python.py [ARGUMENTS]    # run it

``wheels.py`` tries the wheel for ARM with it. Packages are downloaded into the cache of ``environment.py``; apt's lists
and its database of this machine are not touched. It cannot start itself again: programs that it starts are this
machine's own.
"""

from __future__ import annotations

from pathlib import Path

import downloads
import environment
from downloads import NotHereError

PACKAGES = ["python3.11-minimal", "libpython3.11-stdlib"]
NAME = "arm-python"


def command() -> list[str]:
    """Return the command that runs Python.

    Raises:
        NotHereError: it cannot be had. The text says why.
    """
    pins = " ".join(["qemu-user", *PACKAGES])
    folder = environment.cached(NAME, pins)
    return words(downloads.kept(folder, pins, "Python for ARM (30 MB)", install, works))


def words(folder: Path) -> list[str]:
    emulator = folder / "here"
    libraries = ":".join(map(str, sorted({path.parent for path in emulator.rglob("*.so*")})))
    python = folder / "arm" / "usr" / "bin" / "python3.11"
    here = ["env", f"LD_LIBRARY_PATH={libraries}"] if libraries else []
    return [*here, *map(str, (emulator / "usr" / "bin" / "qemu-aarch64", "-L", folder / "arm", python))]


def works(folder: Path) -> bool:
    try:
        return downloads.run([*words(folder), "-c", "import platform; print(platform.machine())"]).strip() == "aarch64"
    except (NotHereError, OSError):
        return False


def install(folder: Path) -> None:
    here, arm, apt = (folder / name for name in ("here", "arm", "apt"))
    for path in (here, arm, apt / "lists" / "partial", apt / "cache" / "archives" / "partial"):
        path.mkdir(parents=True)
    downloads.debian(here, ["qemu-user"], needed=True)
    (apt / "status").touch()
    options = [
        *("-o", "APT::Architecture=arm64", "-o", "APT::Architectures=arm64", "-o", "APT::Sandbox::User="),
        *("-o", f"Dir::State::Lists={apt}/lists", "-o", f"Dir::State::status={apt}/status"),
        *("-o", f"Dir::Cache={apt}/cache", *downloads.APT),
    ]
    downloads.run(["apt-get", *options, "update"])
    downloads.debian(arm, PACKAGES, needed=True, options=options)


if __name__ == "__main__":
    downloads.become(command)
