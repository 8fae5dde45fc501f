"""The checks of ``elastic-run doctor`` on the network: names of this node, the endpoint, and the node's rank.

Every question has a time limit. None takes a port that a job may use. A coordinator that is asked logs one line.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import ipaddress
import os
import socket
from collections.abc import Iterator
from typing import NamedTuple

from elastic_rs import _elastic_rs
from elastic_rs._doctor import _etcd
from elastic_rs._doctor._findings import Answer, Finding, Question, asked, mend, note, ok
from elastic_rs._doctor._peer import Reached, family_of, reach
from elastic_rs._elastic_rs import PROTOCOL_VERSION, EtcdOptions, Protection
from elastic_rs.rendezvous._node import shares_store
from elastic_rs.rendezvous._protection import TLS_CERT, TOKEN_FILE, protection
from elastic_rs.run._options import Rendezvous

SLOW_S = 1.0


def findings(
    meeting: Rendezvous, local_addr: str | None, limit_s: float, *, alone: bool, given: bool
) -> Iterator[Finding]:
    """Check names, endpoint and ranks. Each question may take ``limit_s``. ``given``: the user named an endpoint."""
    name = os.uname().nodename
    forward = Question(lambda: addresses_of(name))
    # Most likely this is the address. Then its reverse look-up runs beside the endpoint's look-up.
    usual = own_address([])
    reverse = ask_reverse(usual)
    resolved: Answer[list[str]] = Answer([], 0.0)
    if not alone:
        resolved = asked(lambda: addresses_of(meeting.host), limit_s)
    seen = local_addr or seen_by_others(own_address(resolved.value or []), usual, meeting.host)
    if seen != usual:
        reverse = ask_reverse(seen)
    found = [] if alone else [_endpoint(meeting, resolved, limit_s)]
    for host, port in meeting.others:
        other = dataclasses.replace(meeting, host=host, port=port, others=())
        found.append(_endpoint(other, asked(functools.partial(addresses_of, host), limit_s), limit_s))
    if resolved.value and resolved.elapsed_s > SLOW_S:
        found.append(
            note("endpoint", f"{meeting.host} took {resolved.elapsed_s:.3f} s to resolve; /etc/hosts is faster")
        )
    several = not alone and meeting.nodes[1] > 1
    if several and is_loopback(meeting.host):
        flag = "--master-addr" if meeting.fixed else "--rdzv-endpoint"
        why = "" if given else f", since {flag} names no other address"
        text = f"{meeting.host} is a loopback address{why}: nodes on other machines would connect to themselves"
        found.append(mend("endpoint", text, f"give {flag} an address of one node that the others reach, on all nodes"))
    elif several and resolved.value and all(map(is_loopback, resolved.value)):
        text = (
            f"{meeting.host} is {', '.join(resolved.value)} here, on loopback: this node takes it for its own, as does "
            "every node on which it is so"
        )
        remedy = f"give the endpoint as an address, or `{meeting.host}` its node's address in /etc/hosts"
        found.append(mend("endpoint", text, remedy))
    # A loopback endpoint that was named means several agents on this machine. None named: a node among many.
    others = several and not (given and is_loopback(meeting.host))
    gloo = os.environ.get("GLOO_SOCKET_IFNAME")
    yield own_name(name, forward.answer(limit_s), gloo, others=others, local_addr=local_addr)
    if reverse is not None:
        yield own_reverse(seen, reverse.answer(limit_s))
    if alone:
        yield ok("endpoint", "none is needed: a job of one node takes any free port")
    yield from found
    how = "alone" if alone else "coordinator"
    yield how_protected(meeting.run_id, how, _protection_of(how), _exposure_of(meeting))
    yield ranks(meeting, name, seen, alone=alone)


def findings_over_etcd(
    meeting: Rendezvous, etcd: EtcdOptions, local_addr: str | None, limit_s: float
) -> Iterator[Finding]:
    """Check names, the cluster over which nodes meet, and ranks. Each question may take ``limit_s``."""
    name = os.uname().nodename
    forward = Question(lambda: addresses_of(name))
    seen = local_addr or asked(lambda: etcd.source_address(timeout_s=limit_s), limit_s).value or own_address([])
    reverse = ask_reverse(seen)
    # A cluster on this machine alone is one for trying things out.
    others = meeting.nodes[1] > 1 and not all(is_loopback(host) for host, _ in etcd.members)
    gloo = os.environ.get("GLOO_SOCKET_IFNAME")
    yield own_name(name, forward.answer(limit_s), gloo, others=others, local_addr=local_addr)
    if reverse is not None:
        yield own_reverse(seen, reverse.answer(limit_s))
    yield from _etcd.findings(etcd, limit_s)
    yield how_protected(meeting.run_id, "etcd", _protection_of("etcd"), _exposure_of(meeting))
    yield ranks(meeting, name, seen, alone=False)


def addresses_of(host: str) -> list[str]:
    """Ask the resolver for all addresses of a name, in its order."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def ask_reverse(address: str) -> Question[str] | None:
    """Ask for the name of an address. ``address`` may be a name, for which nothing is asked."""
    if not is_address(address):
        return None
    return Question(lambda: socket.getnameinfo((address, 0), socket.NI_NAMEREQD)[0])


