"""Workers with gloo of which rank 1 does something else than the others, which fail by that.

wrong_collectives.py early      it ends with exit code 0 before the last collective
wrong_collectives.py mismatch   it enters a smaller collective than the others
"""

import os
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if os.environ["RANK"] == "1" and sys.argv[1] == "early":
    os._exit(0)  # its connections end with it: on a busy machine others could fail before a longer end
# It has a name, so that it is not a thread of gloo that lets go of it, while Python ends: that would abort the process.
tensor = torch.ones(4 if os.environ["RANK"] == "1" and sys.argv[1] == "mismatch" else 4096)
dist.all_reduce(tensor)
