"""``elastic-run doctor``: the rules for an etcd cluster. Real clusters: ``rust_etcd/test_doctor.py``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from elastic_rs._doctor import _etcd as etcd
from elastic_rs._doctor._etcd import Look
from elastic_rs._doctor._findings import Answer, Finding
from helpers.findings import assert_finding

VOTERS = [["http://a:1"], ["http://b:1"], ["http://c:1"]]
MIB = 1 << 20


@dataclass(frozen=True)
class Member:
    """As ``EtcdMember``."""

    endpoint: str
    error: str | None = None
    name: str = ""
    version: str = ""
    problems: list[str] = field(default_factory=list)
    is_leader: bool = False
    knows_leader: bool = True
    is_learner: bool = False
    alarms: list[str] = field(default_factory=list)
    db_bytes: tuple[int, int] = (0, 0)
    round_trip_s: float = 0.0


def member(endpoint: str = "a:1", **facts: Any) -> Any:
    return Member(endpoint, **{"name": f"m-{endpoint[0]}", "version": "3.6.9", "round_trip_s": 0.002, **facts})


def down(endpoint: str, error: str = "refused") -> Any:
    return Member(endpoint, f"etcd at {endpoint}: {error}")


LED = member("a:1", is_leader=True)


def reach(*found: Any, voters: list[list[str]] = VOTERS) -> Finding:
    return etcd.members("a:1,b:1,c:1", Look(list(found), voters if any(not one.error for one in found) else []))


def rights(reading: Answer[str], writing: Answer[str], user: str | None = "ann") -> Finding:
    return etcd.rights("/prefix", user, reading, writing)


MAY = Answer("", 0.1)
DENIED = Answer("permission denied", 0.1)
LATE: Answer[str] = Answer(None, 5, error="no answer within 5 s", late=True)

VERDICTS: list[tuple[Finding, str, str]] = [
    (reach(LED, member("b:1"), member("c:1")), "ok", "etcd at a:1,b:1,c:1: 3 of 3 members answer, led by m-a"),
    (reach(LED, member("b:1"), down("c:1")), "note", "2 of 3 members answer, led by m-a; etcd at c:1: refused"),
    (reach(member("b:1"), down("a:1"), member("c:1")), "note", "2 of 3 members answer; etcd at a:1: refused"),
    (reach(member("a:1", knows_leader=False), down("b:1"), down("c:1")), "mend", "1 of 3 members answer, so none"),
    (reach(LED, down("b:1"), down("c:1")), "mend", "1 of 3 members answer, so none can lead; etcd at b:1: refused"),
    (
        reach(member("a:1", knows_leader=False), member("b:1", knows_leader=False)),
        "mend",
        "2 of 3 members answer, and know",
    ),
    (
        reach(down("a:1"), down("b:1", "silent")),
        "mend",
        "no member can be used: etcd at a:1",
    ),
    (reach(down("a:1"), down("b:1", "silent")), "mend", "etcd at a:1: refused; etcd at b:1: silent"),
    (reach(down("a:1")), "mend", "correct --rdzv-endpoint"),
    (reach(LED, voters=VOTERS[:1]), "note", "1 of 1 members answer, led by m-a: while the only member is down"),
    (reach(LED, member("b:1"), voters=VOTERS[:2]), "note", "2 members survive no more losses than 1"),
    (reach(LED), "note", "1 of 3 members answer, led by m-a: --rdzv-endpoint names not all of them"),
    (reach(LED, member("b:1"), member("c:1"), member("d:1", is_learner=True)), "note", "d:1 is a learner"),
    (etcd.versions([LED, member("b:1")]), "ok", "3.6.9"),
    (etcd.versions([LED, member("b:1", version="3.6.10")]), "note", "have different ones: 3.6.10, 3.6.9"),
    (
        etcd.versions([member(version="3.5.1", problems=["it forgets", "it lies"]), LED]),
        "note",
        "3.5.1: it forgets; it lies. Newer",
    ),
    (etcd.space([LED]), "ok", "no alarm, 0 MiB"),
    (etcd.space([LED, member("b:1", alarms=["NOSPACE"])]), "mend", "NOSPACE, raised by b:1: jobs run on, but no node"),
    (etcd.space([member(alarms=["NOSPACE"])]), "mend", "etcdctl alarm disarm"),
    (
        etcd.space([member(alarms=["NOSPACE", "CORRUPT"])]),
        "mend",
        "CORRUPT, raised by a:1: members have different data",
    ),
    (etcd.space([member(db_bytes=(1536 * MIB, 0))]), "ok", "1536 MiB"),
    (etcd.space([LED, member(db_bytes=(1537 * MIB, 0))]), "note", "1537 MiB, of 2 GiB unless"),
    (etcd.latency([LED, member("b:1", round_trip_s=0.1)]), "ok", "100.0 ms at most, from b:1"),
    (etcd.latency([LED, member("b:1", round_trip_s=0.3)]), "note", "300.0 ms at most, from b:1, which is slow"),
    (rights(MAY, MAY), "ok", "user `ann` may read and write keys below /prefix/"),
    (rights(MAY, MAY, None), "ok", "this client may"),
    (rights(DENIED, DENIED), "mend", "user `ann` may not read and write keys below /prefix/: permission denied"),
    (rights(MAY, DENIED), "mend", "user `ann` may not write keys"),
    (
        rights(DENIED, MAY),
        "mend",
        "grant-permission --prefix=true elastic readwrite /prefix/; etcdctl user grant-role ann",
    ),
    (rights(LATE, DENIED), "mend", "may not write"),
    (rights(MAY, LATE), "note", "it is not known whether"),
]


@pytest.mark.parametrize(
    ("finding", "verdict", "text"), VERDICTS, ids=[f"{found.check} {text}" for found, _, text in VERDICTS]
)
def test_verdicts(finding: Finding, verdict: str, text: str) -> None:
    assert_finding(finding, verdict, text)
    assert len(finding.check) <= 12
