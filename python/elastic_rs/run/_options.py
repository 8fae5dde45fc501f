"""What the command line of ``elastic-run`` means: checked, and with torchrun's defaults filled in.

Facts: ``config_from_args`` and ``run`` in ``torch/distributed/run.py``, ``LaunchConfig`` in
``distributed/launcher/api.py`` (2.15).
"""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from elastic_rs import _elastic_rs, _hang_options, _health_options, _python, _signal_options
from elastic_rs._elastic_rs import (
    EtcdOptions,
    LaunchOptions,
    LogOptions,
    ProgressPattern,
    RendezvousConfig,
    Streams,
)
from elastic_rs._logging import draw_run_id
from elastic_rs._numa import cpus_of
from elastic_rs.rendezvous._config import (
    DEFAULT_PORT,
    ETCD_NAMES,
    MAX_NODES,
    RUST_C10D,
    RUST_ETCD,
    check_host,
    config_of,
    parse_conf,
    parse_endpoint,
    parse_endpoints,
)
from elastic_rs.rendezvous._etcd import etcd_of
from elastic_rs.run import _path
from elastic_rs.run._devices import count_of
from elastic_rs.run._usage import CommandLineError, UsageError

logger = logging.getLogger("elastic_rs.run")

STATIC_PORT = 29500
STATIC_TIMEOUT_S = 900.0
"""How long torchrun waits for the nodes of a job with ranks by hand."""
FLAGS_OF_KEYS: dict[str, tuple[str, ...]] = {
    "in_place": ("off", "gloo", "nccl"),
    "standby": (),
    "hang": ("report", "restart", "off"),
    "hang_timeout": (),
    "exit_code": ("worker", "class"),
    "first_signal": ("leader", "group"),
    "no_restart_on": (),
}
"""Flags that mean keys of ``--rdzv-conf``, with their words; those of the others are checked as the key's."""
BACKENDS = ("c10d", RUST_C10D, *ETCD_NAMES, "static")
MAX_WORKERS = _elastic_rs.LOCAL_WORLD_SIZE_LIMIT
MAX_RESTARTS = 2**32 - 1
MAX_SECONDS = 315_360_000
"""Ten years: what the core accepts."""


@dataclass
class Rendezvous:
    """Where and how nodes meet.

    Args:
        fixed: ranks are those of ``--node-rank``, and the workers' master is this endpoint.
        etcd: nodes meet over etcd. ``host`` and ``port`` mean nothing then.
        others: the other endpoints of a list.
    """

    run_id: str
    host: str
    port: int
    nodes: tuple[int, int]
    config: RendezvousConfig
    fixed: bool = False
    etcd: EtcdOptions | None = None
    others: tuple[tuple[str, int], ...] = ()

    @property
    def endpoints(self) -> list[tuple[str, int]]:
        """All endpoints."""
        return [(self.host, self.port), *self.others]


def nodes_of(text: str) -> tuple[int, int]:
    try:
        counts = [int(count) for count in text.split(":")]
    except ValueError:
        counts = []
    if len(counts) not in {1, 2} or not 0 < counts[0] <= counts[-1] <= MAX_NODES:
        raise CommandLineError(
            f"--nnodes is `{text}`, must be a number from 1 to {MAX_NODES}, or MIN:MAX with MIN not above MAX"
        )
    return counts[0], counts[-1]


