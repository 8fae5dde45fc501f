"""
The compiled part of the package ``elastic_rs``.
"""

from _typeshed import Incomplete, SupportsGetItem
from os import PathLike
from pathlib import Path
from typing import Any, Final, SupportsFloat, SupportsIndex, final

COMMIT: Final[str]
"""
The commit that the compiled part was built from. ``unknown`` in development builds, and without git.
"""

LOCAL_WORLD_SIZE_LIMIT: Final[int]
"""
Most workers that a node may have.
"""

PROTOCOL_VERSION: Final[int]
"""
Version of the rendezvous protocol. Both ends of a session must have the same.
"""

SAME_SIGNAL_S: Final[float]
"""
A signal within this time of the one before, in seconds, is the same.
"""

VERSION: Final[str]
"""
Version of the compiled part.
"""

@final
class Agent:
    """
    One node's agent: runs the workers of each round. It decides. The caller carries out its steps and answers.
    """
    def __new__(cls, /, session: Session | None, options: AgentOptions) -> Agent:
        """
        ``session`` reports other nodes. Without a session the caller does.
        """
    def adopt(self, /, pids: "dict[int, int]", *, error_files: "dict[int, str]") -> None:
        """
        Answers ``start``: supervise these children of the calling process, which has started them.
        """
    def all_done(self, /) -> None:
        """
        Answers ``barrier``: the other nodes have finished, or this node stops waiting for them.
        """
    @property
    def attempt(self, /) -> str:
        """
        The name of the start that was asked for in the names of log folders: the round's number from 0, or that and which standby it is.
        """
    def close(self, /) -> None:
        """
        Kill the remaining workers: the caller gives up. Not needed after ``end``.
        """
    def end_class(self, /, step: Step) -> str | None:
        """
        Whose fault the outcome of an ``end`` was: ``program``, ``machine``, ``preempted`` or ``no progress``. None: nobody's, or it is
        not known.
        """
    def environments(self, /) -> dict[int, dict[str, str]]:
        """
        The variables of the workers that are to be started by local rank, which override those that they inherit.

        Raises ``ValueError`` if there are fewer GPUs than workers with ``virtual_local_rank``.
        """
    def error_files(self, /) -> dict[int, str]:
        """
        Where the last round's workers may have recorded exceptions, by local rank.
        """
    def exits(self, /) -> list[WorkerExit]:
        """
        The last round's workers that have ended, in that order.
        """
    @property
    def failed_at(self, /) -> float | None:
        """
        When the last round's first failure happened, on whatever node, or when this node learned of it: in seconds since 1970. None: there
        was none.
        """
    def heard(self, /, signal: SupportsIndex) -> None:
        """
        This process got a signal that does not end it: :meth:`next` acts on it. For handlers, which may interrupt a call of this agent.
        """
    def interrupted(self, /, reason: str) -> None:
        """
        Without a session: the world must re-form.
        """
    def next(self, /, *, timeout_s: SupportsFloat | SupportsIndex | None = None) -> Step | None:
        """
        Wait for the next step, at most ``timeout_s`` seconds if given. None if there was none by then.

        Python's signal handlers run meanwhile. An exception that they raise ends the call, which may then be repeated.
        """
    def no_placement(self, /, reason: str) -> None:
        """
        Answers ``join``: the join failed. The workers of an agent without a rank do not run.
        """
    def no_standby(self, /, reason: str) -> None:
        """
        Answers ``start`` of a standby: it cannot be started, for this reason. There are no more.
        """
    def placed(self, /, placement: Placement) -> None:
        """
        Answers ``join``.
        """
    def reaped(self, /, local_rank: SupportsIndex, returncode: SupportsIndex, *, reported: str) -> None:
        """
        Answers ``reap``: how the worker ended, as ``subprocess.Popen.returncode``, and the cause of its failure, if known.
        """
    @property
    def restarts(self, /) -> int:
        """
        The number of restarts after failures: the job's, or this node's if it counts for itself.
        """
    def signal(self, /, signal: SupportsIndex) -> None:
        """
        This process got a signal that ends it. A second one kills the remaining workers. The log names its
        sender if :func:`watch_signals` watches it.
        """
    def start(self, /, commands: SupportsGetItem[int, WorkerCommand], *, error_files: "dict[int, str]", stdout_filter: tuple[str | PathLike[str], SupportsGetItem[int, str]] | None = None, stderr_filter: tuple[str | PathLike[str], SupportsGetItem[int, str]] | None = None, stdout_fd: SupportsIndex = 1, stderr_fd: SupportsIndex = 2, template: Template | None = None) -> dict[int, int]:
        """
        Answers ``start``: start these programs. Returns their process ids by local rank. The result is empty if one could not be
        started, which is a failure of that worker like any other, if the round ended before the start was complete, and for a standby.

        Workers may record their exceptions in ``error_files``. A filter is the path of a file for the lines of teed streams that
        contain one of the texts. Teed lines are shown on ``stdout_fd`` and ``stderr_fd``, which stay the caller's. Workers are forked
        from the ``template`` if possible.
        """
    @property
    def starts_standby(self, /) -> bool:
        """
        Whether the start that was asked for is a standby's.
        """
    @staticmethod
    def written() -> None:
        """
        Wait until the consoles have taken what all workers have printed, as long as somebody has them open.

        Python's signal handlers run meanwhile. An exception that they raise ends the wait, and the rest of the output is lost.
        """

@final
class AgentOptions:
    """
    The options of an agent that Python drives. Times are in seconds.
    """
    def __new__(self, /, name: str, run_id: str, workers: WorkerOptions, restarts_left: SupportsIndex | None, exit_barrier_timeout_s: SupportsFloat | SupportsIndex | None, use_agent_store: bool, config: RendezvousConfig | None, survives: bool) -> AgentOptions: ...
    @property
    def config(self, /) -> RendezvousConfig | None:
        """
        The values of ``--rdzv-conf``; None with a rendezvous of PyTorch's.
        """
    @property
    def exit_barrier_timeout_s(self, /) -> float | None:
        """
        How long to wait for the other nodes' workers; None: for as long as they run.
        """
    @property
    def name(self, /) -> str:
        """
        This node's name in other nodes' messages.
        """
    @property
    def restarts_left(self, /) -> int | None:
        """
        With a number this node counts its own restarts, as PyTorch's agent does; None: the coordinator counts the job's.
        """
    @property
    def run_id(self, /) -> str:
        """
        The job.
        """
    @property
    def survives(self, /) -> bool:
        """
        Whether workers may survive a change of the world, if the configuration allows it.
        """
    @property
    def use_agent_store(self, /) -> bool:
        """
        Workers share the store at ``MASTER_ADDR:MASTER_PORT``, which then already listens.
        """
    @property
    def workers(self, /) -> WorkerOptions:
        """
        The workers.
        """

@final
class AsyncStoreClient:
    """
    The core's client of a TCP store, for asyncio. Every operation returns an awaitable of the running event loop.

    Operations of one client run one after the other, in the order of the calls. Cancelling a waiting operation ends its wait, and
    the client stays usable. Times are in seconds. A negative time limit means no limit.
    """
    def add(self, /, key: bytes | bytearray | str, amount: SupportsIndex) -> Any:
        """
        Add to the number stored under a key, and return the sum.
        """
    def append(self, /, key: bytes | bytearray | str, value: bytes | bytearray | str) -> Any:
        """
        Append to a key's value.
        """
    def barrier(self, /, key: bytes | bytearray | str, world_size: SupportsIndex, timeout_s: SupportsFloat | SupportsIndex | None = None) -> Any:
        """
        Wait until ``world_size`` callers have reached this barrier, at most ``timeout_s`` or the client's default.
        """
    def check(self, /, keys: SupportsGetItem[int, bytes | bytearray | str]) -> Any:
        """
        Whether all keys exist.
        """
    def clone(self, /) -> Any:
        """
        Open another connection to the same store.
        """
    def close(self, /) -> None:
        """
        Close the connection after pending operations. Later ones raise ``StoreNetworkError``.
        """
    @property
    def closed(self, /) -> bool:
        """
        Whether :meth:`close` was called.
        """
    def compare_set(self, /, key: bytes | bytearray | str, expected: bytes | bytearray | str, desired: bytes | bytearray | str) -> Any:
        """
        Replace the value if it is the expected one. Return the store's answer.
        """
    @staticmethod
    def connect(host: str, port: SupportsIndex, *, timeout_s: SupportsFloat | SupportsIndex) -> Any:
        """
        Connect to the store at ``host:port``, which need not listen yet.
        """
    def delete_key(self, /, key: bytes | bytearray | str) -> Any:
        """
        Remove a key. Return whether it existed.
        """
    def get(self, /, key: bytes | bytearray | str) -> Any:
        """
        Return a key's value, waiting for it to appear.
        """
    def list_keys(self, /) -> Any:
        """
        All keys, in no particular order, as ``bytes``.
        """
    def multi_get(self, /, keys: SupportsGetItem[int, bytes | bytearray | str]) -> Any:
        """
        Return several values, waiting for all keys to appear.
        """
    def multi_set(self, /, keys: SupportsGetItem[int, bytes | bytearray | str], values: SupportsGetItem[int, bytes | bytearray | str]) -> Any:
        """
        Store several values.
        """
    def num_keys(self, /) -> Any:
        """
        Number of keys in the store.
        """
    def queue_len(self, /, key: bytes | bytearray | str) -> Any:
        """
        Length of a queue.
        """
    def queue_pop(self, /, key: bytes | bytearray | str, block: bool = True) -> Any:
        """
        Take the first item of a queue. With ``block``, wait for one.
        """
    def queue_push(self, /, key: bytes | bytearray | str, value: bytes | bytearray | str) -> Any:
        """
        Add an item to the end of a queue.
        """
    def set(self, /, key: bytes | bytearray | str, value: bytes | bytearray | str) -> Any:
        """
        Store a value.
        """
    def set_timeout(self, /, timeout_s: SupportsFloat | SupportsIndex) -> None:
        """
        Change the time limit of operations that begin later.
        """
    def wait(self, /, keys: SupportsGetItem[int, bytes | bytearray | str], timeout_s: SupportsFloat | SupportsIndex | None = None) -> Any:
        """
        Wait until all keys exist, at most ``timeout_s`` or the client's default.
        """

