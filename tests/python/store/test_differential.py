"""Random sequences of operations, through both clients and on both servers: all four pairings must see the same.

A failing sequence is printed as a list of calls: ``c0`` … ``c3`` are clients that wait long, ``c4`` one that does not.
``ELASTIC_RS_DIFFERENTIAL`` is the number of sequences (`make test-long` sets it); known differences are modelled in
:mod:`helpers.store_steps`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from helpers.store_parties import Parties
from helpers.store_steps import CLIENTS, HASTY, KEY_LIMIT, LIST_LIMIT, VALUE_LIMIT, Big, Many, Step, plan
from hypothesis import HealthCheck, event, given, note, settings
from hypothesis import strategies as st

SEQUENCES = int(os.environ.get("ELASTIC_RS_DIFFERENTIAL", "150"))
# A sequence takes about 20 ms. The limit allows for slow machines and for shrinking.
LIMIT_S = 120 + SEQUENCES // 2

# Few keys, so that the clients interact. A careless server might confuse some of them.
KEYS = st.sampled_from([b"a", b"b", b"c", b"a", b"b", b"", b"/", b"a/", b"init/", b"\0\xff\x80", "schlüssel".encode()])
VALUES = st.one_of(
    st.sampled_from([b"", b"1", b"x", b"-5", b" 42", b"+7", b"12abc", b"1.9", b"9223372036854775807", b"-", b"\xff\0"]),
    st.binary(max_size=20),
    st.integers(1, 3000).map(Big),
)
NUMBERS = st.one_of(st.integers(-3, 3), st.sampled_from([2**62, 2**63 - 1, -(2**63)]))
LISTS = st.lists(KEYS, max_size=4).map(tuple)
PATIENT = st.integers(0, CLIENTS - 2)
ANY = st.integers(0, CLIENTS - 1)


def call(name: str, *args: st.SearchStrategy) -> st.SearchStrategy[Step]:
    return st.builds(lambda client, args: Step(client, name, args), PATIENT, st.tuples(*args))


def waiting_call(name: str, *args: st.SearchStrategy, has_timeout: bool) -> st.SearchStrategy[Step]:
    """Return a call that may block until it is released, or with a short time-out."""
    short = st.booleans() if has_timeout else st.just(value=False)
    return st.builds(
        lambda client, args, short: Step(client, name, args, gives_up=short or client == HASTY),
        ANY,
        st.tuples(*args),
        short,
    )


MULTI_SETS = st.one_of(
    st.lists(st.tuples(KEYS, VALUES), max_size=4).map(lambda pairs: tuple(zip(*pairs, strict=True)) or ((), ())),
    st.tuples(LISTS, st.lists(VALUES, max_size=2).map(tuple)),
)

WAITING = st.one_of(
    waiting_call("wait", LISTS, has_timeout=True),
    waiting_call("get", KEYS, has_timeout=False),
    waiting_call("multi_get", LISTS, has_timeout=False),
    waiting_call("queue_pop", KEYS, has_timeout=False),
    waiting_call("barrier", KEYS, st.integers(-1, 4), has_timeout=True),
)
OTHERS = st.one_of(
    call("set", KEYS, VALUES),
    call("append", KEYS, VALUES),
    call("add", KEYS, NUMBERS),
    call("compare_set", KEYS, VALUES, VALUES),
    call("delete_key", KEYS),
    call("check", LISTS),
    call("queue_push", KEYS, VALUES),
    call("queue_pop", KEYS, st.just(value=False)),
    call("queue_len", KEYS),
    call("num_keys"),
    call("list_keys"),
    st.builds(lambda client, args: Step(client, "multi_set", args), PATIENT, MULTI_SETS),
)
STEPS = st.lists(st.one_of(WAITING, OTHERS, OTHERS), min_size=1, max_size=25)

LONG_KEYS = st.sampled_from([Big(KEY_LIMIT), Big(KEY_LIMIT + 1)])
LONG_VALUES = st.sampled_from([Big(VALUE_LIMIT), Big(VALUE_LIMIT + 1)])
LONG_LISTS = st.builds(Many, KEYS, st.sampled_from([LIST_LIMIT, LIST_LIMIT + 1]))
AT_LIMITS = st.one_of(
    *(call(name, LONG_KEYS, st.just(b"1")) for name in ("set", "append", "queue_push")),
    *(call(name, KEYS, LONG_VALUES) for name in ("set", "append", "queue_push")),
    call("compare_set", KEYS, VALUES, LONG_VALUES),
    call("compare_set", KEYS, LONG_VALUES, VALUES),
    call("add", LONG_KEYS, NUMBERS),
    *(call(name, LONG_KEYS) for name in ("delete_key", "queue_len")),
    waiting_call("get", LONG_KEYS, has_timeout=False),
    waiting_call("barrier", LONG_KEYS, st.integers(0, 2), has_timeout=True),
    waiting_call("wait", LONG_KEYS.map(lambda key: (b"a", key)), has_timeout=True),
    *(call(name, LONG_LISTS) for name in ("check", "wait")),
)


@pytest.fixture(scope="module")
def parties() -> Iterator[Parties]:
    parties = Parties()
    yield parties
    parties.close()


def same_everywhere(parties: Parties, steps: list[Step]) -> None:
    actions = plan(steps)
    for action in actions:
        event(type(action).__name__)
    (reference, expected), *others = parties.play(actions)
    for who, seen in others:
        for at, (ours, theirs) in enumerate(zip(seen, expected, strict=True)):
            if ours == theirs:
                continue
            parties.close()
            played = [*actions, "the store's contents"]
            note("Played:\n" + "\n".join(f"{n:>3} {what}" for n, what in enumerate(played)))
            text = f"{played[at]} (number {at})\n  {who}: {ours!r:.2000}\n  {reference}: {theirs!r:.2000}"
            pytest.fail(text, pytrace=False)


COMMON = settings(
    deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)


@pytest.mark.timeout(LIMIT_S)
@settings(COMMON, max_examples=SEQUENCES)
@given(steps=STEPS)
def test_all_pairings_see_the_same(parties: Parties, steps: list[Step]) -> None:
    same_everywhere(parties, steps)


# These requests and replies have megabytes, so there are fewer sequences.
@pytest.mark.timeout(LIMIT_S)
@settings(COMMON, max_examples=max(15, SEQUENCES // 20))
@given(steps=st.lists(st.one_of(AT_LIMITS, WAITING, OTHERS), min_size=1, max_size=8))
def test_all_pairings_see_the_same_at_the_limits(parties: Parties, steps: list[Step]) -> None:
    same_everywhere(parties, steps)
