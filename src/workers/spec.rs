//! What to run, and where its streams go, as data.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

/// One worker: the program, its environment and its streams.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerSpec {
    /// Its number on this node, from 0, which names the worker in events: its local rank, or the slot of its process.
    pub local_rank: u32,
    /// The program. A name without a slash is searched in the `PATH` of [`env`](Self::env).
    pub program: OsString,
    /// Its arguments, without the program's own name.
    pub args: Vec<OsString>,
    /// The CPUs that it may use, as may all it starts. Empty, the default: this process's.
    pub cpus: Vec<u32>,
    /// The whole environment: nothing is inherited.
    pub env: BTreeMap<OsString, OsString>,
    /// The working directory. Default: this process's.
    pub cwd: Option<PathBuf>,
    /// Default: this process's, as for PyTorch's workers.
    pub stdin: Input,
    /// Default: this process's.
    pub stdout: Output,
    /// Default: this process's.
    pub stderr: Output,
}

impl WorkerSpec {
    /// A worker with an empty environment, and this process's working directory and streams.
    pub fn new(local_rank: u32, program: impl Into<OsString>) -> WorkerSpec {
        WorkerSpec {
            local_rank,
            program: program.into(),
            args: Vec::new(),
            cpus: Vec::new(),
            env: BTreeMap::new(),
            cwd: None,
            stdin: Input::Inherit,
            stdout: Output::Inherit,
            stderr: Output::Inherit,
        }
    }

    /// Program and arguments; never empty.
    pub fn command(&self) -> Vec<&OsString> {
        [&self.program].into_iter().chain(&self.args).collect()
    }
}

/// Where a worker's standard input comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Input {
    /// The agent's own. Workers have no controlling terminal, so reading from a terminal fails with EIO, as under PyTorch.
    #[default]
    Inherit,
    /// Empty.
    Null,
}

/// Where one of a worker's output streams goes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Output {
    /// The agent's own stream, untouched. Standard output shares the pipe of a standard error that is copied to the same file, pipe or
    /// socket (`2>&1`), byte for byte and to no other place. Otherwise lines of the two would change their order.
    #[default]
    Inherit,
    /// Nowhere.
    Null,
    /// A file that the worker writes itself, without a copy. It is truncated first.
    File(PathBuf),
    /// The agent reads it and copies it to each of these.
    Copied(Copies),
}

impl Output {
    /// Whether the console gets it.
    pub fn is_on_console(&self) -> bool {
        match self {
            Output::Inherit => true,
            Output::Copied(copies) => copies.console,
            Output::Null | Output::File(_) => false,
        }
    }

    /// The beginning of its lines there, if they have one.
    pub fn prefix(&self) -> Option<&str> {
        match self {
            Output::Copied(copies) => copies.prefix.as_deref(),
            Output::Inherit | Output::Null | Output::File(_) => None,
        }
    }
}

/// The destinations of a stream that the agent reads.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Copies {
    /// A file that gets the bytes unchanged. It is truncated first. The worker writes it itself if the agent can follow it (a
    /// regular file that no other stream goes to). A console that nobody reads does not block the worker then. Otherwise the
    /// worker writes into a pipe, and the agent writes the file.
    pub file: Option<PathBuf>,
    /// Whether the agent's console gets the bytes: stdout on its stdout, stderr on its stderr.
    pub console: bool,
    /// The prefix of each line on the console and in the filter file, such as `[default0]:`. On a terminal it is in the worker's
    /// colour. A line ends with `\n` or `\r` (a progress bar's). Only whole lines are written. `None`: the console gets bytes as they
    /// arrive.
    pub prefix: Option<String>,
}

/// A file for the lines that contain one of some texts, from the streams of all workers that go to the console.
///
/// PyTorch's `--duplicate-stdout-filters` and `--duplicate-stderr-filters`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filter {
    /// Gets the matching lines with their prefixes. It is truncated first.
    pub file: PathBuf,
    /// A line that contains one of these matches.
    pub texts: Vec<String>,
}