def is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether this name or address means the local machine on every machine."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host.partition("%")[0]).is_loopback)


def own_address(addresses: list[str]) -> str:
    """Return the source address of packets to these addresses. No packet is sent."""
    for address in addresses or ["192.0.2.1"]:  # for documentation (RFC 5737): reached by the default route
        try:
            with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
                probe.connect((address, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return ""


def seen_by_others(to_endpoint: str, usual: str, host: str) -> str:
    """Choose between the address that the endpoint sees and that of the default route.

    A node reaches its own name over loopback, an address that other nodes do not see.
    """
    return usual if is_loopback(to_endpoint) and not is_loopback(host) else to_endpoint


def own_name(
    name: str, answer: Answer[list[str]], gloo: str | None, *, others: bool, local_addr: str | None
) -> Finding:
    """Judge what this node's own name resolves to. The agent does not use the name; Gloo in the workers does."""
    check, several = "own name", others and not gloo
    hosts = f"give `{name}` this node's address in /etc/hosts, or set GLOO_SOCKET_IFNAME to its network interface"
    if answer.value is None:
        why = f"`{name}` cannot be resolved: {answer.error}; Gloo in the workers needs it, elastic-run does not"
        return mend(check, why, hosts) if several else note(check, why)
    text = f"`{name}` is {', '.join(answer.value)}, found in {answer.elapsed_s:.3f} s"
    if several and all(map(is_loopback, answer.value)):
        what = "loopback (Debian's line `127.0.1.1` in /etc/hosts): Gloo would give this address to other nodes"
        return mend(check, f"{text}: {what}", hosts)
    if answer.elapsed_s > SLOW_S:
        return note(check, f"{text}, which is slow: Gloo in the workers waits for it; a line in /etc/hosts helps")
    if local_addr is not None and not is_address(local_addr):
        return note(check, f"{text}; --local-addr is the name `{local_addr}`, which all other nodes must resolve")
    return ok(check, text)


def own_reverse(address: str, answer: Answer[str]) -> Finding:
    """Judge how long the reverse look-up of this node's address takes."""
    what = answer.value or f"without a name ({answer.error})"
    if answer.late or answer.elapsed_s > SLOW_S:
        elapsed = answer.error if answer.late else f"{what} after {answer.elapsed_s:.3f} s"
        return note(
            "reverse name",
            f"{address}: {elapsed}, which is slow: PyTorch's store and clients look up the names of their peers and "
            "wait as long; elastic_rs's agent and store do not. A line in /etc/hosts helps",
        )
    return ok("reverse name", f"{address} is {what}, found in {answer.elapsed_s:.3f} s")


def _endpoint(meeting: Rendezvous, resolved: Answer[list[str]], limit_s: float) -> Finding:
    where = f"[{meeting.host}]:{meeting.port}" if ":" in meeting.host else f"{meeting.host}:{meeting.port}"
    # With port 0, so that the port itself stays free for nodes that start meanwhile.
    own = Answer("", 0.0) if resolved.late else asked(lambda: _why_not_own(meeting, 0), limit_s)
    if own.value is None and not own.late:
        return mend(
            "endpoint",
            f"{where}: this node must be the host and cannot: {own.error}",
            "leave out is_host=1, or name an address of this node",
        )
    why_not = resolved.error or own.error or own.value or ""
    if not resolved.value:
        return unresolved(where, resolved, hosts=own.value == "" and not resolved.late)
    if meeting.port == 0:
        if why_not or meeting.nodes[1] > 1:
            text = why_not or "this node would take any free port, which no other node can know"
            return mend("endpoint", f"{where}: {text}", "name a port, the same on all nodes")
        return ok("endpoint", f"{where}: this node would host the coordinator, on any free port")
    reached = reach(resolved.value, meeting.port, limit_s)
    if reached.who in {"protected", "coordinator"} and (found := _proven(meeting, reached, limit_s)) is not None:
        return unauthenticated_endpoint(f"{where} ({reached.address})", reached, *found)
    if why_not:
        return elsewhere(f"{where} ({reached.address})", reached, meeting.config.join_timeout, limit_s)
    if reached.listens:
        # A process listens, so this names it, and takes no port.
        answer = asked(lambda: _why_not_own(meeting, meeting.port), limit_s)
        taken = answer.value or answer.error
    else:
        taken = _why_not_bound(resolved.value, meeting.port)
    return here(where, reached, taken, must=meeting.config.is_host is True)


def _proven(meeting: Rendezvous, reached: Reached, limit_s: float) -> tuple[str | None, str | None] | None:
    """Authenticate with a coordinator. None: it succeeded, or neither side is protected.

    Returns:
        The credentials of this node, if any, and why the authentication failed.
    """
    own = protection()
    if own is None:
        return (None, None) if reached.who == "protected" else None
    why = own.try_at(reached.address, meeting.port, meeting.host, meeting.run_id, timeout_s=limit_s)
    return None if why is None else (own.text, why)


def unauthenticated_endpoint(where: str, reached: Reached, own: str | None, why: str | None) -> Finding:
    """Judge a coordinator with which authentication failed."""
    if own is None:
        text = f"{where}: the coordinator requires a token or certificates, and this node has none"
        return mend(
            "endpoint", text, f"name the file with the job's token in {TOKEN_FILE}, or certificates in {TLS_CERT}"
        )
    if reached.who == "coordinator":
        text = f"{where}: the coordinator has no token or certificates, and this node uses {own}"
        return mend("endpoint", text, f"set {TOKEN_FILE} or {TLS_CERT} where the coordinator runs, too, or nowhere")
    text = f"{where}: authentication with the coordinator failed: {why}; this node uses {own}"
    return mend(
        "endpoint",
        text,
        "give all nodes the same token file, or certificates of the same CA; `elastic-rs token id --of=FILE` shows a "
        "token's id",
    )


class Exposure(NamedTuple):
    """Who can connect to the workers' stores, and who can read the job's state over HTTP."""

    store: str = "agents"
    """Who serves the workers' store: the ``agents``, the ``endpoint`` (``--rdzv-backend=static``) or ``torch``."""
    peers: str = "same-user"
    """``--rdzv-conf store_peers``."""
    members: str = "warn"
    """``--rdzv-conf store_members``."""
    tunnel: bool = False
    """``--rdzv-conf store_tunnel``."""
    several: bool = True
    """The job may have several nodes."""
    http: str = "members"
    """``ELASTIC_RS_HTTP``."""


def _exposure_of(meeting: Rendezvous) -> Exposure:
    values, store = meeting.config.values(), "agents"
    if meeting.fixed:
        store = "endpoint"
    elif not shares_store():
        store = "torch"
    return Exposure(
        store,
        str(values["store_peers"]),
        str(values["store_members"]),
        bool(meeting.config.store_tunnel),
        meeting.nodes[1] > 1,
        os.getenv("ELASTIC_RS_HTTP", "members"),
    )


def _protection_of(how: str) -> Protection | None:
    """Return how this node's sessions with others are protected."""
    return None if how == "alone" else protection()


def how_protected(run_id: str, how: str, own: Protection | None, exposure: Exposure) -> Finding:
    """Say which token and which certificate protect the job's sessions, and who can reach its worker stores.

    Nodes meet (``how``) ``alone``, at a ``coordinator``, or over ``etcd``.
    """
    if exposure.tunnel and how != "alone" and own is None:
        text = f"--rdzv-conf store_tunnel=1 is given without a token: name its file in {TOKEN_FILE}"
        return mend("protection", text, "`elastic-rs token new` writes a token")
    if exposure.members == "strict" and exposure.store != "agents":
        text = "--rdzv-conf store_members=strict is given, and the agents do not serve the workers' store"
        return mend("protection", text, f"leave it out, or give the job a store of the agents: {_WHY_NOT_AGENTS}")
    workers, opened = _worker_store_exposure(exposure, by_coordinator=how == "coordinator")
    http = "" if how == "etcd" else _http_exposure(exposure.http, protected=own is not None or how == "alone")
    texts = [workers, http] if http else [workers]
    judge = note if opened or http else ok
    if how == "alone":
        return judge("protection", "; ".join(["sessions are protected by a token that this process makes", *texts]))
    if how == "etcd":
        return note("protection", "; ".join(["etcd's users and TLS decide who reads and writes the job", *texts]))
    if own is None:
        text = "none: anyone who can reach the endpoint can end the job or replace a node"
        remedy = f"`elastic-rs token new` and {TOKEN_FILE} change that"
        return note("protection", f"{'; '.join([text, *texts])}. {remedy}")
    text = f"sessions of run `{run_id}` are encrypted, and both ends prove {own.text}"
    if own.days_left is None:
        return judge("protection", "; ".join([text, *texts]))
    text += f" ({own.days_left:.0f} days left)"
    if own.key_ids is None:
        text += "; any certificate of the CA may join any run"
    if own.warnings:
        judge = note
    return judge("protection", "; ".join([text, *texts, *own.warnings]))


_WHY_NOT_AGENTS = "--rdzv-backend=c10d, without TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"


def _worker_store_exposure(exposure: Exposure, *, by_coordinator: bool) -> tuple[str, bool]:
    """Say who can reach the workers' store, and whether others than the job's users can."""
    if exposure.store == "endpoint":
        return "workers use the endpoint's store (--rdzv-backend=static), which accepts every connection", True
    if exposure.store == "torch":
        who = "which accepts every connection"
        return f"the workers' store is PyTorch's (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1), {who}", True
    any_user = exposure.peers == "any"
    users = "every user of their machine (store_peers=any)" if any_user else "no other user of their machine"
    if exposure.tunnel:
        also = ", and serve every user of their machine (store_peers=any)" if any_user else ""
        return f"workers reach the store through their agents, which encrypt that{also}", any_user
    text = f"worker stores serve {users}"
    if not exposure.several:
        return text, any_user
    if not by_coordinator:  # no coordinator sends the members' addresses
        return f"{text}; connections from every machine are served", any_user
    machines = {"strict": "closed", "warn": "served and logged"}.get(exposure.members, "served")
    return (
        f"{text}; connections from machines without members are {machines} (store_members={exposure.members})",
        any_user,
    )


def _http_exposure(readers: str, *, protected: bool) -> str:
    """Say what whoever reaches the coordinator reads by HTTP, besides health."""
    if readers == "metrics" or (readers == "all" and not protected):
        what = "metrics" if readers == "metrics" else "metrics and the job's page"
        return f"a coordinator on this node shows {what} to whoever reaches it (ELASTIC_RS_HTTP={readers})"
    return ""


def _why_not_own(meeting: Rendezvous, port: int) -> str:
    """Return why this node would not host the coordinator, if so, by the agent's own rule."""
    claimed = _elastic_rs.EndpointServer.claim(
        meeting.host, port, is_host=meeting.config.is_host, protection=protection()
    )
    if isinstance(claimed, str):
        return claimed
    claimed.stop()
    return ""


def _why_not_bound(addresses: list[str], port: int) -> str:
    """Return why the port cannot be bound though nobody listens. Binds without listening, which disturbs nobody."""
    for address in addresses:
        try:
            with socket.socket(family_of(address), socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address, port))
        except PermissionError as error:
            return f"port {port} cannot be listened on: {error.strerror}"
        except OSError as error:
            if not _is_foreign(error):
                return f"port {port} cannot be listened on: {error.strerror}"
    return ""


def _is_foreign(error: OSError) -> bool:
    return error.errno in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}


