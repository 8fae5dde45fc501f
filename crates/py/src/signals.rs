//! `Signals`: signals of this process, as an agent or a driver handles them. `watch_signals`: for torchrun, whose handlers are Python's.

use elastic_rs::signals::Signal;
use elastic_rs::signals::{self, Receiver, Wanted};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use tokio::runtime::Handle;

/// Signals that this process handles for a job, as a context. Meanwhile they end nobody and interrupt nothing, whichever thread they come
/// to: :func:`launch` and :meth:`Driver.run` read them. At its end they do what they did before.
///
/// ``named``: the user has named them. Otherwise SIGHUP stays ignored if it is, as under ``nohup``. ``driven``: a driver has started this
/// process. ``passed_on``: further signals, which end nothing, and of which each counts.
///
/// Entering raises ``OSError`` if no descriptor is left, or if an agent in another thread handles this process's signals.
#[pyclass(unsendable, module = "elastic_rs._elastic_rs")]
pub struct Signals {
    wanted: Wanted,
    taken: Option<signals::Signals>,
}

#[pymethods]
impl Signals {
    #[new]
    #[pyo3(signature = (signals, *, passed_on, named, driven = false))]
    fn new(signals: Vec<i32>, passed_on: Vec<i32>, named: bool, driven: bool) -> Self {
        Self { wanted: Wanted { signals: of(signals), passed_on: of(passed_on), named, driven }, taken: None }
    }

    fn __enter__(mut slf: PyRefMut<'_, Self>) -> PyResult<PyRefMut<'_, Self>> {
        slf.taken = Some(signals::Signals::take(&slf.wanted)?);
        Ok(slf)
    }

    #[pyo3(signature = (*_error: "object"))]
    fn __exit__(&mut self, _error: &Bound<'_, PyAny>) {
        self.taken = None;
    }
}

impl Signals {
    /// Where they are read.
    pub fn receiver(&self, runtime: &Handle) -> PyResult<Receiver> {
        let taken = self.taken.as_ref().ok_or_else(|| PyRuntimeError::new_err("the signals are not entered"))?;
        let _inside = runtime.enter();
        Ok(taken.receiver()?)
    }
}

/// Have these signals, which have handlers of Python's, reach them once if they come twice within :data:`SAME_SIGNAL_S`. The agent then
/// knows who has sent them. ``passed_on``: further signals, each of which counts. Call it again after their handlers have changed: with
/// ``goes_on`` a repetition of a signal that came before is still one.
#[pyfunction]
#[pyo3(signature = (signals, *, passed_on = Vec::new(), goes_on = false))]
pub fn watch_signals(signals: Vec<i32>, passed_on: Vec<i32>, goes_on: bool) {
    signals::watch(&of(signals), &of(passed_on), goes_on);
}

fn of(numbers: Vec<i32>) -> Vec<Signal> {
    numbers.into_iter().map(Signal).collect()
}
