//! The streams of this process that show the output of workers.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

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
}
