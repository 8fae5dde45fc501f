//! Nodes check their machines beside a join. Rounds wait for that, and leave ill ones out ([`super::hosts`] says for how long).

use std::time::Instant;

use super::Run;
use super::event::SessionId;
use super::node::Node;
use crate::rendezvous::messages::message::{CHECK_WITHIN, CoordinatorMessage, Health, Join, NodeId};
use crate::wire::text::tidy;

impl Run {
    /// A node that joins says what is known of its machine. Returns the join, as far as it is believed: what was found before the
    /// coordinator has asked for another check is no answer to that.
    pub(super) fn judge_health(&mut self, id: NodeId, join: Join, now: Instant) -> Join {
        match &join.health {
            Health::Checking => self.roster.checks_now(id),
            Health::Unchecked => {}
            Health::Well | Health::Ill(_) if self.roster.get(id).is_some_and(|node| node.rechecks) => {
                let session = self.session(id);
                session.iter().for_each(|session| self.send(*session, CoordinatorMessage::CheckHealth));
                return Join { health: Health::Checking, ..join };
            }
            Health::Well => {}
            Health::Ill(what) => {
                if let Some(origin) = self.roster.get(id).map(Node::origin) {
                    let consequence = self.hosts.on_ill(&origin, &tidy(what), &self.settings, now);
                    self.apply_to_hosts(consequence, now);
                }
            }
        }
        join
    }

    /// The host of a node that waits is let in: what was found there may be over, or have come since.
    pub(super) fn check_again(&mut self, id: NodeId, session: Option<SessionId>, now: Instant) {
        self.roster.check_again(id);
        self.roster.set_check(id, Some(now + CHECK_WITHIN));
        session.iter().for_each(|session| self.send(*session, CoordinatorMessage::CheckHealth));
    }

    /// No round counts a node whose check takes too long, and no world that runs counts a new node before its check has ended.
    pub(super) fn leave_out_unchecked(&mut self, now: Instant) {
        let running = !self.roster.active().is_empty();
        let checks: Vec<_> = self.roster.checks().iter().map(|(id, until)| (*id, *until)).collect();
        for (id, until) in checks {
            let Some(node) = self.roster.get(id).filter(|node| !node.unchecked) else { continue };
            let late = self.parts().check_ends(until) <= now;
            let later = running && self.roster.last_rank(node).is_none();
            if !(late || later) {
                continue;
            }
            let label = node.label();
            self.roster.set_unchecked(id);
            if late {
                self.note(format!("{label} is left out until its health check has ended"));
            }
        }
    }
}
