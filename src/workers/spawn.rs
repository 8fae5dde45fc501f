//! Starting one worker. Its guard must not allocate, so everything that the guard needs is prepared here.

use std::collections::BTreeMap;
use std::ffi::{CString, OsStr, OsString};
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::inotify;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};
use rustix::process::{Pid, PidfdFlags, Rlimit, getpid, pidfd_open};

use super::deadline::Deadline;
use super::guard;
use super::guard::plan::{Plan, cpu_set, pointers, step};
use super::room::{is_full, is_short};
use super::spec::{Input, Output, WorkerSpec};
use crate::open_files::limit_of_workers;
use crate::open_files::{above_stdio, lifted};

/// The agent's handle of a worker's guard.
#[derive(Debug)]
pub(crate) struct Guarded {
    /// Socket for orders and reports. Closing it ends everything below the guard.
    pub control: OwnedFd,
    /// Readable once the guard has ended: a pidfd, or a pipe where the kernel has no pidfds. `None`: only the socket's end shows it.
    pub end: Option<OwnedFd>,
    /// The guard's process id, if it is this process's child and has to be reaped.
    pub child: Option<Pid>,
}

/// A worker's streams before its start.
#[derive(Debug)]
pub(crate) struct Opened {
    /// The worker's standard input, output and error.
    pub stdio: [OwnedFd; 3],
    /// `/dev/null`.
    pub null: OwnedFd,
    /// What the agent copies: stdout, stderr.
    pub readings: [Option<Reading>; 2],
}

/// The source from which the agent reads a worker's stream.
#[derive(Debug)]
pub(crate) enum Reading {
    /// A pipe. If the stream also goes to a file, the agent writes it.
    Pipe(OwnedFd),
    /// The file that the worker writes, and the inotify watch on it.
    File(OwnedFd, i32),
}

/// Opens the worker's streams. `watch` is an inotify instance, for files that the worker may write itself. `shares_pipe`: standard output
/// goes where standard error goes.
pub(super) fn open(spec: &WorkerSpec, watch: Option<&OwnedFd>, shares_pipe: bool) -> Result<Opened, StartError> {
    let failed = |source: Errno| StartError::new(spec.local_rank, Stage::Fork, source);
    let null = open_null().map_err(failed)?;
    let input = match spec.stdin {
        Input::Inherit => inherited(rustix::stdio::stdin(), &null),
        Input::Null => above_stdio(null.as_fd()),
    };
    let input = input.map_err(failed)?;
    let (error, error_read) = open_output(spec, &spec.stderr, rustix::stdio::stderr(), &null, watch)?;
    let (output, output_read) = match shares_pipe {
        true => (above_stdio(error.as_fd()).map_err(failed)?, None),
        false => open_output(spec, &spec.stdout, rustix::stdio::stdout(), &null, watch)?,
    };
    Ok(Opened { stdio: [input, output, error], null, readings: [output_read, error_read] })
}

/// Opens a fork server's streams. `socket` is its standard input. What it prints goes to this process's standard error.
pub(crate) fn open_fork_server(socket: OwnedFd) -> Result<Opened, Errno> {
    let null = open_null()?;
    let error = || inherited(rustix::stdio::stderr(), &null);
    Ok(Opened { stdio: [lifted(socket)?, error()?, error()?], null, readings: [None, None] })
}

/// The stage at which a worker's start failed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stage {
    /// Forking, or a resource that it needs: processes, descriptors, memory.
    Fork,
    /// Opening the file that a stream goes to.
    Stream(PathBuf),
    /// Changing to the working folder.
    Folder(PathBuf),
    /// Executing the program.
    Execute(OsString),
    /// A system call that starting or supervising a worker needs.
    Call(&'static str),
}

