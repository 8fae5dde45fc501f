//! One node's agent: it takes part in the rendezvous, runs the workers of each round, and answers for them.
//!
//! [`machine`] decides, [`runner`] carries out what it says together with a front end: `crates/py` for PyTorch's
//! launcher, [`crate::launch`] for `elastic-run`.

#[cfg(feature = "io")]
mod account;
#[cfg(feature = "io")]
pub mod crew;
pub mod environment;
#[cfg(feature = "io")]
mod first;
pub mod machine;
pub mod news;
pub mod policy;
#[cfg(feature = "io")]
pub mod runner;
#[cfg(feature = "io")]
mod sleepers;

pub use machine::{AgentMachine, Command};
pub use policy::{Budget, Outcome, Policy};
