"""A machine with made-up GPUs: a driver library that says what a variable says (``nvml.c``)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

LIMIT_S = 120.0
LIBRARY = Path(__file__).with_name("nvml.c")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the fake driver's library."""
    folder = tmp_path_factory.mktemp("driver")
    library = folder / "libnvidia-ml.so.1"
    command: list[str | Path] = ["cc", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, LIBRARY]
    subprocess.run(command, check=True, timeout=LIMIT_S)
    return folder


def environment(driver: Path, gpus: str, faults: Path | None = None) -> dict[str, str]:
    """Return the variables with which a process sees these GPUs, and the faults that the lines of this file say."""
    path = os.pathsep.join(filter(None, [str(driver), os.environ.get("LD_LIBRARY_PATH")]))
    # With this variable PyTorch asks the library, and not CUDA, whether there are GPUs.
    found = {"LD_LIBRARY_PATH": path, "FAKE_GPUS": gpus, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    return found | ({} if faults is None else {"FAKE_GPU_FAULTS": str(faults)})
