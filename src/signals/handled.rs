//! Signals as messages: while [`Signals`] lives, those it has taken end nobody and interrupt nothing; they are read.
//!
//! The kernel gives a signal to any thread that does not block it, and a program that runs an agent may have threads of its own. So a
//! handler takes signals, in whichever thread, and writes them to a pipe (`docs/decisions/0110-a-handler-writes-signals-to-a-pipe.md`).
//! [`watch`] leaves them to the handlers of Python, and drops repetitions.
//!
//! Handlers do only what a signal handler may: system calls and atomics.

use std::io;
use std::marker::PhantomData;
use std::mem::{self, MaybeUninit};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize};

use parking_lot::Mutex;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::getpid;
use tokio::io::unix::AsyncFd;

use super::Signal;
use super::repetition::Repetition;
use super::sender::Sender;
use crate::clock::monotonic_ns;

/// Signals of a process that handles them for a job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Which end the job, or this node's part in it.
    pub signals: Vec<Signal>,
    /// Which do not. Each of them counts, however soon it comes after another.
    pub passed_on: Vec<Signal>,
    /// The user has named them. Otherwise SIGHUP stays ignored if it is: by `nohup`.
    pub named: bool,
    /// A driver has started this process, and passes its signals on.
    pub driven: bool,
}

/// A signal that has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Its number.
    pub signal: i32,
    /// The sender, as far as the kernel reports it.
    pub sender: Sender,
}

/// Signals of this process, taken from whichever of its threads.
#[derive(Debug)]
pub struct Signals {
    pipe: OwnedFd,
    driven: bool,
    /// What they did before, and SIGINT if it is not among them.
    before: Vec<(i32, libc::sigaction)>,
    /// The mask of the thread that has taken them, which lets them through meanwhile.
    mask: libc::sigset_t,
    /// A mask is a thread's.
    _of_this_thread: PhantomData<*const ()>,
}

/// The process whose [`Signals`] take signals. A child that is forked meanwhile has the handlers, and is another process.
static TAKEN_BY: AtomicI32 = AtomicI32::new(0);
/// The process that watches signals.
static WATCHED_BY: AtomicI32 = AtomicI32::new(0);
/// The pipe's end that the handler writes to.
static WRITE_END: AtomicI32 = AtomicI32::new(-1);
/// When the last signal counted, on the system's monotonic clock; 0: none has.
static LAST: AtomicU64 = AtomicU64::new(0);
/// Signals of which each counts: bit 0 is number 1.
static EACH: AtomicU64 = AtomicU64::new(0);
/// Numbers of signals are below this.
const END: usize = 65;
/// What signals did before they were taken, for children.
static BEFORE: [Former; END] = [const { Former::new() }; END];
/// What signals do that are watched.
static WATCHED: [Former; END] = [const { Former::new() }; END];
/// Who has sent the last signal of each number that was watched.
static SENDERS: [AtomicU64; END] = [const { AtomicU64::new(Sender::Unknown.packed()) }; END];

/// The process's pipe, and its owner. It stays open: a handler may be about to write to it.
static PIPE: Mutex<Option<(i32, OwnedFd, OwnedFd)>> = Mutex::new(None);

/// What a handler writes to the pipe.
#[repr(C)]
#[derive(Clone, Copy)]
struct Record {
    signal: i32,
    repeats: i32,
    sender: u64,
}

const RECORD_BYTES: usize = size_of::<Record>();

