//! A process from which workers are forked, as a group sees it. The room `warm` has the only kind there is, a fork server.

use std::fmt;
use std::sync::Arc;

use super::deadline::Deadline;
use super::spawn::{Guarded, Opened};
use super::spec::WorkerSpec;

/// The handle of a process from which workers can be forked, instead of being executed.
#[derive(Debug, Clone)]
pub struct Forker(Arc<dyn ForkWorker>);

impl Forker {
    pub(crate) fn new(process: Arc<dyn ForkWorker>) -> Forker {
        Forker(process)
    }

    pub(super) fn fork(&self, spec: &WorkerSpec, opened: &Opened, deadline: Option<&Deadline>) -> Option<Guarded> {
        self.0.fork_worker(spec, opened, deadline)
    }
}

/// Forks workers below guards.
pub(crate) trait ForkWorker: fmt::Debug + Send + Sync {
    /// Has a worker and its guard forked. `None` if the worker has to be executed. May block for a few ms.
    fn fork_worker(&self, spec: &WorkerSpec, opened: &Opened, deadline: Option<&Deadline>) -> Option<Guarded>;
}
