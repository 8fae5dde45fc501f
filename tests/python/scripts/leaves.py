"""A worker that ends, and leaves a process of another session: leaves.py FOLDER HOW [CODE].

HOW is what that does: `waits` (until FOLDER/go exists), `terminated` (until SIGTERM, and makes FOLDER/terminated then),
or `stubborn` (ignores SIGTERM). It writes its pid to FOLDER/helper, and FOLDER/uploaded if it ends by itself.
"""

import subprocess
import sys
import time
from pathlib import Path

HELPER = """
import os, pathlib, signal, sys, time
folder, how = pathlib.Path(sys.argv[1]), sys.argv[2]
def terminated(*_):
    (folder / "terminated").touch()
    sys.exit(0)
if how == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif how == "terminated":
    signal.signal(signal.SIGTERM, terminated)
(folder / "new").write_text(str(os.getpid()))
(folder / "new").rename(folder / "helper")
while not (folder / "go").exists():
    time.sleep(0.02)
(folder / "uploaded").touch()
"""

folder, how = Path(sys.argv[1]), sys.argv[2]
subprocess.Popen(
    [sys.executable, "-c", HELPER, str(folder), how],
    start_new_session=True,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
)
while not (folder / "helper").exists():
    time.sleep(0.02)
print(f"LEAVES {(folder / 'helper').read_text()}", flush=True)
sys.exit(int(sys.argv[3]) if len(sys.argv) > 3 else 0)
