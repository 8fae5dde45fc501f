//! What a check finds, message by message.

use elastic_rs::channel::checks::{Counter, News, Verdict};
use elastic_rs::channel::message::{HeldState, ToAgent, ToWorker, World};
use elastic_rs::rendezvous::messages::message::Generation;

use super::{change, failure, of, world};

/// One worker's count and news, as its connection holds them.
#[derive(Default)]
struct Worker {
    counter: Counter,
    news: News,
}

impl Worker {
    fn receives(&mut self, message: ToWorker) -> Option<ToAgent> {
        let counted = self.counter.stop();
        let answer = self.news.on_message(message, counted);
        if self.news.is_quiet() {
            self.counter.reset();
        }
        answer
    }

    /// Count a check. `None`: it waits, and is this one.
    fn check(&mut self) -> Result<Verdict, u64> {
        match self.counter.pass() {
            None => Ok(Verdict::GoOn),
            Some(number) => self.look(number).ok_or(number),
        }
    }

    fn look(&mut self, number: u64) -> Option<Verdict> {
        self.news.verdict(number).map(Result::unwrap)
    }

    fn checks(&mut self, count: usize) {
        (0..count).for_each(|_| assert_eq!(self.check(), Ok(Verdict::GoOn)));
    }
}

fn raise_at(seq: u64, check: u64) -> ToWorker {
    ToWorker::RaiseAt { seq, check }
}

fn ack(seq: u64, count: u64) -> Option<ToAgent> {
    Some(ToAgent::Ack { seq, count })
}

#[test]
fn a_check_after_a_change_waits_until_it_is_known_where_the_world_changes() {
    let mut worker = Worker::default();
    worker.checks(5);
    assert_eq!(worker.receives(change(1)), ack(1, 5));
    assert_eq!(worker.check(), Err(6));
    assert_eq!(worker.receives(raise_at(1, 7)), None);
    assert_eq!(worker.look(6), Some(Verdict::GoOn), "another worker was further");
    assert_eq!(worker.check(), Ok(Verdict::WorldChanges));
    assert_eq!(worker.check(), Ok(Verdict::WorldChanges), "until the worker has parked");
    assert_eq!((worker.news.reason(), worker.news.flags()), ("a node joins", 2));
}

#[test]
fn a_change_before_the_first_check_is_acknowledged_with_zero() {
    let mut worker = Worker::default();
    assert_eq!(worker.receives(change(1)), ack(1, 0));
    worker.receives(raise_at(1, 1));
    assert_eq!(worker.check(), Ok(Verdict::WorldChanges));
}

#[test]
fn a_change_that_is_sent_again_has_the_same_answer() {
    let mut worker = Worker::default();
    worker.checks(2);
    assert_eq!(worker.receives(change(1)), ack(1, 2));
    assert_eq!(worker.check(), Err(3));
    // A check that waits has not passed.
    assert_eq!(worker.receives(change(1)), ack(1, 2));
    worker.receives(raise_at(1, 5));
    assert_eq!(worker.look(3), Some(Verdict::GoOn));
    assert_eq!(worker.receives(change(1)), ack(1, 3));
    assert_eq!(worker.check(), Ok(Verdict::GoOn), "the check of the change is still known");
    assert_eq!(worker.check(), Ok(Verdict::WorldChanges));
}

#[test]
fn a_newer_change_replaces_one_and_an_older_one_is_ignored() {
    let mut worker = Worker::default();
    worker.checks(1);
    assert_eq!(worker.receives(change(2)), ack(2, 1));
    worker.receives(raise_at(2, 4));
    worker.checks(1);
    assert_eq!(worker.receives(change(3)), ack(3, 2));
    assert_eq!(worker.receives(change(2)), None);
    worker.receives(raise_at(2, 3));
    assert_eq!(worker.check(), Err(3), "nothing is known of the newer one");
    worker.receives(raise_at(3, 3));
    assert_eq!(worker.look(3), Some(Verdict::WorldChanges));
}

#[test]
fn a_failure_is_found_by_a_check_that_waits_and_by_every_later_one() {
    let mut worker = Worker::default();
    worker.checks(1);
    worker.receives(change(1));
    assert_eq!(worker.check(), Err(2));
    worker.receives(failure());
    assert_eq!(worker.look(2), Some(Verdict::PeerFailed));
    worker.receives(raise_at(1, 2));
    assert_eq!(worker.check(), Ok(Verdict::PeerFailed), "the failure is the greater news");
    assert_eq!((worker.news.reason(), worker.news.flags()), ("worker 1 was killed", 0));
    assert_eq!(worker.news.failed_rank(), Some(1));
    worker.receives(ToWorker::World(Box::new(world(2))));
    assert_eq!(worker.news.failed_rank(), None, "a new world has no failure");
}

#[test]
fn a_failure_without_a_change_is_found_by_the_next_check() {
    let mut worker = Worker::default();
    worker.checks(3);
    assert_eq!(worker.news.failed(), None);
    worker.receives(failure());
    assert_eq!(worker.news.failed(), Some(Ok(())));
    assert_eq!(worker.check(), Ok(Verdict::PeerFailed));
}

#[test]
fn a_change_that_a_worker_has_passed_is_a_failure_there() {
    let mut worker = Worker::default();
    worker.checks(4);
    worker.receives(change(1));
    worker.receives(raise_at(1, 4));
    assert_eq!(worker.check(), Ok(Verdict::PeerFailed));
    assert!(worker.news.reason().contains("check 4") && worker.news.reason().contains("equally often"));
    assert_eq!(worker.news.failed_rank(), None, "no worker has failed");
}

