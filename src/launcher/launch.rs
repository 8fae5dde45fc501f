//! `elastic-run`: a front end of the core's own, which starts programs and needs no Python.
//!
//! Owns what a node's workers are given ([`Job`]: command, variables, streams), and the loop that carries out the runner's steps
//! ([`run`]). Facts: `torch/distributed/run.py`, `distributed/launcher/api.py` and
//! `elastic/multiprocessing/api.py` of torch 2.15, which say what workers of `torchrun` get.

#[cfg(feature = "io")]
mod job;
#[cfg(feature = "io")]
mod run;
mod streams;
mod substitute;

#[cfg(feature = "io")]
pub use job::{Fixed, Job, LogFolder, Warm};
#[cfg(feature = "io")]
pub use run::{Ended, LaunchError, run};
pub use streams::LogOptions;
pub use substitute::substitute;
