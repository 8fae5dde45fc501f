//! Copying what workers print: one thread per group that reads their pipes and writes files and console.
//!
//! A thread, because writing to a console can block for as long as nobody reads it, which then holds up the workers that
//! print and nobody else. At rest it sleeps in `epoll_wait`.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::io::Errno;
use tokio::sync::oneshot;

use super::group::Consoles;
use super::spawn::{Stage, StartError};
use super::spec::{Copies, Filter};

mod sink;
mod stream;

use sink::{Filtered, Sink};
use stream::{Copied, Stream};

/// The filter files of a group.
#[derive(Debug, Clone, Default)]
pub struct FilterOptions {
    /// For lines of standard output.
    pub stdout: Option<Filter>,
    /// For lines of standard error.
    pub stderr: Option<Filter>,
}

/// One of the two output streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Which {
    Stdout = 0,
    Stderr = 1,
}

/// A stream to copy.
pub(super) struct Source {
    pub local_rank: u32,
    pub which: Which,
    pub pipe: OwnedFd,
    pub copies: Copies,
}

/// The thread's other end. Dropping it ends the thread once it has read what is there.
#[derive(Debug, Clone)]
pub(super) struct Logs {
    sender: mpsc::Sender<Request>,
    wake: Arc<OwnedFd>,
}

enum Request {
    /// Read what the worker has written so far, and give the end of its standard error.
    Settle(u32, oneshot::Sender<Vec<u8>>),
    /// Read what is there, and close the worker's streams.
    Finish(u32, oneshot::Sender<()>),
}

impl Logs {
    /// Opens the files and starts the thread. `consoles` are where stdout and stderr go.
    pub fn start(sources: Vec<Source>, filters: &FilterOptions, consoles: Consoles) -> Result<Logs, StartError> {
        let first = sources.first().map_or(0, |source| source.local_rank);
        let failed = |source: io::Error| StartError::new(first, Stage::Fork, source);
        let open_filter = |filter: &Option<Filter>| {
            let create = |filter: &Filter| {
                let error = |error| StartError::new(first, Stage::Stream(filter.file.clone()), error);
                Filtered::create(filter).map_err(error)
            };
            filter.as_ref().map(create).transpose()
        };
        let sinks = [
            Sink::new(consoles.stdout, open_filter(&filters.stdout)?),
            Sink::new(consoles.stderr, open_filter(&filters.stderr)?),
        ];
        let streams = sources.into_iter().map(Stream::open).collect::<Result<Vec<_>, _>>()?;
        Logs::start_thread(streams, sinks).map_err(failed)
    }

    fn start_thread(streams: Vec<Stream>, sinks: [Sink; 2]) -> io::Result<Logs> {
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&poll, &*wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        for (index, pipe) in streams.iter().filter_map(Stream::pipe).enumerate() {
            rustix::io::ioctl_fionbio(pipe, true)?;
            epoll::add(&poll, pipe, epoll::EventData::new_u64(index as u64), epoll::EventFlags::IN)?;
        }
        let (sender, requests) = mpsc::channel();
        let copier = Copier { poll, wake: wake.clone(), requests, streams, sinks, buffer: vec![0; READ_BYTES] };
        thread::Builder::new().name("worker-logs".to_owned()).spawn(move || copier.run())?;
        Ok(Logs { sender, wake })
    }

    /// Waits until what the worker has written so far is copied; gives the last 8 KiB of its standard error.
    pub async fn settle(&self, local_rank: u32) -> Vec<u8> {
        let (reply, answer) = oneshot::channel();
        self.ask(Request::Settle(local_rank, reply));
        answer.await.unwrap_or_default()
    }

    /// As [`settle`](Self::settle), and closes the worker's streams, whoever else may have them open.
    pub async fn finish(&self, local_rank: u32) {
        let (reply, answer) = oneshot::channel();
        self.ask(Request::Finish(local_rank, reply));
        // No answer: the thread has ended, so there is nothing left to copy.
        let _ = answer.await;
    }

