"""The checks of ``elastic-run doctor`` on an etcd cluster: rules, and code that reads the facts for them.

Nothing is written to the cluster. Whether the user may write is asked by a transaction whose condition never holds:
etcd checks the rights to both of its branches first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from elastic_rs import _elastic_rs
from elastic_rs._doctor._findings import Answer, Finding, Question, mend, note, ok
from elastic_rs._elastic_rs import EtcdClient, EtcdMember, EtcdOptions

SLOW_S = 0.1
"""A join takes a handful of round trips, and an election of etcd's starts after a second of silence."""
NEVER = 2**63 - 1
"""A revision that no key has."""
FILLED_BYTES = 3 << 29
"""Three quarters of etcd's default quota, 2 GiB."""


@dataclass(frozen=True)
class Look:
    """What was found at all endpoints."""

    members: list[EtcdMember]
    """One for each endpoint."""
    voters: list[list[str]] = field(default_factory=list)
    """For each voting member that the cluster lists, its addresses for clients."""

    @property
    def up(self) -> list[EtcdMember]:
        """The members that have answered."""
        return [member for member in self.members if not member.error]


def findings(etcd: EtcdOptions, limit_s: float) -> Iterator[Finding]:
    """Check the cluster that nodes would meet over. Each question may take ``limit_s``."""
    # What the client would log is in the report.
    logging.getLogger("elastic_rs").addHandler(logging.NullHandler())
    client = _elastic_rs.EtcdClient(etcd)
    looking = Question(lambda: _look(client))
    # Both wait for a member that serves, and a cluster without a leader has none.
    reading = Question(lambda: _why_no_reading(client, f"{etcd.key_prefix}/doctor/"))
    writing = Question(lambda: _why_no_writing(client, f"{etcd.key_prefix}/doctor/state"))
    found = looking.answer(limit_s)
    if found.value is None:
        yield mend("endpoint", f"etcd at {etcd.endpoints}: {found.error}", "check that its members are up")
        return
    yield members(etcd.endpoints, found.value)
    if not found.value.up:
        return
    yield versions(found.value.up)
    yield space(found.value.up)
    yield latency(found.value.up)
    yield rights(etcd.key_prefix, etcd.username, reading.answer(limit_s), writing.answer(limit_s))


def _look(client: EtcdClient) -> Look:
    found, listed = client.look()
    return Look(found, [urls for _, urls, is_learner in listed if not is_learner])


def _why_no_reading(client: EtcdClient, prefix: str) -> str:
    """Return why the user may not read. Empty if it may."""
    try:
        client.range(prefix)
    except PermissionError as error:
        return str(error)
    return ""


def _why_no_writing(client: EtcdClient, key: str) -> str:
    """Return why the user may not write. Empty if it may."""
    try:
        if client.compare_and_put(key, NEVER, b"") is None:
            raise ConnectionError("no member has answered")
    except PermissionError as error:
        return str(error)
    return ""


def members(endpoints: str, look: Look) -> Finding:
    """Judge which members answer, and whether one leads."""
    where, up = f"etcd at {endpoints}", look.up
    down = [member for member in look.members if member.error]
    if not up:
        causes = list(dict.fromkeys(member.error for member in down if member.error))
        remedy = "start the cluster, or correct --rdzv-endpoint and what --rdzv-conf says of etcd"
        return mend("endpoint", f"{where}: no member can be used: {'; '.join(causes)}", remedy)
    voters = len(look.voters) or len(look.members)
    silent = f"; {'; '.join(member.error or '' for member in down)}" if down else ""
    remedy = "start the members that are down: joins need more than half of them"
    # A member still names a leader for a second after that has gone.
    if down and len(up) * 2 <= voters:
        return mend("endpoint", f"{where}: {len(up)} of {voters} members answer, so none can lead{silent}", remedy)
    if not any(member.knows_leader for member in up):
        return mend("endpoint", f"{where}: {len(up)} of {voters} members answer, and know no leader{silent}", remedy)
    leader = next((f", led by {member.name or member.endpoint}" for member in up if member.is_leader), "")
    text = f"{where}: {len(up)} of {voters} members answer{leader}"
    if down:
        return note("endpoint", f"{text}{silent}")
    if learners := [member.endpoint for member in up if member.is_learner]:
        return note("endpoint", f"{text}; {', '.join(learners)} is a learner, which serves nobody: leave it out")
    if voters == 1:
        return note("endpoint", f"{text}: while the only member is down no node joins; three members survive one loss")
    if voters % 2 == 0:
        return note("endpoint", f"{text}: {voters} members survive no more losses than {voters - 1}")
    if len(up) < voters:
        text += ": --rdzv-endpoint names not all of them, and a node can start only while one that it names is up"
        return note("endpoint", text)
    return ok("endpoint", text)


