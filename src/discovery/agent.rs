//! One agent: the process through which it runs (`ssh`, or the agent itself on the driver's machine), and its three streams.
//!
//! Its standard input carries the job, its variables included, and then requests. Command lines would show variables to everybody on
//! a host. The end of the input asks the agent to leave, so it notices when this process dies or the connection is lost.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fmt;
use std::io;
use std::iter;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes, BytesMut};
use parking_lot::Mutex;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};

use super::endings::Ending;
use super::hosts::Host;
use super::machine::{AgentId, Request};
use super::output::{Output, Stream};
use super::programs::{STARTED_AT_ONCE, start};
use super::reports::{Report, ReportFilter};
use crate::clock::until;
use crate::net::local::{is_local, is_own_name};
use crate::wire::text::tidy;
use crate::workers::{Lines, OpenLine, Part, Prefix, append_open, reaped};

/// How agents are started.
#[derive(Clone)]
pub struct Launching {
    /// `ssh` and its options. Never empty.
    pub ssh: Vec<OsString>,
    /// The Python on other hosts.
    pub remote_python: String,
    /// The Python on this machine.
    pub python: OsString,
    /// What both are given: the agent's program. Never empty.
    pub program: Vec<String>,
    /// The job: one line, which all agents get, and which the driver does not parse.
    pub job: Bytes,
    /// The port of the coordinator.
    pub port: u16,
}

/// Without the job, which holds its token and the user's variables.
impl fmt::Debug for Launching {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ssh, remote_python, python, program, job: _, port } = self;
        f.debug_struct("Launching")
            .field("ssh", ssh)
            .field("remote_python", remote_python)
            .field("python", python)
            .field("program", program)
            .field("port", port)
            .finish_non_exhaustive()
    }
}

/// Options of `ssh` after the user's own, which win. Nobody is there to be asked, and a silent connection ends after 45 s.
const SSH_OPTIONS: [&str; 7] =
    ["-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3"];

impl Launching {
    /// The command line that starts an agent on this host.
    pub fn command(&self, host: &Host) -> Vec<OsString> {
        if is_here(host) {
            return iter::once(&self.python).cloned().chain(self.program.iter().map(OsString::from)).collect();
        }
        let words = iter::once(&self.remote_python).chain(&self.program).map(|word| quoted(word));
        let remote = format!("exec {}", words.collect::<Vec<_>>().join(" "));
        let more = SSH_OPTIONS.iter().map(OsString::from).chain([OsString::from(&host.name), remote.into()]);
        self.ssh.iter().cloned().chain(more).collect()
    }
}

/// Whether this is the driver's own machine, where no `ssh` is needed: `localhost`, this machine's name, or one of its addresses.
pub(super) fn is_here(host: &Host) -> bool {
    let name = &host.name;
    name == "localhost" || name.parse().map_or_else(|_| is_own_name(name), is_local)
}

/// A word of a shell's command line.
fn quoted(word: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-+:@%,".contains(&byte);
    if !word.is_empty() && word.bytes().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// News of an agent.
#[derive(Debug)]
pub(super) enum News {
    /// It runs.
    Up { version: String },
    /// It can do what its command line says.
    Accepted,
    /// It has ended, or could not be started.
    Ended(Ending),
}

/// An order to an agent's connection.
#[derive(Debug)]
pub(super) enum AgentCommand {
    /// Pass this on.
    Send(Request),
    /// End the connection.
    Kill,
}

/// What belongs to one agent while it lives.
pub(super) struct Connection {
    pub(super) agent: AgentId,
    pub(super) host: Host,
    pub(super) command: Vec<OsString>,
    /// The first lines of its standard input.
    pub(super) first: BytesMut,
    pub(super) token: String,
    pub(super) commands: mpsc::UnboundedReceiver<AgentCommand>,
    pub(super) news: mpsc::UnboundedSender<(AgentId, News)>,
    pub(super) output: Output,
}

/// State that the tasks of one connection share.
#[derive(Debug, Default)]
struct Shared {
    up: bool,
    /// Lines that the process wrote to standard error before the agent was up. They show why an agent did not start.
    held: VecDeque<Vec<u8>>,
    outcome: Option<String>,
    /// Notified when there is an outcome.
    reported: Arc<Notify>,
}

/// How long `ssh` may live on after its agent has reported its end: first until that is logged, and then until it is killed. It waits for
/// processes on the host that hold its streams.
const LIVES_ON: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(10)];

