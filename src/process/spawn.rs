//! Starting one worker: what its guard needs is prepared here, since the guard must not allocate.

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
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};
use rustix::process::{Pid, PidfdFlags, getpid, pidfd_open};

use super::guard::{self, Plan, pointers};
use super::room::{is_full, is_short};
use super::spec::{Input, Output, WorkerSpec};

/// A worker's guard, as the agent holds it.
#[derive(Debug)]
pub(super) struct Guarded {
    /// Orders go in, reports come out; closing it ends everything below the guard.
    pub control: OwnedFd,
    /// Readable once the guard has ended. A pidfd where the kernel has them; else a pipe, or nothing but the socket's end.
    pub end: Option<OwnedFd>,
    /// The guard, if it is this process's child, to be reaped.
    pub child: Option<Pid>,
}

/// A worker's streams before its start.
#[derive(Debug)]
pub(super) struct Opened {
    /// What becomes its standard input, output and error.
    pub stdio: [OwnedFd; 3],
    /// `/dev/null`.
    pub null: OwnedFd,
    /// What the agent copies from: stdout, stderr.
    pub readings: [Option<Reading>; 2],
}

/// What the agent reads a worker's stream from.
#[derive(Debug)]
pub(super) enum Reading {
    /// A pipe; what was asked to be in a file the agent writes.
    Pipe(OwnedFd),
    /// The file that the worker writes, and the number of the watch that tells of that.
    File(OwnedFd, i32),
}

/// Opens what the worker reads and writes. `watch` is an inotify instance, for files that the worker may write itself.
pub(super) fn open(spec: &WorkerSpec, watch: Option<&OwnedFd>) -> Result<Opened, StartError> {
    let failed = |source: Errno| StartError::new(spec.local_rank, Stage::Fork, source);
    let null = open_null().map_err(failed)?;
    let input = match spec.stdin {
        Input::Inherit => inherited(rustix::stdio::stdin(), &null),
        Input::Null => above_stdio(null.as_fd()),
    };
    let input = input.map_err(failed)?;
    let (output, output_read) = open_output(spec, &spec.stdout, rustix::stdio::stdout(), &null, watch)?;
    let (error, error_read) = open_output(spec, &spec.stderr, rustix::stdio::stderr(), &null, watch)?;
    Ok(Opened { stdio: [input, output, error], null, readings: [output_read, error_read] })
}

/// A template's streams: `socket` is its standard input, and what it prints goes to this process's standard error.
pub(super) fn open_template(socket: OwnedFd) -> Result<Opened, Errno> {
    let null = open_null()?;
    let error = || inherited(rustix::stdio::stderr(), &null);
    Ok(Opened { stdio: [lifted(socket)?, error()?, error()?], null, readings: [None, None] })
}

/// Where a worker's start failed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stage {
    /// Forking, or something it needs: too many processes, descriptors, or too little memory.
    Fork,
    /// Opening the file that a stream goes to.
    Stream(PathBuf),
    /// Changing to the working folder.
    Folder(PathBuf),
    /// Executing the program, or the wrapper before it.
    Execute(OsString),
    /// A system call that starting or supervising a worker needs.
    Call(&'static str),
}

