//! The leases of a node over etcd: its own, and the run's.

use std::time::{Duration, Instant};

use super::interface::{EtcdRequest, LeaseId};

/// Time for which the run's state stays after its last member has ended.
pub(super) const RUN_TTL: Duration = Duration::from_secs(2 * 3600);
/// How often each member renews the run's lease.
const RENEW_RUN_EVERY: Duration = Duration::from_secs(30 * 60);
/// How long the answer to a renewal may take before the members are asked whether there is a leader.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often they are asked.
const SURVEY_EVERY: Duration = Duration::from_secs(1);

/// This node's lease.
#[derive(Clone, Debug)]
pub(super) struct NodeLease {
    pub id: LeaseId,
    ttl: Duration,
    renew_every: Duration,
    renew_at: Instant,
    /// When the last successful grant or renewal was requested.
    pub renewed_at: Instant,
    survey_at: Option<Instant>,
}

impl NodeLease {
    pub fn granted(id: LeaseId, ttl: Duration, renew_every: Duration, asked: Instant) -> Self {
        Self { id, ttl, renew_every, renew_at: asked + renew_every, renewed_at: asked, survey_at: None }
    }

    /// The renewal to request now, if it is time.
    pub fn renewal(&mut self, now: Instant) -> Option<EtcdRequest> {
        if now < self.renew_at {
            return None;
        }
        self.renew_at = now + self.renew_every;
        Some(EtcdRequest::KeepAlive { lease: self.id, asked: now })
    }

    /// A renewal requested at `asked` was answered. Answers may come late, and in another order.
    pub fn renewed(&mut self, asked: Instant) {
        if asked >= self.renewed_at {
            self.renewed_at = asked;
            self.survey_at = None;
        }
    }

    /// The survey to request now, if renewals are late.
    pub fn survey(&mut self, now: Instant) -> Option<EtcdRequest> {
        if now < self.survey_at.unwrap_or_else(|| self.late_at()) {
            return None;
        }
        self.survey_at = Some(now + SURVEY_EVERY);
        Some(EtcdRequest::Survey { asked: now })
    }

    /// When to look again.
    pub fn next_deadline(&self, surveying: bool) -> Instant {
        let survey = self.survey_at.unwrap_or_else(|| self.late_at());
        if surveying { self.renew_at } else { self.renew_at.min(survey) }
    }

    /// The instant from which a fence of this length may count, for a renewal requested at `asked`. etcd ends the lease `ttl` after
    /// that, so a longer fence counts from earlier.
    pub fn fence_from(&self, asked: Instant, fence: Duration) -> Instant {
        asked.checked_sub(fence.saturating_sub(self.ttl)).unwrap_or(asked)
    }

    fn late_at(&self) -> Instant {
        self.renewed_at + self.renew_every + PATIENCE
    }
}

/// The lease of the run's state, which every member renews.
#[derive(Clone, Copy, Debug)]
pub(super) struct RunLease {
    pub id: LeaseId,
    renew_at: Instant,
}

impl RunLease {
    pub fn known(id: LeaseId, now: Instant) -> Self {
        Self { id, renew_at: now + RENEW_RUN_EVERY }
    }

    /// The renewal to request now, if it is time.
    pub fn renewal(&mut self, now: Instant) -> Option<EtcdRequest> {
        if now < self.renew_at {
            return None;
        }
        self.renew_at = now + RENEW_RUN_EVERY;
        Some(EtcdRequest::KeepAlive { lease: self.id, asked: now })
    }

    pub fn next_deadline(&self) -> Instant {
        self.renew_at
    }
}
