"""The flags of ``elastic-run``: torchrun's, with the same spellings, defaults, choices and ``PET_*`` variables.

Nothing here needs torch.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Collection, Mapping, Sequence

from elastic_rs._exit_codes import Run, in_help
from elastic_rs.run._command_line import (
    CommandLine,
    Help,
    Parser,
    PrintCompletion,
    Section,
    comma_separated,
    restarts,
    seconds,
    shtab_if_installed,
    variables_without_effect,
    whole,
)
from elastic_rs.run._host_flags import add_host_flags
from elastic_rs.run._usage import PROG, UsageError

logger = logging.getLogger("elastic_rs.run")

NO_SCRIPTS = {"--nproc-per-node", "--nnodes", "--standalone"}
"""Flags that mean a launcher wherever they stand; and those that begin with `--rdzv-`."""

USAGE = f"{PROG} [flags] SCRIPT [the script's arguments]"

DESCRIPTION = """\
Start the workers of a PyTorch job on this node and keep them going. The command line is torchrun's; the agent does not
import torch."""

EPILOG = """\
examples:
  two workers on this machine
    elastic-run --standalone --nproc-per-node=2 train.py --lr 0.1
  one worker per GPU, on 2 to 4 nodes: the same command on every node, with the address of one of them
    elastic-run --nnodes=2:4 --nproc-per-node=gpu --max-restarts=3 \\
        --rdzv-backend=c10d --rdzv-endpoint=node0:29400 --rdzv-id=job42 train.py
  the same over an etcd cluster, where no node matters
    elastic-run --nnodes=2:4 --nproc-per-node=gpu --rdzv-backend=rust-etcd \\
        --rdzv-endpoint=etcd0:2379,etcd1:2379,etcd2:2379 --rdzv-id=job42 train.py
  from one place: agents on two hosts by ssh, or on those that a script prints, which may change
    elastic-run -H node1:8,node2:8 train.py
    elastic-run --host-discovery-script=./hosts.sh --min-np=8 --max-restarts=10 train.py
  fixed ranks, on the second of two nodes
    elastic-run --nnodes=2 --node-rank=1 --master-addr=node0 --master-port=29500 train.py
  check this node, and whether it finds the others
    elastic-run doctor
    elastic-run doctor --nnodes=2:4 --rdzv-backend=c10d --rdzv-endpoint=node0:29400
  a program that is not a Python script, with its output on the console and in files
    elastic-run --standalone --nproc-per-node=8 --no-python --tee=3 --log-dir=logs ./train --steps 100

Each flag may be written with _ instead of -, and most may be set by a variable: PET_NNODES=2 for --nnodes=2. A flag on
the command line overrides its variable.