/// Lines of standard error that are kept until the agent is up.
const HELD_LINES: usize = 20;
/// Bytes of each of them.
const HELD_BYTES: usize = 400;
/// How long streams may stay open after the process has ended: a background process of `ssh` may hold them.
const DRAIN: Duration = Duration::from_secs(5);
const READ_BYTES: usize = 64 << 10;

/// Bounds the descriptors that starts take.
static STARTS: Semaphore = Semaphore::const_new(STARTED_AT_ONCE);

impl Connection {
    /// Starts the process, and serves it until it has ended. The last news is its end.
    pub(super) async fn serve(mut self) {
        let command = std::mem::take(&mut self.command);
        let started = {
            let _permit = STARTS.acquire().await;
            spawn_blocking(move || spawn(&command)).await.map_err(io::Error::other).and_then(|started| started)
        };
        let ending = match set_up(started).await {
            Ok(process) => self.run(process).await,
            Err(error) => Ending { last_lines: vec![error.to_string()], ..Ending::default() },
        };
        let ending = Ending { is_here: is_here(&self.host), ..ending };
        // The driver may have ended.
        let _ = self.news.send((self.agent, News::Ended(ending)));
    }

    async fn run(&mut self, process: Process) -> Ending {
        let Process { child, end, stdin, stdout, stderr } = process;
        let shared = Arc::new(Mutex::new(Shared::default()));
        let prefix = Prefix::new(format!("[{}] ", self.host.name).into_bytes(), self.agent.0);
        let reports = ReportFilter::new(&self.token);
        let news = (self.agent, self.news.clone());
        let out = read_stdout(stdout, reports, prefix.clone(), shared.clone(), self.output.clone(), news);
        let err = read_stderr(stderr, prefix, shared.clone(), self.output.clone(), self.agent);
        let mut reading = tokio::spawn(async move { tokio::join!(out, err) });
        let pid = pid_of(&child);
        let reported = Arc::clone(&shared.lock().reported);
        let (status, killed) = self.write_until(ended(child, end), stdin, pid, reported).await;
        if timeout(DRAIN, &mut reading).await.is_err() {
            reading.abort();
        }
        let mut shared = shared.lock();
        let held = if shared.up { VecDeque::new() } else { std::mem::take(&mut shared.held) };
        let mut last_lines: Vec<String> =
            held.iter().map(|line| readable(line)).filter(|line| !line.is_empty()).collect();
        let (code, signal) = match status {
            // What the agent has reported counts.
            Ok(_) if killed => (Some(0), None),
            Ok(status) => (status.code(), status.signal()),
            Err(error) => {
                last_lines.push(error.to_string());
                (None, None)
            }
        };
        Ending { code, signal, outcome: shared.outcome.take(), last_lines, ..Ending::default() }
    }

    /// Writes to the agent, and carries out commands, until the process has ended. Returns how, and whether it was killed because it lived on
    /// after its agent.
    async fn write_until(
        &mut self,
        ended: impl Future<Output = io::Result<ExitStatus>>,
        stdin: pipe::Sender,
        pid: Option<Pid>,
        reported: Arc<Notify>,
    ) -> (io::Result<ExitStatus>, bool) {
        let mut ended = std::pin::pin!(ended);
        let mut lives_on = std::pin::pin!(lives_on(self.host.clone(), pid, reported));
        let mut stdin = Some(stdin);
        let mut waiting = std::mem::take(&mut self.first);
        loop {
            tokio::select! {
                status = &mut ended => return (status, false),
                () = &mut lives_on => {
                    kill(pid);
                    return (ended.await, true);
                }
                written = write(&mut stdin, &waiting) => match written {
                    Ok(count) => waiting.advance(count),
                    // It does not read any longer, and is about to end.
                    Err(_) => stdin = None,
                },
                command = self.commands.recv() => match command {
                    Some(AgentCommand::Send(Request::Leave)) => waiting.extend_from_slice(b"leave\n"),
                    Some(AgentCommand::Send(Request::Signal(number))) => waiting.extend_from_slice(format!("signal {number}\n").as_bytes()),
                    // Without a driver as without a connection.
                    Some(AgentCommand::Kill) | None => {
                        drop(stdin.take());
                        kill(pid);
                        return (ended.await, false);
                    }
                },
            }
        }
    }
}

/// Wait until the process has lived on for too long after its agent's report. It is logged before.
async fn lives_on(host: Host, pid: Option<Pid>, reported: Arc<Notify>) {
    reported.notified().await;
    let [ask, kill] = LIVES_ON;
    sleep(ask).await;
    let pid = pid.map_or_else(String::new, |pid| format!(" (pid {})", pid.as_raw_nonzero()));
    let (what, name) = (if is_here(&host) { "its process" } else { "ssh to it" }, host.name);
    tracing::warn!(
        target: "elastic_rs::discovery",
        "the agent on {name} has ended, and {what}{pid} still runs; something there may hold its output. It is killed in {kill:.0?}"
    );
    sleep(kill).await;
}

