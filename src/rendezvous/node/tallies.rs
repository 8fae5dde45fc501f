//! What a node tells a coordinator, which counts it: round trips of heartbeats, and that it was cut off. Part of [`super`].

use std::time::Duration;

use super::{NodeCommand, NodeMachine};
use crate::events::record::LONGEST_US;
use crate::rendezvous::messages::message::NodeMessage;

/// One of so many heartbeats tells a round trip. The bytes of all of them together are next to nothing.
const EVERY: u32 = 12;

/// What a coordinator is not told yet.
#[derive(Clone, Debug, Default)]
pub(in crate::rendezvous) struct Tallies {
    /// Heartbeats since the last one that told a round trip.
    beats: u32,
    /// The last round trip.
    round_trip: Option<Duration>,
    /// This node has stopped its workers, because it was cut off.
    fenced: bool,
}

impl Tallies {
    /// A heartbeat was answered so long after it was sent.
    pub fn on_answer(&mut self, after: Duration) {
        self.round_trip = Some(after);
    }

    /// This node stops its workers, because it was cut off.
    pub fn on_fenced(&mut self) {
        self.fenced = true;
    }
}

impl NodeMachine {
    /// The heartbeat to send now.
    pub(super) fn next_beat(&mut self) -> NodeMessage {
        self.tallies.beats += 1;
        let due = self.tallies.beats >= EVERY && self.has_coordinator();
        let round_trip = self.tallies.round_trip.filter(|_| due);
        if round_trip.is_some() {
            self.tallies.beats = 0;
        }
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX).min(LONGEST_US);
        NodeMessage::Heartbeat { rtt_us: round_trip.map(micros) }
    }

    /// The coordinator has said something, so it can be told that this node was cut off.
    pub(super) fn tell_fence(&mut self) {
        let over = self.left || self.view.failed.is_some();
        if self.tallies.fenced && self.has_coordinator() && !over {
            self.tallies.fenced = false;
            self.commands.push(NodeCommand::Send(NodeMessage::Fenced));
        }
    }
}
