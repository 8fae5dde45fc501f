//! What the processes at the endpoints of a list send each other, and the checks of it.

use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::rendezvous::messages::ids::NodeId;
use crate::rendezvous::messages::peer::MOST_ENDPOINTS;
use crate::rendezvous::quorum::bootstrap::Answer;
use crate::rendezvous::quorum::record::{Ballot, Record, Stamp};
use crate::rendezvous::quorum::replica::Message;
use crate::rendezvous::quorum::voter::Reply;
use crate::rendezvous::run::snapshot::Snapshot;

/// Numbers from another process that are higher are not believed: nobody counts so far.
const LARGEST_NUMBER: u64 = 1 << 62;

/// What a leader has the voters record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Content<T = Instant> {
    /// Counts the contents.
    pub(super) version: u64,
    /// The run. `None`: it had not begun.
    pub(super) snapshot: Option<Box<Snapshot<T>>>,
    /// The process that led when it was made. Whoever has written it again since is another.
    pub(super) by: Option<NodeId>,
}

impl<T> Default for Content<T> {
    fn default() -> Self {
        Self { version: 0, snapshot: None, by: None }
    }
}

/// What one process sends another, after their introduction.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PeerMessage {
    /// Who leads?
    WhoLeads,
    /// The answer, or news.
    Leader(Answer<u32>),
    /// About the record.
    Quorum(Message<Content<i64>>),
    /// Asks the leader for a lease.
    Question {
        /// The sender counts its questions.
        number: u64,
        /// Whom it follows.
        follows: Ballot,
    },
    /// The answer: a lease, counted from when the question was sent.
    Lease {
        /// The number of the question.
        number: u64,
        /// The record that was chosen then.
        stamp: Stamp,
    },
}

/// A message as it goes over the wire.
pub(super) fn sent(message: Message<Content>, now: Instant) -> Message<Content<i64>> {
    let content = |content: Content| Content {
        version: content.version,
        snapshot: content.snapshot.map(|snapshot| Box::new(snapshot.to_wire(now))),
        by: content.by,
    };
    match message {
        Message::Write(record) => Message::Write(record.map(content)),
        Message::Reply(Reply::Voted(ballot, record)) => Message::Reply(Reply::Voted(ballot, record.map(content))),
        Message::Reply(Reply::Accepted(stamp)) => Message::Reply(Reply::Accepted(stamp)),
        Message::Reply(Reply::Refused(ballot)) => Message::Reply(Reply::Refused(ballot)),
        Message::Ask(ballot) => Message::Ask(ballot),
        Message::Abdicated(ballot) => Message::Abdicated(ballot),
        Message::IsOver(ballot) => Message::IsOver(ballot),
    }
}

/// A message that has come over the wire. Another process has written it.
pub(super) fn received(message: Message<Content<i64>>, now: Instant) -> Result<Message<Content>, String> {
    let record = |record: Record<Content<i64>>| {
        check_stamp(record.stamp)?;
        if record.sets().any(|voters| voters.0.is_empty() || voters.0.len() > MOST_ENDPOINTS) {
            return Err(format!("a set of voters has none or more than {MOST_ENDPOINTS}"));
        }
        let Record { stamp, voters, before, content: Content { version, snapshot, by } } = record;
        let snapshot = snapshot.map(|it| it.validated().and_then(|it| it.received(now))).transpose()?.map(Box::new);
        Ok(Record { stamp, voters, before, content: Content { version: check_number(version)?, snapshot, by } })
    };
    Ok(match message {
        Message::Write(it) => Message::Write(record(it)?),
        Message::Reply(Reply::Voted(ballot, it)) => Message::Reply(Reply::Voted(check_ballot(ballot)?, record(it)?)),
        Message::Reply(Reply::Accepted(stamp)) => Message::Reply(Reply::Accepted(check_stamp(stamp)?)),
        Message::Reply(Reply::Refused(ballot)) => Message::Reply(Reply::Refused(check_ballot(ballot)?)),
        Message::Ask(ballot) => Message::Ask(check_ballot(ballot)?),
        Message::Abdicated(ballot) => Message::Abdicated(check_ballot(ballot)?),
        Message::IsOver(ballot) => Message::IsOver(check_ballot(ballot)?),
    })
}

fn check_number(number: u64) -> Result<u64, String> {
    match number {
        0..=LARGEST_NUMBER => Ok(number),
        _ => Err(format!("a number is {number}, must be at most {LARGEST_NUMBER}")),
    }
}

pub(super) fn check_ballot(ballot: Ballot) -> Result<Ballot, String> {
    check_number(ballot.number).map(|_| ballot)
}

pub(super) fn check_stamp(stamp: Stamp) -> Result<Stamp, String> {
    check_ballot(stamp.ballot)?;
    check_number(stamp.seq).map(|_| stamp)
}
