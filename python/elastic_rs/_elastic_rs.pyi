"""
The compiled half of the package ``elastic_rs``.
"""

from _typeshed import Incomplete, SupportsGetItem
from os import PathLike
from pathlib import Path
from typing import Any, Final, SupportsFloat, SupportsIndex, final

LOCAL_WORLD_SIZE_LIMIT: Final[int]
"""
Most workers that a node may have.
"""

PROTOCOL_VERSION: Final[int]
"""
Of the rendezvous protocol: both ends of a session must have the same.
"""

VERSION: Final[str]
"""
Version of the compiled half.
"""

@final
class Agent:
    """
    One node's agent: runs the workers of each round. It decides; the caller carries out its steps and answers.
    """
    def __new__(cls, /, session: Session | None, options: AgentOptions) -> Agent:
        """
        ``session`` tells of other nodes; without one the caller does.
        """
    def adopt(self, /, pids: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex]], *, first_rank: SupportsIndex, error_files: SupportsGetItem[int, tuple[SupportsIndex, str | PathLike[str]]]) -> None:
        """
        Answers ``start``: watch these children of the calling process, which has started them.
        """
    def all_done(self, /) -> None:
        """
        Answers ``barrier``: the other nodes have finished, or are not waited for any longer.
        """
    def close(self, /) -> None:
        """
        Kill what is left of the workers: the caller gives up. It need not call this after ``end``.
        """
    def environment(self, /, placement: Placement, local_rank: SupportsIndex) -> dict[str, str]:
        """
        The variables of one worker, to be set over those it inherits.

        Raises ``ValueError``: with ``virtual_local_rank`` there are fewer GPUs than workers.
        """
    def exits(self, /) -> list[tuple[int, int, int]]:
        """
        Of the last round's workers that have ended, in that order: local rank, process id, and return code.
        """
    def interrupted(self, /, reason: str) -> None:
        """
        Without a session: the world must re-form.
        """
    def next(self, /, *, timeout_s: SupportsFloat | SupportsIndex | None = None) -> Step | None:
        """
        Wait for the next step, at most ``timeout_s`` seconds if given: None if there was none by then.

        Python's signal handlers run meanwhile; what they raise ends the call, which may then be repeated.
        """
    def no_place(self, /, reason: str) -> None:
        """
        Answers ``join``: there is no place. The workers of an agent without one do not run.
        """
    def not_started(self, /, local_rank: SupportsIndex, reason: str, *, first_rank: SupportsIndex) -> None:
        """
        Answers ``start``: the worker cannot be started, and none runs.
        """
    def placed(self, /, placement: Placement) -> None:
        """
        Answers ``join``.
        """
    def reaped(self, /, local_rank: SupportsIndex, returncode: SupportsIndex, *, said: str) -> None:
        """
        Answers ``reap``: how the worker ended, as ``subprocess.Popen.returncode`` says it, and what it died of, if that is known.
        """
    @property
    def restarts(self, /) -> int:
        """
        How many restarts failures have cost: the job's, or this node's if it counts for itself.
        """
    def signal(self, /, signal: SupportsIndex) -> None:
        """
        This process got a signal and is to end. A second one kills what is left of the workers.
        """
    def start(self, /, commands: SupportsGetItem[int, WorkerCommand], *, first_rank: SupportsIndex, error_files: SupportsGetItem[int, tuple[SupportsIndex, str | PathLike[str]]], stdout_filter: tuple[str | PathLike[str], SupportsGetItem[int, str]] | None = None, stderr_filter: tuple[str | PathLike[str], SupportsGetItem[int, str]] | None = None, stdout_fd: SupportsIndex = 1, stderr_fd: SupportsIndex = 2, template: Template | None = None) -> dict[int, int]:
        """
        Answers ``start``: start these programs. Returns their process ids by local rank. They are empty if one could not be
        started, which is a failure of that worker like any other, and if the round ended before the start was complete.

        ``error_files`` are where workers may record their exceptions. A filter is a path, which gets the lines of teed streams
        that contain one of the texts. ``stdout_fd`` and ``stderr_fd`` are where teed lines are shown; they stay the caller's.
        Workers are forked from the ``template``, if there is one and that can be.
        """