impl Signals {
    /// Take these. SIGKILL and SIGSTOP cannot be. SIGINT, if it is not among them, ends the process: Python's handler of it would
    /// not run before this is dropped.
    ///
    /// # Errors
    /// No descriptor is left, or an agent in another thread of this process has taken signals.
    pub fn take(wanted: &Wanted) -> io::Result<Signals> {
        let pipe = pipe_of_this_process()?;
        let own = getpid().as_raw_pid();
        let taken = TAKEN_BY.fetch_update(AcqRel, Acquire, |by| (by != own).then_some(own));
        if taken.is_err() {
            return Err(io::Error::other("an agent in another thread of this process handles its signals"));
        }
        while let Ok(Some(_)) = read(&pipe) {} // of the agent before
        LAST.store(0, Relaxed);
        EACH.store(bits_of(&wanted.passed_on), Relaxed);
        let ending = wanted.signals.iter().map(|signal| signal.0).filter(|&it| !stays_ignored(it, wanted));
        let signals: Vec<_> = ending.chain(wanted.passed_on.iter().map(|signal| signal.0)).collect();
        let mut before = Vec::new();
        for &signal in &signals {
            before.extend(install(signal, &BEFORE, deliver, None).map(|action| (signal, action)));
        }
        if !signals.contains(&libc::SIGINT) {
            before.extend(end_by_interrupt().map(|action| (libc::SIGINT, action)));
        }
        let driven = wanted.driven;
        Ok(Signals { pipe, driven, before, mask: let_through(&signals), _of_this_thread: PhantomData })
    }

    /// Where to read them. Needs a tokio runtime.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn receiver(&self) -> io::Result<Receiver> {
        let fd = self.pipe.try_clone()?;
        // SAFETY: an `OwnedFd` always refers to the same open descriptor until it is dropped.
        let pipe = unsafe { AsyncFd::register(fd) }.map_err(io::Error::from)?;
        Ok(Receiver { pipe: Some(pipe), driven: self.driven })
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        // SAFETY: the actions are those that these signals had, and the mask is the one that this thread had.
        unsafe {
            for (signal, action) in &self.before {
                libc::sigaction(*signal, action, ptr::null_mut());
            }
            libc::pthread_sigmask(libc::SIG_SETMASK, &self.mask, ptr::null_mut());
        }
        TAKEN_BY.store(0, Release);
    }
}

/// Have repetitions of these signals dropped, and remember who sends them ([`last_sender`]). Apart from that they do what they do
/// now. Those without a handler stay as they are. `passed_on`: further signals, each of which counts. `goes_on`: only their handlers have
/// changed, and a repetition of a signal that came before is still one.
pub fn watch(signals: &[Signal], passed_on: &[Signal], goes_on: bool) {
    WATCHED_BY.store(getpid().as_raw_pid(), Release);
    if !goes_on {
        LAST.store(0, Relaxed);
    }
    EACH.store(bits_of(passed_on), Relaxed);
    for signal in signals.iter().chain(passed_on) {
        // SAFETY: an action on the stack, filled before it is read.
        let now = unsafe {
            let mut now: libc::sigaction = mem::zeroed();
            if libc::sigaction(signal.0, ptr::null(), &mut now) == -1 {
                continue;
            }
            now
        };
        if ![libc::SIG_DFL, libc::SIG_IGN, pass_on as *const () as usize].contains(&now.sa_sigaction) {
            install(signal.0, &WATCHED, pass_on, Some(&now));
        }
    }
}

/// Who has sent the last signal of this number that was watched.
pub fn last_sender(signal: i32) -> Sender {
    let sender = usize::try_from(signal).ok().and_then(|index| SENDERS.get(index));
    sender.map_or(Sender::Unknown, |sender| Sender::unpacked(sender.load(Relaxed)))
}

/// The set of these, as in [`EACH`].
fn bits_of(signals: &[Signal]) -> u64 {
    signals.iter().filter_map(|signal| bit_of(signal.0)).fold(0, |bits, bit| bits | bit)
}

fn bit_of(signal: i32) -> Option<u64> {
    1_u64.checked_shl(u32::try_from(signal).ok()?.checked_sub(1)?)
}

/// Whether a signal that comes now repeats one that has come before. If not, it counts.
fn repeats(signal: i32) -> bool {
    let each_counts = bit_of(signal).is_some_and(|bit| EACH.load(Relaxed) & bit != 0);
    !each_counts && Repetition::of(&LAST).repeats(monotonic_ns())
}

/// Whether a signal is none of this process's, since whoever started it has chosen so.
fn stays_ignored(signal: i32, wanted: &Wanted) -> bool {
    let stays = signal == libc::SIGHUP && !wanted.named && is_ignored(signal);
    if stays {
        tracing::info!(
            target: "elastic_rs::agent",
            "SIGHUP stays ignored, as it was when this process was started (nohup), here and in the workers; \
             --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT handles it all the same"
        );
    }
    stays
}

