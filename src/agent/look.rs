//! Looks at workers from outside: what each does, as a [`View`] for the coordinator, or as a text for a file.
//!
//! What the kernel and the memory of a worker show, it neither helps with nor notices. Its collectives it has to be asked for, and a thread
//! of it answers if it gets the GIL. What may hang for ever is done [`within`] a limit.

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::task::JoinSet;

use super::py_spy;
use crate::channel::watch::Answer;
use crate::channel::watch::agent::{Asked, Asker, Limits};
use crate::hang::fr::Recorded;
use crate::hang::frames::process::{Process, Refusal};
use crate::hang::frames::{Frame, Peer, Stacks, Thread};
use crate::hang::look::Look;
use crate::hang::look::driver::{Child, Seen, seen, within};
use crate::hang::view::{self, DataWorker, Gil, Life, State, View};
use crate::processes::state_of;
use crate::threads;
use crate::wire::text::cut;

/// Time for a look at one worker. As a rule it takes a millisecond.
pub const LIMIT: Duration = Duration::from_millis(600);
/// Time for a worker's answer. As a rule it has the GIL after 5 ms. The JSON of 2,000 collectives takes 50 ms, and longer on a crowded host.
const ASK_LIMITS: Limits = Limits { gil: Duration::from_millis(500), answer: Duration::from_millis(800) };
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
    pub slot: u32,
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
    /// What `py-spy` shows of the worker for which it was asked.
    pub py_spy: Option<String>,
}

/// Look at these workers, and ask them, side by side. `deep`: the process at which `py-spy` looks too.
pub(super) async fn look(workers: Vec<Worker>, deep: Option<u32>, asker: Option<Asker>) -> Looked {
    let py_spy = deep.map(|pid| tokio::spawn(py_spy::dump(pid)));
    let mut looks = JoinSet::new();
    for worker in workers {
        let asker = asker.clone();
        looks.spawn(async move {
            let Worker { rank, slot, round, pid, .. } = worker;
            let looked = within(LIMIT, "look", move || look_at(&worker)).await;
            let (view, look, problem) = looked.unwrap_or_else(|why| {
                let problem = format!("rank {rank} (pid {pid}) could not be looked at: {why}");
                (View { pid, ..View::new(rank, round) }, None, Some(problem))
            });
            let asker = asker.filter(|_| answers(view.state));
            let Some(asker) = asker else { return (view, look, problem) };
            let asked = asker.ask(slot, ASK_LIMITS).await;
            let (view, why) = with_answer(view, asked).await;
            let why = why.map(|why| format!("the collectives of rank {rank} (pid {pid}) are not known: {why}"));
            (view, look, problem.or(why))
        });
    }
    let mut looked = Looked::default();
    for (view, look, problem) in looks.join_all().await {
        looked.views.push(view);
        looked.looks.extend(look);
        looked.problem = looked.problem.or(problem);
    }
    looked.views.sort_by_key(|view| view.rank);
    if let Some(py_spy) = py_spy {
        looked.py_spy = py_spy.await.ok();
    }
    looked
}

/// Whether a worker can answer. One that a signal has stopped, or that nothing wakes, would seem to hold the GIL.
fn answers(state: State) -> bool {
    matches!(state, State::Running | State::Sleeping)
}

