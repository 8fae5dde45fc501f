//! Hangs of four gloo ranks of torch 2.15, recorded: flight recorders, states, frames, and members of groups. `tests/data/hangs` has a
//! file of each kind. A random rank was made to hang at a random step.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use crate::hang::blame::blame;
use crate::hang::finding::{Finding, Kind};
use crate::hang::fr::Recorded;
use crate::hang::ranks::Ranks;
use crate::hang::view::{DataWorker, Frame, Gil, Life, State, View};

#[derive(Deserialize)]
struct File {
    rank: u32,
    views: Vec<Rank>,
}

#[derive(Deserialize)]
struct Rank {
    rank: u32,
    state: char,
    answered: bool,
    members: BTreeMap<String, Vec<u32>>,
    dump: Option<serde_json::Value>,
    frames: Vec<Line>,
    data_workers: Vec<Worker>,
}

#[derive(Deserialize)]
struct Worker {
    pid: u32,
    state: char,
    frames: Vec<Line>,
}

#[derive(Deserialize)]
struct Line {
    function: String,
    file: String,
    line: u32,
    peer: Option<u32>,
}

fn frames(lines: Vec<Line>) -> Vec<Frame> {
    let frame = |it: Line| Frame { function: it.function, file: it.file, line: it.line, peer: it.peer };
    lines.into_iter().map(frame).collect()
}

fn view(of: Rank) -> View {
    let mut view = View::new(of.rank, 1);
    view.pid = 100 + of.rank;
    view.state = State::of(of.state);
    view.answered = of.answered;
    let is_asked = !of.answered && !view.is_stopped();
    view.gil = if is_asked { Gil::Held } else { Gil::Unknown };
    view.frames = frames(of.frames);
    let worker = |it: Worker| DataWorker { pid: it.pid, state: State::of(it.state), frames: frames(it.frames) };
    view.data_workers = of.data_workers.into_iter().map(worker).collect();
    if let Some(dump) = of.dump {
        let bytes = serde_json::to_vec(&dump).unwrap();
        let members: BTreeMap<String, Ranks> =
            of.members.into_iter().map(|(name, ranks)| (name, ranks.into_iter().collect())).collect();
        Recorded::parse(&bytes).unwrap().fill(&mut view, &members);
    }
    view.fit();
    assert_eq!(View::decode(&view.encode()), Ok(view.clone()), "it may be sent");
    view
}

/// The views of a recorded hang, and the rank that was made to hang.
fn recorded(kind: &str) -> (u32, Vec<View>) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/hangs").join(format!("{kind}.json"));
    let file: File = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    (file.rank, file.views.into_iter().map(view).collect())
}

fn check(kind: &str, found: Kind, op: Option<&str>) -> Finding {
    let (rank, views) = recorded(kind);
    let finding = blame(&views);
    let named: Vec<_> = finding.ranks.iter().collect();
    assert_eq!((finding.kind, named), (found, vec![rank]), "{kind}: {finding:#?}");
    let named_op = finding.collective.as_ref().map(|it| it.signature.op.as_str());
    assert_eq!(named_op, op, "{kind}: {finding:#?}");
    if let Some(collective) = &finding.collective {
        assert!(collective.seq > 0 && !collective.group.is_empty(), "{kind}: {finding:#?}");
    }
    assert!(!finding.waiting.is_empty() && !finding.waiting.contains(rank), "{kind}: {finding:#?}");
    // The proof is the same without what frames say, and for another order of views.
    let mut others = views;
    others.reverse();
    assert_eq!(blame(&others), finding, "{kind}");
    finding
}

/// The user's line at which the named rank stands.
fn line(finding: &Finding) -> (&str, u32) {
    let frame = finding.places[0].frames.first().unwrap();
    (frame.name(), frame.line)
}

#[test]
fn a_rank_that_sleeps_waits_or_computes_has_not_entered() {
    for kind in ["sleep", "fifo", "lock", "thread", "busy", "wrapped"] {
        let finding = check(kind, Kind::NotEntered, Some("all_reduce"));
        assert!(!finding.certain, "{kind}");
        assert_eq!(line(&finding).0, "train", "{kind}");
    }
}

#[test]
fn a_rank_that_returned_early_has_not_entered() {
    let finding = check("early", Kind::NotEntered, Some("all_reduce"));
    assert_eq!(line(&finding).0, "finish");
}

