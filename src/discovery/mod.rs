//! Discovery: which hosts there are, and the driver that starts an agent on each.
//!
//! The *driver* is the process of `elastic-run -H …`. It runs anywhere and hosts the coordinator. It owns one connection to each
//! host (a process of the system's `ssh`). Through it, the driver starts an *agent*, reads the agent's output, and asks it to leave.
//! The coordinator, not the driver, decides which nodes are in a world, and with how many workers.
//!
//! | part | what |
//! |---|---|
//! | [`hosts`] | `-H`, host files and the lines of a script ↔ hosts (pure) |
//! | [`manager`] | the known hosts by age, and which of them may be used (pure) |
//! | [`endings`] | why an agent ended, with what to do (pure) |
//! | [`machine`] | the driver's decisions: starts, leaves, kills, the end of the job (pure) |
//! | [`reports`] | an agent's reports among its workers' output (pure) |
//! | `programs` | starts programs: `ssh`, agents, discovery scripts (feature `io`) |
//! | `agent`, `output`, `driver` | the agents' connections, their streams, and the loop around the machine (feature `io`) |
//!
//! Semantics follow `horovod/runner/elastic` where `docs/hosts.md` does not say otherwise.

#[cfg(feature = "io")]
mod agent;
#[cfg(feature = "io")]
pub mod driver;
pub mod endings;
pub mod hosts;
pub mod machine;
pub mod manager;
#[cfg(feature = "io")]
mod output;
#[cfg(feature = "io")]
pub mod programs;
#[cfg(feature = "io")]
pub mod reports;
