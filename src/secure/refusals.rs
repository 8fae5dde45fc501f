//! How many peers the acceptors of a protection have refused, and why.

use std::sync::atomic::{AtomicU64, Ordering};

/// What an unauthenticated peer was refused for.
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
    /// It has proven itself, but not for what it asks: for another run, or as an observer that wants to join.
    Forbidden,
}

/// Why one unauthenticated peer was refused.
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

impl Kind {
    /// Every kind.
    pub const ALL: [Self; Self::COUNT] =
        [Self::NoTls, Self::Certificate, Self::Unproven, Self::Late, Self::Crowded, Self::Forbidden];

    /// How many there are.
    const COUNT: usize = Self::Forbidden as usize + 1;

    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::NoTls => "no_tls",
            Self::Certificate => "certificate",
            Self::Unproven => "unproven",
            Self::Late => "late",
            Self::Crowded => "crowded",
            Self::Forbidden => "forbidden",
        }
    }
}

/// The numbers of refused peers, which only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refusals([u64; Kind::COUNT]);

impl Refusals {
    /// Those of this kind.
    pub fn of(&self, kind: Kind) -> u64 {
        self.0[kind as usize]
    }

    /// Add those that were refused elsewhere for this reason.
    pub fn add(&mut self, kind: Kind, count: u64) {
        self.0[kind as usize] += count;
    }

    /// All of them.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }
}

/// Counts refused peers. Any thread may.
#[derive(Debug, Default)]
pub(super) struct Counters([AtomicU64; Kind::COUNT]);

impl Counters {
    pub fn count(&self, kind: Kind) {
        self.0[kind as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub fn now(&self) -> Refusals {
        Refusals(self.0.each_ref().map(|counter| counter.load(Ordering::Relaxed)))
    }
}
