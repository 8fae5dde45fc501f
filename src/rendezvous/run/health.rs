//! Nodes check their machines beside a join. Rounds wait for that, and leave ill ones out ([`super::hosts`] says for how long).

use std::time::Instant;

use super::Run;
use super::event::SessionId;
use super::node::Node;
use crate::rendezvous::messages::message::{CHECK_WITHIN, CoordinatorMessage, Health, NodeId};
use crate::wire::text::tidy;

impl Run {
    /// A node that joins says what is known of its machine.
    pub(super) fn judge_health(&mut self, id: NodeId, health: &Health, now: Instant) {
        let Health::Ill(what) = health else { return };
        let Some(origin) = self.roster.get(id).map(Node::origin) else { return };
        let consequence = self.hosts.on_ill(&origin, &tidy(what), &self.settings, now);
        self.apply_to_hosts(consequence, now);
    }

    /// A node that joins checks its machine, or does not any more.
    pub(super) fn await_check(&mut self, id: NodeId, checks: bool, now: Instant) {
        let known = self.roster.get(id).and_then(|node| node.checked_by);
        let until = checks.then(|| known.unwrap_or(now + CHECK_WITHIN));
        self.roster.set_checked_by(id, until);
        self.pace.checks_until = self.pace.checks_until.max(until);
    }

    /// The host of a node that waits is let in: what was found there may be over, or have come since. Returns whether it stays out until
    /// its check has ended, since a world that runs does not wait for that.
    pub(super) fn check_again(&mut self, id: NodeId, session: Option<SessionId>, now: Instant) -> bool {
        self.roster.check_again(id);
        self.await_check(id, true, now);
        session.iter().for_each(|session| self.send(*session, CoordinatorMessage::CheckHealth));
        !self.roster.active().is_empty()
    }

    /// No round waits longer for the health check of a node, or counts it before that has ended.
    pub(super) fn leave_out_unchecked(&mut self, now: Instant) {
        if self.parts().checks_until().is_none_or(|until| now < until) {
            return;
        }
        let waiting = self.roster.of(self.roster.waiting());
        let late = waiting.filter(|(_, node)| node.checked_by.is_some_and(|until| until <= now));
        for (id, label) in late.map(|(id, node)| (id, node.label())).collect::<Vec<_>>() {
            self.roster.set_out(id, true);
            let limit = CHECK_WITHIN.as_secs();
            self.note(format!(
                "{label} is left out until its health check has ended, which it has not within {limit} s"
            ));
        }
    }
}
