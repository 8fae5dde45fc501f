//! `Observer`: reads a run's events and state from a coordinator.

use std::time::Duration;

use elastic_rs::events::families::FAMILIES;
use elastic_rs::rendezvous::messages::message::{AskLook, LookAnswer, Observe, Observed};
use elastic_rs::rendezvous::observer;
use pyo3::exceptions::PyConnectionError;
use pyo3::prelude::*;
use tokio::sync::Mutex;

use crate::conf::seconds;
use crate::runtime::block_on;
use crate::secure::Protection;

/// The run's id, its state, events, the number of the last one, and whether there are more.
type Replayed = (String, Option<String>, Vec<String>, u64, bool);

/// A connection to a coordinator that reads a run's events and state, and changes nothing.
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct Observer(Mutex<observer::Observer>);

#[pymethods]
impl Observer {
    /// Connect to the coordinator at ``host:port``. With a ``protection``, ``run_id`` must be given.
    ///
    /// Raises ``ConnectionError`` if nobody answers there, or if one of the ends is not proven.
    #[staticmethod]
    #[pyo3(signature = (host, port, *, run_id = None, protection = None, timeout_s = 5.0))]
    fn connect(
        py: Python<'_>,
        host: &str,
        port: u16,
        run_id: Option<&str>,
        protection: Option<&Protection>,
        timeout_s: f64,
    ) -> PyResult<Self> {
        let limit: Duration = seconds("timeout_s", timeout_s)?;
        let secured = protection.map(|protection| (protection.core(), run_id.unwrap_or_default()));
        let connected = block_on(py, observer::Observer::connect(host, port, secured, limit))?;
        connected.map(|observer| Self(Mutex::new(observer))).map_err(PyConnectionError::new_err)
    }

    /// Return the run's id, its state as JSON (None unless ``state``), the events after number ``after`` as lines of JSON, the number
    /// of the last of them, and whether there are more. With ``waits``, wait until there is one.
    ///
    /// Raises ``ConnectionError`` if the coordinator refuses, or has gone.
    #[pyo3(signature = (*, run_id = None, after = 0, waits = false, state = false))]
    fn ask(&self, py: Python<'_>, run_id: Option<String>, after: u64, waits: bool, state: bool) -> PyResult<Replayed> {
        let asked = async { self.0.lock().await.ask(Observe { run_id, after, waits, state }).await };
        let Observed { run_id, state, lines, last, more } = block_on(py, asked)?.map_err(PyConnectionError::new_err)?;
        Ok((run_id, state, lines, last, more))
    }

    /// Ask where the ranks of a run stand. Return its id and, as JSON, what its agents see: of all ranks in groups, or of ``rank`` alone, with
    /// ``deep`` also what ``py-spy`` shows of it.
    ///
    /// Raises ``ConnectionError`` if the coordinator refuses, or has gone.
    #[pyo3(signature = (*, run_id = None, rank = None, deep = false))]
    fn look(
        &self,
        py: Python<'_>,
        run_id: Option<String>,
        rank: Option<u32>,
        deep: bool,
    ) -> PyResult<(String, String)> {
        let asked = async { self.0.lock().await.look(AskLook { run_id, rank, deep }).await };
        let LookAnswer { run_id, seen } = block_on(py, asked)?.map_err(PyConnectionError::new_err)?;
        Ok((run_id, seen))
    }
}

/// The families of series at ``/metrics``: the series' name, its type, the names of its labels and its help.
#[pyfunction]
pub fn metric_families() -> Vec<(String, &'static str, Vec<&'static str>, &'static str)> {
    FAMILIES.iter().map(|family| (family.series(), family.kind, family.labels.to_vec(), family.help)).collect()
}
