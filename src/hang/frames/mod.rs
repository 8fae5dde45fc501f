//! Python frames of another process, read from its memory. The process neither helps nor notices: it may be stopped, hold the GIL in C,
//! or sleep in the kernel.
//!
//! [`read`] is pure: it reads through [`Memory`]. [`process`] reads a live process, [`find`] finds its `_PyRuntime`, and [`allowed`] says
//! whether this process may do that here. Reasons: `docs/decisions/0130-frames-are-read-from-memory.md`.
//!
//! What is read may change while it is read, and may be made up. So all is bounded ([`READ_LIMIT`], [`THREAD_LIMIT`], [`FRAME_LIMIT`],
//! [`NAME_LIMIT_BYTES`]), nothing is reserved by a number that was read, and what makes no sense becomes `?`.

pub mod allowed;
#[cfg(feature = "io")]
pub mod find;
mod lines;
mod objects;
mod offsets;
#[cfg(feature = "io")]
pub mod process;
mod reader;
#[cfg(test)]
mod tests;
mod walk;

use std::fmt;

use thiserror::Error;

pub use reader::READ_LIMIT;

/// Most threads of a process that are read.
pub const THREAD_LIMIT: usize = 256;
/// Most frames of a thread that are read. They are the innermost ones.
pub const FRAME_LIMIT: usize = 128;
/// Longest name of a function or a file, in bytes.
pub const NAME_LIMIT_BYTES: usize = 4096;
/// What stands for a name that could not be read.
pub const UNKNOWN: &str = "?";

/// The memory of a process.
pub trait Memory {
    /// Fills `into` with what stands at `address`.
    ///
    /// # Errors
    /// Some of these bytes cannot be read.
    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Unreadable>;
}

/// Memory that cannot be read: it is not mapped, or the process has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the memory cannot be read")]
pub struct Unreadable;

/// A version of CPython. Its frames have the same form in all patch releases of a minor one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// 3.
    pub major: u8,
    /// 11 in 3.11.7.
    pub minor: u8,
}

impl Version {
    /// The version in a `PY_VERSION_HEX`, as in the symbol `Py_Version`, or `sys.hexversion`.
    pub fn of_hex(hex: u32) -> Self {
        let [major, minor, _, _] = hex.to_be_bytes();
        Self { major, minor }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Where a process's Python is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Runtime {
    /// The address of `_PyRuntime`.
    pub address: u64,
    /// Its version, if known. From 3.13 on the process's own word counts instead.
    pub version: Option<Version>,
}

/// All threads of a process that run Python, the main thread first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stacks {
    /// The version of the process's Python.
    pub version: Version,
    /// Its threads.
    pub threads: Vec<Thread>,
    /// There is more than was read, or some of it was nonsense.
    pub cut: bool,
}

impl Stacks {
    /// The main thread, if it is known.
    pub fn main(&self) -> Option<&Thread> {
        self.threads.iter().find(|thread| thread.main)
    }
}

/// A thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Thread {
    /// The kernel's number of it.
    pub tid: u64,
    /// Whether it is the main thread.
    pub main: bool,
    /// Whether it holds the GIL. `None`: there is none (free threading), or it could not be read.
    pub holds_gil: Option<bool>,
    /// Its frames, innermost first.
    pub frames: Vec<Frame>,
    /// It has further frames, or the last of these are not to be trusted: it changed while it was read.
    pub cut: bool,
}

/// A call of a Python function.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Frame {
    /// The function's qualified name, as `Trainer.step.<locals>.closure`. [`UNKNOWN`] if it could not be read.
    pub function: String,
    /// The file that it is in. [`UNKNOWN`] if it could not be read.
    pub file: String,
    /// The line that runs.
    pub line: Option<u32>,
    /// The rank with which this call of `torch.distributed.send` or `recv` communicates.
    pub peer: Option<Peer>,
}

/// The other rank of a `send` or `recv`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Peer {
    /// A rank of the world.
    Rank(u32),
    /// A rank within the call's group.
    GroupRank(u32),
}

/// Why a process's frames cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FramesError {
    /// Its Python has another form than those that are known.
    #[error("frames of Python {0} cannot be read: known are 3.11 to 3.15; install py-spy to see them")]
    UnknownVersion(Version),
    /// There is no version, neither from the worker nor in its memory.
    #[error("the version of the process's Python is not known; install py-spy to see its frames")]
    NoVersion,
    /// What describes its structures is not what any known release has.
    #[error("Python {0} describes its memory in an unknown form; install py-spy to see its frames")]
    Nonsense(Version),
    /// No interpreter is there: Python has not started yet, has ended, or is elsewhere.
    #[error(
        "no Python interpreter is at the address of the process's `_PyRuntime`: it starts or ends, or the address is wrong"
    )]
    NoInterpreter,
}

/// Read the frames of all threads of a process whose kernel number is `pid`.
///
/// # Errors
/// Nothing can be read. What is read in part is no error ([`Stacks::cut`]).
pub fn read(memory: &dyn Memory, pid: u32, runtime: Runtime) -> Result<Stacks, FramesError> {
    walk::Walk::of(memory, runtime)?.stacks(pid)
}
