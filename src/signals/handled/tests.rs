use std::thread;

use super::super::repetition::SAME_SIGNAL;
use super::*;

/// Tests of one process would take each other's signals.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn wanted(signals: &[i32]) -> Wanted {
    Wanted { signals: signals.iter().copied().map(Signal).collect(), ..Wanted::default() }
}

/// To this very thread.
fn raise(signal: i32) {
    // SAFETY: a plain system call.
    unsafe { libc::raise(signal) };
}

fn action_of(signal: i32) -> usize {
    // SAFETY: an action on the stack, filled before it is read.
    unsafe {
        let mut now: libc::sigaction = mem::zeroed();
        libc::sigaction(signal, ptr::null(), &mut now);
        now.sa_sigaction
    }
}

fn receiver_of(taken: &Signals, runtime: &tokio::runtime::Runtime) -> Receiver {
    let _inside = runtime.enter();
    taken.receiver().unwrap()
}

#[test]
fn a_signal_that_another_thread_gets_is_read_with_its_sender_and_ends_nobody() {
    let _alone = ONE_AT_A_TIME.lock();
    let (before, runtime) = (action_of(libc::SIGUSR1), runtime());
    let taken = Signals::take(&wanted(&[libc::SIGUSR1])).unwrap();
    let mut receiver = receiver_of(&taken, &runtime);
    thread::spawn(|| raise(libc::SIGUSR1)).join().unwrap();
    let received = runtime.block_on(receiver.next());
    assert_eq!(received.signal, libc::SIGUSR1);
    // SAFETY: plain system calls.
    let (pid, uid) = unsafe { (libc::getpid().unsigned_abs(), libc::getuid()) };
    assert_eq!(received.sender, Sender::Process { pid, uid });
    drop(taken);
    assert_eq!(action_of(libc::SIGUSR1), before);
}

#[test]
fn of_two_signals_at_once_one_is_read() {
    let _alone = ONE_AT_A_TIME.lock();
    let runtime = runtime();
    let taken = Signals::take(&wanted(&[libc::SIGUSR1, libc::SIGUSR2])).unwrap();
    let mut receiver = receiver_of(&taken, &runtime);
    raise(libc::SIGUSR1);
    raise(libc::SIGUSR2);
    let at = LAST.load(Relaxed) - SAME_SIGNAL.as_nanos() as u64;
    LAST.store(at - 1_000_000_000, Relaxed); // as if they had come a while ago
    raise(libc::SIGUSR2);
    let read = runtime.block_on(async { [receiver.next().await, receiver.next().await] });
    assert_eq!(read.map(|received| received.signal), [libc::SIGUSR1, libc::SIGUSR2]);
}

#[test]
fn of_signals_that_end_nothing_each_counts_and_none_hides_another() {
    let _alone = ONE_AT_A_TIME.lock();
    let runtime = runtime();
    let wanted = Wanted { passed_on: vec![Signal(libc::SIGUSR1)], ..wanted(&[libc::SIGUSR2]) };
    let taken = Signals::take(&wanted).unwrap();
    let mut receiver = receiver_of(&taken, &runtime);
    let sent = [libc::SIGUSR1, libc::SIGUSR1, libc::SIGUSR2, libc::SIGUSR2, libc::SIGUSR1];
    sent.into_iter().for_each(raise);
    let read = runtime.block_on(async {
        [receiver.next().await, receiver.next().await, receiver.next().await, receiver.next().await]
    });
    assert_eq!(read.map(|it| it.signal), [libc::SIGUSR1, libc::SIGUSR1, libc::SIGUSR2, libc::SIGUSR1]);
}

#[test]
fn signals_that_the_thread_blocks_are_let_through_meanwhile() {
    let _alone = ONE_AT_A_TIME.lock();
    let runtime = runtime();
    // SAFETY: a mask on the stack, filled before it is read.
    let block = |how| unsafe {
        let mut mask = mem::zeroed();
        libc::sigemptyset(&mut mask);
        libc::sigaddset(&mut mask, libc::SIGUSR1);
        libc::pthread_sigmask(how, &mask, ptr::null_mut());
    };
    block(libc::SIG_BLOCK);
    let blocked = crate::threads::blocked();
    let taken = Signals::take(&wanted(&[libc::SIGUSR1])).unwrap();
    let mut receiver = receiver_of(&taken, &runtime);
    raise(libc::SIGUSR1);
    assert_eq!(runtime.block_on(receiver.next()).signal, libc::SIGUSR1);
    drop(taken);
    assert_eq!(crate::threads::blocked(), blocked);
    block(libc::SIG_UNBLOCK);
}

