//! How a process ended, in words.

use std::fmt;

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

/// How a worker ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExitStatus {
    /// It called `exit`; 0 is success.
    Code(i32),
    /// A signal ended it.
    Signal {
        /// Which one.
        signal: Signal,
        /// Whether the kernel wrote a core dump.
        core_dumped: bool,
    },
    /// Its guard was killed from outside. That ended the worker (SIGKILL), and nobody could read its status.
    Unseen,
}

impl ExitStatus {
    /// Whether it ended with code 0.
    pub fn is_success(self) -> bool {
        self == ExitStatus::Code(0)
    }

    /// The number PyTorch reports: the exit code, or the signal's number negated, as `subprocess.Popen.returncode`.
    pub fn returncode(self) -> i32 {
        match self {
            ExitStatus::Code(code) => code,
            ExitStatus::Signal { signal, .. } => -signal.0,
            ExitStatus::Unseen => -Signal::KILL.0,
        }
    }

    /// From the `si_code` and `si_status` of `waitid(2)`.
    pub fn from_wait(code: i32, status: i32) -> ExitStatus {
        match code {
            CLD_EXITED => ExitStatus::Code(status),
            _ => ExitStatus::Signal { signal: Signal(status), core_dumped: code == CLD_DUMPED },
        }
    }
}

const CLD_EXITED: i32 = 1;
const CLD_DUMPED: i32 = 3;

impl fmt::Display for ExitStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExitStatus::Code(code) => write!(f, "exit code {code}"),
            ExitStatus::Signal { signal, core_dumped: false } => write!(f, "{signal}"),
            ExitStatus::Signal { signal, core_dumped: true } => write!(f, "{signal} (core dumped)"),
            ExitStatus::Unseen => f.write_str("SIGKILL (its guard process was killed)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_have_names_both_ways() {
        for (name, signal) in [("SIGTERM", Signal::TERM), ("SIGUSR1", Signal(10)), ("SIGPOLL", Signal(29))] {
            assert_eq!(Signal::from_name(name), Some(signal));
        }
        assert_eq!(Signal(31).to_string(), "SIGSYS");
        assert_eq!(Signal(34).to_string(), "signal 34");
        assert_eq!(Signal(0).name(), None);
        for name in ["SIGNOTHING", "TERM", "SIG", ""] {
            assert_eq!(Signal::from_name(name), None);
        }
    }

    #[test]
    fn an_exit_says_code_or_signal() {
        let table = [((1, 3), "exit code 3", 3), ((2, 9), "SIGKILL", -9), ((3, 11), "SIGSEGV (core dumped)", -11)];
        for ((code, status), text, returncode) in table {
            let exit = ExitStatus::from_wait(code, status);
            assert_eq!((exit.to_string().as_str(), exit.returncode()), (text, returncode));
        }
        assert!(
            ExitStatus::Code(0).is_success() && !ExitStatus::Code(1).is_success() && !ExitStatus::Unseen.is_success()
        );
    }
}