@final
class CellSession:
    """
    A node of a rendezvous with its state in a backend. One Python thread performs the steps of :meth:`next_step`.
    """
    def __new__(cls, /, options: NodeOptions, *, serves: bool, protection: Protection | None = None) -> CellSession:
        """
        Make a session for one node. Other nodes find it at ``local_addr`` of the options. ``protection`` is for the tunnels of workers,
        if the options ask for them. ``serves``: the end of this process may end what the backend holds, so at the job's end the node
        stays until the others have read that, for at most 5 s.

        Raises ``ValueError`` for invalid options.
        """
    def abandon(self, /, reason: str) -> None:
        """
        Leave, and end the store for workers, without waiting for anybody.
        """
    def fresh_view(self, /, *, age_s: SupportsFloat | SupportsIndex) -> View:
        """
        The state of the rendezvous, as read from the backend at most ``age_s`` seconds ago, or as last read while the backend fails.
        Raises the errors of :meth:`Session.view`.
        """
    def next_step(self, /) -> bytes | None:
        """
        Wait for the next operation on the backend. Empty bytes: read. Other bytes: write them if the state is still the last reported
        one. None: stop. Report the result with one of the ``on_`` methods.
        """
    def on_broken(self, /, error: str, state: bool) -> None:
        """
        The backend fails permanently. ``state``: because of the state that it holds.
        """
    def on_conflict(self, /, state: bytes | None) -> None:
        """
        The state was not written: the backend holds this other state, or none.
        """
    def on_failed(self, /, error: str, *, gone: bool) -> None:
        """
        The backend could not be reached. ``gone``: somebody has answered that nobody serves it, or has ended the connection to it. False
        if it was silent.
        """
    def on_state(self, /, state: bytes | None) -> None:
        """
        The backend holds this state, or none.
        """
    def on_written(self, /) -> None:
        """
        The state was written.
        """
    @property
    def session(self, /) -> Session:
        """
        The session.
        """

@final
class Certificates:
    """
    Where a node's certificate is.
    """
    def __new__(cls, /, *, cert: str | PathLike[str], key: str | PathLike[str], ca: str | PathLike[str]) -> Certificates:
        """
        Name the files: the certificate and those that lead to an authority, its key, and the authorities of the peers. They are read
        by :class:`Protection`.
        """
    def __repr__(self, /) -> str: ...

@final
class ConfKey:
    """
    A key of ``--rdzv-conf``.
    """
    @property
    def allowed(self, /) -> str:
        """
        The allowed values: the words after "must be".
        """
    @property
    def backend(self, /) -> str | None:
        """
        The one backend that has it. None: all have it.
        """
    @property
    def default(self, /) -> str | None:
        """
        The default as users would write it. None: it has none.
        """
    @property
    def help(self, /) -> str:
        """
        What it does.
        """
    @property
    def is_duration(self, /) -> bool:
        """
        Whether it is a duration, in seconds.
        """
    @property
    def name(self, /) -> str:
        """
        The key, as users write it.
        """
    @property
    def other(self, /) -> str | None:
        """
        Another spelling, which means the same.
        """
    @property
    def why(self, /) -> str | None:
        """
        Why other backends have no use for it.
        """

@final
class Driver:
    """
    Starts an agent on each host that discovery finds, until the job has ended.
    """
    def __new__(cls, /, options: DriverOptions) -> Driver:
        """
        Raises ``ValueError`` for invalid options.
        """
    def command(self, /, host: str) -> list[str]:
        """
        The command line that starts an agent on a host.

        Raises ``ValueError`` if the host's name is not allowed.
        """
    def failed(self, /, why: str) -> None:
        """
        Discovery has failed, for this reason.
        """
    def found(self, /, hosts: SupportsGetItem[int, tuple[str, SupportsIndex]]) -> None:
        """
        Discovery has found these hosts, each with its slots.

        Raises ``ValueError`` if a host's name or slots are not allowed, or a host is there twice; nothing changes then.
        """
    def run(self, /, signals: Signals, *, host: EndpointServer | None = None) -> tuple[str, int | None, str]:
        """
        Start agents until the job has ended, and return the verdict (``succeeded``, ``failed``, ``given_up``, ``refused`` or
        ``signal``), the number of the signal or the exit code after a failure, and why.

        ``host`` has the coordinator, if it is here: hosts that it keeps out get no agent, and its observers are shown which hosts the
        driver does not use.

        Call it once. The signals end the job.

        Raises ``OSError`` if there is no descriptor or thread left.
        """

@final
class DriverOptions:
    """
    The options of a driver. Times are in seconds.
    """
    def __new__(self, /, min_slots: SupportsIndex, fixed: bool, detach: bool, listed: SupportsGetItem[int, str] | None, start_timeout_s: SupportsFloat | SupportsIndex, elastic_timeout_s: SupportsFloat | SupportsIndex, discovery_timeout_s: SupportsFloat | SupportsIndex, grace_s: SupportsFloat | SupportsIndex, passed_on: SupportsGetItem[int, SupportsIndex], host_failures: SupportsIndex, window_s: SupportsFloat | SupportsIndex, cooldown_s: tuple[SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex] | None, ssh: SupportsGetItem[int, str], remote_python: str, python: str, program: SupportsGetItem[int, str], job: str, port: SupportsIndex, run_id: str) -> DriverOptions: ...
    @property
    def cooldown_s(self, /) -> tuple[float, float] | None:
        """
        The shortest and the longest time that a host is kept out; None: for the job.
        """
    @property
    def detach(self, /) -> bool:
        """
        Agents run on without the driver, which ends when all are started.
        """
    @property
    def discovery_timeout_s(self, /) -> float:
        """
        How long discovery may be silent.
        """
    @property
    def elastic_timeout_s(self, /) -> float:
        """
        How long the agents that run may have fewer than ``min_slots``.
        """
    @property
    def fixed(self, /) -> bool:
        """
        The list of hosts cannot change.
        """
    @property
    def grace_s(self, /) -> float:
        """
        How long an agent that has to leave may take.
        """
    @property
    def host_failures(self, /) -> int:
        """
        After how many troubles a host is kept out; 0: never.
        """
    @property
    def job(self, /) -> str:
        """
        The job, which each agent gets: one line.
        """
    @property
    def listed(self, /) -> list[str] | None:
        """
        The hosts with endpoints of a list, at which such agents meet. None: at the first host.
        """
    @property
    def min_slots(self, /) -> int:
        """
        Fewest workers of the job.
        """
    @property
    def passed_on(self, /) -> list[int]:
        """
        Numbers of signals that do not end the job, which agents get.
        """
    @property
    def port(self, /) -> int:
        """
        The coordinator's port.
        """
    @property
    def program(self, /) -> list[str]:
        """
        What both are given: the agent's program.
        """
    @property
    def python(self, /) -> str:
        """
        The Python on this machine.
        """
    @property
    def remote_python(self, /) -> str:
        """
        The Python on other hosts.
        """
    @property
    def run_id(self, /) -> str:
        """
        The job's run id, for observers of the coordinator.
        """
    @property
    def ssh(self, /) -> list[str]:
        """
        ``ssh`` and its options.
        """
    @property
    def start_timeout_s(self, /) -> float:
        """
        How long an agent may take to report that it runs.
        """
    @property
    def window_s(self, /) -> float:
        """
        Troubles longer ago than this do not count.
        """

@final
class EndpointServer:
    """
    The store and the rendezvous coordinator, on one port and on one thread that never waits for the interpreter.
    """
    @property
    def addresses(self, /) -> list[str]:
        """
        The addresses it listens on, each with its port.
        """
    @staticmethod
    def claim(host: str, port: SupportsIndex, *, is_host: bool | None = None, uses_store: bool = True, protection: Protection | None = None, list: tuple[str, SupportsGetItem[int, str], SupportsIndex] | None = None, limits: StoreLimits | None = None) -> "EndpointServer | str":
        """
        Become the host of ``host:port``. A ``str`` is the reason why another process is the host.

        ``is_host`` is the user's choice. With None, whoever can bind the address is the host. With a ``protection`` there are only
        sessions of those who hold the token, and no store. Unless the job ``uses_store``, what the store holds is bounded; or by
        these ``limits``. With a ``list``
        this process may lead the job of this name, as those at the other endpoints may: the name, all endpoints, and the place of this one
        among them.

        Raises ``OSError`` when ``is_host`` is True and the port cannot be listened on, and ``ValueError`` for an invalid list.
        """
    @staticmethod
    def listen(host: str | None, port: SupportsIndex, *, limits: StoreLimits | None = None, protection: Protection | None = None) -> EndpointServer:
        """
        Serve on every address of ``host``, or on all of this machine if it is None. Port 0 lets the system choose. ``protection`` as
        for :meth:`claim`.

        Raises ``OSError`` if ``host`` cannot be resolved, or if listening fails. The text names the process that has the port.
        """
    @property
    def on_loopback(self, /) -> bool:
        """
        Whether it listens on loopback alone.
        """
    def page_requests(self, /) -> PageRequests | None:
        """
        The pages that are asked for by HTTP, for a thread that makes them. None: another one does already, or nobody may read them.
        """
    @property
    def port(self, /) -> int:
        """
        The port it listens on.
        """
    @property
    def public_addresses(self, /) -> list[str]:
        """
        The addresses by which nodes on other machines may reach it, each with its port, if it listens on all addresses.
        """
    def stop(self, /) -> None:
        """
        Close everything now.
        """
    @property
    def stopped(self, /) -> bool:
        """
        Whether it has ended.
        """
    @property
    def users(self, /) -> tuple[int, int]:
        """
        The numbers of sessions and of store clients that are connected now.
        """
    def wait_for_nodes(self, /, *, timeout_s: SupportsFloat | SupportsIndex) -> bool:
        """
        Wait until every node has said goodbye, at most ``timeout_s``. True if all had.
        """
    def wait_for_users(self, /, *, timeout_s: SupportsFloat | SupportsIndex) -> bool:
        """
        Wait until nobody is connected, node or store client, at most ``timeout_s``. True if all have gone.

        Does not stop the host: it serves everybody meanwhile, including new connections.
        """

