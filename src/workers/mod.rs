//! Worker processes: starting them, noticing their ends, stopping them, copying their output.
//!
//! Owns one group of workers at a time ([`Group`]) and everything they leave behind. Leaves to the agent which workers run,
//! with what environment, and what an exit means. Facts: `torch/distributed/elastic/multiprocessing` (what users see),
//! `prctl(2)`, `wait(2)`, `pidfd_open(2)` (what the kernel promises).
//!
//! Each worker has a *guard*: a minimal process between the agent and the worker, forked and never executed. It is the worker's
//! parent and reaps all its descendants. A guard ends its worker's whole process tree when the worker ends, when the agent
//! orders it, and when the agent is gone for whatever reason.
//!
//! A group executes its workers, unless it is given a [`Forker`]. The room `warm` makes those. It uses this room, which does not
//! use it.

#[cfg(feature = "io")]
mod children;
#[cfg(feature = "io")]
mod consoles;
#[cfg(feature = "io")]
mod deadline;
#[cfg(feature = "io")]
mod event;
mod exit;
#[cfg(feature = "io")]
mod folders;
#[cfg(feature = "io")]
mod forker;
#[cfg(feature = "io")]
mod group;
#[cfg(feature = "io")]
mod guard;
#[cfg(feature = "io")]
mod leftovers;
#[cfg(feature = "io")]
mod lines;
#[cfg(feature = "io")]
mod logs;
#[cfg(feature = "io")]
mod message;
#[cfg(feature = "io")]
mod orphans;
#[cfg(feature = "io")]
mod prefix;
mod progress_log;
#[cfg(feature = "io")]
mod rehearsal;
#[cfg(feature = "io")]
mod room;
#[cfg(feature = "io")]
mod spawn;
mod spec;
#[cfg(feature = "io")]
mod stderr_end;
mod stop;

#[cfg(feature = "io")]
pub(crate) use children::reaped;
#[cfg(feature = "io")]
pub use consoles::Consoles;
#[cfg(feature = "io")]
pub use deadline::Deadline;
#[cfg(feature = "io")]
pub use event::{Event, Left, Outcome, WorkerExit};
pub use exit::ExitStatus;
#[cfg(feature = "io")]
pub(crate) use folders::link_ranks;
#[cfg(feature = "io")]
pub use folders::{AttemptFolder, LogFolders, folder_name};
#[cfg(feature = "io")]
pub(crate) use forker::ForkWorker;
#[cfg(feature = "io")]
pub use forker::Forker;
#[cfg(feature = "io")]
pub(crate) use group::member::{Member, News, Start};
#[cfg(feature = "io")]
pub use group::{Group, Origin};
#[cfg(feature = "io")]
pub(crate) use guard::forked::{ForkedGuard, GuardDescriptors, block_signals};
#[cfg(feature = "io")]
pub(crate) use lines::{Lines, OpenLine, Part, append_open, shown};
#[cfg(feature = "io")]
pub(crate) use logs::Sink;
#[cfg(feature = "io")]
pub use logs::{FilterOptions, ProgressLog, written};
#[cfg(feature = "io")]
pub(crate) use message::Order;
#[cfg(feature = "io")]
pub use orphans::{ForeignOrphans, reap_orphans_as_process_1};
#[cfg(feature = "io")]
pub(crate) use prefix::Prefix;
pub use progress_log::{PATTERN_LIMIT_BYTES, ProgressPattern, ProgressPatternError};
#[cfg(feature = "io")]
pub use rehearsal::rehearse;
#[cfg(feature = "io")]
pub(crate) use room::{is_full, why_no_more_logs};
#[cfg(feature = "io")]
pub(crate) use spawn::{Guarded, Opened, Ties, message_socket, open_fork_server, received, spawn_fork_server};
#[cfg(feature = "io")]
pub use spawn::{Stage, StartError, fill_standard_streams};
pub use spec::{Copies, Filter, Input, Output, Streams, StreamsError, StreamsOf, WorkerSpec};
#[cfg(feature = "io")]
pub use stderr_end::StderrEnd;
pub use stop::{Command, DUMP_BEFORE_KILL, StopPolicy, Stopping};
