//! Copying the output of workers: one thread per group that reads it and writes consoles and filter files.
//!
//! If a stream also goes to a file, the worker writes the file itself, and this thread reads behind it, woken by inotify. A
//! stream that goes to no file comes through a pipe. `docs/decisions/0043-a-teed-stream-is-a-file-that-the-agent-reads-behind.md`
//! has the reasons.
//!
//! It is a thread because writing to a console can block. At rest it sleeps in `epoll_wait`.

use std::collections::BTreeMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::fs::inotify;
use rustix::io::Errno;
use tokio::sync::{oneshot, watch};
use tokio::time::timeout;

use super::consoles::Consoles;
use super::prefix::Prefix;
use super::spawn::{PIPE_BYTES, Stage, StartError};
use super::spec::Filter;
use crate::threads;

mod progress;
pub(super) mod read_end;
mod sink;
pub(super) mod stream;

pub use progress::ProgressLog;
use read_end::ReadEnd;
use sink::Filtered;
pub(crate) use sink::Sink;
use stream::{Copied, Source, Stream, Which};

/// What lines of a group are looked for: those for the filter files, and those that show progress.
#[derive(Debug, Clone, Default)]
pub struct FilterOptions {
    /// For lines of standard output.
    pub stdout: Option<Filter>,
    /// For lines of standard error.
    pub stderr: Option<Filter>,
    /// For lines of both.
    pub progress: Option<Arc<ProgressLog>>,
}

/// How a stream is shown.
pub(super) struct Shown {
    /// Whether the console gets it.
    pub console: bool,
    /// The beginning of its lines; `None` if it stays as it is.
    pub prefix: Option<Prefix>,
}

/// The thread's progress, for those who wait for it.
type Progress = Arc<AtomicU64>;

/// The handle of the thread. Dropping it ends the thread once it has read all output.
#[derive(Debug, Clone)]
pub(super) struct Logs {
    sender: mpsc::Sender<Request>,
    wake: Arc<OwnedFd>,
    progress: Progress,
    /// The pipes of standard errors, by local rank.
    stderr_pipes: Arc<BTreeMap<u32, Arc<ReadEnd>>>,
}

enum Request {
    /// Read all output, and close the worker's streams.
    Finish(u32, oneshot::Sender<()>, Writing),
    /// Where the output of this worker is shown from now on.
    Show(u32, [Shown; 2]),
}

impl Logs {
    /// Opens the files and starts the thread. `consoles` are for stdout and stderr. `watch` has the watches of all files among
    /// the sources.
    pub fn start(
        sources: Vec<Source>,
        watch: Option<OwnedFd>,
        filters: &FilterOptions,
        consoles: Consoles,
    ) -> Result<Logs, StartError> {
        let first = sources.first().map_or(0, |source| source.local_rank);
        let failed = |source: io::Error| StartError::new(first, Stage::Fork, source);
        let open_filter = |filter: &Option<Filter>| {
            let create = |filter: &Filter| {
                let error = |error| StartError::new(first, Stage::Stream(filter.file.clone()), error);
                Filtered::create(filter).map_err(error)
            };
            filter.as_ref().map(create).transpose()
        };
        let filtered = [open_filter(&filters.stdout)?, open_filter(&filters.stderr)?];
        let sinks = Sink::pair(consoles, filtered, filters.progress.as_ref());
        let streams = sources.into_iter().map(Stream::open).collect::<Result<Vec<_>, _>>()?;
        Logs::start_thread(streams, watch, sinks).map_err(failed)
    }

    fn start_thread(streams: Vec<Stream>, watch: Option<OwnedFd>, sinks: [Sink; 2]) -> io::Result<Logs> {
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let watch_for =
            |fd: &OwnedFd, what: u64| epoll::add(&poll, fd, epoll::EventData::new_u64(what), epoll::EventFlags::IN);
        let mut stderr_pipes = BTreeMap::new();
        watch_for(&wake, WAKE)?;
        if let Some(watch) = &watch {
            watch_for(watch, FILES)?;
        }
        for (index, stream) in streams.iter().enumerate() {
            if let Some(pipe) = stream.pipe() {
                pipe.with(|pipe| watch_for(pipe, index as u64)).transpose()?;
                if stream.which() == Which::Stderr {
                    stderr_pipes.insert(stream.local_rank(), pipe.clone());
                }
            }
        }
        let (sender, requests) = mpsc::channel();
        let progress = Progress::default();
        let copier = Copier {
            poll,
            wake: wake.clone(),
            watch,
            requests,
            // From now on the watch reports what a worker writes into its file.
            behind: vec![false; streams.len()],
            streams,
            sinks,
            progress: progress.clone(),
            buffer: vec![0; READ_BYTES],
        };
        threads::spawn("worker-logs".to_owned(), move || copier.run())?;
        Ok(Logs { sender, wake, progress, stderr_pipes: Arc::new(stderr_pipes) })
    }

