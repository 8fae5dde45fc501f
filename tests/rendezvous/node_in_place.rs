//! A node's part in changes in place: what it tells the coordinator, what it tells its agent, and when it breaks a change off itself.

use std::time::{Duration, Instant};

use elastic_rs::rendezvous::messages::message::{
    ADDED, CoordinatorMessage, Generation, Hello, Join, JoinWorkers, LARGEST_COUNT, NEVER, NodeId, NodeMessage,
    Placement, REMOVED, Resume, Round, Running, SURVIVORS_LIMIT, Survival, Verdict, WorldChange,
};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::node::{NodeCommand, NodeMachine};

use crate::bench::survived;

const ROUND: Round = Round(1);

/// The join that is all that a node has said, and its workers.
fn joined(sent: &[NodeMessage]) -> (&Join, &JoinWorkers) {
    match sent {
        [NodeMessage::Join(join)] => (join, join.workers.as_ref().expect("their number")),
        _ => panic!("{sent:?}"),
    }
}

const COORDINATOR_TIMEOUT: Duration = Duration::from_secs(60);

fn seconds(number: u64) -> Duration {
    Duration::from_secs(number)
}

/// A node with a clock.
struct Bench {
    node: NodeMachine,
    now: Instant,
}

impl Bench {
    /// A node that runs workers of round 1.
    fn running() -> Self {
        let now = Instant::now();
        let hello = Hello::new("job", NodeId(7), "host:1", Settings::new(1, 4));
        let mut bench = Self { node: NodeMachine::new(hello, "head:29400".into(), COORDINATOR_TIMEOUT, now), now };
        bench.node.join(1, None, Some(JoinWorkers::new("trainer", 2)), seconds(600), now);
        bench.connect();
        bench.complete_round(1);
        bench
    }

    /// The node attends, and has been notified of a change.
    fn changing() -> Self {
        let mut bench = Self::running();
        bench.node.attending(ROUND);
        bench.change("a node waits");
        bench.sent();
        bench
    }

    fn receive(&mut self, message: CoordinatorMessage) {
        self.node.on_message(message, self.now);
    }

    /// Connect to a coordinator. Returns the node's introduction.
    fn connect(&mut self) -> Hello {
        self.node.on_connected(self.now);
        let sent = self.sent();
        let Some(NodeMessage::Hello(hello)) = sent.first() else { panic!("{sent:?}") };
        self.receive(CoordinatorMessage::Welcome {
            addr: "10.0.0.7".into(),
            hosted: false,
            running: None,
            wants_replay: false,
        });
        (**hello).clone()
    }

    fn disconnect(&mut self) {
        self.node.on_disconnected("a test".into(), false, self.now);
        self.sent();
    }

    fn complete_round(&mut self, round: u64) {
        let placement = Placement {
            round: Round(round),
            rank: 0,
            world_size: 2,
            world: 9,
            master_addr: "10.0.0.7".into(),
            master_port: 1,
            reason: "all are in".into(),
            restart: 0,
            workers: None,
            host: None,
            local_world_size: None,
            resume: Some(Resume::Continue { source: 1, sync: true, survivors: 3, generation: Generation::default() }),
            members: None,
        };
        self.receive(CoordinatorMessage::Complete(placement.clone()));
        let placed = self.node.take_outcome().expect("answered").expect("placed");
        assert_eq!(placed, placement, "it reaches the agent");
        self.sent();
    }

    fn change(&mut self, reason: &str) {
        self.receive(CoordinatorMessage::Change(WorldChange { round: ROUND, flags: ADDED, reason: reason.into() }));
    }

    fn raise_at(&mut self, check: u64) {
        self.receive(CoordinatorMessage::RaiseAt { round: ROUND, check });
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.node.on_tick(self.now);
    }

    /// The messages since the last call.
    fn sent(&mut self) -> Vec<NodeMessage> {
        let sent = |command| if let NodeCommand::Send(message) = command { Some(message) } else { None };
        self.node.take_commands().into_iter().filter_map(sent).collect()
    }

    /// The change that the agent sees, and the check.
    fn seen(&self) -> (Option<u64>, Option<u64>, u32) {
        let view = self.node.view();
        assert!(view.raise_at.is_none_or(|(round, _)| round == ROUND));
        (view.change.as_ref().map(|_| view.changes), view.raise_at.map(|(_, check)| check), view.waiting)
    }

