"""Write everything that a program can find out about its start to a file, for comparison: dump.py FILE [--torch] ..."""

from __future__ import annotations

import atexit
import builtins
import json
import os
import signal
import sys
import threading
import warnings
from pathlib import Path

import __main__

PROC = Path("/proc/self")


def status(*names: str) -> dict[str, str]:
    lines = (line.split(":\t", 1) for line in (PROC / "status").read_text().splitlines() if ":\t" in line)
    return {name: text for name, text in lines if name in names}


def stream(name: str) -> dict[str, object]:
    it = getattr(sys, name)
    return {
        "repr": repr(it).replace(name, "NAME"),
        "type": type(it.buffer).__name__,
        "file": repr(it.buffer.name),
        "flags": [it.line_buffering, it.write_through, it.encoding, it.errors, it.isatty(), it.newlines],
        "can": [it.readable(), it.writable(), it.seekable()],
        "same": it is getattr(sys, f"__{name}__"),
        "fd": [it.fileno(), os.get_inheritable(it.fileno()), os.get_blocking(it.fileno())],
    }


def dump() -> dict[str, object]:
    pid, parent = os.getpid(), os.getppid()
    main = vars(__main__)
    return {
        "env": dict(os.environ),
        "env_order": list(os.environ),
        "shown_env": sorted((PROC / "environ").read_bytes().decode().rstrip("\0").split("\0")),
        "shown_command": (PROC / "cmdline").read_bytes().decode().rstrip("\0").split("\0"),
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "cwd": os.getcwd(),
        "executable": [sys.executable, os.readlink("/proc/self/exe")],
        "flags": repr(sys.flags),
        "xoptions": repr([sys._xoptions, sys.warnoptions]),
        "main": {name: repr(value) for name, value in main.items() if name[:2] == "__" == name[-2:]},
        "globals": sorted(main),
        "is_main": [__name__, sys.modules["__main__"] is __main__, __main__.__dict__ is globals()],
        "builtins": __builtins__ is builtins,
        "streams": [stream(name) for name in ("stdin", "stdout", "stderr")],
        "signals": {it: repr(signal.getsignal(it)) for it in sorted(signal.valid_signals())},
        "kernel": status("SigBlk", "SigIgn", "SigCgt", "Threads", "Groups", "NoNewPrivs", "CapEff", "Name", "Umask"),
        "leads": [os.getsid(0) == pid, os.getpgid(0) == pid, os.getsid(parent) == parent, parent != 1],
        "parent": Path(f"/proc/{parent}/comm").read_text(),
        "descriptors": sorted(int(fd) for fd in os.listdir(PROC / "fd") if os.path.exists(PROC / "fd" / fd))[:3],
        "threads": [it.name for it in threading.enumerate()] + [threading.current_thread() is threading.main_thread()],
        "hooks": [
            sys.excepthook is sys.__excepthook__,
            sys.displayhook is sys.__displayhook__,
            threading.excepthook.__name__,
        ],
        "filters": repr(warnings.filters[:5]),
        "limits": [sys.getrecursionlimit(), sys.getswitchinterval(), sys.gettrace(), sys.getprofile()],
        "affinity": sorted(os.sched_getaffinity(0)),
        "nice": os.nice(0),
        "oom": (PROC / "oom_score_adj").read_text(),
        "atexit": atexit._ncallbacks() >= 0,
    }


if __name__ == "__main__":
    if "--torch" in sys.argv:
        import torch
        import torch._dynamo  # as its first optimizer does

        drawn = [torch.initial_seed(), torch.rand(3).tolist(), torch.get_num_threads(), torch.is_grad_enabled()]
    else:
        drawn = []
    found = {**dump(), "torch": drawn}
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1))