    /// The pipe of a worker's standard error, if it has one.
    pub fn stderr_pipe(&self, local_rank: u32) -> Option<Arc<ReadEnd>> {
        self.stderr_pipes.get(&local_rank).cloned()
    }

    /// Waits until the worker's output is copied, and closes its streams, even if other processes have them open.
    ///
    /// False if nothing at all was copied for `patience`: the console is blocked. The work is still done once it is not.
    pub async fn finish(&self, local_rank: u32, patience: Duration) -> bool {
        let (reply, mut answer) = oneshot::channel();
        self.ask(Request::Finish(local_rank, reply, Writing::begin()));
        loop {
            let before = self.progress.load(Ordering::Relaxed);
            // An error means that the thread has ended, so nothing is left to copy.
            if timeout(patience, &mut answer).await.is_ok() {
                return true;
            }
            if self.progress.load(Ordering::Relaxed) == before {
                return false;
            }
        }
    }

    /// How standard output and standard error of a worker are shown from now on.
    pub fn show(&self, local_rank: u32, shown: [Shown; 2]) {
        self.ask(Request::Show(local_rank, shown));
    }

    fn ask(&self, request: Request) {
        // Fails only if the thread has ended. The caller notices that, because the answer is missing.
        let _ = self.sender.send(request);
        wake(&self.wake);
    }
}

impl Drop for Logs {
    fn drop(&mut self) {
        // The thread checks whether this was the last handle.
        let (sender, _) = mpsc::channel();
        drop(std::mem::replace(&mut self.sender, sender));
        wake(&self.wake);
    }
}

/// Of how many workers that have ended there is still output to write.
static WRITING: LazyLock<watch::Sender<usize>> = LazyLock::new(watch::Sender::default);

/// Counts a worker until its output is written. One that does not end is never counted.
struct Writing;

impl Writing {
    fn begin() -> Self {
        WRITING.send_modify(|count| *count += 1);
        Self
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        WRITING.send_modify(|count| *count -= 1);
    }
}

/// At the end of a job: waits until the consoles have taken what all workers have printed. That may be long: a pager that nobody moves on
/// takes nothing. A console that nobody has open any more is not waited for. May be dropped.
pub async fn written() {
    let mut writing = WRITING.subscribe();
    let mut written = pin!(writing.wait_for(|count| *count == 0));
    if timeout(BLOCKED_AFTER, &mut written).await.is_err() {
        tracing::warn!(
            "the workers have ended, and the console does not take the rest of their output (a pager that waits, Ctrl-S): waiting for \
             it; a signal ends the wait, and loses that output"
        );
        let _ = written.await;
    }
}

/// When it is logged that the end of the job waits for the console.
const BLOCKED_AFTER: Duration = Duration::from_secs(5);

fn wake(eventfd: &OwnedFd) {
    // EAGAIN: the thread is awake already.
    let _ = rustix::io::write(eventfd, &1_u64.to_ne_bytes());
}

const WAKE: u64 = u64::MAX;
const FILES: u64 = u64::MAX - 1;
/// Bytes read at once: the size of a pipe, so that a full pipe takes one read.
const READ_BYTES: usize = PIPE_BYTES;

struct Copier {
    poll: OwnedFd,
    wake: Arc<OwnedFd>,
    /// The inotify instance.
    watch: Option<OwnedFd>,
    requests: mpsc::Receiver<Request>,
    streams: Vec<Stream>,
    /// Streams whose files have more to read.
    behind: Vec<bool>,
    sinks: [Sink; 2],
    progress: Progress,
    buffer: Vec<u8>,
}

