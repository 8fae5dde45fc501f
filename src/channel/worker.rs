//! A worker's end of the channel.
//!
//! A thread reads the agent's messages, so that a main thread that is blocked in a collective delays nothing. It uses no runtime,
//! and takes no lock of Python's: a worker may fork, and its interpreter may exit, at any time.
//!
//! Futures returned here need no runtime either. The thread wakes them.

use std::future::{Future, poll_fn};
use std::io;
use std::process;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::checks::{Ended, News, Verdict};
use super::message::{ToAgent, VERSION, World};
use super::sockets::{QUIET_INTERVAL, QUIET_LIMIT, Sockets};
use crate::processes::{forks, forks_now};
use crate::steps::worker::{Owned, Steps};
use crate::threads;
use crate::wire::text::tidy;

mod line;

use line::Line;

/// Why a worker's end cannot do what it was asked to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChannelError {
    /// Nobody listens there, or not for this process.
    #[error(
        "cannot connect to the agent at `{address}` (ELASTIC_RS_AGENT) after {elapsed:.1?}: {source}; if the agent that started this \
         process has ended, start the job again. A process in another network namespace than its agent cannot reach it"
    )]
    Connect {
        /// The socket's address.
        address: String,
        /// Since the attempt began.
        elapsed: Duration,
        /// The error of the system.
        source: io::Error,
    },
    /// Another process of this worker trains.
    #[error(
        "process {here} was started by the worker of local rank {local_rank}, whose process {owner} trains (it was the first one to call \
         elastic_rs.step, should_checkpoint, elastic.init or a function of elastic.run): a process that a worker starts is no worker, and must call none of \
         them before that one has ended; start an evaluation without ELASTIC_RS_AGENT, RANK and WORLD_SIZE in its environment"
    )]
    Owned {
        /// The process that called.
        here: u32,
        /// The process that trains.
        owner: u32,
        /// The worker's.
        local_rank: u32,
    },
    /// The connection has ended. All calls that wait return this error.
    #[error("{0}")]
    Ended(Ended),
    /// The process was forked from the one that has connected, and has neither its thread nor its place in the world.
    #[error(
        "the channel to the agent was opened in process {opened}, and this one ({here}) was forked from it: only process {opened} is \
         a worker of the job. Do not run training steps here, or start this process with the spawn start method"
    )]
    Forked {
        /// The process that has connected.
        opened: u32,
        /// The process that called.
        here: u32,
    },
    /// The sockets of this process cannot be listed.
    #[error("cannot list the sockets of this process in /proc/self/fd: {0}")]
    Sockets(#[source] io::Error),
}

/// A worker's connection with its agent. Dropping it closes it.
#[derive(Debug)]
pub struct Channel {
    line: Arc<Line>,
    /// The count of forks in which the connection was opened.
    forks: u64,
    pid: u32,
}

impl Channel {
    /// Connect to the agent whose socket has this address, and introduce this process, which owns the worker's slot from now on.
    ///
    /// # Errors
    /// [`ChannelError::Owned`]; [`ChannelError::Connect`], after at most `limit`.
    pub fn connect(address: &str, limit: Duration) -> Result<Channel, ChannelError> {
        let since = Instant::now();
        let failed = |source| ChannelError::Connect { address: address.to_owned(), elapsed: since.elapsed(), source };
        if let Some(Err(Owned { owner, local_rank })) = Steps::of_this_process().map(Steps::claim) {
            return Err(ChannelError::Owned { here: process::id(), owner, local_rank });
        }
        let line = Arc::new(Line::open(address, limit).map_err(failed)?);
        let channel = Channel { line: line.clone(), forks: forks(), pid: process::id() };
        // A failure ends the connection, and then the thread finds the reason: the agent may have refused this process already.
        let _ = line.send(ToAgent::Hello { version: VERSION });
        threads::spawn("agent-channel".to_owned(), move || line.read()).map_err(failed)?;
        Ok(channel)
    }

    /// Say that this worker has no process group yet, and lets the library make it. So it can be started before its node has joined.
    ///
    /// # Errors
    /// [`ChannelError::Forked`].
    pub fn no_process_group(&self) -> Result<(), ChannelError> {
        self.here()?;
        // A failure ends the connection, with a reason.
        let _ = self.line.send(ToAgent::NoProcessGroup);
        Ok(())
    }

    /// Say that this worker's program does not live through a change of the world: it saves at the check, parks, and is started anew.
    ///
    /// # Errors
    /// [`ChannelError::Forked`].
    pub fn saves(&self) -> Result<(), ChannelError> {
        self.here()?;
        // A failure ends the connection, with a reason.
        let _ = self.line.send(ToAgent::Saves);
        Ok(())
    }