    /// Join with these workers of two.
    fn join(&mut self, survival: Survival) {
        self.node.set_survivors(survival);
        self.node.join(1, None, Some(JoinWorkers::new("trainer", 2)), seconds(600), self.now);
    }
}

#[test]
fn a_change_is_shown_answered_and_ended_by_the_next_join() {
    let mut bench = Bench::running();
    bench.node.attending(ROUND);
    assert_eq!(bench.sent(), [NodeMessage::Attending { round: ROUND }]);
    // A coordinator may be any program.
    let reason = "a node\u{1b}[2J waits".to_owned();
    bench.receive(CoordinatorMessage::Change(WorldChange { round: ROUND, flags: 0xff, reason }));
    let change = WorldChange { round: ROUND, flags: ADDED | REMOVED, reason: "a node [2J waits".into() };
    assert_eq!(bench.node.view().change, Some(change));
    assert_eq!(bench.seen(), (Some(1), None, 0));
    bench.node.counted(ROUND, 30);
    assert_eq!(bench.sent(), [NodeMessage::Counted { round: ROUND, count: 30 }]);
    bench.raise_at(31);
    assert_eq!(bench.seen(), (Some(1), Some(31), 0));

    assert!(bench.node.view().in_place && !bench.node.view().hosted);
    bench.join(survived(1, &[(1, Some(4)), (0, None)]));
    assert_eq!(bench.seen(), (None, None, 0));
    let sent = bench.sent();
    let (join, workers) = joined(&sent);
    assert_eq!((join.round, workers.check), (ROUND, Some(31)));
    assert_eq!(workers.survivors().iter().map(|of| of.local_rank).collect::<Vec<_>>(), [0, 1]);
    // The same on the next connection, if it was lost.
    bench.disconnect();
    bench.connect();
    assert_eq!(bench.sent(), sent);
    bench.complete_round(2);
    assert_eq!(bench.seen(), (None, None, 0));
}

#[test]
fn workers_that_have_gone_back_to_their_commit_name_no_check() {
    let failed = CoordinatorMessage::Status { waiting: 1, reason: "a loss".into(), restart: 1, failure: None };
    for reported in [false, true] {
        let mut bench = Bench::changing();
        if reported {
            bench.raise_at(31);
        }
        bench.receive(failed.clone());
        assert_eq!(bench.seen(), (None, None, 1), "the change is over");
        bench.join(survived(1, &[(0, Some(4))]));
        let sent = bench.sent();
        let (_, workers) = joined(&sent);
        assert_eq!((workers.survivors().len(), workers.check), (1, None));
    }
}

#[test]
fn a_node_whose_workers_use_no_changes_in_place_joins_as_ever() {
    let too_many = (0..=SURVIVORS_LIMIT as u32).map(|rank| (rank, None)).collect::<Vec<_>>();
    for brought in [Survival::New, survived(1, &too_many)] {
        let mut bench = Bench::running();
        bench.join(brought);
        assert_eq!(joined(&bench.sent()).1.survival, Survival::New);
    }
    // PyTorch's agent does not tell the number of its workers.
    let mut bench = Bench::running();
    bench.node.set_survivors(survived(1, &[(0, None)]));
    bench.node.join(1, None, None, seconds(600), bench.now);
    let sent = bench.sent();
    assert!(matches!(&sent[..], [NodeMessage::Join(_)]), "{sent:?}");
}

/// What a node brings is for one join.
#[test]
fn survivors_are_named_by_the_join_that_follows() {
    let mut bench = Bench::running();
    bench.join(survived(1, &[(0, Some(4))]));
    bench.complete_round(2);
    bench.node.join(1, None, Some(JoinWorkers::new("trainer", 2)), seconds(600), bench.now);
    assert_eq!(joined(&bench.sent()).1.survival, Survival::New);
}

#[test]
fn a_notice_that_comes_while_the_coordinator_is_away_is_said_later() {
    let mut bench = Bench::running();
    bench.disconnect();
    assert!(!bench.node.notice(ROUND, seconds(30), "a test\n", bench.now), "this node's workers save by themselves");
    bench.connect();
    let sent = bench.sent();
    let said =
        matches!(&sent[..], [NodeMessage::Notice { round: ROUND, left_ms: 1..=30_000, reason }] if reason == "a test");
    assert!(said, "{sent:?}");
}

