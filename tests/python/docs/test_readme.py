"""The README's first command is run, and the files and targets that it names exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from helpers.procs import Job

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.cold
@pytest.mark.torchrun
def test_the_first_command_runs(job: Job) -> None:
    command = next(line for block in blocks("console") for line in block.splitlines() if "torchrun" in line)
    words = shlex.split(command)
    assert words[:2] == ["$", "torchrun"]
    worker = Path(__file__).parents[1] / "scripts" / "worker.py"
    # Another process may have the example's port.
    arguments = [worker if word == "train.py" else word.replace(":29400", ":0") for word in words[2:]]
    torchrun = job.torchrun(*arguments)
    assert torchrun.wait() == 0
    assert sum("DONE" in line for line in torchrun.lines) == 2


def test_files_and_targets_that_the_readme_names_exist() -> None:
    for link in re.findall(r"\]\(([^):]+)\)", README):
        assert (ROOT / link.partition("#")[0]).exists(), link
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for target in re.findall(r"^\$ make (\w+)", README, flags=re.MULTILINE):
        assert target in targets, target
