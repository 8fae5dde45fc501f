//! What a node records: its own observations, and over a shared cell the decisions that it wrote. Pure.
//!
//! A node's events have an origin of their own. Those that no file has taken yet are kept up to a bound, and so are the last that explain,
//! for a coordinator that was restarted.

use std::collections::VecDeque;
use std::fmt;
use std::time::Instant;

use super::record::{Kind, Number, Record};

/// Most events that wait for a file.
const UNWRITTEN: usize = 1024;
/// Most events that are replayed to a restarted coordinator.
pub const REPLAYED: usize = 64;

/// The id of an event.
pub fn id(origin: &str, number: Number) -> String {
    format!("{origin}.{}", number.0)
}

/// The name of the origin of the node with this random id. It does not reveal the id, by which others could pass for the node.
/// Coordinators compare it with what the node says, so it is the same in all releases.
pub fn origin(node: u128) -> String {
    let folded = (node >> 64) as u64 ^ (node as u64).rotate_left(32);
    format!("n{folded:016x}")
}

/// The event of another node's that is a cause, by what is known of it. A shared cell has no place for ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reference {
    /// That by which this round was completed.
    Completed(u64),
    /// That by which this round was broken, or is to change in place.
    Broken(u64),
    /// The last request of the node with this name for a place.
    Joined(String),
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Completed(round) => write!(f, "@completed.{round}"),
            Self::Broken(round) => write!(f, "@broken.{round}"),
            Self::Joined(name) => write!(f, "@joined.{name}"),
        }
    }
}

/// An event of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// What happened. Its causes are in `causes`.
    pub record: Record,
    /// The ids of its causes, or [`Reference`]s to them.
    pub causes: Vec<String>,
    /// When it was recorded.
    pub at: Instant,
}

/// The events of one node.
#[derive(Clone, Debug)]
pub struct Journal {
    origin: String,
    began: Instant,
    now: Instant,
    last: u64,
    unwritten: VecDeque<Entry>,
    /// Events that no file has taken, and that are not kept any more.
    missed: u64,
    recent: VecDeque<Entry>,
    /// The round that it records, and the job's restart number.
    round: (u64, u32),
    completed: Option<Number>,
    broken: Option<Number>,
    signalled: Option<Number>,
    closed: bool,
}

impl Journal {
    /// An empty one of the node with this random id.
    pub fn new(node: u128, now: Instant) -> Self {
        Self {
            origin: origin(node),
            began: now,
            now,
            last: 0,
            unwritten: VecDeque::new(),
            missed: 0,
            recent: VecDeque::new(),
            round: (0, 0),
            completed: None,
            broken: None,
            signalled: None,
            closed: false,
        }
    }

    /// The name of its origin, with which the ids of its events begin.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// When its clock began.
    pub fn began(&self) -> Instant {
        self.began
    }

    /// The latest time that it was given.
    pub fn now(&self) -> Instant {
        self.now
    }

    /// The time is at least this.
    pub fn tick(&mut self, now: Instant) {
        self.now = self.now.max(now);
    }

    /// A round begins.
    pub fn begin_round(&mut self, round: u64, restart: u32) {
        self.round = (round, restart);
        self.broken = None;
    }

    /// The event by which the node learned that its round is complete.
    pub fn completed(&self) -> Option<Number> {
        self.completed
    }

    /// The event by which the node learned that its round is broken, if it did.
    pub fn broken(&self) -> Option<Number> {
        self.broken
    }

    /// The event by which the node's agent got a signal that ends it.
    pub fn signalled(&self) -> Option<Number> {
        self.signalled
    }

    /// Whether the node has learned that the rendezvous is closed.
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// Record an observation. `node` is the name of the node that it is about.
    pub fn record(&mut self, kind: Kind, node: Option<&str>, cause: Option<Number>, text: Option<String>) -> Number {
        let number = self.next();
        match &kind {
            Kind::ReceivedCompleted { .. } => self.completed = Some(number),
            Kind::ReceivedBroken { .. } => self.broken = Some(number),
            Kind::ReceivedSignal { .. } => self.signalled = Some(number),
            Kind::ReceivedClosed { .. } => self.closed = true,
            _ => {}
        }
        let causes = cause.map(|cause| id(&self.origin, cause)).into_iter().collect();
        let (round, restart) = self.round;
        let record = Record { number, causes: Vec::new(), round, restart, node: node.map(str::to_owned), kind, text };
        self.keep(Entry { record, causes, at: self.now });
        number
    }

