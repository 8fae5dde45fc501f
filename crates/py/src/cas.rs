//! `CasSession`: a node's place at a rendezvous over a backend with `get_state` and `set_state`.

use elastic_rs::rendezvous::cell::driver::{self, Step};
use elastic_rs::rendezvous::cell::node::CasCommand;
use elastic_rs::rendezvous::node::machine::JoinError;
use elastic_rs::rendezvous::protocol::message::{Hello, NodeId, Verdict};
use elastic_rs::rendezvous::protocol::settings::Settings;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors;
use crate::rendezvous::{Placement, View, seconds};
use crate::runtime::block_on;

/// A node's place at a rendezvous whose state a backend holds. One thread of Python's performs what :meth:`next_step` says.
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct CasSession(driver::CasSession);

#[pymethods]
impl CasSession {
    /// Make a session for one node, which others find at ``local_addr``. All times in seconds.
    #[new]
    #[pyo3(signature = (*, run_id, name, local_addr, min_nodes, max_nodes, last_call_timeout_s, settle_timeout_s,
        keep_alive_interval_s, keep_alive_max_attempt))]
    #[expect(clippy::too_many_arguments, reason = "one named argument per setting, checked here once")]
    fn new(
        run_id: String,
        name: String,
        local_addr: String,
        min_nodes: u32,
        max_nodes: u32,
        last_call_timeout_s: f64,
        settle_timeout_s: f64,
        keep_alive_interval_s: f64,
        keep_alive_max_attempt: u32,
    ) -> PyResult<Self> {
        let settings = Settings {
            last_call_timeout: seconds("last_call_timeout", last_call_timeout_s)?,
            settle_timeout: seconds("settle_timeout", settle_timeout_s)?,
            keep_alive_interval: seconds("keep_alive_interval", keep_alive_interval_s)?,
            keep_alive_max_attempt,
            ..Settings::new(min_nodes, max_nodes)
        };
        let node = NodeId(rand::random());
        let local_addr = Some(local_addr);
        let hello = Hello { local_addr, ..Hello::new(run_id, node, name, settings) };
        hello.validate().map_err(PyValueError::new_err)?;
        Ok(Self(driver::CasSession::new(hello)))
    }

    /// Wait for what the backend has to do: empty bytes, read; bytes, write them if the state is still what was reported last;
    /// None, stop. How it ended is reported by one of the ``on_`` methods.
    fn next_step<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        Ok(match block_on(py, self.0.next_step())? {
            Step::Perform(CasCommand::Read) => Some(PyBytes::new(py, b"")),
            Step::Perform(CasCommand::Write(state)) => Some(PyBytes::new(py, &state)),
            Step::Stop => None,
        })
    }

    /// The backend holds this state, or none.
    fn on_state(&self, state: Option<&[u8]>) {
        self.0.tell(|node, now| node.on_state(state, now));
    }

    /// The state was written.
    fn on_written(&self) {
        self.0.tell(|node, now| node.on_written(now));
    }

    /// The state was not written: the backend holds another, this, or none.
    fn on_conflict(&self, state: Option<&[u8]>) {
        self.0.tell(|node, now| node.on_conflict(state, now));
    }

    /// The backend could not be reached.
    fn on_failed(&self, error: String) {
        self.0.tell(|node, now| node.on_failed(error, now));
    }

    /// The backend does not work, and trying again would not help. ``state``: what it holds is at fault.
    fn on_broken(&self, error: String, state: bool) {
        let error = if state { JoinError::State(error) } else { JoinError::Connection(error) };
        self.0.tell(|node, _| node.on_broken(error));
    }

    /// Take part in the next round; blocks until it has completed.
    ///
    /// Raises as :meth:`Session.join` does, and ``RendezvousStateError`` for a state that is not ours.
    #[pyo3(signature = (*, store_port, node_rank, timeout_s))]
    fn join(&self, py: Python<'_>, store_port: u16, node_rank: Option<u32>, timeout_s: f64) -> PyResult<Placement> {
        let timeout = seconds("join_timeout", timeout_s)?;
        block_on(py, self.0.join(store_port, node_rank, timeout))?
            .map(Placement)
            .map_err(|error| errors::from_join(py, &error))
    }

    /// How things stand, as read from the backend no longer than ``age_s`` ago. Raises as :meth:`join` does.
    #[pyo3(signature = (*, age_s))]
    fn fresh_view(&self, py: Python<'_>, age_s: f64) -> PyResult<View> {
        let age = seconds("age", age_s)?;
        let view = block_on(py, self.0.fresh_view(age))?.map_err(|error| errors::from_join(py, &error))?;
        View::from_core(py, view)
    }

    /// For a node that waits: what for.
    fn progress(&self) -> Option<String> {
        self.0.progress()
    }

    /// How things stand, from memory.
    fn view(&self, py: Python<'_>) -> PyResult<View> {
        View::from_core(py, self.0.view())
    }

    /// End the job for everybody; blocks until that is written. With a ``cause``, it failed, and all others stop.
    #[pyo3(signature = (*, by, cause = None, timeout_s))]
    fn close(&self, py: Python<'_>, by: String, cause: Option<String>, timeout_s: f64) -> PyResult<()> {
        let limit = seconds("close_timeout", timeout_s)?;
        let verdict = match cause {
            Some(cause) => Verdict::Failed { by, cause, failure: None },
            None => Verdict::Succeeded { by },
        };
        block_on(py, self.0.close(&verdict, limit))?.map_err(|error| errors::from_join(py, &error))
    }

    /// Say goodbye, waiting at most ``timeout_s`` for it to be written. Whether it was.
    #[pyo3(signature = (reason, *, timeout_s = 1.0))]
    fn leave(&self, py: Python<'_>, reason: String, timeout_s: f64) -> PyResult<bool> {
        let limit = seconds("timeout_s", timeout_s)?;
        block_on(py, self.0.leave(&reason, limit))
    }
}