    fn ask(&self, request: Request) {
        // Fails only if the thread has ended; the caller sees that from its missing answer.
        let _ = self.sender.send(request);
        wake(&self.wake);
    }
}

impl Drop for Logs {
    fn drop(&mut self) {
        // The thread looks whether this was the last one.
        let (sender, _) = mpsc::channel();
        drop(std::mem::replace(&mut self.sender, sender));
        wake(&self.wake);
    }
}

fn wake(eventfd: &OwnedFd) {
    // EAGAIN: it is awake already.
    let _ = rustix::io::write(eventfd, &1_u64.to_ne_bytes());
}

const WAKE: u64 = u64::MAX;
/// How much is read at once: the size of a pipe, so that a full one takes one read.
const READ_BYTES: usize = super::spawn::PIPE_BYTES;

struct Copier {
    poll: OwnedFd,
    wake: Arc<OwnedFd>,
    requests: mpsc::Receiver<Request>,
    streams: Vec<Stream>,
    sinks: [Sink; 2],
    buffer: Vec<u8>,
}

impl Copier {
    fn run(mut self) {
        let mut events = Vec::with_capacity(64);
        loop {
            events.clear();
            match epoll::wait(&self.poll, rustix::buffer::spare_capacity(&mut events), None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return tracing::error!(%error, "what workers print is no longer copied"),
            }
            let mut asked = false;
            for event in &events {
                match event.data.u64() {
                    WAKE => asked = true,
                    index => self.copy(index as usize),
                }
            }
            if asked && !self.answer() {
                return self.finish_all();
            }
        }
    }

    /// Reads once, so that each worker has its turn.
    fn copy(&mut self, index: usize) {
        let stream = &mut self.streams[index];
        if stream.copy(&mut self.buffer, &mut self.sinks[stream.which() as usize]) == Copied::Ended {
            self.end(index);
        }
    }

    /// Does what was asked. False once nobody can ask any more.
    fn answer(&mut self) -> bool {
        // It is only there to wake us.
        let _ = rustix::io::read(&*self.wake, &mut [0; 8]);
        loop {
            match self.requests.try_recv() {
                Ok(Request::Settle(local_rank, reply)) => {
                    // Whoever asked may have stopped waiting.
                    let _ = reply.send(self.settle(local_rank));
                }
                Ok(Request::Finish(local_rank, reply)) => {
                    self.settle(local_rank);
                    self.of(local_rank).for_each(|index| self.end(index));
                    let _ = reply.send(());
                }
                Err(mpsc::TryRecvError::Empty) => return true,
                Err(mpsc::TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn settle(&mut self, local_rank: u32) -> Vec<u8> {
        let mut tail = Vec::new();
        for index in self.of(local_rank) {
            let stream = &mut self.streams[index];
            stream.copy_what_is_there(&mut self.buffer, &mut self.sinks[stream.which() as usize]);
            if stream.which() == Which::Stderr {
                tail = stream.tail().to_vec();
            }
        }
        tail
    }

    fn of(&self, local_rank: u32) -> impl Iterator<Item = usize> + use<> {
        let of_rank = |(index, stream): (usize, &Stream)| (stream.local_rank() == local_rank).then_some(index);
        self.streams.iter().enumerate().filter_map(of_rank).collect::<Vec<_>>().into_iter()
    }

    /// Passes on the stream's last line. Its end was seen, or nobody is left to write.
    fn end(&mut self, index: usize) {
        let stream = &mut self.streams[index];
        if let Some(pipe) = stream.finish(&mut self.sinks[stream.which() as usize]) {
            // Closing would do, unless a process forked from this one has the descriptor too.
            let _ = epoll::delete(&self.poll, &pipe);
        }
    }

    fn finish_all(&mut self) {
        for index in 0..self.streams.len() {
            let stream = &mut self.streams[index];
            stream.copy_what_is_there(&mut self.buffer, &mut self.sinks[stream.which() as usize]);
            self.end(index);
        }
    }
}