impl Copier {
    fn run(mut self) {
        let mut events = Vec::with_capacity(64);
        loop {
            events.clear();
            let limit = self.next_turn();
            match epoll::wait(&self.poll, rustix::buffer::spare_capacity(&mut events), limit.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    return tracing::error!(
                        %error,
                        "the output of workers is not copied to log files and console until the job is started again"
                    );
                }
            }
            // Streams that are not read in this turn have had nothing to read until now.
            let turn = Instant::now();
            let mut asked = false;
            for event in &events {
                match event.data.u64() {
                    WAKE => asked = true,
                    FILES => self.note_changes(),
                    index => self.copy(index as usize),
                }
            }
            for index in 0..self.behind.len() {
                if self.behind[index] {
                    self.copy(index);
                }
            }
            self.show_what_is_due(turn);
            if asked && !self.answer() {
                return self.finish_all();
            }
        }
    }

    /// How long to wait for an event at most: not at all if a file has more to read.
    fn next_turn(&self) -> Option<Timespec> {
        if self.behind.contains(&true) {
            return Some(Timespec { tv_sec: 0, tv_nsec: 0 });
        }
        let next = self.streams.iter().filter_map(Stream::next_show).min()?;
        Timespec::try_from(next.saturating_duration_since(Instant::now())).ok()
    }

    /// Shows text that has had no end of its line for a while.
    fn show_what_is_due(&mut self, now: Instant) {
        for stream in &mut self.streams {
            if stream.next_show().is_some_and(|at| at <= now) {
                stream.show(&mut self.sinks[stream.which() as usize]);
            }
        }
    }

    /// Reads once, so that each worker has its turn.
    fn copy(&mut self, index: usize) {
        let stream = &mut self.streams[index];
        let copied = stream.copy(&mut self.buffer, &mut self.sinks[stream.which() as usize]);
        self.progress.fetch_add(1, Ordering::Relaxed);
        // Less than a buffer: the watch reports anything that is written after this read.
        self.behind[index] = self.behind[index] && copied == Copied::Some(READ_BYTES);
        if copied == Copied::Ended {
            self.end(index);
        }
    }

    /// Reads the watch: which files have changed.
    fn note_changes(&mut self) {
        let Some(watch) = &self.watch else { return };
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut changes = inotify::Reader::new(watch, &mut buffer);
        // Reads the queue to its end (EAGAIN).
        while let Ok(change) = changes.next() {
            let all = change.events().contains(inotify::ReadFlags::QUEUE_OVERFLOW);
            for (behind, stream) in self.behind.iter_mut().zip(&self.streams) {
                *behind |= stream.watch().is_some_and(|watch| all || watch == change.wd());
            }
        }
    }

    /// Carries out requests. False once all handles are dropped.
    fn answer(&mut self) -> bool {
        // The bytes only wake this thread.
        let _ = rustix::io::read(&*self.wake, &mut [0; 8]);
        loop {
            match self.requests.try_recv() {
                Ok(Request::Finish(local_rank, reply, writing)) => {
                    for index in self.of(local_rank) {
                        self.copy_what_is_there(index);
                        self.end(index);
                    }
                    // The caller may have stopped waiting.
                    let _ = reply.send(());
                    drop(writing);
                }
                Ok(Request::Show(local_rank, shown)) => {
                    for index in self.of(local_rank) {
                        // What the worker has printed until now goes where it was to go until now.
                        self.copy_what_is_there(index);
                        let stream = &mut self.streams[index];
                        let which = stream.which() as usize;
                        stream.set_shown(&shown[which], &mut self.sinks[which]);
                    }
                }
                Err(mpsc::TryRecvError::Empty) => return true,
                Err(mpsc::TryRecvError::Disconnected) => return false,
            }
        }
    }

    /// Reads everything that was written before this call, and little of what is written meanwhile.
    fn copy_what_is_there(&mut self, index: usize) {
        let enough = self.streams[index].enough();
        let mut copied = 0;
        while copied < enough {
            let stream = &mut self.streams[index];
            match stream.copy(&mut self.buffer, &mut self.sinks[stream.which() as usize]) {
                Copied::Some(read) => copied += read as u64,
                Copied::Nothing | Copied::Ended => return,
            }
            self.progress.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn of(&self, local_rank: u32) -> impl Iterator<Item = usize> + use<> {
        let of_rank = |(index, stream): (usize, &Stream)| (stream.local_rank() == local_rank).then_some(index);
        self.streams.iter().enumerate().filter_map(of_rank).collect::<Vec<_>>().into_iter()
    }

    /// Writes the stream's last line. The stream is at its end, or no writer is left.
    fn end(&mut self, index: usize) {
        let stream = &mut self.streams[index];
        let watch = stream.watch();
        let Some(ended) = stream.finish(&mut self.sinks[stream.which() as usize]) else { return };
        self.behind[index] = false;
        // Fails if the watch is gone already.
        match (watch, &self.watch) {
            (Some(number), Some(watch)) => drop(inotify::remove_watch(watch, number)),
            // Closing would be enough, unless a process forked from this one has the descriptor too.
            _ => drop(epoll::delete(&self.poll, &ended)),
        }
    }

    fn finish_all(&mut self) {
        for index in 0..self.streams.len() {
            self.copy_what_is_there(index);
            self.end(index);
        }
    }
}
