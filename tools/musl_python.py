"""Python for musl, compiled once from Debian's source with Debian's musl.

    python tools/musl_python.py [ARGUMENTS]    # run it

No package index has one. ``wheels.py`` tries the wheel for musl with it. gcc and make compile it in a few minutes, in
the cache of ``environment.py``; nothing is installed. Modules that need libraries of others (ssl, zlib, curses, ctypes)
are not in it.
"""

from __future__ import annotations

import os
import re
import shutil
import tarfile
from pathlib import Path

import downloads
import environment
from downloads import NotHereError

PACKAGES = ["musl", "musl-dev", "musl-tools"]
SOURCE = "pool/main/p/python3.11/python3.11_3.11.2.orig.tar.gz"
SHA256 = "2411c74bda5bbcfcddaf4531f66d1adc73f247f529aee981b029513aefdbf849"
NAME = "musl-python"
COMPILE_LIMIT_S = 3000.0
HOST = "import sysconfig; print(sysconfig.get_config_var('HOST_GNU_TYPE'))"
USES = "import _socket, _struct, binascii, fcntl, math, select"  # shared libraries that it loads
CC = """\
#!/bin/sh
# Debian's gcc names glibc's folder here, and Python looks for libraries in it.
case "$*" in
-print-multiarch | --print-multiarch) echo {triplet} ;;
*) exec gcc "$@" -specs "{specs}" ;;
esac
"""


def command() -> list[str]:
    """Return the command that runs Python.

    Raises:
        NotHereError: it cannot be had. The text says why.
    """
    pins = " ".join([*PACKAGES, SOURCE, SHA256])
    folder = environment.cached(NAME, pins)
    return words(downloads.kept(folder, pins, "Python for musl (30 MB, compiled for minutes)", install, works))


def words(folder: Path) -> list[str]:
    return [str(folder / "source" / "python")]


def works(folder: Path) -> bool:
    try:
        host = downloads.run([*words(folder), "-c", f"{USES}; {HOST}"])
    except (NotHereError, OSError):
        return False
    return host.strip().endswith("-musl")


def install(folder: Path) -> None:
    if missing := [tool for tool in ("gcc", "make") if shutil.which(tool) is None]:
        raise NotHereError(f"Python for musl is compiled, and there is no {missing[0]}")
    downloads.debian(folder, PACKAGES)
    packed = downloads.debian_source(folder, SOURCE, SHA256)
    with tarfile.open(packed) as tar:
        tar.extractall(folder, filter="data")
    packed.unlink()
    (made,) = folder.glob("Python-*")
    source = made.rename(folder / "source")
    compiler = make_compiler(folder)
    # pkg-config would name libraries of this machine's glibc.
    options = ["--disable-test-modules", "--without-ensurepip", "OPT=-O1", "PKG_CONFIG=false", f"CC={compiler}"]
    downloads.run([source / "configure", *options], source, COMPILE_LIMIT_S)
    downloads.run(["make", f"-j{os.cpu_count()}", "build_all"], source, COMPILE_LIMIT_S)
    for large in ("Lib/test", "Doc", "build/temp*"):
        for path in source.glob(large):
            shutil.rmtree(path)


def make_compiler(folder: Path) -> Path:
    """Return a compiler for the musl in this folder. Debian's `musl-gcc` expects it in `/usr`."""
    triplet = f"{os.uname().machine}-linux-musl"
    libraries = folder / "usr" / "lib" / triplet
    # Debian merges /lib with /usr/lib. Without this link gcc would link libc.a, and load no shared library.
    (libraries / "libc.so").symlink_to(folder / "lib" / triplet / "libc.so")
    text = (libraries / "musl-gcc.specs").read_text()
    for name in ("/usr/lib/", "/usr/include/", "/lib/ld-musl"):
        text = re.sub(rf"(?<=[ L]){name}", f"{folder}{name}", text)
    specs = folder / "specs"
    specs.write_text(text)
    compiler = folder / "musl-gcc"
    compiler.write_text(CC.format(specs=specs, triplet=triplet))
    compiler.chmod(0o755)
    return compiler


if __name__ == "__main__":
    downloads.become(command)
