"""Pods of a manifest as containers on test machines, with the command, variables and names that they would have.

What the test plays is Kubernetes: it says which pod runs on which machine. The kubelet's part is here: ``$(VARIABLE)``
in commands, variables from fields of the pod, the host name. Images, resources and volumes are not.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .machines import Lan, Machine
    from .procs import Job, Process

COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"


class Pods:
    """The pods of one template. Each gets a machine for itself, another one each time it is started."""

    def __init__(
        self,
        job: Job,
        lan: Lan,
        template: Mapping[str, Any],
        *,
        name: str,
        subdomain: str,
        env: Mapping[str, str] | None = None,
        instead: Mapping[str, str],
    ) -> None:
        """Take a pod template.

        Args:
            job: whose processes the pods are.
            lan: where the machines are.
            template: the template, with one container.
            name: a pod's host name without its index.
            subdomain: the headless service's name.
            env: variables that a controller adds; `{index}` is the pod's.
            instead: parts of the command that a test has to replace, and by what. All must occur.
        """
        (self._container,) = template["spec"]["containers"]
        self._job, self._lan, self._name, self._subdomain = job, lan, name, subdomain
        self._env = env or {}
        self._instead = instead
        self._started = 0

    def start(self, index: int, *, known: bool = True) -> Pod:
        """Start the pod of this index on a new machine.

        ``known``: name servers have its address already. If not, they have that of an earlier pod, or none.
        """
        hostname = f"{self._name}-{index}"
        full = f"{hostname}.{self._subdomain}"
        machine = self._lan.machine(full, known=known)
        env = {name: value.format(index=index) for name, value in self._env.items()}
        for variable in self._container.get("env", []):
            env[variable["name"]] = env.get(variable["name"], variable["value"])
        words = [*self._container.get("command", []), *self._container.get("args", [])]
        for part, new in self._instead.items():
            assert any(part in word for word in words), f"`{part}` is not in the manifest"
            words = [word.replace(part, new) for word in words]
        command = [_expanded(word, env) for word in words]
        env |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "ELASTIC_RS_LOG": "info"}
        self._started += 1
        process = self._job.start(
            machine.container(*command, name=hostname), name=f"{hostname}-{self._started}", env=env
        )
        return Pod(self._lan, machine, full, process)


class Pod:
    """A running pod."""

    def __init__(self, lan: Lan, machine: Machine, name: str, process: Process) -> None:
        self.process = process
        self._lan, self._machine, self._full = lan, machine, name

    def publish(self) -> None:
        """Let name servers have the pod's address."""
        self._lan.name(self._full, self._machine)

    def lose(self) -> None:
        """Let the node that the pod runs on fail."""
        self._lan.lose(self._machine, self.process.pid)

    def terminate(self) -> None:
        """Send SIGTERM to process 1, as the kubelet does when the pod is deleted."""
        # The job's process is unshare. Its child is process 1 in the container.
        (child,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGTERM)


def _expanded(word: str, env: Mapping[str, str]) -> str:
    # A variable that there is not stays as it is written.
    return re.sub(r"\$\((\w+)\)", lambda found: env.get(found[1], found[0]), word)
