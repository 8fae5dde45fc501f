"""A job's story as text, for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from elastic_rs._observe._events import Event, host_of, replayed
from elastic_rs._observe._story import Hang, Part, Recovery, Story
from elastic_rs._terminal import plain

_SAID = ("worker.exited", "worker.ended", "node.lost", "node.joined", "hang.found")
"""Types of events that :func:`what` says without their text."""
_LONGEST = 72
"""Most characters that are shown of a worker's failure message."""
_SHOWN = 3
"""Most nodes that a line of ``status`` names."""
_HOSTS = 16
"""Most hosts that are not used, of which ``status`` has a line each. A coordinator names no more."""
_MISMATCH = (
    "a mismatch of collectives: the rank that aborted is its victim, not always its cause: it got more bytes than it "
    "asked for"
)


def status(story: Story, state: dict[str, Any] | None) -> list[str]:
    lines = [_headline(story, state)]
    if state is not None and state.get("list") is not None:
        lines.append(_list(state["list"]))
    if state is not None and state["state"] in ("waiting", "reforming"):
        lines.append(f"waits   {plain(state['progress'])}")
        if state["unreachable_names"]:
            lines.append(f"        no connection to {_some(map(story.name, map(plain, state['unreachable_names'])))}")
    if state is not None and state.get("verdict"):
        lines.append(f"ended   {plain(state['verdict'])}")
    elif story.closed is not None and story.closed.text:
        lines.append(f"ended   {story.closed.text}")
    lines += _hang_now(story, state)
    goodput = story.goodput_at_most()
    if goodput is not None:
        at_most = "at most " if story.goodput() is None else ""
        known = " of the recorded time" if story.dropped() or story.incarnations > 1 else ""
        lines.append(f"goodput {at_most}{100 * goodput:.1f} %{known}{_losses(story)}")
    if state is not None and isinstance(state.get("step"), int):
        lines.append(f"step    {state['step']:,}{_each(state.get('step_time_us'))}")
    elif story.last_first_step is not None:
        lines.append(_step(story.last_first_step, story))
    if state is not None and state.get("restarts_for_nccl"):
        from elastic_rs.elastic._decisions import RESTARTED_FOR_NCCL  # rarely needed

        lines.append(RESTARTED_FOR_NCCL)
    lines += _restarts(state)
    if story.dropped():
        lines.append(f"        {story.dropped()} earlier events were dropped")
    if story.incarnations > 1:
        lines.append(f"        since the coordinator or the job was restarted; {_counted(story.earlier)} before that")
    if story.recoveries:
        last = story.recoveries[-1]
        ago = span((story.now_us - last.root.mono_us) / 1e6)
        lines.append(f"last    {ago} ago: {what(last.root, story)} (see why)")
    for node, phase, times, part in story.slowest()[:_SHOWN]:
        lines.append(
            f"slow    {story.name(node)}: {phase} {span(part.longest_s)} (median {span(part.median_s)}), slowest in "
            f"{times} of {len(story.recoveries)} recoveries"
        )
    for node, event in list(story.away.items())[-_SHOWN:]:
        ago = span((story.now_us - event.mono_us) / 1e6)
        times = story.gone.get(host_of(node), 1)
        often = f", gone {times} times" if times > 1 else ""
        verb = "lost" if event.type == "node.lost" else "left"
        lines.append(f"away    {story.name(node)}: {verb} {ago} ago{often}")
    if len(story.away) > _SHOWN:
        lines.append(f"        and {len(story.away) - _SHOWN} more")
    if state is not None:
        lines += _unused(state)
    return lines


def _list(led: dict[str, Any]) -> str:
    """Return a line that says which endpoint leads, and what the loss of it would do."""
    successors, missing = ([plain(name) for name in led[part]] for part in ("successors", "missing"))
    then = f"if it dies, {' or '.join(successors)} leads" if successors else "if it dies, NOBODY takes over"
    gone = f"; not there: {', '.join(missing)}" if missing else ""
    return f"list    {plain(led['leader'])} leads; {then}{gone}"