/// Why a worker could not be started. No worker of its group is left running.
#[derive(Debug)]
pub struct StartError {
    /// Which worker.
    pub local_rank: u32,
    /// The stage that failed.
    pub stage: Stage,
    /// The system's error.
    pub source: io::Error,
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StartError { local_rank, stage, source } = self;
        write!(f, "worker of local rank {local_rank} could not be started: ")?;
        match stage {
            Stage::Fork => write!(f, "cannot fork a process for it: {source}"),
            Stage::Stream(path) => write!(f, "cannot open `{}` for its output: {source}", path.display()),
            Stage::Folder(path) => write!(f, "cannot change to directory `{}`: {source}", path.display()),
            Stage::Execute(program) => write!(f, "cannot execute `{}`: {source}", program.display()),
            Stage::Call(call) => write!(f, "the system call `{call}` has failed: {source}"),
        }
    }
}

impl std::error::Error for StartError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

impl StartError {
    pub(super) fn new(local_rank: u32, stage: Stage, source: impl Into<io::Error>) -> StartError {
        StartError { local_rank, stage, source: source.into() }
    }

    /// From the guard's report.
    pub(super) fn reported(spec: &WorkerSpec, step: i32, errno: i32) -> StartError {
        let stage = match (step, &spec.cwd) {
            (step::FOLDER, Some(folder)) => Stage::Folder(folder.clone()),
            (step::EXECUTE, _) => Stage::Execute(spec.command()[0].clone()),
            (step::CLONE, _) => Stage::Call("clone"),
            (step::SUBREAPER, _) => Stage::Call("prctl(PR_SET_CHILD_SUBREAPER)"),
            (step::SIGNALFD, _) => Stage::Call("signalfd4"),
            (step::PIPE, _) => Stage::Call("pipe2"),
            (step::AFFINITY, _) => Stage::Call("sched_setaffinity"),
            _ => Stage::Fork,
        };
        StartError::new(spec.local_rank, stage, io::Error::from_raw_os_error(errno))
    }
}

/// Forks the worker's guard, which starts the worker. The guard's first report says whether that succeeded.
///
/// Takes about as long as copying this process's page tables: 0.1 ms, or a few ms where PyTorch is loaded.
pub(super) fn spawn(spec: &WorkerSpec, opened: &Opened, deadline: Option<&Deadline>) -> Result<Guarded, StartError> {
    spawn_with(spec, opened, deadline, false)
}

/// Forks the guard of a fork server. Processes that the server leaves behind live on.
pub(crate) fn spawn_fork_server(spec: &WorkerSpec, opened: &Opened) -> Result<Guarded, StartError> {
    spawn_with(spec, opened, None, true)
}

fn spawn_with(
    spec: &WorkerSpec,
    opened: &Opened,
    deadline: Option<&Deadline>,
    keeps: bool,
) -> Result<Guarded, StartError> {
    let failed = |call, source: Errno| StartError::new(spec.local_rank, Stage::Call(call), source);
    let invalid = |_| StartError::reported(spec, step::EXECUTE, Errno::INVAL.raw_os_error());
    let strings = Strings::prepare(spec).map_err(invalid)?;
    let (argv, envp) = (pointers(&strings.argv), pointers(&strings.envp));
    let mut candidates = pointers(&strings.candidates);
    candidates.pop();

    let Ties { control, theirs, agent } = Ties::new().map_err(|errno| failed("socketpair", errno))?;

    let plan = Plan {
        control: theirs.as_raw_fd(),
        agent: agent.as_ref().map_or(-1, AsRawFd::as_raw_fd),
        deadline: deadline.map_or(-1, Deadline::raw),
        agent_pid: getpid().as_raw_nonzero().get(),
        stdio: opened.stdio.each_ref().map(AsRawFd::as_raw_fd),
        null: opened.null.as_raw_fd(),
        candidates: &candidates,
        argv: &argv,
        envp: &envp,
        open_files: limit_of_workers().map(|Rlimit { current, maximum }| {
            let value = |limit: Option<u64>| limit.unwrap_or(libc::RLIM_INFINITY);
            libc::rlimit { rlim_cur: value(current), rlim_max: value(maximum) }
        }),
        cpus: cpu_set(&spec.cpus),
        cwd: strings.cwd.as_ref().map_or(std::ptr::null(), |folder| folder.as_ptr()),
        keeps,
    };
    let (pid, end) = guard::fork(&plan).map_err(|errno| failed("clone", Errno::from_raw_os_error(errno)))?;
    Ok(Guarded { control, end, child: Pid::from_raw(pid) })
}

