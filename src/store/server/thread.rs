//! A server on a dedicated thread.

use std::io;
use std::mem;
use std::net::{SocketAddr, TcpListener};
use std::process;
use std::thread::JoinHandle;
use std::time::Duration;

use mio::{Poll, Token, Waker};
use parking_lot::Mutex;

use super::control::{Controller, Ended, control};
use super::event_loop::{EventLoop, WAKE};
use super::{ServerOptions, Stats};
use crate::threads;

/// A running server. Dropping it stops the server and waits for its thread, unless
/// [`stop_when_closed`](Self::stop_when_closed) was called: then the server outlives it.
///
/// In a process forked from the one that started it, dropping it does nothing: the thread does not exist there.
#[derive(Debug)]
pub struct StoreServer {
    controller: Controller,
    local_addr: SocketAddr,
    thread: Mutex<Thread>,
    started_by: u32,
}

#[derive(Debug)]
enum Thread {
    Running(JoinHandle<Ended>),
    /// The server ends with its owners' connections.
    Released(JoinHandle<Ended>),
    Ended(Ended),
}

impl StoreServer {
    /// Starts a server on these listeners, at least one. [`crate::net::listen`] makes them.
    pub fn start(listeners: Vec<TcpListener>, options: ServerOptions) -> io::Result<StoreServer> {
        let local_addr = match listeners.first() {
            Some(listener) => listener.local_addr()?,
            None => {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "a server needs a listening socket"));
            }
        };
        let poll = Poll::new()?;
        let (controller, control) = control(Waker::new(poll.registry(), Token(WAKE))?);
        let server = EventLoop::new(poll, listeners, options, control)?;
        let thread = threads::spawn(format!("store-{}", local_addr.port()), move || server.run())?;
        let thread = Mutex::new(Thread::Running(thread));
        Ok(StoreServer { controller, local_addr, thread, started_by: process::id() })
    }

    /// The address of the first listener.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// The port of the first listener.
    pub fn port(&self) -> u16 {
        self.local_addr.port()
    }

    /// The server's counters.
    pub fn stats(&self) -> Stats {
        self.controller.stats()
    }

    /// A handle that steers the server. Dropping `self` still stops the server while a handle exists.
    pub fn controller(&self) -> Controller {
        self.controller.clone()
    }

    /// Closes everything and waits until the thread has ended. More than once is harmless.
    pub fn stop(&self) {
        if self.is_inherited() {
            return;
        }
        self.controller.stop();
        self.join();
    }

    /// Ties the server's lifetime to an owner's connection, named by the client's local address.
    ///
    /// The server then ends when the connections of all owners named so have closed (at once if they have), and dropping
    /// `self` no longer stops it. [`stop`](Self::stop) still does.
    pub fn stop_when_closed(&self, owner: SocketAddr) {
        if self.is_inherited() {
            return;
        }
        self.controller.stop_when_closed(owner);
        let mut thread = self.thread.lock();
        *thread = match mem::replace(&mut *thread, Thread::Ended(Ended::Stopped)) {
            Thread::Running(handle) => Thread::Released(handle),
            other => other,
        };
    }

    /// Promises another owner: [`Controller::expect_owner`]. False if the server has ended.
    #[must_use]
    pub fn expect_owner(&self) -> bool {
        !self.is_inherited() && self.controller.expect_owner()
    }

    /// Takes back the promise of [`expect_owner`](Self::expect_owner).
    pub fn give_up_owner(&self) {
        if !self.is_inherited() {
            self.controller.give_up_owner();
        }
    }

    /// Waits until every client has disconnected, or for `timeout`, then stops. True if all had disconnected.
    ///
    /// So clients that close a moment later than this call never see a reset. New clients are served meanwhile.
    pub fn drain(&self, timeout: Duration) -> bool {
        if self.is_inherited() {
            return false;
        }
        self.controller.drain(timeout);
        self.join() == Ended::Drained
    }

    /// Whether the server has ended by itself, for instance because its owner's connection closed.
    pub fn has_ended(&self) -> bool {
        match &*self.thread.lock() {
            Thread::Running(handle) | Thread::Released(handle) => handle.is_finished(),
            Thread::Ended(_) => true,
        }
    }

    fn join(&self) -> Ended {
        let mut thread = self.thread.lock();
        let ended = match mem::replace(&mut *thread, Thread::Ended(Ended::Stopped)) {
            Thread::Running(handle) | Thread::Released(handle) => handle.join().unwrap_or(Ended::Stopped),
            Thread::Ended(ended) => ended,
        };
        *thread = Thread::Ended(ended);
        ended
    }

    fn is_inherited(&self) -> bool {
        self.started_by != process::id()
    }
}

impl Drop for StoreServer {
    fn drop(&mut self) {
        let thread = mem::replace(self.thread.get_mut(), Thread::Ended(Ended::Stopped));
        match thread {
            // Fork does not copy threads: joining would wait for ever.
            Thread::Running(handle) | Thread::Released(handle) if self.started_by != process::id() => {
                mem::forget(handle)
            }
            Thread::Running(handle) => {
                self.controller.stop();
                // A panic in the thread has been reported by the panic hook.
                let _ = handle.join();
            }
            // Its controller goes with `self`; the server carries on until its owners' connections close.
            Thread::Released(_) | Thread::Ended(_) => {}
        }
    }
}