@final
class AgentOptions:
    """
    What an agent runs, whoever its front end is. Times are in seconds.
    """
    def __new__(self, /, name: str, run_id: str, role: str, local_world_size: SupportsIndex, max_restarts: SupportsIndex, restarts_left: SupportsIndex | None, grace_s: SupportsFloat | SupportsIndex, exit_barrier_timeout_s: SupportsFloat | SupportsIndex | None, use_agent_store: bool, virtual_local_rank: bool, uninterruptible_sleep_s: SupportsFloat | SupportsIndex) -> AgentOptions: ...
    @property
    def exit_barrier_timeout_s(self, /) -> float | None:
        """
        How long to wait for the other nodes' workers; None: for as long as they run.
        """
    @property
    def grace_s(self, /) -> float:
        """
        How long workers may take to end once they were asked to.
        """
    @property
    def local_world_size(self, /) -> int:
        """
        How many workers this node has.
        """
    @property
    def max_restarts(self, /) -> int:
        """
        How many failures are survived, as workers are told it.
        """
    @property
    def name(self, /) -> str:
        """
        How others call this node.
        """
    @property
    def restarts_left(self, /) -> int | None:
        """
        With a number this node counts its own restarts, as PyTorch's agent does; None: the coordinator counts the job's.
        """
    @property
    def role(self, /) -> str:
        """
        The workers' role.
        """
    @property
    def run_id(self, /) -> str:
        """
        The job.
        """
    @property
    def uninterruptible_sleep_s(self, /) -> float:
        """
        How long a worker may sleep uninterruptibly; zero: nobody looks for it.
        """
    @property
    def use_agent_store(self, /) -> bool:
        """
        Workers share the store at ``MASTER_ADDR:MASTER_PORT``, which then already listens.
        """
    @property
    def virtual_local_rank(self, /) -> bool:
        """
        Each worker sees its own GPU alone.
        """

