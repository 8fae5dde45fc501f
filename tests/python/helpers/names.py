"""A host whose name server never answers."""

from __future__ import annotations

import contextlib
import random
import shlex
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

NAME = "node0.silent.test"


@contextlib.contextmanager
def silent_name_server(folder: Path) -> Iterator[list[str]]:
    """Yield a prefix for commands that lets the resolver wait without an answer. The host name is :data:`NAME`.

    One look-up takes 150 s, longer than the limit of any test. ``localhost`` is known, as in every hosts file.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        address = ".".join(["127", *(str(random.randrange(1, 255)) for _ in range(3))])
        try:
            server.bind((address, 53))
        except OSError as error:
            pytest.skip(f"a name server cannot be put at {address}:53: {error.strerror}")
        files = {
            "nsswitch.conf": "hosts: files dns\n",
            "resolv.conf": f"nameserver {address}\noptions timeout:30 attempts:5\n",
            "hosts": "127.0.0.1 localhost\n",
        }
        for name, text in files.items():
            (folder / name).write_text(text)
        mounts = " && ".join(f"mount --bind {shlex.quote(str(folder / name))} /etc/{name}" for name in files)
        script = f'{mounts} && hostname {NAME} && exec "$@"'
        under = ["unshare", "--user", "--map-root-user", "--mount", "--uts", "sh", "-c", script, "sh"]
        if subprocess.run([*under, "true"], capture_output=True, check=False).returncode != 0:
            pytest.skip(f"this machine does not allow `{shlex.join(under[:5])}`")
        yield under
