//! What a node over a cell gives up when its time is over: workers that others have not heard of, and a join. Part of
//! [`super::node`].

use std::time::Instant;

use super::node::CasNode;
use crate::rendezvous::node::pending::WITHDRAW_GRACE;
use crate::rendezvous::node::view::JoinError;

impl CasNode {
    /// When the others may form a world without this node, which they have not heard of: its workers have to stop before.
    pub(super) fn fenced_at(&self) -> Option<Instant> {
        let shown_at = self.shown_at.filter(|_| self.runs() && self.view.closed.is_none())?;
        Some(shown_at + self.hello.settings.lease())
    }

    pub(super) fn fence(&mut self, now: Instant) {
        if self.fenced_at().is_some_and(|at| at <= now) && self.view.waiting == 0 {
            let lease = self.hello.settings.lease();
            let text = format!("this node could not show for {lease:.1?} that it lives: {}", self.last_error);
            self.interrupt(&text);
        }
    }

    pub(super) fn give_up_join_if_due(&mut self, now: Instant) {
        let lease = self.hello.settings.lease();
        let Some(joining) = &mut self.joining else { return };
        let after = joining.deadline - joining.since;
        if let Some(since) = self.failing_since.filter(|since| now >= *since + lease) {
            let text = format!("the backend has not worked for {:.1?}: {}", now - since, self.last_error);
            self.resolve(Err(JoinError::Connection(text)));
            return;
        }
        match joining.withdrawn_at {
            None if joining.is_due(now) => {
                joining.withdrawn_at = Some(now);
                self.read_at = Some(now);
            }
            Some(at) if now >= at + WITHDRAW_GRACE => {
                let progress = joining.progress.clone().unwrap_or_else(|| match self.last_error.as_str() {
                    "" => "the backend does not answer".to_owned(),
                    error => format!("the backend does not work: {error}"),
                });
                self.resolve(Err(JoinError::Timeout { after, progress }));
            }
            _ => {}
        }
    }
}