@final
class AsyncStoreClient:
    """
    The core's client of a TCP store, for asyncio. Every operation returns an awaitable of the running event loop.

    Operations of one client are carried out one after the other, in the order they are called. Cancelling one that waits
    gives the wait up, and the client stays usable. Times are seconds; a negative time limit is none.
    """
    def add(self, /, key: bytes | bytearray | str, amount: SupportsIndex) -> Any:
        """
        Add to the number stored under a key; the sum.
        """
    def append(self, /, key: bytes | bytearray | str, value: bytes | bytearray | str) -> Any:
        """
        Append to a key's value.
        """
    def barrier(self, /, key: bytes | bytearray | str, world_size: SupportsIndex, timeout_s: SupportsFloat | SupportsIndex | None = None) -> Any:
        """
        Wait until ``world_size`` callers have come to this key, at most ``timeout_s`` or the client's default.
        """
    def check(self, /, keys: SupportsGetItem[int, bytes | bytearray | str]) -> Any:
        """
        Whether all keys exist.
        """
    def clone(self, /) -> Any:
        """
        Connect to the same store once more.
        """
    def close(self, /) -> None:
        """
        Close the connection. Operations under way are finished first; later ones raise ``StoreNetworkError``.
        """
    @property
    def closed(self, /) -> bool:
        """
        Whether :meth:`close` was called.
        """
    def compare_set(self, /, key: bytes | bytearray | str, expected: bytes | bytearray | str, desired: bytes | bytearray | str) -> Any:
        """
        Replace the value if it is what was expected; what the store then answers.
        """
    @staticmethod
    def connect(host: str, port: SupportsIndex, *, timeout_s: SupportsFloat | SupportsIndex) -> Any:
        """
        Connect to the store at ``host:port``, which need not be there yet.
        """
    def delete_key(self, /, key: bytes | bytearray | str) -> Any:
        """
        Remove a key; whether it was there.
        """
    def get(self, /, key: bytes | bytearray | str) -> Any:
        """
        A key's value, waiting for it to appear.
        """
    def list_keys(self, /) -> Any:
        """
        All keys, in no particular order, as ``bytes``.
        """
    def multi_get(self, /, keys: SupportsGetItem[int, bytes | bytearray | str]) -> Any:
        """
        Several values, waiting for all keys to appear.
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
        Take the first item of a queue; if ``block``, wait for one.
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
class CasSession:
    """
    A node's place at a rendezvous whose state a backend holds. One thread of Python's performs what :meth:`next_step` says.
    """
    def __new__(cls, /, options: NodeOptions) -> CasSession:
        """
        Make a session for one node, which others find at ``local_addr`` of the options.

        Raises ``ValueError`` for options that make no sense.
        """
    def close(self, /, *, by: str, cause: str | None = None, timeout_s: SupportsFloat | SupportsIndex) -> None:
        """
        End the job for everybody; blocks until that is written. With a ``cause``, it failed, and all others stop.
        """
    def fresh_view(self, /, *, age_s: SupportsFloat | SupportsIndex) -> View:
        """
        How things stand, as read from the backend no longer than ``age_s`` ago. Raises as :meth:`join` does.
        """
    def join(self, /, *, store_port: SupportsIndex) -> Placement:
        """
        Take part in the next round; blocks until it has completed.

        Raises as :meth:`Session.join` does, and ``RendezvousStateError`` for a state that is not ours.
        """
    def leave(self, /, reason: str, *, timeout_s: SupportsFloat | SupportsIndex = 1.0) -> bool:
        """
        Say goodbye, waiting at most ``timeout_s`` for it to be written. Whether it was.
        """
    def next_step(self, /) -> bytes | None:
        """
        Wait for what the backend has to do: empty bytes, read; bytes, write them if the state is still what was reported last;
        None, stop. How it ended is reported by one of the ``on_`` methods.
        """
    def on_broken(self, /, error: str, state: bool) -> None:
        """
        The backend does not work, and trying again would not help. ``state``: what it holds is at fault.
        """
    def on_conflict(self, /, state: bytes | None) -> None:
        """
        The state was not written: the backend holds another, this, or none.
        """
    def on_failed(self, /, error: str) -> None:
        """
        The backend could not be reached.
        """
    def on_state(self, /, state: bytes | None) -> None:
        """
        The backend holds this state, or none.
        """
    def on_written(self, /) -> None:
        """
        The state was written.
        """
    def progress(self, /) -> str | None:
        """
        For a node that waits: what for.
        """
    def view(self, /) -> View:
        """
        How things stand, from memory.
        """

@final
class Egg:
    """
    In the template: a worker that is to be forked.
    """
    @property
    def argv(self, /) -> list[str]:
        """
        The worker's program and arguments.
        """
    def become_guard(self, /, nest: Nest) -> None:
        """
        In a child of the template: become the worker's guard. Fork the worker next.
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
        In the worker, once its variables are set: show them and its command to ``ps`` and others who look in ``/proc``.
        """
    def watch(self, /, worker: SupportsIndex) -> None:
        """
        In the guard: watch over its child ``worker`` (-1: there is none) until nothing of it is left. Does not return.
        """

@final
class Failure:
    """
    A worker's failure: what every node names as the cause when the job restarts or ends.
    """
    @property
    def exit(self, /) -> str:
        """
        What ended it, such as ``exit code 3`` or ``SIGKILL``.
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
        The first lines of what it said, if it said anything.
        """
    @property
    def node(self, /) -> str:
        """
        The node it happened on, as others know it.
        """
    @property
    def pid(self, /) -> int:
        """
        Its process id there.
        """
    @property
    def returncode(self, /) -> int:
        """
        The same as a number, as ``subprocess.Popen.returncode`` says it; 1 for what has none.
        """
    @property
    def role(self, /) -> str:
        """
        The worker's role.
        """

@final
class Host:
    """
    The store and the rendezvous coordinator, on one port and on one thread that never waits for the interpreter.
    """
    @property
    def addresses(self, /) -> list[str]:
        """
        The addresses it listens on, each with its port.
        """
    @staticmethod
    def claim(host: str, port: SupportsIndex, *, is_host: bool | None = None) -> "Host | str":
        """
        Become the host of ``host:port``, or learn why another process is: a ``str`` says so.

        ``is_host`` is the user's word; None lets whoever can bind the address be the host.

        Raises ``OSError`` when ``is_host`` is True and the port cannot be listened on.
        """
    @staticmethod
    def default_limits() -> "dict[str, int | float | None]":
        """
        The limits that :meth:`listen` knows, with their defaults; None is no limit.
        """
    def drain(self, /, *, timeout_s: SupportsFloat | SupportsIndex) -> bool:
        """
        Wait until every node has said goodbye, at most ``timeout_s``, then stop. True if all had.
        """
    @staticmethod
    def listen(host: str | None, port: SupportsIndex, *, key_bytes: SupportsIndex | None = None, value_bytes: SupportsIndex | None = None, list_len: SupportsIndex | None = None, message_bytes: SupportsIndex | None = None, keys: SupportsIndex | None = None, stored_bytes: SupportsIndex | None = None, connections: SupportsIndex | None = None, reply_buffer_bytes: SupportsIndex | None = None, hello_timeout_s: SupportsFloat | SupportsIndex | None = None, flush_timeout_s: SupportsFloat | SupportsIndex | None = None, keepalive_idle_s: SupportsFloat | SupportsIndex | None = None, keepalive_interval_s: SupportsFloat | SupportsIndex | None = None, log_period_s: SupportsFloat | SupportsIndex | None = None) -> Host:
        """
        Serve on every address of ``host``, or on all of this machine if it is None. Port 0 lets the system choose.

        A limit that is not given has the value of :meth:`default_limits`.

        Raises ``OSError`` when ``host`` means nothing, or the port cannot be listened on; the text names who has it.
        Raises ``ValueError`` for times that are none: those of keep-alive are from 1 to 32767 s.
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
    def wait_for_users(self, /, *, timeout_s: SupportsFloat | SupportsIndex) -> bool:
        """
        Wait until nobody is connected, node or store client, at most ``timeout_s``. True if all have gone.

        Does not stop: meanwhile everything is served, newcomers included.
        """

