//! Front ends: what a node of a job does between its agent, its session and its workers' store.
//!
//! [`node`] is a node's life in a job's rounds, the same for all front ends: `crates/py` with PyTorch's launcher, and [`launch`],
//! which is `elastic-run`. Leaves the command line, the coordinator's address and the final report to whoever calls it.

pub mod launch;
#[cfg(feature = "io")]
pub mod node;
#[cfg(feature = "io")]
mod tunnel;
#[cfg(feature = "io")]
mod worker_store;
