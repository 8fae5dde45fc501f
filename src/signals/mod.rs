//! Signals: their names, and those of this process as messages (feature `io`).

use std::fmt;

#[cfg(feature = "io")]
mod handled;
mod meaning;
#[cfg(feature = "io")]
mod repetition;
#[cfg(feature = "io")]
mod sender;

#[cfg(feature = "io")]
pub use handled::{Received, Receiver, Signals, Wanted, last_sender, watch};
pub use meaning::{Meaning, Meanings};
#[cfg(feature = "io")]
pub use repetition::SAME_SIGNAL;
#[cfg(feature = "io")]
pub use sender::Sender;

/// A signal's number, printed by name (`SIGKILL`). Linux's numbers, which x86, ARM and RISC-V share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Signal(pub i32);

impl Signal {
    /// Hang-up of the terminal.
    pub const HUP: Signal = Signal(1);
    /// Ctrl-C.
    pub const INT: Signal = Signal(2);
    /// Access to memory behind which there is nothing: shared memory is full, or a mapped file was cut.
    pub const BUS: Signal = Signal(7);
    /// Ends a process at once; cannot be caught.
    pub const KILL: Signal = Signal(9);
    /// Asks a process to end.
    pub const TERM: Signal = Signal(15);
    /// Continues a stopped process.
    pub const CONT: Signal = Signal(18);

    /// The signal with this name, such as `SIGTERM`. It may be any of the names of Python's `signal.Signals`.
    pub fn from_name(name: &str) -> Option<Signal> {
        let name = name.strip_prefix("SIG")?;
        if let Some((_, number)) = ALIASES.iter().find(|(alias, _)| *alias == name) {
            return Some(Signal(*number));
        }
        let index = NAMES.iter().position(|known| *known == name)?;
        i32::try_from(index + 1).ok().map(Signal)
    }

    /// The name, such as `SIGTERM`; `None` for real-time signals and for numbers that are no signal.
    pub fn name(self) -> Option<String> {
        let index = usize::try_from(self.0).ok()?.checked_sub(1)?;
        NAMES.get(index).map(|name| format!("SIG{name}"))
    }
}

/// Who gets the first signal of a stop.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum FirstSignal {
    /// The worker's process group, as with PyTorch's agent. What it has started may end before the worker saves anything.
    #[default]
    Group,
    /// The process that was started as the worker. Once it has ended, what it has started gets SIGTERM and the rest of the grace.
    Leader,
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(&name),
            None => write!(f, "signal {}", self.0),
        }
    }
}

/// The names of signals 1 to 31.
const NAMES: [&str; 31] = [
    "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE", "ALRM", "TERM",
    "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO",
    "PWR", "SYS",
];

/// Further names. The limits of real-time signals are those of glibc, which keeps 32 and 33 for itself.
const ALIASES: [(&str, i32); 5] = [("IOT", 6), ("CLD", 17), ("POLL", 29), ("RTMIN", 34), ("RTMAX", 64)];
