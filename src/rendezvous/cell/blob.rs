//! The state of a run in the cell: [`MAGIC`], [`BLOB_VERSION`], then postcard. No instants are in it.
//!
//! `run::durable` converts between a [`Run`] and its durable part. This file adds revisions, heartbeat counters, and ages instead of
//! instants.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::rendezvous::messages::message::{Hello, NodeId, Round, Verdict};
use crate::rendezvous::run::{Departures, Durable, LARGEST_NUMBER, Origin, Pace, Run, Status, Times};

/// First bytes of a state.
pub const MAGIC: &[u8] = b"ELRS";

/// Follows [`MAGIC`], as `u16` little-endian. All nodes of a run must have the same.
pub const BLOB_VERSION: u16 = 5;

/// The cell's content cannot be decoded. Trying again does not help.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BlobError {
    /// A state of another program.
    #[error(
        "the rendezvous state is not one of elastic_rs: found {found} ({len} bytes). Use the same rendezvous handler on \
         every node, and a run id that no other job uses"
    )]
    Foreign {
        /// A description of the content.
        found: String,
        /// Its length in bytes.
        len: usize,
    },
    /// A state of another version of this package.
    #[error(
        "the rendezvous state has version {theirs}, this node writes version {ours}: install one version everywhere"
    )]
    Version {
        /// The version found.
        theirs: u16,
        /// [`BLOB_VERSION`].
        ours: u16,
    },
    /// A damaged state of this version.
    #[error(
        "the rendezvous state of {len} bytes is corrupt: {what}. End all nodes, and start again with another run id"
    )]
    Corrupt {
        /// Its length in bytes.
        len: usize,
        /// The error.
        what: String,
    },
}

/// Number of departures that a state may hold, as many as a coordinator remembers of a busy run.
const MOST_DEPARTURES: usize = 100_000;

/// One run, as the cell holds it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blob {
    /// Number of this state. It rises with each write, so that no two states are equal.
    revision: u64,
    run: Durable,
    /// Each node's heartbeat counter. It rises while the node lives, and the other nodes look for changes.
    beats: BTreeMap<NodeId, u64>,
    /// The revision since which a newcomer has waited. Each node records on its own clock when it first saw this revision.
    newcomer_since: Option<u64>,
    /// The revision since which the round has had enough nodes.
    ready_since: Option<u64>,
    /// How long before this write nodes of each host left a running world, in milliseconds.
    departures: Vec<(Origin, Vec<u64>)>,
    /// Over etcd: the number of each node's last message that this state contains.
    applied: BTreeMap<NodeId, u64>,
}

