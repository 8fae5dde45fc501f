//! A worker's death is known before its memory is freed.
//!
//! The kernel tells a parent of a death once it has freed the memory: 0.1 s for each GiB. Before that it goes through the *robust
//! mutexes* that the dying thread holds, and wakes who waits for them. So the main thread of a worker holds one, in the memory that it
//! shares with its agent, and a thread of the agent waits for each worker. The mutex is the C library's, whose list of them stays whole.
//!
//! A worker may write anything into its memory, and the kernel lets go of the mutex as well when the process executes another program.
//! So `/proc` has to say that the process dies, by what, and that its other threads die with it. Whatever ends well, and whatever cannot
//! be known so early, is known by the worker's guard as before.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::thread::futex::{Flags, OWNER_DIED, WAITERS, wait, wake};

use super::slot::{MUTEX_AT, SLOT_BYTES};
use crate::processes::stat_fields;
use crate::threads;

/// The part of the word that says which thread holds the mutex.
const HOLDER: u32 = !(WAITERS | OWNER_DIED);
/// The word of a worker that is not waited for any more. No thread has this number.
const RELEASED: u32 = HOLDER;
/// So often is the word looked at in vain. A worker may change it, and wake the agent, without end.
const LOOKS: usize = 64;
/// To wake all who wait: the kernel counts in an `int`, and stops at one below zero after the first.
const ALL: u32 = i32::MAX.cast_unsigned();
/// `PF_EXITING` of the kernel's `sched.h`.
const EXITING: u64 = 4;
/// `PF_SIGNALED`: it is about to.
const SIGNALED: u64 = 0x400;

/// Let the main thread of this process, if that calls, hold the mutex in its worker's memory for as long as it lives. Does nothing if
/// the mutex is held, or was.
///
/// # Safety
/// The memory of a worker, mapped for ever.
#[cfg(target_env = "gnu")]
pub(super) unsafe fn hold(slot: NonNull<u8>) {
    // SAFETY: the word is aligned, and in the slot. The lock of a mutex is its first word (`struct __pthread_mutex_s`).
    let (mutex, word) = unsafe {
        let mutex = slot.as_ptr().add(MUTEX_AT).cast::<libc::pthread_mutex_t>();
        (mutex, &*mutex.cast::<AtomicU32>())
    };
    let is_main = rustix::thread::gettid() == rustix::process::getpid();
    if !is_main || word.load(Ordering::Relaxed) != 0 {
        return;
    }
    // SAFETY: the memory has room for a mutex, and nobody else initializes it: this process owns the slot.
    unsafe {
        let mut attributes = std::mem::zeroed();
        let made = libc::pthread_mutexattr_init(&mut attributes) == 0
            && libc::pthread_mutexattr_setpshared(&mut attributes, libc::PTHREAD_PROCESS_SHARED) == 0
            && libc::pthread_mutexattr_setrobust(&mut attributes, libc::PTHREAD_MUTEX_ROBUST) == 0
            && libc::pthread_mutex_init(mutex, &attributes) == 0;
        if !(made && libc::pthread_mutex_trylock(mutex) == 0) {
            return; // its death is known later
        }
    }
    // The kernel wakes nobody if nobody is said to wait.
    word.fetch_or(WAITERS, Ordering::Release);
    let _ = wake(word, Flags::empty(), ALL);
}

/// Other C libraries have their word elsewhere.
#[cfg(not(target_env = "gnu"))]
pub(super) unsafe fn hold(_slot: NonNull<u8>) {}

/// The mutexes of all workers of a node, as the agent sees them.
#[derive(Debug)]
pub struct Deaths {
    memory: NonNull<u8>,
    bytes: usize,
}

// SAFETY: only atomic words of the mapping are accessed.
unsafe impl Send for Deaths {}
// SAFETY: as above.
unsafe impl Sync for Deaths {}

impl Deaths {
    /// # Errors
    /// The memory cannot be mapped.
    pub(super) fn map(memory: &File, workers: u32) -> io::Result<Self> {
        let bytes = workers as usize * SLOT_BYTES;
        // SAFETY: a new mapping of a file whose length is sealed.
        let mapped = unsafe {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(ptr::null_mut(), bytes, protection, libc::MAP_SHARED, memory.as_raw_fd(), 0)
        };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let memory = NonNull::new(mapped.cast()).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self { memory, bytes })
    }

    fn word(&self, local_rank: u32) -> Option<&AtomicU32> {
        let at = local_rank as usize * SLOT_BYTES + MUTEX_AT;
        // SAFETY: an aligned word within the mapping, which lives as long as this.
        (at < self.bytes).then(|| unsafe { &*self.memory.as_ptr().add(at).cast() })
    }

    /// A worker is about to be started: it holds nothing.
    pub fn forget(&self, local_rank: u32) {
        if let Some(word) = self.word(local_rank) {
            word.store(0, Ordering::Release);
        }
    }

    /// Tell how this worker dies, as soon as it does, by the status that `waitpid(2)` gives its parent later. Nothing is told of one
    /// that ends well.
    pub fn watch(self: &Arc<Self>, local_rank: u32, pid: u32, tell: impl FnOnce(i32) + Send + 'static) -> Watch {
        let deaths = self.clone();
        let wait_for_it = move || {
            if let Some(status) = deaths.word(local_rank).and_then(|word| death(word, pid)) {
                tell(status);
            }
        };
        // Without a thread its guard tells it.
        let _ = threads::spawn(format!("death-of-{local_rank}"), wait_for_it);
        Watch { deaths: self.clone(), local_rank, pid }
    }
}