def unresolved(where: str, resolved: Answer[list[str]], *, hosts: bool) -> Finding:
    """Judge an endpoint whose name cannot be resolved here."""
    text = f"{where} cannot be resolved: {resolved.error}"
    if hosts:
        return note("endpoint", f"{text}; it is this node's own name, so this node would still host the coordinator")
    remedy = "give an address instead, add a line to /etc/hosts, or correct the name server in /etc/resolv.conf"
    return mend("endpoint", text, remedy)


def here(where: str, reached: Reached, taken: str, *, must: bool) -> Finding:
    """Judge an endpoint that is this node's own. ``must``: this node has to host the coordinator itself."""
    another = "choose another port, the same on all nodes, or end the process that has it"
    if not reached.listens:
        if taken:
            return mend("endpoint", f"{where} is this node's: {taken}", "choose another port, above 1023")
        if reached.who != "refused":
            remedy = "check that the interface with this address is up (`ip address`), and what a firewall drops"
            text = reached.text or "nothing came back"
            return mend("endpoint", f"{where} is this node's, but cannot be reached from it: {text}", remedy)
        return ok("endpoint", f"{where} is this node's and the port is free: this node would host the coordinator")
    text = f"{where} is this node's: {taken}"
    if reached.who not in {"coordinator", "protected"}:
        return mend("endpoint", f"{text}. {_who(reached)}", another)
    if reached.who == "coordinator" and reached.version != PROTOCOL_VERSION:
        return _other_version(text, reached)
    if must:
        return mend("endpoint", f"{text}. It is a coordinator, but this node must host it (is_host=1)", another)
    return ok("endpoint", f"{text}. It is a coordinator, which this node would join")


