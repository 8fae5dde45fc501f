"""torchrun with a fault: launch.py [--clock SECONDS] [--fault before|after] TORCHRUN'S ARGUMENTS.

--clock SECONDS  shift the wall clock of this process
--fault before   raise an exception instead of joining the rendezvous
--fault after    raise an exception after the join, before a worker is started
"""

import argparse
import runpy
import sys
import time
from typing import Any

parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
parser.add_argument("--clock", type=float, default=0.0)
parser.add_argument("--fault", choices=["before", "after"])
args, rest = parser.parse_known_args()

if args.clock:
    import datetime as dt

    real_time, real_datetime = time.time, dt.datetime

    class Shifted(real_datetime):  # type: ignore[misc, valid-type]
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> "Shifted":
            return cls.fromtimestamp(real_time() + args.clock, tz)

        @classmethod
        def utcnow(cls) -> "Shifted":
            return cls.now(dt.UTC).replace(tzinfo=None)

    time.time = lambda: real_time() + args.clock
    # PyTorch pickles such objects into its state.
    Shifted.__module__, Shifted.__qualname__ = "datetime", "datetime"
    dt.datetime = Shifted  # type: ignore[misc]

if args.fault:
    from elastic_rs.rendezvous._node_handler import NodeHandler

    real_join = NodeHandler._join

    def join(self: NodeHandler, *positional: Any, **named: Any) -> Any:
        if args.fault == "after":
            real_join(self, *positional, **named)
        raise RuntimeError(f"a fault of this node alone, {args.fault} joining")

    NodeHandler._join = join  # type: ignore[method-assign]

sys.argv = ["torchrun", *rest]
runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
