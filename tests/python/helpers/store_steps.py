"""Steps of the differential test, and a model that predicts their order.

The model predicts for each step only what ordering needs: whether it blocks, which clients it releases, and whether it
costs the connection. It does not predict the steps' *results*; these are compared between the servers.

The two servers differ on purpose (the opening of ``src/store/table.rs`` lists where). So there are two models. They
differ in the three points that a client can see, marked 1 to 3 below. A step is left out if the models disagree on
whether it blocks or which clients it releases. Nothing else is excluded. (Neither client can send a second WAIT on a
connection with an open one, and the order of ``list_keys`` is not compared.)
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any

KEY_LIMIT = 8192 - 1  # the client puts a slash in front
VALUE_LIMIT = 8 * 1024 * 1024
LIST_LIMIT = 128 * 1024

CLIENTS = 5
HASTY = 4  # the client with a short default time-out; the others have a long one


@dataclass(frozen=True)
class Big:
    """A value, or a key, of this many bytes."""

    size: int

    def __repr__(self) -> str:
        return f"big({self.size})"


@dataclass(frozen=True)
class Many:
    """A list that names one key ``count`` times."""

    key: bytes
    count: int

    def __repr__(self) -> str:
        return f"[{self.key!r}] * {self.count}"


@cache
def _big(size: int) -> bytes:
    return (bytes(range(256)) * (size // 256 + 1))[:size]


def plain(argument: Any) -> Any:
    """Return the argument in the form that a store takes."""
    match argument:
        case Big(size):
            return _big(size)
        case Many(key, count):
            return [key] * count
        case tuple():
            return [plain(part) for part in argument]
    return argument


@dataclass(frozen=True)
class Step:
    """One call by one client. ``gives_up``: a call that waits has a short time-out."""

    client: int
    call: str
    args: tuple[Any, ...] = ()
    gives_up: bool = False

    def __repr__(self) -> str:
        args = [repr(list(arg) if isinstance(arg, tuple) else arg) for arg in self.args]
        if self.gives_up:
            args.append("SHORT")
        return f"c{self.client}.{self.call}({', '.join(args)})"


@dataclass
class Effect:
    """The effect of a step on the order of steps."""

    blocks: bool = False
    loses: bool = False
    released: list[int] = field(default_factory=list)


class Refused(Exception):  # noqa: N818 - not an error: the connection is closed
    """The server closes the connection."""


class Model:
    """A store's keys, queues and waiters."""

    def __init__(self, *, libuv: bool) -> None:
        self.libuv = libuv
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, int] = {}
        self.registered: dict[bytes, list[int]] = {}
        self.outstanding: dict[int, int] = {}
        self.open: dict[int, Step] = {}

    def apply(self, step: Step) -> Effect:
        """Carry out a step of a client that is not waiting."""
        effect = Effect()
        try:
            self._check_limits(step)
            effect.blocks = self._apply(step.client, step.call, plain(step.args), effect.released)
        except Refused:
            effect.loses = True
            self.forget(step.client)
        if effect.blocks:
            self.open[step.client] = step
        for client in effect.released:
            self._resume(client)
        return effect

    def forget(self, client: int) -> None:
        """End a client's wait, because it timed out or the client has gone."""
        self.open.pop(client, None)
        self.outstanding.pop(client, None)
        for key, clients in list(self.registered.items()):
            self.registered[key] = [other for other in clients if other != client]

    @staticmethod
    def _check_limits(step: Step) -> None:
        keys, values = parts(step)
        if any(len(key) > KEY_LIMIT for key in keys) or any(len(value) > VALUE_LIMIT for value in values):
            raise Refused
        if len(keys) > LIST_LIMIT:
            raise Refused

    def _apply(self, client: int, call: str, args: list[Any], released: list[int]) -> bool:
        match call, args:
            case "set", [key, value]:
                self._store(key, value, released)
            case "append", [key, value]:
                self._store(key, self.values.get(key, b"") + value, released)
            case "multi_set", [keys, values] if len(keys) == len(values):
                for key, value in zip(keys, values, strict=True):
                    self._store(key, value, released)
            case "add", [key, amount]:
                self._store(key, decimal(self._number(key) + amount), released)
            case "compare_set", [key, expected, desired]:
                current = self.values.get(key)
                if current is None and expected == b"":
                    self._store(key, desired, released)
                else:
                    if current is not None and current == expected:
                        self.values[key] = desired
                    if self.libuv:  # 1: libuv releases waiters even if no key was created
                        self._event(key, released)
            case "delete_key", [key]:
                self.values.pop(key, None)
            case "queue_push", [key, _]:
                self.queues[key] = self.queues.get(key, 0) + 1
                self._pushed(key, released)
            case "queue_pop", [key, False]:
                self._pop(key)
            case "queue_pop", [key]:
                if not self._ready(key):
                    return self._wait(client, [key])
                self._pop(key)
            case ("get", [key]):
                return self._wait(client, [key])
            case (("wait" | "multi_get"), [keys]):
                return self._wait(client, keys)
            case "barrier", [key, world]:
                count = self._number(key) + 1
                self.values[key] = decimal(count)
                if count < world:
                    self.registered.setdefault(key, []).append(client)
                    self.outstanding[client] = 1
                    return True
                self._event(key, released)
        return False

    def _wait(self, client: int, keys: list[bytes]) -> bool:
        if all(self._ready(key) for key in keys):
            return False
        # 2: in libuv, once a key is missing, a key that only has a queue counts as missing too.
        missing = [key for key in keys if (key not in self.values if self.libuv else not self._ready(key))]
        if not self.libuv:
            missing = list(dict.fromkeys(missing))
        for key in missing:
            self.registered.setdefault(key, []).append(client)
        self.outstanding[client] = len(missing)
        return True

    def _ready(self, key: bytes) -> bool:
        return key in self.values or self.queues.get(key, 0) > 0

    def _number(self, key: bytes) -> int:
        number = re.match(rb"[ \t\n\v\f\r]*([+-]?[0-9]+)", self.values.get(key, b"0"))
        if number is None or not -(2**63) <= int(number[1]) < 2**63:
            raise Refused
        return int(number[1])

    def _store(self, key: bytes, value: bytes, released: list[int]) -> None:
        self.values[key] = value
        self._event(key, released)

    def _event(self, key: bytes, released: list[int]) -> None:
        for client in self.registered.pop(key, []):
            self._has_one_less(client, released)

    def _pushed(self, key: bytes, released: list[int]) -> None:
        for client in list(self.registered.get(key, [])):
            if not self.libuv:  # 3: libuv does not remove the registrations
                self.registered[key].remove(client)
            if self._has_one_less(client, released):
                return

    def _has_one_less(self, client: int, released: list[int]) -> bool:
        self.outstanding[client] = self.outstanding.get(client, 0) - 1
        over = self.outstanding[client] == 0
        if over:
            released.append(client)
        return over

    def _resume(self, client: int) -> None:
        step = self.open.pop(client)
        if step.call == "queue_pop":
            self._pop(plain(step.args)[0])

    def _pop(self, key: bytes) -> None:
        self.queues[key] = max(0, self.queues.get(key, 0) - 1)