impl Drop for Deaths {
    fn drop(&mut self) {
        // SAFETY: this mapping, which nobody refers to any more.
        unsafe { libc::munmap(self.memory.as_ptr().cast(), self.bytes) };
    }
}

/// Waits for the death of a worker, until this is dropped.
#[derive(Debug)]
pub struct Watch {
    deaths: Arc<Deaths>,
    local_rank: u32,
    pid: u32,
}

impl Drop for Watch {
    fn drop(&mut self) {
        let Some(word) = self.deaths.word(self.local_rank) else { return };
        // Another worker may have this memory by now.
        let release = |seen: u32| {
            let own = seen & HOLDER == self.pid || seen & HOLDER == 0;
            own.then_some(RELEASED)
        };
        if word.fetch_update(Ordering::Release, Ordering::Relaxed, release).is_ok() {
            let _ = wake(word, Flags::empty(), ALL);
        }
    }
}

/// Wait until the main thread of a process dies that holds a mutex with this word. `None`: that says nothing of how the process ends.
fn death(word: &AtomicU32, pid: u32) -> Option<i32> {
    for _ in 0..LOOKS {
        let seen = word.load(Ordering::Acquire);
        if seen & OWNER_DIED != 0 {
            return dies_by(pid);
        }
        // Nobody holds it yet, or this worker does. A process that the worker has started would say nothing of it.
        if seen != 0 && seen & HOLDER != pid {
            return None;
        }
        // An error means that the word has changed meanwhile.
        let _ = wait(word, Flags::empty(), seen, None);
    }
    None
}

/// By what a process dies, and all its threads with it.
fn dies_by(pid: u32) -> Option<i32> {
    let status = dying(&fs::read(format!("/proc/{pid}/stat")).ok()?)?;
    // Before Linux 5.16 threads let go of their mutexes, and then wait until the core is dumped, which a stop would cut off.
    let dumps = fs::read_to_string(format!("/proc/{pid}/status")).ok()?.lines().any(|line| line == "CoreDumping:\t1");
    if dumps {
        return None;
    }
    let mut threads = fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten().map(|entry| entry.file_name());
    // All others are killed as well, or none is.
    let other = threads.find(|thread| *thread != *pid.to_string());
    let lives = other.is_some_and(|thread| lives_on(&format!("/proc/{pid}/task/{}", thread.to_string_lossy())));
    (!lives).then_some(status)
}

/// Whether a thread is neither ending nor about to be killed.
fn lives_on(thread: &str) -> bool {
    // In this order: its flags say that it ends once the signal is pending no more.
    let Ok(status) = fs::read_to_string(format!("{thread}/status")) else { return false };
    let Ok(stat) = fs::read(format!("{thread}/stat")) else { return false };
    let pending = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigPnd:")?.trim(), 16).ok());
    let killed = pending.is_some_and(|pending| pending >> (libc::SIGKILL - 1) & 1 == 1);
    let exits = stat_fields(&stat).and_then(|fields| fields.get(6)?.parse::<u64>().ok());
    !killed && exits.is_some_and(|flags| flags & (EXITING | SIGNALED) == 0)
}

/// The status of a process that is ending, unless it ends well, or that cannot be seen.
fn dying(stat: &[u8]) -> Option<i32> {
    let fields = stat_fields(stat)?;
    let flags: u64 = fields.get(6)?.parse().ok()?;
    fields.get(49)?.parse().ok().filter(|status| flags & EXITING != 0 && *status != 0)
}

#[cfg(test)]
#[cfg(target_env = "gnu")]
mod tests {
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    /// The memory of one worker.
    fn memory() -> Arc<Deaths> {
        let memory = File::from(memfd_create("elastic_rs-test", MemfdFlags::CLOEXEC).unwrap());
        memory.set_len(SLOT_BYTES as u64).unwrap();
        Arc::new(Deaths::map(&memory, 1).unwrap())
    }

    /// A worker that holds its mutex, and then does this.
    struct Worker {
        deaths: Arc<Deaths>,
        pid: libc::pid_t,
        watch: Option<Watch>,
        reported: mpsc::Receiver<i32>,
    }

    impl Worker {
        fn that(then: impl FnOnce()) -> Self {
            let deaths = memory();
            // SAFETY: the child makes system calls, and ends without running anything of this process.
            let pid = unsafe { libc::fork() };
            if pid == 0 {
                // SAFETY: the memory of a worker.
                unsafe { hold(deaths.memory) };
                then();
                // SAFETY: ends the child.
                unsafe { libc::_exit(99) };
            }
            let (tell, reported) = mpsc::channel();
            let watch = deaths.watch(0, pid as u32, move |exit| tell.send(exit).unwrap());
            Self { deaths, pid, watch: Some(watch), reported }
        }

