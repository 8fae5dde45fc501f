use super::*;
use crate::events::record::Record;
use crate::hosts::Cooldown;
use crate::rendezvous::messages::message::{
    CoordinatorMessage, EndClass, Hello, Join, JoinWorkers, NodeId, NodeMessage, Placed, Progress, StepReport,
};
use crate::rendezvous::messages::settings::{LAST_LOOK, Rules};
use crate::rendezvous::run::{CoordinatorInstance, Ends, Event, Reach, SessionId, Status};

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);
const FAULT: &str =
    "ValueError: bad\nTraceback (most recent call last):\n  File \"/job/data.py\", line 88, in load\nValueError: bad";
const INSTANCE: CoordinatorInstance = CoordinatorInstance { process: 1, instance_id: Some(7), incarnation: 1 };

fn settings(min: u32, max: u32) -> Settings {
    Settings { max_restarts: Some(3), settle_timeout: SECOND, ..Settings::new(min, max) }
}

/// With a sliding budget.
fn sliding(min: u32, max: u32) -> Settings {
    Settings { rules: Rules { restart_window: Some(HOUR), ..Rules::default() }, ..settings(min, max) }
}

/// The same, and hosts are judged.
fn judging(min: u32, max: u32) -> Settings {
    let Settings { rules, .. } = sliding(min, max);
    let cooldown = Some(Cooldown { min: 60 * SECOND, max: HOUR });
    Settings { rules: Rules { host_failures: 2, cooldown, ..rules }, ..settings(min, max) }
}

fn failure(rank: u32, step: Option<u64>, message: &str) -> Failure {
    Failure { global_rank: rank, step, message: message.to_owned(), ..Failure::example("") }
}

/// A run with a clock. Node `n` has session `n`, and connects from 10.0.0.n. Node 1 is in the coordinator's process, until another one
/// takes over.
struct Job {
    run: Run,
    settings: Settings,
    now: Instant,
    instance: Option<CoordinatorInstance>,
    sent: Vec<(SessionId, CoordinatorMessage)>,
    records: Vec<Record>,
}

impl Job {
    fn new(settings: Settings) -> Self {
        let run = Run::new("job", settings.clone());
        Self { run, settings, now: Instant::now(), instance: Some(INSTANCE), sent: Vec::new(), records: Vec::new() }
    }

    /// Nodes 1 to `count` are the members of round 1, with one worker each.
    fn formed(settings: Settings, count: u8) -> Self {
        let mut job = Self::new(settings);
        (1..=count).for_each(|node| job.greet(node, None));
        (1..=count).for_each(|node| job.join(node));
        job.pass(HOUR / 60); // the last call
        job
    }

    fn apply(&mut self, event: Event) {
        for effect in self.run.apply(event, self.now) {
            match effect {
                Effect::Send { session, message } => self.sent.push((session, message)),
                Effect::Record(record) => self.records.push(record),
                _ => {}
            }
        }
        self.run.check().unwrap();
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        let ids: Vec<_> = self.run.nodes().map(|(id, ..)| id).collect();
        ids.into_iter().for_each(|id| self.send(id.0 as u8, NodeMessage::Heartbeat { rtt_us: None }));
        self.apply(Event::Tick);
    }

    fn greet(&mut self, node: u8, placed: Option<Placed>) {
        let hello = Hello {
            process: node.into(),
            hosts: node == 1,
            placed,
            joining: placed.is_some_and(|placed| !placed.active),
            ..Hello::new("job", NodeId(node.into()), format!("host:{node}"), self.settings.clone())
        };
        hello.validate().unwrap();
        let reach = Reach::Connection(Ends { peer: [10, 0, 0, node].into(), local: [10, 0, 0, 200].into() });
        let (hello, session) = (Box::new(hello), SessionId(node.into()));
        self.apply(Event::Hello { hello, session, reach, instance: self.instance });
    }

    fn send(&mut self, node: u8, message: NodeMessage) {
        if self.run.knows(NodeId(node.into())) {
            self.apply(Event::Message { node: NodeId(node.into()), session: SessionId(node.into()), message });
        }
    }

