//! `reset_limit`: how often the world of a job may change.

use std::time::Duration;

use crate::bench::{Bench, failure, hello, join};
use elastic_rs::rendezvous::messages::message::{
    CoordinatorMessage, Generation, Hello, NodeMessage, Placed, Round, Verdict, Waits,
};
use elastic_rs::rendezvous::messages::settings::Rules;
use elastic_rs::rendezvous::messages::settings::Settings;

fn settings(min: u32, max: u32, reset_limit: u32) -> Settings {
    Settings {
        rules: Rules { reset_limit: Some(reset_limit), ..Rules::default() },
        last_call_timeout: Duration::ZERO,
        settle_timeout: Duration::ZERO,
        ..Settings::new(min, max)
    }
}

fn fail(bench: &mut Bench, round: u64) {
    bench.send(2, NodeMessage::Failed { round: Round(round), failure: failure() });
}

fn cause(bench: &Bench, session: u64) -> &str {
    match bench.last(session) {
        CoordinatorMessage::Closed { verdict: Verdict::Failed { by, cause, .. }, spare: false } => {
            assert_eq!(by, "the coordinator");
            cause
        }
        other => panic!("not closed: {other:?}"),
    }
}

/// Horovod's test: a limit of 1 ends the job at the second change, a limit of 2 does not.
#[test]
fn a_change_beyond_the_limit_ends_the_job_with_its_reason() {
    for limit in [1, 2] {
        let mut bench = Bench::formed(2, &settings(2, 2, limit));
        fail(&mut bench, 1);
        (1..=2).for_each(|node| bench.send(node, join(1)));
        assert!(bench.is_placed(1, 2), "{:?}", bench.last(1));
        fail(&mut bench, 2);
        if limit == 2 {
            assert!(bench.run().closed().is_none());
            continue;
        }
        for node in 1..=2 {
            let cause = cause(&bench, node);
            assert!(cause.starts_with("rank 3 (local rank 1, role trainer, pid 77) on 10.0.0.1 (host:2)"), "{cause}");
            assert!(cause.ends_with("; no resets left: the world may change 1 times (reset_limit)"), "{cause}");
        }
        let failure = bench.run().closed().and_then(|verdict| match verdict {
            Verdict::Failed { failure, .. } => failure.clone(),
            _ => None,
        });
        assert_eq!(failure.map(|failure| failure.pid), Some(77), "the cause is sent to every node");
    }
}

#[test]
fn restarts_and_changes_of_membership_count_together() {
    let mut bench = Bench::formed(2, &settings(1, 2, 2));
    fail(&mut bench, 1);
    (1..=2).for_each(|node| bench.send(node, join(1)));
    bench.send(2, NodeMessage::Leave { reason: "scaled down".into(), signal: None });
    bench.send(1, join(2));
    bench.pass(Duration::ZERO);
    assert!(bench.is_placed(1, 3), "{:?}", bench.last(1));
    // A running job is not ended by a newcomer.
    bench.greet(3, hello(3, &settings(1, 2, 2)), 3);
    bench.send(3, join(0));
    assert!(matches!(bench.last(3), CoordinatorMessage::Waits(Waits { spare: true, .. })), "{:?}", bench.last(3));
    assert!(bench.is_placed(1, 3), "the member is not asked to stop: {:?}", bench.last(1));
    bench.send(1, NodeMessage::Leave { reason: "scaled down".into(), signal: None });
    assert_eq!(
        bench.run().closed().map(ToString::to_string).as_deref(),
        Some(
            "closed by the coordinator after a failure: 10.0.0.1 (host:1) left: scaled down; no resets left: the world may \
             change 2 times (reset_limit)"
        )
    );
}

/// A member says in which round it is, and every round after the first was a change.
#[test]
fn a_restarted_coordinator_goes_on_counting() {
    let settings = settings(1, 2, 3);
    let mut bench = Bench::new();
    let placed = |node: u64| Placed {
        round: Round(4),
        rank: node as u32 - 1,
        world_size: 2,
        world: 77,
        active: true,
        restart: 0,
        host: None,
        began_with: Generation::default(),
    };
    for node in 1..=2 {
        bench.greet(node, Hello { placed: Some(placed(node)), ..hello(node, &settings) }, 1);
    }
    bench.send(2, NodeMessage::Leave { reason: "gone".into(), signal: None });
    assert!(cause(&bench, 1).starts_with("10.0.0.1 (host:2) left: gone; no resets left"), "{}", cause(&bench, 1));
}

/// A job that ends before its limit is no different.
#[test]
fn members_that_finish_are_no_change() {
    let mut bench = Bench::formed(2, &settings(1, 2, 0));
    (1..=2).for_each(|node| bench.send(node, NodeMessage::Done { round: Round(1) }));
    assert!(matches!(bench.run().closed(), Some(Verdict::AllDone { .. })), "{:?}", bench.run().closed());
}

#[test]
fn a_second_hello_ends_the_session() {
    let settings = settings(1, 2, 5);
    let mut bench = Bench::formed(1, &settings);
    bench.send(1, NodeMessage::Hello(Box::new(hello(1, &settings))));
    assert_eq!(bench.rejection(1), "a second Hello on one session");
}
