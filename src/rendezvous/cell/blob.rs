//! The durable state of a run as the cell holds it: [`MAGIC`], [`BLOB_VERSION`], then postcard. No times are in it.
//!
//! This is the one place that knows how a [`Run`] becomes durable and back: [`Blob::of`], [`Blob::run`].

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::seen::Seen;
use crate::rendezvous::decider::state::{Ends, Node, Run, SessionId, Status, World};
use crate::rendezvous::protocol::message::{Failure, Hello, NodeId, Round, Verdict};
use crate::rendezvous::protocol::settings::{LONGEST_LEASE, Settings};
use crate::rendezvous::protocol::text::{plain, tidy_failure, tidy_verdict, validate_name};

/// First bytes of a state of ours.
pub const MAGIC: &[u8] = b"ELRS";

/// Follows [`MAGIC`], as `u16` little-endian. All nodes of a run must have the same.
pub const BLOB_VERSION: u16 = 1;

/// Why what the cell holds is not a state of ours. Trying again does not help.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BlobError {
    /// Someone else's.
    #[error(
        "the rendezvous state is not one of elastic_rs: found {found} ({len} bytes). Use the same rendezvous handler on \
         every node, and a run id that no other job uses"
    )]
    Foreign {
        /// What it looks like.
        found: String,
        /// Its length.
        len: usize,
    },
    /// Of another version of this package.
    #[error(
        "the rendezvous state has version {theirs}, this node writes version {ours}: install one version everywhere"
    )]
    Version {
        /// What was found.
        theirs: u16,
        /// [`BLOB_VERSION`].
        ours: u16,
    },
    /// Ours, and broken.
    #[error("the rendezvous state of {len} bytes is corrupt: {what}")]
    Corrupt {
        /// Its length.
        len: usize,
        /// What is wrong with it.
        what: String,
    },
}

/// One node, durably.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlobNode {
    name: String,
    addr: String,
    lease: Duration,
    /// Rises while the node lives: the others look for changes.
    pub(super) beat: u64,
    pub(super) status: Status,
    pub(super) placed: Option<(Round, u32)>,
}

/// One run, durably.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blob {
    run_id: String,
    settings: Settings,
    /// Number of this state: rises with each write, so that no two states are alike.
    pub(super) revision: u64,
    pub(super) round: Round,
    world: Option<World>,
    pub(super) nodes: BTreeMap<NodeId, BlobNode>,
    pub(super) closed: Option<Verdict>,
    full_at_close: bool,
    interrupted: Option<String>,
    failure: Option<Box<Failure>>,
    restart: u32,
    told: bool,
    arrivals: u64,
    /// The revision since which a newcomer has waited; each node knows for itself when it saw that first.
    pub(super) newcomer_since: Option<u64>,
    /// The revision since which the round could close.
    pub(super) ready_since: Option<u64>,
}

/// Nodes of a cell have no connection; whom [`Run`] counts as connected has this one.
const SESSION: SessionId = SessionId(0);
const NO_ENDS: Ends = Ends { peer: IpAddr::V4(Ipv4Addr::UNSPECIFIED), local: IpAddr::V4(Ipv4Addr::UNSPECIFIED) };
/// Numbers in a cell are counted on from: this is more than can be counted, and far from their end.
const LARGEST_NUMBER: u64 = 1 << 62;