/// The descriptors that connect a guard to the agent. None is below 3.
pub(crate) struct Ties {
    /// The agent's end of the socket.
    pub control: OwnedFd,
    /// The guard's end of the socket.
    pub theirs: OwnedFd,
    /// A pidfd of the agent. `None` where there are none: kernels before 5.3, gVisor, seccomp filters older than pidfds.
    pub agent: Option<OwnedFd>,
}

impl Ties {
    pub fn new() -> Result<Ties, Errno> {
        let agent = pidfd_open(getpid(), PidfdFlags::empty()).and_then(lifted).ok();
        let (control, theirs) = message_socket()?;
        Ok(Ties { control, theirs: lifted(theirs)?, agent })
    }
}

/// Both ends of a socket that preserves message boundaries.
pub(crate) fn message_socket() -> Result<(OwnedFd, OwnedFd), Errno> {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

/// Receives a message from such a socket.
///
/// If the other end closed with messages unread, the kernel returns `ECONNRESET` once, and *before* the last messages that the
/// other end sent. So `receive` is called again: it then returns those messages, and then the end. A kernel that returns the
/// error a second time (that of a sandbox, say) has no such messages.
pub(crate) fn received<T>(mut receive: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    let mut was_reset = false;
    loop {
        match receive() {
            Err(Errno::INTR) => {}
            Err(Errno::CONNRESET) if !was_reset => was_reset = true,
            result => return result,
        }
    }
}

/// Command and environment as C strings.
struct Strings {
    argv: Vec<CString>,
    envp: Vec<CString>,
    candidates: Vec<CString>,
    cwd: Option<CString>,
}

impl Strings {
    fn prepare(spec: &WorkerSpec) -> Result<Strings, std::ffi::NulError> {
        let command = spec.command();
        let argv = command.iter().map(|text| CString::new(text.as_bytes())).collect::<Result<_, _>>()?;
        let variable =
            |(name, value): (&OsString, &OsString)| CString::new([name.as_bytes(), b"=", value.as_bytes()].concat());
        let envp = spec.env.iter().map(variable).collect::<Result<_, _>>()?;
        let candidates =
            candidates(command[0], &spec.env).into_iter().map(|path| CString::new(path.into_os_string().as_bytes()));
        let cwd = spec.cwd.as_ref().map(|folder| CString::new(folder.as_os_str().as_bytes())).transpose()?;
        Ok(Strings { argv, envp, candidates: candidates.collect::<Result<_, _>>()?, cwd })
    }
}

/// The paths that a program's name may mean, by the rules of `execvp(3)`.
fn candidates(program: &OsStr, env: &BTreeMap<OsString, OsString>) -> Vec<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return vec![PathBuf::from(program)];
    }
    let path = env.get(OsStr::new("PATH")).map_or(OsStr::new("/bin:/usr/bin"), OsString::as_os_str);
    std::env::split_paths(path)
        .map(|folder| if folder.as_os_str().is_empty() { Path::new(".").join(program) } else { folder.join(program) })
        .collect()
}

/// Opens the end that the worker writes to, and the source that the agent reads if it copies.
fn open_output(
    spec: &WorkerSpec,
    output: &Output,
    inherit: BorrowedFd<'_>,
    null: &OwnedFd,
    watch: Option<&OwnedFd>,
) -> Result<(OwnedFd, Option<Reading>), StartError> {
    let failed = |source: Errno| StartError::new(spec.local_rank, Stage::Fork, source);
    Ok(match output {
        Output::Inherit => (inherited(inherit, null).map_err(failed)?, None),
        Output::Null => (above_stdio(null.as_fd()).map_err(failed)?, None),
        Output::File(path) => {
            let file =
                create(path).map_err(|error| StartError::new(spec.local_rank, Stage::Stream(path.clone()), error))?;
            (lifted(file.into()).map_err(failed)?, None)
        }
        Output::Copied(copies) => {
            if let (Some(path), Some(watch)) = (&copies.file, watch) {
                let opened = watched(path, watch);
                let error = |error| StartError::new(spec.local_rank, Stage::Stream(path.clone()), error);
                if let Some((write, reading)) = opened.map_err(error)? {
                    return Ok((write, Some(reading)));
                }
            }
            let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).map_err(failed)?;
            // The flag belongs to the open file description: only our end has it.
            rustix::io::ioctl_fionbio(&write, false).map_err(failed)?;
            // Larger reads and fewer context switches. Unprivileged processes may get a smaller pipe, which is no failure.
            let _ = fcntl_setpipe_size(&read, PIPE_BYTES);
            (lifted(write).map_err(failed)?, Some(Reading::Pipe(read)))
        }
    })
}