def elsewhere(where: str, reached: Reached, join_timeout_s: float, limit_s: float) -> Finding:
    """Judge an endpoint that this node does not host."""
    if reached.who == "protected":
        took_ms = reached.elapsed_s * 1000
        return ok("endpoint", f"{where}: a coordinator answers, in {took_ms:.1f} ms, and both ends are proven")
    if reached.who == "coordinator":
        text = f"{where}: a coordinator answers, in {reached.elapsed_s * 1000:.1f} ms"
        return ok("endpoint", text) if reached.version == PROTOCOL_VERSION else _other_version(text, reached)
    if reached.listens:
        remedy = "choose another port, or start `elastic-rs store serve` there, or the node with this address"
        return mend("endpoint", f"{where}: {_who(reached)}", remedy)
    if reached.who == "refused":
        return note(
            "endpoint",
            f"{where} can be reached, but no process listens there yet: start the node with this address, or "
            f"`elastic-rs store serve` on it. Other nodes wait for it, at most {join_timeout_s:g} s",
        )
    if reached.who == "timeout":
        remedy = "check that the host is up, and that no firewall or network policy drops connections to this port"
        return mend("endpoint", f"{where}: nothing came back within {limit_s:g} s", remedy)
    return mend("endpoint", f"{where} cannot be reached: {reached.text}", "check the route from this node to that one")