@final
class LaunchOptions:
    """
    What a node of ``elastic-run`` runs. Times are in seconds.
    """
    def __new__(self, /, entrypoint: str, command: SupportsGetItem[int, str], role: str, max_restarts: SupportsIndex, grace_s: SupportsFloat | SupportsIndex, uninterruptible_sleep_s: SupportsFloat | SupportsIndex, virtual_local_rank: bool, signals: SupportsGetItem[int, SupportsIndex], logs: LogOptions, warm: tuple[SupportsGetItem[int, str], SupportsIndex, str] | None, local_world_size: SupportsIndex) -> LaunchOptions: ...
    @property
    def command(self, /) -> list[str]:
        """
        The program and its arguments, in which ``${local_rank}`` is replaced.
        """
    @property
    def entrypoint(self, /) -> str:
        """
        What the final report calls the workers.
        """
    @property
    def grace_s(self, /) -> float:
        """
        How long workers may take to end once they were asked to.
        """
    @property
    def local_world_size(self, /) -> int:
        """
        How many workers this node has.
        """
    @property
    def logs(self, /) -> LogOptions:
        """
        Of workers' output.
        """
    @property
    def max_restarts(self, /) -> int:
        """
        How many failures are survived.
        """
    @property
    def role(self, /) -> str:
        """
        The workers' role.
        """
    @property
    def signals(self, /) -> list[int]:
        """
        Signals that end the job on this node; a second one kills.
        """
    @property
    def uninterruptible_sleep_s(self, /) -> float:
        """
        How long a worker may sleep uninterruptibly; zero: nobody looks for it.
        """
    @property
    def virtual_local_rank(self, /) -> bool:
        """
        Each worker sees its own GPU alone.
        """
    @property
    def warm(self, /) -> tuple[list[str], int, str] | None:
        """
        What :class:`Template` has as ``begin``, ``fixed`` and ``what``, if workers are to be forked from one.
        """

