"""An OpenSSH server on loopback that is several hosts, and the client's configuration that reaches them.

The server listens at 127.0.0.2 and further addresses. ``node0``, ``node1`` and so on are names for them in the client's
configuration, with keys that are made for it. Nothing of the user's own configuration is read, and nothing outside the
folder is changed.
"""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

# The server has no more than 16 sockets that listen.
ADDRESSES = tuple(f"127.0.0.{2 + number}" for number in range(14))
LIMIT_S = 60
OF_ROOT = """\
mount --make-rprivate / && mount --bind {passwd} /etc/passwd && mount -t tmpfs none /run && mkdir -m 755 /run/sshd &&
exec {command}
"""


class CannotServeError(Exception):
    """There can be no server here. The text says why."""


class SshServer:
    """A server, and what its clients need.

    Args:
        program: the path of sshd.
        folder: an empty folder for keys and configurations.
        port: a free port.
        variables: of the programs that clients start.
        names: how many hosts there are; they share the addresses.
    """

    def __init__(
        self, program: str, folder: Path, port: int, variables: Mapping[str, str] | None = None, names: int = 14
    ) -> None:
        self.folder = folder
        self.port = port
        self.names = {f"node{number}": ADDRESSES[number % len(ADDRESSES)] for number in range(names)}
        for key in ("host", "user", "stranger"):
            made = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", key, "-f", str(folder / key)]
            subprocess.run(made, check=True, timeout=LIMIT_S)
        shutil.copy(folder / "user.pub", folder / "authorized")
        lines = [
            *(f"ListenAddress {address}:{port}" for address in ADDRESSES),
            f"HostKey {folder}/host",
            f"AuthorizedKeysFile {folder}/authorized",
            "StrictModes no",
            "UsePAM no",
            "PidFile none",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin yes",
            "MaxStartups 1000",
            # bash reads the user's .bashrc in the first shell of a connection, which may take longer than all else.
            f"SetEnv SHLVL=1 {' '.join(f'{name}={value}' for name, value in (variables or {}).items())}",
        ]
        config = folder / "sshd_config"
        config.write_text("\n".join(lines) + "\n")
        self.known_hosts("known_hosts", "host")
        self._process = self._start([program, "-D", "-e", "-f", str(config)])

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        if os.geteuid() == 0:
            try:
                pwd.getpwnam("sshd")
            except KeyError:
                # As root it needs a user of this name, and a folder. It gets them in its own view of the file system.
                passwd = self.folder / "passwd"
                passwd.write_text(Path("/etc/passwd").read_text() + "sshd:x:74:74::/run/sshd:/usr/sbin/nologin\n")
                script = OF_ROOT.format(passwd=shlex.quote(str(passwd)), command=shlex.join(command))
                if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode:
                    raise CannotServeError("no user `sshd`, and no namespace of mounts to have one in") from None
                command = ["unshare", "--mount", "sh", "-c", script]
        log = self.folder / "sshd.log"
        with log.open("wb") as stderr:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr)
        deadline = time.monotonic() + LIMIT_S
        while not all(f"Server listening on {address} port" in log.read_text() for address in ADDRESSES):
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                process.wait()
                raise CannotServeError(f"sshd does not start: {log.read_text().strip()}")
            time.sleep(0.02)
        return process

    def known_hosts(self, name: str, key: str) -> None:
        """Write a file that knows the hosts by this key."""
        public = " ".join((self.folder / f"{key}.pub").read_text().split(" ")[:2])
        known = "".join(f"[{address}]:{self.port} {public}\n" for address in ADDRESSES)
        (self.folder / name).write_text(known)

    def command(
        self,
        *,
        known: str = "known_hosts",
        key: str = "user",
        ports: Mapping[str, int] | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> str:
        """Return the value of ``--ssh``.

        Args:
            known: the file in the folder that knows the hosts.
            key: the file in the folder with the client's key.
            ports: of hosts at which nobody listens, say.
            settings: of single hosts, a line of the client's configuration each.
        """
        config = self.folder / f"ssh_config-{known}-{key}"
        names = [
            f"Host {name}\n  HostName {address}\n  Port {(ports or {}).get(name, self.port)}\n"
            f"  {(settings or {}).get(name, '')}\n"
            for name, address in self.names.items()
        ]
        config.write_text(
            "".join(names)
            + f"Host *\n  IdentityFile {self.folder / key}\n  IdentitiesOnly yes\n"
            + f"  UserKnownHostsFile {self.folder / known}\n  GlobalKnownHostsFile none\n  StrictHostKeyChecking yes\n"
        )
        return f"ssh -F {shlex.quote(str(config))}"

    def stop(self) -> None:
        """End the server. Its connections end with their clients."""
        self._process.terminate()
        self._process.wait(LIMIT_S)
