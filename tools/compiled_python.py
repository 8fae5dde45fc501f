"""Pythons that no package index has, compiled once from Debian's sources.

    python tools/compiled_python.py 3.14 [ARGUMENTS]    # run one: musl, 3.14, 3.14t, 3.15 or 3.15t

``wheels.py`` tries wheels with them, and ``make test-compat`` can run with them. A ``t`` at the end means a Python
without a global lock. ``musl`` is Python 3.11 for Debian's musl. gcc and make compile each in a few minutes, in the
cache of ``environment.py``; nothing is installed. The one for musl lacks modules that need libraries of others (ssl,
zlib, curses, ctypes); the others have those whose headers this machine has.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tarfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import downloads
import environment
from downloads import NotHereError

MUSL_PACKAGES = ["musl", "musl-dev", "musl-tools"]
COMPILE_LIMIT_S = 3000.0
HOST = "import sysconfig; print(sysconfig.get_config_var('HOST_GNU_TYPE'), sysconfig.get_config_var('Py_GIL_DISABLED'))"
USES = "import _socket, _struct, binascii, fcntl, math, select"  # shared libraries that it loads
CC = """\
#!/bin/sh
# Debian's gcc names glibc's folder here, and Python looks for libraries in it.
case "$*" in
-print-multiarch | --print-multiarch) echo {triplet} ;;
*) exec gcc "$@" -specs "{specs}" ;;
esac
"""


@dataclass(frozen=True)
class Source:
    """A Python's source in Debian's archive, with the hash that apt's downloader checks."""

    path: str
    sha256: str


SOURCES = {
    "musl": Source(
        "pool/main/p/python3.11/python3.11_3.11.2.orig.tar.gz",
        "2411c74bda5bbcfcddaf4531f66d1adc73f247f529aee981b029513aefdbf849",
    ),
    "3.14": Source(
        "pool/main/p/python3.14/python3.14_3.14.7.orig.tar.xz",
        "3b48dac8fb59f62eaa67ac83c1eb12bda1b7a08406dd286e252c11a66be27f81",
    ),
    "3.15": Source(
        "pool/main/p/python3.15/python3.15_3.15.0~rc2.orig.tar.xz",
        "8d93af5eaaaea5adfd41bd786a7ba3f03f2ad1ab57c6a65e0b963deab91d5ad7",
    ),
}
NAMES = ("musl", "3.14", "3.14t", "3.15", "3.15t")


def command(name: str) -> list[str]:
    """Return the command that runs this Python.

    Args:
        name: one of ``NAMES``.

    Raises:
        NotHereError: it cannot be had. The text says why.
    """
    source = SOURCES[name.removesuffix("t")]
    pins = " ".join([name, *(MUSL_PACKAGES if name == "musl" else []), source.path, source.sha256])
    folder = environment.cached(f"python-{name}", pins)
    said = f"Python {name} (30 MB, compiled for minutes)"
    return words(downloads.kept(folder, pins, said, partial(install, name, source), partial(works, name)))


def words(folder: Path) -> list[str]:
    installed = folder / "installed" / "bin" / "python3"
    return [str(installed if installed.exists() else folder / "source" / "python")]


def works(name: str, folder: Path) -> bool:
    try:
        host, unlocked = downloads.run([*words(folder), "-c", f"{USES}; {HOST}"]).split()
    except (NotHereError, OSError):
        return False
    return host.endswith("-musl") == (name == "musl") and (unlocked == "1") == name.endswith("t")


def install(name: str, source: Source, folder: Path) -> None:
    if missing := [tool for tool in ("gcc", "make") if shutil.which(tool) is None]:
        raise NotHereError(f"Python {name} is compiled, and there is no {missing[0]}")
    if name == "musl":
        downloads.debian(folder, MUSL_PACKAGES)
    packed = downloads.debian_source(folder, source.path, source.sha256)
    with tarfile.open(packed) as tar:
        tar.extractall(folder, filter="data")
    packed.unlink()
    (made,) = folder.glob("Python-*")
    unpacked = made.rename(folder / "source")
    if name == "musl":
        options = ["--without-ensurepip", "OPT=-O1", "PKG_CONFIG=false", f"CC={make_compiler(folder)}"]
    else:
        options = [f"--prefix={folder}/installed", *(["--disable-gil"] if name.endswith("t") else [])]
    downloads.run([unpacked / "configure", "--disable-test-modules", *options], unpacked, COMPILE_LIMIT_S)
    make = ["make", f"-j{os.cpu_count()}"]
    downloads.run([*make, "build_all"], unpacked, COMPILE_LIMIT_S)
    if name != "musl":
        downloads.run([*make, "install"], unpacked, COMPILE_LIMIT_S)
        shutil.rmtree(unpacked)
        return
    for large in ("Lib/test", "Doc", "build/temp*"):
        for path in unpacked.glob(large):
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
    if sys.argv[1:2] and sys.argv[1] in NAMES:
        downloads.become(partial(command, sys.argv.pop(1)))
    sys.exit(f"usage: python tools/compiled_python.py {'|'.join(NAMES)} [ARGUMENTS]")