#[test]
fn counting_begins_again_with_each_world() {
    let mut worker = Worker::default();
    worker.checks(3);
    worker.receives(change(1));
    worker.receives(raise_at(1, 4));
    assert_eq!(worker.check(), Ok(Verdict::WorldChanges));
    assert!(worker.news.park(None).is_some());
    worker.receives(ToWorker::World(Box::new(world(2))));
    assert_eq!(worker.news.next_world().unwrap().unwrap().generation, of(2));
    worker.checks(2);
    worker.receives(raise_at(1, 1));
    assert_eq!(worker.check(), Ok(Verdict::GoOn), "of a change that is over");
    assert_eq!(worker.receives(change(2)), ack(2, 3));
    // A failure that was notified before the world belongs to the last one.
    worker.receives(failure());
    worker.receives(ToWorker::World(Box::new(world(3))));
    assert_eq!(worker.news.failed(), None);
    worker.checks(1);
}

#[test]
fn a_parked_worker_takes_each_world_once() {
    let mut worker = Worker::default();
    assert_eq!(worker.news.latest_world(), None);
    worker.receives(ToWorker::World(Box::new(world(1))));
    assert_eq!(worker.news.latest_world().unwrap().unwrap().generation, of(1));
    assert!(worker.news.park(None).is_some());
    assert_eq!(worker.news.next_world(), None, "it was in the first one");
    assert!(worker.news.park(None).is_none(), "the agent knows it already");
    worker.receives(ToWorker::World(Box::new(world(2))));
    assert!(worker.news.park(None).is_none(), "its next world is there");
    assert_eq!(worker.news.next_world().unwrap().unwrap().generation, of(2));
    assert_eq!(worker.news.latest_world().unwrap().unwrap().generation, of(2));
    assert!(worker.news.park(None).is_some());
    assert_eq!(worker.news.next_world(), None);
}

#[test]
fn a_listener_hears_of_each_change_once() {
    let mut worker = Worker::default();
    assert_eq!(worker.news.take_change(), None);
    worker.receives(change(1));
    worker.receives(change(1));
    assert_eq!(worker.news.take_change(), Some(Ok((1, 2))));
    assert_eq!(worker.news.take_change(), None);
    worker.receives(change(2));
    // The listener was busy while the world changed.
    worker.receives(ToWorker::World(Box::new(world(2))));
    assert_eq!(worker.news.take_change(), Some(Ok((2, 2))));
}

#[test]
fn the_end_of_the_connection_ends_what_waits_and_leaves_what_is_known() {
    let ended = || Some(Err("the agent has ended".to_owned()));
    let end = |worker: &mut Worker| {
        let counted = worker.counter.stop();
        worker.news.end("the agent has ended".to_owned(), counted);
    };
    let mut worker = Worker::default();
    worker.checks(1);
    end(&mut worker);
    let number = worker.counter.pass().unwrap();
    assert_eq!(worker.news.verdict(number).map(|it| it.map(|_| ())), ended());
    assert_eq!(worker.news.failed(), ended());
    assert_eq!(worker.news.latest_world().map(|it| it.map(|_| ())), ended());
    assert_eq!(worker.news.take_change().map(|it| it.map(|_| ())), ended());
    assert!(worker.news.park(None).is_some());
    assert_eq!(worker.news.next_world().map(|it| it.map(|_| ())), ended());

    let mut worker = Worker::default();
    worker.receives(change(1));
    assert_eq!(worker.check(), Err(1));
    end(&mut worker);
    assert_eq!(worker.news.verdict(1), Some(Err("the agent has ended".to_owned())), "nobody says where any more");
    worker.receives(failure());
    end(&mut worker);
    assert_eq!(worker.check(), Ok(Verdict::PeerFailed));

    let mut worker = Worker::default();
    worker.receives(ToWorker::Refused { reason: "it is a stranger".to_owned() });
    end(&mut worker);
    assert_eq!(worker.news.failed(), Some(Err("the agent refuses this process: it is a stranger".to_owned())));
}

/// With what it parks, a node can tell whether it is the job's: see `docs/decisions/0097-a-state-has-a-generation.md`.
#[test]
fn a_state_is_of_the_last_world_in_which_it_was_synchronised_or_all_were_equal() {
    let mut worker = Worker::default();
    let mut parks = |world: Option<World>, synchronised: bool, commit| {
        if let Some(world) = world {
            worker.receives(ToWorker::World(Box::new(world)));
        }
        worker.news.next_world();
        if synchronised {
            worker.news.synchronised();
        }
        worker.news.park(commit).expect("it was in a world")
    };
    let state = |of: Option<Generation>, commit| HeldState { generation: of, commit };
    assert_eq!(parks(Some(world(1)), false, None), state(None, None), "its first sync was interrupted");
    assert_eq!(parks(Some(world(2)), true, Some(0)), state(Some(of(2)), Some(0)));
    assert_eq!(parks(Some(world(3)), false, Some(4)), state(Some(of(2)), Some(4)), "a later one was interrupted");
    assert_eq!(
        parks(Some(World { sync: false, equal: true, ..world(4) }), false, Some(4)),
        state(Some(of(4)), Some(4))
    );
    // In a world of new workers all begin with what the script has made.
    let mut worker = Worker::default();
    worker.receives(ToWorker::World(Box::new(World { equal: true, ..world(5) })));
    assert_eq!(worker.news.park(None), Some(state(Some(of(5)), None)));
}