def _hang_now(story: Story, state: dict[str, Any] | None) -> list[str]:
    """Return a line that says for whom the others wait, if the training stands still."""
    if state is None:
        hangs = story.hangs and story.hangs[-1].ended_us is None
        return [f"HANGS   {what(story.hangs[-1].found, story)}"] if hangs else []
    hang = state.get("hang")
    if hang is None:
        return []
    text = plain(hang["text"])
    if hang["found"]:
        return [f"HANGS   {text}"]
    return [f"waits   {rest}" if (rest := text.removeprefix("waits ")) != text else f"still   {text}"]


def _unused(state: dict[str, Any]) -> list[str]:
    """Return a line for each host that is not used: for how long, why, and what to do."""
    hosts = state.get("unused_hosts", ())
    lines = [
        plain(f"unused  {host['host']} {host['how_long']}: {host['why']}; {host['advice']}") for host in hosts[:_HOSTS]
    ]
    more = len(hosts[_HOSTS:]) + state.get("unused_hosts_more", 0)
    return [*lines, f"        and {more} more"] if more else lines


def why(story: Story, which: int | None = None) -> list[str]:
    """Return the lines of ``why``: one recovery with its causes and what it cost."""
    hang = story.hangs[-1] if which is None and story.hangs else None
    if hang is not None and all(one.hang is not hang for one in story.recoveries):
        # It has ended by itself, or goes on: no recovery shows it.
        before = _recovery(story, None)
        return [*hang_lines(hang, story), *([""] if story.recoveries else []), *before]
    return _recovery(story, which)


def hang_lines(hang: Hang, story: Story) -> list[str]:
    """Return the lines of a hang that is not part of a recovery."""
    time = _time_of_day(hang.found)
    verb = "hangs" if hang.ended_us is None else "hung"
    lines = [f"the training {verb}{f', found at {time}' if time else ''}", *(f" {line}" for line in _evidence(hang))]
    if hang.over is not None:
        lines.append(f" +- {what(hang.over, story)}  +{span((hang.over.mono_us - hang.found.mono_us) / 1e6)}")
    return lines


def _evidence(hang: Hang) -> list[str]:
    return hang.lines or [hang.found.text or "its event has no lines"]


def _recovery(story: Story, which: int | None) -> list[str]:
    if not story.recoveries and story.dropped():
        return [f"{story.run}: the recorded events hold no recovery; {story.dropped()} earlier events were dropped"]
    if not story.recoveries:
        ended = f"; {story.closed.text}" if story.closed is not None and story.closed.text else ""
        return [f"{story.run or 'this job'}: no recovery so far{ended}"]
    number = len(story.recoveries) if which is None else which
    recovery = story.recoveries[number - 1]
    root = what(recovery.root, story)
    if recovery.root.text is None and recovery.root.type not in _SAID:
        root = recovery.broken.text or root  # it says why
    lines = [_title(recovery, number, story), f" {root}{_following(recovery)}"]
    start = recovery.root.mono_us

    def after(event: Event) -> str:
        return f"+{span((event.mono_us - start) / 1e6)}"

    stopped = [f"    |  {line}" for line in _stopped(recovery, story)]
    lines += [f"    |  {line}" for line in _explained(recovery, story)]
    followed = [f"    |  {what(event, story)}  {after(event)}" for event in recovery.consequences[:_SHOWN]]
    if len(recovery.consequences) > _SHOWN:
        followed.append(f"    |  and {len(recovery.consequences) - _SHOWN} more")
    if recovery.broken.type == "run.closed":
        return [*lines, *followed, *stopped, f"    +- {recovery.broken.text or 'the job has ended'}"]
    if recovery.broken is not recovery.root:
        verb = "changes in place" if recovery.broken.type == "round.changes" else "broken, all nodes notified"
        lines.append(f" +- round {recovery.broken.round} {verb}  {after(recovery.broken)}")
    lines += [*followed, *stopped]
    if recovery.completed is None:
        ends = story.closed.text if story.closed is not None else None
        lines.append(f"    +- {ends or 'the next round is not complete yet'}")
    else:
        completed = recovery.completed
        nodes, before = completed.data.get("nodes"), recovery.nodes_before
        of = f" of {before}" if before not in (None, nodes) else ""
        in_place = ", workers kept running" if completed.data.get("in_place") else ""
        lines.append(f"    +- round {completed.round} complete with {nodes}{of} nodes{in_place}  {after(completed)}")
        lines += [f"       {phase:<10} {_part(part, story)}" for phase, part in recovery.parts.items()]
        if recovery.ended_us is None:
            lines.append("       no training step yet")
        if recovery.redo is not None and recovery.redo.steps:
            count = recovery.redo.steps
            lines.append(f"       redo       {count} step{'s' * (count > 1)} redone ({span(recovery.redo.seconds)})")
        if recovery.hang is not None and recovery.hang.over is not None:
            lines.append(f"    {what(recovery.hang.over, story)}  {after(recovery.hang.over)}")
    return lines