    /// The world of this worker is being formed. Unless this or [`Self::formed`] is called again within `limit`, the agent is notified that
    /// it is not, and every member leaves it.
    ///
    /// # Errors
    /// [`ChannelError::Forked`].
    pub fn forms_within(&self, limit: Duration) -> Result<(), ChannelError> {
        self.here()?;
        self.line.forms_by(Some(Instant::now() + limit));
        Ok(())
    }

    /// The world is formed, or this worker leaves it.
    ///
    /// # Errors
    /// [`ChannelError::Forked`].
    pub fn formed(&self) -> Result<(), ChannelError> {
        self.here()?;
        self.line.forms_by(None);
        Ok(())
    }

    /// This worker has the job's state, as all members of its world will: it was synchronised.
    ///
    /// # Errors
    /// [`ChannelError::Forked`].
    pub fn synchronised(&self) -> Result<(), ChannelError> {
        self.here()?;
        self.line.with_news(News::synchronised);
        Ok(())
    }

    /// Tell the agent now that the world cannot be formed. Every member leaves it.
    ///
    /// # Errors
    /// [`ChannelError::Forked`].
    pub fn stuck(&self) -> Result<(), ChannelError> {
        self.formed()?;
        // A failure ends the connection, with a reason.
        let _ = self.line.send(ToAgent::Stuck);
        Ok(())
    }

    /// Report that the worker's program has raised one of the library's exceptions itself. This worker leaves its world, and every other
    /// member does as after a failure. Both texts are cut to one line of bounded length.
    ///
    /// # Errors
    /// [`ChannelError::Forked`].
    pub fn raised(&self, error: &str, message: &str) -> Result<(), ChannelError> {
        self.here()?;
        // A failure ends the connection, with a reason.
        let _ = self.line.send(ToAgent::Raised { error: tidy(error), message: tidy(message) });
        Ok(())
    }

    /// Report that the worker's program cannot take the state that the others have. The message is cut to one line of bounded length.
    ///
    /// # Errors
    /// [`ChannelError::Forked`].
    pub fn unfit(&self, message: &str) -> Result<(), ChannelError> {
        self.here()?;
        // A failure ends the connection, with a reason.
        let _ = self.line.send(ToAgent::Unfit { message: tidy(message) });
        Ok(())
    }

    /// Count one check. `None`: there is no news, and the worker goes on. `Some` is the check's number, for [`Self::verdict`].
    ///
    /// # Errors
    /// [`ChannelError::Forked`].
    #[inline]
    pub fn check(&self) -> Result<Option<u64>, ChannelError> {
        self.here()?;
        Ok(self.line.pass())
    }

    /// What the check of this number finds. Waits only while it is not known at which check the world changes.
    ///
    /// # Errors
    /// [`ChannelError::Ended`] if this is never known.
    pub fn verdict(&self, number: u64) -> impl Future<Output = Result<Verdict, ChannelError>> + Send {
        self.until(move |news| news.verdict(number))
    }

    /// The check at which the world changes, if that is known, and how many checks this worker has made in this world.
    ///
    /// # Errors
    /// [`ChannelError::Forked`].
    pub fn raises_at(&self) -> Result<(Option<u64>, u64), ChannelError> {
        self.here()?;
        Ok((self.line.with_news(|news| news.raises_at()), self.line.count()))
    }

    /// Wait until the failure of a peer is known.
    ///
    /// # Errors
    /// [`ChannelError::Ended`], [`ChannelError::Forked`].
    pub fn failed(&self) -> Result<impl Future<Output = Result<(), ChannelError>> + Send, ChannelError> {
        self.here()?;
        Ok(self.until(News::failed))
    }

    /// Say that this worker has left its process group with this commit, and wait for its next world. Releases all sockets. If the
    /// future is dropped before it is ready, call this again.
    ///
    /// # Errors
    /// [`ChannelError::Ended`], [`ChannelError::Forked`].
    pub fn park(
        &self,
        commit: Option<u64>,
    ) -> Result<impl Future<Output = Result<Box<World>, ChannelError>> + Send, ChannelError> {
        self.release_sockets()?;
        if let Some(state) = self.line.with_news(|news| news.park(commit)) {
            // A failure ends the connection, with a reason.
            let _ = self.line.send(ToAgent::Parked(state));
        }
        Ok(self.until(News::next_world))
    }

