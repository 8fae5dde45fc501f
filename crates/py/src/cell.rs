//! `CellSession`: a node of a rendezvous over a backend with `get_state` and `set_state`.

use std::sync::Arc;

use elastic_rs::launcher::node::Node;
use elastic_rs::rendezvous::cell::driver::{CellDriver, Step};
use elastic_rs::rendezvous::cell::node::CellCommand;
use elastic_rs::rendezvous::node::JoinError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::conf::seconds;
use crate::errors;
use crate::options::NodeOptions;
use crate::rendezvous::{Session, View};
use crate::runtime::block_on;
use crate::secure::Protection;

/// A node of a rendezvous with its state in a backend. One Python thread performs the steps of :meth:`next_step`.
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct CellSession {
    node: Arc<Node>,
    options: NodeOptions,
    driver: CellDriver,
}

#[pymethods]
impl CellSession {
    /// Make a session for one node. Other nodes find it at ``local_addr`` of the options. ``protection`` is for the tunnels of workers,
    /// if the options ask for them. ``serves``: the end of this process may end what the backend holds, so at the job's end the node
    /// stays until the others have read that, for at most 5 s.
    ///
    /// Raises ``ValueError`` for invalid options.
    #[new]
    #[pyo3(signature = (options, *, serves, protection = None))]
    fn new(options: NodeOptions, serves: bool, protection: Option<&Protection>) -> PyResult<Self> {
        let (session, driver) = CellDriver::new(options.hello(false)?, serves);
        let node = Node::new(Arc::new(session), options.node(false, protection.map(Protection::core))?, None);
        Ok(Self { node: Arc::new(node), options, driver })
    }

    /// The session.
    #[getter]
    fn session(&self) -> Session {
        Session::of(Arc::clone(&self.node), self.options.clone())
    }

    /// Wait for the next operation on the backend. Empty bytes: read. Other bytes: write them if the state is still the last reported
    /// one. None: stop. Report the result with one of the ``on_`` methods.
    fn next_step<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        Ok(match block_on(py, self.driver.next_step())? {
            Step::Perform(CellCommand::Read) => Some(PyBytes::new(py, b"")),
            Step::Perform(CellCommand::Write(state)) => Some(PyBytes::new(py, &state)),
            Step::Stop => None,
        })
    }

    /// The backend holds this state, or none.
    fn on_state(&self, state: Option<&[u8]>) {
        self.driver.apply(|node, now| node.on_state(state, now));
    }

    /// The state was written.
    fn on_written(&self) {
        self.driver.apply(|node, now| node.on_written(now));
    }

    /// The state was not written: the backend holds this other state, or none.
    fn on_conflict(&self, state: Option<&[u8]>) {
        self.driver.apply(|node, now| node.on_conflict(state, now));
    }

    /// The backend could not be reached. ``gone``: somebody has answered that nobody serves it, or has ended the connection to it. False
    /// if it was silent.
    #[pyo3(signature = (error, *, gone))]
    fn on_failed(&self, error: String, gone: bool) {
        self.driver.apply(|node, now| node.on_failed(error, gone, now));
    }

    /// The backend fails permanently. ``state``: because of the state that it holds.
    fn on_broken(&self, error: String, state: bool) {
        let error = if state { JoinError::State(error) } else { JoinError::connection(error) };
        self.driver.apply(|node, _| node.on_broken(error));
    }

    /// The state of the rendezvous, as read from the backend at most ``age_s`` seconds ago, or as last read while the backend fails.
    /// Raises the errors of :meth:`Session.view`.
    #[pyo3(signature = (*, age_s))]
    fn fresh_view(&self, py: Python<'_>, age_s: f64) -> PyResult<View> {
        let age = seconds("age", age_s)?;
        let view = block_on(py, self.driver.fresh_view(age))?.map_err(|error| errors::from_join(py, &error))?;
        View::from_core(py, view)
    }

    /// Leave, and end the store for workers, without waiting for anybody.
    fn abandon(&self, py: Python<'_>, reason: String) -> PyResult<()> {
        block_on(py, self.node.abandon(reason))
    }
}