def decimal(number: int) -> bytes:
    """Return the text of a number that wraps around at 64 bits."""
    return str((number + 2**63) % 2**64 - 2**63).encode()


def parts(step: Step) -> tuple[list[bytes], list[bytes]]:
    """Return the keys and the values of a step."""
    args = plain(step.args)
    match step.call:
        case "num_keys" | "list_keys":
            return [], []
        case "wait" | "check" | "multi_get":
            return args[0], []
        case "multi_set":
            return (args[0], args[1]) if len(args[0]) == len(args[1]) else ([], [])
        case "set" | "append" | "compare_set" | "queue_push":
            return [args[0]], args[1:]
    return [args[0]], []


@dataclass(frozen=True)
class Do:
    """Make a call that returns. ``fence``: make a round trip afterwards, because another client's call follows."""

    step: Step
    fence: bool = False


@dataclass(frozen=True)
class Lose:
    """Make a call that costs the client its connection."""

    step: Step


@dataclass(frozen=True)
class Start:
    """Make a call that blocks, and continue when it waits at the server."""

    step: Step


@dataclass(frozen=True)
class Join:
    """Take the results of blocked calls that have ended or are about to. Their order is not compared."""

    clients: tuple[int, ...]


@dataclass(frozen=True)
class Finish:
    """Set these keys at once, so that all remaining waits are released."""

    keys: tuple[bytes, ...]


Action = Do | Lose | Start | Join | Finish

# Calls without a reply: the server may not have seen the request when the call returns.
_SILENT = {"set", "append", "multi_set", "queue_push"}


def plan(steps: list[Step]) -> list[Action]:
    """Turn steps into actions, the same for every server."""
    actions: list[Action] = []
    models = [Model(libuv=True), Model(libuv=False)]

    def give_up(client: int) -> None:
        actions.append(Join((client,)))
        for model in models:
            model.forget(client)

    def waits_briefly(client: int) -> bool:
        return client in models[0].open and models[0].open[client].gives_up

    for drawn in steps:
        step = drawn
        if waits_briefly(step.client):
            give_up(step.client)
        if step.client in models[0].open:
            continue
        after, effects = _ahead(models, step)
        # A wait that is to time out must do so before a step could release it. A step that only sets one of its keys
        # may come before or after the time-out, because no client can see the difference.
        brief = [client for effect in effects for client in effect.released if waits_briefly(client)]
        if brief:
            for client in dict.fromkeys(brief):
                give_up(client)
            after, effects = _ahead(models, step)
        if effects[0] != effects[1]:
            continue  # a known difference
        effect = effects[0]
        if step.gives_up and not effect.blocks:
            if step.client == HASTY:
                continue  # it may or may not be answered in time
            step = Step(step.client, step.call, step.args)
        if effect.blocks:
            actions.append(Start(step))
        elif effect.loses:
            actions.append(Lose(step))
        else:
            actions.append(Do(step, fence=step.call in _SILENT))
        models = after
        if effect.released:
            actions.append(Join(tuple(effect.released)))
    for client in [client for client in models[0].open if waits_briefly(client)]:
        give_up(client)
    actions.append(Finish(tuple(sorted(set().union(*(model.registered for model in models))))))
    if models[0].open:
        actions.append(Join(tuple(models[0].open)))
    return _without_needless_fences(actions)


def _ahead(models: list[Model], step: Step) -> tuple[list[Model], list[Effect]]:
    after = copy.deepcopy(models)
    return after, [model.apply(step) for model in after]


def _without_needless_fences(actions: list[Action]) -> list[Action]:
    kept: list[Action] = []
    for action, following in zip(actions, [*actions[1:], None], strict=True):
        if isinstance(action, Do) and action.fence and isinstance(following, Do | Lose | Start):
            kept.append(Do(action.step, fence=following.step.client != action.step.client))
        else:
            kept.append(action)
    return kept
