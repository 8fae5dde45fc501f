//! The process that hosts the coordinator: which node is in it, how its end is known, and what the others are told of it.
//!
//! Without a coordinator no world can form. So when the node in its process leaves, and the job has not ended, the coordinator
//! decides nothing more: it tells everybody, and closes all sessions. If a person has ended the agent at its keyboard, that
//! ends the job; after any other end, such as a pod that is moved, a coordinator may come back to the same address.

use std::time::Instant;

use super::event::{Effect, Home, SessionId};
use super::run::Run;
use crate::rendezvous::protocol::message::{CoordinatorMessage, Hello, HostSeat, NodeId, Placed, Verdict};

impl Run {
    /// Note which node is in the coordinator's own process. The coordinator believes a node that says so of its own process alone.
    pub(super) fn meet_host(&mut self, hello: &Hello, home: Option<Home>) {
        if let Some(home) = home.filter(|home| hello.hosts && hello.process == home.process) {
            self.host = Some((hello.node, home));
        }
    }

    /// Whether the node is in the coordinator's own process.
    pub(super) fn is_host(&self, id: NodeId) -> bool {
        self.host.is_some_and(|(host, _)| host == id)
    }

    /// What members of the current world are told of the host's place in it.
    pub(super) fn host_seat(&self) -> Option<HostSeat> {
        let (id, home) = self.host?;
        let rank = self.roster.get(id).and_then(|node| self.roster.last_rank(node))?;
        Some(HostSeat { rank, place: home.place?, life: home.life })
    }

    /// A member of the current world has reported to a restarted coordinator, and has said who hosted the one before.
    pub(super) fn hear_of_host(&mut self, placed: Placed, home: Option<Home>) {
        self.recovery.hear_of_host(placed.host, |seat| {
            home.is_some_and(|home| home.place == Some(seat.place) && home.life != seat.life)
        });
    }

    /// How many members need not be waited for: the one that hosted the coordinator before this one, unless it has reported.
    pub(super) fn gone_count(&self) -> usize {
        let unheard =
            |rank: &u32| self.current.world().is_some_and(|w| *rank < w.size && !w.members.contains_key(rank));
        usize::from(self.recovery.gone_rank().as_ref().is_some_and(unheard))
    }

    /// The node in this coordinator's own process has left.
    pub(super) fn on_host_left(
        &mut self,
        id: NodeId,
        session: SessionId,
        reason: &str,
        signal: Option<i32>,
        now: Instant,
    ) {
        self.emit(Effect::End { session });
        let label = self.roster.label(id);
        let must_re_form = self.waiting_for_members() > 0;
        self.depart(id, &format!("left: {reason}"), now);
        let interrupts = must_re_form || self.current.interrupted().is_some();
        self.remove(id);
        self.host = None;
        self.close_if_all_done();
        if self.current.closed().is_none() && signal.is_some_and(is_from_keyboard) {
            let cause = format!("{reason}, and its process hosted the coordinator");
            self.close(Verdict::Stopped { by: label.clone(), cause });
            self.end_all(None);
        }
        let why = format!("{label}, whose process hosted it, left: {reason}");
        self.emit(Effect::HostLeft { why, interrupts });
    }

    /// This coordinator's process ends: nobody is here any more. A node of a run that has ended may still ask how.
    pub(super) fn on_coordinator_ends(&mut self, why: &str, interrupts: bool) {
        if self.current.closed().is_some() {
            return;
        }
        self.end_all(Some(CoordinatorMessage::Leaving { why: why.to_owned(), interrupts }));
        self.note(format!("no world can form any more: {why}"));
        // Those whose connection is broken find nobody here.
        self.roster.ids().into_iter().for_each(|id| self.remove(id));
    }

    /// End all sessions; the nodes that had one are no longer here.
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

/// Whether a person sends this signal at the terminal, to end what runs there: SIGINT, SIGQUIT.
fn is_from_keyboard(signal: i32) -> bool {
    matches!(signal, 2 | 3)
}
