//! What a look says of one rank. Agents make it from outside of the worker, so everything in it may be wrong or a lie: what comes from
//! a peer is checked by [`View::decode`], what an agent has read itself is cut by [`View::fit`].

use std::fmt;

use serde::{Deserialize, Serialize};

use super::ranks::Ranks;
use crate::wire::text::{check, cut, plain};

mod frames;

pub use frames::{
    DATA_LOADER, DATA_WORKER, DataWorker, Frame, WaitsIn, all_users, is_pythons, users, waits_for_data, waits_in,
};

/// Longest encoded view. As a rule it has 1 or 2 KiB.
pub const VIEW_LIMIT_BYTES: usize = 32 * 1024;
/// Most groups of a view.
pub const GROUPS_LIMIT: usize = 64;
/// Most pending collectives of a group: the oldest ones.
pub const PENDING_LIMIT: usize = 16;
/// Most of a group's last collectives.
pub const TAIL_LIMIT: usize = 32;
/// Most different signatures of a view.
pub const SIGNATURES_LIMIT: usize = 128;
/// Most frames of a thread: the innermost ones.
pub const FRAMES_LIMIT: usize = 128;
/// Most data workers of a view.
pub const DATA_WORKERS_LIMIT: usize = 16;
/// Longest name of a group or an operation, in bytes. Torch's longest name of a group is a hash of 40 digits.
pub const NAME_LIMIT_BYTES: usize = 64;
/// Longest text of a collective's sizes and types, in bytes.
pub const SHAPE_LIMIT_BYTES: usize = 96;
/// Longest name of a function, in bytes.
pub const FUNCTION_LIMIT_BYTES: usize = 128;
/// Longest path of a file, in bytes.
pub const PATH_LIMIT_BYTES: usize = 255;
/// The group of all ranks, as torch names it.
pub const WORLD: &str = "0";

/// What a look says of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct View {
    /// The rank in the world of `round`.
    pub rank: u32,
    /// The round to which its world belongs. Views of an earlier round are dropped.
    pub round: u64,
    /// Its process.
    pub pid: u32,
    /// Whether it runs.
    pub life: Life,
    /// What the kernel says of its main thread.
    pub state: State,
    /// Whether the GIL is held.
    pub gil: Gil,
    /// The watch thread in the worker has answered: `groups` is what torch knows. Otherwise the rank is silent.
    pub answered: bool,
    /// What it did between two looks. `None`: this is the first one.
    pub class: Option<Class>,
    /// The call to the kernel in which its main thread stands, if it stands in one.
    pub call: Option<Call>,
    /// Frames of its main thread, the innermost first.
    pub frames: Vec<Frame>,
    /// Processes that load its data, if it waits for one of them.
    pub data_workers: Vec<DataWorker>,
    /// The different signatures of its collectives. Entries name them by their index.
    pub signatures: Vec<Signature>,
    /// Its process groups.
    pub groups: Vec<Group>,
}

/// Whether a rank runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Life {
    /// It does.
    #[default]
    Running,
    /// Its main thread has ended, and another thread keeps the process alive.
    MainThreadEnded {
        /// It ended with an exception.
        raised: bool,
    },
    /// Its process has ended.
    Ended {
        /// The exit code. Negative: the signal that ended it.
        code: i32,
    },
}

/// State of a thread, as `/proc/PID/stat` has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum State {
    /// Nobody could read it.
    #[default]
    Unknown,
    /// `R`: it runs, or could.
    Running,
    /// `S`: it sleeps.
    Sleeping,
    /// `D`: it sleeps, and no signal wakes it.
    Uninterruptible,
    /// `T`: a signal has stopped it.
    Stopped,
    /// `t`: a debugger has stopped it.
    Traced,
    /// `Z` or `X`: it has ended.
    Ended,
}

impl State {
    /// The state with this letter.
    pub fn of(letter: char) -> Self {
        match letter {
            'R' => Self::Running,
            'S' | 'I' => Self::Sleeping,
            'D' => Self::Uninterruptible,
            'T' => Self::Stopped,
            't' => Self::Traced,
            'Z' | 'X' | 'x' => Self::Ended,
            _ => Self::Unknown,
        }
    }

    /// Whether a signal or a debugger has stopped it.
    pub fn is_stopped(self) -> bool {
        matches!(self, Self::Stopped | Self::Traced)
    }
}

/// Whether the GIL is held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Gil {
    /// Nobody has asked, or the watch thread is not there.
    #[default]
    Unknown,
    /// The watch thread got it.
    Free,
    /// The main thread sleeps with it, or the watch thread is connected, and did not get it within its limit.
    Held,
}

/// What a rank did between two looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Class {
    /// It neither ran nor read or wrote anything that counts.
    Idle,
    /// It ran, or wanted to, a tenth of the time or more.
    Busy,
    /// It read or wrote 1 MiB/s or more.
    Moving,
}

/// A call to the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// Its name, such as `read`.
    pub name: String,
    /// The file or the kind of descriptor, such as `/data/shard-17` or `pipe`.
    pub file: Option<String>,
    /// The type of the file system, such as `nfs4`.
    pub file_system: Option<String>,
    /// The descriptor.
    pub fd: Option<u32>,
}