@final
class EtcdClient:
    """
    A client of an etcd cluster. Keys are ``str`` (sent as UTF-8) or ``bytes``.

    A request is repeated until a member serves it, for at most ``read_timeout_s`` of the options. Exceptions are in
    ``elastic_rs.errors``, and each is also a builtin one: ``EtcdPermissionError`` for a user without the right or with a wrong password,
    ``EtcdConnectionError`` if no member serves, ``EtcdLeaseError`` (a ``LookupError``) for a lease that does not exist, and
    ``EtcdError`` (an ``OSError``) for other answers of etcd.

    Args:
        options: the cluster. It is connected to on first use.

    Raises:
        ValueError: a file for TLS cannot be used.
    """
    def __new__(cls, /, options: EtcdOptions) -> EtcdClient:
        """
        Make a client of the cluster that ``options`` names.
        """
    def compare_and_put(self, /, key: bytes | bytearray | str, expect: SupportsIndex, value: bytes | bytearray | str, *, lease: SupportsIndex = 0) -> tuple[bool, bytes | None, int] | None:
        """
        Store ``value`` under ``key``, with ``lease`` if that is not 0, if ``expect`` is the revision of the key's last change (0: there is
        no such key). Return whether it was stored, the value that is there now, and the revision of its last change; None and 0 if there
        is none.

        None: no member answered, and the value may have been stored.
        """
    def delete(self, /, key: bytes | bytearray | str) -> bool:
        """
        Delete ``key``. True if it was there.
        """
    def get(self, /, key: bytes | bytearray | str) -> tuple[bytes | None, int, int]:
        """
        Return the value of ``key`` and the revision of its last change; None and 0 if there is no such key. The third is the revision
        of the store.
        """
    def lease_grant(self, /, ttl_s: SupportsFloat | SupportsIndex) -> int:
        """
        Grant a lease of ``ttl_s`` seconds, which etcd rounds up to whole seconds. Nobody renews it.
        """
    def lease_revoke(self, /, lease: SupportsIndex) -> None:
        """
        End ``lease``. Its keys are deleted.
        """
    def look(self, /) -> tuple[list[EtcdMember], list[tuple[str, list[str], bool]]]:
        """
        Ask each endpoint once, all at the same time. Also return the members that the cluster lists: name, URLs for clients, and
        whether it only learns. Raises nothing for a member that does not answer.
        """
    @property
    def options(self, /) -> EtcdOptions:
        """
        The cluster.
        """
    def put(self, /, key: bytes | bytearray | str, value: bytes | bytearray | str, *, lease: SupportsIndex = 0) -> int:
        """
        Store ``value`` under ``key``, with ``lease`` if that is not 0. Return the revision.
        """
    def range(self, /, prefix: bytes | bytearray | str) -> list[tuple[bytes, bytes, int]]:
        """
        Return all keys that begin with ``prefix``: key, value, and the revision of its last change. All are of one moment.
        """
    def wait(self, /, keys: SupportsGetItem[int, bytes | bytearray | str], *, timeout_s: SupportsFloat | SupportsIndex) -> list[bytes]:
        """
        Wait until all ``keys`` are there, at most ``timeout_s`` seconds. Return those that are missing.

        Raises ``EtcdConnectionError`` if no member serves when the time is over.
        """

@final
class EtcdMember:
    """
    What an endpoint of etcd says of itself. If it does not answer, only ``endpoint`` and ``error`` mean something.
    """
    @property
    def alarms(self, /) -> list[str]:
        """
        Alarms that it has raised: ``NOSPACE``, ``CORRUPT``.
        """
    @property
    def db_bytes(self, /) -> tuple[int, int]:
        """
        Bytes of its database, and of what is in use there.
        """
    @property
    def endpoint(self, /) -> str:
        """
        Its host and port.
        """
    @property
    def error(self, /) -> str | None:
        """
        Why it does not answer.
        """
    @property
    def errors(self, /) -> list[str]:
        """
        What it says is wrong with itself.
        """
    @property
    def is_leader(self, /) -> bool:
        """
        Whether it leads.
        """
    @property
    def is_learner(self, /) -> bool:
        """
        Whether it only learns, and serves nobody.
        """
    @property
    def knows_leader(self, /) -> bool:
        """
        Whether it knows a leader.
        """
    @property
    def name(self, /) -> str:
        """
        Its name.
        """
    @property
    def problems(self, /) -> list[str]:
        """
        What is known to be wrong with this version.
        """
    @property
    def round_trip_s(self, /) -> float:
        """
        Time from a question to its answer, in seconds.
        """
    @property
    def version(self, /) -> str:
        """
        Its version.
        """

@final
class EtcdOptions:
    """
    An etcd cluster: where it is, and how to speak to it.

    Args:
        endpoints: the members, as ``HOST[:PORT],...``, each with or without ``http://`` or ``https://``; empty: this machine.
        protocol: ``http`` or ``https``, for members without one. Default: ``http``.
        cacert: the file of the authority that has signed the members' certificates.
        cert: the file of this client's certificate.
        key: the file of the certificate's key.
        username: a user of etcd.
        password: the user's. Default: that in ``password_file``, else in the variable ``ELASTIC_RS_ETCD_PASSWORD``.
        password_file: a file with the password alone.
        key_prefix: beginning of all keys of jobs.
        read_timeout_s: time limit of each request, in seconds.

    Raises:
        ValueError: something is not allowed, or a file cannot be read. A password is never shown.
    """
    def __new__(cls, /, endpoints: str, *, protocol: str | None = None, cacert: str | PathLike[str] | None = None, cert: str | PathLike[str] | None = None, key: str | PathLike[str] | None = None, username: str | None = None, password: str | None = None, password_file: str | PathLike[str] | None = None, key_prefix: str = ..., read_timeout_s: SupportsFloat | SupportsIndex = 60.0) -> EtcdOptions:
        """
        Describe a cluster. Nothing is connected to.
        """
    def __repr__(self, /) -> str: ...
    def agents_store(self, /, run_id: str) -> str:
        """
        Beginning of the keys that PyTorch's agents share in the job ``run_id``. Outside of what the nodes watch.
        """
    @property
    def endpoints(self, /) -> str:
        """
        The members in words: ``HOST:PORT,...``.
        """
    @property
    def key_prefix(self, /) -> str:
        """
        Beginning of all keys, without slashes at its end.
        """
    @property
    def members(self, /) -> list[tuple[str, int]]:
        """
        Host and port of each member.
        """
    @staticmethod
    def of_config(endpoints: str, config: RendezvousConfig) -> EtcdOptions:
        """
        The cluster that ``endpoints`` (``--rdzv-endpoint``) and ``config`` (``--rdzv-conf``) name. Raises as the constructor.
        """
    @property
    def read_timeout_s(self, /) -> float:
        """
        Time limit of each request, in seconds.
        """
    def source_address(self, /, *, timeout_s: SupportsFloat | SupportsIndex) -> str | None:
        """
        The address of this machine from which it reaches the cluster. None if that is loopback, or if no member's name has an
        address. Names are looked up for at most ``timeout_s``.
        """
    @property
    def tls(self, /) -> bool:
        """
        Whether members are spoken to over TLS.
        """
    @property
    def username(self, /) -> str | None:
        """
        The user, if there is one.
        """

@final
class Failure:
    """
    A worker's failure. Every node names it as the cause when the job restarts or ends.
    """
    @property
    def exit(self, /) -> str:
        """
        How it ended, such as ``exit code 3`` or ``SIGKILL``.
        """
    @property
    def global_rank(self, /) -> int:
        """
        The worker's rank in the job.
        """
    @property
    def local_rank(self, /) -> int:
        """
        The worker's rank on its node.
        """
    @property
    def message(self, /) -> str:
        """
        The first lines of the worker's words, if there are any.
        """
    @property
    def node(self, /) -> str:
        """
        The name of the worker's node.
        """
    @property
    def pid(self, /) -> int:
        """
        Its process id there.
        """
    @property
    def returncode(self, /) -> int:
        """
        The same as a number, as ``subprocess.Popen.returncode``; 1 for a failure without one.
        """
    @property
    def role(self, /) -> str:
        """
        The worker's role.
        """

@final
class ForkServer:
    """
    In the fork server: its state.
    """
    def __new__(cls, /, fd: SupportsIndex) -> ForkServer:
        """
        Take the server's end of the socket that it shares with the agent: the descriptor ``fd``.
        """
    def become_guard(self, /, request: SpawnRequest) -> None:
        """
        In a child of the fork server: become the guard of the requested worker. The caller forks the worker next.
        """
    def forked(self, /, request: SpawnRequest, guard: SupportsIndex) -> None:
        """
        In the fork server, after it has forked ``guard``, the guard of the requested worker.
        """
    def next_request(self, /) -> SpawnRequest | None:
        """
        Wait for the next spawn request. None once the agent has closed the socket.
        """
    def ready(self, /) -> None:
        """
        Report to the agent that everything is imported.
        """
    def refuse(self, /, reason: str) -> None:
        """
        Report to the agent why no worker can be forked here. The caller ends the process then.
        """

