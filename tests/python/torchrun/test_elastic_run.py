"""``elastic-run`` compared with ``torchrun --rdzv-backend=rust-c10d``, and both in one job.

The tests of agents run with ``elastic-run`` too: see the fixture ``agent``.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.procs import Job

from .conftest import FAMILY, SCRIPTS, Start, older_lacks

pytestmark = [pytest.mark.torchrun]

ACCOUNT = SCRIPTS / "account.py"
LAUNCHERS = {"torchrun": "torch.distributed.run", "elastic-run": "elastic_rs.run"}
# Variables that differ from run to run.
DIFFER = ("MASTER_PORT", "TORCHELASTIC_ERROR_FILE")
# Variables of ours. The first two are not those of functions, which torchrun's workers are with `--run-path`.
OURS = ("ELASTIC_RS_AGENT", "ELASTIC_RS_IN_PLACE", "ELASTIC_RS_STEPS", "ELASTIC_RS_WATCH")


def flat(result: dict[str, Any]) -> list[str]:
    """Return one line for each fact, so that a failing comparison shows the differences."""
    facts = {f"{file} {name}": value for file, account in result.items() for name, value in account.items()}
    for file, account in result.items():
        facts |= {f"{file} env {name}": value for name, value in account["env"].items()}
        del facts[f"{file} env"]
    return sorted(f"{name}: {value}" for name, value in facts.items())


class Run:
    """One run of a launcher, with its results."""

    def __init__(
        self, job: Job, launcher: str, folder: Path, *args: str | Path, env: dict[str, str] | None = None
    ) -> None:
        self.folder = folder / launcher
        self.accounts, self.logs = self.folder / "accounts", self.folder / "logs"
        self.accounts.mkdir(parents=True)
        own = [str(arg).replace("ACCOUNTS", str(self.accounts)).replace("LOGS", str(self.logs)) for arg in args]
        command = [sys.executable, "-m", LAUNCHERS[launcher], "--rdzv-backend=rust-c10d", "--rdzv-id=job", *own]
        self.process = job.start(command, name=launcher, env=env)
        self.code = self.process.wait()

    def read_accounts(self) -> dict[str, Any]:
        """Return the workers' accounts, without values that differ from run to run."""
        result = {}
        for file in sorted(self.accounts.glob("*.json")):
            account = json.loads(file.read_text())
            account["argv"] = [arg.replace(str(self.accounts), "ACCOUNTS") for arg in account["argv"]]
            for name in OURS:
                account["env"].pop(name, None)
            for name in DIFFER:
                account["env"][name] = re.sub(r"[0-9]+$", "N", self.tidy(account["env"][name]))
            result[file.name] = account
        return result

    def tidy(self, text: str) -> str:
        """Replace parts of a text that differ from run to run."""
        text = text.replace(str(self.logs), "LOGS").replace(str(self.accounts), "ACCOUNTS")
        text = re.sub(r"torchelastic_\w{8}", "TEMPORARY", text)
        return re.sub(rf"job_(?:{re.escape(os.uname().nodename)}_)?\w{{8}}\b", "job_RANDOM", text)

    def files(self) -> dict[str, list[str]]:
        """Return the logs: paths, and sorted lines, as those of workers may mix. Of events only the path."""
        found = [file for file in sorted(self.logs.rglob("*")) if file.is_file()]
        read = ((file, "" if file.suffix == ".jsonl" else file.read_text()) for file in found)
        texts = ((file, self.tidy(re.sub("[0-9]{2,}", "N", text))) for file, text in read)
        return {self.tidy(str(file)): sorted(text.splitlines()) for file, text in texts}

    def shown(self) -> list[str]:
        """Return the workers' lines on the console."""
        return sorted(line for line in self.process.lines if re.search(r"(out|err) of \d", line))

    def report(self) -> str:
        """Return the final report, without times, process ids and the width of its frame."""
        # The thread that logs may be later than the report.
        lines = [line for line in self.process.lines if not line.startswith("[elastic_rs]")]
        text = self.tidy("\n".join(lines))
        text = text[text.index("torch.distributed.elastic.multiprocessing.errors.ChildFailedError:") :]
        text = re.sub(r"time      : \S+", "time      : T", text)
        text = re.sub(r"\(pid: \d+\)|PID \d+|:\d+\)", "PID", text)
        return re.sub(r"([=-])\1{20,}", r"\1\1", text)