impl Call {
    /// Whether it reads standard input, as pdb and `input()` do.
    pub fn reads_standard_input(&self) -> bool {
        let waits_for_input = ["read", "readv", "poll", "ppoll", "select", "pselect6"].contains(&self.name.as_str());
        self.fd == Some(0) && waits_for_input
    }

    pub(super) fn validate(&self) -> Result<(), String> {
        check("name of the call", &self.name, NAME_LIMIT_BYTES)?;
        check("file of the call", self.file.as_deref().unwrap_or_default(), PATH_LIMIT_BYTES)?;
        check("file system of the call", self.file_system.as_deref().unwrap_or_default(), NAME_LIMIT_BYTES)
    }
}

impl fmt::Display for Call {
    /// `read(/data/shard-17, nfs4)`, `futex`, `reads standard input (pipe)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, file, file_system, fd } = self;
        match (file, file_system) {
            (Some(file), _) if self.reads_standard_input() => write!(f, "reads standard input ({file})"),
            (None, _) if self.reads_standard_input() => f.write_str("reads standard input"),
            (Some(file), Some(file_system)) if file.starts_with('/') => write!(f, "{name}({file}, {file_system})"),
            (Some(file), _) => write!(f, "{name}({file})"),
            (None, _) => match fd {
                Some(fd) => write!(f, "{name}(fd {fd})"),
                None => f.write_str(name),
            },
        }
    }
}

/// What must be the same on all ranks of a group in one collective.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Signature {
    /// The operation, such as `all_reduce`.
    pub op: String,
    /// Sizes and types that must agree, such as `[63310] Float`. Empty: the operation may have others on each rank.
    pub shape: String,
}

/// A collective that a rank has entered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Its number in the group, as torch counts.
    pub seq: u64,
    /// Its place among all collectives of the rank that are known, of all groups: larger is later.
    pub at: u32,
    /// Index of its signature in [`View::signatures`].
    pub signature: u16,
}

/// A process group, as one rank knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// Torch's name, equal on all ranks. [`WORLD`] is the group of all.
    pub name: String,
    /// Its description, such as `default_pg`.
    pub desc: String,
    /// Its members, if the rank knows them.
    pub ranks: Option<Ranks>,
    /// Number of the last collective that the rank has entered. 0: none yet.
    pub last: u64,
    /// Number of the oldest collective that is still recorded. 0: none is.
    pub oldest: u64,
    /// Collectives that have not ended, the oldest first.
    pub pending: Vec<Entry>,
    /// The last collectives, the oldest first, those that have not ended among them.
    pub tail: Vec<Entry>,
}

impl View {
    /// A rank that runs, and of which nothing else is known.
    pub fn new(rank: u32, round: u64) -> Self {
        Self { rank, round, ..Self::default() }
    }

    /// Whether its process or its main thread has ended.
    pub fn has_ended(&self) -> bool {
        self.life != Life::Running || self.state == State::Ended
    }

    /// Whether it lives, and is stopped by a signal or a debugger.
    pub fn is_stopped(&self) -> bool {
        !self.has_ended() && self.state.is_stopped()
    }

    /// Whether it lives, is not stopped, and has not answered.
    pub fn is_silent(&self) -> bool {
        !self.has_ended() && !self.state.is_stopped() && !self.answered
    }

    /// Its group of this name.
    pub fn group(&self, name: &str) -> Option<&Group> {
        self.groups.iter().find(|group| group.name == name)
    }

    /// The signature of an entry, if the view has it.
    pub fn signature(&self, entry: &Entry) -> Option<&Signature> {
        self.signatures.get(usize::from(entry.signature))
    }

    /// The index of a signature, which is added if it is new. `None`: there are too many.
    pub fn intern(&mut self, signature: Signature) -> Option<u16> {
        let at = self.signatures.iter().position(|one| *one == signature).unwrap_or(self.signatures.len());
        if at == self.signatures.len() {
            if at >= SIGNATURES_LIMIT {
                return None;
            }
            self.signatures.push(signature);
        }
        u16::try_from(at).ok()
    }

    /// Whether another look shows the rank where it was: the same process, stopped or not, in the same collectives and the same call of
    /// torch.distributed. Lines are not compared: a loop that never ends goes from line to line.
    pub fn stands_as(&self, other: &Self) -> bool {
        let collectives = |view: &Self| {
            let of = |group: &Group| {
                let pending: Vec<_> = group.pending.iter().map(|entry| entry.seq).collect();
                (group.name.clone(), group.last, pending)
            };
            let mut all: Vec<_> = view.groups.iter().map(of).collect();
            all.sort();
            all
        };
        let call = |view: &Self| waits_in(&view.frames).map(|(frame, waits)| (frame.name().to_owned(), waits));
        let whole = |view: &Self| {
            (view.rank, view.round, view.pid, view.life, view.answered, view.is_stopped(), view.has_ended())
        };
        whole(self) == whole(other) && call(self) == call(other) && collectives(self) == collectives(other)
    }