        /// Wait until it holds the mutex.
        fn holds(self) -> Self {
            let began = Instant::now();
            while self.deaths.word(0).unwrap().load(Ordering::Relaxed) != self.pid as u32 | WAITERS {
                assert!(began.elapsed() < LIMIT, "it does not hold the mutex");
                std::thread::yield_now();
            }
            self
        }

        fn kill(self) -> Self {
            // SAFETY: the child, which nobody has reaped.
            unsafe { libc::kill(self.pid, libc::SIGKILL) };
            self
        }

        /// The status that the watch has reported. `None`: it has ended without one.
        fn status(&self) -> Option<i32> {
            match self.reported.recv_timeout(LIMIT) {
                Ok(exit) => Some(exit),
                Err(mpsc::RecvTimeoutError::Disconnected) => None,
                Err(mpsc::RecvTimeoutError::Timeout) => panic!("it is waited for still"),
            }
        }
    }

    impl Drop for Worker {
        fn drop(&mut self) {
            // SAFETY: the child, which nobody has reaped.
            unsafe {
                libc::kill(self.pid, libc::SIGKILL);
                libc::waitpid(self.pid, ptr::null_mut(), 0);
            }
        }
    }

    fn pause() {
        loop {
            // SAFETY: waits.
            unsafe { libc::pause() };
        }
    }

    #[test]
    fn one_that_is_killed_is_known_before_it_is_reaped() {
        assert_eq!(Worker::that(pause).holds().kill().status(), Some(libc::SIGKILL));
    }

    #[test]
    fn one_that_fails_is_known_and_one_that_ends_well_is_left_to_its_guard() {
        // SAFETY: each ends the child.
        let exits = |code| Worker::that(move || unsafe { libc::_exit(code) }).status();
        assert_eq!((exits(3), exits(0)), (Some(3 << 8), None));
    }

    /// The process goes on.
    #[test]
    fn a_main_thread_that_ends_alone_is_no_death() {
        let worker = Worker::that(|| {
            std::thread::spawn(pause);
            // SAFETY: ends this thread alone.
            unsafe { libc::syscall(libc::SYS_exit, 3) };
        });
        assert_eq!(worker.status(), None);
    }

    #[test]
    fn another_program_is_no_death() {
        let worker = Worker::that(|| {
            let sleep = [c"/bin/sleep".as_ptr(), c"600".as_ptr(), ptr::null()];
            // SAFETY: texts that end with zero, and a list that ends with null.
            unsafe { libc::execv(sleep[0], sleep.as_ptr()) };
        });
        assert_eq!(worker.status(), None);
    }

    #[test]
    fn whatever_a_worker_writes_ends_the_wait_at_most() {
        let worker = Worker::that(pause).holds();
        let word = worker.deaths.word(0).unwrap();
        for written in [OWNER_DIED | worker.pid as u32, 1, u32::MAX, WAITERS] {
            let (tell, told) = mpsc::channel();
            let _watch = worker.deaths.watch(0, worker.pid as u32, move |exit| tell.send(exit).unwrap());
            word.store(written, Ordering::Relaxed);
            wake(word, Flags::empty(), ALL).unwrap();
            assert_eq!(told.recv().ok(), None, "{written:x}");
            word.store(worker.pid as u32 | WAITERS, Ordering::Relaxed);
        }
        let began = Instant::now();
        while worker.reported.try_recv() == Err(mpsc::TryRecvError::Empty) {
            assert!(began.elapsed() < LIMIT, "it is woken without end");
            wake(word, Flags::empty(), ALL).unwrap();
        }
    }

    #[test]
    fn nothing_is_reported_once_the_watch_is_dropped() {
        let mut worker = Worker::that(pause).holds();
        worker.watch = None;
        assert_eq!(worker.status(), None);
    }

    #[test]
    fn the_end_of_a_wait_changes_nothing_for_the_next_worker_there() {
        let mut worker = Worker::that(pause).holds();
        let word = worker.deaths.word(0).unwrap();
        word.store(1 | WAITERS, Ordering::Relaxed);
        worker.watch = None;
        assert_eq!(worker.deaths.word(0).unwrap().load(Ordering::Relaxed), 1 | WAITERS);
    }

    #[test]
    fn how_a_process_ends_is_a_field_of_its_state() {
        let stat = |flags: u64, status: i32| format!("7 (a) b) R 1 2 3 4 5 {flags} {}{status}\n", "0 ".repeat(42));
        let dies = |flags, status| dying(stat(flags, status).as_bytes());
        assert_eq!((dies(0x40_0104, 9), dies(4, 0x86), dies(4, 3 << 8)), (Some(9), Some(0x86), Some(3 << 8)));
        assert_eq!((dies(0x40_0100, 9), dies(4, 0)), (None, None), "it lives, or ends well");
        assert_eq!((dying(b"junk"), dying(b"1 (x) R 1 2")), (None, None));
    }
}