@final
class HostTable:
    """
    The hosts of a job by age, and those that are kept out of it.
    """
    def __new__(cls, /, *, cooldown_s: tuple[SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex] | None = None) -> HostTable:
        """
        ``cooldown_s``: the shortest and the longest time that a host is kept out; None: for ever.

        Raises ``ValueError`` if that is no range.
        """
    def available(self, /) -> list[tuple[str, int]]:
        """
        The hosts that may be used, with their slots, the oldest first.
        """
    def blacklist(self, /, host: str) -> None:
        """
        Keep a host out, since it has failed.
        """
    def is_blacklisted(self, /, host: str) -> bool:
        """
        Whether a host is kept out.
        """
    def update(self, /, hosts: SupportsGetItem[int, tuple[str, SupportsIndex]]) -> int:
        """
        Replace the list of hosts. Returns Horovod's flags: 1 if hosts or slots were removed, 2 if they were added, 3 for both, else 0.

        Raises ``ValueError`` as :meth:`Driver.found`.
        """

@final
class LaunchOptions:
    """
    The options of a node of ``elastic-run``.
    """
    def __new__(self, /, command: SupportsGetItem[int, str], logs: LogOptions, cpus: SupportsGetItem[int, SupportsGetItem[int, SupportsIndex]], warm: tuple[SupportsGetItem[int, str], SupportsIndex, str] | None, workers: WorkerOptions) -> LaunchOptions: ...
    @property
    def command(self, /) -> list[str]:
        """
        The program and its arguments, in which ``${local_rank}`` is replaced.
        """
    @property
    def cpus(self, /) -> list[list[int]]:
        """
        The CPUs of the worker of each local rank. Empty, or missing: this process's.
        """
    @property
    def logs(self, /) -> LogOptions:
        """
        The destinations of workers' output.
        """
    @property
    def warm(self, /) -> tuple[list[str], int, str] | None:
        """
        ``begin``, ``fixed`` and ``what`` of :class:`Template`, if workers are to be forked from one.
        """
    @property
    def workers(self, /) -> WorkerOptions:
        """
        The workers.
        """

@final
class Launched:
    """
    How :func:`launch` ended.
    """
    @property
    def end_class(self, /) -> str | None:
        """
        Whose fault it was: ``program``, ``machine``, ``preempted`` or ``no progress``. None: nobody's, or it is not known.
        """
    @property
    def error(self, /) -> str | None:
        """
        Of ``no_placement`` and ``too_late``: name of the corresponding exception of ``elastic_rs.errors``.
        """
    @property
    def error_files(self, /) -> dict[int, str]:
        """
        Error files of the last round's workers, by local rank.
        """
    @property
    def exits(self, /) -> list[WorkerExit]:
        """
        The last round's workers that have ended, in that order.
        """
    @property
    def failed_at(self, /) -> float | None:
        """
        Of ``failed`` and ``unfit``: when the failure happened, or when this node learned of it, in seconds since 1970.
        """
    @property
    def failure(self, /) -> Failure | None:
        """
        Of ``failed``: the first failure, on whatever node; of ``unfit``: that of this node. None if the job was closed without a failure report.
        """
    @property
    def first_rank(self, /) -> int:
        """
        Global rank of the last round's first worker.
        """
    @property
    def outcome(self, /) -> str:
        """
        ``succeeded``, ``not_needed`` (a spare), ``too_late`` (the job had succeeded before this node could join), ``failed``,
        ``unfit`` (only this node has failed), ``no_placement``, ``signal``, or ``taken_away`` (by a notice).
        """
    @property
    def reason(self, /) -> str | None:
        """
        Of ``failed``, ``unfit``, ``no_placement`` and ``too_late``: the reason, in words.
        """
    @property
    def signal(self, /) -> int | None:
        """
        Of ``signal`` and ``taken_away``: the signal's number.
        """

@final
class LogOptions:
    """
    The destinations of the output of ``elastic-run``'s workers.
    """
    def __new__(self, /, redirects: Streams, tee: Streams, shown_local_ranks: SupportsGetItem[int, SupportsIndex] | None, shown_ranks: SupportsGetItem[int, SupportsIndex] | None, log_dir: str | PathLike[str] | None, log_files: bool, stdout_filters: SupportsGetItem[int, str], stderr_filters: SupportsGetItem[int, str], prefix: str | None) -> LogOptions: ...
    @property
    def log_dir(self, /) -> Path | None:
        """
        Folder of log files; None for a temporary folder.
        """
    @property
    def log_files(self, /) -> bool:
        """
        Whether there are log files at all.
        """
    @property
    def prefix(self, /) -> str | None:
        """
        Template of the prefix of teed lines; None for torchrun's.
        """
    @property
    def redirects(self, /) -> Streams:
        """
        Streams that go to files.
        """
    @property
    def shown_local_ranks(self, /) -> list[int] | None:
        """
        Local ranks that the console shows; None: all.
        """
    @property
    def shown_ranks(self, /) -> list[int] | None:
        """
        Global ranks that the console shows; None: all.
        """
    @property
    def stderr_filters(self, /) -> list[str]:
        """
        The same for stderr.
        """
    @property
    def stdout_filters(self, /) -> list[str]:
        """
        Texts that select lines of stdout for a separate file.
        """
    @property
    def tee(self, /) -> Streams:
        """
        Streams that go to files and to the console.
        """

@final
class NodeOptions:
    """
    The options of a node.
    """
    def __new__(self, /, run_id: str, name: str, local_addr: str | None, nodes: tuple[SupportsIndex, SupportsIndex], config: RendezvousConfig, max_restarts: SupportsIndex | None, ranks_as_asked: bool, use_agent_store: bool) -> NodeOptions: ...
    @property
    def config(self, /) -> RendezvousConfig:
        """
        The values of ``--rdzv-conf``.
        """
    @property
    def local_addr(self, /) -> str | None:
        """
        The address for other nodes, if it is not the one that the coordinator sees.
        """
    @property
    def max_restarts(self, /) -> int | None:
        """
        The job's budget; None if nodes count for themselves.
        """
    @property
    def name(self, /) -> str:
        """
        This node's name in other nodes' messages.
        """
    @property
    def nodes(self, /) -> tuple[int, int]:
        """
        Fewest and most nodes of the job.
        """
    @property
    def ranks_as_asked(self, /) -> bool:
        """
        Ranks are those that ``config`` asks for, in every round, and workers share the endpoint's store, which the coordinator empties
        for each round.
        """
    @property
    def run_id(self, /) -> str:
        """
        The job.
        """
    @property
    def use_agent_store(self, /) -> bool:
        """
        The workers share a store that exists already when they start: this node's at rank 0, or the one elsewhere.
        """

@final
class Observer:
    """
    A connection to a coordinator that reads a run's events and state, and changes nothing.
    """
    def ask(self, /, *, run_id: str | None = None, after: SupportsIndex = 0, waits: bool = False, state: bool = False) -> tuple[str, str | None, list[str], int, bool]:
        """
        Return the run's id, its state as JSON (None unless ``state``), the events after number ``after`` as lines of JSON, the number
        of the last of them, and whether there are more. With ``waits``, wait until there is one.

        Raises ``ConnectionError`` if the coordinator refuses, or has gone.
        """
    @staticmethod
    def connect(host: str, port: SupportsIndex, *, run_id: str | None = None, protection: Protection | None = None, timeout_s: SupportsFloat | SupportsIndex = 5.0) -> Observer:
        """
        Connect to the coordinator at ``host:port``. With a ``protection``, ``run_id`` must be given.

        Raises ``ConnectionError`` if nobody answers there, or if one of the ends is not proven.
        """
    def look(self, /, *, run_id: str | None = None, rank: SupportsIndex | None = None, deep: bool = False) -> tuple[str, str]:
        """
        Ask where the ranks of a run stand. Return its id and, as JSON, what its agents see: of all ranks in groups, or of ``rank`` alone, with
        ``deep`` also what ``py-spy`` shows of it.

        Raises ``ConnectionError`` if the coordinator refuses, or has gone.
        """

@final
class PageRequest:
    """
    A page that somebody waits for.
    """
    def made(self, /, html: str) -> None:
        """
        The page is made. Without that, who has asked hears that it could not be made.
        """
    @property
    def named(self, /) -> bool:
        """
        The page was asked for by the name of its run, so there may be others.
        """
    @property
    def run(self, /) -> tuple[list[str], str] | None:
        """
        Of a run's page: its events as lines of JSON, and its state as JSON.
        """
    @property
    def runs(self, /) -> tuple[list[str], int] | None:
        """
        Of a list: the names of runs, and the number of those that are left out.
        """
    @property
    def still(self, /) -> bool:
        """
        The page is not to ask for itself again.
        """

@final
class PageRequests:
    """
    The pages that are asked for at a host.
    """
    def next(self, /) -> PageRequest | None:
        """
        Wait for the next one. None: the host has ended.
        """