def rendezvous_of(args: argparse.Namespace) -> Rendezvous:
    """Read what says where and how nodes meet."""
    nodes = nodes_of(args.nnodes)
    if args.rdzv_backend not in BACKENDS and not args.standalone:
        raise CommandLineError(_unknown_backend(args.rdzv_backend))
    try:
        conf = parse_conf(args.rdzv_conf)
        take_flags(conf, args)
        if conf.get("in_place", "off") != "off":
            from elastic_rs.elastic._decisions import LAZY_INIT, connects_lazily

            if connects_lazily(os.environ):
                raise CommandLineError(
                    f"in_place={conf['in_place']} and {LAZY_INIT}={os.environ[LAZY_INIT]} cannot be combined: gloo "
                    "would connect in the middle of collectives, which nothing could end then when a worker fails; "
                    "unset the variable"
                )
        if args.store_tunnel:
            conf.setdefault("store_tunnel", "1")
        over_etcd = args.rdzv_backend in ETCD_NAMES and not args.standalone
        config = config_of(conf, RUST_ETCD if over_etcd else RUST_C10D)
    except ValueError as error:
        raise CommandLineError(str(error)) from None
    if args.store_tunnel and not config.store_tunnel:
        raise CommandLineError(
            f"--store-tunnel is given, and --rdzv-conf says store_tunnel={conf['store_tunnel']}: give one of them"
        )
    if not config.wants_agent and why_torch(args) is None:
        raise CommandLineError(
            "--rdzv-conf agent is `torch`, must be `rust` here: torchrun can run PyTorch's agent, this cannot"
        )
    if is_alone(args, nodes):
        if nodes[0] > 1:
            raise CommandLineError(
                f"--standalone is given and --nnodes is `{args.nnodes}`, must be 1: others cannot find this node"
            )
        return Rendezvous(draw_run_id(), "localhost", 0, nodes, config)
    if not args.rdzv_id:
        raise CommandLineError("--rdzv-id is empty, must be the job's name, the same on every node")
    run_id = _utf8("--rdzv-id", args.rdzv_id)
    try:
        _elastic_rs.validate_run_id(run_id)
    except ValueError as error:
        raise CommandLineError(f"--rdzv-id: {error}") from None
    if args.rdzv_backend == "static":
        if nodes[0] < nodes[1]:
            logger.warning(
                "--nnodes is `%s`, and --rdzv-backend=static, the default, has no range: the job begins with all %d "
                "nodes, as with torchrun; --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT begins with %d or more",
                args.nnodes,
                nodes[1],
                nodes[0],
            )
        if not {"timeout", "join_timeout"} & conf.keys():
            config = config.replace(join_timeout=STATIC_TIMEOUT_S)
        return _static(args, nodes[1], config)
    if over_etcd:
        try:
            etcd = etcd_of(args.rdzv_endpoint, config, nodes[1])
        except ValueError as error:
            raise CommandLineError(str(error)) from None
        return Rendezvous(run_id, "", 0, nodes, config, etcd=etcd)
    # Where nobody else has to find it any port will do; else a second job of one node would meet the first.
    any_port = not args.rdzv_endpoint and nodes[1] == 1 and config.is_host is not False
    try:
        endpoints = parse_endpoints(args.rdzv_endpoint, 0 if any_port else DEFAULT_PORT, config)
    except ValueError as error:
        raise CommandLineError(f"--rdzv-endpoint: {error}") from None
    return Rendezvous(args.rdzv_id, *endpoints[0], nodes, config, others=tuple(endpoints[1:]))


def keys_by_flags(args: argparse.Namespace) -> dict[str, str]:
    """Return the keys of ``--rdzv-conf`` that are given by flags of their own, as the keys' values are written."""
    flags = {key: getattr(args, key) for key in FLAGS_OF_KEYS}
    # PyTorch splits `--rdzv-conf` at commas.
    return {key: given.replace(",", "+") for key, given in flags.items() if given is not None}


def take_flags(conf: dict[str, str], args: argparse.Namespace) -> None:
    """Add the keys that are given by flags of their own to those of ``--rdzv-conf``.

    Raises:
        CommandLineError: a key has another value than its flag, or the flag has none of its words.
    """
    for key, given in keys_by_flags(args).items():
        flag, words = "--" + key.replace("_", "-"), FLAGS_OF_KEYS[key]
        if words and given not in words:  # from its variable, which argparse does not check
            raise CommandLineError(f"{flag} is `{given}`, must be one of {', '.join(words)}")
        if conf.setdefault(key, given) != given:
            raise CommandLineError(f"{flag} is `{given}`, and --rdzv-conf says {key}={conf[key]}: give one of them")
    _, window = restarts_of(args)
    if window is not None and conf.setdefault("restart_window", window) != window:
        raise CommandLineError(
            f"--max-restarts says within {window} s, and --rdzv-conf restart_window={conf['restart_window']}: give one "
            "of them"
        )


