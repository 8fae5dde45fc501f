//! The coordinator: all runs of one process, decided by [`super::run`].
//!
//! | file | what |
//! |---|---|
//! | [`machine`] | the registry of runs: which session belongs to which run, when to look at each (pure) |
//! | [`looks`] | looks at the workers of a run: who is asked, what was seen (pure) |
//! | [`hangs`] | a training that stands still: the judge, the looks that it asks for, what follows (pure) |
//! | [`command`] | what that has its driver do |
//! | [`ensemble`] | the processes at the endpoints of a list, of which one leads (pure) |
//! | [`succession`] | holds back what the coordinator says until a successor would know it (pure) |
//! | [`readers`] | who may read how a job does (pure) |
//! | `driver`, `connections`, `writing` | timers and questions; sockets of nodes and observers (feature `io`) |
//! | `peers` | the connections to the other processes of a list (feature `io`) |
//! | `event_log` | the events of all runs, and the observers that wait for the next ones (feature `io`) |
//! | `lives` | whose processes have ended, by their ports (feature `io`) |
//! | `look_askers` | the observers that wait for a look (feature `io`) |

pub mod command;
#[cfg(feature = "io")]
mod connections;
#[cfg(feature = "io")]
pub mod driver;
pub mod ensemble;
#[cfg(feature = "io")]
mod event_log;
pub mod hangs;
#[cfg(feature = "io")]
mod lives;
#[cfg(feature = "io")]
mod look_askers;
pub mod looks;
pub mod machine;
#[cfg(feature = "io")]
mod peers;
pub mod readers;
pub mod succession;
#[cfg(feature = "io")]
mod writing;
