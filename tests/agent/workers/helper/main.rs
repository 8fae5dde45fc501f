//! The program that tests of worker processes start. It performs its arguments one after the other.

use std::env;
use std::io::{self, Write};
use std::process::exit;

mod agent;

fn main() {
    let mut args = env::args().skip(1);
    while let Some(word) = args.next() {
        let mut next = || args.next().unwrap_or_else(|| panic!("`{word}` lacks its argument"));
        match word.as_str() {
            "agent" => return agent::run(&next()),
            "agent-within" => return agent::run_within(&next(), &next()),
            "adopt" => adopt(),
            "attend" => attend(&next()),
            "say" => print(&next()),
            "complain" => eprintln!("{}", next()),
            // Print without a line end.
            "whisper" => whisper(next().as_bytes()),
            "exit" => exit(number(&next())),
            "pause" => pause(),
            "sleep-uninterruptibly" => sleep_uninterruptibly(),
            "ignore" => ignore(number(&next())),
            "child" => fork(&next(), 0),
            // An orphan in a session whose leader has ended, and one that leads its session.
            "orphan" => fork(&next(), 1),
            "daemon" => fork(&next(), 2),
            "raise" => raise(number(&next())),
            "flood" => flood(number(&next())),
            "forever" => loop {
                flood(1000);
            },
            "long" => whisper(&vec![b'x'; number(&next()) as usize]),
            "dispositions" => dispositions(),
            "wait-file" => wait_file(&next()),
            "eat" => eat(number(&next())),
            _ => panic!("`{word}` is not a command"),
        }
    }
}

/// Connect to the agent at this address as a worker, and print which world it names, or why it names none.
fn attend(address: &str) {
    let limit = std::time::Duration::from_secs(60);
    let channel = elastic_rs::channel::worker::Channel::connect(address, limit).expect("an agent");
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    match runtime.block_on(channel.world().expect("the process that has connected")) {
        Ok(world) => println!("world {}", world.generation.round),
        Err(error) => println!("{error}"),
    }
}

/// Become the parent of orphans, as process 1 does, and reap them: session leaders after a minute, others at once, its own children
/// never.
fn adopt() {
    use std::process::{Command, Stdio};
    // SAFETY: sets a flag of this process.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) };
    let this = env::current_exe().expect("a path");
    let child = |args: [&str; 2]| {
        // The pipe closes when both the child and its orphan have ended.
        let mut child = Command::new(&this).args(args).stdout(Stdio::piped()).spawn().expect("a child");
        io::copy(child.stdout.as_mut().expect("a pipe"), &mut io::sink()).expect("the end of both");
        child
    };
    let mut own = child(["exit", "7"]);
    let (mut orphans, now) = (elastic_rs::workers::ForeignOrphans::default(), std::time::Instant::now());
    let minute = std::time::Duration::from_secs(60);
    assert!(child(["daemon", "end"]).wait().expect("its code").success());
    assert!(child(["orphan", "end"]).wait().expect("its code").success());
    // Only the orphan is reaped now. The leader of its session, the daemon, and the daemon's parent lead sessions, so they wait. A
    // process closes its descriptors a moment before it can be reaped.
    while orphans.reap(now) == 0 {
        std::thread::yield_now();
    }
    while leaders() < 3 {
        std::thread::yield_now();
    }
    assert_eq!(orphans.reap(now) + orphans.reap(now + minute / 2), 0);
    assert_eq!(orphans.reap(now + minute), 3);
    println!("reaped; own child: {}", own.wait().expect("its code").code().expect("a code"));
}

/// Allocate this many MiB of memory, and write to all of it.
fn eat(mebibytes: i32) {
    for _ in 0..mebibytes {
        std::mem::forget(std::hint::black_box(vec![1_u8; 1 << 20]));
    }
}

/// Number of children that have ended and lead sessions.
fn leaders() -> usize {
    let list = std::fs::read_to_string("/proc/thread-self/children").expect("a /proc");
    let ended = |pid: &&str| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let args: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
        // State, parent, group, session.
        matches!(args[..], ["Z", _, _, session, ..] if session == *pid)
    };
    list.split_ascii_whitespace().filter(ended).count()
}

fn number(text: &str) -> i32 {
    text.parse().expect("a number")
}

fn print(text: &str) {
    println!("{text}");
}

fn whisper(bytes: &[u8]) {
    let mut out = io::stdout();
    out.write_all(bytes).and_then(|()| out.flush()).expect("an open stdout");
}

fn pause() -> ! {
    loop {
        // SAFETY: waits for a signal.
        unsafe { libc::pause() };
    }
}

/// Wait as for a device that hangs: for a child of `vfork` that lives on.
fn sleep_uninterruptibly() -> ! {
    let flags = libc::CLONE_VFORK | libc::SIGCHLD;
    // SAFETY: the child has its own memory, and this process has one thread.
    unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
    pause()
}

fn ignore(signal: i32) {
    // SAFETY: no handler is installed.
    unsafe { libc::signal(signal, libc::SIG_IGN) };
}

fn raise(signal: i32) {
    // SAFETY: signals itself. Rust's own handler of SIGSEGV would return.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
}

/// Start a process that performs `what`: `pause`, `stubborn` (pause, and ignore SIGTERM), or `end`.
///
/// With `sessions` above 0 it is a grandchild, and its parent, which made a session, has ended. With 2 it also leads a session. Returns
/// when the process runs.
fn fork(what: &str, sessions: u32) {
    let mut pipe = [0; 2];
    // SAFETY: this process has one thread, so a forked child may do anything.
    unsafe {
        assert_eq!(libc::pipe(pipe.as_mut_ptr()), 0);
        let child = libc::fork();
        if child != 0 {
            libc::close(pipe[1]);
            let mut byte = 0_u8;
            assert_eq!(libc::read(pipe[0], (&raw mut byte).cast(), 1), 1);
            libc::close(pipe[0]);
            return;
        }
        if sessions > 0 {
            libc::setsid();
            if libc::fork() != 0 {
                libc::_exit(0);
            }
        }
        if sessions > 1 {
            libc::setsid();
        }
        if what == "stubborn" {
            ignore(libc::SIGTERM);
        }
        assert_eq!(libc::write(pipe[1], c"x".as_ptr().cast(), 1), 1);
    }
    if what == "end" {
        exit(0);
    }
    pause()
}

/// Print numbered lines as fast as possible.
fn flood(lines: i32) {
    let mut out = io::BufWriter::with_capacity(1 << 16, io::stdout().lock());
    for line in 0..lines {
        writeln!(out, "{line:08} the quick brown fox jumps over the lazy dog and runs back to its den in the wood")
            .expect("read");
    }
}

/// Print which signals are blocked or ignored, how many descriptors are open, and whether this process leads its session.
fn dispositions() {
    let status = std::fs::read_to_string("/proc/self/status").expect("a /proc");
    for line in status.lines().filter(|line| line.starts_with("SigBlk") || line.starts_with("SigIgn")) {
        println!("{}", line.split_whitespace().collect::<Vec<_>>().join(" "));
    }
    // One of them is the directory being read.
    println!("descriptors {}", std::fs::read_dir("/proc/self/fd").expect("a /proc").count() - 1);
    // SAFETY: these calls only return numbers.
    let (pid, session, group) = unsafe { (libc::getpid(), libc::getsid(0), libc::getpgid(0)) };
    println!("leads {}", pid == session && pid == group);
}

/// Wait until the file exists.
fn wait_file(path: &str) {
    while !std::path::Path::new(path).exists() {
        std::thread::yield_now();
    }
}
