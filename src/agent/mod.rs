//! One node's agent: it joins the rendezvous, runs the workers of each round, and reports how they end.
//!
//! [`machine`] decides. [`runner`] carries out its commands together with a front end: `crates/py` for PyTorch's launcher,
//! [`crate::launcher::launch`] for `elastic-run`.

#[cfg(feature = "io")]
mod account;
pub mod command;
pub mod environment;
#[cfg(feature = "io")]
mod failure_message;
#[cfg(feature = "io")]
mod hang_command;
pub mod health;
#[cfg(feature = "io")]
mod look;
pub mod machine;
pub mod news;
pub mod notices;
#[cfg(feature = "io")]
mod own_hangs;
#[cfg(feature = "io")]
mod phases;
pub mod policy;
#[cfg(feature = "io")]
mod py_spy;
#[cfg(feature = "io")]
mod recovered;
#[cfg(feature = "io")]
pub mod runner;
#[cfg(feature = "io")]
mod shell;
#[cfg(feature = "io")]
mod slots;
#[cfg(feature = "io")]
mod uninterruptible;
#[cfg(feature = "io")]
pub mod worker_group;

/// The number of a restart, and of how many. A sliding budget (`restart_window`) has no last one.
#[cfg(feature = "io")]
fn restart_of(number: u32, limit: u32) -> String {
    if number <= limit { format!("restart {number} of {limit}") } else { format!("restart {number}") }
}

pub use command::Command;
pub use machine::AgentMachine;
pub use policy::{AgentOptions, Budget, Outcome, Policy};