def versions(up: list[EtcdMember]) -> Finding:
    """Judge the members' versions, by the core's list of etcd's bugs."""
    found = sorted({member.version for member in up})
    problems = {member.version: "; ".join(member.problems) for member in up if member.problems}
    if problems:
        known = ". ".join(f"{version}: {said}" for version, said in sorted(problems.items()))
        return note("etcd version", f"{known}. Newer releases are better")
    if len(found) > 1:
        return note("etcd version", f"members have different ones: {', '.join(found)}; finish the upgrade")
    return ok("etcd version", found[0])


def space(up: list[EtcdMember]) -> Finding:
    """Judge the space for data, and whether a member has found its data damaged."""
    alarms = {alarm: [each.endpoint for each in up if alarm in each.alarms] for one in up for alarm in one.alarms}
    if where := alarms.get("CORRUPT"):
        text = f"CORRUPT, raised by {', '.join(where)}: members have different data"
        return mend(
            "etcd space", text, "replace that member, or restore the cluster from a snapshot (`etcdctl snapshot`)"
        )
    if where := alarms.get("NOSPACE"):
        text = f"NOSPACE, raised by {', '.join(where)}: jobs run on, but no node can join"
        return mend("etcd space", text, "etcdctl compact REVISION; etcdctl defrag --cluster; etcdctl alarm disarm")
    used = max(member.db_bytes[0] for member in up)
    text = f"no alarm, {used >> 20} MiB"
    if used > FILLED_BYTES:
        text += ", of 2 GiB unless --quota-backend-bytes says otherwise; --auto-compaction-retention bounds the history"
        return note("etcd space", text)
    return ok("etcd space", text)


def latency(up: list[EtcdMember]) -> Finding:
    """Judge how long members take to answer."""
    slowest = max(up, key=lambda member: member.round_trip_s)
    text = f"{slowest.round_trip_s * 1000:.1f} ms at most, from {slowest.endpoint}"
    if slowest.round_trip_s > SLOW_S:
        return note("etcd latency", f"{text}, which is slow: a join takes several round trips")
    return ok("etcd latency", text)


def rights(prefix: str, user: str | None, reading: Answer[str], writing: Answer[str]) -> Finding:
    """Judge whether the user may read and write the keys. An answer is why not: empty if it may."""
    keys, who = f"keys below {prefix}/", f"user `{user}`" if user else "this client"
    denied = [verb for verb, answer in (("read", reading), ("write", writing)) if answer.value]
    if denied:
        why = writing.value or reading.value
        name = user or "USER"
        remedy = (
            f"etcdctl role add elastic; etcdctl role grant-permission --prefix=true elastic readwrite {prefix}/; "
            f"etcdctl user grant-role {name} elastic"
        )
        return mend("etcd rights", f"{who} may not {' and '.join(denied)} {keys}: {why}", remedy)
    if error := reading.error or writing.error:
        return note("etcd rights", f"it is not known whether {who} may read and write {keys}: {error}")
    return ok("etcd rights", f"{who} may read and write {keys}")