def _explained(recovery: Recovery, story: Story) -> list[str]:
    """Return what explains the root cause: the lines of a hang, others that ended early, a mismatch of collectives."""
    lines: list[str] = []
    hang = recovery.hang
    if hang is not None and hang.found is recovery.root:
        lines += (line for at, line in enumerate(_evidence(hang)) if at != 1)  # the root's line has the second one
    elif hang is not None:
        ago = span((recovery.trigger.mono_us - hang.found.mono_us) / 1e6)
        lines += [f"{what(hang.found, story)} (found {ago} before)", *hang.lines[2:4]]
    others = [f"{story.name(one.node) if one.node else '?'} rank {one.data.get('rank')}" for one in recovery.early[1:]]
    if others:
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        lines.append(f"so did {', '.join(others[:_SHOWN])}{more}")
    if recovery.mismatched is not None:
        lines.append(_MISMATCH)
    return lines


def recoveries(story: Story) -> list[str]:
    """Return the lines of ``why --list``: the job, and a line for each recovery."""
    times = [time for event in (*story.events[:1], *story.events[-1:]) if (time := _time_of_day(event))]
    when = f", {times[0]} to {times[-1]}" if times else ""
    ended = f"; {story.closed.text or story.closed.data.get('verdict', 'closed')}" if story.closed is not None else ""
    lines = [f"{story.run}: {_times(story)}{when}{ended}"]
    for number, recovery in enumerate(story.recoveries, start=1):
        lasted = span(recovery.lasted_s(story.end_us()))
        lines.append(f"{number:>4}  {_time_of_day(recovery.root) or '?'}  {lasted:>9}  {what(recovery.root, story)}")
    return lines


def event_line(event: Event, story: Story, since_us: int) -> str:
    node = story.name(event.node) if event.node else ""
    text = event.text or _facts(event, story)
    if (inner := replayed(event)) is not None:
        ago = span((event.mono_us - inner.mono_us) / 1e6)
        text = f"{ago} before: {inner.type}, {inner.text or _facts(inner, story)}"
    numbers = (cause.rpartition(".")[2] for cause in event.cause) if event.follows is None else map(str, event.follows)
    causes = ", ".join(numbers)
    line = f"{event.order:>5} {_clock(event.mono_us - since_us)} r{event.round} {event.type:<18} {node:<12} {text}"
    return line + (f"  <- {causes}" if causes else "")