    fn join(&mut self, node: u8) {
        let (round, workers) = (self.run.round(), Some(JoinWorkers::new("trainer", 1)));
        self.send(
            node,
            NodeMessage::Join(Join { round, store_port: 1, node_rank: None, workers, health: Default::default() }),
        );
    }

    /// A worker of this node fails. The world re-forms with these nodes.
    fn crash(&mut self, node: u8, failure: Failure, nodes: &[u8]) {
        let round = self.run.round();
        self.send(node, NodeMessage::Failed { round, failure: Box::new(failure) });
        nodes.iter().for_each(|node| self.join(*node));
        self.pass(2 * SECOND);
    }

    /// What a node was last sent about its place, or whether it must stop.
    fn last(&self, node: u8) -> Option<&CoordinatorMessage> {
        let to = self.sent.iter().rev().filter(|(to, _)| *to == SessionId(node.into())).map(|(_, message)| message);
        let mut to = to.filter(|it| !matches!(it, CoordinatorMessage::Heartbeat { .. } | CoordinatorMessage::Waits(_)));
        to.next()
    }

    /// Why a node must stop, if it must.
    fn must_stop(&self, node: u8) -> Option<&str> {
        match self.last(node) {
            Some(CoordinatorMessage::Status { waiting: 1.., reason, .. }) => Some(reason),
            _ => None,
        }
    }

    /// A node's claim to its last place.
    fn placed(&self, node: u8, active: bool) -> Placed {
        let to = self.sent.iter().rev().filter(|(to, _)| *to == SessionId(node.into()));
        let placement = to.filter_map(|(_, message)| message.placement()).next().unwrap();
        let (round, world_size, began_with) = (placement.round, placement.world_size, placement.began_with());
        let (rank, world, restart, host) = (placement.rank, placement.world, self.run.restart(), placement.host);
        Placed { round, rank, world_size, world, active, restart, host, began_with }
    }

    /// Another process takes over. Returns the claims of nodes to their places, as members that run.
    fn succeed(&mut self, host_is_dead: bool, nodes: &[u8]) -> Vec<Placed> {
        let claims = nodes.iter().map(|node| self.placed(*node, true)).collect();
        let snapshot = passed_on(&self.run, self.now);
        self.run = Run::succeeding("job", snapshot, host_is_dead, self.now);
        (self.instance, self.sent, self.records) = (None, Vec::new(), Vec::new());
        claims
    }

    /// Another process takes over, and all these members come back.
    fn succeeded(mut self, nodes: &[u8]) -> Self {
        let claims = self.succeed(false, nodes);
        nodes.iter().zip(claims).for_each(|(node, claim)| self.greet(*node, Some(claim)));
        self
    }

    fn has_recorded(&self, text: &str) -> bool {
        self.records.iter().any(|record| record.text.as_ref().is_some_and(|it| it.contains(text)))
    }

    fn verdict(&self) -> (EndClass, &str) {
        match self.run.closed() {
            Some(Verdict::Failed { class, cause, .. }) => (*class, cause),
            other => panic!("{other:?}"),
        }
    }
}

/// The snapshot of a run, as it arrives elsewhere.
fn passed_on(run: &Run, now: Instant) -> Snapshot {
    let wire = run.snapshot().to_wire(now);
    let bytes = postcard::to_stdvec(&wire).unwrap();
    assert!(bytes.len() <= SNAPSHOT_LIMIT_BYTES, "{}", bytes.len());
    let (decoded, rest) = postcard::take_from_bytes::<Snapshot<i64>>(&bytes).unwrap();
    assert!(rest.is_empty());
    let valid = decoded.validated().unwrap();
    assert_eq!(valid, wire);
    let received = valid.received(now).unwrap();
    assert_eq!(received.to_wire(now), wire);
    received
}

