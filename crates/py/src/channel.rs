//! `WorkerChannel`: a worker's end of the channel to its agent.
//!
//! No call here makes the runtime: a worker may fork. A call in a forked child raises before it takes any lock.

use std::collections::BTreeMap;

use elastic_rs::channel::checks::Verdict;
use elastic_rs::channel::message;
use elastic_rs::channel::worker::{Channel, ChannelError};
use pyo3::exceptions::{PyConnectionError, PyOSError, PyRuntimeError};
use pyo3::prelude::*;

use crate::conf::seconds;
use crate::runtime::{block_without_runtime, detach};

/// A worker's connection with its agent: the agent's messages, and which sockets are shut down when a peer fails.
///
/// Every method raises ``ConnectionError`` once the connection has ended and nothing else is known, and ``RuntimeError`` in a process
/// that was forked from the worker.
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct WorkerChannel(Channel);

#[pymethods]
impl WorkerChannel {
    /// Connect to the agent whose socket has this ``address``, within ``limit_s`` seconds.
    ///
    /// Raises ``ConnectionError`` if nobody listens there, and ``RuntimeError`` if another process of the same worker trains. An agent
    /// that refuses this process says so in the next call.
    #[staticmethod]
    fn connect(py: Python<'_>, address: &str, limit_s: f64) -> PyResult<Self> {
        let limit = seconds("limit_s", limit_s)?;
        detach(py, || Channel::connect(address, limit)).map(Self).map_err(|error| raise(&error))
    }

    /// Say that this worker has no process group yet, and lets the library make it. So it can be started before its node has joined.
    fn no_process_group(&self) -> PyResult<()> {
        self.0.no_process_group().map_err(|error| raise(&error))
    }

    /// Say that this worker's program does not live through a change of the world: it saves at the check, parks, and is started anew.
    fn saves(&self) -> PyResult<()> {
        self.0.saves().map_err(|error| raise(&error))
    }

    /// The world of this worker is being formed. Unless this or :meth:`formed` is called again within ``limit_s`` seconds, the agent is
    /// notified that it is not, and every member leaves it.
    fn forms_within(&self, limit_s: f64) -> PyResult<()> {
        let limit = seconds("limit_s", limit_s)?;
        self.0.forms_within(limit).map_err(|error| raise(&error))
    }

    /// The world is formed, or this worker leaves it.
    fn formed(&self) -> PyResult<()> {
        self.0.formed().map_err(|error| raise(&error))
    }

    /// This worker has the job's state: it was synchronised with the other members of its world.
    fn synchronised(&self) -> PyResult<()> {
        self.0.synchronised().map_err(|error| raise(&error))
    }

    /// Report to the agent now that the world cannot be formed. Every member leaves it.
    fn stuck(&self) -> PyResult<()> {
        self.0.stuck().map_err(|error| raise(&error))
    }

    /// Report that the worker's program has raised one of the library's exceptions itself: the name of its type, and its message. This
    /// worker leaves its world and lives, and every other member leaves it as after a failure.
    fn raised(&self, error: &str, message: &str) -> PyResult<()> {
        self.0.raised(error, message).map_err(|error| raise(&error))
    }

    /// Report that the worker's program cannot take the state that the others have. If all workers of its node are new, the node leaves
    /// the job, which costs the others no restart.
    fn unfit(&self, message: &str) -> PyResult<()> {
        self.0.unfit(message).map_err(|error| raise(&error))
    }

    /// Count one check. 0: nothing happened. 1: the world changes at this check. 2: a peer failed.
    ///
    /// Waits only while it is not known at which check the world changes.
    fn check(&self, py: Python<'_>) -> PyResult<u8> {
        let Some(number) = self.0.check().map_err(|error| raise(&error))? else { return Ok(0) };
        Ok(match wait(py, self.0.verdict(number))? {
            Verdict::GoOn => 0,
            Verdict::WorldChanges => 1,
            Verdict::PeerFailed => 2,
        })
    }

    /// The check at which the world changes, or None if that is not known, and how many checks this worker has made in this world.
    fn raises_at(&self) -> PyResult<(Option<u64>, u64)> {
        self.0.raises_at().map_err(|error| raise(&error))
    }

    /// Wait until a peer's failure is known. False if none is within ``limit_s`` seconds.
    fn failed_within(&self, py: Python<'_>, limit_s: f64) -> PyResult<bool> {
        let limit = seconds("limit_s", limit_s)?;
        let failed = self.0.failed().map_err(|error| raise(&error))?;
        let known = block_without_runtime(py, failed, Some(limit))?;
        known.transpose().map(|known| known.is_some()).map_err(|error| raise(&error))
    }

    /// Why a peer failed, or the world changes, or the last world has ended, in words.
    #[getter]
    fn reason(&self) -> PyResult<String> {
        self.0.reason_and_flags().map(|(reason, _)| reason).map_err(|error| raise(&error))
    }