@final
class Placement:
    """
    A node's place in a completed round.
    """
    def __new__(cls, /, *, round: SupportsIndex, rank: SupportsIndex, world_size: SupportsIndex, master_addr: str, master_port: SupportsIndex, first_rank: SupportsIndex, first_role_rank: SupportsIndex, worker_count: SupportsIndex, role_worker_count: SupportsIndex) -> Placement:
        """
        A place that a rendezvous other than ours has assigned.
        """
    def __repr__(self, /) -> str: ...
    @property
    def master_addr(self, /) -> str:
        """
        Address of rank 0.
        """
    @property
    def master_port(self, /) -> int:
        """
        Port of the round's empty worker store at rank 0.
        """
    @property
    def rank(self, /) -> int:
        """
        This node's rank.
        """
    @property
    def reason(self, /) -> str:
        """
        The reason for which the round closed, and its members.
        """
    @property
    def restart(self, /) -> int:
        """
        The job's restart number.
        """
    @property
    def round(self, /) -> int:
        """
        Number of the round, 1 for the first.
        """
    @property
    def workers(self, /) -> tuple[int, int, int, int] | None:
        """
        Global and role rank of this node's first worker, the number of workers, and the number of those with its role. None if a
        node has not sent its number of workers.
        """
    def workers_of(self, /, offered: SupportsIndex) -> int:
        """
        How many workers this node starts, which has offered this number: as many, or fewer if rounds count workers.
        """
    @property
    def world_size(self, /) -> int:
        """
        Number of nodes.
        """

@final
class PreemptOptions:
    """
    How an agent learns that its machine is about to be taken away, and what its workers get then. Times are in seconds.
    """
    def __new__(self, /, notice_signal: tuple[SupportsIndex, SupportsFloat | SupportsIndex] | None, notice_file: str | PathLike[str] | None, notice_command: tuple[str, str] | None, deadline_s: SupportsFloat | SupportsIndex, signal: SupportsIndex | None) -> PreemptOptions: ...
    @property
    def deadline_s(self, /) -> float:
        """
        How much time a notice leaves that does not say it.
        """
    @property
    def notice_command(self, /) -> tuple[str, str] | None:
        """
        A command of the shell that is run until it writes how many seconds are left, and its name in messages.
        """
    @property
    def notice_file(self, /) -> Path | None:
        """
        A file whose appearance is a notice. Its first word is how many seconds are left.
        """
    @property
    def notice_signal(self, /) -> tuple[int, float] | None:
        """
        Number of the signal that is a notice, and how many seconds are left then.
        """
    @property
    def signal(self, /) -> int | None:
        """
        A signal by which workers save; None: they get none.
        """

@final
class ProgressPattern:
    """
    Which lines of workers show progress: ``--progress-log``.
    """
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __new__(cls, /, text: str) -> ProgressPattern:
        """
        Compile a regular expression.

        Raises ``ValueError``. Its text continues the flag's name.
        """

@final
class Protection:
    """
    How the sessions of a job are protected: by a token that all its nodes hold, by certificates of one authority, or by both.
    """
    def __repr__(self, /) -> str: ...
    @staticmethod
    def by_certificates(certificates: Certificates) -> Protection:
        """
        Use certificates alone.

        Raises ``ValueError`` as :meth:`by_file`.
        """
    @staticmethod
    def by_file(path: str | PathLike[str], *, certificates: Certificates | None = None) -> Protection:
        """
        Use the token in this file. It is read again when it has changed, and so are those of ``certificates``.

        Raises ``ValueError`` if a file cannot be read, if others may read it, or if it does not hold what it should.
        """
    @staticmethod
    def by_master_file(path: str | PathLike[str], *, certificates: Certificates | None = None) -> Protection:
        """
        Use the token of each run, derived from the master token in this file. For a coordinator that serves several jobs.

        Raises ``ValueError`` as :meth:`by_file`.
        """
    @staticmethod
    def by_token(token: str, *, certificates: Certificates | None = None) -> Protection:
        """
        Use this token.

        Raises ``ValueError`` if it is too short, or has characters that are not allowed, or as :meth:`by_file`.
        """
    @property
    def certificate(self, /) -> str | None:
        """
        What its certificate says, for people. None: it has a token alone.
        """
    @property
    def days_left(self, /) -> float | None:
        """
        The days that its certificate is still valid. None: it has a token alone.
        """
    @property
    def key_ids(self, /) -> str | None:
        """
        The public ids of its tokens. None: it has certificates alone.
        """
    def reveal(self, /) -> str | None:
        """
        The token that this process shows, to be given to a process of the same job. It must not be shown. None: it has certificates
        alone.
        """
    @property
    def text(self, /) -> str:
        """
        What this process proves itself by, for people.
        """
    def try_at(self, /, address: str, port: SupportsIndex, host: str, run_id: str, *, timeout_s: SupportsFloat | SupportsIndex) -> str | None:
        """
        Try whether a coordinator at ``address:port`` and this process are proven to each other for this run. A certificate of the
        coordinator has to be for ``host``. None if they are, or the reason why not.
        """
    @property
    def warnings(self, /) -> list[str]:
        """
        What an operator has to know now about certificates that end soon, one sentence for each.
        """

@final
class RendezvousConfig:
    """
    The values of ``--rdzv-conf``. Times are in seconds.

    The constructor takes values by key, with defaults for the other keys. It does not check ranges, which a session does.
    """
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __new__(cls, /, **values: "float | bool | str | None") -> RendezvousConfig: ...
    def __repr__(self, /) -> str: ...
    def check_workers_store(self, /, *, is_protected: bool, own_store: bool) -> None:
        """
        Check whether the protection of the workers' store that is wanted, ``store_tunnel`` or ``store_members=strict``, is possible.
        ``is_protected``: the job has a token or certificates. ``own_store``: each round has a store, which the agent of rank 0's node
        serves.

        Raises ``ValueError`` if it is not.
        """
    @property
    def close_timeout(self, /) -> float:
        """
        Time limit of telling the other nodes that the job is over, in seconds.
        """
    @property
    def drain_timeout(self, /) -> float:
        """
        How long this process may serve other nodes at the end, in seconds.
        """
    @property
    def exit_barrier_timeout(self, /) -> float | None:
        """
        How long to wait for the other nodes' workers, in seconds. None: for as long as they run.
        """
    @staticmethod
    def from_mapping(given: "dict[str, object]", *, backend: str) -> RendezvousConfig:
        """
        Check the user's values for ``backend``, ``rust-c10d`` or ``rust-etcd``. Values are texts or numbers; None counts as not given.

        Raises ``ValueError`` if a key is unknown (the nearest known one is named) or without a meaning for the backend, or if a value
        is not allowed.
        """
    @property
    def is_host(self, /) -> bool | None:
        """
        True: this process must host the coordinator. False: it must not. None: it does if it can.
        """
    @property
    def job_counts(self, /) -> bool:
        """
        Whether restarts are counted for the job: ``restart_budget`` is ``job``.
        """
    @property
    def join_timeout(self, /) -> float:
        """
        Time limit of a join, in seconds.
        """
    @staticmethod
    def known(backend: str) -> list[str]:
        """
        The keys that have a meaning for ``backend``, ``rust-c10d`` or ``rust-etcd``, in all spellings, sorted.

        Raises ``ValueError`` for another backend.
        """
    @property
    def node_rank(self, /) -> int | None:
        """
        The rank that this node requests.
        """
    @property
    def read_timeout(self, /) -> float:
        """
        Time limit of each operation of the store that the agents share, in seconds.
        """
    def replace(self, /, **values: "float | bool | str | None") -> RendezvousConfig:
        """
        Return a copy with other values. Ranges are not checked.
        """
    @property
    def store_tunnel(self, /) -> bool | None:
        """
        Whether workers reach the store of rank 0's node through their agents. None: the user has not said so.
        """
    @staticmethod
    def table() -> list[ConfKey]:
        """
        All keys that have an effect.
        """
    def values(self, /) -> "dict[str, float | int | bool | str | None]":
        """
        Return all values by their keys. None: the key was not given and has no default.
        """
    @property
    def wants_agent(self, /) -> bool:
        """
        Whether our agent runs the workers: ``agent`` is ``rust``.
        """
    @staticmethod
    def without_effect() -> list[ConfKey]:
        """
        The keys of PyTorch's that are checked and have no effect here.
        """

@final
class Session:
    """
    A node's session with a coordinator, over etcd, or over a cell that all nodes share (:class:`CellSession`).
    """
    def __new__(cls, /, endpoints: SupportsGetItem[int, tuple[str, SupportsIndex]], options: NodeOptions, *, coordinator: EndpointServer | None = None, protection: Protection | None = None) -> Session:
        """
        Start a session for one node with the coordinator at one of these ``endpoints``, which it finds. It connects in the background.
        ``coordinator`` is that of this process, if it hosts one. With a ``protection``, it speaks only with one that holds the same token.

        Raises ``ValueError`` for invalid options.
        """
    @property
    def addr(self, /) -> str:
        """
        The address at which other nodes find this one, or its name if the address is not known.
        """
    def close(self, /, *, cause: str | None = None, timeout_s: SupportsFloat | SupportsIndex | None = None) -> None:
        """
        End the job for all nodes. With a ``cause`` the job has failed, and the other nodes stop. With ``timeout_s``, wait at most that
        long until the job is closed, and raise the errors of :meth:`join`.
        """
    def join(self, /, *, workers: tuple[str, SupportsIndex, str] | None = None, agent: Agent | None = None) -> Placement | None:
        """
        Take part in the next round, and wait until it is complete. If this node has rank 0, it serves an empty store to the round's
        workers until the next round or the end. ``workers`` are the role of the workers, their number, and the script that they run.

        Raises ``RendezvousTimeoutError``, ``RendezvousClosedError``, ``RendezvousGracefulExitError`` (for a spare that was not
        needed) or ``RendezvousConnectionError`` of ``elastic_rs.errors``. Over etcd or a cell also ``RendezvousStateError``, if it holds
        something else than a state of this rendezvous.

        ``agent`` handles signals and notices meanwhile. Returns None if one of them has made it leave: the join was withdrawn.
        """
    def leave(self, /, reason: str, *, timeout_s: SupportsFloat | SupportsIndex = 1.0, signal: SupportsIndex | None = None) -> None:
        """
        Leave and end the session. Messages that are not sent yet are sent first, for at most ``timeout_s``. Then wait, at most for the
        configuration's ``drain_timeout``, for workers that use this node's store, and for nodes that use this process's coordinator.
        Later calls do nothing.

        ``signal`` is the signal that ended this process, if one did. SIGINT ends the job if this process hosts the coordinator.
        """
    @staticmethod
    def over_etcd(etcd: EtcdOptions, options: NodeOptions, *, protection: Protection | None = None) -> Session:
        """
        Start a session for one node over an etcd cluster. It connects in the background. Other nodes find this one at ``local_addr`` of
        the options. ``protection`` is for the tunnels of workers, if the options ask for them.

        Raises ``ValueError`` for invalid options, or if a file for TLS cannot be used.
        """
    @property
    def progress(self, /) -> str | None:
        """
        A description of what this node waits for, if it waits for a round.
        """
    def view(self, /) -> View:
        """
        The state of the rendezvous, from memory. Raises the errors of :meth:`join` when this node can no longer take part.
        """
    @property
    def was_welcomed(self, /) -> bool:
        """
        Whether the coordinator has ever welcomed this node.
        """
    def write_events(self, /, folder: str | PathLike[str]) -> None:
        """
        Write events into this folder from now on, beginning with those that were recorded already: this node's into ``events.jsonl``, and
        the coordinator's into ``events-coordinator.jsonl`` if this process hosts it. Later calls do nothing. Nothing waits for the files:
        what cannot be written is dropped and counted.
        """

