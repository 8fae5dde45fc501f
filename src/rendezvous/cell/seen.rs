//! What a node has seen of the others, on its own monotonic clock. The cell holds counters; when they changed is known here.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::blob::Blob;
use crate::rendezvous::decider::state::Run;
use crate::rendezvous::protocol::message::NodeId;

/// The most time that one look charges to the others' silence. A node that was stopped, or whose backend was out of reach, has
/// not listened for longer: it must not take its own deafness for their silence.
const CHARGED_PER_LOOK: Duration = Duration::from_millis(2500);

/// When counters and marks of the cell were first seen as they are.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    nodes: BTreeMap<NodeId, SeenNode>,
    newcomer: Option<(u64, Instant)>,
    ready: Option<(u64, Instant)>,
    last_look: Option<Instant>,
}

#[derive(Clone, Copy, Debug)]
struct SeenNode {
    beat: u64,
    heard_at: Instant,
    suspect: bool,
}

impl Seen {
    /// Take in what the cell holds.
    pub(super) fn look(&mut self, blob: &Blob, now: Instant) {
        let gap = self.last_look.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        let deaf = gap.saturating_sub(CHARGED_PER_LOOK);
        self.last_look = Some(now);
        self.nodes.retain(|id, _| blob.nodes.contains_key(id));
        for (id, node) in &blob.nodes {
            let fresh = SeenNode { beat: node.beat, heard_at: now, suspect: false };
            let seen = self.nodes.entry(*id).or_insert(fresh);
            if seen.beat == node.beat {
                seen.heard_at = (seen.heard_at + deaf).min(now);
            } else {
                *seen = fresh;
            }
        }
        follow(&mut self.newcomer, blob.newcomer_since, now);
        follow(&mut self.ready, blob.ready_since, now);
    }

    /// Keep what [`crate::rendezvous::decider::members::expire`] has noted about nodes that are overdue.
    pub(super) fn keep_suspicions(&mut self, run: &Run) {
        for (id, seen) in &mut self.nodes {
            if let Some(node) = run.nodes.get(id) {
                (seen.heard_at, seen.suspect) = (node.heard_at, node.suspect);
            }
        }
    }

    /// When a node was last heard of, and whether it is overdue. One never seen is heard of now.
    pub(super) fn heard(&self, id: NodeId, now: Instant) -> (Instant, bool) {
        self.nodes.get(&id).map_or((now, false), |seen| (seen.heard_at, seen.suspect))
    }

    pub(super) fn newcomer_at(&self, now: Instant) -> Instant {
        self.newcomer.map_or(now, |(_, at)| at)
    }

    pub(super) fn ready_at(&self, now: Instant) -> Instant {
        self.ready.map_or(now, |(_, at)| at)
    }
}

/// A mark that is new to this node was set now.
fn follow(known: &mut Option<(u64, Instant)>, mark: Option<u64>, now: Instant) {
    *known = mark.map(|mark| match *known {
        Some((before, at)) if before == mark => (mark, at),
        _ => (mark, now),
    });
}