async fn write(stdin: &mut Option<pipe::Sender>, bytes: &[u8]) -> io::Result<usize> {
    match stdin {
        Some(stdin) if !bytes.is_empty() => stdin.write(bytes).await,
        _ => std::future::pending().await,
    }
}

/// Reads the agent's standard output.
async fn read_stdout(
    mut stdout: pipe::Receiver,
    reports: ReportFilter,
    prefix: Prefix,
    shared: Arc<Mutex<Shared>>,
    output: Output,
    (agent, news): (AgentId, mpsc::UnboundedSender<(AgentId, News)>),
) {
    let (shown, on_stderr) = (output.prefix(&prefix, Stream::Stdout), output.prefix(&prefix, Stream::Stderr));
    let (own, stderr) = (whose(agent, Stream::Stdout), whose(agent, Stream::Stderr));
    let mut lines = Lines::default();
    let mut buffer = vec![0; READ_BYTES];
    loop {
        let Some(count) = read_until(&mut stdout, &mut buffer, lines.show_at()).await else {
            let (text, continues) = lines.show();
            output.write(Stream::Stdout, |piece, open| append_open(text, continues, piece, shown, own, open)).await;
            continue;
        };
        let (mut kept, mut found) = (Vec::new(), Vec::new());
        let emit = |part: Part<'_>| match part {
            Part::Line(line, before) | Part::Unended(line, before) => match reports.split(line) {
                None => kept.push(Kept::from(part)),
                Some((text, report)) => {
                    found.extend(report);
                    if !text.is_empty() {
                        kept.push(Part::Unended(text, before.min(text.len())).into());
                    }
                }
            },
            Part::Newline => kept.push(part.into()),
        };
        if count == 0 {
            lines.finish(emit)
        } else {
            lines.feed(&buffer[..count], emit)
        }
        for report in found {
            match report {
                Report::Up { version } => {
                    let held = {
                        let mut shared = shared.lock();
                        shared.up = true;
                        std::mem::take(&mut shared.held)
                    };
                    let compose = |piece: &mut Vec<u8>, open: &mut OpenLine| {
                        held.iter().for_each(|line| Part::Line(line, 0).append_to(piece, on_stderr, stderr, open));
                    };
                    output.write(Stream::Stderr, compose).await;
                    let _ = news.send((agent, News::Up { version }));
                }
                Report::Accepted => {
                    let _ = news.send((agent, News::Accepted));
                }
                Report::Ended { outcome } => {
                    let mut shared = shared.lock();
                    shared.outcome = Some(outcome);
                    shared.reported.notify_one();
                }
            }
        }
        // After the reports: a console that nobody reads must not delay them.
        let compose = |piece: &mut Vec<u8>, open: &mut OpenLine| {
            kept.iter().for_each(|part| part.as_part().append_to(piece, shown, own, open));
        };
        output.write(Stream::Stdout, compose).await;
        // The beginning of a report is none of the workers' output.
        if !reports.may_begin(lines.unshown()) {
            lines.written(Instant::now());
        }
        if count == 0 {
            return;
        }
    }
}

/// A part of a stream that waits until the console takes it.
enum Kept {
    Line(Vec<u8>, usize),
    Unended(Vec<u8>, usize),
    Newline,
}

impl From<Part<'_>> for Kept {
    fn from(part: Part<'_>) -> Self {
        match part {
            Part::Line(line, shown) => Self::Line(line.to_vec(), shown),
            Part::Unended(line, shown) => Self::Unended(line.to_vec(), shown),
            Part::Newline => Self::Newline,
        }
    }
}

impl Kept {
    fn as_part(&self) -> Part<'_> {
        match self {
            Self::Line(line, shown) => Part::Line(line, *shown),
            Self::Unended(line, shown) => Part::Unended(line, *shown),
            Self::Newline => Part::Newline,
        }
    }
}

/// The number of an agent's stream among all.
fn whose(agent: AgentId, stream: Stream) -> u64 {
    agent.0 * 2 + stream as u64
}

/// Reads once; 0 at the end. `None`: there was nothing to read until text that waits for the end of its line is to be shown.
async fn read_until(from: &mut pipe::Receiver, buffer: &mut [u8], show_at: Option<Instant>) -> Option<usize> {
    tokio::select! {
        biased;
        read = from.read(buffer) => Some(read.unwrap_or(0)),
        () = until(show_at) => None,
    }
}