""" + in_help(Run, **{"128 + n": "ended by signal n: 143 for SIGTERM, 130 for SIGINT"})


def parse(args: Sequence[str], made: Parser | None = None, *, needs_script: bool = True) -> argparse.Namespace:
    """Parse the command line. ``--help`` ends the process.

    The result also has ``variables``: the ``PET_*`` variables that are in effect, and the flags that each sets.

    Raises:
        UsageError: the command line or a ``PET_*`` variable is not valid.
    """
    made = made or parser()
    line = made.split(args)
    given = {flag.dest for flag, _ in line.flags}
    set_by = {flag.variable: list(flag.names) for flag in made.all() if flag.variable and flag.dest not in given}
    variables = {name: flags for name, flags in set_by.items() if name in made.env}
    try:
        known = made.parse_args(line.words())
    except UsageError as error:
        error.name_variables(variables)
        raise
    if line.script is None and needs_script:
        raise UsageError(f"no script is given; it comes after the flags: {made.usage}")
    known.signals_named = "signals_to_handle" in given or "PET_SIGNALS_TO_HANDLE" in variables
    known.training_script, known.training_script_args, known.variables = line.script, line.rest, variables
    return known


def split(args: Sequence[str]) -> CommandLine:
    return parser().split(args)


def warn_of_variables() -> None:
    if any(name.startswith("PET_") for name in os.environ):
        for text in variables_without_effect(parser()):
            logger.warning("%s", text)


def misplaced(args: argparse.Namespace) -> str:
    """Return a warning if a flag that no script has stands behind the script, which then gets it. Empty: none does."""
    for at, word in enumerate(args.training_script_args):
        name = word.partition("=")[0].replace("_", "-")
        if word == "--":
            break
        if name in NO_SCRIPTS or name.startswith("--rdzv-"):
            follows = args.training_script_args[at + 1 : at + 2]
            value = [] if "=" in word or name == "--standalone" or not follows else follows
            words = " ".join([word, *value])
            return (
                f"`{words}` stands behind `{args.training_script}`, so the script gets it and {PROG} does not: "
                f"{PROG} {words} {args.training_script}"
            )
    return ""


def parser(
    usage: str = USAGE,
    description: str = DESCRIPTION,
    epilog: str = EPILOG,
    shown: Collection[str] | None = None,
    env: Mapping[str, str] = os.environ,
) -> Parser:
    """Make the parser. Defaults come from the ``PET_*`` variables in ``env`` as they are now."""
    made = Parser(
        shown=shown, env=env, prog=PROG, usage=usage, description=description, epilog=epilog, formatter_class=Help
    )
    _add_size(made.section("size of the job"))
    add_host_flags(made.section("hosts on which this command starts agents itself, by ssh"))
    _add_rendezvous(made.section("how nodes find each other"))
    _add_static(made.section("fixed ranks (--rdzv-backend=static, the default)"))
    _add_script(made.section("what to run"))
    _add_endings(made.section("failures, restarts and signals"))
    _add_logs(made.section("output of workers"))
    _add_devices(made.section("devices"))
    _add_others(made.section("compatibility"))
    # For help and completions. `split` has found both, and argparse reads neither.
    for name, metavar, count, text in (
        ("training_script", "SCRIPT", "?", "the script, module or program that every worker runs"),
        ("training_script_args", "...", "*", "its arguments"),
    ):
        made.add_argument(name, metavar=metavar, nargs=count, help=text if made.shows(name) else argparse.SUPPRESS)
    return made


def _add_size(section: Section) -> None:
    add = section.flag
    add("--nnodes", default="1:1", metavar="N|MIN:MAX", help="number of nodes, or its minimum and maximum (1)")
    add(
        "--nproc-per-node",
        default="1",
        metavar="N|gpu|auto|cpu|xpu",
        help="workers on this node: a number, or one per GPU, XPU or CPU; auto: one per accelerator if there is any, "
        "else one per CPU (1)",
    )


def _add_rendezvous(section: Section) -> None:
    add = section.flag
    switch = section.switch
    switch("--standalone", help="a job of one node, on any free port and with a random run id")
    add(
        "--rdzv-backend",
        default="static",
        help="c10d, etcd or static; c10d and etcd are what torchrun calls rust-c10d and rust-etcd, and both names work "
        "here",
    )
    add(
        "--rdzv-endpoint",
        default="",
        metavar="HOST[:PORT]",
        help="address of the node that hosts the rendezvous (port 29400), or of two to seven nodes of which one leads, "
        "HOST:PORT,...; with etcd: of its members (port 2379)",
    )
    add("--rdzv-id", default="none", metavar="ID", help="the job's name, the same on every node")
    add(
        "--rdzv-conf",
        default="",
        metavar="KEY=VALUE,...",
        help="join_timeout, last_call_timeout and other settings, listed below",
    )
    add(
        "--local-addr",
        default=None,
        metavar="ADDR",
        help="address at which other nodes reach this one, if not the one that its connection shows",
    )
    switch(
        "--store-tunnel",
        own=True,
        help="workers reach the store of rank 0's node through their agents, encrypted: the same as --rdzv-conf "
        "store_tunnel=1",
    )


def _add_static(section: Section) -> None:
    add = section.flag
    add("--node-rank", type=whole, default=0, metavar="RANK", help="rank of this node, from 0 (0)")
    add("--master-addr", default="127.0.0.1", metavar="ADDR", help="address of node 0 (127.0.0.1)")
    add("--master-port", type=whole, default=None, metavar="PORT", help="a free port on node 0 (29500)")


def _add_script(section: Section) -> None:
    switch = section.switch
    switch("--module", short="-m", help="SCRIPT is a module, run as by python -m")
    switch("--no-python", help="SCRIPT is a program, run as it is")
    switch("--run-path", help="SCRIPT is an absolute path, run by runpy.run_path; overrides --no-python")


def _add_endings(section: Section) -> None:
    add = section.flag
    add(
        "--max-restarts",
        type=restarts,
        default=0,
        metavar="N[/WINDOW]",
        help="restarts after failures, on all nodes together; 3/1h: as many within an hour, which come back, and end "
        "when they bring nothing: N, and --rdzv-conf restart_window=3600 (0)",
    )
    add(
        "--no-restart-on",
        own=True,
        default=None,
        metavar="CODE,...",
        help="exit codes of workers, 1 to 255, after which nothing is restarted: the job ends. The same on all nodes: "
        "as --rdzv-conf no_restart_on=CODE+... (none)",
    )
    add(
        "--exit-code",
        own=True,
        choices=["worker", "class"],
        default=None,
        help="what this node's exit code says when the job has failed: how the first failed worker ended, or what to "
        "do next: the same as --rdzv-conf exit_code=... (1)",
    )
    add(
        "--shutdown-timeout",
        type=whole,
        default=None,
        metavar="SECONDS",
        help="time between the signal that stops workers and SIGKILL (TORCH_ELASTIC_SHUTDOWN_TIMEOUT, or 30)",
    )
    add(
        "--first-signal",
        own=True,
        choices=["leader", "group"],
        default=None,
        help="who gets the signal that stops workers: the process that was started, and what it has started only after "
        "its end, or all of them at once: the same as --rdzv-conf first_signal=... (leader for a script, else group)",
    )
    add(
        "--signals-to-handle",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        metavar="SIGNAL,...",
        help="signals that end this node's agent, which passes them on to its workers (%(default)s; under nohup "
        "without SIGHUP)",
    )
    add(
        "--forward-signals",
        own=True,
        default=None,
        metavar="SIGNAL,...",
        help="signals that this node's agent passes on to its workers, to whom --first-signal says, and that end "
        "nothing: USR1,USR2 (ELASTIC_RS_FORWARD_SIGNALS, or none, and any other signal ends the agent)",
    )
    add(
        "--preempt-notice",
        own=True,
        default=None,
        metavar="SOURCE",
        help="what says that this machine is about to be taken away: signal:USR1@120 (120 s are left), file:PATH, aws, "
        "gcp, azure, or what a shell runs until it writes how many seconds are left; the others go on without this "
        "node (ELASTIC_RS_PREEMPT_NOTICE, or nothing)",
    )
    add(
        "--preempt-deadline",
        own=True,
        default=None,
        metavar="SECONDS",
        help="how much time a notice leaves that does not say it (ELASTIC_RS_PREEMPT_DEADLINE, or 30)",
    )
    add(
        "--preempt-signal",
        own=True,
        default=None,
        metavar="SIGNAL",
        help="what the workers of all nodes get at a notice, to save: USR1 (ELASTIC_RS_PREEMPT_SIGNAL, or nothing)",
    )
    add(
        "--health-check",
        own=True,
        default=None,
        metavar="COMMAND",
        help="what is checked before this machine joins, and after a failure of a worker of its own: builtin (GPUs, "
        "memory, room for files, links), or a command that a shell runs as well: 0 is well, 1 is ill, anything else "
        "says nothing; an ill machine is in no world (ELASTIC_RS_HEALTH_CHECK, or nothing)",
    )
    add(
        "--in-place",
        own=True,
        choices=["off", "gloo", "nccl"],
        default=None,
        help="which process groups let workers survive a change of the world, if the program uses elastic_rs.elastic: "
        "the same as --rdzv-conf in_place=... (gloo)",
    )
    add(
        "--standby",
        own=True,
        default=None,
        metavar="N",
        help="how many processes of this node run the script up to elastic_rs.elastic.run, and take the place of a "
        "worker that fails, at most one for each worker; each takes the memory of a worker: the same as --rdzv-conf "
        "standby=... (0)",
    )
    add(
        "--hang",
        own=True,
        choices=["report", "restart", "off"],
        default=None,
        help="what happens when the training hangs: it is said which rank the others wait for, and its workers are "
        "restarted, or nobody looks: the same as --rdzv-conf hang=... (report)",
    )
    add(
        "--hang-timeout",
        own=True,
        default=None,
        metavar="SECONDS",
        help="after how long without progress it hangs: the same as --rdzv-conf hang_timeout=... (learnt from its "
        "steps)",
    )
    add(
        "--on-hang",
        own=True,
        default=None,
        metavar="COMMAND",
        help="what a shell runs on rank 0's node once a hang is found, with the lines about it as standard input "
        "(ELASTIC_RS_ON_HANG, or nothing)",
    )
    add(
        "--progress-log",
        own=True,
        default=None,
        metavar="REGEX",
        help="lines of workers that match show progress, as steps do; needs --tee (ELASTIC_RS_PROGRESS_LOG, or none)",
    )
    section.switch(
        "--warm-start",
        own=True,
        instead="--warm-modules",
        help="fork workers from a process that has imported torch, or the modules of --warm-modules",
    )
    add(
        "--warm-modules",
        own=True,
        metavar="MODULE,...",
        help="what that process imports; means --warm-start too (torch)",
    )


def _add_logs(section: Section) -> None:
    add = section.flag
    add(
        "--log-dir",
        default=None,
        metavar="FOLDER",
        help="folder of log files (a temporary folder; /dev/null: no files)",
    )
    add(
        "--redirects",
        short="-r",
        default="0",
        metavar="STREAMS",
        help="streams that go to files: 1 stdout, 2 stderr, 3 both, or by local rank: 0:3,1:1 (0)",
    )
    add(
        "--tee",
        short="-t",
        default="0",
        metavar="STREAMS",
        help="streams that go to files and the console, as --redirects (0)",
    )
    add("--local-ranks-filter", default="", metavar="RANK,...", help="local ranks that the console shows (all)")
    add(
        "--ranks-filter",
        own=True,
        default="",
        metavar="RANK,...",
        help="ranks in the whole job that consoles show: 0 on all nodes leaves the output of rank 0 alone (all)",
    )
    for stream in ("stdout", "stderr"):
        add(
            f"--duplicate-{stream}-filters",
            type=comma_separated,
            default=[],
            metavar="TEXT,...",
            help=f"copy teed lines of {stream} that contain one of these texts to filtered_{stream}.log; ,, is a comma",
        )
    add(
        "--log-line-prefix-template",
        default="",
        metavar="TEXT",
        help="prefix of each teed line, with ${role_name}, ${rank}, ${local_rank} and ${hostname} "
        "([${role_name}${local_rank}]:)",
    )


def _add_devices(section: Section) -> None:
    section.flag(
        "--omp-threads",
        own=True,
        metavar="auto|N",
        help="each worker's OMP_NUM_THREADS; auto: the CPUs that this node may use, divided by its workers (1 if there "
        "are several workers and the variable is not set)",
    )
    section.switch("--virtual-local-rank", help="each worker sees only its own GPU, as device 0, and has LOCAL_RANK 0")
    section.plain(
        "--numa-binding",
        choices=["node", "socket", "exclusive", "core-complex"],
        default=None,
        help="bind each worker to CPUs near its GPU",
    )


def _add_others(section: Section) -> None:
    add = section.flag
    add("--role", default="default", help="the workers' role, shown in prefixes and ROLE_NAME (default)")
    add("--monitor-interval", type=seconds, default=0.1, metavar="SECONDS", help="no effect: nothing polls")
    add(
        "--start-method",
        default="spawn",
        choices=["spawn", "fork", "forkserver"],
        help="no effect: workers are programs",
    )
    add("--event-log-handler", default="null", metavar="NAME", help="event handler (null; any other requires torch)")
    section.plain("--logs-specs", default=None, metavar="NAME", help="plug-in of torchrun.logs_specs; requires torch")
    shtab = shtab_if_installed()
    shells = shtab.SUPPORTED_SHELLS if shtab else ["bash", "zsh", "tcsh"]
    section.plain(
        "--print-completion", action=PrintCompletion, choices=shells, help="print a completion script; requires shtab"
    )
