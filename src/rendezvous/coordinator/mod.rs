//! The coordinator: all runs of one process, decided by [`super::run`].
//!
//! | file | what |
//! |---|---|
//! | [`machine`] | the registry of runs: which session belongs to which run, when to look at each (pure) |
//! | [`readers`] | who may read how a job does (pure) |
//! | `driver` | sockets and timers (feature `io`) |
//! | `book` | the events of all runs, and the observers that wait for the next ones (feature `io`) |

#[cfg(feature = "io")]
mod book;
#[cfg(feature = "io")]
pub mod driver;
pub mod machine;
pub mod readers;