fn is_ignored(signal: i32) -> bool {
    // SAFETY: an action on the stack, filled before it is read.
    unsafe {
        let mut now: libc::sigaction = mem::zeroed();
        libc::sigaction(signal, ptr::null(), &mut now) == 0 && now.sa_sigaction == libc::SIG_IGN
    }
}

/// The read end of the pipe.
fn pipe_of_this_process() -> io::Result<OwnedFd> {
    let own = getpid().as_raw_pid();
    let mut pipe = PIPE.lock();
    let read = match &*pipe {
        Some((of, read, _)) if *of == own => read.try_clone()?,
        _ => {
            let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
            WRITE_END.store(write.as_raw_fd(), Release);
            let end = read.try_clone()?;
            *pipe = Some((own, read, write));
            end
        }
    };
    Ok(read)
}

type Handler = unsafe extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);

/// What a signal did before it had a handler of ours, as a handler can read it.
struct Former {
    handler: AtomicUsize,
    flags: AtomicI32,
}

impl Former {
    const fn new() -> Self {
        Self { handler: AtomicUsize::new(libc::SIG_DFL), flags: AtomicI32::new(0) }
    }

    /// Do what the signal did. SAFETY: only in a handler of this signal, with its arguments.
    unsafe fn act(&self, signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
        match self.handler.load(Acquire) {
            libc::SIG_IGN => {}
            // SAFETY: plain system calls. The signal is blocked until the handler returns, and ends the process then.
            libc::SIG_DFL => unsafe {
                libc::signal(signal, libc::SIG_DFL);
                libc::raise(signal);
            },
            handler if self.flags.load(Acquire) & libc::SA_SIGINFO != 0 => {
                // SAFETY: the kernel was given this address as a handler of this form.
                let handler = unsafe { mem::transmute::<usize, Handler>(handler) };
                unsafe { handler(signal, info, context) }
            }
            handler => {
                // SAFETY: as above.
                let handler = unsafe { mem::transmute::<usize, unsafe extern "C" fn(libc::c_int)>(handler) };
                unsafe { handler(signal) }
            }
        }
    }
}

/// Have a signal handled, and return what it did. `like`: with the flags and the mask of this action. `None`: the signal cannot be
/// handled.
fn install(
    signal: i32,
    table: &[Former; END],
    handler: Handler,
    like: Option<&libc::sigaction>,
) -> Option<libc::sigaction> {
    let former = table.get(usize::try_from(signal).ok()?)?;
    // SAFETY: actions on the stack, filled before they are read.
    unsafe {
        let mut before: libc::sigaction = mem::zeroed();
        if libc::sigaction(signal, ptr::null(), &mut before) == -1 {
            return None;
        }
        let own = handler as *const () as usize;
        if before.sa_sigaction != own {
            former.flags.store(before.sa_flags, Release);
            former.handler.store(before.sa_sigaction, Release);
        }
        let mut action: libc::sigaction = mem::zeroed();
        action.sa_sigaction = own;
        match like {
            Some(like) => (action.sa_flags, action.sa_mask) = (like.sa_flags | libc::SA_SIGINFO, like.sa_mask),
            None => {
                action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART | libc::SA_ONSTACK;
                libc::sigfillset(&mut action.sa_mask);
            }
        }
        (libc::sigaction(signal, &action, ptr::null_mut()) == 0).then_some(before)
    }
}

/// Let these signals through to the calling thread: all threads of a process may have been started with them blocked. Gives its mask.
fn let_through(signals: &[i32]) -> libc::sigset_t {
    // SAFETY: masks on the stack, filled before they are read.
    unsafe {
        let (mut mask, mut before) = (mem::zeroed(), mem::zeroed());
        libc::sigemptyset(&mut mask);
        for signal in signals {
            libc::sigaddset(&mut mask, *signal);
        }
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &mask, &mut before);
        before
    }
}

