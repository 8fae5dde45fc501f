//! How a process ended, in words.

use std::fmt;

use crate::signals::Signal;

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

    /// From the status that `waitpid(2)` gives.
    #[cfg(feature = "io")]
    pub(super) fn from_status(status: i32) -> ExitStatus {
        match status & 0x7f {
            0 => ExitStatus::Code(status >> 8 & 0xff),
            signal => ExitStatus::Signal { signal: Signal(signal), core_dumped: status & 0x80 != 0 },
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
