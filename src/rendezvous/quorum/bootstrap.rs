//! Who leads a run that has no record, among the processes at the endpoints of a list.
//!
//! A process at a listed endpoint listens, and then asks all others. One that knows a leader names it. Else the first in the list leads:
//! it is not before those that come first are *absent*, which a refused connection proves. Silence proves
//! nothing, and blocks. So no two lead: of two, the one listens before the other asks, or was asked itself. It then knows that the other
//! is there, and answers that it leads, or that it knows no leader: then it does not lead itself as long as one before it is there.
//!
//! A process that was started again finds the leader in the same way. If nobody at the listed endpoints knows it, it finds the process:
//! a leader looks for listed endpoints without a session all the time, and the first one waits so long before it begins.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// For so long does the first leader of a run listen before it decides anything.
pub const LISTENS_FOR: Duration = Duration::from_millis(500);

/// What this process knows about a listed endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Seen {
    /// Not yet, or not any more: it was not reached, and did not refuse.
    #[default]
    Silent,
    /// It refuses connections. (A name that does not exist proves nothing: names of processes that are not ready may appear later.)
    Absent,
    /// Its process is there, and has answered that it knows no leader; or it comes first, and has asked.
    Fresh,
}

/// What this process answers to one that asks.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Answer<L> {
    /// It leads itself.
    Leads,
    /// Another leads.
    Knows(L),
    /// It knows no leader.
    Fresh,
}

/// What this process does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict<L> {
    /// Another process leads: this one.
    Follow(L),
    /// This process leads, and has told so from now on.
    Lead,
    /// It waits for these endpoints, by their places in the list: because they are silent, or come first and are there.
    Wait {
        /// Endpoints of which nothing is known.
        silent: Vec<usize>,
        /// The endpoint whose process will lead.
        first: Option<usize>,
    },
}

/// An attempt to ask an endpoint, which counts unless the process there has asked since.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Attempt {
    /// The endpoint's place in the list.
    pub place: usize,
    number: u64,
}

/// A process without a record at a listed endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Bootstrap<L> {
    mine: usize,
    listens_since: Instant,
    /// For each endpoint: what this process knows about it, and how many questions have come from there.
    seen: Vec<(Seen, u64)>,
    leader: Option<L>,
    leads: bool,
}

impl<L: Clone> Bootstrap<L> {
    /// The process at this place of a list of so many endpoints, which listens there by now.
    pub fn new(mine: usize, endpoints: usize, now: Instant) -> Self {
        Self { mine, listens_since: now, seen: vec![(Seen::Silent, 0); endpoints], leader: None, leads: false }
    }

    /// An endpoint is about to be asked.
    pub fn ask(&self, place: usize) -> Attempt {
        Attempt { place, number: self.seen.get(place).map_or(0, |(_, asked)| *asked) }
    }

    /// An endpoint was asked, with this result. That a process was absent says nothing once it has asked itself.
    pub fn on_seen(&mut self, attempt: Attempt, seen: Seen) {
        if let Some(entry) = self.seen.get_mut(attempt.place).filter(|(_, asked)| *asked == attempt.number) {
            entry.0 = seen;
        }
    }

    /// Somebody has said who leads.
    pub fn on_leader(&mut self, leader: L) {
        if !self.leads {
            self.leader = Some(leader);
        }
    }

    /// The process at an endpoint asks.
    pub fn on_asked(&mut self, place: usize) -> Answer<L> {
        if self.leads {
            return Answer::Leads;
        }
        let is_first = place < self.mine;
        if let Some((seen, asked)) = self.seen.get_mut(place) {
            *asked = asked.saturating_add(1);
            // It is there. That it lets this one lead is only said by its answer.
            *seen = match *seen {
                _ if is_first => Seen::Fresh,
                Seen::Absent => Seen::Silent,
                seen => seen,
            };
        }
        self.leader.clone().map_or(Answer::Fresh, Answer::Knows)
    }

    /// When to decide again at the latest, if nothing happens.
    pub fn next_deadline(&self) -> Instant {
        self.listens_since + LISTENS_FOR
    }

    /// Decide.
    pub fn decide(&mut self, now: Instant) -> Verdict<L> {
        if let Some(leader) = &self.leader {
            return Verdict::Follow(leader.clone());
        }
        let others = |such: Seen| {
            let all = self.seen.iter().enumerate().filter(move |(_, (seen, _))| *seen == such);
            all.map(|(place, _)| place).filter(|place| *place != self.mine)
        };
        let silent: Vec<_> = others(Seen::Silent).collect();
        let first = others(Seen::Fresh).next().filter(|place| *place < self.mine);
        if !silent.is_empty() || first.is_some() || now < self.next_deadline() {
            return Verdict::Wait { silent, first };
        }
        self.leads = true;
        Verdict::Lead
    }
}