@final
class Signals:
    """
    Signals that this process handles for a job, as a context. Meanwhile they end nobody and interrupt nothing, whichever thread they come
    to: :func:`launch` and :meth:`Driver.run` read them. At its end they do what they did before.

    ``named``: the user has named them. Otherwise SIGHUP stays ignored if it is, as under ``nohup``. ``driven``: a driver has started this
    process. ``passed_on``: further signals, which end nothing, and of which each counts.

    Entering raises ``OSError`` if no descriptor is left, or if an agent in another thread handles this process's signals.
    """
    def __enter__(self, /) -> Signals: ...
    def __exit__(self, /, *_error: "object") -> None: ...
    def __new__(cls, /, signals: SupportsGetItem[int, SupportsIndex], *, passed_on: SupportsGetItem[int, SupportsIndex], named: bool, driven: bool = False) -> Signals: ...

@final
class SpawnRequest:
    """
    In the fork server: a request to fork a worker.
    """
    @property
    def argv(self, /) -> list[str]:
        """
        The worker's program and arguments.
        """
    def become_worker(self, /) -> None:
        """
        In the guard's child: become the worker, with its session, streams and folder.
        """
    @property
    def env(self, /) -> dict[str, str]:
        """
        The worker's whole environment.
        """
    def show(self, /) -> None:
        """
        In the worker, once its variables are set: make ``ps`` and ``/proc`` show them and its command.
        """
    def watch(self, /, worker: SupportsIndex) -> None:
        """
        In the guard: supervise its child ``worker`` (-1: there is none) until no process of it is left. Does not return.
        """

@final
class Step:
    """
    The next step of the front end.
    """
    @property
    def error(self, /) -> Any | None:
        """
        Of the outcome ``no_placement``: the exception with the reason.
        """
    @property
    def failure(self, /) -> Failure | None:
        """
        Of the outcome ``failed``: the first failure, on whatever node. None if the job was closed without a failure report.
        """
    @property
    def kind(self, /) -> str:
        """
        ``join``, ``start``, ``reap``, ``barrier`` or ``end``.
        """
    @property
    def local_rank(self, /) -> int | None:
        """
        Of ``reap``: local rank of the worker that has ended.
        """
    @property
    def outcome(self, /) -> str | None:
        """
        Of ``end``: ``succeeded``, ``not_needed`` (a spare), ``failed``, ``no_placement`` or ``signal``.
        """
    @property
    def placement(self, /) -> Placement | None:
        """
        Of ``start``: the node's place, or the one that it will probably get if it has not joined yet.
        """
    @property
    def reason(self, /) -> str | None:
        """
        Of the outcome ``failed``: the reason, in words.
        """

class StepCounter:
    """
    The steps of the calling process: ``elastic_rs.step``, but for what needs torch.
    """
    def __call__(self, n: SupportsIndex | None = None, /) -> None:
        """
        A step has ended: number ``n``, by default the one after the last.
        """
    def __new__(cls, /) -> StepCounter: ...
    def _count(self, is_next: bool, /) -> None:
        """
        A step of an optimizer has ended: it counts if ``is_next``, unless the training script reports its steps itself.
        """
    def _count_no_more(self, /) -> None:
        """
        Steps of optimizers are counted no more, and those that were count no more.
        """
    def _go_on_from(self, last: SupportsIndex, /) -> None:
        """
        Step ``last`` was the last one: the next is counted from there. It is not reported.
        """
    def _grouped(self, /) -> None:
        """
        This worker has its process group now.
        """
    def _restarts_for_nccl(self, restarts: bool, /) -> None:
        """
        Say whether this worker is restarted when the world changes, because its process group uses NCCL. ``elastic-rs status`` shows it.
        """
    def _synchronised(self, /) -> None:
        """
        This worker has the state of its world now.
        """

@final
class StoreClient:
    """
    The core's client of a TCP store, without torch. Keys are ``str`` (sent as UTF-8) or ``bytes``. Times are in seconds.
    """
    def __new__(cls, /, host: str, port: SupportsIndex, *, timeout_s: SupportsFloat | SupportsIndex = 300.0) -> StoreClient:
        """
        Connect to the store at ``host:port``, which need not listen yet.

        ``timeout_s`` limits connecting, and each operation that waits for keys.
        """
    def add(self, /, key: bytes | bytearray | str, amount: SupportsIndex) -> int:
        """
        Add to the number stored under a key, and return the sum.
        """
    def append(self, /, key: bytes | bytearray | str, value: bytes | bytearray | str) -> None:
        """
        Append to a key's value.
        """
    def barrier(self, /, key: bytes | bytearray | str, world_size: SupportsIndex, timeout_s: SupportsFloat | SupportsIndex | None = None) -> None:
        """
        Wait until ``world_size`` callers have reached this barrier, at most ``timeout_s`` or the client's default.
        """
    def check(self, /, keys: SupportsGetItem[int, bytes | bytearray | str]) -> bool:
        """
        Whether all keys exist.
        """
    def clone(self, /) -> StoreClient:
        """
        Open another connection to the same store.
        """
    def compare_set(self, /, key: bytes | bytearray | str, expected: bytes | bytearray | str, desired: bytes | bytearray | str) -> bytes:
        """
        Replace the value if it is the expected one. Return the store's answer.
        """
    def delete_key(self, /, key: bytes | bytearray | str) -> bool:
        """
        Remove a key. Return whether it existed.
        """
    def get(self, /, key: bytes | bytearray | str) -> bytes:
        """
        Return a key's value, waiting for it to appear.
        """
    def list_keys(self, /) -> list[bytes]:
        """
        All keys, in no particular order, as ``bytes``, because a key need not be UTF-8.
        """
    def multi_get(self, /, keys: SupportsGetItem[int, bytes | bytearray | str]) -> list[bytes]:
        """
        Return several values, waiting for all keys to appear.
        """
    def multi_set(self, /, keys: SupportsGetItem[int, bytes | bytearray | str], values: SupportsGetItem[int, bytes | bytearray | str]) -> None:
        """
        Store several values.
        """
    def num_keys(self, /) -> int:
        """
        Number of keys in the store.
        """
    def queue_len(self, /, key: bytes | bytearray | str) -> int:
        """
        Length of a queue.
        """
    def queue_pop(self, /, key: bytes | bytearray | str, block: bool = True) -> bytes:
        """
        Take the first item of a queue. With ``block``, wait for one.

        Raises ``StoreQueueEmptyError`` if there is none, also after blocking if another client took it first.
        """
    def queue_push(self, /, key: bytes | bytearray | str, value: bytes | bytearray | str) -> None:
        """
        Add an item to the end of a queue.
        """
    def set(self, /, key: bytes | bytearray | str, value: bytes | bytearray | str) -> None:
        """
        Store a value.
        """
    def wait(self, /, keys: SupportsGetItem[int, bytes | bytearray | str], timeout_s: SupportsFloat | SupportsIndex | None = None) -> None:
        """
        Wait until all keys exist, at most ``timeout_s`` or the client's default.
        """

@final
class StoreLimits:
    """
    The limits of a store, by their names in :meth:`table`. A limit that is not given, or None, has its default.

    Raises ``TypeError`` for an unknown name, and ``ValueError`` for a value out of its range.
    """
    def __new__(cls, /, **values: "float | None") -> StoreLimits: ...
    @staticmethod
    def table() -> list[tuple[str, str, float | None, str]]:
        """
        All limits: name, unit (``number``, ``bytes`` or ``seconds``), default (None is no limit), and what it limits.
        """

