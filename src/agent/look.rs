//! Looks at workers from outside: what each does, as a [`View`] for the coordinator, or as a text for a file.
//!
//! A worker neither helps nor notices. What may hang for ever is done [`within`] a limit.

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use crate::hang::frames::process::{Process, Refusal};
use crate::hang::frames::{Frame, Peer, Stacks, Thread};
use crate::hang::look::Look;
use crate::hang::look::driver::{Child, Seen, seen, within};
use crate::hang::view::{self, DataWorker, Gil, Life, State, View};
use crate::processes::state_of;
use crate::wire::text::cut;

/// Time for a look at one worker. As a rule it takes a millisecond.
pub const LIMIT: Duration = Duration::from_millis(600);
/// What a worker does between two looks shows if they are not nearer, and is of today if they are not farther apart.
const BETWEEN: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(60);
/// Longest file of a dump.
const DUMP_BYTES: usize = 1 << 20;
/// Most dumps of one worker in one generation.
const MOST_DUMPS: u32 = 99;

/// A worker that is looked at.
#[derive(Clone, Debug)]
pub(super) struct Worker {
    pub rank: u32,
    pub round: u64,
    pub pid: u32,
    /// What an earlier look at its process has found, and when that was.
    pub earlier: Option<(Instant, Look)>,
}

/// What a look at all workers of a node has found.
#[derive(Debug, Default)]
pub(super) struct Looked {
    pub views: Vec<View>,
    /// For the next look: when this one was, and what it has found.
    pub looks: Vec<(Instant, Look)>,
    /// Why something could not be read.
    pub problem: Option<String>,
}

/// Look at these workers, side by side.
pub(super) async fn look(workers: Vec<Worker>) -> Looked {
    let mut looks = JoinSet::new();
    for worker in workers {
        looks.spawn(async move {
            let Worker { rank, round, pid, .. } = worker;
            let looked = within(LIMIT, "look", move || look_at(&worker)).await;
            looked.unwrap_or_else(|why| {
                let problem = format!("rank {rank} (pid {pid}) could not be looked at: {why}");
                (View { pid, ..View::new(rank, round) }, None, Some(problem))
            })
        });
    }
    let mut looked = Looked::default();
    for (view, look, problem) in looks.join_all().await {
        looked.views.push(view);
        looked.looks.extend(look);
        looked.problem = looked.problem.or(problem);
    }
    looked.views.sort_by_key(|view| view.rank);
    looked
}

/// A worker's view, what the kernel knows of it, and why its frames could not be read.
fn look_at(worker: &Worker) -> (View, Option<(Instant, Look)>, Option<String>) {
    let Worker { rank, round, pid, earlier } = worker;
    let blank = View { pid: *pid, ..View::new(*rank, *round) };
    let (now, found) = (Instant::now(), Process::open(*pid).and_then(|process| seen(&process, None)));
    match found {
        Ok(Seen { look, stacks, children }) => {
            let between = earlier.as_ref().map(|(at, before)| (now.saturating_duration_since(*at), before));
            let between = between.filter(|(elapsed, _)| BETWEEN.contains(elapsed));
            let main = stacks.as_ref().ok().and_then(Stacks::main);
            let is_over = main.is_some_and(has_ended);
            let mut view = View {
                life: if is_over { Life::MainThreadEnded { raised: false } } else { Life::Running },
                state: State::of(look.state),
                gil: gil_of(main, *pid, look.state),
                class: between.map(|(elapsed, before)| look.class_since(before, elapsed)),
                call: look.call.clone(),
                frames: main.map_or_else(Vec::new, frames_of),
                data_workers: children.into_iter().map(data_worker).collect(),
                ..blank
            };
            view.fit();
            (view, Some((now, look)), stacks.err().map(|refusal| refusal.to_string()))
        }
        Err(Refusal::Ended(_)) => (View { state: State::Ended, ..blank }, None, None),
        Err(refusal) => (blank, None, Some(refusal.to_string())),
    }
}