@final
class Launched:
    """
    How :func:`launch` ended.
    """
    @property
    def error(self, /) -> str | None:
        """
        Of ``no_place``: which exception of ``elastic_rs.errors`` says so elsewhere.
        """
    @property
    def error_files(self, /) -> dict[int, str]:
        """
        Where the last round's workers may have recorded exceptions, by local rank.
        """
    @property
    def exits(self, /) -> list[tuple[int, int, int]]:
        """
        The last round's workers that have ended, in that order: local rank, process id, and return code.
        """
    @property
    def failure(self, /) -> Failure | None:
        """
        Of ``failed``: the first failure, on whatever node; None if the job was closed without naming one.
        """
    @property
    def first_rank(self, /) -> int:
        """
        Global rank of the last round's first worker.
        """
    @property
    def outcome(self, /) -> str:
        """
        ``succeeded``, ``not_needed`` (a spare), ``failed``, ``no_place`` or ``signal``.
        """
    @property
    def reason(self, /) -> str | None:
        """
        Of ``failed`` and ``no_place``: why, in words.
        """
    @property
    def signal(self, /) -> int | None:
        """
        Of ``signal``: its number.
        """

@final
class LogOptions:
    """
    Where the output of ``elastic-run``'s workers goes.
    """
    def __new__(self, /, redirects: Streams, tee: Streams, shown_ranks: SupportsGetItem[int, SupportsIndex] | None, log_dir: str | PathLike[str] | None, log_files: bool, stdout_filters: SupportsGetItem[int, str], stderr_filters: SupportsGetItem[int, str], prefix: str | None) -> LogOptions: ...
    @property
    def log_dir(self, /) -> Path | None:
        """
        None for a temporary folder.
        """
    @property
    def log_files(self, /) -> bool:
        """
        Whether there are files at all.
        """
    @property
    def prefix(self, /) -> str | None:
        """
        Of the prefix of teed lines; None for torchrun's.
        """
    @property
    def redirects(self, /) -> Streams:
        """
        To files.
        """
    @property
    def shown_ranks(self, /) -> list[int] | None:
        """
        Local ranks that the console shows; None: all.
        """
    @property
    def stderr_filters(self, /) -> list[str]:
        """
        The same of standard error.
        """
    @property
    def stdout_filters(self, /) -> list[str]:
        """
        Texts of lines that are kept apart.
        """
    @property
    def tee(self, /) -> Streams:
        """
        To files and to the console.
        """

@final
class Nest:
    """
    In the template: where workers hatch.
    """
    def __new__(cls, /, fd: SupportsIndex) -> Nest:
        """
        Take the template's end of the socket that it shares with the agent: the descriptor ``fd``.
        """
    def forked(self, /, egg: Egg, guard: SupportsIndex) -> None:
        """
        In the template, once it has forked the guard of the worker that was asked for.
        """
    def next_egg(self, /) -> Egg | None:
        """
        Wait until a worker is asked for; None once the agent has let go.
        """
    def ready(self, /) -> None:
        """
        Tell the agent that everything is loaded.
        """
    def refuse(self, /, reason: str) -> None:
        """
        Tell the agent why no worker can come from here. End the process then.
        """

@final
class NodeOptions:
    """
    What a node brings to a rendezvous.
    """
    def __new__(self, /, run_id: str, name: str, local_addr: str | None, nodes: tuple[SupportsIndex, SupportsIndex], config: RendezvousConfig, max_restarts: SupportsIndex | None, ranks_as_asked: bool, hosts: bool) -> NodeOptions: ...
    @property
    def config(self, /) -> RendezvousConfig:
        """
        What ``--rdzv-conf`` says.
        """
    @property
    def hosts(self, /) -> bool:
        """
        This process hosts the coordinator, which goes when this node does.
        """
    @property
    def local_addr(self, /) -> str | None:
        """
        The address others use, if it is not the one that the coordinator sees.
        """
    @property
    def max_restarts(self, /) -> int | None:
        """
        The job's budget; None if nodes count for themselves.
        """
    @property
    def name(self, /) -> str:
        """
        How others call this node.
        """
    @property
    def nodes(self, /) -> tuple[int, int]:
        """
        Fewest and most nodes of the job.
        """
    @property
    def ranks_as_asked(self, /) -> bool:
        """
        Ranks are those that ``config`` asks for, in every round.
        """
    @property
    def run_id(self, /) -> str:
        """
        The job.
        """