Both = Callable[..., list[Run]]


@pytest.fixture
def both(job: Job, tmp_path: Path) -> Both:
    older_lacks("--virtual-local-rank", "--duplicate-stdout-filters", "--signals-to-handle", "--shutdown-timeout")

    def run(*args: str | Path, env: dict[str, str] | None = None) -> list[Run]:
        runs = [Run(job, launcher, tmp_path, *args, env=env) for launcher in LAUNCHERS]
        assert runs[0].code == runs[1].code
        return runs

    return run


@pytest.mark.cold
def test_workers_get_the_same(both: Both) -> None:
    flags = ["--nproc-per-node=2", "--role=trainer", "--max-restarts=2"]
    first, second = both(*flags, ACCOUNT, "ACCOUNTS", "$$1 ${local_rank}", "-x")
    assert first.code == 0
    assert set(first.read_accounts()) == {"0.json", "1.json"}
    assert first.read_accounts()["1.json"]["argv"] == ["ACCOUNTS", "$1 1", "-x"]
    assert first.read_accounts() == second.read_accounts()


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["--virtual-local-rank", "--nproc-per-node=2"], marks=pytest.mark.long),
        pytest.param(
            ["--no-python", "--nproc-per-node=1", "--signals-to-handle=SIGTERM,SIGUSR1"], marks=pytest.mark.long
        ),
        pytest.param(["--run-path", "--nproc-per-node=1"], marks=pytest.mark.long),
        ["--nproc-per-node=2", "--local-ranks-filter=1"],
    ],
    ids=lambda flags: flags[0],
)
def test_workers_get_the_same_with_other_flags(both: Both, flags: list[str]) -> None:
    program = [sys.executable, ACCOUNT] if "--no-python" in flags else [ACCOUNT]
    env = {"CUDA_VISIBLE_DEVICES": "4, 5", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    first, second = both(*flags, *program, "ACCOUNTS", env=env)
    assert first.code == 0
    accounts = [run.read_accounts() for run in (first, second)]
    if "--run-path" in flags:
        # torchrun runs a function in a process of `multiprocessing`, elastic-run a program.
        for account in (account for result in accounts for account in result.values()):
            del account["flags"], account["stdin"], account["SIGINT"]
    assert flat(accounts[0]) == flat(accounts[1])
    assert first.shown() == second.shown()


def test_logs_have_the_same_layout(both: Both) -> None:
    older_lacks("--log-line-prefix-template")
    flags = ["--nproc-per-node=3", "--log-dir=LOGS", "-r", "0:1,1:3", "-t", "0:2,2:3", "--local-ranks-filter=0,2"]
    filters = ["--duplicate-stdout-filters=out of 2,,nothing", "--duplicate-stderr-filters=err of 0,err of 2"]
    prefix = "--log-line-prefix-template=<${role_name} $rank/${local_rank} ${hostname} $$ ${other}>"
    first, second = both(*flags, *filters, prefix, ACCOUNT, "ACCOUNTS")
    assert first.code == 0
    assert first.read_accounts() == second.read_accounts()
    assert first.files() == second.files()
    assert first.files()["LOGS/job_RANDOM/attempt_0/1/stderr.log"] == ["err of 1"]
    assert first.files()["LOGS/job_RANDOM/attempt_0/filtered_stderr.log"]
    assert first.shown() == second.shown()
    assert any(line.startswith("<default 2/2 ") and line.endswith("$ ${other}>out of 2") for line in second.shown())


def test_without_a_log_folder_there_are_no_log_files(both: Both) -> None:
    first, second = both("--log-dir=/dev/null", "--tee=3", ACCOUNT, "ACCOUNTS")
    assert first.code == 0
    assert first.read_accounts() == second.read_accounts()
    assert first.shown() == second.shown() == ["err of 0", "out of 0"]


@pytest.mark.parametrize("how", ["--exit=1:7", "--raise=0", pytest.param("--record=1", marks=pytest.mark.long)])
def test_a_failure_is_reported_alike(both: Both, how: str, tmp_path: Path) -> None:
    own = tmp_path / "error.json"
    first, second = both(
        "--nproc-per-node=2", "--log-dir=LOGS", ACCOUNT, "ACCOUNTS", how, env={"TORCHELASTIC_ERROR_FILE": str(own)}
    )
    assert first.code == 1
    assert first.report() == second.report()
    assert {name: text for name, text in first.files().items() if not name.endswith("error.json")} == {
        name: text for name, text in second.files().items() if not name.endswith("error.json")
    }
    # The failed worker's record is copied to the launcher's own error file.
    if how == "--record=1":
        message = json.loads(own.read_text())["message"]
        assert message["message"] == "ValueError: the sky fell"
        assert message["errorCode"] == 1


def test_an_exception_that_run_path_meets_is_recorded_alike(both: Both, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise ValueError('the sky fell')\n")
    first, second = both("--run-path", "--log-dir=LOGS", script)
    assert first.code == 1
    for run in (first, second):
        (recorded,) = run.logs.rglob("error.json")
        assert json.loads(recorded.read_text())["message"]["message"] == "ValueError: the sky fell"
        assert "ValueError: the sky fell" in run.report()


@pytest.mark.parametrize("flags", [[], ["--warm-modules=json"]], ids=["cold", "warm"])
def test_run_path_finds_the_package_but_the_script_does_not_see_its_helper(
    job: Job, tmp_path: Path, flags: list[str]
) -> None:
    (tmp_path / "elastic_rs").mkdir()
    (tmp_path / "elastic_rs" / "__init__.py").write_text("raise ValueError('not that one')\n")
    script = tmp_path / "script.py"
    script.write_text(
        # In one piece, since the agent writes into the same file.
        "import importlib.util, sys\nprint(f'FOUND {importlib.util.find_spec(\"_path\")} {sys.argv[1:]} {__name__}')\n"
    )
    program = Path(sys.executable).with_name("elastic-run")
    node = job.start(
        ["env", "-C", str(tmp_path), str(program), "--standalone", *flags, "--run-path", str(script), "x"],
        env={"ELASTIC_RS_LOG": "info"},
    )
    assert node.wait() == 0
    node.line(re.escape("FOUND None ['x'] __main__"))
    # With --run-path, `__main__` is not the script while the template imports modules.
    assert bool(flags) == any("have no effect: with --run-path" in line for line in node.lines)


def test_a_master_address_of_another_machine_is_an_error(job: Job) -> None:
    # An address for documentation, which no machine has.
    flags = ["--master-addr=192.0.2.7", "--nnodes=2", "--rdzv-conf=join_timeout=1", "--no-python", "true"]
    node = job.start([sys.executable, "-m", "elastic_rs.run", *flags])
    assert node.wait() == 1
    node.line("`192.0.2.7` must be an address of this machine, which has node rank 0")


@pytest.mark.parametrize("by", [("rust", "run"), ("run", "rust")], ids=["torchrun hosts", "elastic-run hosts"])
@pytest.mark.parametrize("agent", ["run"], indirect=True)
def test_both_in_one_job(start: Start, job: Job, tmp_path: Path, by: tuple[str, str]) -> None:
    done = tmp_path / "done"
    host = start(2, "--until", done, nnodes="1:2", nproc=2, by=by[0])
    host.line("this process hosts the coordinator")
    other = start(3, "--until", done, nnodes="1:2", nproc=2, by=by[1])
    nodes = [host, other]
    masters = {node.line(r"SUM rank=\d+ world=4 master=(\S+)")[1] for node in nodes}
    assert len(masters) == 1
    # A worker of each node fails in turn. Both nodes restart their workers, with another store for all.
    for node in nodes:
        os.kill(max(job.workers(node).values()), signal.SIGKILL)
        known = "|".join(map(re.escape, masters))
        again = {each.line(rf"SUM rank=\d+ world=4 master=(?!(?:{known})$)(\S+)")[1] for each in nodes}
        assert len(again) == 1
        masters |= again
    # A node is lost, and another one joins.
    mark = host.mark()
    other.signal(signal.SIGKILL)
    host.line("SUM rank=. world=2", since=mark)
    mark = host.mark()
    newcomer = start(3, "--until", done, nnodes="1:2", nproc=2, by=by[1])
    for node in (host, newcomer):
        node.line("SUM rank=. world=4", since=mark if node is host else 0)
    done.touch()
    assert [node.wait() for node in (host, newcomer)] == [0, 0]


@pytest.mark.parametrize("agent", ["run"], indirect=True)
def test_both_name_the_first_failure_of_their_job(start: Start) -> None:
    options = {"nnodes": "2", "restarts": 0, "script": FAMILY}
    nodes = [start(number, "--raise=1", by=by, **options) for number, by in ((2, "rust"), (3, "run"))]
    assert [node.wait() for node in nodes] == [1, 1]
    for node in nodes:
        text = "\n".join(node.lines)
        assert "ValueError: the sky fell" in text[text.index("Root Cause") :]


# Flags that need PyTorch.


def test_flags_that_need_torch_are_left_to_torchrun_with_our_agent(job: Job, tmp_path: Path) -> None:
    older_lacks("--event-log-handler")
    (tmp_path / "done").touch()
    flags = ["--standalone", "--event-log-handler=console", "--nproc-per-node=2"]
    command = [sys.executable, "-m", "elastic_rs.run", *flags, str(FAMILY), "--until", str(tmp_path / "done")]
    node = job.start(command, env={"ELASTIC_RS_LOG": "info"})
    assert node.wait() == 0
    text = "\n".join(node.lines)
    assert "torchelastic.worker.status.SUCCEEDED" in text
    assert "this process hosts the coordinator" in text
    assert len([line for line in node.lines if line.startswith("WORKER")]) == 2


def test_it_works_without_torch_except_for_flags_that_need_it(job: Job, tmp_path: Path) -> None:
    # This module stands for a torch that is not installed.
    (tmp_path / "torch.py").write_text("raise ImportError('not here')\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "elastic_rs.run", "--standalone", "--no-python"]
    assert subprocess.run([*command, "true"], env=env, check=False, timeout=60).returncode == 0
    result = subprocess.run(
        [*command, "--logs-specs=x", "true"], env=env, check=False, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    assert "elastic-run: error: --logs-specs needs PyTorch, which cannot be imported: not here" in result.stderr
    del job


@pytest.mark.parametrize("run_id", ["x" * 1024, "team/" * 60 + "\u00e4"], ids=["1024 bytes", "slashes"])
def test_a_run_id_that_no_file_may_be_called_has_workers_and_logs(job: Job, tmp_path: Path, run_id: str) -> None:
    for launcher, module in LAUNCHERS.items():
        logs = tmp_path / launcher
        command = [sys.executable, "-m", module, "--rdzv-backend=rust-c10d", f"--rdzv-id={run_id}", f"--log-dir={logs}"]
        code = "import os; print('id', os.environ['TORCHELASTIC_RUN_ID'])"
        process = job.start([*command, "--tee=3", "--no-python", sys.executable, "-c", code], name=launcher)
        assert process.wait() == 0
        assert any(line.endswith(f"id {run_id}") for line in process.lines), "workers get the run id unchanged"
        (folder,) = logs.iterdir()
        (log,) = folder.rglob("stdout.log")
        assert folder.name.startswith(run_id[:30].replace("/", "_"))
        assert run_id in log.read_text()


def test_pytorchs_agent_with_a_long_run_id_fails_with_a_hint(job: Job) -> None:
    flags = ["--rdzv-backend=rust-c10d", f"--rdzv-id={'x' * 1024}", "--rdzv-conf=agent=torch"]
    process = job.torchrun(*flags, "--no-python", "true")
    assert process.wait() == 1
    said = next(i for i, line in enumerate(process.lines) if "starts no worker with this run id" in line)
    assert "Give a shorter --rdzv-id" in process.lines[said]
    assert "File name too long" in process.tail()