def is_alone(args: argparse.Namespace, nodes: tuple[int, int]) -> bool:
    """Whether nobody else is to find this node: any free port will do, and nobody needs to know the run's id."""
    static = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None
    return args.standalone or (static and nodes[1] == 1)


def _static(args: argparse.Namespace, count: int, config: RendezvousConfig) -> Rendezvous:
    # torchrun takes the most for the number of nodes.
    rank = args.node_rank
    if not 0 <= rank < count:
        raise CommandLineError(
            f"--node-rank is `{rank}`, must be from 0 to {count - 1}, since --nnodes is `{args.nnodes}`"
        )
    master_port = STATIC_PORT if args.master_port is None else args.master_port
    # An address in a flag of its own needs no brackets.
    is_bare_ipv6 = args.master_addr.count(":") > 1 and "[" not in args.master_addr.partition(":")[0]
    master_addr = f"[{args.master_addr}]" if is_bare_ipv6 else args.master_addr
    endpoint = args.rdzv_endpoint or f"{master_addr}:{master_port}"
    flag = "--rdzv-endpoint" if args.rdzv_endpoint else "--master-addr and --master-port"
    try:
        host, port = parse_endpoint(endpoint, None)
        check_host(host, config.replace(is_host=rank == 0 if config.is_host is None else config.is_host))
    except ValueError as error:
        raise CommandLineError(f"{flag}: {error}") from None
    if port == 0 and count > 1:
        raise CommandLineError(f"{flag}: the port is `0`, must be one that the other nodes can know")
    is_host = rank == 0 if config.is_host is None else config.is_host
    config = config.replace(node_rank=rank, is_host=is_host)
    # Workers have nothing to do with a port that nobody knows.
    return Rendezvous(args.rdzv_id, host, port, (count, count), config, fixed=port != 0)


def _unknown_backend(name: str) -> str:
    near = difflib.get_close_matches(name, BACKENDS, n=1)
    hint = f"; did you mean `{near[0]}`?" if near else "; torchrun can use those of other packages"
    return f"--rdzv-backend is `{name}`, must be c10d or rust-c10d, etcd or rust-etcd, or static{hint}"