/// Runs that something has happened to.
fn situations() -> Vec<(&'static str, Job)> {
    let mut all = vec![("nothing", Job::new(settings(1, 2))), ("a world runs", Job::formed(settings(2, 3), 3))];
    let mut job = Job::new(settings(2, 2));
    job.greet(1, None);
    job.join(1);
    all.push(("a node waits", job));
    let mut job = Job::formed(settings(1, 3), 3);
    job.crash(2, failure(1, Some(5), FAULT), &[]);
    all.push(("the world re-forms", job));
    let mut job = Job::formed(sliding(1, 1), 1);
    (1..=2).for_each(|line| {
        job.crash(1, Failure { lived: SECOND, ..failure(0, None, &FAULT.replace("88", &line.to_string())) }, &[1])
    });
    let last = Failure { lived: SECOND, ..failure(0, None, FAULT) };
    job.send(1, NodeMessage::Failed { round: job.run.round(), failure: Box::new(last) });
    assert!(job.run.snapshot().paused_until.is_some());
    all.push(("the next start waits", job));
    let mut job = Job::formed(judging(2, 3), 3);
    job.crash(2, failure(1, None, ""), &[1, 2, 3]);
    job.crash(2, failure(1, None, ""), &[1, 3]);
    assert_eq!(job.run.exclusions(job.now).len(), 1);
    all.push(("a host is out", job));
    let mut job = Job::formed(judging(2, 3), 3);
    job.crash(2, failure(1, None, ""), &[1, 2, 3]);
    job.crash(3, failure(1, None, ""), &[1, 2, 3]);
    all.push(("a worker is the cause", job));
    let mut job = Job::formed(settings(1, 3), 3);
    job.send(3, NodeMessage::Leave { reason: "SIGTERM".to_owned(), signal: Some(15) });
    all.push(("a node has left", job));
    let mut job = Job::formed(sliding(2, 2), 2);
    (0..4).for_each(|_| job.crash(2, failure(1, Some(7), ""), &[1, 2]));
    assert_eq!(job.verdict().0, EndClass::NoProgress);
    job.pass(SECOND);
    all.push(("it has failed", job));
    all
}

#[test]
fn a_successor_knows_all_that_its_predecessor_passes_on() {
    for (what, mut job) in situations() {
        let mut before = job.run.snapshot().to_wire(job.now);
        job.succeed(true, &[]);
        // The successor's own node has not come yet, and that of the former host will not.
        let gone = before.host_rank.take().filter(|_| before.closed.is_none());
        before.left.extend(gone);
        assert_eq!(job.run.snapshot().to_wire(job.now), before, "{what}");
        job.pass(Duration::ZERO);
        let says = job.has_recorded("this coordinator has taken over from another one");
        assert_eq!(says, !["nothing", "a node waits"].contains(&what), "{what}: {:?}", job.records);
    }
}

#[test]
fn what_a_successor_need_not_know_changes_no_snapshot() {
    for max in [3, 4] {
        let mut job = Job::formed(settings(2, max), 3);
        let (before, round) = (job.run.snapshot(), job.run.round());
        let claim = job.placed(2, true);
        let first = Progress { step: Some(4), before: None, after_us: 1, step_time_us: None, formed_us: [None; 2] };
        let report = StepReport { step: Some(9), step_time_us: Some(7), restarts_for_nccl: false };
        job.apply(Event::Watched);
        for message in [
            NodeMessage::Heartbeat { rtt_us: Some(5) },
            NodeMessage::Attending { round },
            NodeMessage::Progress { round, first },
            NodeMessage::Step { round, report },
            NodeMessage::Done { round },
        ] {
            job.send(2, message);
            assert_eq!(job.run.snapshot(), before);
        }
        job.apply(Event::Disconnected { node: NodeId(3) });
        job.apply(Event::Disconnected { node: NodeId(2) });
        job.greet(2, Some(claim));
        assert_eq!(job.run.snapshot(), before, "connections");
        job.greet(9, None);
        job.join(9);
        assert_eq!(job.run.snapshot(), before, "a node waits");
        job.send(9, NodeMessage::Withdraw);
        assert_eq!(job.run.snapshot(), before, "it no longer waits");
    }
}