#[test]
fn what_was_said_is_said_again_on_a_new_connection() {
    let mut bench = Bench::running();
    bench.node.attending(ROUND);
    assert!(bench.node.will_leave(ROUND, "SIGTERM\n", Some(15)));
    let will_leave = NodeMessage::WillLeave { round: ROUND, reason: "SIGTERM".into(), signal: Some(15) };
    assert!(bench.sent().contains(&will_leave));
    bench.change("this node leaves");
    bench.node.counted(ROUND, 30);
    bench.disconnect();
    let hello = bench.connect();
    assert!(hello.attending, "a restarted coordinator must know at once");
    assert_eq!(bench.sent(), [NodeMessage::Counted { round: ROUND, count: 30 }, will_leave.clone()]);
    // The change is repeated too, and is the same one.
    bench.change("this node leaves");
    assert_eq!(bench.seen(), (Some(1), None, 0));
    bench.raise_at(40);
    bench.node.parked(ROUND);
    assert_eq!(bench.sent(), [NodeMessage::Parked { round: ROUND }]);
    bench.disconnect();
    bench.connect();
    // So that a restarted coordinator chooses the same check.
    let counted = NodeMessage::Counted { round: ROUND, count: 39 };
    assert_eq!(bench.sent(), [counted, will_leave, NodeMessage::Parked { round: ROUND }]);
    bench.change("this node leaves");
    bench.raise_at(40);
    assert_eq!(bench.seen(), (Some(1), Some(40), 0));
}

#[test]
fn a_change_that_was_called_off_is_followed_by_one_with_another_number() {
    let mut bench = Bench::changing();
    bench.node.counted(ROUND, 30);
    bench.raise_at(NEVER);
    assert_eq!(bench.seen(), (Some(1), Some(NEVER), 0));
    bench.pass(seconds(11));
    assert_eq!(bench.seen(), (Some(1), Some(NEVER), 0));
    bench.change("another node waits");
    assert_eq!(bench.seen(), (Some(2), None, 0));
    bench.sent();
    bench.node.counted(ROUND, u64::MAX);
    assert_eq!(bench.sent(), [NodeMessage::Counted { round: ROUND, count: LARGEST_COUNT }]);
}

#[test]
fn a_node_breaks_the_change_off_if_the_coordinator_does_not_name_the_check() {
    let mut bench = Bench::changing();
    bench.node.counted(ROUND, 30);
    bench.sent();
    assert!(bench.node.next_deadline().is_some_and(|at| at <= bench.now + seconds(10)));
    bench.pass(seconds(9));
    assert_eq!(bench.seen(), (Some(1), None, 0));
    bench.pass(seconds(1));
    assert_eq!(bench.seen(), (None, None, 1));
    let reason = "the coordinator at head:29400 did not complete a change of the world within 10.0s";
    assert_eq!(bench.node.view().reason, reason);
    // Its workers have gone back to their commit, and count no more.
    bench.disconnect();
    assert!(!bench.connect().attending);
    assert!(!bench.sent().iter().any(|message| matches!(message, NodeMessage::Counted { .. })));
}

/// The coordinator may have died before it told the other members, whose workers go back to their commits then.
#[test]
fn a_node_that_knows_the_check_breaks_the_change_off_only_without_a_coordinator() {
    let mut bench = Bench::changing();
    bench.raise_at(31);
    bench.pass(seconds(11));
    assert_eq!(bench.seen(), (Some(1), Some(31), 0), "a step may take long");
    let mut bench = Bench::changing();
    bench.raise_at(31);
    bench.disconnect();
    bench.pass(seconds(11));
    assert_eq!(bench.seen(), (None, None, 1));
}

#[test]
fn a_check_that_workers_may_have_passed_breaks_the_change_off() {
    let mut bench = Bench::changing();
    bench.node.counted(ROUND, 30);
    bench.raise_at(30);
    assert_eq!(bench.seen(), (None, None, 1));
    let mut bench = Bench::changing();
    bench.raise_at(31);
    bench.raise_at(32);
    assert_eq!(bench.seen(), (None, None, 1));
    assert!(bench.node.view().reason.starts_with("the workers cannot stop at check 32"), "{:?}", bench.node.view());
}

#[test]
fn workers_go_on_when_the_job_is_closed_during_a_change() {
    let mut bench = Bench::changing();
    bench.receive(CoordinatorMessage::Closed { verdict: Verdict::Succeeded { by: "host:2".into() }, spare: false });
    assert_eq!(bench.seen(), (Some(1), Some(NEVER), 0));
}