/// Why a worker could not be started. Nothing of its group is left running.
#[derive(Debug)]
pub struct StartError {
    /// Which worker.
    pub local_rank: u32,
    /// What failed.
    pub stage: Stage,
    /// What the system said.
    pub source: io::Error,
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StartError { local_rank, stage, source } = self;
        write!(f, "worker of local rank {local_rank} could not be started: ")?;
        match stage {
            Stage::Fork => write!(f, "no process for it: {source}"),
            Stage::Stream(path) => write!(f, "cannot open `{}` for its output: {source}", path.display()),
            Stage::Folder(path) => write!(f, "cannot change to folder `{}`: {source}", path.display()),
            Stage::Execute(program) => write!(f, "cannot execute `{}`: {source}", program.display()),
            Stage::Call(call) => write!(f, "no process for it: the system call `{call}` has failed: {source}"),
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

    /// What the guard reported.
    pub(super) fn reported(spec: &WorkerSpec, step: i32, errno: i32) -> StartError {
        let stage = match (step, &spec.cwd) {
            (guard::step::FOLDER, Some(folder)) => Stage::Folder(folder.clone()),
            (guard::step::EXECUTE, _) => Stage::Execute(spec.command()[0].clone()),
            (guard::step::CLONE, _) => Stage::Call("clone"),
            (guard::step::SUBREAPER, _) => Stage::Call("prctl(PR_SET_CHILD_SUBREAPER)"),
            (guard::step::SIGNALFD, _) => Stage::Call("signalfd4"),
            (guard::step::PIPE, _) => Stage::Call("pipe2"),
            _ => Stage::Fork,
        };
        StartError::new(spec.local_rank, stage, io::Error::from_raw_os_error(errno))
    }
}

/// Forks the worker's guard, which starts the worker; whether that succeeded is the guard's first report.
///
/// Takes about as long as the process's page tables take to copy: 0.1 ms, or a few ms where PyTorch is loaded.
pub(super) fn spawn(spec: &WorkerSpec, opened: &Opened) -> Result<Guarded, StartError> {
    spawn_with(spec, opened, false)
}

/// Forks the guard of a template: whatever is orphaned when the template ends lives on.
pub(super) fn spawn_template(spec: &WorkerSpec, opened: &Opened) -> Result<Guarded, StartError> {
    spawn_with(spec, opened, true)
}

fn spawn_with(spec: &WorkerSpec, opened: &Opened, keeps: bool) -> Result<Guarded, StartError> {
    let failed = |call, source: Errno| StartError::new(spec.local_rank, Stage::Call(call), source);
    let invalid = |_| StartError::reported(spec, guard::step::EXECUTE, Errno::INVAL.raw_os_error());
    let strings = Strings::prepare(spec).map_err(invalid)?;
    let (argv, envp) = (pointers(&strings.argv), pointers(&strings.envp));
    let mut candidates = pointers(&strings.candidates);
    candidates.pop();

    let Ties { control, theirs, agent } = Ties::new().map_err(|errno| failed("socketpair", errno))?;

    let plan = Plan {
        control: theirs.as_raw_fd(),
        agent: agent.as_ref().map_or(-1, AsRawFd::as_raw_fd),
        agent_pid: getpid().as_raw_nonzero().get(),
        stdio: opened.stdio.each_ref().map(AsRawFd::as_raw_fd),
        null: opened.null.as_raw_fd(),
        candidates: &candidates,
        argv: &argv,
        envp: &envp,
        cwd: strings.cwd.as_ref().map_or(std::ptr::null(), |folder| folder.as_ptr()),
        keeps,
    };
    let (pid, end) = guard::fork(&plan).map_err(|errno| failed("clone", Errno::from_raw_os_error(errno)))?;
    Ok(Guarded { control, end, child: Pid::from_raw(pid) })
}

/// What ties a guard to the agent. No descriptor is below 3.
pub(super) struct Ties {
    /// The agent's end of their socket.
    pub control: OwnedFd,
    /// The guard's end.
    pub theirs: OwnedFd,
    /// A pidfd of the agent. `None` where there are none: kernels before 5.3, gVisor, filters of system calls that are older
    /// than they.
    pub agent: Option<OwnedFd>,
}

impl Ties {
    pub fn new() -> Result<Ties, Errno> {
        let agent = pidfd_open(getpid(), PidfdFlags::empty()).and_then(lifted).ok();
        let (control, theirs) = message_socket()?;
        Ok(Ties { control, theirs: lifted(theirs)?, agent })
    }
}

/// Two ends of a socket whose messages stay whole.
pub(super) fn message_socket() -> Result<(OwnedFd, OwnedFd), Errno> {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

/// Receives a message from such a socket.
///
/// The kernel says `ECONNRESET` once, and *before* it hands out what the other end sent last, if that has closed with messages
/// unread. So `receive` is asked again: its next answers are those messages, and then the end. A kernel that says it a second
/// time (that of a sandbox, say) has no such messages.
pub(super) fn received<T>(mut receive: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    let mut was_reset = false;
    loop {
        match receive() {
            Err(Errno::INTR) => {}
            Err(Errno::CONNRESET) if !was_reset => was_reset = true,
            result => return result,
        }
    }
}

/// Command and environment as the kernel takes them.
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

/// The paths that a program's name may mean, as `execvp(3)` has it.
fn candidates(program: &OsStr, env: &BTreeMap<OsString, OsString>) -> Vec<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return vec![PathBuf::from(program)];
    }
    let path = env.get(OsStr::new("PATH")).map_or(OsStr::new("/bin:/usr/bin"), OsString::as_os_str);
    std::env::split_paths(path)
        .map(|folder| if folder.as_os_str().is_empty() { Path::new(".").join(program) } else { folder.join(program) })
        .collect()
}

/// What the worker writes to, and what the agent reads from if it copies.
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
            // The flag is the open file's: only our end keeps it.
            rustix::io::ioctl_fionbio(&write, false).map_err(failed)?;
            // Larger reads, fewer switches. Unprivileged processes may have less, which is no failure.
            let _ = fcntl_setpipe_size(&read, PIPE_BYTES);
            (lifted(write).map_err(failed)?, Some(Reading::Pipe(read)))
        }
    })
}

/// A file for the worker to write and for the agent to follow. `None` if it cannot be followed: it is a device, or the
/// user has no watches left. Nor is it followed where the worker would soon fail to write it, which the agent survives.
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

/// Holds what a worker writes while the agent is busy elsewhere. Larger ones leave the processor's cache.
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

/// A copy of the agent's own stream; `/dev/null` if it is closed.
fn inherited(fd: BorrowedFd<'_>, null: &OwnedFd) -> Result<OwnedFd, Errno> {
    match above_stdio(fd) {
        Err(Errno::BADF) => above_stdio(null.as_fd()),
        other => other,
    }
}

/// Puts `/dev/null` where a standard stream of this process is closed, as Rust's own programs do when they start. Else the next
/// socket that is opened takes its number, and workers inherit that as their stream.
///
/// # Errors
/// No descriptor is left.
pub fn fill_standard_streams() -> io::Result<()> {
    for fd in 0..3 {
        // SAFETY: a question about a number.
        if unsafe { libc::fcntl(fd, libc::F_GETFD) } == -1 {
            // The lowest that is free: this one.
            let null = OpenOptions::new().read(true).write(true).open("/dev/null")?;
            std::mem::forget(null);
        }
    }
    Ok(())
}

fn above_stdio(fd: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    fcntl_dupfd_cloexec(fd, 3)
}

/// The same above the standard streams, where a descriptor lands if the agent has closed those.
fn lifted(fd: OwnedFd) -> Result<OwnedFd, Errno> {
    if fd.as_raw_fd() > 2 { Ok(fd) } else { above_stdio(fd.as_fd()) }
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