#[test]
fn members_that_come_back_go_on_undisturbed() {
    let mut job = Job::formed(settings(2, 3), 3);
    job.crash(2, failure(1, None, ""), &[1, 2, 3]);
    let claims = job.succeed(false, &[1, 2, 3]);
    for (node, claim) in (1..).zip(claims) {
        assert!(!job.has_recorded("have reported"));
        job.greet(node, Some(claim));
        let status = job.run.nodes().find(|(id, ..)| *id == NodeId(node.into())).unwrap();
        assert_eq!((status.1, status.2), (&Status::Active, Some((Round(2), claim.rank))));
    }
    assert!(job.has_recorded("all 3 members of round 2 have reported"), "{:?}", job.records);
    (0..9).for_each(|_| job.pass(5 * SECOND));
    assert_eq!((1..=3).find_map(|node| job.must_stop(node)), None);
    assert_eq!((job.run.round(), job.run.restart(), job.run.reason().is_some()), (Round(2), 1, true));
    assert_eq!(job.run.snapshot().interrupted, None);
    job.crash(3, failure(2, None, ""), &[1, 2, 3]);
    assert_eq!((job.run.round(), job.run.restart(), job.placed(3, true).rank), (Round(3), 2, 2));
}

#[test]
fn a_world_re_forms_soon_if_one_member_has_ended_with_the_coordinator() {
    let mut job = Job::formed(settings(2, 3), 3);
    let claims = job.succeed(true, &[1, 2, 3]);
    (2..).zip(&claims[1..]).for_each(|(node, claim)| job.greet(node, Some(*claim)));
    assert_eq!((job.must_stop(2), job.must_stop(3)), (None, None));
    job.pass(LAST_LOOK);
    let reason = "node rank 0 of round 1 has ended with the coordinator that its process hosted";
    assert_eq!((job.must_stop(2), job.must_stop(3)), (Some(reason), Some(reason)));
    [2, 3].iter().for_each(|node| job.join(*node));
    job.pass(SECOND);
    assert_eq!((job.run.round(), job.run.restart(), job.placed(2, true).world_size), (Round(2), 0, 2));
}

#[test]
fn a_member_that_may_live_has_one_lease_to_come_back() {
    for node in [1, 2] {
        // Node 1 is in the process of a coordinator that is not known to be dead, and node 2 in none.
        let mut job = Job::formed(settings(2, 3), 3);
        let claims = job.succeed(node == 2, &[1, 2, 3]);
        let others: Vec<u8> = (1..=3).filter(|other| *other != node).collect();
        others.iter().for_each(|other| job.greet(*other, Some(claims[*other as usize - 1])));
        job.pass(job.settings.lease() - SECOND);
        assert_eq!(job.must_stop(3), None);
        job.pass(SECOND);
        assert_eq!(job.must_stop(3), Some("1 of 3 members of round 1 did not report to the restarted coordinator"));
    }
}

#[test]
fn a_node_without_a_place_in_the_newest_world_joins_and_claims_to_other_worlds_are_not_believed() {
    let mut job = Job::formed(settings(2, 3), 3);
    let old = [job.placed(2, true), job.placed(3, false)];
    job.crash(2, failure(1, None, ""), &[1, 2, 3]);
    job.succeed(false, &[1]);
    job.greet(2, Some(old[0]));
    assert_eq!(job.must_stop(2), Some("round 2 formed without this node, and round 1, its last, is over"));
    job.greet(3, Some(old[1]));
    [2, 3].iter().for_each(|node| job.join(*node));
    assert!(!job.run.is_recovering(job.now) && job.run.round() == Round(2));
    // Members of round 2 may still run: it got further than these nodes.
    job.pass(job.settings.lease() - SECOND);
    assert_eq!(job.run.round(), Round(2));
    job.pass(SECOND);
    job.pass(HOUR / 60);
    assert_eq!((job.run.round(), job.placed(2, true).world_size), (Round(3), 2));
}

#[test]
fn restarts_are_still_counted() {
    let mut job = Job::formed(settings(2, 3), 3);
    (0..3).for_each(|_| job.crash(2, failure(1, None, ""), &[1, 2, 3]));
    let mut job = job.succeeded(&[1, 2, 3]);
    job.crash(2, failure(1, None, ""), &[]);
    assert!(job.verdict().1.contains("no restarts left: all 3 restarts are used up"), "{:?}", job.verdict());

    let mut job = Job::formed(sliding(2, 2), 2);
    job.crash(2, failure(1, None, ""), &[1, 2]);
    job.pass(HOUR / 2);
    let left = job.run.state(job.now).budget;
    let mut job = job.succeeded(&[1, 2]);
    assert_eq!((job.run.state(job.now).budget, left.unwrap().crashes), (left, 2));
    job.pass(HOUR / 2);
    assert_eq!(job.run.state(job.now).budget.unwrap().crashes, 3, "its hour is over");
}

