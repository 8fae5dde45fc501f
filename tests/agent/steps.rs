//! A worker's steps, from its memory to the agent.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::fd::AsRawFd;

use elastic_rs::steps::board::Board;
use elastic_rs::steps::slot::{First, LARGEST_STEP, SLOT_BYTES};
use elastic_rs::steps::worker::Steps;

use crate::workers::support::within;

fn worker(board: &Board, local_rank: u32) -> Steps {
    Steps::open(&board.variable(local_rank)).unwrap()
}

#[tokio::test]
async fn the_first_step_of_a_round_wakes_the_agent_and_the_last_one_says_how_far_it_came() {
    let mut board = Board::open(130).unwrap();
    board.begin(3).unwrap();
    // Two of them have their memory in one page, and the third in another.
    let [one, other, far] = [0, 1, 129].map(|local_rank| worker(&board, local_rank));
    assert_eq!((board.first(), board.reached()), (None, None));
    far.step(Some(900));
    within(board.rung()).await;
    let First { step, at_ns } = board.first().unwrap();
    assert_eq!(step, Some(900));
    one.step(Some(900));
    other.step(Some(899));
    for _ in 0..3 {
        one.step(None);
    }
    assert_eq!(board.first(), Some(First { step: Some(900), at_ns }), "the earliest one");
    assert_eq!(board.reached().unwrap().step, Some(903));
    assert!(board.reached().unwrap().step_time_us.is_some());

    // Of the world, when the last worker has it.
    assert_eq!(board.formed(), [None; 2]);
    one.grouped();
    far.grouped();
    one.synchronised();
    let [Some(grouped), Some(synchronised)] = board.formed() else { panic!("{:?}", board.formed()) };
    assert!(at_ns <= grouped && grouped <= synchronised);

    // The workers live on in the next round.
    board.begin(4).unwrap();
    assert_eq!((board.first(), board.reached(), board.formed()), (None, None, [None; 2]));
    one.step(Some(881));
    within(board.rung()).await;
    assert_eq!((board.first().unwrap().step, board.reached().unwrap().step), (Some(881), Some(881)));
    other.step(Some(u64::MAX));
    assert_eq!(board.reached().unwrap().step, Some(LARGEST_STEP));
}

#[tokio::test]
async fn steps_that_are_only_counted_do_not_say_where_the_training_is() {
    let mut board = Board::open(1).unwrap();
    board.begin(1).unwrap();
    let steps = worker(&board, 0);
    steps.step(None);
    steps.step(None);
    assert_eq!((board.first().unwrap().step, board.reached().unwrap().step), (None, None));
    board.begin(2).unwrap();
    steps.go_on_from(40);
    steps.step(None);
    assert_eq!((board.first().unwrap().step, board.reached().unwrap().step), (Some(41), Some(41)));
}

#[tokio::test]
async fn steps_of_an_optimizer_show_that_it_goes_on_until_the_script_reports_its_own() {
    let mut board = Board::open(2).unwrap();
    board.begin(1).unwrap();
    let (steps, other) = (worker(&board, 0), worker(&board, 1));
    for _ in 0..5 {
        steps.count(true);
        other.count(true);
    }
    let counted = board.stepped().unwrap();
    assert_eq!((counted.steps, counted.step, counted.of_optimizer), (5, None, true));
    assert_eq!((board.first(), board.reached()), (None, None), "nobody has reported a step");
    steps.count(false);
    let further = board.stepped().unwrap();
    assert_eq!((further.steps, further.last_ns > counted.last_ns), (5, true), "of another optimizer");

    steps.step(Some(900));
    within(board.rung()).await;
    assert_eq!((board.first().unwrap().step, board.reached().unwrap().step), (Some(900), Some(900)));
    steps.count(true);
    other.count(true);
    let told = board.stepped().unwrap();
    assert_eq!((told.steps, told.step, told.of_optimizer), (1, Some(900), false), "the other has counted more");
    assert!(told.last_ns > further.last_ns, "it goes on");

    // The workers live on in the next round.
    board.begin(2).unwrap();
    steps.count(true);
    assert_eq!(board.stepped(), None, "it has reported steps");
    other.count(true);
    assert_eq!(board.stepped().map(|stepped| (stepped.steps, stepped.of_optimizer)), Some((1, true)));
    other.step(None);
    other.step(None);
    assert_eq!(board.stepped().map(|stepped| (stepped.steps, stepped.step)), Some((2, None)));
    assert_eq!(board.first().map(|first| first.step), Some(None), "it counts from its start");
}