def what(event: Event, story: Story) -> str:
    """Return what an event is about, shortly."""
    who = story.name(event.node) if event.node else "?"
    data = event.data
    match event.type:
        case "worker.exited":
            message = str(data.get("message") or "")
            message = f' "{_shortened(message)}"' if message else ""
            return f"{who} rank {data.get('rank')} {data.get('exit')}{message}"
        case "node.lost":
            how = {
                "connection": "its connection ended",
                "silence": "silent",
                "lease": "its lease ended",
                "notice": "its machine was taken away",
            }
            silent = data.get("silent_ms")
            silence = f" for {span(silent / 1e3)}" if data.get("how") == "silence" and isinstance(silent, int) else ""
            return f"{who} lost: {how.get(str(data.get('how')), 'it sends nothing any more')}{silence}"
        case "node.joined":
            return f"{who} joined"
        case "worker.ended" if data.get("stopped") is False and data.get("returncode") == 0:
            return f"{who} rank {data.get('rank')} ended early, with exit code 0, while others ran on"
        case "hang.found" | "hang.waits":
            lines = Hang(event).lines
            verb = "hung" if event.type == "hang.found" else "waits"
            return f"the training {verb}: {(lines[1:] or lines or [event.text or 'nobody is named'])[0].strip()}"
        case "hang.over" if isinstance(still := data.get("still_ms"), int):
            return f"training goes on, after {span(still / 1e3)} without progress"
        case _:
            return event.text or f"{event.type} {who}".replace(" ?", "")


def _headline(story: Story, state: dict[str, Any] | None) -> str:
    elapsed = f", {span(story.elapsed_s())}" if story.formed_us is not None else ""
    if state is None:
        verdict = "" if story.closed is None else f"  {str(story.closed.data.get('verdict', 'closed')).upper()}"
        return f"{story.run}{verdict}  {_times(story)}{elapsed}"
    shown = plain(str(state["state"])).upper()
    if state["state"] == "closed":
        shown = "FAILED" if state["failed"] else "ENDED"
    fewest, most = state["min_nodes"], state["max_nodes"]
    bounds = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    workers = f", {state['workers']} workers" if state["workers"] is not None else ""
    most = state["max_restarts"]
    budget = f" of {most}" if most is not None and state.get("budget") is None else ""
    waiting = f", {state['waiting']} wait" if state["waiting"] else ""
    return (
        f"{plain(state['run'])}  {shown}  round {state['round']}, {state['running']} nodes ({bounds}){waiting}"
        f"{workers}{elapsed}; restart {state['restart']}{budget}"
    )


_KINDS = (("crashes", "crash", "crashes"), ("hangs", "hang", "hangs"), ("losses", "node lost", "nodes lost"),
          ("departures", "node left", "nodes left"))  # fmt: skip


def _restarts(state: dict[str, Any] | None) -> list[str]:
    """Return what a running world was interrupted by, and what is left of a sliding budget."""
    if state is None:
        return []
    kinds = state.get("interruptions") or {}
    counts = ", ".join(
        f"{kinds[key]} {one if kinds[key] == 1 else many}" for key, one, many in _KINDS if kinds.get(key)
    )
    lines = [f"broken  {counts}"] if counts else []
    if budget := state.get("budget"):
        most, window = state["max_restarts"], span(float(budget["window_s"]))
        left = f"budget  within {window}: {budget['crashes']} of {most} restarts left after crashes, "
        lines.append(left + f"{budget['hangs']} of {most} after hangs")
        if budget["in_vain"]:
            lines[-1] += f"; the last {budget['in_vain']} brought no new step (3 end the job)"
    return lines


def _losses(story: Story) -> str:
    if not story.recoveries:
        return ""
    sums: dict[str, float] = {}
    for recovery in story.recoveries:
        for phase, part in recovery.parts.items():
            sums[phase] = sums.get(phase, 0.0) + part.longest_s
        if recovery.redo is not None:
            sums["redo"] = sums.get("redo", 0.0) + recovery.redo.seconds
    shares = sorted(((seconds, phase) for phase, seconds in sums.items() if seconds >= 0.001), reverse=True)
    listed = ", ".join(f"{phase} {span(seconds)}" for seconds, phase in shares)
    return f"; {_times(story)} lost {span(story.lost_s())}" + (f" = {listed}" if listed else "")


def _step(event: Event, story: Story) -> str:
    ago = span((story.now_us - event.mono_us) / 1e6)
    return f"step    {event.data['step']:,} was the first of round {event.round}, {ago} ago"


def _each(step_time_us: object) -> str:
    return f", {span(step_time_us / 1e6)} each" if isinstance(step_time_us, int) else ""