#[test]
fn a_coordinator_that_ends_during_a_change_ends_it() {
    let leaving = CoordinatorMessage::Leaving { why: "SIGTERM".into(), interrupts: false };
    let mut bench = Bench::changing();
    bench.receive(leaving.clone());
    assert_eq!(bench.seen(), (None, None, 1));
    // All members know the check, so that they stop there without a coordinator.
    let mut bench = Bench::changing();
    bench.raise_at(31);
    bench.receive(leaving);
    assert_eq!(bench.seen(), (Some(1), Some(31), 0));
}

#[test]
fn nothing_is_said_about_another_round_or_after_the_end() {
    let mut bench = Bench::running();
    bench.node.attending(Round(2));
    bench.node.counted(ROUND, 3);
    assert!(!bench.node.will_leave(ROUND, "SIGTERM", None), "its workers do not attend");
    bench.node.parked(ROUND);
    bench.receive(CoordinatorMessage::Change(WorldChange { round: Round(2), flags: ADDED, reason: "x".into() }));
    bench.raise_at(4);
    assert_eq!((bench.seen(), bench.sent()), ((None, None, 0), vec![]));
    bench.node.attending(ROUND);
    bench.sent();
    bench.node.leave("a test".into(), None);
    bench.sent();
    bench.node.attending(ROUND);
    assert!(!bench.node.will_leave(ROUND, "SIGTERM", None));
    assert_eq!(bench.sent(), []);
}

/// Its workers are killed, so none of them waits for a check.
#[test]
fn a_node_that_is_cut_off_during_a_change_has_no_part_in_it() {
    let mut bench = Bench::changing();
    bench.raise_at(31);
    bench.disconnect();
    bench.now += Settings::new(1, 4).lease() + seconds(1);
    bench.node.fence_if_due(bench.now);
    assert!(bench.node.view().fenced.is_some());
    assert_eq!(bench.seen(), (None, None, 1));
}

#[test]
fn a_node_knows_whether_a_world_runs_once_it_was_welcomed() {
    let now = Instant::now();
    let hello = Hello::new("job", NodeId(7), "host:1", Settings::new(1, 4));
    let mut bench = Bench { node: NodeMachine::new(hello, "head:29400".into(), COORDINATOR_TIMEOUT, now), now };
    assert_eq!(bench.node.forecast(), None);
    bench.connect();
    assert_eq!(bench.node.forecast(), Some(None));

    bench.node.on_disconnected("reset".into(), false, now);
    bench.node.on_connected(now);
    let running = Running {
        round: ROUND,
        world: 9,
        nodes: 1,
        workers: 2,
        room: None,
        master_addr: "10.0.0.1\u{1b}[2J".into(),
        master_port: 1,
        restart: 0,
    };
    let (addr, running) = ("10.0.0.7".to_owned(), Some(running));
    bench.receive(CoordinatorMessage::Welcome { addr, hosted: false, running, wants_replay: false });
    let reported = bench.node.forecast().flatten().unwrap();
    assert_eq!((reported.round, reported.workers), (ROUND, 2));
    assert!(!reported.master_addr.contains('\u{1b}'), "{}", reported.master_addr);
}

#[test]
fn a_member_says_once_that_its_workers_have_no_group_of_their_own() {
    let mut bench = Bench::running();
    bench.node.no_process_group(Round(2));
    assert_eq!(bench.sent(), [], "another round");
    bench.node.no_process_group(ROUND);
    assert_eq!(bench.sent(), [NodeMessage::NoProcessGroup { round: ROUND }]);
}

/// Its workers hold the state of a world that may have gone on without them.
#[test]
fn a_node_that_waits_with_its_workers_and_hears_nothing_for_its_lease_has_none_any_more() {
    let mut bench = Bench::running();
    let due = bench.node.workers_until().expect("its workers run");
    bench.receive(CoordinatorMessage::Status { waiting: 1, reason: "a loss".into(), restart: 0, failure: None });
    bench.node.set_survivors(survived(1, &[(0, Some(5))]));
    let workers = Some(JoinWorkers::new("trainer", 2));
    bench.node.join(1, None, workers.clone(), seconds(600), bench.now);
    assert_eq!(joined(&bench.sent()).1.survivors().len(), 1);
    assert_eq!(bench.node.workers_until(), Some(due), "they wait for the next world");
    bench.now = due;
    bench.node.on_tick(bench.now);
    assert!(bench.node.take_commands().contains(&NodeCommand::Disconnect), "a place may be on its way");
    assert!(bench.node.view().fenced.is_some());
    // What had arrived by then counts on them.
    bench.node.on_message(CoordinatorMessage::Heartbeat { waits: None }, bench.now);
    assert_eq!(bench.node.workers_until(), Some(due), "guards have killed them");

    assert!(!bench.connect().joining, "a place that counts on them is given up");
    let sent = bench.sent();
    assert_eq!(joined(&sent[..1]).1.survival, Survival::Attended(Vec::new()));
    assert_eq!(sent[1..], [NodeMessage::Fenced]);
    bench.complete_round(2);
    let survivors = bench.node.take_lost_survivors();
    assert!(survivors.is_some_and(|reason| reason.contains("cut off")));
    assert_eq!(bench.node.take_lost_survivors(), None);
    assert_eq!(bench.node.view().fenced, None, "its new workers are in a world");
    assert!(bench.node.workers_until().is_some());

    // A node that brings nobody has nothing to end.
    bench.node.join(1, None, workers, seconds(600), bench.now);
    assert_eq!(bench.node.workers_until(), None);
}

