"""Print the folder of a Slurm for tests, and get one first if needed.

The first of these that runs:

1. the folder that ``SLURM`` names: it has ``usr/sbin/slurmctld``, ``usr/bin/sbatch``, ``usr/sbin/munged`` and so on;
2. Debian's packages, by ``apt-get download``, unpacked into the cache of ``tools/environment.py``;
3. the system's, if it is installed: the folder is ``/`` then.

stderr says which version it is. If there is none, stderr says why, nothing is printed, and the exit code is 0: tests
that need Slurm are then skipped. The exit code is 1 only if the folder that ``SLURM`` names has none that runs.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from pathlib import Path

import downloads
import environment
from downloads import NotHereError

PACKAGES = ["slurmctld", "slurmd", "slurm-client", "munge"]
PROGRAMS = ["slurmctld", "slurmd", "slurmstepd", "sbatch", "srun", "scontrol", "sinfo", "squeue", "scancel", "munged"]
SAID = "Slurm (4 MB)"


def main() -> int:
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the path alone
        folder = find()
    if folder is not None:
        print(folder)
    return 0


def find() -> Path | None:
    if named := os.environ.get("SLURM"):
        folder = Path(named).absolute()
        if version_of(folder) is None:
            sys.exit(f"error: SLURM is `{named}`, must be a folder with a Slurm that runs here; unset it to get one")
        return chosen(folder)
    missing = "no Slurm: tests that need it are skipped. SLURM=/folder names one."
    found = downloads.first_of((from_debian, from_system), missing)
    return None if found is None else chosen(found)


def chosen(folder: Path) -> Path:
    print(f"    {version_of(folder)}: {folder}")
    return folder


def from_debian() -> Path:
    def install(folder: Path) -> None:
        downloads.debian(folder, PACKAGES, needed=True)

    pins = f"{' '.join(PACKAGES)} {platform.machine()} {platform.freedesktop_os_release().get('VERSION_ID', '')}"
    folder = environment.cached("slurm-debian", pins)
    return downloads.kept(folder, pins, SAID, install, lambda unpacked: version_of(unpacked) is not None)


def from_system() -> Path:
    if version_of(Path("/")) is None:
        raise NotHereError("the system: Slurm and munge are not installed")
    return Path("/")


def version_of(folder: Path) -> str | None:
    """Return the version, or None if a program is missing or does not run."""
    try:
        found = {name: program(folder, name) for name in PROGRAMS}
        command = [found["slurmctld"], "-V"]
        told = subprocess.run(
            command, env=os.environ | libraries(folder), capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return told.stdout.strip()


def program(folder: Path, name: str) -> Path:
    """Return the path of a program. In Debian's packages the daemons are called `slurmd-wlm` and so on."""
    for below in ("usr/sbin", "usr/bin"):
        for path in (folder / below / name, folder / below / f"{name}-wlm"):
            if path.exists():
                return path
    raise FileNotFoundError(f"{name} is not in {folder}")


def plugins(folder: Path) -> Path:
    """Return the folder of Slurm's plugins, of which munge's is one."""
    for path in sorted(folder.glob("usr/lib/*/slurm*/auth_munge.so")):
        return path.parent
    raise FileNotFoundError(f"auth_munge.so is not in {folder}")


def libraries(folder: Path) -> dict[str, str]:
    """Return the variables that let the programs find their libraries where they are unpacked."""
    if folder == Path("/"):
        return {}
    here = plugins(folder)
    # sbatch hands its environment to the job, whose srun needs it too.
    return {"LD_LIBRARY_PATH": f"{here.parent}:{here}"}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