def workers_of(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        return count_of(text)
    if not 0 < count <= MAX_WORKERS:
        raise CommandLineError(f"--nproc-per-node is `{text}`, must be from 1 to {MAX_WORKERS}, or auto, cpu, gpu, xpu")
    return count


def restarts_of(args: argparse.Namespace) -> tuple[int, str | None]:
    """Read ``--max-restarts``: how many, and within how many seconds if that is given."""
    given = args.max_restarts
    number, window = given if isinstance(given, tuple) else (given, None)
    if not 0 <= number <= MAX_RESTARTS:
        raise CommandLineError(f"--max-restarts is `{number}`, must be from 0 to {MAX_RESTARTS}")
    return number, window


def launch_options_of(args: argparse.Namespace, config: RendezvousConfig | None = None) -> LaunchOptions:
    """Read what concerns this node's workers alone."""
    max_restarts, _ = restarts_of(args)
    entrypoint, command = command_of(args)
    # PyTorch may have to be asked.
    workers = workers_of(args.nproc_per_node)
    meanings = meanings_of(args)
    return _elastic_rs.LaunchOptions(
        command=command,
        logs=log_options_of(args),
        cpus=cpus_of(args.numa_binding, workers) if args.numa_binding else [],
        warm=warm_of(warm_modules_of(args), command),
        workers=_elastic_rs.WorkerOptions(
            entrypoint=os.fsencode(entrypoint).decode(errors="replace"),
            role=_utf8("--role", args.role),
            max_restarts=max_restarts,
            grace_s=grace_of(args),
            leader_first=_python.leader_first(config and config.values()["first_signal"], command[0]),
            forwarded_signals=meanings.forwarded,
            preempt=meanings.preempt,
            uninterruptible_sleep_s=_sleep_limit_s(),
            virtual_local_rank=args.virtual_local_rank,
            local_world_size=workers,
            on_hang=on_hang_of(args),
            health_check=health_check_of(args),
            progress_log=progress_log_of(args),
        ),
    )


def on_hang_of(args: argparse.Namespace) -> str | None:
    """Read ``--on-hang``, or its variable."""
    try:
        return _hang_options.on_hang_of(args.on_hang)
    except ValueError as error:
        raise UsageError(str(error)) from None


def health_check_of(args: argparse.Namespace) -> str | None:
    """Read ``--health-check``, or its variable."""
    try:
        return _health_options.health_check_of(args.health_check)
    except ValueError as error:
        raise UsageError(str(error)) from None


def progress_log_of(args: argparse.Namespace) -> ProgressPattern | None:
    """Read ``--progress-log``, or its variable."""
    try:
        pattern = _hang_options.progress_log_of(args.progress_log)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if pattern is not None and not _streams_of("--tee", args.tee).any:
        name = _hang_options.name_of("--progress-log", _hang_options.PROGRESS_LOG, args.progress_log)
        raise UsageError(f"{name} is given, and --tee is `{args.tee}`, so no line is looked at: add --tee=3")
    return pattern


def local_addr_of(args: argparse.Namespace) -> str | None:
    """Read ``--local-addr``; empty, it is not given, as with torchrun."""
    return _utf8("--local-addr", args.local_addr) if args.local_addr else None


def _utf8(flag: str, text: str) -> str:
    """Return the text if it is one. What are bytes to the kernel may be no UTF-8, and be passed on; this may not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(text).decode(errors="backslashreplace")
        raise CommandLineError(f"{flag} is `{shown}`, must be UTF-8") from None
    return text


def warm_modules_of(args: argparse.Namespace) -> str | None:
    """Return the modules that a fork server imports. None: there is to be none."""
    modules: str | None = args.warm_modules
    return "torch" if modules is None and args.warm_start else modules


def warm_of(modules: str | None, command: list[str]) -> tuple[list[str], int, str] | None:
    """Read ``--warm-modules``: what the core needs to start a fork server, if there is to be one."""
    if modules is None:
        return None
    from elastic_rs._warm import _plan

    names = [name.strip() for name in modules.split(",")]
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise CommandLineError(
            f"--warm-modules is `{modules}`, must be names of modules, such as torch,torch.distributed"
        )
    plan = _plan.plan(command, names)
    if isinstance(plan, str):
        logger.warning("--warm-start and --warm-modules have no effect: %s", plan)
        return None
    return plan.begin, plan.fixed, plan.what


def command_of(args: argparse.Namespace) -> tuple[str, list[str]]:
    """Say what the report calls the workers, and what each of them executes."""
    script, rest = args.training_script, args.training_script_args
    python = os.getenv("PYTHON_EXEC", sys.executable)
    if args.run_path:
        # Not by `-m`, which would find a folder `elastic_rs` of the user's first.
        return script, [sys.executable, "-u", _path.__file__, _python.first_folder(), script, *rest]
    if args.no_python:
        if args.module:
            raise CommandLineError(
                "--no-python and --module are given, must be one of them at most: a program is no module"
            )
        return script, [script, *rest]
    # As torch names it: a Python of the user's own is the program, and the script one of its arguments.
    entrypoint = script if python == sys.executable else python
    return entrypoint, [python, "-u", *(["-m"] if args.module else []), script, *rest]


def ending_signals_of(args: argparse.Namespace) -> list[int]:
    """Return the signals that end an agent."""
    try:
        return _signal_options.numbers_of("--signals-to-handle", _utf8("--signals-to-handle", args.signals_to_handle))
    except ValueError as error:
        raise CommandLineError(str(error)) from None


def meanings_of(args: argparse.Namespace) -> _signal_options.Meanings:
    """Return what an agent does at signals that do not end it, and how it gets notices. Warns of contradictions."""
    given = _signal_options.Given(args.forward_signals, args.preempt_notice, args.preempt_deadline, args.preempt_signal)
    try:
        return _signal_options.meanings_of(given, ending=ending_signals_of(args))
    except ValueError as error:
        raise CommandLineError(str(error)) from None


def check_output(args: argparse.Namespace) -> None:
    """Check what says where workers' output goes and who is told of a hang, for agents on other machines.

    Raises:
        UsageError: a flag's value is not valid.
    """
    for flag, streams in (("--redirects", args.redirects), ("--tee", args.tee)):
        _streams_of(flag, streams)
    _shown_of(args)
    on_hang_of(args)
    health_check_of(args)
    progress_log_of(args)


def _shown_of(args: argparse.Namespace) -> dict[str, list[int] | None]:
    return {
        "shown_local_ranks": _ranks_of("--local-ranks-filter", args.local_ranks_filter, "local ranks: 0,1,2"),
        "shown_ranks": _ranks_of("--ranks-filter", args.ranks_filter, "ranks: 0,1,2"),
    }


def log_options_of(args: argparse.Namespace) -> LogOptions:
    """Read what says where workers' output goes."""
    redirects, tee = _streams_of("--redirects", args.redirects), _streams_of("--tee", args.tee)
    template = log_line_prefix_of(args)
    log_dir = args.log_dir or None
    if log_dir not in {None, os.devnull}:
        try:
            Path(log_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--log-dir is `{log_dir}`, must be a folder, or what can be made one: {error}") from None
    return _elastic_rs.LogOptions(
        redirects=redirects,
        tee=tee,
        **_shown_of(args),
        log_dir=log_dir,
        log_files=log_dir != os.devnull,
        stdout_filters=[_utf8("--duplicate-stdout-filters", text) for text in args.duplicate_stdout_filters],
        stderr_filters=[_utf8("--duplicate-stderr-filters", text) for text in args.duplicate_stderr_filters],
        prefix=template and _utf8("--log-line-prefix-template", template),
    )


def log_line_prefix_of(args: argparse.Namespace) -> str | None:
    """Read ``--log-line-prefix-template``, or its variable of PyTorch's."""
    return args.log_line_prefix_template or os.getenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE") or None


def _streams_of(flag: str, text: str) -> Streams:
    try:
        return _elastic_rs.Streams(_utf8(flag, text))
    except ValueError as error:
        raise CommandLineError(f"{flag} {error}") from None


def _ranks_of(flag: str, text: str, must_be: str) -> list[int] | None:
    """Read the ranks that a console shows. A rank that no worker has shows nobody, as with torchrun."""
    if not text:
        return None
    try:
        ranks = [int(rank) for rank in text.split(",")]
    except ValueError:
        raise CommandLineError(f"{flag} is `{text}`, must be {must_be}") from None
    return [rank for rank in ranks if 0 <= rank < 1 << 32]


def grace_of(args: argparse.Namespace) -> int:
    """Read ``--shutdown-timeout``, in seconds."""
    name, given = "--shutdown-timeout", args.shutdown_timeout
    if given is None:
        name, given = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
    try:
        seconds = int(given)
    except ValueError:
        seconds = -1
    if not 0 <= seconds <= MAX_SECONDS:
        raise CommandLineError(f"{name} is `{given}`, must be a whole number of seconds from 0 to {MAX_SECONDS}")
    return seconds


def why_torch(args: argparse.Namespace) -> str | None:
    """Say what is asked for that only PyTorch can do, if anything is."""
    if args.logs_specs is not None:
        return "--logs-specs"
    if args.event_log_handler != "null":
        return "--event-log-handler"
    if os.getenv("TORCHELASTIC_ENABLE_FILE_TIMER") == "1":
        return "TORCHELASTIC_ENABLE_FILE_TIMER"
    return None


def _sleep_limit_s() -> float:
    """Return how long a worker may sleep uninterruptibly. 0 is for ever; so is what is no number, as with PyTorch."""
    try:
        seconds = float(os.environ.get("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", ""))
    except ValueError:
        return 0.0
    return seconds if 0 < seconds <= MAX_SECONDS else 0.0
