//! Snapshots on the wire: how large they are, and what is not accepted.

use std::collections::VecDeque;
use std::net::IpAddr;

use proptest::prelude::*;

use super::*;
use crate::hosts::{Standing, WhyUnused};
use crate::rendezvous::messages::message::LARGEST_STEP;
use crate::rendezvous::run::budget::{Crash, Limit};
use crate::rendezvous::run::node::Origin;

const LIMIT: Limit = Limit { restarts: u32::MAX, window: HOUR };

fn long() -> String {
    "x".repeat(2 * REASON_LIMIT_BYTES)
}

/// A run with the longest texts, the largest numbers, and more restarts, faults and hosts than are passed on. The names of hosts have so
/// many bytes.
fn worst(names: usize) -> Run {
    let words = Failure {
        role: long(),
        exit: long(),
        message: long(),
        lived: Duration::MAX,
        ..failure(u32::MAX, Some(u64::MAX), "")
    };
    let failed = tidy_failure(&words, long());
    let mut run = Run::counting_on("job", judging(1, u32::MAX), Round(LARGEST_NUMBER));
    run.settings.rules.no_restart_on = (1..=32).collect();
    let began_with = Generation { round: Round(u64::MAX), world: u64::MAX };
    let (size, restart, workers) = (u32::MAX, u32::MAX, Some(u32::MAX));
    let world = KnownWorld { id: u64::MAX, size, reason: long(), restart, workers, began_with };
    run.current.inherit(world.world(), u32::MAX);
    (1..2000).for_each(|less| run.recovery.on_left(u32::MAX - less));
    run.current.set_restart(u32::MAX);
    run.current.interrupt(&long());
    run.current.blame(failed.clone());
    let now = Instant::now();
    let elsewhere = Origin::Peer([10, 0, 0, 1].into());
    for number in 0..300 {
        let name = format!("{number}{}", "h".repeat(names));
        let origin = Origin::Host(name[..names].to_owned(), IpAddr::from([255; 16]));
        let message = format!("{number}\n  File \"{}\", line 1, in f", "x".repeat(REASON_LIMIT_BYTES - 64));
        let old = Failure { message, ..failed.clone() };
        let crash = Crash { failure: &old, origin: origin.clone(), step: None, spares_host: true };
        run.budget.on_crash("job", &crash, LIMIT, now);
        let new = Failure { step: None, lived: Duration::ZERO, ..old.clone() };
        run.budget.on_new_worker(&new, &origin, LIMIT, now);
        run.budget.on_crash("job", &Crash { failure: &new, ..crash }, LIMIT, now);
        run.hosts.on_departure(&origin, &run.settings, now);
        run.hosts.put_out(&origin, WhyUnused::Ill { what: "y".repeat(names) }, &run.settings, now);
        for origin in [&origin, &elsewhere] {
            run.hosts.on_first_failure(origin, Some(u32::MAX - number), &run.settings, now);
        }
    }
    run
}

fn size(run: &Run) -> usize {
    let now = Instant::now();
    postcard::to_stdvec(&passed_on(run, now).to_wire(now)).unwrap().len()
}

#[test]
fn the_largest_snapshot_fits_its_limit() {
    let mut run = worst(255);
    let open = size(&run);
    let failure = run.current.failure().cloned().map(Box::new);
    run.current.close(Verdict::Failed { by: long(), cause: long(), failure, class: EndClass::Program }, true);
    run.closed_at = Some(Instant::now());
    let closed = size(&run);
    assert!(open > 40 * 1024 && closed > 40 * 1024, "{open} and {closed} bytes");
}

#[test]
fn hosts_with_short_names_are_nearly_all_known_and_a_blank_run_takes_few_bytes() {
    let now = Instant::now();
    let run = Run::succeeding("job", passed_on(&worst(10), now), false, now);
    assert!(run.exclusions(now).len() > 200, "{}", run.exclusions(now).len());
    assert!(size(&Run::new("job", settings(1, 1))) < 100);
    assert!(size(&Job::formed(settings(2, 3), 3).run) < 300);
}

#[test]
fn those_that_are_out_come_first_and_then_the_latest() {
    let mut run = Run::new("job", Settings { rejoin_limit: 1, ..settings(1, 4) });
    let mut now = Instant::now();
    let host = |number: u16| Origin::Host(format!("h{number}"), [10, 0, 0, 1].into());
    run.hosts.put_out(&host(0), WhyUnused::SameFault { what: "fault".to_owned() }, &run.settings, now);
    for number in 1..=400 {
        now += SECOND;
        run.hosts.on_departure(&host(number), &run.settings, now);
    }
    let run = Run::succeeding("job", passed_on(&run, now), false, now);
    let known: Vec<_> = run.exclusions(now).into_iter().filter_map(|it| it.name).collect();
    assert_eq!(known.len(), 256);
    assert!(
        known.contains(&"h0".to_owned()) && known.contains(&"h400".to_owned()) && !known.contains(&"h99".to_owned())
    );
}

