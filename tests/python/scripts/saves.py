"""A worker that saves when it is asked to end, as trainers do. It joins no process group.

saves.py FOLDER   say READY, and what SIGHUP does. After SIGTERM, SIGINT or SIGHUP say STOPPING, wait until FOLDER/go
                  exists, say SAVED, and end well. End well too once FOLDER/done exists. At each SIGUSR1 say
                  CHECKPOINT, and go on.
"""

import os
import signal
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])
received: list[int] = []


def say(text: str) -> None:
    os.write(1, f"{text} rank={os.environ['RANK']}\n".encode())


hangup = "ignored" if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else "default"
for number in (signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hangup == "default" else [])):
    signal.signal(number, lambda got, _: received.append(got))
signal.signal(signal.SIGUSR1, lambda *_: say("CHECKPOINT"))
say(f"READY hangup={hangup} pid={os.getpid()}")
while not received and not (folder / "done").exists():
    time.sleep(0.02)
if received:
    say(f"STOPPING {signal.Signals(received[0]).name}")
    while not (folder / "go").exists():
        time.sleep(0.02)
    say("SAVED")