impl Blob {
    /// The bytes that the cell holds.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::from(MAGIC);
        bytes.extend(BLOB_VERSION.to_le_bytes());
        postcard::to_extend(self, bytes).unwrap_or_else(|error| panic!("a state cannot be serialised: {error}"))
    }

    /// Read what the cell holds.
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
            return Err(corrupt("it ends within its head"));
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
        blob.settings.validate().map_err(|what| corrupt(&what))?;
        if blob.nodes.values().any(|node| node.lease > LONGEST_LEASE) {
            return Err(corrupt("a node's lease is out of range"));
        }
        for node in blob.nodes.values() {
            validate_name("name of a node", &node.name).map_err(|what| corrupt(&what))?;
            validate_name("address of a node", &node.addr).map_err(|what| corrupt(&what))?;
        }
        let numbers = [blob.revision, blob.round.0, blob.arrivals];
        if numbers.into_iter().chain(blob.nodes.values().map(|node| node.beat)).any(|number| number > LARGEST_NUMBER) {
            return Err(corrupt("a number in it is out of range"));
        }
        let blob = blob.tidied();
        if blob.interrupted.as_ref().is_some_and(String::is_empty) {
            return Err(corrupt("its world is interrupted without a reason"));
        }
        Ok(blob)
    }

    /// Its texts, which others have written and every node logs, as one line each.
    fn tidied(self) -> Self {
        Self {
            closed: self.closed.as_ref().map(tidy_verdict),
            interrupted: self.interrupted.as_deref().map(plain),
            world: self.world.map(|world| World { reason: plain(&world.reason), ..world }),
            failure: self.failure.map(|failure| Box::new(tidy_failure(&failure, plain(&failure.node)))),
            ..self
        }
    }

    /// Number of this state: rises with each write.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Number of the last round that completed.
    pub fn round(&self) -> Round {
        self.round
    }

    /// How the rendezvous was closed, if it was.
    pub fn closed(&self) -> Option<&Verdict> {
        self.closed.as_ref()
    }

    /// The nodes that wait for a place, and those that have one in the current round.
    pub fn nodes(&self) -> (Vec<NodeId>, Vec<NodeId>) {
        let of = |which: fn(&Status) -> bool| {
            self.nodes.iter().filter(|(_, node)| which(&node.status)).map(|(id, _)| *id).collect()
        };
        (of(|status| matches!(status, Status::Waiting { .. })), of(|status| *status == Status::Active))
    }

    /// The world of the current round: its members by rank, and address and port of its worker store.
    pub fn world(&self) -> Option<(Vec<NodeId>, (String, u16))> {
        let world = self.world.as_ref()?;
        Some((world.members.values().copied().collect(), world.master.clone()?))
    }

    pub(super) fn run_id(&self) -> &str {
        &self.run_id
    }

    /// The run as the decisions know it, with times as `me` has seen them.
    pub(super) fn run(&self, me: NodeId, seen: &Seen, now: Instant) -> Run {
        let mut run = Run::new(self.run_id.clone(), self.settings.clone());
        for (id, durable) in &self.nodes {
            let mut node = node(&self.run_id, *id, durable, &self.settings, now);
            if *id != me {
                (node.heard_at, node.suspect) = seen.heard(*id, now);
            }
            run.nodes.insert(*id, node);
        }
        run.round = self.round;
        run.world = self.world.clone();
        run.closed = self.closed.clone();
        run.full_at_close = self.full_at_close;
        run.interrupted = self.interrupted.clone();
        run.failure = self.failure.clone();
        run.restart = self.restart;
        run.told = self.told;
        run.arrivals = self.arrivals;
        run.newcomer_since = self.newcomer_since.map(|_| seen.newcomer_at(now));
        run.ready_since = self.ready_since.map(|_| seen.ready_at(now));
        run.check_at = run.nodes.values().map(Node::lost_at).min();
        run.recount();
        run
    }

    /// The durable part of a run that was made from `before`. `beat` rises for those in `beating`.
    pub(super) fn of(run: &Run, before: Option<&Blob>, seen: &Seen, now: Instant) -> Self {
        let revision = before.map_or(0, |blob| blob.revision) + 1;
        // A time that is the one this node was given means what it meant before; another began just now.
        let mark = |at: Option<Instant>, known: Instant, before: Option<u64>| match (at, before) {
            (None, _) => None,
            (Some(at), Some(since)) if at == known => Some(since),
            (Some(_), _) => Some(revision),
        };
        Self {
            run_id: run.id.clone(),
            settings: run.settings.clone(),
            revision,
            round: run.round,
            world: run.world.clone(),
            nodes: run.nodes.iter().map(|(id, node)| (*id, durable(node, before, *id))).collect(),
            closed: run.closed.clone(),
            full_at_close: run.full_at_close,
            interrupted: run.interrupted.clone(),
            failure: run.failure.clone(),
            restart: run.restart,
            told: run.told,
            arrivals: run.arrivals,
            newcomer_since: mark(run.newcomer_since, seen.newcomer_at(now), before.and_then(|b| b.newcomer_since)),
            ready_since: mark(run.ready_since, seen.ready_at(now), before.and_then(|b| b.ready_since)),
        }
    }

    /// Whether the two say the same, whatever their numbers.
    pub(super) fn says_the_same(&self, other: &Self) -> bool {
        *self == Self { revision: self.revision, ..other.clone() }
    }
}

/// What a node brings that is new to the cell.
pub(super) fn introduced(hello: &Hello, now: Instant) -> Node {
    Node::new(hello, SESSION, NO_ENDS, now)
}

fn node(run_id: &str, id: NodeId, durable: &BlobNode, settings: &Settings, now: Instant) -> Node {
    let hello = Hello::new(run_id, id, durable.name.clone(), settings.clone());
    let hello = Hello { local_addr: Some(durable.addr.clone()), ..hello };
    Node { lease: durable.lease, placed: durable.placed, status: durable.status.clone(), ..introduced(&hello, now) }
}

fn durable(node: &Node, before: Option<&Blob>, id: NodeId) -> BlobNode {
    BlobNode {
        name: node.name.clone(),
        addr: node.addr(),
        lease: node.lease,
        beat: before.and_then(|blob| blob.nodes.get(&id)).map_or(0, |node| node.beat),
        status: node.status.clone(),
        placed: node.placed,
    }
}

/// What bytes that are not ours look like.
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
    use super::*;
    use crate::rendezvous::protocol::message::Join;

    fn blob() -> Blob {
        let run = Run::new("job".into(), Settings::new(1, 2));
        let hello = Hello::new("job", NodeId(7), "host:1", Settings::new(1, 2));
        let hello = Hello { local_addr: Some("10.0.0.1".into()), joining: true, ..hello };
        let now = Instant::now();
        let mut run = Run { round: Round(3), interrupted: Some("a test".into()), ..run };
        run.update(NodeId(7), |_| {
            let join = Join { round: Round(3), store_port: 5, node_rank: None, workers: None };
            Some(Node {
                status: Status::Waiting { join, arrival: 4 },
                placed: Some((Round(3), 1)),
                ..introduced(&hello, now)
            })
        });
        Blob::of(&run, None, &Seen::default(), now)
    }

    #[test]
    fn what_is_written_is_read() {
        let blob = blob();
        assert_eq!(Blob::decode(&blob.encode()), Ok(blob.clone()));
        let now = Instant::now();
        let again = Blob::of(&blob.run(NodeId(7), &Seen::default(), now), Some(&blob), &Seen::default(), now);
        assert!(again.says_the_same(&blob), "{again:?}");
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
                    assert!(blob.run(NodeId(1), &Seen::default(), now).check().is_ok());
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
        assert!(text(b"ELRS\x09\x00").contains("has version 9, this node writes version 1"));
        assert!(text(b"ELRS\x01").contains("is corrupt: it ends within its head"));
    }
}