def _times(story: Story) -> str:
    return _counted(len(story.recoveries))


def _counted(count: int) -> str:
    return "1 recovery" if count == 1 else f"{count} recoveries"


def _title(recovery: Recovery, number: int, story: Story) -> str:
    rounds = f"round {recovery.broken.round}"
    if recovery.completed is not None:
        rounds += f" to {recovery.completed.round}"
    workers = f" x {recovery.workers} workers" if recovery.workers else ""
    lasted = span(recovery.lasted_s(story.end_us()))
    time = _time_of_day(recovery.root)
    at = f", at {time}" if time else ""
    return f"recovery {number} of {len(story.recoveries)}, {rounds}: {lasted}{workers}{at}"


def _time_of_day(event: Event) -> str:
    """Return when it was recorded, in this machine's time zone. Empty: the event does not say it."""
    try:
        return datetime.fromisoformat(event.wall).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    except (ValueError, OverflowError):
        return ""


def _following(recovery: Recovery) -> str:
    count = len(recovery.consequences)
    return "   root cause" if count == 0 else f"   root cause; {count} consequence{'s' * (count > 1)}"


def _stopped(recovery: Recovery, story: Story) -> list[str]:
    """Return one line about the workers that had not failed and were stopped, if there are any."""
    by_exit: dict[str, list[Event]] = {}
    for event in recovery.stopped:
        by_exit.setdefault(str(event.data.get("exit")), []).append(event)
    counts = []
    for exit_, events in sorted(by_exit.items(), key=lambda item: -len(item[1])):
        who = (f"{story.name(event.node) if event.node else '?'} rank {event.data.get('rank')}" for event in events)
        more = f" and {len(events) - _SHOWN} more" if len(events) > _SHOWN else ""
        counts.append(f"{len(events)} by {exit_} ({', '.join(list(who)[:_SHOWN])}{more})")
    count = len(recovery.stopped)
    return [f"{count} other worker{'s were' if count > 1 else ' was'} stopped: {'; '.join(counts)}"] if counts else []


def _part(part: Part, story: Story) -> str:
    if part.nodes == 1:
        return span(part.longest_s)
    return f"median {span(part.median_s)}; {story.name(part.slowest)} {span(part.longest_s)}"


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    shown = ", ".join(listed[:8])
    return f"{shown} and {len(listed) - 8} more" if len(listed) > 8 else shown


def _shortened(text: str) -> str:
    """Return the beginning of a failure message, up to the end of a word."""
    if len(text) <= _LONGEST:
        return text
    begin = text[:_LONGEST]
    words = begin.rpartition(" ")[0]
    return f"{words if len(words) > _LONGEST // 2 else begin} …"


def _facts(event: Event, story: Story) -> str:
    if event.type.startswith("hang."):
        return what(event, story)
    if event.type == "worker.exited":
        return what(event, story).removeprefix(f"{story.name(event.node)} " if event.node else "? ")
    facts = []
    for key, value in event.data.items():
        if key.endswith("_us") and isinstance(value, int):
            facts.append(f"{key.removesuffix('_us')} {span(value / 1e6)}")
        elif value is not None:
            facts.append(f"{key}={value}")
    return ", ".join(facts)


def _clock(micros: int) -> str:
    """Return the time since the beginning, in hours, minutes, and seconds with milliseconds."""
    sign, millis = ("-", -micros // 1000) if micros < 0 else ("", micros // 1000)
    seconds = millis // 1000
    return f"{sign}{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}.{millis % 1000:03}"


def span(seconds: float) -> str:
    """Return a time with as many digits as matter."""
    if seconds < 0.0095:
        return f"{max(0.0, seconds) * 1000:.1f} ms"
    if seconds < 9.95:
        return f"{seconds:.2f} s"
    if seconds < 99.5:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds) // 60}:{int(seconds) % 60:02} min"
    return f"{int(seconds) // 3600}:{int(seconds) % 3600 // 60:02} h"
