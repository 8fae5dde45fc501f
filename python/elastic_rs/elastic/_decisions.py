"""What an exception means, when a state is broadcast, and which workers may be resized. Pure; needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import NamedTuple

from elastic_rs.elastic._exceptions import HostsUpdatedInterrupt, PeerFailed, TensorMismatchError

# A collective may fail before the agent has received the reason. The agent of the failed worker reports within
# milliseconds. The coordinator gives a node that is cut off `reconnect_grace` (0.5 s) before it notifies the others.
FAILURE_NEWS_S = 5.0

# How long the others get to finish the collective that a worker has just left, before they learn that its script asks
# for another world. Most often all ranks do, after the same step. gloo may miss the end of its connections in the
# middle of a message, and the worker would hang (docs/decisions/0109).
SETTLE_S = 0.1

# So often a script may go back to the same commit by an exception of its own. A NaN that depends on chance is gone by
# then, and one that does not never goes.
MOST_ROLL_BACKS = 10

# What a check answers if the world changes. Anything else than 0 and this is a failure.
CHANGED = 1

AGENT = "ELASTIC_RS_AGENT"
IN_PLACE = "ELASTIC_RS_IN_PLACE"
AHEAD = "ELASTIC_RS_AHEAD"
# Which backends each value of `in_place` lets a process group have.
RESIZABLE = {"gloo": frozenset({"gloo"}), "nccl": frozenset({"gloo", "nccl"})}
# Other names of torch 2.15 for what `nccl` is there, or was before. `nccl-lazy` is neither.
NCCL_NAMES = frozenset({"nccl", "nccl2", "nccl-legacy"})
# What rank 0 prints and `elastic-rs status` shows (docs/decisions/0125).
RESTARTED_FOR_NCCL = (
    "workers of this job are restarted, not kept, when the world changes: their process group uses NCCL, and "
    "`in_place` is gloo. `elastic-run --in-place=nccl` (torchrun: `--rdzv-conf in_place=nccl`) tries to keep them, "
    "which was run on one GPU, and never on several (docs/gpu.md)"
)
READ_AS_STANDBY = (
    "this worker was a standby until now, and its script has read %s before elastic.run, which is another worker's "
    "place: what it has made of that is wrong here; read them in the function that elastic.run calls"
)
WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
NCCL_VARIABLES = (WATCHDOG, "TORCH_NCCL_ENABLE_MONITORING")
LAZY_INIT = "TORCH_GLOO_LAZY_INIT"


# What `run` answers with a new world.
OURS = (HostsUpdatedInterrupt, PeerFailed)


class Outcome(Enum):
    """What happens after an exception in the user's function, or while a world is formed."""

    FAIL = "the exception is raised"
    KEEP = "the next world is formed, with the state as it is"
    RESTORE = "the next world is formed, with the state of the last commit"


class Judgement(NamedTuple):
    """What follows from an exception."""

    outcome: Outcome
    by_script: BaseException | None = None
    """The exception of this package that the script has raised itself, without a cause that the agent knows. The other
    workers do not know of it."""


def judge(error: Exception, *, changing: bool, failed_within: Callable[[float], bool]) -> Judgement:
    """Say what an exception means.

    Args:
        error: what the user's function, or the forming of a world, has raised.
        changing: whether the agent has announced to this worker at a check that the world changes.
        failed_within: waits at most so many seconds, and says whether a failure of another worker is known.
    """
    raised = next((one for one in _causes(error) if isinstance(one, OURS)), None)
    interrupted = any(isinstance(one, HostsUpdatedInterrupt) for one in _chain(error))
    if changing and interrupted and not isinstance(raised, PeerFailed):
        return Judgement(Outcome.KEEP)
    # An error of a collective may precede the news of the failure that caused it. Another exception is the worker's
    # own, unless a failure is known already: data of an aborted collective are garbage, which may raise anything. A
    # script may raise an exception of this package because of an error of a collective.
    waits = any(map(may_be_collectives, [error] if raised is None else _chain(error)))
    patience_s = FAILURE_NEWS_S if waits else 0.0 if raised is None else SETTLE_S
    if failed_within(patience_s):
        return Judgement(Outcome.RESTORE)
    if raised is None:
        return Judgement(Outcome.FAIL)
    # The others leave this world anyway if it changes.
    outcome = Outcome.KEEP if isinstance(raised, HostsUpdatedInterrupt) else Outcome.RESTORE
    return Judgement(outcome, None if changing else raised)


def cannot_leave(name: str, reason: str) -> str:
    """Say why a worker fails whose script asks for another world, and what to do."""
    why = reason or (
        "no agent can give it another world. Start it with elastic-run, or with torchrun --rdzv-backend=rust-c10d, and "
        "not with `in_place=off`"
    )
    return f"the script has raised {name} itself, and this worker cannot leave its world, so it fails: {why}"


def rolls_back_in_vain(name: str, roll_backs: int) -> str:
    """Say that roll-backs do not help, if a script asks for one more after so many to one commit. Empty if it may."""
    if roll_backs < MOST_ROLL_BACKS:
        return ""
    return (
        f"the script has raised {name} itself, and has gone back to the same commit {roll_backs} times before: it "
        "meets the same again. Let it do something else after a roll-back, such as to skip the batch, or raise another "
        "exception (docs/horovod.md)"
    )


def may_be_collectives(error: BaseException) -> bool:
    """Say whether an exception may come from a collective whose peers are gone: those are RuntimeErrors."""
    return isinstance(error, RuntimeError) and not isinstance(error, (*OURS, TensorMismatchError))