/// Opens a file that the worker writes and the agent follows. `None` if it cannot be followed: it is a device, or the user has
/// no inotify watches left. `None` too if the disk is nearly full: the agent can go on without the file, the worker could not.
fn watched(path: &Path, watch: &OwnedFd) -> io::Result<Option<(OwnedFd, Reading)>> {
    let write = match create(path) {
        Err(error) if is_full(&error) => return Ok(None),
        created => created?,
    };
    if !write.metadata()?.is_file() || path.parent().is_some_and(is_short) {
        return Ok(None);
    }
    let read = File::open(path)?;
    Ok(match inotify::add_watch(watch, path, inotify::WatchFlags::MODIFY) {
        Ok(number) => Some((lifted(write.into())?, Reading::File(read.into(), number))),
        Err(error) => {
            tracing::debug!(path = %path.display(), %error, "log file cannot be watched; its worker writes into a pipe");
            None
        }
    })
}

/// Size of a pipe, which holds what a worker writes while the agent is busy. A larger one would not fit the processor's cache.
pub(super) const PIPE_BYTES: usize = 256 << 10;

/// Opens an empty file for appending, so that two streams may share one. Makes its folder.
pub(super) fn create(path: &Path) -> io::Result<File> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    OpenOptions::new().write(true).create(true).truncate(true).custom_flags(libc::O_APPEND).open(path)
}

fn open_null() -> Result<OwnedFd, Errno> {
    use rustix::fs::{Mode, OFlags};
    rustix::fs::open(c"/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).and_then(lifted)
}

/// Duplicates the agent's own stream, or `/dev/null` if that is closed.
fn inherited(fd: BorrowedFd<'_>, null: &OwnedFd) -> Result<OwnedFd, Errno> {
    match above_stdio(fd) {
        Err(Errno::BADF) => above_stdio(null.as_fd()),
        other => other,
    }
}

/// Opens `/dev/null` for each closed standard stream of this process, as Rust's own programs do when they start. Otherwise the
/// next socket gets that number, and workers inherit it as their stream.
///
/// # Errors
/// No descriptor is left.
pub fn fill_standard_streams() -> io::Result<()> {
    for fd in 0..3 {
        // SAFETY: only queries a descriptor.
        if unsafe { libc::fcntl(fd, libc::F_GETFD) } == -1 {
            // The kernel returns the lowest free number: this one.
            let null = OpenOptions::new().read(true).write(true).open("/dev/null")?;
            std::mem::forget(null);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_that_says_again_and_again_that_it_was_reset_has_ended() {
        let mut answers = [Err(Errno::INTR), Err(Errno::CONNRESET), Ok(7)].into_iter();
        assert_eq!(received(|| answers.next().unwrap()), Ok(7));
        let mut asked = 0;
        let result: Result<(), Errno> = received(|| {
            asked += 1;
            assert!(asked < 10, "it is asked for ever");
            Err(Errno::CONNRESET)
        });
        assert_eq!(result, Err(Errno::CONNRESET));
    }

    #[test]
    fn a_program_is_looked_for_in_the_workers_own_path() {
        let env = |path: &str| BTreeMap::from([("PATH".into(), path.into())]);
        let paths = |program: &str, path: &str| candidates(OsStr::new(program), &env(path));
        assert_eq!(paths("python", "/a::/b"), ["/a/python", "./python", "/b/python"].map(PathBuf::from));
        assert_eq!(paths("./python", "/a"), [PathBuf::from("./python")]);
        assert_eq!(candidates(OsStr::new("ls"), &BTreeMap::new()), ["/bin/ls", "/usr/bin/ls"].map(PathBuf::from));
    }
}
