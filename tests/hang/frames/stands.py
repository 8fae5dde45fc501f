"""Stands in one of several ways, and prints where Python is and where it stands: ``python stands.py HOW``."""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator


def говорит() -> None:  # noqa: PLC2401 names are stored in several widths
    𐎠()


def 𐎠() -> None:  # noqa: N802, PLC2401
    été()


def été() -> None:  # noqa: PLC2401
    time.sleep(600)  # LINE sleeps


class Loader:
    def load(self) -> None:
        def inner() -> None:
            self.lock.acquire()  # LINE waits

        self.lock = threading.Lock()
        self.lock.acquire()
        inner()


def busy() -> None:
    def down(depth: int) -> int:
        return 0 if depth == 0 else down(depth - 1) + len(sorted([3, 1, 2], key=lambda it: -it))

    while True:
        for depth in range(20):
            down(depth)


def deep(depth: int) -> None:
    if depth:
        deep(depth - 1)
    else:
        time.sleep(600)


def generated() -> Iterator[int]:
    time.sleep(600)  # LINE generator
    yield 1


def tell() -> None:
    runtime = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
    print(os.getpid(), runtime, sys.hexversion, flush=True)


def main(how: str) -> None:
    if how == "threads":
        for at in range(7):
            threading.Thread(target=Loader().load, name=f"loader {at}", daemon=True).start()
    if how == "crowd":
        threading.stack_size(65536)
        for _ in range(300):
            threading.Thread(target=Loader().load, daemon=True).start()
    if how == "forked":
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            return
    tell()
    if how == "busy":
        busy()
    elif how == "gil":
        ctypes.PyDLL(None).sleep(600)  # LINE holds
    elif how == "deep":
        sys.setrecursionlimit(5000)
        deep(500)
    elif how == "generator":
        list(generated())
    elif how == "long":
        names = {}
        name = "f" + "a" * 5000
        exec(f"import time\ndef {name}():\n    time.sleep(600)\n", names)
        names[name]()
    elif how == "lines":
        (
            sum(
                int(it)
                for it in [
                    1,
                    time.sleep(600),  # LINE lines
                ]
            )
        )
    else:
        говорит()


if __name__ == "__main__":
    main(sys.argv[1])
