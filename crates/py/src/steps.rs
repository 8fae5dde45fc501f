//! `StepCounter`: a worker's steps of training, for its agent.
//!
//! No call here makes the runtime: a worker may fork.

use elastic_rs::steps::worker::Steps;
use pyo3::prelude::*;

use crate::watch;

/// The steps of the calling process: ``elastic_rs.step``, but for what needs torch.
#[pyclass(frozen, subclass, module = "elastic_rs._elastic_rs")]
pub struct StepCounter;

/// The training of this process is in this section from now on, 0 for none. Returns in which it was.
#[pyfunction]
#[pyo3(signature = (section, /))]
pub fn enter_section(section: u32) -> u32 {
    Steps::of_this_process().map_or(0, |steps| steps.enter(section))
}

#[pymethods]
impl StepCounter {
    #[new]
    fn new() -> Self {
        Self
    }

    /// A step has ended: number ``n``, by default the one after the last.
    #[pyo3(signature = (n = None, /))]
    fn __call__(&self, py: Python<'_>, n: Option<u64>) {
        if let Some(steps) = Steps::of_this_process() {
            steps.step(n);
        }
        watch::on_step(py);
    }

    /// A step of an optimizer has ended: it counts if ``is_next``, unless the training script reports its steps itself.
    #[pyo3(signature = (is_next, /))]
    fn _count(&self, is_next: bool) {
        if let Some(steps) = Steps::of_this_process() {
            steps.count(is_next);
        }
    }

    /// Steps of optimizers are counted no more, and those that were count no more.
    fn _count_no_more(&self) {
        if let Some(steps) = Steps::of_this_process() {
            steps.count_no_more();
        }
    }

    /// Say whether this worker is restarted when the world changes, because its process group uses NCCL. ``elastic-rs status`` shows it.
    #[pyo3(signature = (restarts, /))]
    fn _restarts_for_nccl(&self, restarts: bool) {
        if let Some(steps) = Steps::of_this_process() {
            steps.restarts_for_nccl(restarts);
        }
    }

    /// This worker has its process group now.
    fn _grouped(&self) {
        if let Some(steps) = Steps::of_this_process() {
            steps.grouped();
        }
    }

    /// This worker has the state of its world now.
    fn _synchronised(&self) {
        if let Some(steps) = Steps::of_this_process() {
            steps.synchronised();
        }
    }

    /// Step ``last`` was the last one: the next is counted from there. It is not reported.
    #[pyo3(signature = (last, /))]
    fn _go_on_from(&self, last: u64) {
        if let Some(steps) = Steps::of_this_process() {
            steps.go_on_from(last);
        }
    }
}