/// A worker's view, what the kernel knows of it, and why its frames could not be read.
fn look_at(worker: &Worker) -> (View, Option<(Instant, Look)>, Option<String>) {
    let Worker { rank, round, pid, earlier, .. } = worker;
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

/// A view with what the worker has answered, and why that is not known.
async fn with_answer(view: View, asked: Asked) -> (View, Option<String>) {
    match asked {
        Asked::Nobody => (view, None),
        Asked::Silent => (View { gil: Gil::Held, ..view }, None),
        Asked::Late => {
            let why = format!("its watch thread has the GIL, and no answer after {:.1?}", ASK_LIMITS.answer);
            (View { gil: Gil::Free, ..view }, Some(why))
        }
        // A megabyte of JSON takes milliseconds, which other tasks need not wait for.
        Asked::Answer(bytes) => {
            let before = view.clone();
            let filled = within(LIMIT, "look", move || filled(view, &bytes)).await;
            filled.unwrap_or_else(|why| (before, Some(why.to_string())))
        }
    }
}

/// A view with what the bytes of an answer say.
fn filled(mut view: View, bytes: &[u8]) -> (View, Option<String>) {
    view.gil = Gil::Free;
    let fill = |view: &mut View| {
        let answer = Answer::decode(bytes)?;
        answer.problem.map_or(Ok(()), Err)?;
        let recorders: Result<Vec<_>, _> = answer.recorders.iter().map(|json| Recorded::parse(json)).collect();
        Recorded::join(recorders?).fill(view, &answer.members);
        if let Life::MainThreadEnded { raised } = &mut view.life {
            *raised = answer.raised;
        }
        view.answered = true;
        Ok::<_, String>(())
    };
    let problem = fill(&mut view).err();
    view.fit();
    (view, problem)
}

/// A collective, by the name of its group and its number there.
pub(super) type Collective = (String, u64);

/// A collective that a worker has not ended, if there is one and it answers: the oldest of a group.
pub(super) async fn pending(asker: &Asker, slot: u32) -> Option<Collective> {
    let (view, _) = with_answer(View::default(), asker.ask(slot, ASK_LIMITS).await).await;
    let oldest = |group: view::Group| Some((group.pending.first()?.seq, group.name));
    view.groups.into_iter().find_map(oldest).map(|(seq, name)| (name, seq))
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
/// path, and the state of the worker. May hang.
///
/// # Errors
/// The file cannot be written.
fn dump(pid: u32, why: &str, folder: &Path) -> io::Result<(PathBuf, State)> {
    let (mut text, mut state) = (format!("{why}\n"), State::Unknown);
    match Process::open(pid).and_then(|process| seen(&process, None)) {
        Ok(Seen { look, stacks, children }) => {
            state = State::of(look.state);
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
    Ok((path, state))
}

/// A worker that is asked for its flight recorders.
#[derive(Debug)]
pub(super) struct Recorders {
    pub asker: Asker,
    pub slot: u32,
    pub runtime: Handle,
}

impl Recorders {
    /// Write them beside a dump: `hang-1.fr.json` beside `hang-1.txt`, and `hang-1.fr-2.json` if there is a second one. Writes nothing if
    /// the worker does not answer.
    fn write_beside(&self, dump: &Path) -> io::Result<()> {
        let asked = self.runtime.block_on(self.asker.ask(self.slot, ASK_LIMITS));
        let Asked::Answer(bytes) = asked else { return Ok(()) };
        let recorders = Answer::decode(&bytes).map_or_else(|_| Vec::new(), |answer| answer.recorders);
        for (number, recorder) in (1..).zip(recorders) {
            let path =
                dump.with_extension(if number == 1 { "fr.json".to_owned() } else { format!("fr-{number}.json") });
            OpenOptions::new().write(true).create_new(true).open(path)?.write_all(recorder)?;
        }
        Ok(())
    }
}

/// Do that on a thread, and tell what came of it and the folder: a dead file system may hold the logs, or a file of the worker. Of a worker
/// that can answer, the recorders are written too.
///
/// # Errors
/// There is no thread.
pub(super) fn dump_aside(
    pid: u32,
    why: String,
    folder: PathBuf,
    recorders: Option<Recorders>,
    then: impl FnOnce(io::Result<PathBuf>, &Path) + Send + 'static,
) -> io::Result<()> {
    let dump = move || {
        let dumped = dump(pid, &why, &folder).and_then(|(path, state)| {
            let recorders = recorders.filter(|_| answers(state));
            recorders.map_or(Ok(()), |recorders| recorders.write_beside(&path)).map(|()| path)
        });
        then(dumped, &folder);
    };
    threads::spawn("dump".to_owned(), dump).map(drop)
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

#[cfg(test)]
mod tests {
    use super::*;

    const DUMP: &str = r#"{"entries": [{"process_group": ["0", "default_pg"], "pg_id": 0, "collective_seq_id": 3,
        "profiling_name": "gloo:all_reduce", "input_sizes": [[8]], "input_dtypes": ["Float"], "state": "scheduled"}]}"#;

    fn view() -> View {
        View { state: State::Sleeping, life: Life::MainThreadEnded { raised: false }, ..View::new(1, 2) }
    }

    async fn answered(answer: Answer<'_>) -> (View, Option<String>) {
        with_answer(view(), Asked::Answer(answer.encode())).await
    }

    #[tokio::test]
    async fn an_answer_becomes_groups() {
        let members = [("0".to_owned(), (0..2).collect())].into();
        let answer = Answer { raised: true, members, recorders: vec![DUMP.as_bytes()], problem: None };
        let (view, problem) = answered(answer).await;
        assert_eq!((problem, view.answered, view.gil), (None, true, Gil::Free));
        assert_eq!(view.life, Life::MainThreadEnded { raised: true });
        let group = view.group("0").unwrap();
        assert_eq!((group.last, group.pending.len(), group.ranks.as_ref().unwrap().len()), (3, 1, 2));
        assert_eq!(view.signature(&group.pending[0]).unwrap().shape, "[8] Float");
    }

    #[tokio::test]
    async fn a_worker_without_groups_has_answered() {
        let (view, problem) = answered(Answer::default()).await;
        assert_eq!((problem, view.answered, view.groups.len()), (None, true, 0));
    }

    #[tokio::test]
    async fn one_that_does_not_get_the_gil_is_silent() {
        let (silent, problem) = with_answer(view(), Asked::Silent).await;
        assert_eq!((problem, silent.answered, silent.gil), (None, false, Gil::Held));
        let (unasked, _) = with_answer(view(), Asked::Nobody).await;
        assert_eq!((unasked.answered, unasked.gil), (false, Gil::Unknown));
    }

    #[tokio::test]
    async fn what_is_no_answer_is_said() {
        let problem = Answer { problem: Some("KeyError: '0'".to_owned()), ..Answer::default() };
        for (bytes, says) in [
            (b"abc".to_vec(), "not an answer"),
            (problem.encode(), "KeyError"),
            (Answer { recorders: vec![b"{\"entries\": 7}"], ..Answer::default() }.encode(), "cannot be read"),
        ] {
            let (lied, problem) = with_answer(view(), Asked::Answer(bytes)).await;
            assert!(problem.as_deref().unwrap().contains(says), "{problem:?}");
            assert_eq!((lied.answered, lied.gil, lied.groups.len()), (false, Gil::Free, 0));
        }
    }
}