/// A thread that lets others run while it sleeps has given the GIL back. It has slept before and after its frames were read.
fn gil_of(main: Option<&Thread>, pid: u32, before: char) -> Gil {
    let sleeps = |letter| State::of(letter) == State::Sleeping;
    match main.and_then(|main| main.holds_gil) {
        Some(true) if sleeps(before) && state_of(pid).is_some_and(sleeps) => Gil::Held,
        _ => Gil::Unknown,
    }
}

/// Whether a main thread has come to the end of its program, and waits for threads that are no daemons.
fn has_ended(main: &Thread) -> bool {
    let is_in =
        |frame: &Frame, function: &str, file: &str| frame.function.ends_with(function) && frame.file.ends_with(file);
    let Some(at) = main.frames.iter().position(|frame| is_in(frame, "_shutdown", "/threading.py")) else {
        return false;
    };
    // The interpreter calls it, or the process of `multiprocessing` in which a function has run.
    main.frames.get(at + 1).is_none_or(|caller| is_in(caller, "_bootstrap", "/multiprocessing/process.py"))
}

fn data_worker(Child { look, stacks }: Child) -> DataWorker {
    DataWorker { pid: look.pid, state: State::of(look.state), frames: stacks.main().map_or_else(Vec::new, frames_of) }
}

fn frames_of(thread: &Thread) -> Vec<view::Frame> {
    let frame = |frame: &Frame| {
        // A rank within a group is another in the world.
        let peer = frame.peer.and_then(|peer| if let Peer::Rank(rank) = peer { Some(rank) } else { None });
        view::Frame { function: frame.function.clone(), file: frame.file.clone(), line: frame.line.unwrap_or(0), peer }
    };
    thread.frames.iter().map(frame).collect()
}

/// Write what a worker does into a new file of this folder: what its main thread waits for, and the frames of all threads. Returns its
/// path. May hang.
///
/// # Errors
/// The file cannot be written.
pub(super) fn dump(pid: u32, why: &str, folder: &Path) -> io::Result<PathBuf> {
    let mut text = format!("{why}\n");
    match Process::open(pid).and_then(|process| seen(&process, None)) {
        Ok(Seen { look, stacks, children }) => {
            write_look("pid", &look, &mut text);
            match &stacks {
                Ok(stacks) => write_stacks(stacks, &mut text),
                Err(refusal) => text += &format!("its Python frames are not known: {refusal}\n"),
            }
            for Child { look, stacks } in &children {
                text.push('\n');
                write_look("data worker: pid", look, &mut text);
                write_stacks(stacks, &mut text);
            }
        }
        Err(refusal) => text += &format!("nothing is known of it: {refusal}\n"),
    }
    let (path, mut file) = new_file(folder)?;
    file.write_all(cut(text, DUMP_BYTES).as_bytes())?;
    Ok(path)
}

/// A file that did not exist: what a link of this name leads to stays as it is.
fn new_file(folder: &Path) -> io::Result<(PathBuf, File)> {
    let mut last = io::Error::from(io::ErrorKind::AlreadyExists);
    for number in 1..=MOST_DUMPS {
        let path = folder.join(format!("hang-{number}.txt"));
        match OpenOptions::new().write(true).create_new(true).open(&path) {
            Ok(file) => return Ok((path, file)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

fn write_look(who: &str, look: &Look, text: &mut String) {
    let call = look.call.as_ref().map(|call| format!(", {call}")).unwrap_or_default();
    let within = look.kernel_function.as_ref().map(|name| format!(" (kernel: {name})")).unwrap_or_default();
    let _ = writeln!(text, "{who} {} ({}), state {}{call}{within}", look.pid, look.name, look.state);
}

fn write_stacks(Stacks { version, threads, cut }: &Stacks, text: &mut String) {
    let cut = if *cut { "; it changed while it was read, so parts may be wrong" } else { "" };
    let _ = writeln!(text, "Python {version}{cut}");
    for thread in threads {
        let main = if thread.main { " (main)" } else { "" };
        let gil = if thread.holds_gil == Some(true) { ", holds the GIL" } else { "" };
        let _ = writeln!(text, "\nthread {}{main}{gil}, the innermost call first", thread.tid);
        for Frame { function, file, line, .. } in &thread.frames {
            let line = line.map_or_else(|| "?".to_owned(), |line| line.to_string());
            let _ = writeln!(text, "  {function} ({file}:{line})");
        }
    }
}
