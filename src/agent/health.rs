//! Whether this machine is well, before it joins a round: what is built in, and a command of the user's (`--health-check`).

use std::ffi::OsString;

#[cfg(feature = "io")]
mod built_in;
#[cfg(feature = "io")]
mod check;

#[cfg(feature = "io")]
pub(super) use check::Checks;
#[cfg(feature = "io")]
pub use check::check;

/// What is checked, beside what is built in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// A shell runs this: with exit code 0 the machine is well, with 1 it is ill, and anything else says nothing.
    pub command: Option<OsString>,
}

/// What a check has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// Nothing.
    Well,
    /// This.
    Ill(String),
    /// It could not say: why. The machine counts as well.
    Unknown(String),
}