/// Reads the agent's standard error, and that of `ssh`.
async fn read_stderr(
    mut stderr: pipe::Receiver,
    prefix: Prefix,
    shared: Arc<Mutex<Shared>>,
    output: Output,
    agent: AgentId,
) {
    let (shown, own) = (output.prefix(&prefix, Stream::Stderr), whose(agent, Stream::Stderr));
    let mut lines = Lines::default();
    let mut buffer = vec![0; READ_BYTES];
    loop {
        let Some(count) = read_until(&mut stderr, &mut buffer, lines.show_at()).await else {
            let (text, continues) = lines.show();
            output.write(Stream::Stderr, |piece, open| append_open(text, continues, piece, shown, own, open)).await;
            continue;
        };
        let compose = |piece: &mut Vec<u8>, open: &mut OpenLine| {
            let mut shared = shared.lock();
            let emit = |part: Part<'_>| match part {
                Part::Line(line, _) | Part::Unended(line, _) if !shared.up => {
                    if shared.held.len() == HELD_LINES {
                        shared.held.pop_front();
                    }
                    let mut line = line[..line.len().min(HELD_BYTES)].trim_ascii_end().to_vec();
                    line.push(b'\n');
                    shared.held.push_back(line);
                }
                part => part.append_to(piece, shown, own, open),
            };
            if count == 0 { lines.finish(emit) } else { lines.feed(&buffer[..count], emit) }
        };
        output.write(Stream::Stderr, compose).await;
        // Before the agent is up, lines are held.
        if shared.lock().up {
            lines.written(Instant::now());
        }
        if count == 0 {
            return;
        }
    }
}

fn readable(line: &[u8]) -> String {
    tidy(&String::from_utf8_lossy(line))
}

/// A process that runs.
struct Process {
    child: Child,
    /// Readable once it has ended. `None` where the kernel has no pidfds.
    end: Option<AsyncFd<OwnedFd>>,
    stdin: pipe::Sender,
    stdout: pipe::Receiver,
    stderr: pipe::Receiver,
}

/// A started process with its streams. If they cannot be set up, it is killed and reaped.
async fn set_up(started: io::Result<Child>) -> io::Result<Process> {
    let mut child = started?;
    match streams(&mut child) {
        Ok((end, stdin, stdout, stderr)) => Ok(Process { child, end, stdin, stdout, stderr }),
        Err(error) => {
            kill(pid_of(&child));
            let _ = ended(child, None).await;
            Err(error)
        }
    }
}

type Streams = (Option<AsyncFd<OwnedFd>>, pipe::Sender, pipe::Receiver, pipe::Receiver);

fn streams(child: &mut Child) -> io::Result<Streams> {
    let pidfd = pid_of(child).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    // SAFETY: an `OwnedFd` always refers to the same open descriptor until it is dropped.
    let end = pidfd.map(|fd| unsafe { AsyncFd::register(fd) }).transpose()?;
    let missing = || io::Error::other("a stream of the process is missing");
    let stdin = OwnedFd::from(child.stdin.take().ok_or_else(missing)?);
    let stdout = OwnedFd::from(child.stdout.take().ok_or_else(missing)?);
    let stderr = OwnedFd::from(child.stderr.take().ok_or_else(missing)?);
    Ok((
        end,
        pipe::Sender::from_owned_fd(stdin)?,
        pipe::Receiver::from_owned_fd(stdout)?,
        pipe::Receiver::from_owned_fd(stderr)?,
    ))
}

fn pid_of(child: &Child) -> Option<Pid> {
    i32::try_from(child.id()).ok().and_then(Pid::from_raw)
}

/// Kill a child that is not reaped yet, with its process group.
fn kill(pid: Option<Pid>) {
    if let Some(pid) = pid {
        let _ = kill_process_group(pid, Signal::KILL); // it may have ended
    }
}

fn spawn(command: &[OsString]) -> io::Result<Child> {
    start(command, Stdio::piped(), Stdio::piped(), Stdio::piped()).map_err(|error| {
        let name = command.first().map(|program| program.to_string_lossy()).unwrap_or_default();
        io::Error::new(error.kind(), format!("`{name}`: {error}"))
    })
}

async fn ended(mut child: Child, end: Option<AsyncFd<OwnedFd>>) -> io::Result<ExitStatus> {
    reaped(end.as_ref(), || child.try_wait()).await
}

#[cfg(test)]
mod tests;
