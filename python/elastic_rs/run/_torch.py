"""Jobs that need PyTorch's own code: handed to its launcher, with our rendezvous and our agent in it."""

from __future__ import annotations

import argparse
import functools
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from elastic_rs import _elastic_rs, _hang_options, _health_options, _signal_options
from elastic_rs.rendezvous import _protection
from elastic_rs.rendezvous._config import ETCD_NAMES, RUST_C10D, RUST_ETCD
from elastic_rs.run import _options, _script
from elastic_rs.run._flags import split
from elastic_rs.run._options import BACKENDS, Rendezvous, is_alone, launch_options_of, rendezvous_of
from elastic_rs.run._usage import UsageError


def hand_over(argv: Sequence[str], checked: argparse.Namespace, why: str) -> None:
    """Run torchrun's own code with this command line. Raises and exits as it does.

    Raises:
        UsageError: there is no torch, or the command line has an error that is found here. torchrun would raise an
            exception for some of them, and wait for ever after others.
    """
    if _options.warm_modules_of(checked) is not None:
        raise UsageError(f"--warm-start and {why} cannot be combined: PyTorch's launcher cannot fork")
    for key, given in _options.keys_by_flags(checked).items():
        raise UsageError(
            f"--{key.replace('_', '-')} and {why} cannot be combined: PyTorch's launcher does not know it; give "
            f"--rdzv-conf {key}={given}"
        )
    number, window = _options.restarts_of(checked)
    if window is not None:
        raise UsageError(
            f"--max-restarts with a window and {why} cannot be combined: PyTorch's launcher knows a whole number "
            f"alone; give --max-restarts={number} and --rdzv-conf restart_window={window}"
        )
    if checked.store_tunnel:
        raise UsageError(
            f"--store-tunnel and {why} cannot be combined: PyTorch's launcher does not know it; give --rdzv-conf "
            "store_tunnel=1"
        )
    for given, flag, variable in (
        (checked.on_hang, "--on-hang", _hang_options.ON_HANG),
        (checked.progress_log, "--progress-log", _hang_options.PROGRESS_LOG),
        (checked.health_check, "--health-check", _health_options.HEALTH_CHECK),
        (checked.forward_signals, "--forward-signals", _signal_options.FORWARD_SIGNALS),
        (checked.preempt_notice, "--preempt-notice", _signal_options.PREEMPT_NOTICE),
        (checked.preempt_deadline, "--preempt-deadline", _signal_options.PREEMPT_DEADLINE),
        (checked.preempt_signal, "--preempt-signal", _signal_options.PREEMPT_SIGNAL),
    ):
        if given is not None:
            raise UsageError(
                f"{flag} and {why} cannot be combined: PyTorch's launcher does not know it; set {variable}"
            )
    if checked.omp_threads is not None:
        raise UsageError(
            f"--omp-threads and {why} cannot be combined: PyTorch's launcher does not know it; set OMP_NUM_THREADS"
        )
    launch_options_of(checked)
    ours = checked.standalone or checked.rdzv_backend in BACKENDS
    meeting = rendezvous_of(checked) if ours else None
    try:
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing.errors import record
    except ImportError as error:
        raise UsageError(f"{why} needs PyTorch, which cannot be imported: {error}") from None
    _check_names(checked)
    _script.check(checked)
    parse_args: Any = run.parse_args  # untyped
    # torch's parser would read what is behind SCRIPT, and refuse `train.py --r=16` as an ambiguous abbreviation.
    args = parse_args([*split(argv).words(), "--", checked.training_script])
    args.training_script_args = checked.training_script_args
    if meeting is not None and (is_alone(args, meeting.nodes) or (args.rdzv_backend == "static" and not meeting.fixed)):
        args.standalone = False
        if meeting.config.wants_agent:
            _protection.give(_elastic_rs.new_token())
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = RUST_C10D, "localhost:0", str(uuid.uuid4())
    elif args.rdzv_backend == "c10d":
        args.rdzv_backend = RUST_C10D
    elif args.rdzv_backend in ETCD_NAMES:
        args.rdzv_backend = RUST_ETCD
    elif meeting is not None and args.rdzv_backend == "static":
        try:
            _protection.refuse_c10d("--rdzv-backend=static")
        except ValueError as error:
            raise UsageError(str(error)) from None
        _replace_static(meeting)
    record(run.run)(args)


def _replace_static(meeting: Rendezvous) -> None:
    """Make PyTorch's launcher use our rendezvous for ``static``. Its own keeps the keys of earlier attempts."""
    from elastic_rs._torch_private import handler_factories
    from elastic_rs.rendezvous._static_handler import create_static_handler

    create = functools.partial(create_static_handler, host=meeting.host, port=meeting.port)
    handler_factories()["static"] = create


def _check_names(args: argparse.Namespace) -> None:
    """Check the flags whose values are names in PyTorch's registries."""
    from importlib.metadata import entry_points

    from elastic_rs._torch_private import event_handlers, handler_factories

    if args.logs_specs is not None:
        _check("--logs-specs", args.logs_specs, entry_points(group="torchrun.logs_specs").names)
    _check("--event-log-handler", args.event_log_handler, event_handlers())
    if not args.standalone:
        _check("--rdzv-backend", args.rdzv_backend, {*BACKENDS, *handler_factories()})


def _check(flag: str, name: str, known: Iterable[str]) -> None:
    if name not in (names := sorted(known)):
        allowed = f"one of {', '.join(names)}" if names else "the name of a plug-in, of which none is installed"
        raise UsageError(f"{flag} is `{name}`, must be {allowed}")
