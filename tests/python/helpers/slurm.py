"""A Slurm of real daemons: slurmctld on one machine, slurmd on the others, and munged for all of them.

Every daemon is process 1 of a container (``helpers.machines``), or its child. So a node that is lost takes everything
on it along.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import slurm_files

from .procs import LIMIT_S, MARKER, Job, Process

if TYPE_CHECKING:
    from .machines import Lan, Machine

# Process 1 has to reap orphans, which steps of Slurm leave behind. slurmd itself does not.
INIT = ["sh", "-c", 'cd "$0" && "$@"; exit $?']
# A node is down after 5 s of silence. A job that is requeued waits until its credentials have expired.
CONFIGURATION = """
ClusterName=test
SlurmctldHost=login({login})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
{plugins}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/linear
MpiDefault=none
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,sched_min_interval=0
SlurmdTimeout=5
SlurmctldTimeout=30
MessageTimeout=5
TCPTimeout=2
KillWait=5
ReturnToService=2
RequeueExit=90,91
SlurmctldDebug=verbose
SlurmdDebug=verbose
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A cluster with these nodes."""

    def __init__(self, job: Job, lan: Lan, installed: Path, names: list[str]) -> None:
        self.job = job
        self.folder = lan.folder
        self._lan = lan
        self._installed = installed
        self._daemons: dict[str, Process] = {}
        self._env = {
            **slurm_files.libraries(installed),
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{installed}/usr/bin:{os.environ['PATH']}",
            MARKER: job.id,
        }
        self.login = lan.machine("login")
        self.machines = {name: lan.machine(name) for name in names}
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text(self._configuration())
        # Without it slurmd looks for systemd's control groups.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")

    def start(self) -> None:
        """Start all daemons, and wait until all nodes can be used."""
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
        paths = [f"--{flag}={self.folder}/munge.{ending}" for flag, ending in files.items()]
        self._start("munged", [self._program("munged"), "--foreground", "--force", "--num-threads=1", *paths])
        _until((self.folder / "munge.socket").exists, "munged listens")
        self._start("slurmctld", self._container(self.login, "slurmctld", "-D"))
        for name in self.machines:
            self.boot(name)
        _until(lambda: self._states() == {"idle"}, lambda: f"all nodes are idle: {self._states()}")

    def boot(self, name: str) -> None:
        """Start a node, or start it again."""
        machine = self.machines[name]
        machine.mend()
        stepd = self._program("slurmstepd")
        self._daemons[name] = self._start(name, self._container(machine, "slurmd", "-D", "-d", stepd))

    def lose(self, name: str) -> None:
        """Let a node fail without a word. What slurmd had on its disk is gone."""
        self._lan.lose(self.machines[name], self._daemons[name].pid)
        self._daemons[name].wait()
        shutil.rmtree(self.folder / f"spool-{name}")

    def sbatch(self, *args: str | Path, env: dict[str, str] | None = None) -> Submitted:
        output = self.folder / f"output-{len(self.job.processes)}"
        command = ["sbatch", "--parsable", f"--output={output}", f"--chdir={self.folder}", *map(str, args)]
        number = self.ask(*command, env=env).strip()
        output.touch()
        # Its lines are read as those of any other process.
        return Submitted(self, number, self._start(f"job-{number}", ["tail", "-n", "+1", "-F", str(output)]))

    def ask(self, *command: str, env: dict[str, str] | None = None) -> str:
        """Run one of Slurm's commands on the login node, and return what it printed."""
        prefix = self.login.inside()
        # The job's variables are those of sbatch.
        env = {**os.environ, **self._env, **(env or {})}
        result = subprocess.run([*prefix, *command], env=env, capture_output=True, text=True, check=False, timeout=60)
        assert result.returncode == 0, f"{shlex.join(command)}: {result.stderr}"
        return result.stdout

    def on_login(self, *command: str) -> Process:
        """Start a program on the login node."""
        return self._start("login", self.login.container(*command))

    def until_down(self, name: str) -> None:
        _until(lambda: "down" in self._states(name), f"Slurm notices that {name} is lost")

    def _states(self, name: str | None = None) -> set[str]:
        nodes = [f"--nodes={name}"] if name else []
        # `*`: silent, `#`: powering up, and so on
        return {line.rstrip("*#~%$@+") for line in self.ask("sinfo", "-h", "-o", "%T", *nodes).split()}

    def _configuration(self) -> str:
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={machine.address} CPUs=2 RealMemory=100 State=UNKNOWN"
            for name, machine in self.machines.items()
        )
        plugins = "" if self._installed == Path("/") else f"PluginDir={slurm_files.plugins(self._installed)}"
        return CONFIGURATION.format(login=self.login.address, folder=self.folder, plugins=plugins, nodes=nodes)

    def _program(self, name: str) -> str:
        return str(slurm_files.program(self._installed, name))

    def _container(self, machine: Machine, program: str, *args: str) -> list[str]:
        return machine.container(*INIT, self.folder, self._program(program), *args)

    def _start(self, name: str, command: list[str]) -> Process:
        return self.job.start(command, name=f"{name}-{len(self.job.processes)}", env=self._env)


class Submitted:
    """A job of Slurm's. Its output is a process's."""

    def __init__(self, slurm: Slurm, number: str, output: Process) -> None:
        self.number = number
        self.output = output
        self._slurm = slurm

    def field(self, name: str, element: int | None = None) -> str:
        """Return a field of `scontrol show job`, of the job or of an element of a job array."""
        number = self.number if element is None else f"{self.number}_{element}"
        result = self._slurm.ask("scontrol", "show", "job", number)
        found = re.search(rf"\b{name}=(\S*)", result)
        assert found, f"no {name} in {result}"
        return found[1]

    def until(self, state: str, element: int | None = None) -> None:
        _until(
            lambda: self.field("JobState", element) == state,
            lambda: f"job {self.number} is {state}: {self.field('JobState', element)}\n{self.output.tail()}",
        )


def _until(held: Callable[[], bool], what: str | Callable[[], str]) -> None:
    """Poll until a condition holds: Slurm's commands do not wait."""
    deadline = time.monotonic() + LIMIT_S / 2
    while not held():
        assert time.monotonic() < deadline, f"not within {LIMIT_S / 2} s: {what if isinstance(what, str) else what()}"
        time.sleep(0.2)
