use super::*;
use crate::hang::finding::Wait;
use crate::hang::view::{Call, Gil};

fn frame(function: &str, file: &str, line: u32) -> Frame {
    Frame { function: function.to_owned(), file: file.to_owned(), line, peer: None }
}

fn place(rank: u32) -> Place {
    let frames = vec![frame("Data.load_batch", "/home/user/train.py", 88), frame("main", "/home/user/train.py", 41)];
    Place { rank, pid: 4242, class: Some(Class::Idle), frames, ..Place::default() }
}

fn signature(op: &str, shape: &str) -> Signature {
    Signature { op: op.to_owned(), shape: shape.to_owned() }
}

fn finding(kind: Kind, ranks: &[u32]) -> Finding {
    let of = Collective {
        group: "0".to_owned(),
        desc: "default_pg".to_owned(),
        seq: 5127,
        signature: signature("all_reduce", "[63310] Float"),
    };
    let others = Place { frames: vec![frame("main", "/home/user/train.py", 45)], ..place(0) };
    Finding {
        collective: Some(of),
        waiting: (0..8).filter(|rank| !ranks.contains(rank)).collect(),
        places: ranks.iter().map(|rank| place(*rank)).collect(),
        others: Some(others),
        ..Finding::new(kind, ranks.to_vec())
    }
}

fn facts() -> Facts {
    Facts {
        still: Duration::from_secs(183),
        step: Some(1841),
        step_time: Some(Duration::from_millis(210)),
        ranks: 8,
        node: Some("n17".to_owned()),
        ended_ago: None,
        dumps: Some("logs/job42_x1/attempt_0/*/hang-1.txt".to_owned()),
        more: Some("elastic-rs why node0:29400".to_owned()),
        next: Next::Report,
        is_own: false,
    }
}

/// The second line.
fn why_of(finding: &Finding) -> String {
    lines(finding, &facts())[1].trim().to_owned()
}

