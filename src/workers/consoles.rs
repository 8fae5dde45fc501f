//! The streams of this process that show the output of workers.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::fstat;

/// The consoles that show the output of workers.
#[derive(Debug)]
pub struct Consoles {
    /// For standard output.
    pub stdout: OwnedFd,
    /// For standard error.
    pub stderr: OwnedFd,
}

impl Consoles {
    /// This process's own streams.
    pub fn own() -> io::Result<Consoles> {
        let stdout = io::stdout().as_fd().try_clone_to_owned()?;
        Ok(Consoles { stdout, stderr: io::stderr().as_fd().try_clone_to_owned()? })
    }

    /// Whether both are one file, pipe, socket or terminal.
    pub(crate) fn are_one(&self) -> bool {
        is_one(&self.stdout, &self.stderr)
    }

    /// The same of the console for standard error and what workers inherit as standard output.
    pub(super) fn stderr_is_own_stdout(&self) -> bool {
        is_one(rustix::stdio::stdout(), &self.stderr)
    }
}

fn is_one(one: impl AsFd, other: impl AsFd) -> bool {
    let (Ok(one), Ok(other)) = (fstat(one), fstat(other)) else { return false };
    (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
}