@final
class StoreServer:
    """
    A TCP store's server. It runs on its own thread, which never waits for the interpreter.

    It ends by :meth:`stop` or :meth:`drain`, or when this object is collected, unless :meth:`stop_when_closed` has given it owners.
    """
    @staticmethod
    def adopt(fd: SupportsIndex, port: SupportsIndex) -> StoreServer:
        """
        Take over the bound socket ``fd``, and close it at the end. Its port must be ``port``, unless that is 0.

        Raises ``OSError`` if it is not a TCP socket, and ``StoreError`` if it has another port. The caller then keeps the socket.
        """
    @property
    def connections(self, /) -> int:
        """
        Number of connections that are open now.
        """
    def drain(self, /, *, timeout_s: SupportsFloat | SupportsIndex) -> bool:
        """
        Wait until all clients have disconnected, at most ``timeout_s``, then stop. True if all had.
        """
    def expect_owner(self, /) -> bool:
        """
        Announce a further owner. Until :meth:`stop_when_closed` names it or :meth:`give_up_owner` is called, the server does not
        end because its other owners have gone. False if the server has ended.
        """
    def give_up_owner(self, /) -> None:
        """
        Withdraw the announcement of :meth:`expect_owner`. Without owners, the server ends.
        """
    @staticmethod
    def listen(address: str | None, port: SupportsIndex) -> StoreServer:
        """
        Listen on ``address``, or on all addresses if it is None. Port 0 lets the system choose.

        Raises ``OSError``. If the port is taken, the text names the process that has it, if the system reports it.
        """
    @property
    def port(self, /) -> int:
        """
        The port it listens on.
        """
    def stop(self, /) -> None:
        """
        Close everything now.
        """
    def stop_when_closed(self, /, address: str, port: SupportsIndex) -> None:
        """
        Make the connection from this address an owner: the server ends when the connections of all its owners have closed,
        and no longer when this object is collected.
        """
    @property
    def stopped(self, /) -> bool:
        """
        Whether it has ended.
        """
    def wait_for_workers(self, /, world_size: SupportsIndex, *, timeout_s: SupportsFloat | SupportsIndex) -> int:
        """
        Wait until ``world_size`` users have joined, at most ``timeout_s``. Return the number of those that have.
        """
    @property
    def waiting(self, /) -> int:
        """
        Number of connections that wait for keys now.
        """

@final
class Streams:
    """
    Which streams of which workers: ``--redirects`` and ``--tee``.
    """
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __new__(cls, /, text: str) -> Streams:
        """
        Parse torchrun's form.

        Raises ``ValueError``. Its text continues the flag's name.
        """
    @property
    def any(self, /) -> bool:
        """
        Whether a stream of some worker is one of them.
        """

@final
class Template:
    """
    A process that has imported the workers' modules, and from which workers are forked.
    """
    def __new__(cls, /, command: SupportsGetItem[int, str], *, begin: SupportsGetItem[int, str], fixed: SupportsIndex, env: dict[str, str], what: str) -> Template:
        """
        Start it in the background. ``command`` is the workers' program and arguments, of which ``fixed`` are the same for every worker.
        ``begin`` precedes the arguments. ``env`` is the environment that workers inherit. ``what`` names the modules, for the log.

        Raises ``ValueError`` for a command without a program.
        """
    def end(self, /) -> None:
        """
        End it, kill the workers that were forked from it, and wait until no process of them is left.
        """

@final
class View:
    """
    The state of the rendezvous for a node.
    """
    @property
    def addr(self, /) -> str | None:
        """
        The address at which other nodes find this one, once known.
        """
    @property
    def cause(self, /) -> Failure | None:
        """
        The worker's failure that is the cause, if any.
        """
    @property
    def closed(self, /) -> bool:
        """
        Whether the rendezvous was closed.
        """
    @property
    def end_class(self, /) -> str | None:
        """
        Whose fault it was, if the rendezvous was closed after a failure: ``program``, ``machine``, ``preempted`` or ``no progress``.
        """
    @property
    def failure(self, /) -> str | None:
        """
        The cause in words, if the rendezvous was closed after a failure.
        """
    @property
    def fenced(self, /) -> str | None:
        """
        The reason, if this node has fenced itself: it was cut off from the coordinator for its whole lease.
        """
    @property
    def over(self, /) -> bool:
        """
        Whether that was before this node came.
        """
    @property
    def reason(self, /) -> str:
        """
        The reason, in words.
        """
    @property
    def waiting(self, /) -> int:
        """
        Above zero when the world must re-form.
        """

@final
class WorkerChannel:
    """
    A worker's connection with its agent: the agent's messages, and which sockets are shut down when a peer fails.

    Every method raises ``ConnectionError`` once the connection has ended and nothing else is known, and ``RuntimeError`` in a process
    that was forked from the worker.
    """
    def check(self, /) -> int:
        """
        Count one check. 0: nothing happened. 1: the world changes at this check. 2: a peer failed.

        Waits only while it is not known at which check the world changes.
        """
    @staticmethod
    def connect(address: str, limit_s: SupportsFloat | SupportsIndex) -> WorkerChannel:
        """
        Connect to the agent whose socket has this ``address``, within ``limit_s`` seconds.

        Raises ``ConnectionError`` if nobody listens there, and ``RuntimeError`` if another process of the same worker trains. An agent
        that refuses this process says so in the next call.
        """
    @property
    def failed_rank(self, /) -> int | None:
        """
        Global rank of the worker whose failure is the last news. None: no worker has failed, or none is to blame.
        """
    def failed_within(self, /, limit_s: SupportsFloat | SupportsIndex) -> bool:
        """
        Wait until a peer's failure is known. False if none is within ``limit_s`` seconds.
        """
    @property
    def flags(self, /) -> int:
        """
        What the last change or world changes: 0 nothing, 1 removed, 2 added, 3 both. 0 after a failure.
        """
    def formed(self, /) -> None:
        """
        The world is formed, or this worker leaves it.
        """
    def forms_within(self, /, limit_s: SupportsFloat | SupportsIndex) -> None:
        """
        The world of this worker is being formed. Unless this or :meth:`formed` is called again within ``limit_s`` seconds, the agent is
        notified that it is not, and every member leaves it.
        """
    def guard_loops(self, /, store_port: SupportsIndex | None = None) -> int:
        """
        The same for process groups that exist already: the sockets in epoll sets with a listening socket, and all connections to the
        store. Returns the number of the groups' sockets.
        """
    def guard_sockets(self, /, mark: SupportsIndex, store_port: SupportsIndex | None = None) -> int:
        """
        The process group of this ``mark`` was made, or could not be made: shut its sockets down when a peer fails, or at once if one has.
        Returns their number.

        Its sockets are those connected since the mark that are in an epoll set with a listening socket. New connections to the store
        at ``store_port`` are shut down too.
        """
    def mark_sockets(self, /) -> int:
        """
        Remember the TCP sockets that are connected now: a process group is about to be made. Returns a number for :meth:`guard_sockets`.

        If a peer fails meanwhile, all TCP sockets that are connected later are shut down, so that nothing waits for that peer.
        """
    def no_process_group(self, /) -> None:
        """
        Say that this worker has no process group yet, and lets the library make it. So it can be started before its node has joined.
        """
    def park(self, /, commit: SupportsIndex | None) -> World:
        """
        Say that this worker has left its process group, and wait for its next world. Its sockets are released.

        ``commit`` is the number of the commit that its state has, or None if that was never synchronised or committed.
        """
    def raised(self, /, error: str, message: str) -> None:
        """
        Report that the worker's program has raised one of the library's exceptions itself: the name of its type, and its message. This
        worker leaves its world and lives, and every other member leaves it as after a failure.
        """
    def raises_at(self, /) -> tuple[int | None, int]:
        """
        The check at which the world changes, or None if that is not known, and how many checks this worker has made in this world.
        """
    @property
    def reason(self, /) -> str:
        """
        Why a peer failed, or the world changes, or the last world has ended, in words.
        """
    def release_sockets(self, /) -> None:
        """
        The worker leaves its world: all process groups are destroyed.
        """
    def saves(self, /) -> None:
        """
        Say that this worker's program does not live through a change of the world: it saves at the check, parks, and is started anew.
        """
    def stuck(self, /) -> None:
        """
        Report to the agent now that the world cannot be formed. Every member leaves it.
        """
    def synchronised(self, /) -> None:
        """
        This worker has the job's state: it was synchronised with the other members of its world.
        """
    def unfit(self, /, message: str) -> None:
        """
        Report that the worker's program cannot take the state that the others have. If all workers of its node are new, the node leaves
        the job, which costs the others no restart.
        """
    def until_quiet(self, /) -> None:
        """
        A peer has failed, and the process groups are about to be destroyed: wait until nothing passes on their sockets, for a second at
        most. Another worker that receives a message from this one would not notice its end.
        """
    def wait_change(self, /) -> tuple[int, int]:
        """
        Wait for the next change: its number, and its flags.
        """
    def world(self, /) -> World:
        """
        The latest world. Waits for the first one: call this after :meth:`connect`.
        """

@final
class WorkerCommand:
    """
    A program to start as a worker.
    """
    def __new__(cls, /, local_rank: SupportsIndex, command: SupportsGetItem[int, str], env: dict[str, str], *, stdout: str | PathLike[str] = ..., stderr: str | PathLike[str] = ..., tee_stdout: bool = False, tee_stderr: bool = False, prefix: str | None = None, cpus: SupportsGetItem[int, SupportsIndex] = ...) -> WorkerCommand:
        """
        ``command`` is the program and its arguments, ``env`` the whole environment.

        ``stdout`` and ``stderr`` are paths of files, or empty for this process's own stream. With ``tee_stdout`` or
        ``tee_stderr`` the stream is shown here too, each line with ``prefix``. ``cpus`` are those that the worker may use, all of this
        process's if none is given.
        """

@final
class WorkerExit:
    """
    How a worker of this node ended.
    """
    @property
    def at(self, /) -> float:
        """
        When it ended, in seconds since 1970.
        """
    @property
    def local_rank(self, /) -> int:
        """
        Its rank on its node.
        """
    @property
    def pid(self, /) -> int:
        """
        Its process id.
        """
    @property
    def returncode(self, /) -> int:
        """
        How it ended, as ``subprocess.Popen.returncode``.
        """
    @property
    def stopped(self, /) -> bool:
        """
        A signal of this agent has ended it: it was stopped.
        """

