"""``LaunchConfig``: the flags of ``elastic-run`` as typed fields.

A configuration becomes elastic-run's command line, so that values are checked and defaults are filled in at one place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Literal

from elastic_rs.run._usage import UsageError

__all__ = ["LEFT_OUT", "LaunchConfig", "flags_of", "in_names_of_fields"]


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How :func:`elastic_rs.launch` runs a job. Each field is the flag of ``elastic-run`` of that name.

    Fields have the flags' defaults. ``PET_*`` variables do not count: what a program gives is what counts.

    Attributes:
        nnodes: number of nodes, or ``(minimum, maximum)``; also as text, ``"2:4"``.
        nproc_per_node: workers on this node: a number, or one per ``gpu``, ``cpu``, ``xpu``; ``auto`` is one per
            accelerator if there is any, else one per CPU.
        standalone: a job of one node, on any free port and with a random run id.
        rdzv_backend: ``c10d``, ``etcd`` or ``static``, and other names of them.
        rdzv_endpoint: ``HOST:PORT`` of the node that hosts the rendezvous, or of several of which one leads, with
            commas; with etcd its members.
        rdzv_id: the job's name, the same on every node.
        rdzv_conf: settings of the rendezvous by their keys, times in seconds.
        local_addr: address at which other nodes reach this one, if not the one that its connection shows.
        store_tunnel: workers reach the store of rank 0's node through their agents, encrypted.
        node_rank: rank of this node, with ``static``.
        master_addr: address of node 0, with ``static``.
        master_port: a free port on node 0, with ``static``. None: 29500, or any port for a job of one node.
        module: the entry point is a module, run as by ``python -m``.
        no_python: the entry point is a program, run as it is.
        run_path: the entry point is the absolute path of a script, run by ``runpy.run_path``.
        max_restarts: restarts after failures, on all nodes together. ``"3/1h"``: as many within an hour, which
            come back, and end when they bring nothing.
        no_restart_on: exit codes of workers, 1 to 255, after which nothing is restarted: the job ends. The same on all
            nodes. None: none.
        shutdown_timeout: time between the signal that stops workers and SIGKILL: whole seconds, or a ``timedelta``.
            None: the variable ``TORCH_ELASTIC_SHUTDOWN_TIMEOUT``, or 30 s.
        signals_to_handle: names of the signals that end this node's part, in the main thread. None: SIGTERM, SIGINT,
            SIGHUP, SIGQUIT.
        forward_signals: names of the signals that are passed on to the workers, and end nothing (None: the variable
            ``ELASTIC_RS_FORWARD_SIGNALS``, which functions have too, or none). Programs alone.
        preempt_notice: what says that this machine is about to be taken away: ``signal:USR1@120`` (120 s are left),
            ``file:PATH``, ``aws``, ``gcp``, ``azure``, or what a shell runs until it writes how many seconds are left
            (None: the variable ``ELASTIC_RS_PREEMPT_NOTICE``, which functions have too, or nothing). Programs alone.
        preempt_deadline: how much time a notice leaves that does not say it, above 0 s and a day at most (None: the
            variable ``ELASTIC_RS_PREEMPT_DEADLINE``, or 30). Programs alone.
        preempt_signal: the signal that the workers of all nodes get at a notice, to save (None: the variable
            ``ELASTIC_RS_PREEMPT_SIGNAL``, or none). Programs alone.
        first_signal: who gets the signal that stops workers: ``leader``, the process that was started, and what it has
            started only after its end; or ``group``, all at once. None: ``leader`` for a script, else ``group``.
        in_place: which process groups let workers survive a change of the world: ``off``, ``gloo``, ``nccl``. None:
            ``gloo``. Programs alone.
        standby: how many processes of this node run the script up to its ``elastic.run``, and take the place of a
            worker that fails; each takes the memory of a worker. None: none. Programs alone.
        hang: what happens when the training hangs: ``report`` (it is said which rank the others wait for), ``restart``
            (its workers are restarted as well), ``off`` (nobody looks). None: ``report``.
        hang_timeout: after how long without progress it hangs, from 1 s to a day. None: learnt from its steps.
        on_hang: what a shell runs on rank 0's node once a hang is found, with the lines about it as standard input
            (None: the variable ``ELASTIC_RS_ON_HANG``, which functions have too, or nothing). Programs alone.
        progress_log: lines of workers that match this regular expression show progress, as steps do; needs ``tee``
            (None: the variable ``ELASTIC_RS_PROGRESS_LOG``, or none). Programs alone.
        health_check: what is checked before this machine joins: ``builtin``, or a command of the shell as well: 0 is
            well, 1 is ill (None: the variable ``ELASTIC_RS_HEALTH_CHECK``, or nothing). Programs alone.
        warm_start: fork workers from a process that has imported torch. Programs alone.
        warm_modules: modules that this process imports; means ``warm_start`` too. Programs alone.
        log_dir: folder of log files. None: a temporary folder. ``/dev/null``: no files.
        redirects: streams that go to files: ``1`` stdout, ``2`` stderr, ``3`` both, or by local rank: ``"0:3,1:1"``.
        tee: streams that go to files and the console, as ``redirects``.
        local_ranks_filter: local ranks that the console shows. None: all.
        ranks_filter: ranks in the whole job that consoles show. None: all. Programs alone.
        duplicate_stdout_filters: teed lines of stdout that contain one of these texts go to a file of their own.
        duplicate_stderr_filters: the same for stderr.
        log_line_prefix_template: prefix of each teed line, with ``${role_name}``, ``${rank}``, ``${local_rank}`` and
            ``${hostname}``. None: ``[${role_name}${local_rank}]:``.
        omp_threads: each worker's ``OMP_NUM_THREADS``; ``auto``: the usable CPUs, divided by the workers. None: 1 if
            there are several workers and the variable is not set. Programs alone.
        virtual_local_rank: each worker sees only its own GPU, as device 0, and has ``LOCAL_RANK`` 0.
        numa_binding: bind each worker to CPUs near its GPU: ``node``, ``socket``, ``exclusive``, ``core-complex``.
        role: the workers' role, shown in prefixes and ``ROLE_NAME``.
        start_method: how workers that are functions are started: ``spawn``, ``fork``, ``forkserver``. None: ``spawn``.
            Functions alone.

    Raises:
        TypeError: a value has another type; the message names the field, the value and what is allowed.
        ValueError: a value is none of a closed set. Other values are checked by :func:`elastic_rs.launch`, before
            anything starts.

    Example:
        >>> from elastic_rs import LaunchConfig
        >>> LaunchConfig(nproc_per_node=2, max_restarts=3).max_restarts
        3
    """

    nnodes: int | str | tuple[int, int] = 1
    nproc_per_node: int | str = 1
    standalone: bool = False
    rdzv_backend: str = "static"
    rdzv_endpoint: str = ""
    rdzv_id: str = "none"
    rdzv_conf: Mapping[str, str | float] | None = None
    local_addr: str | None = None
    store_tunnel: bool = False
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    module: bool = False
    no_python: bool = False
    run_path: bool = False
    max_restarts: int | str = 0
    no_restart_on: Sequence[int] | None = None
    shutdown_timeout: timedelta | float | None = None
    signals_to_handle: Sequence[str] | None = None
    forward_signals: Sequence[str] | None = None
    preempt_notice: str | None = None
    preempt_deadline: timedelta | float | None = None
    preempt_signal: str | None = None
    first_signal: Literal["leader", "group"] | None = None
    in_place: Literal["off", "gloo", "nccl"] | None = None
    standby: int | None = None
    hang: Literal["report", "restart", "off"] | None = None
    hang_timeout: timedelta | float | None = None
    on_hang: str | None = None
    progress_log: str | None = None
    health_check: str | None = None
    warm_start: bool = False
    warm_modules: Sequence[str] | None = None
    log_dir: str | os.PathLike[str] | None = None
    redirects: int | str = 0
    tee: int | str = 0
    local_ranks_filter: Sequence[int] | None = None
    ranks_filter: Sequence[int] | None = None
    duplicate_stdout_filters: Sequence[str] | None = None
    duplicate_stderr_filters: Sequence[str] | None = None
    log_line_prefix_template: str | None = None
    omp_threads: int | Literal["auto"] | None = None
    virtual_local_rank: bool = False
    numa_binding: Literal["node", "socket", "exclusive", "core-complex"] | None = None
    role: str = "default"
    start_method: Literal["spawn", "fork", "forkserver"] | None = None

    def __post_init__(self) -> None:
        for known in fields(self):
            value = getattr(self, known.name)
            if value is not None or known.default is not None:
                _KINDS[known.name].check(known.name, value)


