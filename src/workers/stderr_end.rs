//! The last bytes that a worker wrote to standard error.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::lines::{TAIL_BYTES, Tail};
use super::logs::read_end::ReadEnd;

/// Bytes at the end of a file that are read. More than are kept, because most of them may be states of a progress bar.
const READ_BYTES: u64 = 8 * TAIL_BYTES as u64;

/// Where the end of a worker's standard error can be read, also after the worker's group is gone.
#[derive(Debug, Clone, Default)]
pub struct StderrEnd {
    source: Source,
}

#[derive(Debug, Clone, Default)]
enum Source {
    /// Stderr does not go through the agent nor to a file: a terminal, say.
    #[default]
    Nowhere,
    Pipe(Arc<ReadEnd>),
    File(PathBuf),
}

impl StderrEnd {
    pub(super) fn new(pipe: Option<Arc<ReadEnd>>, file: Option<PathBuf>) -> Self {
        let source = match (pipe, file) {
            (Some(pipe), _) => Source::Pipe(pipe),
            (None, Some(file)) => Source::File(file),
            (None, None) => Source::Nowhere,
        };
        Self { source }
    }

    /// The last bytes, at most 8 KiB, if they are not in a file. Never blocks, even if the console is blocked.
    pub fn at_once(&self) -> Option<Vec<u8>> {
        match &self.source {
            Source::Nowhere => Some(Vec::new()),
            Source::Pipe(pipe) => Some(pipe.last_bytes()),
            Source::File(_) => None,
        }
    }

    /// The last bytes, at most 8 KiB; none if the file cannot be read. Blocks as long as the file's file system does.
    pub fn read(&self) -> Vec<u8> {
        match &self.source {
            Source::Nowhere => Vec::new(),
            Source::Pipe(pipe) => pipe.last_bytes(),
            Source::File(path) => end_of(path).unwrap_or_default(),
        }
    }
}

fn end_of(path: &Path) -> io::Result<Vec<u8>> {
    if !fs::metadata(path)?.is_file() {
        return Ok(Vec::new()); // a pipe or a terminal: reading it would take bytes that are meant for another process
    }
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(READ_BYTES)))?;
    let mut end = Vec::new();
    file.take(READ_BYTES).read_to_end(&mut end)?;
    let mut tail = Tail::default();
    tail.push(&end);
    Ok(tail.last().to_vec())
}
