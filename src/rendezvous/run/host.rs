//! The process that hosts the coordinator: which node is in it, and what follows when that node leaves.
//!
//! Without a coordinator no world can form. If the host's node leaves before the job has ended, the coordinator tells every node,
//! closes all sessions, and decides nothing more. SIGINT or SIGQUIT at the host's terminal ends the job. After any other end, such as
//! a moved pod, a coordinator may come back to the same address.

use std::time::Instant;

use super::Run;
use super::event::{Effect, Home, SessionId};
use crate::events::record::{Kind, Number, Why};
use crate::rendezvous::messages::message::{CoordinatorMessage, Hello, HostSeat, NodeId, Placed, Verdict};

impl Run {
    /// Record which node is in the coordinator's own process. The claim is checked against the number of that process.
    pub(super) fn record_host(&mut self, hello: &Hello, home: Option<Home>) {
        if let Some(home) = home.filter(|home| hello.hosts && hello.process == home.process) {
            self.host = Some((hello.node, home));
        }
    }

    /// Whether the node is in the coordinator's own process.
    pub(super) fn is_host(&self, id: NodeId) -> bool {
        self.host.is_some_and(|(host, _)| host == id)
    }

    /// The host's rank in the current world, and where it listens, for the members.
    pub(super) fn host_seat(&self) -> Option<HostSeat> {
        let (id, home) = self.host?;
        let rank = self.roster.get(id).and_then(|node| self.roster.last_rank(node))?;
        Some(HostSeat { rank, place: home.place?, life: home.life })
    }

    /// Evaluate a member's statement about the process that hosted the former coordinator. That process has ended if this coordinator
    /// listens at the same place in another process.
    pub(super) fn record_former_host(&mut self, placed: Placed, home: Option<Home>) {
        self.recovery.record_host(placed.host, |seat| {
            home.is_some_and(|home| home.place == Some(seat.place) && home.life != seat.life)
        });
    }

    /// Number of members that recovery does not wait for: the former coordinator's host, if it has ended and has not reported.
    pub(super) fn gone_count(&self) -> usize {
        let unheard =
            |rank: &u32| self.current.world().is_some_and(|w| *rank < w.size && !w.members.contains_key(rank));
        usize::from(self.recovery.gone_rank().as_ref().is_some_and(unheard))
    }

    /// Handle that the node in this coordinator's own process has left.
    pub(super) fn on_host_left(
        &mut self,
        id: NodeId,
        session: SessionId,
        reason: &str,
        signal: Option<i32>,
        left: Number,
        now: Instant,
    ) {
        self.emit(Effect::End { session });
        let label = self.roster.label(id);
        // Members that stop their workers together for this know it already.
        let must_re_form = self.waiting_for_members() > 0 && self.in_place.check().is_none();
        self.depart(id, &format!("left: {reason}"), Why::NodeLeft, left, now);
        let interrupts = must_re_form || self.current.interrupted().is_some();
        self.remove(id);
        self.host = None;
        self.close_if_all_done();
        if self.current.closed().is_none() && signal.is_some_and(is_from_keyboard) {
            let cause = format!("{reason}, and its process hosted the coordinator");
            self.close(Verdict::Stopped { by: label.clone(), cause }, Some(left));
            self.end_all(None);
        }
        let why = format!("its host {label} left: {reason}");
        self.emit(Effect::HostLeft { why, interrupts });
    }

    /// End all sessions and forget all nodes, because this coordinator's process ends. A closed run stays, so that a late node can
    /// still learn how it ended.
    pub(super) fn on_coordinator_ends(&mut self, why: &str, interrupts: bool) {
        if self.current.closed().is_some() {
            return;
        }
        self.end_all(Some(CoordinatorMessage::Leaving { why: why.to_owned(), interrupts }));
        let text = format!("this coordinator ends, and no world can form without it: {why}");
        self.record(Kind::CoordinatorEnds {}, None, None, text);
        // Nodes with a broken connection are left: they will find no coordinator.
        self.roster.ids().into_iter().for_each(|id| self.remove(id));
    }

    /// End all sessions, and forget the nodes that had one.
    fn end_all(&mut self, last_words: Option<CoordinatorMessage>) {
        for id in self.roster.ids() {
            let Some(session) = self.session(id) else { continue };
            if let Some(message) = last_words.clone() {
                self.send(session, message);
            }
            self.emit(Effect::End { session });
            self.remove(id);
        }
    }
}

/// Whether a terminal sends this signal for Ctrl-C or Ctrl-\: SIGINT, SIGQUIT.
pub(super) fn is_from_keyboard(signal: i32) -> bool {
    matches!(signal, 2 | 3)
}