@dataclass(frozen=True)
class _Kind:
    """What a field may be.

    Attributes:
        allowed: in words, for an error.
        is_one: whether a value is of a type that is allowed.
        word: the value as elastic-run's command line has it. None: a switch.
        closed: all values that are allowed, if these are few.
    """

    allowed: str
    is_one: Callable[[Any], bool]
    word: Callable[[Any], str] | None = str
    closed: tuple[str, ...] = ()

    def check(self, name: str, value: Any) -> None:
        if not self.is_one(value):
            raise TypeError(f"{name} is `{value!r}`, of type {type(value).__name__}, must be {self.allowed}")
        if self.closed and value not in self.closed:
            raise ValueError(f"{name} is `{value}`, must be one of {', '.join(self.closed)}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole_or_text(value: Any) -> bool:
    return _is_whole(value) or _is_text(value)


def _is_list_of(is_one: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Sequence) and not isinstance(value, str | bytes) and all(map(is_one, value))


def _is_nodes(value: Any) -> bool:
    return _is_whole_or_text(value) or (isinstance(value, tuple) and len(value) == 2 and all(map(_is_whole, value)))


def _is_conf(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(key, str) and isinstance(one, str | int | float) for key, one in value.items()
    )


def _conf_word(conf: Mapping[str, str | float]) -> str:
    for key, value in conf.items():
        if not key or not str(value) or "," in f"{key}{value}" or "=" in key:
            # The value may be a password.
            raise ValueError(f"rdzv_conf has a value of `{key}` that is empty or has a comma: no key can take it")
    return ",".join(f"{key}={int(value) if isinstance(value, bool) else value}" for key, value in conf.items())


def _seconds_word(value: timedelta | float) -> str:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    # elastic-run refuses what is no whole number.
    return str(int(seconds)) if seconds == seconds // 1 and abs(seconds) < 1e15 else str(seconds)


def _joined(values: Sequence[Any]) -> str:
    return ",".join(map(str, values))


_SWITCH = _Kind("True or False", lambda value: isinstance(value, bool), None)
_TEXT = _Kind("a text", _is_text)
_WHOLE = _Kind("a whole number", _is_whole)
_RANKS = _Kind("a list of whole numbers", _is_list_of(_is_whole), _joined)
_TEXTS = _Kind("a list of texts", _is_list_of(_is_text), _joined)
_FILTERS = _Kind(_TEXTS.allowed, _TEXTS.is_one, lambda texts: ",".join(text.replace(",", ",,") for text in texts))
_STREAMS = _Kind("0, 1, 2 or 3, or a text such as '0:3,1:1'", _is_whole_or_text)


def _one_of(*closed: str) -> _Kind:
    return _Kind(f"one of {', '.join(closed)}", _is_text, closed=closed)


_SECONDS = _Kind(
    "seconds or a timedelta",
    lambda value: isinstance(value, timedelta | int | float) and not isinstance(value, bool),
    _seconds_word,
)

_KINDS: dict[str, _Kind] = {
    "nnodes": _Kind(
        "a whole number, (minimum, maximum) or a text such as '2:4'",
        _is_nodes,
        lambda nodes: ":".join(map(str, nodes)) if isinstance(nodes, tuple) else str(nodes),
    ),
    "nproc_per_node": _Kind("a whole number, or one of auto, cpu, gpu, xpu", _is_whole_or_text),
    "rdzv_conf": _Kind("a mapping from keys to texts, numbers or booleans", _is_conf, _conf_word),
    **dict.fromkeys(("shutdown_timeout", "hang_timeout", "preempt_deadline"), _SECONDS),
    **dict.fromkeys(
        ("signals_to_handle", "forward_signals"), _Kind("a list of names of signals", _TEXTS.is_one, _joined)
    ),
    "log_dir": _Kind("a path", lambda value: isinstance(value, str | os.PathLike), os.fspath),
    "omp_threads": _Kind("a whole number or auto", _is_whole_or_text),
    "in_place": _one_of("off", "gloo", "nccl"),
    "hang": _one_of("report", "restart", "off"),
    "first_signal": _one_of("leader", "group"),
    "numa_binding": _one_of("node", "socket", "exclusive", "core-complex"),
    "start_method": _one_of("spawn", "fork", "forkserver"),
    **dict.fromkeys(("redirects", "tee"), _STREAMS),
    **dict.fromkeys(("local_ranks_filter", "ranks_filter", "no_restart_on"), _RANKS),
    **dict.fromkeys(("duplicate_stdout_filters", "duplicate_stderr_filters"), _FILTERS),
    "warm_modules": _TEXTS,
    **dict.fromkeys(("node_rank", "master_port", "standby"), _WHOLE),
    "max_restarts": _Kind("a whole number, or a text such as '3/1h'", _is_whole_or_text),
    **dict.fromkeys(
        (
            *("rdzv_backend", "rdzv_endpoint", "rdzv_id", "local_addr", "master_addr", "log_line_prefix_template"),
            *("role", "on_hang", "progress_log", "health_check", "preempt_notice", "preempt_signal"),
        ),
        _TEXT,
    ),
    **dict.fromkeys(
        (
            *("standalone", "store_tunnel", "module", "no_python", "run_path", "warm_start"),
            "virtual_local_rank",
        ),
        _SWITCH,
    ),
}
"""What each field may be."""

_DRIVER = "a driver starts agents on other hosts, and has no workers of its own: elastic_rs.run.main has it"
_COMMAND = "it prints and ends"
_PYTORCHS = "PyTorch's launcher alone has it: torch.distributed.launcher.api.elastic_launch"

LEFT_OUT: dict[str, str] = {
    **dict.fromkeys(("help", "version", "print_completion"), _COMMAND),
    **dict.fromkeys(
        (
            *("hosts", "hostfile", "host_discovery_script", "host_discovery", "min_np", "max_np", "slots_per_host"),
            *("start_timeout", "elastic_timeout", "reset_limit", "host_failures", "blacklist_cooldown_range"),
            *("discovery_interval", "discovery_timeout", "ssh", "remote_python", "detach", "dry_run"),
        ),
        _DRIVER,
    ),
    **dict.fromkeys(("event_log_handler", "logs_specs"), _PYTORCHS),
    "exit_code": "it returns or raises, and the process goes on",
    "monitor_interval": "it has no effect: nothing polls",
}
"""The flags of ``elastic-run`` that are no fields, and why."""


def given_in(config: LaunchConfig) -> dict[str, Any]:
    """Return the fields that differ from their defaults."""
    found = {known.name: getattr(config, known.name) for known in fields(config)}
    return {known.name: found[known.name] for known in fields(config) if found[known.name] != known.default}


def flags_of(config: LaunchConfig) -> list[str]:
    """Return elastic-run's flags for this configuration.

    Raises:
        ValueError: a value cannot be one of a command line.
    """
    words = []
    for name, value in given_in(config).items():
        flag, word = f"--{name.replace('_', '-')}", _KINDS[name].word
        words.append(flag if word is None else f"{flag}={word(value)}")
    return words


def in_names_of_fields(error: UsageError) -> ValueError:
    """Return an error of the command line with the fields' names in the place of flags."""
    return ValueError(_FLAG.sub(lambda found: found[1].replace("-", "_"), str(error)))


_FLAG = re.compile(r"--([a-z]+(?:-[a-z]+)*)\b")
