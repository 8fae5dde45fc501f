//! `CasSession`: a node of a rendezvous over a backend with `get_state` and `set_state`.

use std::sync::Arc;

use elastic_rs::rendezvous::cell::driver::{CellDriver, Step};
use elastic_rs::rendezvous::cell::node::CellCommand;
use elastic_rs::rendezvous::conf::Conf;
use elastic_rs::rendezvous::node::machine::JoinError;
use elastic_rs::rendezvous::node::session::Session;
use elastic_rs::rendezvous::protocol::message::{JoinWorkers, Verdict};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::conf::seconds;
use crate::errors;
use crate::options::NodeOptions;
use crate::rendezvous::{Placement, View};
use crate::runtime::block_on;

/// A node of a rendezvous whose state a backend holds. One thread of Python's performs the steps of :meth:`next_step`.
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct CasSession {
    session: Arc<Session>,
    driver: CellDriver,
    options: NodeOptions,
}

#[pymethods]
impl CasSession {
    /// Make a session for one node, which others find at ``local_addr`` of the options.
    ///
    /// Raises ``ValueError`` for options that make no sense.
    #[new]
    fn new(options: NodeOptions) -> PyResult<Self> {
        let (session, driver) = CellDriver::new(options.hello()?);
        Ok(Self { session: Arc::new(session), driver, options })
    }

    /// Wait for the next operation of the backend. Empty bytes: read. Other bytes: write them if the state is still the last reported
    /// one. None: stop. One of the ``on_`` methods reports the result.
    fn next_step<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        Ok(match block_on(py, self.driver.next_step())? {
            Step::Perform(CellCommand::Read) => Some(PyBytes::new(py, b"")),
            Step::Perform(CellCommand::Write(state)) => Some(PyBytes::new(py, &state)),
            Step::Stop => None,
        })
    }

    /// The backend holds this state, or none.
    fn on_state(&self, state: Option<&[u8]>) {
        self.driver.tell(|node, now| node.on_state(state, now));
    }

    /// The state was written.
    fn on_written(&self) {
        self.driver.tell(|node, now| node.on_written(now));
    }

    /// The state was not written: the backend holds this other state, or none.
    fn on_conflict(&self, state: Option<&[u8]>) {
        self.driver.tell(|node, now| node.on_conflict(state, now));
    }

    /// The backend could not be reached.
    fn on_failed(&self, error: String) {
        self.driver.tell(|node, now| node.on_failed(error, now));
    }

    /// The backend fails for good. ``state``: the state that it holds is the cause.
    fn on_broken(&self, error: String, state: bool) {
        let error = if state { JoinError::State(error) } else { JoinError::Connection(error) };
        self.driver.tell(|node, _| node.on_broken(error));
    }

    /// Take part in the next round. Blocks until it is complete.
    ///
    /// Raises as :meth:`Session.join` does, and ``RendezvousStateError`` for a state that is not ours.
    #[pyo3(signature = (*, store_port, workers = None))]
    fn join(&self, py: Python<'_>, store_port: u16, workers: Option<(String, u32)>) -> PyResult<Placement> {
        let workers = workers.map(|(role, local_world_size)| JoinWorkers { role, local_world_size });
        let Conf { node_rank, join_timeout, .. } = self.options.config.0;
        block_on(py, self.session.join(store_port, node_rank, workers, join_timeout))?
            .map(Placement)
            .map_err(|error| errors::from_join(py, &error))
    }

    /// The state of the rendezvous, as read from the backend at most ``age_s`` ago. Raises as :meth:`join` does.
    #[pyo3(signature = (*, age_s))]
    fn fresh_view(&self, py: Python<'_>, age_s: f64) -> PyResult<View> {
        let age = seconds("age", age_s)?;
        let view = block_on(py, self.driver.fresh_view(age))?.map_err(|error| errors::from_join(py, &error))?;
        View::from_core(py, view)
    }

    /// The session, for an agent that listens to it.
    fn session(&self) -> crate::rendezvous::Session {
        crate::rendezvous::Session::of(Arc::clone(&self.session), self.options.clone())
    }

    /// For a waiting node: what it waits for.
    fn progress(&self) -> Option<String> {
        self.session.progress()
    }

    /// The state of the rendezvous, from memory.
    fn view(&self, py: Python<'_>) -> PyResult<View> {
        View::from_core(py, self.session.view())
    }

    /// End the job on all nodes. Blocks until that is written. With a ``cause`` the job has failed, and all other nodes stop.
    #[pyo3(signature = (*, by, cause = None, timeout_s))]
    fn close(&self, py: Python<'_>, by: String, cause: Option<String>, timeout_s: f64) -> PyResult<()> {
        let limit = seconds("close_timeout", timeout_s)?;
        let verdict = match cause {
            Some(cause) => Verdict::Failed { by, cause, failure: None },
            None => Verdict::Succeeded { by },
        };
        block_on(py, self.session.close_within(verdict, limit))?.map_err(|error| errors::from_join(py, &error))
    }

    /// Leave, waiting at most ``timeout_s`` for that to be written. Returns whether it was.
    #[pyo3(signature = (reason, *, timeout_s = 1.0))]
    fn leave(&self, py: Python<'_>, reason: String, timeout_s: f64) -> PyResult<bool> {
        let limit = seconds("timeout_s", timeout_s)?;
        block_on(py, self.session.leave(reason, None, limit))?;
        Ok(self.driver.has_left())
    }
}
