//! The connection, and what the thread does that reads it.

use std::io;
use std::mem;
use std::os::fd::OwnedFd;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{SendFlags, Shutdown, send, shutdown};

use crate::channel::address;
use crate::channel::checks::{Counter, Ended, News};
use crate::channel::message::{ToAgent, ToWorker};
use crate::channel::sockets::Sockets;
use crate::rendezvous::messages::codec::try_encode_frame;

/// How long an agent may take to read a message. It reads at all times.
const SEND_LIMIT: Duration = Duration::from_secs(5);

/// A connection with the agent, shared by the thread that reads and the calling threads.
#[derive(Debug)]
pub(super) struct Line {
    counter: Counter,
    live: Mutex<Live>,
    /// Locked before `live`, if both are.
    sockets: Mutex<Sockets>,
    address: String,
    since: Instant,
    stream: OwnedFd,
    /// Held while a message is written: both threads write.
    writing: Mutex<()>,
    /// Until when the next step towards the world has to be done, if it is being formed.
    forms_by: Mutex<Option<Instant>>,
    /// Makes the reading thread look at the sockets, and at `forms_by`.
    nudge: OwnedFd,
}

#[derive(Debug, Default)]
struct Live {
    news: News,
    wakers: Vec<Waker>,
}

impl Line {
    /// Connects to the agent's socket, within this limit.
    pub(super) fn open(address: &str, limit: Duration) -> io::Result<Line> {
        Ok(Line {
            counter: Counter::default(),
            live: Mutex::default(),
            sockets: Mutex::default(),
            address: address.to_owned(),
            since: Instant::now(),
            stream: open(address, limit)?,
            writing: Mutex::default(),
            forms_by: Mutex::default(),
            nudge: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Counts one check.
    #[inline]
    pub(super) fn pass(&self) -> Option<u64> {
        self.counter.pass()
    }

    /// How many checks were counted in this world.
    pub(super) fn count(&self) -> u64 {
        self.counter.count()
    }

    pub(super) fn with_news<T>(&self, act: impl FnOnce(&mut News) -> T) -> T {
        act(&mut self.live.lock().news)
    }

    /// Changes what is to be shut down. If a peer has failed already, the thread does it at once.
    pub(super) fn with_sockets<T>(&self, act: impl FnOnce(&mut Sockets) -> T) -> T {
        let mut sockets = self.sockets.lock();
        let done = act(&mut sockets);
        // If the failure becomes known a moment later, the thread finds the sockets.
        if self.with_news(|news| news.has_failed()) {
            self.nudge();
        }
        done
    }

    /// Sets or removes the limit of the step towards the world.
    pub(super) fn forms_by(&self, until: Option<Instant>) {
        let before = mem::replace(&mut *self.forms_by.lock(), until);
        // The thread looks again at the end of a limit that it knows.
        if before.is_none() && until.is_some() {
            self.nudge();
        }
    }

    /// What is left of that limit. If it is over, it is removed, and the agent is notified.
    fn left_to_form(&self) -> Option<Duration> {
        let mut forms_by = self.forms_by.lock();
        let left = (*forms_by)?.saturating_duration_since(Instant::now());
        if !left.is_zero() {
            return Some(left);
        }
        *forms_by = None;
        drop(forms_by);
        // A failure ends the connection, which this thread finds next.
        let _ = self.send(ToAgent::Stuck);
        None
    }

    fn nudge(&self) {
        // Fails only if the counter is full, and then the thread wakes anyway.
        let _ = rustix::io::write(&self.nudge, &1_u64.to_ne_bytes());
    }

    /// Polls for what is to be ready. The thread wakes whom nothing was ready for.
    pub(super) fn poll<T>(
        &self,
        context: &Context<'_>,
        ready: &mut impl FnMut(&mut News) -> Option<Result<T, Ended>>,
    ) -> Poll<Result<T, Ended>> {
        let mut live = self.live.lock();
        if let Some(done) = ready(&mut live.news) {
            return Poll::Ready(done);
        }
        if !live.wakers.iter().any(|waker| waker.will_wake(context.waker())) {
            live.wakers.push(context.waker().clone());
        }
        Poll::Pending
    }

    /// What the thread does, until the connection ends.
    pub(super) fn read(&self) {
        let mut buffer = BytesMut::new();
        let why = loop {
            match self.next_bytes(&mut buffer) {
                Ok(true) => {}
                // Reset: it was closed before all that this worker had said was read.
                Ok(false) | Err(Errno::CONNRESET | Errno::PIPE) => {
                    break "was closed: the agent has ended, or this process is not its worker any more".to_owned();
                }
                Err(errno) => break format!("is lost: {errno}"),
            }
            if let Err(why) = self.on_bytes(&mut buffer) {
                break why;
            }
        };
        self.end(&why);
    }

    /// Waits for bytes, and shuts sockets down meanwhile. False at the end of the stream.
    fn next_bytes(&self, buffer: &mut BytesMut) -> Result<bool, Errno> {
        loop {
            let look_again = self.free_if_failed();
            let limit = [look_again, self.left_to_form()].into_iter().flatten().min();
            let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
            let mut fds = [PollFd::new(&self.stream, PollFlags::IN), PollFd::new(&self.nudge, PollFlags::IN)];
            retry_on_intr(|| poll(&mut fds, limit.as_ref()))?;
            if !fds[1].revents().is_empty() {
                let _ = rustix::io::read(&self.nudge, &mut [0; 8]);
            }
            if !fds[0].revents().is_empty() {
                let mut chunk = [0; 4096];
                let count = retry_on_intr(|| rustix::io::read(&self.stream, &mut chunk))?;
                buffer.extend_from_slice(&chunk[..count]);
                return Ok(count > 0);
            }
        }
    }

    /// Returns after how long to look again.
    fn free_if_failed(&self) -> Option<Duration> {
        let mut sockets = self.sockets.lock();
        if !self.with_news(|news| news.has_failed()) {
            return None;
        }
        let (is_freed, look_again) = sockets.shut_down(Instant::now());
        if is_freed {
            // Before the main thread can release the sockets, and say that it has left. A failure ends the connection, which this thread
            // finds next.
            let _ = self.send(ToAgent::Freed);
        }
        look_again
    }

    fn on_bytes(&self, buffer: &mut BytesMut) -> Result<(), String> {
        while let Some(message) = ToWorker::decode(buffer).map_err(|error| format!("is closed: {error}"))? {
            if let Some(answer) = self.on_message(message) {
                self.send(answer).map_err(|errno| format!("is lost: {errno}"))?;
            }
        }
        Ok(())
    }

    fn on_message(&self, message: ToWorker) -> Option<ToAgent> {
        let (answer, wakers) = {
            let mut live = self.live.lock();
            let counted = self.counter.stop();
            let answer = live.news.on_message(message, counted);
            if live.news.is_quiet() {
                self.counter.reset();
            }
            (answer, mem::take(&mut live.wakers))
        };
        wakers.into_iter().for_each(Waker::wake);
        answer
    }

    fn end(&self, why: &str) {
        let (address, elapsed) = (&self.address, self.since.elapsed());
        let text = format!(
            "the connection with the agent at `{address}` {why} (after {elapsed:.1?}); the agent's log says more"
        );
        let wakers = {
            let mut live = self.live.lock();
            live.news.end(text, self.counter.stop());
            mem::take(&mut live.wakers)
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Ends the connection. The thread finds the end of the stream, and ends.
    pub(super) fn close(&self) {
        // Fails if the agent has closed it.
        let _ = shutdown(&self.stream, Shutdown::Both);
    }

    /// Writes a message. An error ends the connection.
    pub(super) fn send(&self, message: ToAgent) -> Result<(), Errno> {
        let mut frame = BytesMut::new();
        if try_encode_frame(&message, &mut frame).is_err() {
            self.close();
            return Err(Errno::MSGSIZE);
        }
        let _writing = self.writing.lock();
        let mut rest = &frame[..];
        while !rest.is_empty() {
            match retry_on_intr(|| send(&self.stream, rest, SendFlags::NOSIGNAL)) {
                Ok(count) => rest = &rest[count..],
                Err(errno) => {
                    self.close();
                    return Err(errno);
                }
            }
        }
        Ok(())
    }
}

fn open(address: &str, limit: Duration) -> io::Result<OwnedFd> {
    let stream = address::dial(address, limit)?;
    set_socket_timeout(&stream, Timeout::Send, Some(SEND_LIMIT))?;
    Ok(stream)
}