/// A snapshot as it is sent, of a run that has everything.
fn sent() -> Snapshot<i64> {
    let (_, job) = situations().into_iter().find(|(what, _)| *what == "a host is out").unwrap();
    job.run.snapshot().to_wire(job.now)
}

/// What has the same fields is written in the same way.
fn transmuted<T: Serialize, U: for<'de> Deserialize<'de>>(value: &T) -> U {
    postcard::from_bytes(&postcard::to_stdvec(value).unwrap()).unwrap()
}

fn hosts(count: usize, standing: &Standing<i64>) -> Arc<KeptHosts<i64>> {
    let named = |number| (Origin::Named(format!("h{number}")), standing.clone());
    Arc::new(transmuted(&((0..count).map(named).collect::<BTreeMap<_, _>>(), BTreeMap::<u32, i64>::new())))
}

type Faults = Vec<(String, u64, Origin)>;

fn budget(restarts: usize, step: u64, faults: Faults, new_workers: usize) -> Budget<i64> {
    let counted = vec![(0_i64, 0_u8); restarts];
    let new_workers = vec![(0_i64, Origin::Named("h".to_owned())); new_workers];
    let (furthest, count, bad) = (Some(step), u32::MAX, Some("a\u{7}b"));
    transmuted(&(counted, true, furthest, furthest, false, (count, count), bad, faults, new_workers))
}

