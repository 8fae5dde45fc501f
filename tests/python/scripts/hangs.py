"""Hangs in the way that its rank is named for: ``hangs.py KIND,KIND,…``, a kind for each rank. Needs no torch."""

import ctypes
import os
import signal
import sys
import threading
import time


def load_batch() -> None:
    time.sleep(3600)


def sleep() -> None:
    load_batch()


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_the_gil() -> None:
    ctypes.PyDLL(None).sleep(3600)


def raise_beside_a_thread() -> None:
    threading.Thread(target=load_batch).start()
    raise ValueError("the main thread ends")


def ignore_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(1, f"IGNORES {os.getpid()}\n".encode())
    load_batch()


def main() -> None:
    kind = sys.argv[1].split(",")[int(os.environ["RANK"])]
    os.write(1, f"READY {os.environ['RANK']} {os.getpid()}\n".encode())
    globals()[kind]()


if __name__ == "__main__":
    main()