    /// Global rank of the worker whose failure is the last news. None: no worker has failed, or none is to blame.
    #[getter]
    fn failed_rank(&self) -> PyResult<Option<u32>> {
        self.0.failed_rank().map_err(|error| raise(&error))
    }

    /// What the last change or world changes: 0 nothing, 1 removed, 2 added, 3 both. 0 after a failure.
    #[getter]
    fn flags(&self) -> PyResult<u8> {
        self.0.reason_and_flags().map(|(_, flags)| flags).map_err(|error| raise(&error))
    }

    /// Say that this worker has left its process group, and wait for its next world. Its sockets are released.
    ///
    /// ``commit`` is the number of the commit that its state has, or None if that was never synchronised or committed.
    fn park(&self, py: Python<'_>, commit: Option<u64>) -> PyResult<World> {
        let world = detach(py, || self.0.park(commit)).map_err(|error| raise(&error))?;
        Ok(World::from(*wait(py, world)?))
    }

    /// The latest world. Waits for the first one: call this after :meth:`connect`.
    fn world(&self, py: Python<'_>) -> PyResult<World> {
        let world = self.0.world().map_err(|error| raise(&error))?;
        Ok(World::from(*wait(py, world)?))
    }

    /// Wait for the next change: its number, and its flags.
    fn wait_change(&self, py: Python<'_>) -> PyResult<(u64, u8)> {
        let change = self.0.change().map_err(|error| raise(&error))?;
        wait(py, change)
    }

    /// Remember the TCP sockets that are connected now: a process group is about to be made. Returns a number for :meth:`guard_sockets`.
    ///
    /// If a peer fails meanwhile, all TCP sockets that are connected later are shut down, so that nothing waits for that peer.
    fn mark_sockets(&self, py: Python<'_>) -> PyResult<u64> {
        detach(py, || self.0.mark_sockets()).map_err(|error| raise(&error))
    }

    /// The process group of this ``mark`` was made, or could not be made: shut its sockets down when a peer fails, or at once if one has.
    /// Returns their number.
    ///
    /// Its sockets are those connected since the mark that are in an epoll set with a listening socket. New connections to the store
    /// at ``store_port`` are shut down too.
    #[pyo3(signature = (mark, store_port = None))]
    fn guard_sockets(&self, py: Python<'_>, mark: u64, store_port: Option<u16>) -> PyResult<usize> {
        detach(py, || self.0.guard_sockets(mark, store_port)).map_err(|error| raise(&error))
    }

    /// The same for process groups that exist already: the sockets in epoll sets with a listening socket, and all connections to the
    /// store. Returns the number of the groups' sockets.
    #[pyo3(signature = (store_port = None))]
    fn guard_loops(&self, py: Python<'_>, store_port: Option<u16>) -> PyResult<usize> {
        detach(py, || self.0.guard_loops(store_port)).map_err(|error| raise(&error))
    }

    /// A peer has failed, and the process groups are about to be destroyed: wait until nothing passes on their sockets, for a second at
    /// most. Another worker that receives a message from this one would not notice its end.
    fn until_quiet(&self, py: Python<'_>) -> PyResult<()> {
        detach(py, || self.0.until_quiet()).map_err(|error| raise(&error))
    }

    /// The worker leaves its world: all process groups are destroyed.
    fn release_sockets(&self, py: Python<'_>) -> PyResult<()> {
        detach(py, || self.0.release_sockets()).map_err(|error| raise(&error))
    }
}

/// A world, as it is sent to one worker.
#[pyclass(frozen, module = "elastic_rs._elastic_rs", get_all)]
pub struct World {
    /// Variables of the worker's environment, such as ``RANK``.
    variables: BTreeMap<String, String>,
    /// Number of the round.
    generation: u64,
    /// Global rank of the worker whose state the others take.
    source: u32,
    /// Whether they do.
    sync: bool,
    /// Why the last world has ended, in words.
    reason: String,
}

impl From<message::World> for World {
    fn from(world: message::World) -> Self {
        let message::World { variables, generation, source, sync, reason, equal: _ } = world;
        Self { variables: variables.into_iter().collect(), generation: generation.round.0, source, sync, reason }
    }
}

/// Wait without a limit.
fn wait<T: Send>(py: Python<'_>, future: impl Future<Output = Result<T, ChannelError>> + Send) -> PyResult<T> {
    match block_without_runtime(py, future, None)? {
        Some(done) => done.map_err(|error| raise(&error)),
        None => unreachable!("there is no limit"),
    }
}

fn raise(error: &ChannelError) -> PyErr {
    let text = error.to_string();
    match error {
        ChannelError::Connect { .. } | ChannelError::Ended(_) => PyConnectionError::new_err(text),
        ChannelError::Forked { .. } | ChannelError::Owned { .. } => PyRuntimeError::new_err(text),
        _ => PyOSError::new_err(text),
    }
}
