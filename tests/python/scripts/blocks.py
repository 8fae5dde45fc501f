"""Run programs, each in a process of its own that is forked when torch has been imported: blocks.py FOLDER...

A folder has ``program.py``, and gets ``output`` and ``code``. The programs run at the same time.
"""

import os
import runpy
import sys
import traceback
from pathlib import Path

# What the programs import anyway. None of it starts a thread.
import elastic_rs.elastic  # noqa: F401
import torch
import torch.distributed.checkpoint
import torch.distributed.elastic.agent.server.api
from torch.nn.parallel import DistributedDataParallel  # noqa: F401

torch.set_num_threads(1)
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # imports as much again


def run(folder: Path) -> int:
    os.chdir(folder)
    output = os.open("output", os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.path.insert(0, str(folder))
    try:
        runpy.run_path(str(folder / "program.py"), run_name="__main__")
    except SystemExit as end:
        return 0 if end.code in (None, 0) else 1
    except BaseException:  # noqa: BLE001 - the parent reads the code
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


children = {}
for name in sys.argv[1:]:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = run(Path(name))
        finally:
            os._exit(code)
    children[pid] = Path(name)
while children:
    pid, status = os.wait()
    if pid in children:
        (children.pop(pid) / "code").write_text(str(os.waitstatus_to_exitcode(status)))