@final
class WorkerOptions:
    """
    What every front end says of a node's workers. Times are in seconds.
    """
    def __new__(self, /, entrypoint: str, role: str, local_world_size: SupportsIndex, max_restarts: SupportsIndex, grace_s: SupportsFloat | SupportsIndex, leader_first: bool, forwarded_signals: SupportsGetItem[int, SupportsIndex], preempt: PreemptOptions, uninterruptible_sleep_s: SupportsFloat | SupportsIndex, virtual_local_rank: bool, on_hang: str | None, health_check: str | None, progress_log: ProgressPattern | None) -> WorkerOptions: ...
    @property
    def entrypoint(self, /) -> str:
        """
        The name of the workers in logs and in the final report.
        """
    @property
    def forwarded_signals(self, /) -> list[int]:
        """
        Numbers of signals that do not end the agent, but are passed on to whom ``leader_first`` says.
        """
    @property
    def grace_s(self, /) -> float:
        """
        How long workers may take to end after the stop signal.
        """
    @property
    def health_check(self, /) -> str | None:
        """
        What is checked before a join: ``builtin``, or a command that a shell runs as well; None: nothing.
        """
    @property
    def leader_first(self, /) -> bool:
        """
        The stop signal goes to the process that was started as the worker, and to its process group only after that has ended.
        """
    @property
    def local_world_size(self, /) -> int:
        """
        Number of workers of this node.
        """
    @property
    def max_restarts(self, /) -> int:
        """
        Number of restarts after failures, as workers see it.
        """
    @property
    def on_hang(self, /) -> str | None:
        """
        What a shell runs on rank 0's node when a hang is found; None: nothing.
        """
    @property
    def preempt(self, /) -> PreemptOptions:
        """
        Notices that this machine is about to be taken away.
        """
    @property
    def progress_log(self, /) -> ProgressPattern | None:
        """
        Lines of teed streams that match show progress, as steps do; None: none does.
        """
    @property
    def role(self, /) -> str:
        """
        The workers' role.
        """
    @property
    def uninterruptible_sleep_s(self, /) -> float:
        """
        How long a worker may sleep uninterruptibly; zero: no limit.
        """
    @property
    def virtual_local_rank(self, /) -> bool:
        """
        Each worker sees only its own GPU.
        """

@final
class World:
    """
    A world, as it is sent to one worker.
    """
    @property
    def generation(self, /) -> int:
        """
        Number of the round.
        """
    @property
    def reason(self, /) -> str:
        """
        Why the last world has ended, in words.
        """
    @property
    def source(self, /) -> int:
        """
        Global rank of the worker whose state the others take.
        """
    @property
    def sync(self, /) -> bool:
        """
        Whether they do.
        """
    @property
    def variables(self, /) -> dict[str, str]:
        """
        Variables of the worker's environment, such as ``RANK``.
        """

def _shutdown() -> None:
    """
    Stop all background threads. Registered with ``atexit``.
    """

def check_health(command: str | None = None) -> tuple[str, str]:
    """
    Check this machine once, as ``--health-check`` does before a join. The built-in checks come first, then this command, if one is given.

    Returns a verdict (``well``, ``ill`` or ``unknown``) and its reason, which is empty for ``well``.
    """

def coordinator_is_protected(answer: bytes) -> bool:
    """
    Whether this is the answer of a coordinator that is protected by a token.
    """

def coordinator_question() -> bytes:
    """
    Return the bytes that ask a coordinator for the version of its protocol. No session begins.
    """

def coordinator_version(answer: bytes) -> int | None:
    """
    Return the version in a coordinator's answer. None if this is not a coordinator's answer.
    """

def cpus_of_workers(binding: str, workers: SupportsIndex, gpus: SupportsGetItem[int, str], *, allowed: SupportsGetItem[int, SupportsIndex] | None = None, root: str | PathLike[str] = ...) -> tuple[list[list[int]], list[str], str]:
    """
    The CPUs to which workers are bound, by local rank: an empty list where a worker is not. With them, why some are bound otherwise
    than was asked for, and all in words.

    ``binding`` is ``node``, ``socket``, ``exclusive`` or ``core-complex``, as PyTorch's ``AffinityMode``. ``gpus`` are the PCI addresses
    (``0000:dc:00.0``) of the GPUs that the workers see, in their order; without them workers are spread over the NUMA nodes. ``allowed`` are
    the CPUs that they may use, those of this thread if it is None, and ``root`` is where ``/sys`` is.

    Raises ``ValueError`` if there is no such binding.
    """

def derived_token(token: str, *, run_id: str | None = None, observer: bool = False) -> str:
    """
    Return the token that is derived from another one: for a run, or for observers.

    Raises ``ValueError`` if the other one is no token.
    """

def enter_section(section: SupportsIndex, /) -> int:
    """
    The training of this process is in this section from now on, 0 for none. Returns in which it was.
    """

def follow_parent() -> None:
    """
    Have the calling process killed when the thread that started it ends: for workers that are Python functions.
    """

def gpu_addresses(cuda_visible_devices: str | None) -> list[str]:
    """
    The PCI addresses of the NVIDIA GPUs that a process sees with this ``CUDA_VISIBLE_DEVICES``, in its order. A GPU without a known
    address is missing.

    Raises ``RuntimeError`` if there is no driver, with what was tried.
    """

def launch(session: Session, options: LaunchOptions, *, signals: Signals | None, fixed_master: tuple[str, SupportsIndex] | None, whole_lines: bool, variables: dict[str, str]) -> Launched:
    """
    Run the workers of one node until the job, or this node's part in it, has ended. No process of them is left then.

    ``session`` must be new. Workers inherit this process's environment, and get the ``variables`` besides. ``fixed_master`` is the
    address and port for workers, instead of the round's. With ``whole_lines`` the console gets only whole lines of workers, also of
    streams that are not teed.

    The first of the ``signals`` ends this node's part, and a second one kills its workers. None: this process handles its signals
    itself. Python holds no lock meanwhile.

    Raises ``ValueError`` for invalid values, and ``RuntimeError`` if only this node cannot go on.
    """

def log_folder_name(run_id: str) -> str:
    """
    Return the beginning of a log folder's name: the run id, without slashes and short enough for a file system, and this machine's
    name.
    """

def metric_families() -> list[tuple[str, str, list[str], str]]:
    """
    The families of series at ``/metrics``: the series' name, its type, the names of its labels and its help.
    """

def new_token() -> str:
    """
    Return a new token of 256 bits, as hexadecimal digits.

    Raises ``OSError`` if the system has no randomness.
    """

def only_on_loopback(host: str) -> list[str]:
    """
    The addresses of a name or address, if all of them are on loopback. Empty otherwise, and if it cannot be resolved. Asks the resolver.
    """

def parse_hosts(text: str, *, form: str, default_slots: SupportsIndex) -> list[tuple[str, int]]:
    """
    Parse hosts: ``list`` (``a:8,b:8``), ``lines`` (what a script prints) or ``hostfile``. A host without slots has ``default_slots``.

    Raises ``ValueError`` for a bad line or entry. The error names its number, repeats its text, and says what is allowed.
    """

def rehearse(command: SupportsGetItem[int, str]) -> None:
    """
    Start a command as workers are started, and wait until no process of it is left.

    Raises ``RuntimeError`` if that fails, with the system call that this machine refuses.
    """

def reset_log_levels() -> None:
    """
    Read the level of Python's logger ``elastic_rs`` again. Call it after changing the level.
    """

def signal_number(name: str) -> int | None:
    """
    Return the number of the signal with this name, such as ``SIGTERM``. None if there is none.

    Python's ``signal`` knows the same names. Its import takes a part of an agent's start that can be noticed.
    """

def start_program(command: SupportsGetItem[int, str], *, stdout: SupportsIndex, stderr: SupportsIndex) -> int:
    """
    Start a program in a session of its own, without blocked signals and with no input, and return its process id.

    ``stdout`` and ``stderr`` are descriptors. The caller waits for the end of the process.

    Raises ``OSError`` with ``errno`` and ``strerror`` if it cannot be run.
    """

def start_watch(address: str, report: Any) -> None:
    """
    Start the thread that answers the agent at ``address`` during a look, with what ``report`` returns: whether an exception has ended the
    program, the flight recorders as JSON, and the global ranks of each process group by name.

    Does nothing if the process, or one from which it was forked, has started it.
    """

def store_question(nonce: SupportsIndex) -> bytes:
    """
    Return the first bytes that a c10d client sends to a store. A store answers with the nonce, as four bytes in little-endian order.
    """

def validate_run_id(run_id: str) -> None:
    """
    Raise ``ValueError`` if this cannot be a job's name: it is empty or too long, or has control characters.
    """

def visible_gpus(cuda_visible_devices: str | None) -> int:
    """
    Number of NVIDIA GPUs that a process sees with this ``CUDA_VISIBLE_DEVICES``, as of ``torch.cuda.device_count()``.

    Raises ``RuntimeError`` if there is no driver, with what was tried.
    """

def watch_signals(signals: SupportsGetItem[int, SupportsIndex], *, passed_on: SupportsGetItem[int, SupportsIndex] = ..., goes_on: bool = False) -> None:
    """
    Have these signals, which have handlers of Python's, reach them once if they come twice within :data:`SAME_SIGNAL_S`. The agent then
    knows who has sent them. ``passed_on``: further signals, each of which counts. Call it again after their handlers have changed: with
    ``goes_on`` a repetition of a signal that came before is still one.
    """

def why_stacks_are_unknown() -> str | None:
    """
    Return why an agent here cannot read its workers' stacks. None: it can.
    """

def why_users_are_unknown() -> tuple[str, str] | None:
    """
    Return why a worker store of this process could not know which users connect to it from this machine, and what to do. None: it
    could.

    Raises ``OSError`` if no descriptor is free.
    """

def without_signals(start: Any) -> None:
    """
    Make this call, which starts a thread, while the calling thread blocks all signals. So the new thread takes none.
    """

def __getattr__(name: str) -> Incomplete: ...