    /// The latest world. Waits for the first one.
    ///
    /// # Errors
    /// [`ChannelError::Ended`], [`ChannelError::Forked`].
    pub fn world(&self) -> Result<impl Future<Output = Result<Box<World>, ChannelError>> + Send, ChannelError> {
        self.here()?;
        Ok(self.until(News::latest_world))
    }

    /// Wait for the next change of the world: its number, and its flags.
    ///
    /// # Errors
    /// [`ChannelError::Ended`], [`ChannelError::Forked`].
    pub fn change(&self) -> Result<impl Future<Output = Result<(u64, u8), ChannelError>> + Send, ChannelError> {
        self.here()?;
        Ok(self.until(News::take_change))
    }

    /// The reason of the last failure, change or world, in words; and what changes: 1 removed, 2 added, 3 both, else 0.
    ///
    /// # Errors
    /// [`ChannelError::Forked`].
    pub fn reason_and_flags(&self) -> Result<(String, u8), ChannelError> {
        self.here()?;
        Ok(self.line.with_news(|news| (news.reason().to_owned(), news.flags())))
    }

    /// Global rank of the worker whose failure is the last news, if one is.
    ///
    /// # Errors
    /// [`ChannelError::Forked`].
    pub fn failed_rank(&self) -> Result<Option<u32>, ChannelError> {
        self.here()?;
        Ok(self.line.with_news(|news| news.failed_rank()))
    }

    /// Remember the TCP sockets that are connected now: a process group is about to be made. If a peer fails meanwhile, all sockets
    /// that are connected later are shut down, so that it is not waited for. Returns a number for [`Self::guard_sockets`].
    ///
    /// # Errors
    /// [`ChannelError::Sockets`], [`ChannelError::Forked`].
    pub fn mark_sockets(&self) -> Result<u64, ChannelError> {
        self.with_sockets(|sockets| sockets.mark())
    }

    /// The process group of this mark was made, or could not be made: shut its sockets down when a peer fails, or at once if one has.
    /// Returns their number. The connections to the store at this port that were made since the mark are shut down too.
    ///
    /// # Errors
    /// [`ChannelError::Sockets`], [`ChannelError::Forked`].
    pub fn guard_sockets(&self, mark: u64, store_port: Option<u16>) -> Result<usize, ChannelError> {
        self.with_sockets(|sockets| sockets.guard_new(mark, store_port))
    }

    /// The same for process groups that exist already: their sockets are watched together with a listening one.
    ///
    /// # Errors
    /// [`ChannelError::Sockets`], [`ChannelError::Forked`].
    pub fn guard_loops(&self, store_port: Option<u16>) -> Result<usize, ChannelError> {
        self.with_sockets(|sockets| sockets.guard_loops(store_port))
    }

    /// A peer has failed, and the process groups are about to be destroyed: wait until nothing passes on their sockets, for a second at
    /// most. Another worker that receives a message from this one would not notice its end.
    ///
    /// # Errors
    /// [`ChannelError::Forked`].
    pub fn until_quiet(&self) -> Result<(), ChannelError> {
        self.here()?;
        let until = Instant::now() + QUIET_LIMIT;
        while Instant::now() < until && !self.line.with_sockets(|sockets| sockets.is_quiet()) {
            thread::sleep(QUIET_INTERVAL); // the kernel tells nobody when a connection falls quiet
        }
        Ok(())
    }

    /// The worker leaves its world: all process groups are destroyed.
    ///
    /// # Errors
    /// [`ChannelError::Forked`].
    pub fn release_sockets(&self) -> Result<(), ChannelError> {
        self.here()?;
        self.line.with_sockets(Sockets::release);
        Ok(())
    }

    fn with_sockets<T>(&self, act: impl FnOnce(&mut Sockets) -> io::Result<T>) -> Result<T, ChannelError> {
        self.here()?;
        self.line.with_sockets(act).map_err(ChannelError::Sockets)
    }

    /// In a forked child this precedes every lock: another thread may have held it in the parent.
    #[inline]
    fn here(&self) -> Result<(), ChannelError> {
        if forks_now() == self.forks { Ok(()) } else { Err(self.forked()) }
    }

    #[cold]
    fn forked(&self) -> ChannelError {
        ChannelError::Forked { opened: self.pid, here: process::id() }
    }

    fn until<T>(
        &self,
        mut ready: impl FnMut(&mut News) -> Option<Result<T, Ended>> + Send,
    ) -> impl Future<Output = Result<T, ChannelError>> + Send {
        poll_fn(move |context| self.line.poll(context, &mut ready).map_err(ChannelError::Ended))
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // In a forked child this would close the parent's connection.
        if self.here().is_ok() {
            self.line.close();
        }
    }
}