/// The output streams that an option selects: PyTorch's `Std`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Streams {
    /// Standard output.
    pub stdout: bool,
    /// Standard error.
    pub stderr: bool,
}

impl Streams {
    /// Both.
    pub const ALL: Streams = Streams { stdout: true, stderr: true };

    /// From PyTorch's digit: 0 none, 1 stdout, 2 stderr, 3 both.
    fn from_digit(text: &str) -> Option<Streams> {
        let value: u8 = text.parse().ok().filter(|value| *value <= 3 && text.len() == 1)?;
        Some(Streams { stdout: value & 1 != 0, stderr: value & 2 != 0 })
    }
}

/// The value of `--redirects` or `--tee`: streams of all workers, or of some.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StreamsOf {
    /// The same for every local rank.
    Every(Streams),
    /// By local rank. Ranks that are missing have none.
    Each(BTreeMap<u32, Streams>),
}

impl Default for StreamsOf {
    fn default() -> StreamsOf {
        StreamsOf::Every(Streams::default())
    }
}

impl StreamsOf {
    /// The streams of one worker.
    pub fn of(&self, local_rank: u32) -> Streams {
        match self {
            StreamsOf::Every(streams) => *streams,
            StreamsOf::Each(by_rank) => by_rank.get(&local_rank).copied().unwrap_or_default(),
        }
    }

    /// Whether any stream of any worker is selected.
    pub fn any(&self) -> bool {
        match self {
            StreamsOf::Every(streams) => *streams != Streams::default(),
            StreamsOf::Each(by_rank) => by_rank.values().any(|streams| *streams != Streams::default()),
        }
    }
}

/// `3` means both streams of every worker. `0:3,15:1` means both streams of local rank 0 and stdout of 15. As PyTorch's
/// `Std.from_str`, which accepts only one digit for the rank.
impl std::str::FromStr for StreamsOf {
    type Err = StreamsError;

    fn from_str(text: &str) -> Result<StreamsOf, StreamsError> {
        if let Some(streams) = Streams::from_digit(text) {
            return Ok(StreamsOf::Every(streams));
        }
        let entry = |entry: &str| {
            let (rank, digit) = entry.split_once(':')?;
            let digits = !rank.is_empty() && rank.bytes().all(|byte| byte.is_ascii_digit());
            let rank = digits.then(|| rank.parse().ok())??;
            (rank <= HIGHEST_LOCAL_RANK).then_some((rank, Streams::from_digit(digit)?))
        };
        let by_rank: Option<BTreeMap<u32, Streams>> = text.split(',').map(entry).collect();
        by_rank.map(StreamsOf::Each).ok_or_else(|| StreamsError { text: text.to_owned() })
    }
}

/// A node has at most 65,535 workers.
const HIGHEST_LOCAL_RANK: u32 = 65_534;

/// The error of a text that selects no streams. Its message goes behind the name of the flag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamsError {
    /// The text.
    pub text: String,
}

impl fmt::Display for StreamsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = &self.text;
        write!(
            f,
            "is `{text}`, must be 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or such a digit for each local rank from 0 to \
             {HIGHEST_LOCAL_RANK}: 0:3,1:1"
        )
    }
}

impl std::error::Error for StreamsError {}

#[cfg(test)]
mod tests {
    use super::*;

    const OUT: Streams = Streams { stdout: true, stderr: false };
    const NONE: Streams = Streams { stdout: false, stderr: false };

    #[test]
    fn streams_are_parsed_as_pytorch_does_with_any_rank() {
        assert_eq!("3".parse(), Ok(StreamsOf::Every(Streams::ALL)));
        let some: StreamsOf = "0:3,15:1".parse().unwrap();
        assert_eq!([0, 1, 15].map(|rank| some.of(rank)), [Streams::ALL, NONE, OUT]);
        for wrong in ["", "4", "03", "0:4", "0:1,", "a:1", "+1:1", "0:", "1,2", "65535:1"] {
            let error = wrong.parse::<StreamsOf>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("is `{wrong}`, must be 0 (none)")), "{error}");
        }
    }
}
