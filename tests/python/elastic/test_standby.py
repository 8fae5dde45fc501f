"""What a script reads of its place while it has none."""

import os

import pytest
from elastic_rs.elastic._standby import Reads

PLACE = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0"}


def reads_of(monkeypatch: pytest.MonkeyPatch, standby: str) -> Reads:
    monkeypatch.setenv("ELASTIC_RS_STANDBY", standby)
    for name, value in {"RANK": "2", "LOCAL_RANK": "1", "WORLD_SIZE": "3", "OTHER": "x"}.items():
        monkeypatch.setenv(name, value)
    reads = Reads()
    reads.begin()
    return reads


def test_what_is_read_and_otherwise_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = type(os.environ)
    reads = reads_of(monkeypatch, "1")
    assert (os.environ["RANK"], os.environ.get("LOCAL_RANK"), os.getenv("OTHER")) == ("2", "1", "x")
    with pytest.raises(KeyError):
        os.environ["MASTER_ADDR"]
    reads.end()
    assert type(os.environ) is plain
    assert "ELASTIC_RS_STANDBY" not in os.environ, "nor in what it starts"
    assert os.environ["WORLD_SIZE"] == "3", "by this package, for example"
    assert reads.other_than(PLACE) == ["RANK=2"], "the local rank is right"


def test_who_copies_the_environment_for_a_child_has_read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = reads_of(monkeypatch, "1")
    copies = [dict(os.environ), {**os.environ}, os.environ.copy(), dict(os.environ.items())]
    copies.append(dict(zip(os.environ, os.environ.values(), strict=True)))
    assert all(copy["RANK"] == "2" for copy in copies)
    assert reads.other_than(PLACE) == []
    assert "RANK" in os.environ
    assert os.environ["RANK"] == "2"
    reads.end()
    assert reads.other_than(PLACE) == ["RANK=2"], "afterwards it is a read as any other"


def test_a_worker_with_a_place_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = type(os.environ)
    reads = reads_of(monkeypatch, "")
    assert type(os.environ) is plain
    assert os.environ["RANK"] == "2"
    reads.end()
    assert reads.other_than(PLACE) == []
