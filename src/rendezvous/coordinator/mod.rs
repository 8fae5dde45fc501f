//! The coordinator: all runs of one process, decided by [`super::run`].
//!
//! | file | what |
//! |---|---|
//! | [`machine`] | the registry of runs: which session belongs to which run, when to look at each (pure) |
//! | [`looks`] | looks at the workers of a run: who is asked, what was seen (pure) |
//! | [`hangs`] | a training that stands still: the judge, the looks that it asks for, what follows (pure) |
//! | [`readers`] | who may read how a job does (pure) |
//! | `driver`, `connections` | timers and questions; sockets of nodes and observers (feature `io`) |
//! | `event_log` | the events of all runs, and the observers that wait for the next ones (feature `io`) |
//! | `lives` | whose processes have ended, by their ports (feature `io`) |
//! | `look_askers` | the observers that wait for a look (feature `io`) |

#[cfg(feature = "io")]
mod connections;
#[cfg(feature = "io")]
pub mod driver;
#[cfg(feature = "io")]
mod event_log;
pub mod hangs;
#[cfg(feature = "io")]
mod lives;
#[cfg(feature = "io")]
mod look_askers;
pub mod looks;
pub mod machine;
pub mod readers;
