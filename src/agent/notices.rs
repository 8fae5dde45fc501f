//! Notices that this machine is about to be taken away: where they come from, and what they say.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use crate::signals::Signal;

#[cfg(feature = "io")]
mod watch;

#[cfg(feature = "io")]
pub(super) use watch::{Notice, Watches};

/// How an agent learns that its machine is about to be taken away. Signals that say so are [`Meanings::notices`](crate::signals::Meanings).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Where else to look.
    pub sources: Vec<Source>,
    /// How much time a notice leaves that does not say it.
    pub deadline: Duration,
    /// What workers get at a notice for whatever node, to save. Default none.
    pub signal: Option<Signal>,
}

/// Where a notice comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// This file appears. Its first word is how many seconds are left.
    File(PathBuf),
    /// A shell runs this, again and again. Once it ends well and has written something, that is a notice, and the first word is how many
    /// seconds are left.
    Command {
        /// The command.
        command: OsString,
        /// What messages call it.
        name: String,
    },
}
