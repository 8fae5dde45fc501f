"""Make the Python environments of this checkout, or do nothing if they exist.

There are two environments, because one of them is large, and folders of packages for tests:

- The *shared* environment, outside the tree, holds PyTorch (5.6 GB) and the tools. Every checkout with the same pins
  uses it: ``${ELASTIC_RS_CACHE:-${XDG_CACHE_HOME:-~/.cache}/elastic_rs}/venv-<hash of the pins and the interpreter>``.
  Once complete, it is never changed.
- The *local* environment, ``build/venv``, sees the shared one and the plugins through a ``.pth`` file, and holds only
  our wheel. If the wheel were in the shared one, two checkouts that are built or tested at the same time would run each
  other's code. ``build/venv/bin/python`` is the interpreter for everything: torchrun starts workers with
  ``sys.executable``, so they see the same packages.
- ``plugins-<hash>`` holds plugins of pytest (``requirements/plugins.txt``). They are small, and another pin among them
  does not change the shared environment.
- ``clients-<hash>`` holds programs of other projects that tests launch (``requirements/clients.txt``). They are
  installed without dependencies, so that none brings another PyTorch, and only their tests see them (``build/clients``
  is a link).
- ``engines-<hash>`` holds what tests of ``examples`` need of cluster managers (``requirements/engines.txt``), in the
  same way (``build/engines``). ``python tools/environment.py --ray --frameworks`` adds what only long tests need: Ray
  (``requirements/ray.txt``, 80 MB) as ``build/ray``, transformers (``requirements/frameworks.txt``, 80 MB) as
  ``build/frameworks``.
- ``upstream-<hash>`` holds what PyTorch's own tests import (``requirements/upstream.txt``), in the same way
  (``build/upstream``).

- ``checks-<hash>`` holds programs that check crates and workflows (``requirements/checks.txt``, ``build/checks``).
- ``release-<hash>`` has what builds and checks wheels (``requirements/release.txt``). ``python tools/environment.py
  --release`` makes it alone, as ``build/release``: who builds a wheel needs no PyTorch. ``docs-<hash>``
  (``requirements/docs.txt``, ``--docs``, ``build/docs``) builds the site, in the same way.

The stamp that marks the shared environment as complete is written last. Without the stamp the environment is made
again, because pip takes an incompletely installed package for an installed one. Downloads come from pip's cache then.
If two checkouts start at once, a lock lets the second wait for the first.

``python tools/environment.py VERSION`` makes both environments for that version of PyTorch: another shared one, and
``build/venv-torch-VERSION`` (``make test-compat``).

This script uses only the standard library, because it runs before anything is installed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements" / "dev.txt"
PLUGINS = ROOT / "requirements" / "plugins.txt"
CLIENTS = ROOT / "requirements" / "clients.txt"
ENGINES = ROOT / "requirements" / "engines.txt"
UPSTREAM = ROOT / "requirements" / "upstream.txt"
CHECKS = ROOT / "requirements" / "checks.txt"
ALONE = {
    "--release": ("release", "the tools for wheels", "400 MB"),
    "--docs": ("docs", "the tools for the site", "80 MB"),
}
"""Environments that are made alone, by the option: its file of requirements, what is in it, its size."""
FOR_LONG_TESTS = {"--ray": "ray", "--frameworks": "frameworks"}
"""Folders of packages beside the others, by the option."""
STAMP = "elastic_rs-complete"
# Programs of the shared environment that are called by name. They are native binaries, so a link is enough.
LINKED_TOOLS = ("maturin", "ruff")


def main() -> int:
    if sys.argv[1:2] and sys.argv[1] in ALONE:
        kind, what, size = ALONE[sys.argv[1]]
        pins = (ROOT / "requirements" / f"{kind}.txt").read_text()
        tools = cached(kind, pins)
        if not (tools / STAMP).exists():
            make_shared(tools, pins, what, "--quiet", "--no-deps", size=size)
        link(ROOT / "build" / kind, tools)
        return 0
    asked = [FOR_LONG_TESTS[option] for option in sys.argv[1:] if option in FOR_LONG_TESTS]
    version = sys.argv[1] if len(sys.argv) > 1 and not asked else None
    pins = requirements(version)
    shared = cached("venv", pins)
    if not (shared / STAMP).exists():
        make_shared(shared, pins)
    link(ROOT / "build" / "clients", make_beside("clients", CLIENTS, shared))
    for kind, file in (
        ("engines", ENGINES),
        ("upstream", UPSTREAM),
        ("checks", CHECKS),
        *((kind, ROOT / "requirements" / f"{kind}.txt") for kind in asked),
    ):
        try:
            link(ROOT / "build" / kind, make_beside(kind, file, shared))
        except subprocess.CalledProcessError as failure:  # pip has said why
            print(f"    {file.relative_to(ROOT)}: pip ended with {failure.returncode}; tests that need it are skipped")
    plugins = make_beside("plugins", PLUGINS, shared)
    make_local(ROOT / "build" / (f"venv-torch-{version}" if version else "venv"), shared, plugins)
    return 0


def requirements(version: str | None) -> str:
    """Return the pins, with another version of PyTorch if one is given."""
    pins = REQUIREMENTS.read_text()
    return re.sub(r"^torch==.*$", f"torch=={version}", pins, flags=re.MULTILINE) if version else pins


def cached(kind: str, pins: str) -> Path:
    cache = os.environ.get("ELASTIC_RS_CACHE")
    if not cache:
        cache = os.path.join(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "elastic_rs")  # noqa: PTH118
    # The interpreter is part of the name: another Python needs other wheels, and an environment whose interpreter has
    # been removed must not be found again.
    base = getattr(sys, "_base_executable", sys.executable)
    identity = [pins, sys.version, sysconfig.get_platform(), os.path.realpath(base)]
    digest = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:12]
    return Path(cache).expanduser().resolve() / f"{kind}-{digest}"


def make_shared(
    shared: Path, pins: str, what: str = "PyTorch and the tools", *options: str, size: str = "several GB"
) -> None:
    with incomplete(shared) as lock:
        if lock is None:
            return
        print(f"    installing {what} into {shared} (once; {size})", flush=True)
        create(shared)
        # pip inherits the lock. If only this process is killed, the lock is held while pip still writes.
        python = shared / "bin" / "python"
        bootstrap: list[str | Path] = [python, "-m", "ensurepip", "--upgrade", "--default-pip"]
        if subprocess.run(bootstrap, stdout=subprocess.DEVNULL, pass_fds=[lock], check=False).returncode:
            no_venv("ensurepip failed")
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(pins)
            file.flush()
            subprocess.run([*pip_install(python), *options, "-r", file.name], pass_fds=[lock], check=True)
        (shared / STAMP).write_text(pins)


def make_beside(kind: str, file: Path, shared: Path) -> Path:
    """Return the folder with the packages of this file, without dependencies, for the shared environment's Python."""
    folder = cached(kind, file.read_text())
    if (folder / STAMP).exists():
        return folder
    with incomplete(folder) as lock:
        if lock is None:
            return folder
        print(f"    installing {kind} into {folder} (once; small)", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        options: list[str | Path] = [
            "--quiet",
            "--timeout=15",
            "--retries=2",
            "--no-deps",
            "--target",
            folder,
            "-r",
            file,
        ]
        subprocess.run([*pip_install(shared / "bin" / "python"), *options], pass_fds=[lock], check=True)
        (folder / STAMP).write_text(file.read_text())
    return folder


@contextlib.contextmanager
def incomplete(directory: Path) -> Iterator[int | None]:
    """Hold the directory's lock, and yield its descriptor, or None if another process has completed the directory."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{directory}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"    another checkout is installing into {directory}; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield None if (directory / STAMP).exists() else lock.fileno()


def pip_install(python: Path) -> list[str | Path]:
    return [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--progress-bar=off"]


def link(path: Path, target: Path) -> None:
    if path.is_symlink() and path.readlink() == target:
        return
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(target)


def make_local(local: Path, shared: Path, plugins: Path) -> None:
    python = local / "bin" / "python"
    packages = subprocess.run(
        [shared / "bin" / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    pth = local / Path(packages).relative_to(shared) / "elastic_rs_shared.pth"
    seen = f"{packages}\n{plugins}\n"
    if pth.exists() and pth.read_text() == seen and runs(python):
        return
    print(f"    making {local.relative_to(ROOT)}, which sees {shared}", flush=True)
    create(local)  # pip, too, comes from the shared environment
    for tool in LINKED_TOOLS:
        (local / "bin" / tool).symlink_to(shared / "bin" / tool)
    torchrun = local / "bin" / "torchrun"
    torchrun.write_text('#!/bin/sh\nexec "$(dirname "$0")/python" -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    pth.write_text(seen)  # last, because it marks the local environment as complete


def create(directory: Path) -> None:
    """Make an empty virtual environment, without pip."""
    try:
        venv.EnvBuilder(clear=True, symlinks=True, with_pip=False).create(directory)
    except (subprocess.CalledProcessError, ImportError) as error:
        no_venv(str(error))


def no_venv(problem: str) -> NoReturn:
    sys.exit(
        f"error: {sys.executable} cannot make a virtual environment: {problem}\n"
        "hint: some distributions ship `venv` in a separate package, for example `python3-venv`"
    )


def runs(python: Path) -> bool:
    return python.exists() and subprocess.run([python, "-c", ""], check=False).returncode == 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as failure:
        sys.exit(f"error: `{' '.join(map(str, failure.cmd))}` failed with exit code {failure.returncode}")
    except KeyboardInterrupt:
        sys.exit(130)