#[tokio::test]
async fn what_replays_its_steps_is_counted_no_more() {
    let mut board = Board::open(1).unwrap();
    board.begin(1).unwrap();
    let steps = worker(&board, 0);
    steps.count(true);
    steps.count_no_more();
    assert_eq!(board.stepped(), None);
    steps.count(true);
    assert_eq!(board.stepped(), None);
    steps.step(Some(3));
    assert_eq!(board.reached().unwrap().step, Some(3));
}

#[tokio::test]
async fn an_agent_reads_that_a_worker_is_restarted_because_its_group_uses_nccl() {
    let mut board = Board::open(2).unwrap();
    board.begin(1).unwrap();
    let steps = worker(&board, 1);
    assert!(!board.restarts_for_nccl());
    steps.restarts_for_nccl(true);
    steps.step(Some(5));
    board.begin(2).unwrap();
    assert!(board.restarts_for_nccl(), "the worker lives on, with its process group");
    steps.restarts_for_nccl(false);
    assert!(!board.restarts_for_nccl());
}

#[tokio::test]
async fn a_worker_that_writes_nonsense_disturbs_nobody() {
    let mut board = Board::open(2).unwrap();
    board.begin(1).unwrap();
    let variable = board.variable(1);
    let parts: Vec<_> = variable.split(':').collect();
    let open = |fd: &str| OpenOptions::new().write(true).open(format!("/proc/{}/fd/{fd}", parts[0])).unwrap();
    let mut memory = open(parts[1]);
    memory.write_all(&[0xff; 256]).unwrap();
    assert_eq!((board.first(), board.reached()), (None, None));
    assert!(memory.set_len(0).is_err() && memory.set_len(1 << 40).is_err(), "its length is sealed");
    let mut bell = open(parts[2]);
    bell.write_all(&[7; 20_000]).unwrap();
    within(board.rung()).await;
    assert_eq!(board.first(), None);
    board.begin(2).unwrap();
    worker(&board, 1).step(Some(5));
    within(board.rung()).await;
    assert_eq!(board.first().unwrap().step, Some(5));
}

/// The agent has ended, and another process with its number has another file open there.
#[test]
fn a_file_that_is_no_agents_memory_is_left_alone() {
    let path = std::env::temp_dir().join(format!("elastic_rs-no-steps-{}", std::process::id()));
    let file = OpenOptions::new().create(true).truncate(true).read(true).write(true).open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    file.set_len(4096).unwrap();
    let descriptor = file.as_raw_fd();
    let error = Steps::open(&format!("{}:{descriptor}:{descriptor}:0:{SLOT_BYTES}", std::process::id())).unwrap_err();
    assert!(error.to_string().ends_with("has no memory for this worker"), "{error}");
}

#[tokio::test]
async fn memory_that_is_not_there_is_refused() {
    let board = Board::open(1).unwrap();
    for wrong in ["", "1:2:3", "1:2:3:4", "1:2:3:4:128", "1:2:3:4:256:5", "a:b:c:d:256", "0:0:0:0:256", "1:2:3:-4:256"]
    {
        assert!(Steps::open(wrong).is_err(), "{wrong}");
    }
    let error = Steps::open(&board.variable(1)).unwrap_err();
    assert!(error.to_string().ends_with("has no memory for this worker"), "{error}");
}
