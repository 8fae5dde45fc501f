"""A program with threads that runs a job by ``elastic_rs.run.main``: embeds.py WHERE ARGUMENTS...

WHERE is the thread that calls ``main``: ``main``, or ``another``. Say ENDED, the exit code, and what SIGTERM does then.
"""

import signal
import sys
import threading

from elastic_rs import run

codes: list[int] = []


def call() -> None:
    codes.append(run.main(sys.argv[2:]))


def wait() -> None:
    while not codes:
        end.wait(0.05)


end = threading.Event()
# One that runs Python code now and then, and one that sleeps in the kernel.
threads = [threading.Thread(target=wait), threading.Thread(target=end.wait)]
for thread in threads:
    thread.start()
if sys.argv[1] == "main":
    call()
else:
    caller = threading.Thread(target=call)
    caller.start()
    caller.join()
end.set()
for thread in threads:
    thread.join()
action = signal.getsignal(signal.SIGTERM)
print(f"ENDED {codes[0]} {'default' if action == signal.SIG_DFL else action}", flush=True)
sys.exit(codes[0])