    /// Record decisions that this node has written into a shared cell. Their numbers begin after those of `references`, which are
    /// numbered from 1.
    pub fn decided(&mut self, records: Vec<Record>, references: &[Reference]) {
        let before = self.last;
        for mut record in records {
            let number = self.next();
            let cause = |cause: &Number| match references.get(cause.0.saturating_sub(1) as usize) {
                Some(reference) => reference.to_string(),
                None => id(&self.origin, Number(before + cause.0 - references.len() as u64)),
            };
            let causes = record.causes.iter().map(cause).collect();
            record.causes = Vec::new();
            self.keep(Entry { record: Record { number, ..record }, causes, at: self.now });
        }
    }

    /// Take the events that no file has taken yet, and the number of those that are not kept any more.
    pub fn take(&mut self) -> (Vec<Entry>, u64) {
        (std::mem::take(&mut self.unwritten).into(), std::mem::take(&mut self.missed))
    }

    /// The last events that explain, the oldest first. At most [`REPLAYED`].
    pub fn recent(&self) -> impl DoubleEndedIterator<Item = &Entry> {
        self.recent.iter()
    }

    fn next(&mut self) -> Number {
        self.last += 1;
        Number(self.last)
    }

    fn keep(&mut self, entry: Entry) {
        if entry.record.kind.explains() || matches!(entry.record.kind, Kind::Phase(_)) {
            if self.recent.len() == REPLAYED {
                self.recent.pop_front();
            }
            self.recent.push_back(entry.clone());
        }
        if self.unwritten.len() == UNWRITTEN {
            self.unwritten.pop_front();
            self.missed += 1;
        }
        self.unwritten.push_back(entry);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::events::record::Why;

    #[test]
    fn decisions_are_numbered_with_observations_and_name_other_nodes_by_reference() {
        let begin = Instant::now();
        let mut journal = Journal::new(7 << 64, begin);
        journal.record(Kind::LineLost {}, None, None, None);
        let decision = |number, causes: &[u64], kind| Record {
            number: Number(number),
            causes: causes.iter().copied().map(Number).collect(),
            round: 3,
            restart: 1,
            node: None,
            kind,
            text: None,
        };
        let records =
            vec![decision(3, &[2], Kind::Note {}), decision(4, &[3, 1], Kind::RoundBroken { why: Why::NodesWait })];
        journal.decided(records, &[Reference::Completed(3), Reference::Joined("n2:7".into())]);
        let (kept, missed) = journal.take();
        let found: Vec<_> = kept.iter().map(|entry| (entry.record.number.0, entry.causes.clone())).collect();
        let own = |number: u64| format!("{}.{number}", journal.origin());
        let expected =
            [(1, vec![]), (2, vec!["@joined.n2:7".to_owned()]), (3, vec![own(2), "@completed.3".to_owned()])];
        assert_eq!((found.as_slice(), missed, journal.origin()), (expected.as_slice(), 0, "n0000000000000007"));
    }

    #[test]
    fn what_nobody_takes_is_bounded_and_counted() {
        let begin = Instant::now();
        let mut journal = Journal::new(1, begin);
        for ms in 0..5000 {
            journal.tick(begin + Duration::from_millis(ms));
            journal.record(Kind::ReceivedBroken { in_place: false }, None, None, None);
        }
        assert_eq!(journal.recent().count(), REPLAYED);
        let (kept, missed) = journal.take();
        assert_eq!((kept.len(), missed, kept[0].record.number), (UNWRITTEN, 5000 - UNWRITTEN as u64, Number(3977)));
        assert_eq!(kept.last().map(|entry| entry.at), Some(begin + Duration::from_millis(4999)));
        assert_eq!(journal.take(), (Vec::new(), 0));
    }
}
