//! Opening a file that a user has named, whatever it is.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Open a file for reading, without waiting for anybody: a FIFO without a writer would be waited for for ever. What it is, is in the
/// metadata.
///
/// # Errors
/// The system's.
pub fn open(path: &Path) -> io::Result<(File, Metadata)> {
    // A file on a disk takes no notice of the flag.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
    let metadata = file.metadata()?;
    Ok((file, metadata))
}

/// The same for a file that holds what is read once. A terminal, a FIFO or a folder is an error.
///
/// # Errors
/// The system's, or it is not a file.
pub fn open_file(path: &Path) -> io::Result<File> {
    let (file, metadata) = open(path)?;
    if metadata.is_file() { Ok(file) } else { Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a file")) }
}
