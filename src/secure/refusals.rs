//! How many strangers a door has refused, and why.

use std::sync::atomic::{AtomicU64, Ordering};

/// What a stranger was refused for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It does not speak TLS, or not as both ends have to.
    NoTls,
    /// It shows no certificate that is accepted.
    Certificate,
    /// It does not hold the token.
    Unproven,
    /// It has not proven itself in time.
    Late,
    /// Too many others want to come in.
    Crowded,
}

/// Why one stranger was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What it counts as.
    pub kind: Kind,
    /// A sentence for the log.
    pub why: String,
}

impl Refusal {
    /// A refusal with its reason in words.
    pub fn new(kind: Kind, why: impl Into<String>) -> Self {
        Self { kind, why: why.into() }
    }
}

/// The numbers of refused strangers, which only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refusals {
    /// Of [`Kind::NoTls`].
    pub no_tls: u64,
    /// Of [`Kind::Certificate`].
    pub certificate: u64,
    /// Of [`Kind::Unproven`].
    pub unproven: u64,
    /// Of [`Kind::Late`].
    pub late: u64,
    /// Of [`Kind::Crowded`].
    pub crowded: u64,
}

impl Refusals {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.no_tls + self.certificate + self.unproven + self.late + self.crowded
    }
}

/// Counts refused strangers. Any thread may.
#[derive(Debug, Default)]
pub(super) struct Counters {
    no_tls: AtomicU64,
    certificate: AtomicU64,
    unproven: AtomicU64,
    late: AtomicU64,
    crowded: AtomicU64,
}

impl Counters {
    pub fn count(&self, kind: Kind) {
        let counter = match kind {
            Kind::NoTls => &self.no_tls,
            Kind::Certificate => &self.certificate,
            Kind::Unproven => &self.unproven,
            Kind::Late => &self.late,
            Kind::Crowded => &self.crowded,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub fn now(&self) -> Refusals {
        let now = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Refusals {
            no_tls: now(&self.no_tls),
            certificate: now(&self.certificate),
            unproven: now(&self.unproven),
            late: now(&self.late),
            crowded: now(&self.crowded),
        }
    }
}
