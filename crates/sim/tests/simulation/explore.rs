//! Exhaustive exploration of small jobs (`crates/sim/src/coordinator/explore.rs`): all orders of events. Every invariant is checked in every
//! state.
//!
//! In one of `ELASTIC_RS_EXPLORE_SETTLE` states (default 16) it is also checked that the job settles. 1 checks all states.

use std::time::{Duration, Instant};

use elastic_rs::rendezvous::messages::settings::{OnPartition, Settings};
use elastic_rs_sim::coordinator::explore::{Bounds, explore, job};
use elastic_rs_sim::coordinator::{Action, Options, Simulation};
use elastic_rs_sim::engine::paths::{End, Partition};

pub fn options(hosts: usize, min: u32, max: u32) -> Options {
    let mut settings = Settings::new(min, max);
    // The smallest number with which an answer can arrive before the lease ends.
    settings.keep_alive_max_attempt = 2;
    settings.last_call_timeout = Duration::from_secs(3);
    Options::exact(hosts, settings)
}

pub fn check(what: &str, start: &Simulation, bounds: &Bounds) {
    let began = Instant::now();
    match explore(start, bounds) {
        Ok(found) => println!("{what}: {found:?} in {:.1?}", began.elapsed()),
        Err(failure) => panic!("{what}: {failure}"),
    }
}

pub fn bounds(faults: u8, waits: u8, kinds: Vec<Action>) -> Bounds {
    let settle_one_in = std::env::var("ELASTIC_RS_EXPLORE_SETTLE").ok().and_then(|text| text.parse().ok());
    Bounds { faults, waits, kinds, settle_one_in: settle_one_in.unwrap_or(16) }
}

fn started(options: Options) -> Simulation {
    let mut job = job(options);
    job.start_all(Duration::ZERO);
    job
}

/// Longer than the lease. A node that is cut off or stalled for this long must stop before the others go on.
const LONG: Duration = Duration::from_secs(12);

fn running(hosts: usize, min: u32) -> Simulation {
    let mut job = started(options(hosts, min, hosts as u32));
    // Between two heartbeats.
    job.run_until(Duration::from_secs(4)).expect("invariants hold");
    assert!((0..hosts).all(|host| job.running(host).is_some()));
    job
}

#[test]
fn two_nodes_start_in_any_order() {
    check("two start", &started(options(2, 2, 2)), &bounds(0, 1, vec![]));
    check("two start, a last call", &started(options(2, 1, 2)), &bounds(0, 1, vec![]));
}

#[test]
fn two_nodes_start_and_a_connection_breaks() {
    check("two start, a connection breaks", &started(options(2, 2, 2)), &bounds(1, 0, vec![Action::Sever(0)]));
}

#[test]
fn a_member_of_two_goes() {
    for kind in [Action::Kill(0), Action::Terminate(0), Action::PowerOff(0)] {
        check(&format!("{kind:?}"), &running(2, 1), &bounds(1, 1, vec![kind]));
    }
}

#[test]
fn a_worker_of_two_fails() {
    for kind in [Action::FailWorkers(0), Action::ReportFailure(0)] {
        check(&format!("{kind:?}"), &running(2, 1), &bounds(1, 1, vec![kind]));
    }
}

#[test]
fn a_member_of_two_is_cut_off_or_stands_still() {
    let cut = |to| Action::Cut(0, to, LONG, Partition::Lost);
    for kind in [Action::Stall(0, LONG), cut(End::Coordinator), cut(End::Node)] {
        check(&format!("{kind:?}"), &running(2, 1), &bounds(1, 2, vec![kind]));
    }
}

#[test]
fn the_coordinator_of_two_is_restarted_or_stands_still() {
    check("restart", &running(2, 1), &bounds(1, 2, vec![Action::CrashCoordinator]));
    check("stall", &running(2, 1), &bounds(1, 2, vec![Action::StallCoordinator(LONG)]));
}

/// Allows more waits if `ELASTIC_RS_EXPLORE_LONG` is set, as `make test-long` does.
#[test]
fn two_nodes_with_more_time() {
    let more = std::env::var("ELASTIC_RS_EXPLORE_LONG").is_ok();
    let waits = u8::from(more);
    for kind in [Action::Kill(0), Action::PowerOff(0), Action::FailWorkers(0), Action::ReportFailure(0)] {
        check(&format!("longer: {kind:?}"), &running(2, 1), &bounds(1, 1 + waits, vec![kind]));
    }
    let kinds = vec![Action::CrashCoordinator, Action::Sever(0)];
    check("longer: restart, sever", &running(2, 1), &bounds(1 + waits, 1, kinds));
}

#[test]
fn a_member_of_three_goes_or_the_coordinator_is_restarted() {
    check("three", &running(3, 2), &bounds(1, 1, vec![Action::Kill(0), Action::CrashCoordinator]));
}

/// The explorer finds a known violation: without fencing, two worlds run at once.
#[test]
fn a_job_without_fencing_is_caught() {
    let mut options = options(2, 1, 2);
    options.settings.on_partition = OnPartition::Continue;
    let mut start = started(options);
    start.run_until(Duration::from_secs(4)).expect("invariants hold");
    start.hold_to_one_world();
    let bounds = bounds(1, 4, vec![Action::Cut(0, End::Coordinator, LONG, Partition::Lost)]);
    let failure = explore(&start, &bounds).expect_err("two worlds run at once");
    assert!(failure.starts_with("OneWorld: round 2 completes while host0 still runs round 1"), "{failure}");
}