    /// Cut what is too long, and make texts safe to print. The view then has at most [`VIEW_LIMIT_BYTES`].
    pub fn fit(&mut self) {
        self.frames.truncate(FRAMES_LIMIT);
        self.data_workers.sort_by_key(|worker| (worker.is_idle(), worker.pid));
        self.data_workers.truncate(DATA_WORKERS_LIMIT);
        self.signatures.truncate(SIGNATURES_LIMIT);
        self.groups.truncate(GROUPS_LIMIT);
        if let Some(call) = &mut self.call {
            fit(&mut call.name, NAME_LIMIT_BYTES);
            call.file.iter_mut().for_each(|file| fit(file, PATH_LIMIT_BYTES));
            call.file_system.iter_mut().for_each(|name| fit(name, NAME_LIMIT_BYTES));
        }
        self.frames.iter_mut().for_each(Frame::fit);
        self.data_workers.iter_mut().for_each(DataWorker::fit);
        for Signature { op, shape } in &mut self.signatures {
            fit(op, NAME_LIMIT_BYTES);
            fit(shape, SHAPE_LIMIT_BYTES);
        }
        for group in &mut self.groups {
            fit(&mut group.name, NAME_LIMIT_BYTES);
            fit(&mut group.desc, NAME_LIMIT_BYTES);
            group.ranks.take_if(|ranks| ranks.validate().is_err());
            group.pending.truncate(PENDING_LIMIT);
            group.tail.drain(..group.tail.len().saturating_sub(TAIL_LIMIT));
        }
        // What says least goes first: the outer frames, then further data workers, members, and groups without anything pending.
        let mut kept = FRAMES_LIMIT;
        while kept > 8 && self.is_too_long() {
            kept /= 2;
            self.frames.truncate(kept);
            self.data_workers.iter_mut().for_each(|worker| worker.frames.truncate(kept));
        }
        if self.is_too_long() {
            self.data_workers.sort_by_key(|worker| (worker.is_idle(), worker.pid));
            self.data_workers.truncate(1);
        }
        if self.is_too_long() {
            self.groups.iter_mut().for_each(|group| group.ranks = None);
        }
        if self.is_too_long() {
            self.groups.sort_by_key(|group| group.pending.is_empty());
        }
        while self.is_too_long() && self.groups.pop().is_some() {}
    }

    fn is_too_long(&self) -> bool {
        self.encode().len() > VIEW_LIMIT_BYTES
    }

    /// The bytes of the view.
    pub fn encode(&self) -> Vec<u8> {
        // Nothing in it can fail to serialise: lengths are known, and there are no maps.
        postcard::to_stdvec(self).unwrap_or_default()
    }

    /// A view that a peer has sent.
    ///
    /// # Errors
    /// A sentence naming what is not allowed, and what is.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() > VIEW_LIMIT_BYTES {
            return Err(format!("the view has {} bytes, must have at most {VIEW_LIMIT_BYTES}", bytes.len()));
        }
        let Ok((view, [])) = postcard::take_from_bytes::<Self>(bytes) else {
            return Err(format!("{} bytes are not a view of this protocol", bytes.len()));
        };
        view.validate()?;
        Ok(view)
    }

    /// Check a view that a peer has sent.
    ///
    /// # Errors
    /// A sentence naming what is not allowed, and what is.
    pub fn validate(&self) -> Result<(), String> {
        at_most("frames", self.frames.len(), FRAMES_LIMIT)?;
        at_most("data workers", self.data_workers.len(), DATA_WORKERS_LIMIT)?;
        at_most("signatures", self.signatures.len(), SIGNATURES_LIMIT)?;
        at_most("groups", self.groups.len(), GROUPS_LIMIT)?;
        self.call.as_ref().map_or(Ok(()), Call::validate)?;
        self.frames.iter().try_for_each(Frame::validate)?;
        self.data_workers.iter().try_for_each(DataWorker::validate)?;
        for Signature { op, shape } in &self.signatures {
            check("operation", op, NAME_LIMIT_BYTES)?;
            check("shape", shape, SHAPE_LIMIT_BYTES)?;
        }
        for group in &self.groups {
            check("group's name", &group.name, NAME_LIMIT_BYTES)?;
            check("group's description", &group.desc, NAME_LIMIT_BYTES)?;
            at_most("pending collectives", group.pending.len(), PENDING_LIMIT)?;
            at_most("last collectives", group.tail.len(), TAIL_LIMIT)?;
            group.ranks.as_ref().map_or(Ok(()), Ranks::validate)?;
        }
        Ok(())
    }
}

pub(super) fn at_most(what: &str, count: usize, limit: usize) -> Result<(), String> {
    match count > limit {
        true => Err(format!("there are {count} {what}, at most {limit} are allowed")),
        false => Ok(()),
    }
}

/// One line of at most so many bytes, without characters that steer a terminal.
fn fit(text: &mut String, limit: usize) {
    *text = cut(plain(std::mem::take(text)), limit);
}

#[cfg(test)]
mod tests;