impl Blob {
    /// The bytes that the cell holds.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::from(MAGIC);
        bytes.extend(BLOB_VERSION.to_le_bytes());
        postcard::to_extend(self, bytes).unwrap_or_else(|error| panic!("a state cannot be serialised: {error}"))
    }

    /// Decode the cell's content.
    ///
    /// # Errors
    /// [`BlobError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, BlobError> {
        let len = bytes.len();
        let Some(rest) = bytes.strip_prefix(MAGIC) else {
            return Err(BlobError::Foreign { found: describe(bytes), len });
        };
        let corrupt = |what: &str| BlobError::Corrupt { len, what: what.to_owned() };
        let Some((version, body)) = rest.split_first_chunk::<2>() else {
            return Err(corrupt("it ends within its header"));
        };
        let theirs = u16::from_le_bytes(*version);
        if theirs != BLOB_VERSION {
            return Err(BlobError::Version { theirs, ours: BLOB_VERSION });
        }
        let blob = match postcard::take_from_bytes::<Self>(body) {
            Ok((blob, [])) => blob,
            Ok((_, rest)) => return Err(corrupt(&format!("{} bytes follow its end", rest.len()))),
            Err(error) => return Err(corrupt(&error.to_string())),
        };
        let marks = blob.beats.values().chain(blob.applied.values()).chain([&blob.revision]);
        if marks.into_iter().any(|number| *number > LARGEST_NUMBER) {
            return Err(corrupt(&format!("a counter is above {LARGEST_NUMBER}")));
        }
        let remembered: usize = blob.departures.iter().map(|(_, ages)| ages.len()).sum();
        if remembered > MOST_DEPARTURES {
            return Err(corrupt(&format!("it holds {remembered} departures, at most {MOST_DEPARTURES} are allowed")));
        }
        let run = blob.run.validated().map_err(|what| corrupt(&what))?;
        Ok(Self { run, ..blob })
    }

    /// Number of this state. It rises with each write.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Number of the last round that completed.
    pub fn round(&self) -> Round {
        self.run.round()
    }

    /// The verdict with which the rendezvous was closed, if it was.
    pub fn closed(&self) -> Option<&Verdict> {
        self.run.closed()
    }

    /// The waiting nodes, and the active ones.
    pub fn nodes(&self) -> (Vec<NodeId>, Vec<NodeId>) {
        let of = |which: fn(&Status) -> bool| {
            self.run.nodes().filter(|(_, status)| which(status)).map(|(id, _)| id).collect()
        };
        (of(|status| matches!(status, Status::Waiting { .. })), of(|status| *status == Status::Active))
    }

    /// The world of the current round: its members by rank, and address and port of its worker store.
    pub fn world(&self) -> Option<(Vec<NodeId>, (String, u16))> {
        self.run.world()
    }

    pub(super) fn run_id(&self) -> &str {
        self.run.run_id()
    }

    pub(super) fn knows(&self, id: NodeId) -> bool {
        self.run.knows(id)
    }

    /// The nodes of the run.
    pub(super) fn members(&self) -> impl Iterator<Item = NodeId> {
        self.run.nodes().map(|(id, _)| id)
    }

    /// The number of a node's last message that this state contains.
    pub(super) fn applied(&self, node: NodeId) -> u64 {
        self.applied.get(&node).copied().unwrap_or(0)
    }

    /// Record which messages this state contains. Nodes that are `gone` have no messages any more.
    pub(super) fn record_applied(&mut self, applied: BTreeMap<NodeId, u64>, gone: impl Fn(NodeId) -> bool) {
        self.applied.extend(applied);
        self.applied.retain(|node, _| !gone(*node));
    }

    /// This state again, under its next number.
    pub(super) fn again(&self) -> Self {
        Self { revision: self.revision + 1, ..self.clone() }
    }

    pub(super) fn beats(&self) -> &BTreeMap<NodeId, u64> {
        &self.beats
    }

    /// The marks: the revisions since which a newcomer has waited, and since which the round has had enough nodes.
    pub(super) fn marks(&self) -> (Option<u64>, Option<u64>) {
        (self.newcomer_since, self.ready_since)
    }

    /// When nodes left a running world, for a node that sees this state for the first time now.
    pub(super) fn departures(&self, now: Instant) -> Departures {
        let at = |age: &u64| now.checked_sub(Duration::from_millis(*age));
        let of = |(origin, ages): &(Origin, Vec<u64>)| (origin.clone(), ages.iter().filter_map(at).collect());
        Departures::of(self.departures.iter().map(of).collect())
    }

    /// The run of this state, with the times that the node of this [`Hello`] has seen.
    pub(super) fn run(&self, me: &Hello, times: &Times, now: Instant) -> Run {
        self.run.restored(me, times, now)
    }

    /// The state of a run that was restored from `before`, with these instants for its two marks.
    pub(super) fn of(run: &Run, before: Option<&Self>, seen: &Pace, now: Instant) -> Self {
        let revision = before.map_or(0, |blob| blob.revision) + 1;
        // An instant that was restored keeps its revision. Another instant was set just now, so it gets this revision.
        let mark = |at: Option<Instant>, known: Option<Instant>, before: Option<u64>| match (at, before) {
            (None, _) => None,
            (Some(at), Some(since)) if Some(at) == known => Some(since),
            (Some(_), _) => Some(revision),
        };
        let times = Times::of(run);
        let (newcomer, ready) = before.map(Self::marks).unwrap_or_default();
        let beat = |id: NodeId| (id, before.and_then(|blob| blob.beats.get(&id)).copied().unwrap_or(0));
        let ages =
            |times: &VecDeque<Instant>| times.iter().map(|at| now.duration_since(*at).as_millis() as u64).collect();
        Self {
            revision,
            run: Durable::of(run),
            beats: times.last_received.keys().copied().map(beat).collect(),
            newcomer_since: mark(times.pace.newcomer_since, seen.newcomer_since, newcomer),
            ready_since: mark(times.pace.ready_since, seen.ready_since, ready),
            departures: times.departures.iter().map(|(origin, times)| (origin.clone(), ages(times))).collect(),
            applied: before.map(|blob| blob.applied.clone()).unwrap_or_default(),
        }
    }

    /// Raise a node's heartbeat counter. Returns whether the node is in the run.
    pub(super) fn beat(&mut self, id: NodeId) -> bool {
        self.beats.get_mut(&id).map(|beat| *beat += 1).is_some()
    }

    /// Whether two states are equal, apart from the revision and the ages of departures.
    pub(super) fn is_same_content(&self, other: &Self) -> bool {
        let departed = |blob: &Self| blob.departures.iter().map(|(_, ages)| ages.len()).sum::<usize>();
        departed(self) == departed(other)
            && *self == Self { revision: self.revision, departures: self.departures.clone(), ..other.clone() }
    }
}

