"""A worker that changes in place: a loop of steps, each of which sums over the world, and commits every few steps.

steps.py --until FILE         end well once the file exists, all ranks after the same step
steps.py --commit-every N     commit every N steps (5)
steps.py --pause SECONDS      sleep in each step (0.02)
steps.py --checkpoint FILE    begin with the step in FILE, where rank 0 writes every --checkpoint-every steps (50)
steps.py --torch-state        keep the state in a TorchState
steps.py --deaf               do not connect to the agent, as programs do that do not use elastic_rs.elastic
steps.py --own-group          make the process group, as PyTorch's scripts do, before the state is run
steps.py --stuck RANK         the worker that is first started with this rank ignores the end of its world
steps.py --fail-at-restart N  a worker that is first started at the Nth restart fails before it is in a world
steps.py --die-in PHASE       the worker that is first started with rank 1 is killed in this phase after a failure
steps.py --raise KIND         once at step 12, nan: go back to the last commit, new-world: ask for another world;
                              same-nan: at step 12 again and again
steps.py --raise-rank RANK    only this rank does (all)
steps.py --commit-rank RANK   only this rank commits and checks
steps.py --extra-name NAME    the state has this value too
steps.py --extra-on HOST      only on this host of a driver's
steps.py --warm-up            another function of elastic.run makes the first three steps
steps.py --hang-in PHASE      the same, but it is stopped (SIGSTOP), and the others wait for it for a second
"""

import argparse
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PHASES = ("restore", "leave", "group", "grouped", "reset", "sync", "synced")

parser = argparse.ArgumentParser()
parser.add_argument("--until", type=Path, required=True)
parser.add_argument("--commit-every", type=int, default=5)
parser.add_argument("--pause", type=float, default=0.02)
parser.add_argument("--checkpoint", type=Path)
parser.add_argument("--checkpoint-every", type=int, default=50)
parser.add_argument("--torch-state", action="store_true")
parser.add_argument("--deaf", action="store_true")
parser.add_argument("--own-group", action="store_true")
parser.add_argument("--stuck", type=int)
parser.add_argument("--fail-at-restart", type=int)
parser.add_argument("--die-in", choices=PHASES)
parser.add_argument("--hang-in", choices=PHASES)
parser.add_argument("--raise", dest="raises", choices=["nan", "same-nan", "new-world"])
parser.add_argument("--raise-rank", type=int)
parser.add_argument("--extra-name")
parser.add_argument("--extra-on")
parser.add_argument("--warm-up", action="store_true")
parser.add_argument("--commit-rank", type=int, help="only this rank commits")
args = parser.parse_args()
first_rank, first_restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def say(text: str) -> None:
    # One write for the whole line, because the workers of a node share a pipe.
    os.write(1, f"{text}\n".encode())


def step() -> tuple[int, bool]:
    """Return the number of workers that take part, and whether this was the last step."""
    time.sleep(args.pause)
    numbers = torch.tensor([1.0, float(args.until.exists())])
    dist.all_reduce(numbers)
    return int(numbers[0]), bool(numbers[1])


def tell_world(at: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    restarts, generation = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_GENERATION"]
    say(f"WORLD rank={rank} world={world} step={at} pid={os.getpid()} generation={generation} restarts={restarts}")


def end_in(phase: str, state: Any, ends: signal.Signals) -> None:
    """Have this process killed or stopped when it gets to a phase of the next change after a failure."""
    failed = False

    def now(what: str) -> None:
        if failed and what == phase:
            say(f"{ends.name} in {phase}")
            os.kill(os.getpid(), ends)

    def with_phases(before: str, call: Callable[..., Any], after: str = "") -> Callable[..., Any]:
        def call_between(*args: Any, **kwargs: Any) -> Any:
            now(before)
            result = call(*args, **kwargs)
            now(after)
            return result

        return call_between

    def restore(call: Callable[[], None] = state.restore) -> None:
        nonlocal failed
        failed = True
        now("restore")
        call()

    def leave(call: Callable[[], None] = dist.destroy_process_group) -> None:
        nonlocal failed
        failed = True
        now("leave")
        call()

    state.restore = restore
    state.reset = with_phases("reset", state.reset)
    state.sync = with_phases("sync", state.sync, "synced")
    dist.destroy_process_group = leave  # type: ignore[assignment]
    dist.init_process_group = with_phases("group", dist.init_process_group, "grouped")


def in_place() -> None:
    import elastic_rs
    from elastic_rs import elastic
    from elastic_rs.elastic import _membership

    raised = False

    def raise_once(at: int) -> None:
        nonlocal raised
        if not args.raises or raised or at != 12 or args.raise_rank not in {None, dist.get_rank()}:
            return
        raised = args.raises != "same-nan"
        if "nan" in args.raises:
            raise elastic.HorovodInternalError("loss is nan")
        raise elastic.HostsUpdatedInterrupt(skip_sync=False)

    @elastic.run(backend="gloo")
    def train(state: Any) -> None:
        tell_world(state.step)
        last = False
        while not last:
            world, last = step()
            assert world == dist.get_world_size()
            state.step += 1
            state.ones += world
            elastic_rs.step(state.step)
            say(f"STEP {state.step} ones={state.ones} rank={dist.get_rank()} world={world} pid={os.getpid()}")
            if args.checkpoint and state.step % args.checkpoint_every == 0 and dist.get_rank() == 0:
                part = args.checkpoint.with_suffix(".part")
                part.write_text(str(state.step))
                part.replace(args.checkpoint)
            raise_once(state.step)
            if args.commit_rank not in {None, dist.get_rank()}:
                continue
            if state.step % args.commit_every == 0:
                state.commit()
            else:
                state.check_host_updates()

    @elastic.run(backend="gloo")
    def warm_up(state: Any) -> None:
        while state.step < 3:
            state.ones += step()[0]
            state.step += 1
            state.commit()

    if args.own_group:
        dist.init_process_group("gloo")
    if args.fail_at_restart == first_restart:
        raise ValueError("no such data set")
    begins_at = int(args.checkpoint.read_text()) if args.checkpoint and args.checkpoint.exists() else 0
    kind: Any = elastic.TorchState if args.torch_state else elastic.ObjectState
    is_extra = args.extra_name and args.extra_on in {None, os.environ.get("ELASTIC_RS_HOST")}
    state = kind(step=begins_at, ones=0, **({args.extra_name: 0} if is_extra else {}))
    if args.stuck == first_rank and first_restart == 0:
        state.restore = lambda: time.sleep(3600)
    if args.die_in and first_rank == 1 and first_restart == 0:
        end_in(args.die_in, state, signal.SIGKILL)
    if args.hang_in:
        _membership.STEP_LIMIT_S = 1.0
        if first_rank == 1 and first_restart == 0:
            end_in(args.hang_in, state, signal.SIGSTOP)
    if args.warm_up:
        warm_up(state)
    train(state)
    say(f"DONE steps={state.step} ones={state.ones}")


if args.deaf:
    del os.environ["ELASTIC_RS_AGENT"]
in_place()