#[test]
fn a_rank_that_holds_the_gil_is_named_by_its_silence() {
    let finding = check("gil", Kind::GilHeld, Some("all_reduce"));
    assert_eq!(line(&finding).0, "train");
}

#[test]
fn a_stopped_rank_is_certain() {
    for (kind, op) in [("stop", "all_reduce"), ("stop_tpdp", "all_reduce")] {
        assert!(check(kind, Kind::Stopped, Some(op)).certain, "{kind}");
    }
}

#[test]
fn other_collectives_under_one_number_are_a_mismatch() {
    for kind in ["order", "op", "swallow", "uneven", "size"] {
        let finding = check(kind, Kind::Mismatch, finding_op(kind));
        assert!(finding.certain && !finding.tie, "{kind}");
        let sizes: Vec<_> = finding.classes.iter().map(|class| class.ranks.len()).collect();
        assert_eq!(sizes, [1, 3], "{kind}: {finding:#?}");
    }
}

/// What the three others have entered.
fn finding_op(kind: &str) -> Option<&'static str> {
    match kind {
        "order" | "op" | "swallow" | "uneven" | "size" => Some("all_reduce"),
        _ => None,
    }
}

#[test]
fn a_rank_that_waits_for_its_data_is_named_with_the_line_of_the_data_worker() {
    let finding = check("loader", Kind::NotEntered, Some("all_reduce"));
    let place = &finding.places[0];
    assert_eq!(line(&finding).0, "__getitem__");
    assert!(place.data_worker.is_some() && !place.data_worker_stopped, "{place:?}");
    let finding = check("kidstop", Kind::NotEntered, Some("all_reduce"));
    assert!(finding.places[0].data_worker.is_some() && finding.places[0].data_worker_stopped, "{finding:#?}");
}

#[test]
fn in_tensor_and_data_parallel_groups_the_rank_is_named_that_waits_for_nobody() {
    let finding = check("tpdp", Kind::NotEntered, Some("all_reduce"));
    assert_eq!(finding.waiting.len(), 3);
}

#[test]
fn of_ranks_in_crossed_groups_the_one_is_named_that_turned_its_order() {
    let finding = check("crossed", Kind::Crossed, Some("all_reduce"));
    assert!(finding.certain);
    assert_eq!(finding.turned, Some(("b".to_owned(), "a".to_owned())));
    assert_eq!(finding.chain.len(), 2);
}

#[test]
fn in_a_pipeline_the_rank_is_named_that_does_not_send() {
    let finding = check("p2p", Kind::NotEntered, None);
    assert_eq!(line(&finding).0, "train");
}

#[test]
fn a_rank_that_never_used_a_subgroup_or_does_not_make_one_is_named() {
    check("lategroup", Kind::NotEntered, Some("all_reduce"));
    check("newgroup", Kind::NotEntered, None);
}

#[test]
fn a_rank_that_ended_is_named_before_all_else() {
    for kind in ["sleep", "order", "tpdp", "early"] {
        let (rank, mut views) = recorded(kind);
        let view = &mut views[rank as usize];
        (view.life, view.answered) = (Life::Ended { code: 0 }, false);
        view.groups.clear();
        let finding = blame(&views);
        assert_eq!((finding.kind, finding.certain), (Kind::Ended, true), "{kind}: {finding:#?}");
        assert_eq!(finding.ranks.iter().collect::<Vec<_>>(), [rank], "{kind}");
        views.remove(rank as usize);
        let finding = blame(&views);
        assert_eq!((finding.kind, finding.certain), (Kind::Absent, false), "{kind}: {finding:#?}");
        assert_eq!(finding.ranks.iter().collect::<Vec<_>>(), [rank], "{kind}");
    }
}

#[test]
fn without_a_recorder_frames_still_name_the_rank_that_is_elsewhere() {
    for kind in ["fifo", "lock", "busy"] {
        let (rank, mut views) = recorded(kind);
        views.iter_mut().for_each(|view| view.groups.clear());
        let finding = blame(&views);
        assert_eq!((finding.kind, finding.certain), (Kind::Outside, false), "{kind}: {finding:#?}");
        assert_eq!(finding.ranks.iter().collect::<Vec<_>>(), [rank], "{kind}");
    }
}