/// Guards kill the workers then, whatever the agent does.
#[test]
fn guards_hold_the_end_of_the_lease_while_it_concerns_the_workers() {
    let lease = Settings::new(1, 4).lease();
    let mut bench = Bench::running();
    let began = bench.now;
    assert_eq!(bench.node.workers_until(), Some(began + lease));
    bench.pass(seconds(5));
    bench.receive(CoordinatorMessage::Heartbeat { waits: None });
    assert_eq!(bench.node.workers_until(), Some(bench.now + lease), "an answer renews it");
    let mut done = Bench { node: bench.node.clone(), now: bench.now };
    done.node.report_done(ROUND);
    assert_eq!(done.node.workers_until(), None, "the workers have finished");
    let mut closed = Bench { node: bench.node.clone(), now: bench.now };
    closed.receive(CoordinatorMessage::Closed { verdict: Verdict::Succeeded { by: "host".into() }, spare: false });
    assert_eq!(closed.node.workers_until(), None, "the job is over");
    let mut hosting = Bench { node: bench.node.clone(), now: bench.now };
    hosting.disconnect();
    hosting.node.on_connected(hosting.now);
    hosting.receive(CoordinatorMessage::Welcome {
        addr: "10.0.0.7".into(),
        hosted: true,
        running: None,
        wants_replay: false,
    });
    assert_eq!(hosting.node.workers_until(), None, "nobody decides while this process is stopped");

    // A node that has failed is not renewed any more. The others may go on without it while its workers are being stopped.
    let due = bench.now + lease;
    bench.receive(CoordinatorMessage::Rejected { reason: "another agent has its place".into() });
    assert_eq!(bench.node.workers_until(), Some(due));
}

/// `in_place=off`, for example.
#[test]
fn a_node_whose_workers_cannot_survive_says_nothing_of_changes() {
    let now = Instant::now();
    let hello = Hello { in_place: false, ..Hello::new("job", NodeId(7), "host:1", Settings::new(1, 4)) };
    let mut bench = Bench { node: NodeMachine::new(hello, "head:29400".into(), COORDINATOR_TIMEOUT, now), now };
    bench.node.set_survivors(survived(1, &[(0, Some(3))]));
    bench.node.join(1, None, Some(JoinWorkers::new("trainer", 2)), seconds(600), now);
    bench.connect();
    assert!(!bench.node.view().in_place);
    assert_eq!(joined(&bench.sent()).1.survival, Survival::New);
    bench.complete_round(1);
    bench.node.attending(ROUND);
    bench.node.no_process_group(ROUND);
    assert!(!bench.node.will_leave(ROUND, "SIGTERM", Some(15)), "nobody would answer");
    assert_eq!(bench.sent(), []);
}

#[test]
fn guards_end_workers_whose_machine_goes_before_the_lease_is_over() {
    let mut bench = Bench::running();
    let (left, lease) = (seconds(4), Settings::new(1, 4).lease());
    assert!(bench.node.notice(ROUND, left, "a test", bench.now));
    let gone_at = bench.now + left;
    let until = bench.node.workers_until().unwrap();
    assert!(gone_at < until && until < gone_at + Duration::from_millis(250) && until < bench.now + lease);
    bench.node.notice(ROUND, seconds(60), "another", bench.now);
    assert_eq!(bench.node.workers_until(), Some(until), "the first counts");
    bench.node.leave("its machine is taken away".to_owned(), None);
    assert_eq!(bench.node.workers_until(), Some(until), "they are being stopped, and nobody waits for that");
}
