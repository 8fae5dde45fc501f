"""What an operator does with etcd, by its JSON gateway: none of our own client is in it, so it can judge ours."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import ssl
from dataclasses import dataclass
from typing import Any

from etcd_cluster import HOST, Cluster, Member

LIMIT_S = 10.0


class RefusedError(Exception):
    """etcd answered with an error."""


class UnavailableError(RefusedError):
    """The member cannot serve at the moment."""


@dataclass(frozen=True)
class Key:
    """A key of etcd with its value."""

    key: str
    value: bytes
    lease: int
    created: int
    modified: int


class Admin:
    """Asks one member of the cluster: the first one that runs and can serve, unless another is given."""

    def __init__(self, cluster: Cluster, *, user: str | None = None, password: str = "") -> None:
        self._cluster = cluster
        self._user, self._password = user, password
        self._context = None
        if cluster.tls is not None:
            self._context = ssl.create_default_context(cafile=str(cluster.tls.ca))
            if cluster.tls.client_certificates:
                self._context.load_cert_chain(cluster.tls.cert, cluster.tls.key)

    def ask(self, path: str, at: Member | None = None, **body: Any) -> dict[str, Any]:
        """Ask, and return the answer."""
        headers = {}
        if self._user is not None:
            asked = {"name": self._user, "password": self._password}
            headers["Authorization"] = self._ask("auth/authenticate", at, asked, {})["token"]
        return self._ask(path, at, body, headers)

    def _ask(self, path: str, at: Member | None, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
        *others, last = [at] if at else self._cluster.running
        for member in others:
            # A member that is cut off from the others answers that it cannot serve.
            with contextlib.suppress(UnavailableError):
                return self._ask_member(member, path, body, headers)
        return self._ask_member(last, path, body, headers)

    def _ask_member(self, at: Member, path: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
        if self._context is not None:
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                HOST, at.client, timeout=LIMIT_S, context=self._context
            )
        else:
            connection = http.client.HTTPConnection(HOST, at.client, timeout=LIMIT_S)
        with contextlib.closing(connection):
            connection.request("POST", f"/v3/{path}", json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read().decode()
        if answer.status == http.HTTPStatus.SERVICE_UNAVAILABLE:
            raise UnavailableError(f"{path}: {answer.status} {text}")
        if answer.status != http.HTTPStatus.OK:
            raise RefusedError(f"{path}: {answer.status} {text}")
        return dict(json.loads(text))

    def keys(self, prefix: str = "") -> list[Key]:
        """Return all keys that begin so, sorted."""
        found = self.ask("kv/range", **_prefix(prefix)).get("kvs", [])
        return [
            Key(
                base64.b64decode(one["key"]).decode(),
                base64.b64decode(one.get("value", "")),
                int(one.get("lease", 0)),
                int(one["create_revision"]),
                int(one["mod_revision"]),
            )
            for one in found
        ]

    def put(self, key: str, value: bytes) -> None:
        self.ask("kv/put", key=_text(key.encode()), value=_text(value))

    def revision(self) -> int:
        return int(self.ask("kv/range", key=_text(b"\0"))["header"]["revision"])

    def compact(self) -> None:
        """Forget all revisions but the present one."""
        with contextlib.suppress(RefusedError):  # this revision has been compacted already
            self.ask("kv/compaction", revision=str(self.revision()), physical=True)

    def leases(self) -> list[int]:
        return [int(one["ID"]) for one in self.ask("lease/leases").get("leases", [])]

    def ttl_s(self, lease: int) -> tuple[int, int]:
        """Return for how many seconds the lease was granted, and for how many it still holds."""
        output = self.ask("lease/timetolive", ID=str(lease))
        return int(output.get("grantedTTL", 0)), int(output.get("TTL", 0))

    def revoke(self, lease: int) -> None:
        self.ask("lease/revoke", ID=str(lease))

    def alarms(self) -> list[str]:
        return [one["alarm"] for one in self.ask("maintenance/alarm", action="GET").get("alarms", [])]

    def disarm(self) -> None:
        """Take back all alarms of NOSPACE."""
        for one in self.ask("maintenance/alarm", action="GET").get("alarms", []):
            self.ask("maintenance/alarm", action="DEACTIVATE", alarm=one["alarm"], memberID=one["memberID"])

    def fill(self, chunk: int = 1 << 20) -> None:
        """Write until the quota is used up, which raises the alarm NOSPACE."""
        for number in range(1 << 10):
            try:
                self.put(f"filler/{number}", bytes(chunk))
            except RefusedError:
                return
        raise AssertionError("there is no quota")

    def make_room(self) -> None:
        """Do what etcd's operators do after NOSPACE: delete, compact, defragment every member, and disarm."""
        self.ask("kv/deleterange", **_prefix("filler/"))
        self.compact()
        for member in self._cluster.running:
            self.ask("maintenance/defragment", member)
        self.disarm()

    def add_user(self, name: str, password: str, *, prefix: str | None = None) -> None:
        """Add a user, with a role that may read and write keys of that prefix alone. None: with no role."""
        options: dict[str, Any] = {} if password else {"options": {"no_password": True}}
        self.ask("auth/user/add", name=name, password=password, **options)
        if prefix is not None:
            self.ask("auth/role/add", name=name)
            self.ask("auth/role/grant", name=name, perm={"permType": "READWRITE", **_prefix(prefix)})
            self.ask("auth/user/grant", user=name, role=name)

    def enable_auth(self, password: str) -> Admin:
        """Let nobody in without a user. Returns the administrator of the cluster from now on."""
        self.ask("auth/user/add", name="root", password=password)
        self.ask("auth/role/add", name="root")
        self.ask("auth/user/grant", user="root", role="root")
        self.ask("auth/enable")
        return Admin(self._cluster, user="root", password=password)

    def members(self) -> dict[str, int]:
        """Return the members' ids by their peer URL."""
        found = self.ask("cluster/member/list")["members"]
        return {one["peerURLs"][0]: int(one["ID"]) for one in found}

    def replace(self, member: Member) -> Member:
        """Kill a member, and put a new one in its place: with another name, other ports, and no data."""
        member_id = self.members()[member.peer_url]
        member.kill()
        # A request that a follower sends to a leader that has just died is lost.
        self.ask("cluster/member/remove", self._cluster.leader(), ID=str(member_id))
        self._cluster.members.remove(member)
        new = self._cluster.newcomer()
        survivor = self._cluster.leader()

        def added() -> bool:
            try:
                self.ask("cluster/member/add", survivor, peerURLs=[new.peer_url])
            except RefusedError as error:
                if "unhealthy cluster" in str(error):  # its members have not been connected for 5 s yet
                    return False
                raise
            return True

        self._cluster.until(added, "taking a new member")
        new.start(initial=self._cluster.members, state="existing")
        self._cluster.until_healthy()
        return new


def _prefix(prefix: str) -> dict[str, Any]:
    """Return the fields of all keys that begin so."""
    if not prefix:
        return {"key": _text(b"\0"), "range_end": _text(b"\0")}
    raw = prefix.encode()
    return {"key": _text(raw), "range_end": _text(raw[:-1] + bytes([raw[-1] + 1]))}


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