/// Describe foreign bytes.
fn describe(bytes: &[u8]) -> String {
    const SHOWN: usize = 16;
    let has = |text: &[u8]| bytes.windows(text.len()).any(|window| window == text);
    match bytes {
        [] => "nothing".to_owned(),
        [0x80, 2..=5, ..] if has(b"_RendezvousState") => {
            "a pickle of PyTorch's rendezvous (its c10d or etcd-v2 backend)".to_owned()
        }
        [0x80, 2..=5, ..] => "a pickle".to_owned(),
        _ => format!("bytes that begin with `{}`", bytes[..bytes.len().min(SHOWN)].escape_ascii()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::seen::Seen;
    use super::*;
    use crate::rendezvous::messages::message::{Join, NodeMessage};
    use crate::rendezvous::messages::settings::Settings;
    use crate::rendezvous::run::{Event, Reach, SessionId};

    fn hello() -> Hello {
        let hello = Hello::new("job", NodeId(7), "host:1", Settings::new(1, 2));
        Hello { local_addr: Some("10.0.0.1".into()), joining: true, ..hello }
    }

    fn blob() -> Blob {
        let (now, session) = (Instant::now(), SessionId(0));
        let mut run = Run::counting_on("job", Settings::new(1, 2), Round(3));
        let hello = Box::new(hello());
        run.apply(Event::Hello { hello, session, reach: Reach::Cell, instance: None }, now);
        let join = Join { round: Round(3), store_port: 5, node_rank: None, workers: None, health: Default::default() };
        run.apply(Event::Message { node: NodeId(7), session, message: NodeMessage::Join(join) }, now);
        Blob::of(&run, None, &Seen::default().pace(now), now)
    }

    #[test]
    fn what_is_written_is_read() {
        let blob = blob();
        assert_eq!(Blob::decode(&blob.encode()), Ok(blob.clone()));
        let now = Instant::now();
        let seen = Seen::default();
        let again = Blob::of(&seen.run(&blob, &hello(), now), Some(&blob), &seen.pace(now), now);
        assert!(again.is_same_content(&blob), "{again:?}");
        assert_eq!(again.revision, blob.revision + 1);
    }

    #[test]
    fn every_truncation_and_every_changed_byte_is_an_error_or_a_state() {
        let bytes = blob().encode();
        for cut in 0..bytes.len() {
            assert!(Blob::decode(&bytes[..cut]).is_err(), "cut at {cut}");
        }
        for at in 0..bytes.len() {
            for change in [1, 0x80, 0xff] {
                let mut bytes = bytes.clone();
                bytes[at] ^= change;
                // What can still be read must be safe to decide on.
                if let Ok(blob) = Blob::decode(&bytes) {
                    let now = Instant::now();
                    assert!(Seen::default().run(&blob, &hello(), now).check().is_ok());
                }
            }
        }
    }

    #[test]
    fn a_foreign_state_is_named_for_what_it_is() {
        let text = |bytes: &[u8]| Blob::decode(bytes).unwrap_err().to_string();
        let theirs = b"\x80\x04\x95\x10torch.distributed.elastic\x8c\x10_RendezvousState\x94.";
        assert!(text(theirs).contains("found a pickle of PyTorch's rendezvous"), "{}", text(theirs));
        assert!(text(b"\x80\x04K\x01.").contains("found a pickle (5 bytes)"));
        assert!(text(b"{\"round\": 1}").contains(r#"bytes that begin with `{\"round\": 1}`"#));
        assert!(text(b"").contains("found nothing (0 bytes)"));
        assert!(text(b"ELRS\x09\x00").contains("has version 9, this node writes version 5"));
        assert!(text(b"ELRS\x01").contains("is corrupt: it ends within its head"));
    }
}