#[test]
fn a_fault_and_restarts_in_vain_are_still_known() {
    let mut job = Job::formed(sliding(2, 3), 3);
    (0..2).for_each(|_| job.crash(2, failure(1, Some(50), FAULT), &[1, 2, 3]));
    let mut job = job.succeeded(&[1, 2, 3]);
    job.crash(3, failure(2, Some(50), FAULT), &[]);
    let (class, cause) = job.verdict();
    assert_eq!(class, EndClass::Program);
    assert!(
        cause.contains("ValueError at data.py:88 in load, 3 times at step 50, on 10.0.0.2 and 10.0.0.3"),
        "{cause}"
    );

    let mut job = Job::formed(sliding(2, 2), 2);
    (0..3).for_each(|_| job.crash(2, failure(1, Some(7), ""), &[1, 2]));
    let mut job = job.succeeded(&[1, 2]);
    job.crash(2, failure(1, Some(7), ""), &[]);
    assert!(job.verdict().1.ends_with("3 restarts in a row brought no step after step 7"), "{:?}", job.verdict());
}

#[test]
fn hosts_that_are_out_stay_out_and_are_let_in_in_time() {
    let mut job = Job::formed(judging(2, 3), 3);
    job.crash(2, failure(1, None, ""), &[1, 2, 3]);
    job.crash(2, failure(1, None, ""), &[1, 2, 3]);
    assert_eq!((job.run.round(), job.placed(3, true).world_size), (Round(3), 2));
    let mut job = job.succeeded(&[1, 3]);
    assert_eq!(job.run.exclusions(job.now).len(), 1);
    job.greet(2, None);
    job.join(2);
    assert!(job.run.is_out(NodeId(2)));
    assert_eq!(job.must_stop(3), None);
    (0..12).for_each(|_| job.pass(5 * SECOND));
    assert!(job.has_recorded("host 10.0.0.2 is let in again") && !job.run.is_out(NodeId(2)));
    assert!(job.must_stop(3).is_some(), "it joins");
}

#[test]
fn a_late_node_learns_how_the_job_ended() {
    let (_, mut job) = situations().pop().unwrap();
    job.succeed(true, &[]);
    job.pass(SECOND);
    job.greet(8, None);
    let Some(CoordinatorMessage::Over { verdict, ago }) = job.last(8) else { panic!("{:?}", job.last(8)) };
    assert_eq!((Some(verdict), *ago), (job.run.closed(), Some(4 * SECOND)));
}

/// Any of them would replace the settings of a run without nodes.
#[test]
fn a_node_that_asks_for_other_settings_is_refused_while_members_are_awaited() {
    for joins in [false, true] {
        let mut job = Job::formed(settings(2, 3), 3);
        job.crash(2, failure(1, None, ""), &[1, 2, 3]);
        let claims = job.succeed(false, &[1, 2, 3]);
        let ours = std::mem::replace(&mut job.settings, Settings { max_restarts: Some(9), ..settings(1, 5) });
        job.greet(9, None);
        if joins {
            job.join(9);
        }
        assert!(matches!(job.last(9), Some(CoordinatorMessage::Rejected { .. })), "{:?}", job.last(9));
        job.settings = ours;
        (1..).zip(claims).for_each(|(node, claim)| job.greet(node, Some(claim)));
        assert!((1..=3).all(|node| matches!(job.last(node), Some(CoordinatorMessage::Status { waiting: 0, .. }))));
        assert_eq!((job.run.restart(), job.run.snapshot().settings), (1, job.settings.clone()));
    }
}

#[test]
fn members_are_asked_for_what_they_have_recorded() {
    let mut job = Job::formed(settings(2, 3), 3);
    let claims = job.succeed(false, &[1, 2, 3]);
    job.greet(2, Some(claims[1]));
    let asked = |(_, message): &(SessionId, CoordinatorMessage)| {
        matches!(message, CoordinatorMessage::Welcome { wants_replay: true, .. })
    };
    assert!(job.sent.iter().any(asked), "{:?}", job.sent);
}

mod wire;
