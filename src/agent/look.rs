//! Looks at workers from outside: what each does, as a [`View`] for the coordinator, or as a text for a file.
//!
//! A worker neither helps nor notices. What may hang for ever, such as reading a file of a dead file system's process, hangs a thread of
//! its own, which is given up after [`LIMIT`].

use std::fmt::Write as _;
use std::io;
use std::path::Path;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::hang::frames::process::{Process, Refusal};
use crate::hang::frames::{Frame, Peer, Stacks, Thread};
use crate::hang::view::{self, Life, State, View};
use crate::processes::state_of;
use crate::threads::aside;

/// Time for a look at one worker. As a rule it takes a millisecond.
pub const LIMIT: Duration = Duration::from_millis(600);
/// Longest file of a dump.
const DUMP_BYTES: usize = 1 << 20;

/// A worker that is looked at.
#[derive(Clone, Copy, Debug)]
pub(super) struct Worker {
    pub rank: u32,
    pub round: u64,
    pub pid: u32,
}

/// What a look at all workers of a node has found.
#[derive(Debug, Default)]
pub(super) struct Looked {
    pub views: Vec<View>,
    /// Why frames could not be read.
    pub problem: Option<String>,
}

/// Look at these workers, side by side.
pub(super) async fn look(workers: Vec<Worker>) -> Looked {
    let mut looks = JoinSet::new();
    for worker in workers {
        looks.spawn(async move {
            let looked = timeout(LIMIT, aside("look", move || look_at(worker))).await;
            looked
                .map_err(|_| late(worker))
                .and_then(|looked| looked.map_err(|error| error.to_string()))
                .unwrap_or_else(|problem| (View::new(worker.rank, worker.round), Some(problem)))
        });
    }
    let mut looked = Looked::default();
    for (view, problem) in looks.join_all().await {
        looked.views.push(view);
        looked.problem = looked.problem.or(problem);
    }
    looked.views.sort_by_key(|view| view.rank);
    looked
}

fn late(Worker { rank, pid, .. }: Worker) -> String {
    format!("rank {rank} (pid {pid}) could not be looked at within {LIMIT:.0?}: a read of its files in /proc hangs")
}

fn look_at(Worker { rank, round, pid }: Worker) -> (View, Option<String>) {
    let stacks = stacks_of(pid);
    let main = stacks.as_ref().ok().and_then(Stacks::main);
    let mut view = View {
        pid,
        life: if main.is_some_and(has_ended) { Life::MainThreadEnded { raised: false } } else { Life::Running },
        state: state_of(pid).map_or(State::Ended, State::of),
        frames: main.map_or_else(Vec::new, |main| main.frames.iter().map(frame).collect()),
        ..View::new(rank, round)
    };
    view.fit();
    let problem = stacks.err().filter(|refusal| !matches!(refusal, Refusal::Ended(_)));
    (view, problem.map(|refusal| refusal.to_string()))
}

/// Whether a main thread has come to the end of its program, and waits for threads that are no daemons.
fn has_ended(main: &Thread) -> bool {
    main.frames
        .last()
        .is_some_and(|outermost| outermost.function == "_shutdown" && outermost.file.ends_with("/threading.py"))
}

fn stacks_of(pid: u32) -> Result<Stacks, Refusal> {
    Process::open(pid)?.stacks(None)
}

fn frame(frame: &Frame) -> view::Frame {
    let peer = frame.peer.map(|(Peer::Rank(rank) | Peer::GroupRank(rank))| rank);
    view::Frame { function: frame.function.clone(), file: frame.file.clone(), line: frame.line.unwrap_or(0), peer }
}

/// Write what a worker does into a file: the state of its main thread, and the frames of all threads.
///
/// # Errors
/// The file cannot be written.
pub(super) fn dump(pid: u32, why: &str, path: &Path) -> io::Result<()> {
    let mut text =
        format!("{why}\npid {pid}, state {}\n", state_of(pid).map_or_else(|| "ended".to_owned(), String::from));
    match stacks_of(pid) {
        Ok(Stacks { version, threads, cut }) => {
            let _ = writeln!(
                text,
                "Python {version}{}",
                if cut { "; it changed while it was read, so parts may be wrong" } else { "" }
            );
            threads.iter().for_each(|thread| write_thread(thread, &mut text));
        }
        Err(refusal) => {
            let _ = writeln!(text, "its Python frames are not known: {refusal}");
        }
    }
    let end = (0..=DUMP_BYTES.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    std::fs::write(path, &text.as_bytes()[..end])
}

fn write_thread(thread: &Thread, text: &mut String) {
    let main = if thread.main { " (main)" } else { "" };
    let gil = if thread.holds_gil == Some(true) { ", holds the GIL" } else { "" };
    let _ = writeln!(text, "\nthread {}{main}{gil}, the innermost call first", thread.tid);
    for Frame { function, file, line, .. } in &thread.frames {
        let line = line.map_or_else(|| "?".to_owned(), |line| line.to_string());
        let _ = writeln!(text, "  {function} ({file}:{line})");
    }
}
