"""What an exception means, when a state is broadcast, and which workers may be resized. Pure; needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import NamedTuple

from elastic_rs.elastic._exceptions import HostsUpdatedInterrupt

__all__ = [
    "FAILURE_NEWS_S",
    "Attendance",
    "Outcome",
    "attendance",
    "backend_names",
    "is_stuck",
    "judge",
    "must_sync",
    "nccl_variables",
    "parked_number",
]

# A collective may fail before the agent has heard why. The agent of the failed worker reports within milliseconds, and
# the coordinator gives a node that is cut off `reconnect_grace` (0.5 s) before it tells the others.
FAILURE_NEWS_S = 5.0

AGENT = "ELASTIC_RS_AGENT"
IN_PLACE = "ELASTIC_RS_IN_PLACE"
# Which backends each value of `in_place` lets a process group have.
RESIZABLE = {"gloo": frozenset({"gloo"}), "nccl": frozenset({"gloo", "nccl"})}
WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
NCCL_VARIABLES = (WATCHDOG, "TORCH_NCCL_ENABLE_MONITORING")


class Outcome(Enum):
    """What happens after an exception in the user's function, or while a world is formed."""

    FAIL = "the exception is raised"
    KEEP = "the next world is formed, with the state as it is"
    RESTORE = "the next world is formed, with the state of the last commit"


def judge(error: Exception, *, changing: bool, failed_within: Callable[[float], bool]) -> Outcome:
    """Say what an exception means.

    Args:
        error: what the user's function, or the forming of a world, has raised.
        changing: whether the agent has told this worker at a check that the world changes.
        failed_within: waits at most so many seconds, and says whether a failure of another worker is known.
    """
    if changing and any(isinstance(one, HostsUpdatedInterrupt) for one in _chain(error)):
        return Outcome.KEEP
    # Errors of collectives are RuntimeErrors, and may precede the news of the failure that caused them. Another
    # exception is the worker's own, unless a failure is known already: data of an aborted collective are garbage, which
    # may raise anything.
    patience_s = FAILURE_NEWS_S if isinstance(error, RuntimeError) else 0.0
    return Outcome.RESTORE if failed_within(patience_s) else Outcome.FAIL


def is_stuck(error: Exception, *, meeting: bool, first: bool) -> bool:
    """Say whether an exception means that the members of a world have not met, so that all should leave it.

    A member that hangs lets collectives of the others time out. It does not leave that world, and is replaced. In its
    first world a worker fails with the exception instead: it has nothing to lose, and the user reads the exception.

    Args:
        error: the exception.
        meeting: whether it came from making the process group, or from the broadcast of the state.
        first: whether the worker was never in another world.
    """
    return meeting and not first and isinstance(error, RuntimeError)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception and those that it was raised from: frameworks wrap what a callback raises."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__ or error


def must_sync(world_says: bool, commit: int | None) -> bool:
    """Say whether the state is broadcast before the user's function is called.

    The coordinator knows whether any worker is new and whether commits differ. It does not know that nobody has ever
    broadcast a state, when the first world failed before it could: all workers then have no commit, and all of them
    conclude the same.
    """
    return world_says or commit is None


def parked_number(commit: int | None, *, ahead: bool) -> int | None:
    """Return the number that tells the coordinator whose state is the newest.

    It is the number of the last commit or sync, and one more if the worker keeps changes made after that.
    """
    return commit if commit is None else commit + ahead


class Attendance(NamedTuple):
    """Whether this worker connects to its agent, so that it can survive a change of the world."""

    path: str | None
    """The agent's socket, or None: the worker is stopped and started again like any other."""
    reason: str
    """Why not, for the log. Empty if there is nothing to say: there is no agent of ours, or it was told not to."""


def attendance(environment: Mapping[str, str], backends: frozenset[str]) -> Attendance:
    """Decide by the environment that the agent has set, and by the backends of the worker's process group."""
    path, in_place = environment.get(AGENT), environment.get(IN_PLACE, "off")
    if not path or in_place == "off":
        # The agent has set this variable, whoever's it is.
        serves = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "False"
        return Attendance(None, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes rank 0 serve the store" if serves else "")
    allowed = RESIZABLE.get(in_place)
    if allowed is None:
        return Attendance(None, f"{IN_PLACE} is `{in_place}`, must be one of off, {', '.join(RESIZABLE)}")
    if refused := backends - allowed:
        hint = " (`--rdzv-conf in_place=nccl` allows it)" if refused == {"nccl"} else ""
        names = ", ".join(sorted(refused))
        return Attendance(None, f"process groups of backend {names} are not resized in place{hint}")
    if "nccl" in backends and environment.get(WATCHDOG) != "0":
        # The value counts when the group is made. `elastic.init` and `run` set it.
        return Attendance(
            None,
            f"NCCL's watchdog would end this worker when another one fails: set {WATCHDOG}=0 before "
            "init_process_group, or leave the process group to elastic.init or elastic.run",
        )
    return Attendance(path, "")


def nccl_variables(environment: Mapping[str, str], backends: frozenset[str]) -> dict[str, str]:
    """Return the variables to set before a process group is made whose collectives are aborted when a peer fails.

    NCCL's watchdog and its heartbeat monitor would end the process meanwhile. What the user has set stays.
    """
    if "nccl" not in backends or environment.get(IN_PLACE) != "nccl" or not environment.get(AGENT):
        return {}
    return {name: "0" for name in NCCL_VARIABLES if name not in environment}


def backend_names(config: str) -> frozenset[str]:
    """Return the backends of a configuration such as ``gloo`` or ``cpu:gloo,cuda:nccl``."""
    return frozenset(part.rpartition(":")[2].strip().lower() for part in config.split(",") if part.strip())