#[test]
fn what_no_coordinator_sends_is_refused() {
    type Change = fn(&mut Snapshot<i64>);
    let table: [(Change, &str); 20] = [
        (|it| it.settings.min_nodes = 0, "min_nodes is `0`"),
        (|it| it.round = Round(LARGEST_NUMBER + 1), "a round's number is"),
        (|it| it.named = Round(u64::MAX), "a round's number is"),
        (|it| it.round = Round(0), "a world of round 0 has 3 nodes"),
        (|it| it.world.iter_mut().for_each(|world| world.size = 0), "has 0 nodes, must have 1"),
        (|it| it.host_rank = Some(3), "the host's rank is 3, must be below the size of the world (3)"),
        (|it| (it.world, it.host_rank) = (None, Some(0)), "the host has rank 0 in no world"),
        (|it| it.interrupted = Some(" \n".to_owned()), "interrupted without a reason"),
        (|it| it.closed_at = Some(i64::MIN), "ms away, must be at most"),
        (|it| it.paused_until = Some(i64::MAX), "ms away, must be at most"),
        (|it| it.left = [3].into(), "1 ranks have left up to 3"),
        (|it| it.budget = budget(65, 0, Vec::new(), 0), "65 restarts were sent, at most 64"),
        (|it| it.budget = budget(0, 0, vec![("a".to_owned(), 0, Origin::Named("h".to_owned())); 9], 0), "9 faults"),
        (|it| it.budget = budget(0, 0, Vec::new(), 25), "25 failures of new workers were sent, at most 24"),
        (|it| it.budget = budget(0, LARGEST_STEP + 1, Vec::new(), 0), "a step's number is"),
        (|it| it.budget = budget(0, 0, vec![(String::new(), u64::MAX, Origin::Named("h".to_owned()))], 0), "a step's"),
        (|it| it.budget = budget(0, 0, vec![("a".to_owned(), 0, Origin::Named("\n".to_owned()))], 0), "has control"),
        (|it| it.hosts = hosts(257, &Standing::default().map(&mut |_| 0)), "257 hosts and 0 ranks were sent"),
        (
            |it| {
                let departures = vec![Instant::now(); 65];
                it.hosts = hosts(1, &Standing::with_departures(departures.into()).map(&mut |_| 0));
            },
            "65 departures and 0 failures",
        ),
        (
            |it| {
                let departures: VecDeque<_> = vec![Instant::now()].into();
                it.hosts = hosts(1, &Standing::with_departures(departures).map(&mut |_| i64::MIN));
            },
            "ms away, must be at most",
        ),
    ];
    assert!(sent().validated().is_ok());
    for (change, expected) in table {
        let mut snapshot = sent();
        change(&mut snapshot);
        let bytes = postcard::to_stdvec(&snapshot).unwrap();
        let error = postcard::from_bytes::<Snapshot<i64>>(&bytes).unwrap().validated().unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn texts_become_safe_and_the_largest_numbers_overflow_nothing() {
    let mut snapshot = sent();
    let faults = vec![("a\nb".to_owned(), LARGEST_STEP, Origin::Named("h".to_owned()))];
    (snapshot.budget, snapshot.interrupted) = (budget(1, LARGEST_STEP, faults, 1), Some("a\n\u{1b}[2Jb".to_owned()));
    let by = long();
    snapshot.closed = Some(Verdict::Stopped { by: by.clone(), cause: "a\u{2028}b".to_owned() });
    let valid = snapshot.clone().validated().unwrap();
    assert_eq!(valid.interrupted.as_deref(), Some("a  [2Jb"));
    assert!(!format!("{valid:?}").contains("\\u{7}"), "{valid:?}");
    let cause = "a b".to_owned();
    assert_eq!(valid.closed, Some(Verdict::Stopped { by: cut(by, REASON_LIMIT_BYTES), cause }));

    let now = Instant::now();
    let open = Snapshot { closed: None, interrupted: None, ..snapshot };
    let mut run = Run::succeeding("job", open.validated().unwrap().received(now).unwrap(), true, now);
    let failed = Failure { lived: Duration::ZERO, ..failure(0, None, FAULT) };
    let crash = Crash { failure: &failed, origin: Origin::Named("h".to_owned()), step: None, spares_host: true };
    run.budget.on_crash("job", &crash, LIMIT, now);
    run.budget.on_hang(Some(u64::MAX), LIMIT, now);
    assert!(passed_on(&run, now).to_wire(now).validated().is_ok());
}

proptest! {
    /// Whatever arrives is refused, or is a run that decides.
    #[test]
    fn no_bytes_from_another_process_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6), cut: prop::sample::Index,
    ) {
        let mut bytes = postcard::to_stdvec(&sent()).unwrap();
        let size = bytes.len();
        changes.iter().for_each(|(at, byte)| bytes[at.index(size)] = *byte);
        bytes.truncate(if changes.len() % 2 == 0 { bytes.len() } else { cut.index(bytes.len()) + 1 });
        let now = Instant::now();
        let Ok(snapshot) = postcard::from_bytes::<Snapshot<i64>>(&bytes) else { return Ok(()) };
        let Some(snapshot) = snapshot.validated().ok().and_then(|snapshot| snapshot.received(now).ok()) else { return Ok(()) };
        let mut job = Job::new(snapshot.settings.clone());
        (job.run, job.now, job.instance) = (Run::succeeding("job", snapshot, true, now), now, None);
        (1..=3).for_each(|node| job.greet(node, None));
        (1..=3).for_each(|node| job.join(node));
        for time in [SECOND, 3600 * SECOND, 100 * HOUR] {
            job.pass(time);
            job.crash(1, failure(0, Some(3), FAULT), &[1, 2, 3]);
        }
        let now = job.now;
        prop_assert!(job.run.snapshot().to_wire(now).validated().is_ok());
    }

    /// A successor goes on in any state with what the coordinator before it knew, and nothing changes that by itself.
    #[test]
    fn a_run_is_passed_on_in_any_state(steps in prop::collection::vec((0..8_u8, 1..5_u8, 0..30_u32), 0..60)) {
        let mut job = Job::formed(Settings { max_restarts: Some(100), ..judging(1, 4) }, 3);
        let mut earlier: Option<Snapshot> = None;
        for (what, node, time) in steps {
            let round = job.run.round();
            match what {
                0 | 1 => job.join(node),
                2 => job.send(node, NodeMessage::Failed { round, failure: Box::new(failure(node.into(), Some(time.into()), FAULT)) }),
                3 => job.send(node, NodeMessage::Leave { reason: "SIGTERM".to_owned(), signal: None }),
                4 => job.greet(node, None),
                5 => job.apply(Event::Disconnected { node: NodeId(node.into()) }),
                6 => job.send(node, NodeMessage::Done { round }),
                _ => job.pass(time * SECOND),
            }
            let before = job.run.snapshot();
            prop_assert!(job.run.has_snapshot(&before));
            prop_assert!(earlier.as_ref().is_none_or(|it| !job.run.has_snapshot(it) || *it == before));
            earlier = Some(before.clone());
            job.send(node, NodeMessage::Heartbeat { rtt_us: None });
            prop_assert_eq!(job.run.snapshot(), before);
            let wire = passed_on(&job.run, job.now).to_wire(job.now);
            let next = Run::succeeding("job", passed_on(&job.run, job.now), false, job.now).snapshot().to_wire(job.now);
            prop_assert_eq!(Snapshot { host_rank: None, ..wire }, next);
        }
    }
}
