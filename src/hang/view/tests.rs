use proptest::prelude::*;

use super::*;

/// A view that is as large as it may be, and larger.
fn giant() -> View {
    let name = |length: usize| "é".repeat(length);
    let frame = Frame { function: name(400), file: format!("/{}", name(400)), line: 7, peer: Some(1) };
    let entry = Entry { seq: u64::MAX, at: u32::MAX, signature: 3 };
    let group = |at: usize| Group {
        name: format!("{at}{}", name(100)),
        desc: name(100),
        ranks: Some((0..2000).map(|rank| rank * rank).collect()),
        last: u64::MAX,
        oldest: u64::MAX,
        pending: vec![entry; 40],
        tail: (0..40).map(|seq| Entry { seq, ..entry }).collect(),
    };
    View {
        frames: vec![frame.clone(); 300],
        data_workers: vec![DataWorker { pid: 1, state: State::Sleeping, frames: vec![frame; 300] }; 20],
        signatures: vec![Signature { op: name(100), shape: name(100) }; 300],
        groups: (0..100).map(group).collect(),
        call: Some(Call { name: name(100), file: Some(name(400)), file_system: Some(name(100)), fd: None }),
        ..View::new(3, 1)
    }
}

#[test]
fn a_view_of_any_size_is_cut_to_what_may_be_sent() {
    let mut view = giant();
    assert!(view.validate().is_err());
    view.fit();
    let bytes = view.encode();
    assert!(bytes.len() <= VIEW_LIMIT_BYTES, "{} bytes", bytes.len());
    assert_eq!(View::decode(&bytes), Ok(view.clone()));
    assert!(!view.frames.is_empty() && !view.groups.is_empty());
    assert_eq!(view.groups[0].tail.last().map(|entry| entry.seq), Some(39), "the last ones stay");
}

#[test]
fn a_usual_view_is_small() {
    let mut view = View::new(3, 1);
    view.answered = true;
    let index = view.intern(Signature { op: "all_reduce".into(), shape: "[63310] Float".into() }).unwrap();
    let tail = (5000..5032).map(|seq| Entry { seq, at: seq as u32, signature: index }).collect();
    let ranks = Some((0..4096).collect());
    let world =
        Group { name: "0".into(), desc: "default_pg".into(), ranks, last: 5031, oldest: 4000, ..Group::default() };
    view.groups = vec![Group { tail, ..world }; 8];
    let frame = Frame { function: "main".into(), file: "/home/user/train.py".into(), line: 41, peer: None };
    view.frames = vec![frame; 12];
    assert!(view.encode().len() < 2500, "{} bytes", view.encode().len());
}

#[test]
fn what_is_no_view_is_refused_with_a_reason() {
    let mut view = View::new(0, 1);
    view.groups = vec![Group::default(); GROUPS_LIMIT + 1];
    assert_eq!(View::decode(&view.encode()).unwrap_err(), "there are 65 groups, at most 64 are allowed");
    view.groups = vec![Group { name: "a\x1b[2J".into(), ..Group::default() }];
    assert!(View::decode(&view.encode()).unwrap_err().contains("control characters"));
    assert!(View::decode(&[0; VIEW_LIMIT_BYTES + 1]).unwrap_err().contains("must have at most 32768"));
    assert!(View::decode(&[0xff; 40]).unwrap_err().contains("are not a view"));
    view.groups.clear();
    let mut longer = view.encode();
    longer.push(0);
    assert!(View::decode(&longer).is_err(), "bytes behind the view");
}

fn frame(function: &str, file: &str, line: u32) -> Frame {
    Frame { function: function.into(), file: file.into(), line, peer: None }
}

#[test]
fn a_users_frame_is_outside_of_torch_packages_and_the_standard_library() {
    let files = [
        ("/home/user/train.py", true),
        ("train.py", true),
        ("/home/user/torch/train.py", true),
        ("/home/user/pytorch/torch/nn/modules/module.py", false),
        ("/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", false),
        ("/usr/lib/python3.12/threading.py", false),
        ("/usr/lib/python3/dist-packages/numpy/x.py", false),
        ("<frozen importlib._bootstrap>", false),
        ("?", false),
        ("", false),
    ];
    for (file, is_users) in files {
        assert_eq!(frame("f", file, 1).is_users(), is_users, "{file}");
    }
    let stack = [frame("wait", "/usr/lib/python3.12/threading.py", 5), frame("main", "/home/user/train.py", 41)];
    assert_eq!(users(&stack).map(|frame| frame.line), Some(41));
    assert_eq!(users(&stack[..1]).map(|frame| frame.line), Some(5), "no frame of the user's");
    assert_eq!(users(&[]), None);
}

#[test]
fn a_data_worker_is_idle_in_torchs_loop_alone() {
    let library = "/usr/lib/python3.11/multiprocessing/connection.py";
    let torch = "/v/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py";
    let idle = vec![frame("_poll", library, 1), frame("Queue.get", library, 2), frame("_worker_loop", torch, 3)];
    let worker = |frames: &[Frame], state| DataWorker { pid: 1, state, frames: frames.to_vec() };
    assert!(worker(&idle, State::Sleeping).is_idle());
    assert!(!worker(&idle, State::Stopped).is_idle());
    let mut loads = vec![frame("DS.__getitem__", "/home/user/data.py", 8)];
    loads.extend(idle.clone());
    assert!(!worker(&loads, State::Sleeping).is_idle());
    assert!(!worker(&[], State::Sleeping).is_idle(), "not in the loop");
}

#[test]
fn another_look_at_a_rank_that_stands_still_shows_the_same() {
    let mut one = View::new(2, 7);
    one.groups = vec![Group { name: "0".into(), last: 5, ..Group::default() }];
    one.frames = vec![frame("main", "/home/user/train.py", 41)];
    let mut other = one.clone();
    other.frames[0].line = 42;
    other.state = State::Running;
    other.call = Some(Call::default());
    assert!(one.stands_as(&other));
    for change in [
        |view: &mut View| view.groups[0].last = 6,
        |view: &mut View| view.groups[0].pending = vec![Entry::default()],
        |view: &mut View| view.frames.insert(0, frame("barrier", "/v/torch/distributed/distributed_c10d.py", 9)),
        |view: &mut View| view.state = State::Stopped,
        |view: &mut View| view.answered = true,
        |view: &mut View| view.life = Life::Ended { code: 0 },
        |view: &mut View| view.round = 8,
        |view: &mut View| view.pid = 8,
    ] {
        let mut moved = one.clone();
        change(&mut moved);
        assert!(!one.stands_as(&moved), "{moved:?}");
    }
}

proptest! {
    /// A peer may send anything.
    #[test]
    fn any_bytes_are_a_view_or_none(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        if let Ok(view) = View::decode(&bytes) {
            prop_assert_eq!(View::decode(&view.encode()), Ok(view));
        }
    }

    /// A worker may have any names.
    #[test]
    fn a_view_that_was_cut_is_accepted(function in ".{0,300}", file in ".{0,600}", shape in ".{0,200}") {
        let mut view = View::new(0, 1);
        view.frames = vec![Frame { function, file, line: 1, peer: None }];
        view.signatures = vec![Signature { op: shape.clone(), shape }];
        view.fit();
        prop_assert_eq!(View::decode(&view.encode()), Ok(view));
    }
}
