//! Changes in place, as the coordinator decides them: members stop their workers at one check, and join again with them.

mod broken;
mod growing;
mod leaving;
mod new_workers;
mod notices;
mod reconnects;
mod session;
mod survivors;

use std::time::Duration;

use elastic_rs::rendezvous::messages::message::{
    CoordinatorMessage, NodeMessage, Placement, Resume, Round, WorldChange,
};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::run::SessionId;

use crate::bench::{Bench, back, hello, join};

const SECOND: Duration = Duration::from_secs(1);
const ROUND: Round = Round(1);

fn settings(min: u32, max: u32) -> Settings {
    Settings { last_call_timeout: 3 * SECOND, settle_timeout: 2 * SECOND, ..Settings::new(min, max) }
}

/// A bench with nodes 1 to `count` as members of round 1.
fn formed(count: u64, max: u32) -> Bench {
    // At the maximum a round closes at once. The members come first, so that the rest of the places stays free.
    let settings = settings(1, max);
    let mut bench = Bench::new();
    for node in 1..=count {
        bench.greet(node, hello(node, &settings), node as u8);
        bench.send(node, join(0));
    }
    if bench.run().round() != ROUND {
        bench.pass(settings.last_call_timeout);
    }
    assert_eq!(bench.run().round(), ROUND);
    bench
}

/// The same, and all attend.
fn attended(count: u64, max: u32) -> Bench {
    let mut bench = formed(count, max);
    (1..=count).for_each(|node| bench.send(node, NodeMessage::Attending { round: ROUND }));
    bench
}

impl Bench {
    fn newcomer(&mut self, node: u64, max: u32) {
        self.greet(node, hello(node, &settings(1, max)), node as u8);
        self.send(node, join(0));
    }

    fn count(&mut self, node: u64, count: u64) {
        self.send(node, NodeMessage::Counted { round: ROUND, count });
    }

    fn will_leave(&mut self, node: u64) {
        self.send(node, NodeMessage::WillLeave { round: ROUND, reason: "SIGTERM".into(), signal: Some(15) });
    }

    fn leave(&mut self, node: u64) {
        self.send(node, NodeMessage::Leave { reason: "SIGTERM".into(), signal: Some(15) });
    }

    /// The node's workers have stopped at this check, and it joins with both.
    fn stop(&mut self, node: u64, check: u64) {
        self.send(node, back(1, &[(0, Some(7)), (1, Some(7))], Some(check)));
    }

    fn change(&self, node: u64) -> (u8, &str) {
        match self.last(node) {
            CoordinatorMessage::Change(WorldChange { round: ROUND, flags, reason }) => (*flags, reason),
            other => panic!("node {node} was not notified of a change: {other:?}"),
        }
    }

    fn assert_raise_at(&self, nodes: &[u64], check: u64) {
        for node in nodes {
            assert_eq!(*self.last(*node), CoordinatorMessage::RaiseAt { round: ROUND, check }, "node {node}");
        }
    }

    /// The reason for which these nodes are asked to stop at once.
    fn stopped(&self, nodes: &[u64]) -> String {
        let reason = |node: &u64| match self.last(*node) {
            CoordinatorMessage::Status { waiting: 1.., reason, .. } => reason.clone(),
            other => panic!("node {node} was not asked to stop: {other:?}"),
        };
        let reasons: Vec<_> = nodes.iter().map(reason).collect();
        assert!(reasons.windows(2).all(|pair| pair[0] == pair[1]), "{reasons:?}");
        reasons[0].clone()
    }

    fn resume(&self, node: u64) -> &Resume {
        match self.last(node) {
            CoordinatorMessage::Complete(Placement { resume: Some(resume), .. }) => resume,
            other => panic!("node {node} has no place: {other:?}"),
        }
    }

    fn assert_go_on(&self, node: u64, sync: bool, survivors: u32) {
        let resume = self.resume(node);
        let expected = (0, sync, survivors);
        let Resume::Continue { source, sync, survivors, .. } = *resume else { panic!("node {node}: {resume:?}") };
        assert_eq!((source, sync, survivors), expected, "node {node}");
    }

    fn is_stopped(&self, node: u64) -> bool {
        let stops = |message: &CoordinatorMessage| matches!(message, CoordinatorMessage::Status { waiting: 1.., .. });
        self.sent.iter().any(|(to, message)| *to == SessionId(node) && stops(message))
    }
}