def is_stuck(error: Exception, *, meeting: bool, first: bool) -> bool:
    """Say whether an exception means that the members of a world have not met, so that all should leave it.

    A member that hangs lets collectives of the others time out. It does not leave that world, and is replaced. In its
    first world a worker fails with the exception instead: it has nothing to lose, and the user reads the exception.

    Members meet (``meeting``) when they make the process group, and when the state is broadcast.
    """
    return meeting and not first and isinstance(error, RuntimeError)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception and those that it was raised from: frameworks wrap what a callback raises."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__ or error


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception and its explicit causes. One that a script has caught and dropped asks for nothing."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


def unequal_checks(raises_at: int | None, made: int) -> str:
    """Say that the ranks have not made equally many checks, if a worker that has met an error can know it. Else empty.

    The others leave their world at their check ``raises_at``, and their collectives with this worker end with an error.
    It is one check after that of the foremost worker. With equal numbers no worker is more than one check behind that.
    """
    if raises_at is None or made + 2 >= raises_at:
        return ""
    return (
        f"the other ranks have left this world at their check {raises_at}, this rank has made {made}: all ranks must "
        "call commit and check_host_updates equally often"
    )


def must_sync(world_says: bool, commit: int | None) -> bool:
    """Say whether the state is broadcast before the user's function is called.

    The coordinator knows whether any worker is new and whether commits differ. It does not know that nobody has ever
    broadcast a state, when the first world failed before it could: all workers then have no commit, and all of them
    conclude the same.
    """
    return world_says or commit is None


def parked_number(commit: int | None, *, ahead: int) -> int | None:
    """Return the number by which the coordinator knows which state is the newest.

    It is the number of the last commit or sync, and more if the worker keeps changes made after that: one more if all
    workers have left their world at the same check, and have the same changes. See :func:`ahead_by_script`.
    """
    return commit if commit is None else commit + ahead


def ahead_by_script(rank: int, size: int) -> int:
    """Return by how much the number of a worker grows that keeps its state, since its script has asked for a new world.

    The workers that ask may not have made the same steps. The lowest rank gets the highest number, above that of any
    worker that has committed meanwhile, so its state is broadcast.
    """
    return 1 + size - rank


Identity = tuple[str, list[str]]
"""The name of the function that a worker is about to call with its state, and the names of the state's values."""


def mismatch(ours: Identity, theirs: Identity, source: int) -> str:
    """Say why this worker cannot take the state of the source. Empty if it can."""
    if ours == theirs:
        return ""
    (ours_runs, ours_has), (theirs_runs, theirs_has) = ours, theirs
    hint = "all ranks must make the same state"
    if ours_runs != theirs_runs:
        hint = (
            "a worker that is started while a later function runs begins with the first one. Use one function of "
            "elastic.run for the whole job, and keep what it has to do in the state"
        )
    return (
        f"rank {source} runs `{theirs_runs}` with a state of {', '.join(theirs_has) or 'no names'}; this worker runs "
        f"`{ours_runs}` with a state of {', '.join(ours_has) or 'no names'}: {hint}"
    )


class Attendance(NamedTuple):
    """Whether this worker connects to its agent, so that it can survive a change of the world."""

    path: str | None
    """The agent's socket, or None: the worker is stopped and started again like any other."""
    reason: str
    """Why not, for the log. Empty if there is nothing to say: there is no agent of ours, or `in_place` is off."""
    restarts_for_nccl: bool = False
    """Whether it is NCCL that `in_place` does not allow, which is the default on GPUs."""


def connects_lazily(environment: Mapping[str, str]) -> bool:
    """Return whether gloo connects in collectives, as torch reads ``TORCH_GLOO_LAZY_INIT``."""
    return environment.get(LAZY_INIT, "").lower() in {"1", "y", "yes", "t", "true"}


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
        why = f"process groups of backend {names} are not resized in place{hint}"
        return Attendance(None, why, restarts_for_nccl=refused == {"nccl"})
    if "gloo" in backends and connects_lazily(environment):
        return Attendance(
            None,
            f"with {LAZY_INIT}={environment[LAZY_INIT]} gloo connects in the middle of collectives, which nothing "
            "could end then when another worker fails: unset it",
        )
    if "nccl" in backends and environment.get(WATCHDOG) != "0":
        # The value counts when the group is made. `elastic.init` and `run` set it.
        return Attendance(
            None,
            f"NCCL's watchdog would end this worker when another one fails: set {WATCHDOG}=0 before "
            "init_process_group, or leave the process group to elastic.init or elastic.run",
        )
    return Attendance(path, "")


def is_launched(environment: Mapping[str, str]) -> bool:
    """Return whether a launcher has started this worker. Without one it is alone in its world."""
    return "RANK" in environment


def nccl_variables(environment: Mapping[str, str], backends: frozenset[str]) -> dict[str, str]:
    """Return the variables to set before a process group is made whose collectives are aborted when a peer fails.

    NCCL's watchdog and its heartbeat monitor would end the process meanwhile. What the user has set stays.
    """
    if "nccl" not in backends or environment.get(IN_PLACE) != "nccl" or not environment.get(AGENT):
        return {}
    return {name: "0" for name in NCCL_VARIABLES if name not in environment}


def backend_names(config: str) -> frozenset[str]:
    """Return the backends of a configuration such as ``gloo`` or ``cpu:gloo,cuda:nccl``. NCCL has one name here."""
    names = (part.rpartition(":")[2].strip().lower() for part in config.split(",") if part.strip())
    return frozenset("nccl" if name in NCCL_NAMES else name for name in names)
