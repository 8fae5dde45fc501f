//! Discovery: which hosts there are, and the driver that starts an agent on each.
//!
//! The *driver* is the process of `elastic-run -H …`. It runs anywhere and hosts the coordinator. It owns one connection to each
//! host (the system's `ssh`), through which it starts an *agent*, hears its output, and tells it to leave. Who is in a world, and
//! with how many workers, the coordinator decides, not the driver.
//!
//! | part | what |
//! |---|---|
//! | [`hosts`] | `-H`, host files and the lines of a script ↔ hosts (pure) |
//! | [`manager`] | the known hosts by age, and which of them may be used (pure) |
//! | [`endings`] | why an agent ended, in words that say what to do (pure) |
//! | [`machine`] | what the driver does about what happens: starts, leaves, kills, the end of the job (pure) |
//! | [`greeting`] | what an agent says of itself on its standard output (pure) |
//! | `agent`, `output`, `driver` | the processes, their streams, and the loop around the machine (feature `io`) |
//!
//! Semantics follow `horovod/runner/elastic` where `docs/hosts.md` does not say otherwise.

#[cfg(feature = "io")]
mod agent;
#[cfg(feature = "io")]
pub mod driver;
pub mod endings;
#[cfg(feature = "io")]
pub mod greeting;
pub mod hosts;
pub mod machine;
pub mod manager;
#[cfg(feature = "io")]
mod output;