/// Has SIGINT do what it does without a handler; where it is ignored (a background job of a shell), it stays so. Gives what it
/// did before.
fn end_by_interrupt() -> Option<libc::sigaction> {
    // SAFETY: actions on the stack, filled before they are read. All zero is the default action.
    unsafe {
        let mut before: libc::sigaction = mem::zeroed();
        libc::sigaction(libc::SIGINT, ptr::null(), &mut before);
        if before.sa_sigaction == libc::SIG_IGN {
            return None;
        }
        libc::sigaction(libc::SIGINT, &mem::zeroed(), ptr::null_mut());
        Some(before)
    }
}

/// The handler of signals that are taken.
unsafe extern "C" fn deliver(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: this is a handler of this signal, with the arguments from the kernel.
    unsafe {
        let errno = *libc::__errno_location();
        if TAKEN_BY.load(Acquire) == libc::getpid() {
            let record = Record { signal, repeats: i32::from(repeats(signal)), sender: Sender::of(&*info).packed() };
            // Whole or not at all, since it is short. If nobody has read thousands of them, one more says nothing new.
            libc::write(WRITE_END.load(Acquire), ptr::from_ref(&record).cast(), RECORD_BYTES);
        } else if let Some(former) = BEFORE.get(signal as usize) {
            former.act(signal, info, context);
        }
        *libc::__errno_location() = errno;
    }
}

/// The handler of signals that are watched.
unsafe extern "C" fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: as of `deliver`.
    unsafe {
        let errno = *libc::__errno_location();
        let is_watched = WATCHED_BY.load(Acquire) == libc::getpid();
        if !(is_watched && repeats(signal)) {
            if let Some(sender) = SENDERS.get(signal as usize) {
                sender.store(Sender::of(&*info).packed(), Relaxed);
            }
            if let Some(former) = WATCHED.get(signal as usize) {
                former.act(signal, info, context);
            }
        }
        *libc::__errno_location() = errno;
    }
}

/// The signals as they come.
#[derive(Debug, Default)]
pub struct Receiver {
    pipe: Option<AsyncFd<OwnedFd>>,
    driven: bool,
}

impl Receiver {
    /// One that gets no signals, for a program that handles its own.
    pub fn of_nothing() -> Self {
        Self::default()
    }

    /// The next one that is no repetition. May be cancelled.
    pub async fn next(&mut self) -> Received {
        let Some(pipe) = &self.pipe else { return std::future::pending().await };
        loop {
            let Ok(mut ready) = pipe.readable().await else {
                return std::future::pending().await; // the runtime ends, and this future with it
            };
            match read(pipe.get_ref()) {
                Ok(Some(Record { signal, repeats: 0, sender })) => {
                    let sender = Sender::unpacked(sender);
                    return Received { signal, sender: if self.driven { sender.passed_on() } else { sender } };
                }
                Ok(Some(Record { signal, .. })) => tracing::info!(
                    target: "elastic_rs::agent",
                    "{} came again at once, which counts as the one before: wrappers deliver twice",
                    Signal(signal)
                ),
                Ok(None) => ready.clear_ready(),
                Err(error) => {
                    tracing::error!(%error, "signals cannot be read any longer; this process goes on, and only SIGKILL ends it");
                    return std::future::pending().await;
                }
            }
        }
    }
}

/// One signal, if there is one.
fn read(fd: impl AsFd) -> io::Result<Option<Record>> {
    let mut bytes = [MaybeUninit::<u8>::uninit(); RECORD_BYTES];
    match rustix::io::read(fd, &mut bytes) {
        Ok((read, _)) => Ok(read.first_chunk::<RECORD_BYTES>().map(Record::decode)),
        Err(rustix::io::Errno::AGAIN) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

impl Record {
    fn decode(bytes: &[u8; RECORD_BYTES]) -> Self {
        let part = |at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
        let sender =
            u64::from_ne_bytes([bytes[8], bytes[9], bytes[10], bytes[11], bytes[12], bytes[13], bytes[14], bytes[15]]);
        Self { signal: i32::from_ne_bytes(part(0)), repeats: i32::from_ne_bytes(part(4)), sender }
    }
}

#[cfg(test)]
mod tests;
