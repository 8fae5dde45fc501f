"""Where the programs, plugins and libraries of a Slurm are: of an unpacked one, or of the system's (``/``)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

PROGRAMS = ["slurmctld", "slurmd", "slurmstepd", "sbatch", "srun", "scontrol", "sinfo", "squeue", "scancel", "munged"]


def version_of(folder: Path) -> str | None:
    """Return the version, or None if a program is missing or does not run."""
    try:
        found = {name: program(folder, name) for name in PROGRAMS}
        env = os.environ | libraries(folder)
        command: list[str | Path] = [found["slurmctld"], "-V"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


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