@final
class Placement:
    """
    A node's place in a completed round.
    """
    def __new__(cls, /, *, round: SupportsIndex, rank: SupportsIndex, world_size: SupportsIndex, master_addr: str, master_port: SupportsIndex, first_rank: SupportsIndex, first_role_rank: SupportsIndex, worker_count: SupportsIndex, role_worker_count: SupportsIndex) -> Placement:
        """
        A place that somebody else has assigned: a rendezvous other than ours.
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
        Why the round closed when it did, and who is in it.
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
        Global and role rank of this node's first worker, how many workers there are, and how many of its role; None if a
        node has not said how many it has.
        """
    @property
    def world_size(self, /) -> int:
        """
        Number of nodes.
        """

@final
class RendezvousConfig:
    """
    What ``--rdzv-conf`` says. Times are in seconds.

    The constructor takes values by their keys and does not check ranges: a session does. Other keys have their defaults.
    """
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __new__(cls, /, **values: "float | bool | str | None") -> RendezvousConfig: ...
    def __repr__(self, /) -> str: ...
    @property
    def close_timeout(self, /) -> float:
        """
        In seconds.
        """
    @property
    def drain_timeout(self, /) -> float:
        """
        In seconds.
        """
    @property
    def exit_barrier_timeout(self, /) -> float | None:
        """
        In seconds.
        """
    @staticmethod
    def from_mapping(given: "dict[str, object]") -> RendezvousConfig:
        """
        Check what the user gave, as text or numbers. A key that is None counts as not given.

        Raises ``ValueError`` if a key is unknown (the nearest known one is named) or a value is not allowed.
        """
    @property
    def is_host(self, /) -> bool | None:
        """
        True: this process must host the coordinator. False: it never does. None: it does if it can.
        """
    @property
    def job_counts(self, /) -> bool:
        """
        Whether restarts are counted for the job: ``restart_budget`` is ``job``.
        """
    @property
    def join_timeout(self, /) -> float:
        """
        In seconds.
        """
    @property
    def node_rank(self, /) -> int | None:
        """
        The rank that this node asks for.
        """
    @property
    def read_timeout(self, /) -> float:
        """
        In seconds.
        """
    def replace(self, /, **values: "float | bool | str | None") -> RendezvousConfig:
        """
        Return a copy with other values. Ranges are not checked.
        """
    def values(self, /) -> "dict[str, float | int | bool | str | None]":
        """
        Return all values by their keys. None: not given, and without a default.
        """
    @property
    def wants_agent(self, /) -> bool:
        """
        Whether our agent runs the workers: ``agent`` is ``rust``.
        """

@final
class Session:
    """
    A node's session with the coordinator; connects in the background.
    """
    def __new__(cls, /, host: str, port: SupportsIndex, options: NodeOptions) -> Session:
        """
        Start a session for one node with the coordinator at ``host:port``.

        Raises ``ValueError`` for options that no coordinator accepts.
        """
    def close(self, /, *, by: str, cause: str | None = None) -> None:
        """
        End the job for everybody. With a ``cause``, it failed, and all others stop.
        """
    def join(self, /, *, workers: tuple[str, SupportsIndex] | None = None, host: Host | None = None) -> tuple[Placement, StoreServer]:
        """
        Take part in the next round; blocks until it has completed. Gives the place, and an empty store that listens for the workers
        of this round where they look for it, if this node has rank 0. ``host`` is the coordinator, if this process serves it.

        Raises ``RendezvousTimeoutError``, ``RendezvousClosedError``, ``RendezvousGracefulExitError`` (a spare that was not
        needed) or ``RendezvousConnectionError`` of ``elastic_rs.errors``.
        """
    def leave(self, /, reason: str, *, timeout_s: SupportsFloat | SupportsIndex = 1.0, signal: SupportsIndex | None = None) -> None:
        """
        Say goodbye and end the session, waiting at most ``timeout_s`` for what is still to be sent. Later calls do nothing.

        ``signal`` is what ended this process, if one did. SIGINT, of the process that hosts the coordinator, ends the job.
        """
    def view(self, /) -> View:
        """
        How things stand. Raises as :meth:`join` does when this node can no longer take part.
        """
    @property
    def was_welcomed(self, /) -> bool:
        """
        Whether the coordinator has ever welcomed this node.
        """

