"""Every Python block of the pages is run, or has a comment above it that says why not: ``<!-- not run: reason -->``.

The pages of ``docs/reference`` are generated: their blocks are signatures, and another test compares them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RUNNER = ROOT / "tests" / "python" / "scripts" / "blocks.py"
PAGES = sorted(
    page
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    if (ROOT / "docs" / "reference") not in page.parents
)

TORCH = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.rand(64, 4)
"""
BEFORE = {
    "docs/elastic-in-place.md": TORCH,
    "docs/errors.md": """
import elastic_rs

server = elastic_rs.TCPStore("localhost", 0, is_master=True)
server.set("key", "value")
""",
    "docs/frameworks.md": TORCH,
    "docs/preemption.md": """
import elastic_rs

batches, step = range(3), 0
save = train_step = print
""",
    "docs/events.md": TORCH
    + """
import elastic_rs

last_step_of_the_checkpoint, steps = 3, 6
""",
    # A job of one worker, as a launcher would describe it.
    "docs/first-job.md": """
import os, time

import elastic_rs

server = elastic_rs.TCPStore("localhost", 0, is_master=True)
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT=str(server.port))
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
time.sleep = lambda seconds: None
""",
    "docs/horovod.md": TORCH
    + """
import elastic_rs.elastic as hvd

hvd.elastic = hvd
batches = 3
loss = torch.tensor(1.0)


def loss_of(model, data):
    return model(data).square().mean()
""",
    "docs/launch.md": """
from pathlib import Path

# Two workers print into one pipe, and `print` writes the end of a line apart.
Path("train.py").write_text("import sys; sys.stdout.write(f'{sys.argv[1:]}\\\\n')")
Path("package").mkdir(exist_ok=True)
Path("package/train.py").write_text("import sys\\n\\ndef main(rate):\\n    sys.stdout.write(f'{rate}\\\\n')\\n")
Path("train").write_text("#!/bin/sh\\nexit 0\\n")
Path("train").chmod(0o755)
""",
    "docs/rendezvous.md": "import elastic_rs\n",
}
"""What the text around a page's blocks takes for granted, as Python that is run before each of them."""
INSTEAD = {
    "docs/errors.md": {'"node0", 29500': '"localhost", server.port'},
    "docs/rendezvous.md": {'"node0", 29400': '"localhost", 0'},
}
"""Names of machines and ports of a page, and what is there in a test."""
SHOWN = {
    "docs/first-job.md": ["step 0", "step 59"],
    "docs/launch.md": ["['--lr', '0.1']", "0.1", "{0: 0, 1: 1}"],
    "docs/errors.md": ["b'value'"],
}
"""Lines that a page's blocks print, among others."""


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    """Of the block's first line of code."""
    code: str
    reason: str | None
    """Why it is not run."""

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    lines = page.read_text().splitlines()
    at = 0
    while at < len(lines):
        fence = re.fullmatch(r"( *)```(python|py|pycon)", lines[at])
        if fence is None:
            at += 1
            continue
        first, indent = at + 1, fence[1]
        end = lines.index(f"{indent}```", first)
        code = "\n".join(line.removeprefix(indent) for line in lines[first:end]) + "\n"
        marker = re.fullmatch(r" *<!-- not run: (.{10,}) -->", lines[at - 1] if at else "")
        yield Block(str(page.relative_to(ROOT)), first + 1, code, marker and marker[1])
        at = end + 1


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
RUN = [block for block in BLOCKS if block.reason is None]


def test_python_blocks_compile() -> None:
    for block in BLOCKS:
        compile(block.code, block.name, "exec")


def test_most_blocks_run() -> None:
    assert len(RUN) >= 10
    assert len(RUN) >= 0.7 * len(BLOCKS)
    assert {*BEFORE} | {*INSTEAD} | {*SHOWN} <= {block.page for block in RUN}


@pytest.mark.timeout(600)
def test_python_blocks_run(tmp_path: Path) -> None:
    folders = {}
    for block in RUN:
        folders[block] = folder = tmp_path / re.sub(r"\W", "-", block.name)
        folder.mkdir()
        (folder / "before.py").write_text(BEFORE.get(block.page, ""))
        code = block.code
        for name, ours in INSTEAD.get(block.page, {}).items():
            assert name in code, block.name
            code = code.replace(name, ours)
        # A traceback has the line of the page.
        head = "from before import *" + "\n" * (block.line - 1)
        (folder / "program.py").write_text(head + code)
    env = {
        key: value for key, value in os.environ.items() if not key.startswith(("ELASTIC_RS_", "PET_", "TORCHELASTIC_"))
    }
    env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
    command: list[str | Path] = [sys.executable, RUNNER, *folders.values()]
    subprocess.run(command, env=env, check=True, timeout=500)
    outputs = {block: (folder / "output").read_text() for block, folder in folders.items()}
    failed = {b: output for b, output in outputs.items() if (folders[b] / "code").read_text() != "0"}
    assert not failed, "\n".join(f"{block.name}:\n{output}" for block, output in failed.items())
    for page, lines in SHOWN.items():
        shown = "".join(output for block, output in outputs.items() if block.page == page).splitlines()
        assert {*lines} <= {*shown}, (page, shown)
