//! A worker's end: it writes each step into its memory. A step costs a look at the clock and a few words of memory.

use std::env;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process;
use std::ptr::{self, NonNull};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::fs::{SealFlags, fcntl_get_seals};

use super::deaths;
use super::slot::{
    FIRST, FIRST_NS, FIRST_ROUND, GROUPED_NS, LARGEST_STEP, LAST, LAST_NS, Numbers, OWNER, ROUND, SLOT_BYTES, STATE,
    SYNCHRONISED_NS, in_section, is_of_optimizer, owned_by, owner, restarting, section,
};
use crate::clock::monotonic_ns;
use crate::processes::{forks, forks_now, is_alive, lineage};
use crate::steps::STEPS;

/// The value of [`STEPS`]: the agent's process, its descriptors of the memory and of the pipe, the worker's local rank, and how much memory
/// it has, by which another version of this package is known.
pub(super) fn variable(pid: u32, memory: RawFd, bell: RawFd, local_rank: u32) -> String {
    format!("{pid}:{memory}:{bell}:{local_rank}:{SLOT_BYTES}")
}

const SLOT: u32 = SLOT_BYTES as u32;

/// A worker's steps.
#[derive(Debug)]
pub struct Steps {
    /// Mapped until the process ends.
    words: &'static [AtomicU64; SLOT_BYTES / 8],
    bell: PathBuf,
    /// The agent's process, and the worker's local rank.
    agent: u32,
    local_rank: u32,
    /// This process owns the memory. It does until it ends.
    owns: AtomicBool,
    /// The count of forks in which the memory was mapped.
    forks: u64,
    /// The round whose first step was reported.
    first_round: AtomicU64,
    /// Number of the last step.
    last: AtomicU64,
    /// The training script has said where it is.
    given: AtomicBool,
    /// How many steps of an optimizer were counted.
    counted: AtomicU64,
    /// They are counted no more: the training script reports its steps, or nobody sees all of the optimizer's.
    counts_no_more: AtomicBool,
}

/// Another process owns the worker's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owned {
    /// That process.
    pub owner: u32,
    /// The worker's.
    pub local_rank: u32,
}

/// The steps of this process, once they were asked for. `None`: no agent of ours started it.
static OWN: OnceLock<Option<Steps>> = OnceLock::new();