@final
class Step:
    """
    What the front end is to do next.
    """
    @property
    def error(self, /) -> Any | None:
        """
        Of the outcome ``no_place``: the exception that says why.
        """
    @property
    def failure(self, /) -> Failure | None:
        """
        Of the outcome ``failed``: the first failure, on whatever node; None if the job was closed without naming one.
        """
    @property
    def kind(self, /) -> str:
        """
        ``join``, ``start``, ``reap``, ``barrier`` or ``end``.
        """
    @property
    def local_rank(self, /) -> int | None:
        """
        Of ``reap``: which worker has ended.
        """
    @property
    def outcome(self, /) -> str | None:
        """
        Of ``end``: ``succeeded``, ``not_needed`` (a spare), ``failed``, ``no_place`` or ``signal``.
        """
    @property
    def placement(self, /) -> Placement | None:
        """
        Of ``start``: the place for which workers are to be started.
        """
    @property
    def reason(self, /) -> str | None:
        """
        Of the outcome ``failed``: why, in words.
        """

@final
class StoreClient:
    """
    The core's own client of a TCP store, without torch. Keys are ``str`` (sent as UTF-8) or ``bytes``; times are seconds.
    """
    def __new__(cls, /, host: str, port: SupportsIndex, *, timeout_s: SupportsFloat | SupportsIndex = 300.0) -> StoreClient:
        """
        Connect to the store at ``host:port``, which need not be there yet.

        ``timeout_s`` bounds connecting, and each operation that waits for keys.
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
        Wait until ``world_size`` callers have come to this key, at most ``timeout_s`` or the client's default.
        """
    def check(self, /, keys: SupportsGetItem[int, bytes | bytearray | str]) -> bool:
        """
        Whether all keys exist.
        """
    def clone(self, /) -> StoreClient:
        """
        Connect to the same store once more.
        """
    def compare_set(self, /, key: bytes | bytearray | str, expected: bytes | bytearray | str, desired: bytes | bytearray | str) -> bytes:
        """
        Replace the value if it is what was expected; return what the store then answers.
        """
    def delete_key(self, /, key: bytes | bytearray | str) -> bool:
        """
        Remove a key; whether it was there.
        """
    def get(self, /, key: bytes | bytearray | str) -> bytes:
        """
        Return a key's value, waiting for it to appear.
        """
    def list_keys(self, /) -> list[bytes]:
        """
        All keys, in no particular order. They are ``bytes``, since a key need not be UTF-8.
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
        Take the first item of a queue; if ``block``, wait for one.

        Raises ``StoreQueueEmptyError`` if there is none, also after blocking, if another client was faster.
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
class StoreServer:
    """
    A TCP store's server, on a thread of its own that never waits for the interpreter.

    Ends when it is told to, or when this object is collected, unless :meth:`stop_when_closed` ties it to a connection.
    """
    @staticmethod
    def adopt(fd: SupportsIndex, port: SupportsIndex) -> StoreServer:
        """
        Take over the bound socket ``fd``, whose port must be ``port`` unless that is 0. The server closes it at its end.

        Raises ``OSError`` if it is no TCP socket, ``StoreError`` if its port is another one; it is the caller's still then.
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
        Promise a further owner: until :meth:`stop_when_closed` names it, or :meth:`give_up_owner` takes the promise back,
        the server does not end because its other owners have gone. False if the server has ended.
        """
    def give_up_owner(self, /) -> None:
        """
        Take back the promise of :meth:`expect_owner`. Without owners, the server ends.
        """
    @staticmethod
    def listen(address: str | None, port: SupportsIndex) -> StoreServer:
        """
        Listen on ``address``, or on all if it is None. Port 0 lets the system choose.

        Raises ``OSError``; if the port is taken, its text names who has it where the system tells.
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
        Wait until ``world_size`` users have joined. Returns how many have: fewer when ``timeout_s`` ended first.
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
        Read what torchrun takes.

        Raises ``ValueError``, whose text goes behind the flag's name.
        """

@final
class Template:
    """
    A process that has loaded what workers load, and of which they are forked.
    """
    def __new__(cls, /, command: SupportsGetItem[int, str], *, begin: SupportsGetItem[int, str], fixed: SupportsIndex, env: dict[str, str], what: str) -> Template:
        """
        Start it, in the background. ``command`` is the workers' program and arguments, of which ``fixed`` are the same for every
        worker; ``begin`` is put before them. ``env`` is what workers inherit, and ``what`` is what it loads, for the log.

        Raises ``ValueError`` for a command without a program.
        """
    def end(self, /) -> None:
        """
        End it and what is left of workers that came from it, and wait until nothing of that is left.
        """

@final
class View:
    """
    How things stand for a node between rounds.
    """
    @property
    def addr(self, /) -> str | None:
        """
        The address under which others look for this node, once known.
        """
    @property
    def cause(self, /) -> Failure | None:
        """
        The worker's failure because of which the world must re-form or the job has ended, if one was.
        """
    @property
    def closed(self, /) -> bool:
        """
        Whether the rendezvous was closed.
        """
    @property
    def failure(self, /) -> str | None:
        """
        If it was closed after a failure: what failed, in words.
        """
    @property
    def fenced(self, /) -> str | None:
        """
        Why this node stops its workers by itself, if it does: it was cut off from the coordinator for its whole lease.
        """
    @property
    def reason(self, /) -> str:
        """
        Why, in words.
        """
    @property
    def waiting(self, /) -> int:
        """
        Above zero when the world must re-form.
        """

@final
class WorkerCommand:
    """
    A program to start as a worker.
    """
    def __new__(cls, /, local_rank: SupportsIndex, command: SupportsGetItem[int, str], env: dict[str, str], *, stdout: str | PathLike[str] = ..., stderr: str | PathLike[str] = ..., tee_stdout: bool = False, tee_stderr: bool = False, prefix: str | None = None) -> WorkerCommand:
        """
        ``command`` is the program and its arguments, ``env`` the whole environment.

        ``stdout`` and ``stderr`` are paths of files, or empty for this process's own stream. With ``tee_stdout`` or
        ``tee_stderr`` what goes to the file is shown here too, each line behind ``prefix``.
        """

def _shutdown() -> None:
    """
    Stop everything that runs in the background. Registered with ``atexit``.
    """

def follow_parent() -> None:
    """
    Have the calling process killed when the thread that started it ends: for workers that are Python functions.
    """

def launch(session: Session, host: Host | None, options: LaunchOptions, *, fixed_master: tuple[str, SupportsIndex] | None, use_agent_store: bool) -> Launched:
    """
    Run the workers of one node until the job, or this node's part in it, has ended. Nothing is left of them then.

    ``session`` has not been used before; ``host`` is the coordinator, if this process serves it. Workers inherit this process's
    environment. ``fixed_master`` is the address and port that workers are told instead of the round's.

    Call it in the main thread. Python runs no signal handlers and holds no lock meanwhile.

    Raises ``ValueError`` for what is not allowed, and ``RuntimeError`` if this node alone cannot go on.
    """

def log_folder_name(run_id: str) -> str:
    """
    Return the run id as the beginning of a log folder's name: without slashes, and short enough for a file system.
    """

def rehearse(command: SupportsGetItem[int, str]) -> None:
    """
    Start a command as workers are started, and wait until nothing of it is left.

    Raises ``RuntimeError`` if that fails, with the system call that this machine refuses.
    """

def reset_log_levels() -> None:
    """
    Take over the level of Python's logger ``elastic_rs``. Call it after changing that.
    """

def validate_run_id(run_id: str) -> None:
    """
    Raises ``ValueError`` if a job cannot have this name: it is too long, or has control characters.
    """

def visible_gpus(cuda_visible_devices: str | None) -> int:
    """
    How many NVIDIA GPUs a process sees if ``CUDA_VISIBLE_DEVICES`` is so, as ``torch.cuda.device_count()`` says it.

    Raises ``RuntimeError`` if there is no driver, with what was tried.
    """

def __getattr__(name: str) -> Incomplete: ...