def _other_version(text: str, reached: Reached) -> Finding:
    versions = f"it speaks version {reached.version} of the protocol, this node version {PROTOCOL_VERSION}"
    return mend("endpoint", f"{text}; but {versions}", "install one version of elastic_rs on all nodes")


def _who(reached: Reached) -> str:
    return {
        "store": "a plain c10d store answers, without a coordinator: torchrun's own, or a job's",
        "silent": "a process accepts connections but does not answer, so it is neither a coordinator nor a store",
    }.get(reached.who, f"another program answers, neither a coordinator nor a store: {reached.text}")


def ranks(meeting: Rendezvous, name: str, seen: str, *, alone: bool) -> Finding:
    """Say which rank this node would get among the others."""
    who = f"others see this node as `{name}:PID` at {seen or 'an address that is not known yet'}"
    rank = meeting.config.node_rank
    if alone:
        return ok("rank order", "0: the only node")
    if meeting.fixed:
        return ok("rank order", f"{rank}, by --node-rank, in every round; {who}")
    if rank is not None:
        by = f"this node asks for {rank} (node_rank) in the first round; nodes that ask for none come after"
    else:
        by = "in the first round by natural order of addresses (node9 before node10), then in the order of joining"
    return ok("rank order", f"{by}; later, survivors keep their ranks and new nodes fill the gaps; {who}")