impl Steps {
    /// The steps of this process, if the agent that started it has given it memory for them.
    #[inline]
    pub fn of_this_process() -> Option<&'static Self> {
        let open = || {
            let variable = env::var(STEPS).ok()?;
            Self::open(&variable)
                .inspect_err(|error| tracing::info!("the steps of this process are not measured: {error}"))
                .ok()
        };
        OWN.get_or_init(open).as_ref()
    }

    /// Map the memory that this value of [`STEPS`] names.
    ///
    /// # Errors
    /// The value is not one that an agent sets, or its memory cannot be mapped: the agent is gone, or cannot be seen from here.
    pub fn open(variable: &str) -> io::Result<Self> {
        let parts: Option<Vec<u32>> = variable.split(':').map(|part| part.parse().ok()).collect();
        let Some([pid, memory, bell, local_rank, SLOT]) = parts.as_deref() else {
            let text = format!("{STEPS} is `{variable}`, must be five numbers with `:` between them, the last {SLOT}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        };
        let path = |descriptor| PathBuf::from(format!("/proc/{pid}/fd/{descriptor}"));
        let words = map(&path(memory), u64::from(*local_rank) * SLOT_BYTES as u64)?;
        let (first_round, last, given) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
        let (bell, owns, forks) = (path(bell), AtomicBool::new(false), forks());
        let (counted, counts_no_more) = (AtomicU64::new(0), AtomicBool::new(false));
        let (agent, local_rank) = (*pid, *local_rank);
        Ok(Self { words, bell, agent, local_rank, owns, forks, first_round, last, given, counted, counts_no_more })
    }

    /// Own the memory of the worker, from now on until this process ends. The first one of a worker's processes does that asks for it:
    /// an evaluation that a worker starts must not be taken for the training.
    ///
    /// # Errors
    /// Another process owns it, which has not ended.
    pub fn claim(&self) -> Result<(), Owned> {
        let own = process::id();
        let word = &self.words[OWNER];
        let mut seen = word.load(Ordering::Relaxed);
        loop {
            match owner(seen) {
                Some(pid) if pid == own => break,
                // The number of one that has ended may be another's by now, who is no process of this agent.
                // What reports steps is the training, and not what only has an optimizer.
                Some(owner)
                    if !is_of_optimizer(seen) && is_alive(owner) && lineage(owner).any(|it| it == self.agent) =>
                {
                    return Err(Owned { owner, local_rank: self.local_rank });
                }
                _ => {}
            }
            match word.compare_exchange(seen, owned_by(own, Numbers::Given), Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => {
                    // The process that was killed may have been in a section.
                    self.words[STATE].store(0, Ordering::Relaxed);
                    break;
                }
                Err(now) => seen = now,
            }
        }
        if forks_now() == self.forks {
            self.owns.store(true, Ordering::Relaxed);
            self.hold();
        }
        Ok(())
    }

    /// Let the agent know of this process's death as soon as it dies, if this is its main thread.
    fn hold(&self) {
        // SAFETY: a worker's memory, which this process owns, and which is never unmapped.
        unsafe { deaths::hold(NonNull::from(self.words).cast()) };
    }

    /// A step has ended. `number`: by default the one after the last. Does nothing in a process that was forked from the worker, nor in
    /// one that another process of the worker was faster than.
    #[inline]
    pub fn step(&self, number: Option<u64>) {
        if !self.counts() {
            return;
        }
        if !self.counts_no_more.load(Ordering::Relaxed) {
            self.count_no_more();
        }
        if number.is_some() {
            self.given.store(true, Ordering::Relaxed);
        }
        let number = number.unwrap_or_else(|| self.last.load(Ordering::Relaxed).saturating_add(1)).min(LARGEST_STEP);
        self.last.store(number, Ordering::Relaxed);
        let (now, round) = (monotonic_ns(), self.words[ROUND].load(Ordering::Relaxed));
        if self.first_round.load(Ordering::Relaxed) != round {
            self.first(round, number, now);
        }
        self.words[LAST].store(number, Ordering::Relaxed);
        self.words[LAST_NS].store(now, Ordering::Relaxed);
    }

    /// A step of an optimizer has ended, unless the training script reports its steps itself. `is_next`: it counts. One of a further
    /// optimizer only shows that the training goes on. Does nothing in a process that was forked from the worker, nor in one of which
    /// another process owns the memory.
    pub fn count(&self, is_next: bool) {
        if self.counts_no_more.load(Ordering::Relaxed) || forks_now() != self.forks {
            return;
        }
        let own = process::id();
        let word = &self.words[OWNER];
        let by_counting = owned_by(own, Numbers::OfOptimizer);
        let owned = word.compare_exchange(0, by_counting, Ordering::Relaxed, Ordering::Relaxed);
        if owned.is_err_and(|seen| owner(seen) != Some(own)) {
            self.counts_no_more.store(true, Ordering::Relaxed);
            return;
        }
        let counted = self.counted.fetch_add(u64::from(is_next), Ordering::Relaxed) + u64::from(is_next);
        let (now, round) = (monotonic_ns(), self.words[ROUND].load(Ordering::Relaxed));
        if self.first_round.swap(round, Ordering::Relaxed) != round {
            self.write_first(round, counted, now, Numbers::OfOptimizer);
        }
        self.words[LAST].store(counted, Ordering::Relaxed);
        self.words[LAST_NS].store(now, Ordering::Relaxed);
    }

    /// Steps of optimizers are counted no more. Takes those back that were.
    #[cold]
    pub fn count_no_more(&self) {
        let was = self.counts_no_more.swap(true, Ordering::Relaxed);
        let seen = self.words[OWNER].load(Ordering::Relaxed);
        if !was && is_of_optimizer(seen) && owner(seen) == Some(process::id()) {
            self.words[FIRST_ROUND].store(0, Ordering::Relaxed);
            self.first_round.store(0, Ordering::Relaxed);
        }
    }

    /// Say whether this worker is restarted when the world changes, because its process group uses NCCL. Does nothing where
    /// [`Self::step`] does nothing.
    pub fn restarts_for_nccl(&self, restarts: bool) {
        self.change_state(|word| restarting(word, restarts));
    }

    /// Say in which section of the training this worker is, 0 for none. Returns in which it was. Does nothing where [`Self::step`] does
    /// nothing.
    pub fn enter(&self, entered: u32) -> u32 {
        self.change_state(|word| in_section(word, entered)).and_then(section).unwrap_or(0)
    }

    /// This worker has its process group now. Does nothing where [`Self::step`] does nothing.
    pub fn grouped(&self) {
        self.note(GROUPED_NS);
    }

    /// This worker has the state of its world now. Does nothing where [`Self::step`] does nothing.
    pub fn synchronised(&self) {
        self.note(SYNCHRONISED_NS);
    }

    fn note(&self, word: usize) {
        if self.counts() {
            self.words[word].store(monotonic_ns(), Ordering::Relaxed);
        }
    }

    #[inline]
    fn counts(&self) -> bool {
        forks_now() == self.forks && (self.owns.load(Ordering::Relaxed) || self.claim().is_ok())
    }

    fn change_state(&self, change: impl Fn(u64) -> u64) -> Option<u64> {
        let counts = self.counts();
        let word = &self.words[STATE];
        counts.then(|| word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |word| Some(change(word))).unwrap_or(0))
    }

    /// Go on counting from this number.
    pub fn go_on_from(&self, last: u64) {
        self.given.store(true, Ordering::Relaxed);
        self.last.store(last.min(LARGEST_STEP), Ordering::Relaxed);
    }

    /// Tell the first step of a round, and wake the agent.
    #[cold]
    fn first(&self, round: u64, number: u64, now: u64) {
        if self.first_round.swap(round, Ordering::Relaxed) == round {
            return; // another thread has reported it
        }
        self.hold();
        let is_given = self.given.load(Ordering::Relaxed);
        self.write_first(round, number, now, if is_given { Numbers::Given } else { Numbers::FromStart });
        let opened = OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(&self.bell);
        // If that fails, the agent has gone, or others have woken it.
        let _ = opened.and_then(|mut bell| bell.write_all(&[1]));
    }

    fn write_first(&self, round: u64, number: u64, now: u64, numbers: Numbers) {
        let owner = owned_by(process::id(), numbers);
        for (word, value) in [(OWNER, owner), (FIRST, number), (FIRST_NS, now), (LAST, number), (LAST_NS, now)] {
            self.words[word].store(value, Ordering::Relaxed);
        }
        self.words[FIRST_ROUND].store(round, Ordering::Release);
    }
}

/// Map the words at this place of a file.
fn map(path: &PathBuf, at: u64) -> io::Result<&'static [AtomicU64; SLOT_BYTES / 8]> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    // An access beyond the end of the file would be a signal, so its length must be sealed. Without an agent, another file may have
    // this path, and must not be written.
    let sealed = fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
    if !sealed || file.metadata()?.len() < at + SLOT_BYTES as u64 {
        let text = format!("`{}` has no memory for this worker", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    let page_bytes = rustix::param::page_size();
    let within = (at % page_bytes as u64) as usize;
    let offset = libc::off_t::try_from(at - within as u64).map_err(io::Error::other)?;
    // SAFETY: a new mapping of a page of the file. It is never unmapped, so the reference to it is valid until the process ends. The
    // slot lies within the page, because its size divides a page's. Atomic words have no invalid values, and may change at any time.
    unsafe {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let page = libc::mmap(ptr::null_mut(), page_bytes, protection, libc::MAP_SHARED, file.as_raw_fd(), offset);
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(&*page.byte_add(within).cast())
    }
}
