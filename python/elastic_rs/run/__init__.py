"""``elastic-run``: torchrun's command line, without torch. Also ``python -m elastic_rs.run``.

The core runs the agent (``src/launcher/launch``); this module reads the command line for it and says how it ended.
"""

from __future__ import annotations

import sys

try:
    import argparse
    import contextlib
    import logging
    from collections.abc import Callable, Sequence
    from typing import TYPE_CHECKING

    from elastic_rs._exit_codes import Run, of_end
    from elastic_rs._logging import show_logs_if_asked
    from elastic_rs._terminal import error_line, shows_colours
    from elastic_rs.run import _cpus, _node, _options
    from elastic_rs.run._flags import misplaced, parse, warn_of_variables
    from elastic_rs.run._host_flags import is_driver
    from elastic_rs.run._node import CannotError, End
    from elastic_rs.run._path import record
    from elastic_rs.run._script import NoScriptError, other_environment
    from elastic_rs.run._usage import PROG, UsageError, fail
except KeyboardInterrupt:
    # As in `main`, which is not defined yet.
    raise SystemExit(130) from None

if TYPE_CHECKING:
    from elastic_rs.discovery import HostDiscovery

__all__ = ["main"]

logger = logging.getLogger("elastic_rs.run")

INTERRUPTED = 130


def _report_to_nobody(_: str) -> None:
    """No driver has started this agent: there is nobody to report to."""


def main(
    args: Sequence[str] | None = None,
    *,
    discovery: HostDiscovery | None = None,
    report: Callable[[str], None] = _report_to_nobody,
) -> int:
    """Run the workers of one node until the job has ended, or check the node (``doctor``), and return the exit code.

    With hosts (``-H`` and the like) agents on those do that, which are started here.

    It handles signals in whichever thread it is called, for one job at a time, and what they did before is what they do
    afterwards. A command line that is not understood ends the process with 2.

    Args:
        args: the command line; that of this process if None.
        discovery: finds the hosts, instead of ``-H`` and the like.
        report: for an agent that a driver has started. If this node gets so far, it is called with ``accepted``, and
            then with :attr:`elastic_rs._elastic_rs.Launched.outcome`; or with ``refused`` if this command line fails on
            every node, or ``lacks_script`` if this node does not have the script. Such an agent ends with 0 if it joins
            after the job has succeeded. For any other node that is an error, as for torchrun.
    """
    argv = sys.argv[1:] if args is None else list(args)
    try:
        return _run(argv, discovery, report)
    except UsageError as error:
        if error.everywhere:
            report("refused")
        elif isinstance(error, NoScriptError):
            report("lacks_script")
        fail(str(error), hint=error.hint)
    except KeyboardInterrupt:
        # Before the core has taken the signals, or after it has given them back.
        return INTERRUPTED


def _run(argv: Sequence[str], discovery: HostDiscovery | None, report: Callable[[str], None]) -> int:
    if argv[:1] == ["doctor"]:
        from elastic_rs import _doctor

        return _doctor.main(argv[1:])
    args = parse(argv)
    show_logs_if_asked()
    is_driven = report is not _report_to_nobody
    if not is_driven:  # else the driver has warned
        warn_of_variables()
        if text := misplaced(args):
            logger.warning("%s", text)
    try:
        return _start(argv, args, discovery, report, is_driven=is_driven)
    except UsageError as error:
        error.name_variables(args.variables)
        raise


def _start(
    argv: Sequence[str],
    args: argparse.Namespace,
    discovery: HostDiscovery | None,
    report: Callable[[str], None],
    *,
    is_driven: bool,
) -> int:
    """Do what a command line says that has been parsed."""
    _cpus.check_omp_threads(args.omp_threads)
    if not is_driven and is_driver(args, discovers=discovery is not None):
        from elastic_rs.run._driver import drive

        if text := other_environment(no_python=args.no_python):
            logger.warning("%s", text)
        return drive(argv, args, discovery)
    if why := _options.why_torch(args):
        from elastic_rs.run._torch import hand_over

        hand_over(argv, args, why)
        return 0
    try:
        return _report_end(_node.run(args, report, is_driven=is_driven), driven=is_driven)
    except CannotError as error:
        return _cannot(error)


def _report_end(end: End, *, driven: bool) -> int:
    """Report how the job ended, and return the exit code."""
    launched = end.launched
    match launched.outcome:
        case "succeeded":
            return 0
        case "not_needed":
            logger.info("this node was a spare, and the job ended without needing it")
            return 0
        case "too_late" | "succeeded_before" if driven:
            logger.info("the job had succeeded before this node could join it")
            return 0
        case "succeeded_before":
            logger.warning("%s; this node has nothing to do, and ends with 0", launched.reason)
            return 0
        case "signal" | "taken_away":
            return of_end(end.conf, launched.end_class, otherwise=128 + (launched.signal or 0))
        case "failed" | "unfit":
            from elastic_rs.run import _report

            found = _report.failures(launched, _report.Failure)
            text = _report.report(end.entrypoint, found, colours=shows_colours(sys.stderr))
            sys.stderr.write(f"{text}\n")
            _report.hand_up(found[_report.root_cause(found)])
            returncode = None if launched.failure is None else launched.failure.returncode
            return of_end(end.conf, launched.end_class, returncode=returncode)
        case _:
            return _cannot(end.why_no_placement, of_end(end.conf, launched.end_class))


def _cannot(why: CannotError, code: int = Run.FAILED) -> int:
    """Report why this node cannot go on, with the name of torchrun's exception."""
    sys.stderr.write(error_line(PROG, f"{why}\n"))
    with contextlib.suppress(OSError):  # if no descriptor is left, imports fail too
        record(str(why), "")
    return code


def __dir__() -> list[str]:
    return list(__all__)