#[test]
fn a_hang_has_six_lines() {
    let mut slow = finding(Kind::NotEntered, &[3]);
    slow.places[0].call = Some(Call {
        name: "read".to_owned(),
        file: Some("/data/shard-17".to_owned()),
        file_system: Some("nfs4".to_owned()),
        fd: Some(9),
    });
    let expected = "\
training stands still for 183 s (step 1841; a step took 0.21 s): 7 of 8 ranks wait for rank 3 (n17, pid 4242)
  rank 3 has not entered all_reduce #5127 of default_pg ([63310] Float); it sleeps in read(/data/shard-17, nfs4)
  at load_batch train.py:88 < main train.py:41
  others: main train.py:45 in all_reduce
  dumps of all ranks: logs/job42_x1/attempt_0/*/hang-1.txt; more: elastic-rs why node0:29400
  nothing is stopped (--hang=report)";
    assert_eq!(lines(&slow, &facts()).join("\n"), expected);
    assert_eq!(over(Duration::from_secs(183)), "training goes on, after 183 s without progress");
    assert_eq!(status(&slow, &facts()), "waits 183 s for rank 3 at train.py:88 (usually 0.21 s)");
}

#[test]
fn the_second_line_says_why_by_kind() {
    let mut ended = finding(Kind::Ended, &[1]);
    ended.places[0].life = Life::Ended { code: 0 };
    let ago = Facts { ended_ago: Some(Duration::from_secs(61)), ..facts() };
    assert_eq!(lines(&ended, &ago)[1], "  rank 1 has ended (exit code 0) 61 s ago");
    ended.places[0].life = Life::Ended { code: -9 };
    assert_eq!(why_of(&ended), "rank 1 has ended (signal 9)");
    ended.places[0].life = Life::MainThreadEnded { raised: true };
    let raised = "the main thread of rank 1 raised an exception; another thread keeps the process alive";
    assert_eq!(why_of(&ended), raised);

    assert_eq!(why_of(&finding(Kind::Stopped, &[1])), "rank 1 was stopped by a signal (state T)");
    assert_eq!(why_of(&finding(Kind::Stopped, &[1, 2])), "ranks 1,2 were stopped by a signal (state T)");
    let held =
        Finding { places: vec![Place { class: None, gil: Gil::Held, ..place(1) }], ..finding(Kind::GilHeld, &[1]) };
    assert_eq!(why_of(&held), "rank 1 holds the GIL in C");
    assert_eq!(why_of(&finding(Kind::Silent, &[1])), "rank 1 does not answer; it sleeps");
    assert_eq!(why_of(&finding(Kind::Absent, &[1])), "nothing is known of rank 1: no agent has shown it");
    assert_eq!(
        why_of(&finding(Kind::Inside, &[])),
        "all ranks are inside all_reduce #5127 of default_pg: library or network"
    );
    let busy = Finding { places: vec![Place { class: Some(Class::Busy), ..place(2) }], ..finding(Kind::Odd, &[2]) };
    assert_eq!(why_of(&busy), "a guess: rank 2 stands elsewhere than the 7 others; it computes");
    let outside = "a guess: ranks 2,3 are outside of torch.distributed, the others are inside; it sleeps";
    assert_eq!(why_of(&finding(Kind::Outside, &[2, 3])), outside);
    assert_eq!(why_of(&finding(Kind::Alike, &[])), "a guess: all ranks stand at one line; it sleeps");
}

#[test]
fn a_mismatch_names_both_collectives() {
    let class = |op: &str, shape: &str, ranks: &[u32]| Entered {
        signature: signature(op, shape),
        ranks: ranks.iter().copied().collect(),
    };
    let mut differs = finding(Kind::Mismatch, &[1]);
    differs.classes = vec![class("broadcast", "[7] Float", &[1]), class("all_reduce", "[1] Float", &[0, 2, 3])];
    let expected = "rank 1 entered broadcast [7] Float as #5127 of default_pg, the 3 others all_reduce [1] Float";
    assert_eq!(why_of(&differs), expected);
    differs.tie = true;
    differs.classes = vec![class("broadcast", "", &[0]), class("barrier", "", &[1])];
    let expected = "ranks entered different collectives as #5127 of default_pg: rank 0 broadcast, rank 1 barrier";
    assert_eq!(why_of(&differs), expected);
}

#[test]
fn a_crossing_names_the_groups() {
    let mut crossed = finding(Kind::Crossed, &[1]);
    crossed.turned = Some(("b".to_owned(), "a".to_owned()));
    assert_eq!(why_of(&crossed), "rank 1 entered group b before a, other than in its last 3 turns");
    let mut circle = finding(Kind::Crossed, &[0, 1]);
    let wait = |rank: u32, on: u32, group: &str, seq: u64| Wait { rank, on, group: group.to_owned(), seq };
    circle.chain = vec![wait(0, 1, "tp", 3), wait(1, 0, "", 0)];
    assert_eq!(why_of(&circle), "ranks 0,1 wait for one another: 0 for 1 in tp #3, 1 for 0");
}

#[test]
fn a_data_worker_is_named_with_its_line() {
    let mut loads = finding(Kind::NotEntered, &[2]);
    loads.places[0].data_worker = Some(23044);
    loads.places[0].frames = vec![frame("DS.__getitem__", "/home/user/data.py", 8)];
    assert_eq!(why_of(&loads), "rank 2 waits for its data worker 23044: __getitem__ data.py:8");
    loads.places[0].data_worker_stopped = true;
    let stopped = "rank 2 waits for its data worker 23044, which was stopped by a signal (state T)";
    assert_eq!(why_of(&loads), stopped);
}

#[test]
fn a_debugger_is_named_and_nothing_is_stopped_for_it() {
    let mut typed = finding(Kind::NotEntered, &[0]);
    typed.places[0].call = Some(Call { name: "read".to_owned(), fd: Some(0), ..Call::default() });
    let all = lines(&typed, &Facts { next: Next::Attended, ..facts() });
    assert!(all[1].ends_with("; it reads standard input"), "{all:?}");
    assert_eq!(all[5], "  nothing is stopped: a rank reads standard input or is in a debugger (--hang=restart)");
}

#[test]
fn what_is_not_known_is_left_out() {
    let bare = Finding::new(Kind::Alike, Vec::new());
    let all = lines(&bare, &Facts { ranks: 2, ..Facts::default() });
    let expected = [
        "training stands still for 0.00 s: 0 of 2 ranks wait",
        "  a guess: all ranks stand at one line",
        "  nothing is stopped (--hang=report)",
    ];
    assert_eq!(all, expected);
    let suspended = lines(&Finding::new(Kind::Suspended, vec![0, 1]), &Facts { ranks: 2, ..Facts::default() });
    assert_eq!(suspended.len(), 1);
    assert!(suspended[0].starts_with("training is suspended: all 2 ranks are stopped"));
}

#[test]
fn no_line_is_longer_than_its_limit() {
    let mut long = finding(Kind::NotEntered, &[3]);
    for place in &mut long.places {
        place.frames = vec![frame(&"f".repeat(300), &"d".repeat(300), 1); 9];
    }
    let all = lines(&long, &facts());
    assert_eq!(all.len(), LINES_LIMIT);
    assert!(all.iter().all(|line| line.len() <= LINE_LIMIT_BYTES));
}
