//! Odd hosts that claim times and places, while a job starts, runs, and finds its coordinator restarted.

use elastic_rs::rendezvous::messages::message::{Generation, Hello, Join, NodeId, NodeMessage, Placed, Round};
use elastic_rs::rendezvous::messages::settings::{LONGEST_GRACE, LONGEST_LEASE, LONGEST_WAIT, Settings};
use elastic_rs_sim::coordinator::{Action, RUN_ID};

use super::job::{Job, ms, ranks, seconds};

/// An odd host with the longest times that are allowed, and a claim to a place in a world that never existed.
fn intruder(number: u64, joins: bool) -> Action {
    let settings = Settings {
        keep_alive_interval: LONGEST_LEASE,
        keep_alive_max_attempt: 1,
        reconnect_grace: LONGEST_GRACE,
        last_call_timeout: LONGEST_WAIT,
        ..Settings::new(3, 3)
    };
    let placed = Placed {
        round: Round(1 << 40),
        rank: 0,
        world_size: 3,
        world: number,
        active: !joins,
        restart: 0,
        host: None,
        began_with: Generation::default(),
    };
    let hello = Hello::new(RUN_ID, NodeId(u128::from(number)), format!("intruder{number}"), settings);
    let join =
        Join { round: Round(1 << 40), store_port: 1, node_rank: None, workers: None, health: Default::default() };
    let reported = if joins { vec![NodeMessage::Join(join)] } else { vec![] };
    Action::Intrude(Box::new(Hello { placed: Some(placed), process: number, ..hello }), reported)
}

/// Neither changing claims nor a claim to round 2^64-1 may interrupt a running job.
#[test]
fn claims_do_not_disturb_a_running_job() {
    let mut job = Job::started(3, 3, 3);
    for number in 0..100 {
        job.at(seconds(1) + ms(900 * number), intruder(number, number % 2 == 0));
    }
    assert_eq!(job.world(seconds(100)), (1, ranks(&[0, 1, 2])));
    // It re-forms as it would without them.
    job.at(seconds(100), Action::FailWorkers(1));
    // A round that no job reaches is not believed.
    assert_eq!(job.world(seconds(101)), (2, ranks(&[0, 1, 2])));
}

/// A visitor that joins and disconnects must not delay the job for the long `reconnect_grace` that it asked for.
#[test]
fn a_visitor_before_the_job_costs_it_a_lease_at_most() {
    let mut job = Job::new(3, 3, 3);
    job.at(ms(1), intruder(1, true));
    job.at(ms(2), intruder(2, false));
    for host in 0..3 {
        job.start(ms(100), host);
    }
    let (_, world) = job.world(seconds(17));
    assert_eq!(world, ranks(&[0, 1, 2]));
}

/// Members that report before the odd hosts run on. Claims of odd hosts to other worlds have no effect then.
#[test]
fn claims_do_not_disturb_members_that_come_back_to_a_restarted_coordinator() {
    let mut job = Job::started(3, 3, 3);
    job.at(seconds(10), Action::CrashCoordinator);
    job.at(seconds(20), Action::StartCoordinator);
    for number in 0..60 {
        job.at(seconds(22) + ms(500 * number), intruder(number, number % 2 == 0));
    }
    assert_eq!(job.world(seconds(200)), (1, ranks(&[0, 1, 2])));
}
