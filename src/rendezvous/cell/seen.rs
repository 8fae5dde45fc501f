//! When a node saw the cell's counters and revisions change, on its own monotonic clock.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::blob::Blob;
use crate::rendezvous::messages::message::{Hello, NodeId};
use crate::rendezvous::run::{Departures, Pace, Run, Times};

/// Most silence that one look charges to the other nodes. A node that was stopped, or could not reach its backend, must not take its
/// own deafness for the silence of others.
const CHARGED_PER_LOOK: Duration = Duration::from_millis(2500);

/// When each counter and each mark of the cell was first seen with its current value.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    nodes: BTreeMap<NodeId, SeenNode>,
    newcomer: Option<(u64, Instant)>,
    ready: Option<(u64, Instant)>,
    last_look: Option<Instant>,
    /// The departures of the state with this revision.
    departures: Option<(u64, Departures)>,
}

#[derive(Clone, Copy, Debug)]
struct SeenNode {
    beat: u64,
    received_at: Instant,
    suspect: bool,
}

impl Seen {
    /// Compare a state with the last one, and record what changed.
    pub(super) fn look(&mut self, blob: &Blob, now: Instant) {
        let gap = self.last_look.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        let deaf = gap.saturating_sub(CHARGED_PER_LOOK);
        self.last_look = Some(now);
        let beats = blob.beats();
        self.nodes.retain(|id, _| beats.contains_key(id));
        for (id, beat) in beats {
            let fresh = SeenNode { beat: *beat, received_at: now, suspect: false };
            let seen = self.nodes.entry(*id).or_insert(fresh);
            if seen.beat == *beat {
                seen.received_at = (seen.received_at + deaf).min(now);
            } else {
                *seen = fresh;
            }
        }
        let (newcomer, ready) = blob.marks();
        record_mark(&mut self.newcomer, newcomer, now);
        record_mark(&mut self.ready, ready, now);
        if self.departures.as_ref().is_none_or(|(revision, _)| *revision != blob.revision()) {
            self.departures = Some((blob.revision(), blob.departures(now)));
        }
    }

    /// Keep the suspicions of a run that was restored from these times.
    pub(super) fn keep_suspicions(&mut self, run: &Run) {
        let known = Times::of(run).last_received;
        for (id, seen) in &mut self.nodes {
            if let Some(times) = known.get(id) {
                (seen.received_at, seen.suspect) = *times;
            }
        }
    }

    /// The times of this state. The node `me` has none, so it counts as if it had sent a message now.
    fn times(&self, blob: &Blob, me: NodeId, now: Instant) -> Times {
        let ((newcomer, ready), pace) = (blob.marks(), self.pace(now));
        let others = self.nodes.iter().filter(|(id, _)| **id != me);
        Times {
            last_received: others.map(|(id, seen)| (*id, (seen.received_at, seen.suspect))).collect(),
            pace: Pace {
                newcomer_since: pace.newcomer_since.filter(|_| newcomer.is_some()),
                ready_since: pace.ready_since.filter(|_| ready.is_some()),
                paused_until: None,
            },
            departures: match &self.departures {
                Some((revision, departures)) if *revision == blob.revision() => departures.clone(),
                _ => blob.departures(now),
            },
        }
    }

    /// When the marks of the state were first seen as they are: now, if they never were.
    pub(super) fn pace(&self, now: Instant) -> Pace {
        let at = |seen: Option<(u64, Instant)>| Some(seen.map_or(now, |(_, at)| at));
        Pace { newcomer_since: at(self.newcomer), ready_since: at(self.ready), paused_until: None }
    }

    /// The run of this state, for the node of this [`Hello`].
    pub(super) fn run(&self, blob: &Blob, me: &Hello, now: Instant) -> Run {
        blob.run(me, &self.times(blob, me.node, now), now)
    }
}

/// Record when a mark was first seen: now, unless it has not changed.
fn record_mark(known: &mut Option<(u64, Instant)>, mark: Option<u64>, now: Instant) {
    *known = mark.map(|mark| match *known {
        Some((before, at)) if before == mark => (mark, at),
        _ => (mark, now),
    });
}