#[test]
fn two_agents_of_a_process_do_not_take_each_others_signals() {
    let _alone = ONE_AT_A_TIME.lock();
    let taken = Signals::take(&wanted(&[libc::SIGUSR1])).unwrap();
    let error = thread::spawn(|| Signals::take(&wanted(&[libc::SIGUSR2])).unwrap_err().to_string()).join().unwrap();
    assert_eq!(error, "an agent in another thread of this process handles its signals");
    drop(taken);
    drop(Signals::take(&wanted(&[libc::SIGUSR1])).unwrap());
}

#[test]
fn sighup_stays_ignored_unless_it_is_named() {
    let _alone = ONE_AT_A_TIME.lock();
    // SAFETY: no handler is installed.
    let before = unsafe { libc::signal(libc::SIGHUP, libc::SIG_IGN) };
    let default = wanted(&[libc::SIGTERM, libc::SIGHUP]);
    let taken = Signals::take(&default).unwrap();
    assert_eq!(action_of(libc::SIGHUP), libc::SIG_IGN);
    drop(taken);
    let taken = Signals::take(&Wanted { named: true, ..default.clone() }).unwrap();
    assert_ne!(action_of(libc::SIGHUP), libc::SIG_IGN);
    drop(taken);
    // SAFETY: the handler that was there.
    unsafe { libc::signal(libc::SIGHUP, before) };
    let taken = Signals::take(&default).unwrap();
    assert_ne!(action_of(libc::SIGHUP), before, "it is handled where nobody ignores it");
    drop(taken);
}

static HANDLED: AtomicI32 = AtomicI32::new(0);

extern "C" fn count(_: libc::c_int) {
    HANDLED.fetch_add(1, Relaxed);
}

#[test]
fn a_watched_signal_reaches_its_handler_once_and_a_child_has_the_handler_alone() {
    let _alone = ONE_AT_A_TIME.lock();
    // SAFETY: the handler does what a handler may.
    let before = unsafe { libc::signal(libc::SIGUSR1, count as extern "C" fn(libc::c_int) as usize) };
    watch(&[Signal(libc::SIGUSR1), Signal(libc::SIGUSR2)], &[], false);
    watch(&[Signal(libc::SIGUSR1)], &[], false);
    raise(libc::SIGUSR1);
    raise(libc::SIGUSR1);
    assert_eq!(HANDLED.load(Relaxed), 1);
    let own = Sender::Process { pid: std::process::id(), uid: rustix::process::getuid().as_raw() };
    assert_eq!((last_sender(libc::SIGUSR1), last_sender(libc::SIGUSR2)), (own, Sender::Unknown));
    WATCHED_BY.store(1, Relaxed); // as in a child that was forked
    raise(libc::SIGUSR1);
    raise(libc::SIGUSR1);
    assert_eq!(HANDLED.load(Relaxed), 3);
    // SAFETY: the handler that was there.
    unsafe { libc::signal(libc::SIGUSR1, before) };
}

#[test]
fn a_child_that_is_forked_meanwhile_does_what_it_would_do_without_us() {
    let _alone = ONE_AT_A_TIME.lock();
    // SAFETY: the handler does what a handler may.
    let before = unsafe { libc::signal(libc::SIGUSR1, count as extern "C" fn(libc::c_int) as usize) };
    let runtime = runtime();
    let taken = Signals::take(&wanted(&[libc::SIGUSR1])).unwrap();
    let handled = HANDLED.load(Relaxed);
    TAKEN_BY.store(1, Relaxed); // as in a child
    raise(libc::SIGUSR1);
    assert_eq!(HANDLED.load(Relaxed), handled + 1);
    TAKEN_BY.store(getpid().as_raw_pid(), Relaxed);
    let mut receiver = receiver_of(&taken, &runtime);
    raise(libc::SIGUSR1);
    assert_eq!(runtime.block_on(receiver.next()).signal, libc::SIGUSR1);
    drop(taken);
    // SAFETY: the handler that was there.
    unsafe { libc::signal(libc::SIGUSR1, before) };
}
