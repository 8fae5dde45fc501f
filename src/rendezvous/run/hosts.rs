//! What is remembered of each host, and which hosts are kept out of the job.
//!
//! - **Departures.** Nodes of the host have left a running world, whatever the cause. With `rejoin_limit` of them within `rejoin_window`
//!   no node of the host is let in, until fewer are that recent.
//! - **First failures.** The failure that made a world re-form happened at the host: a worker of it failed first, or the node itself was
//!   lost. With `host_failures` of them within `host_failures_window` the host is *out*: for the job or, with a cool-down, for a while.
//!   The cool-down doubles with each time. A day without a first failure takes one doubling back.
//!
//! **Workers before hosts.** A worker that fails first on one host, and under the same rank on another, is itself the cause. What it did
//! counts against no host, also in retrospect.
//!
//! A node of a host that is out for a while may join, and waits: no round counts it until the time is over. A host that is out for the job
//! gets no node in. Members of a running world are not sent away. The failure that put their host out has interrupted the world, and they
//! meet the rule when they join again.
//!
//! The instants are those of the process that decides. A coordinator that is restarted has forgotten everything here.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use super::event::SessionId;
use super::membership::Roster;
use super::node::{Node, Origin, Status};
use super::round::Current;
use crate::cooldown::TimesOut;
use crate::events::record::Kind;
use crate::events::tally::Refused;
use crate::rendezvous::messages::message::NodeId;
use crate::rendezvous::messages::settings::Rules;
use crate::rendezvous::messages::settings::Settings;

/// Number of hosts that are remembered. The ones that were quiet for longest, or have been out for longest, are forgotten first.
const MOST_HOSTS: usize = 10_000;
/// Number of ranks that are remembered as the cause of their own failures. Those that failed last are kept.
const MOST_BLAMED: usize = 1_000;
/// First failures of a host that are remembered, as a multiple of `host_failures`. Some may turn out to be a worker's.
const REMEMBERED: usize = 2;
/// Number of hosts that a text names.
const SHOWN: usize = 4;

/// The hosts that are kept out, by run id. Runs without such hosts are not in it.
pub type Exclusions = BTreeMap<String, Vec<Exclusion>>;

/// A host that is kept out of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exclusion {
    /// The address from which its nodes connect.
    pub addr: String,
    /// Its name, if its nodes have said one (`host_name`).
    pub name: Option<String>,
    /// When its nodes are let in again. `None`: not in this job.
    pub until: Option<Instant>,
    /// Why, in words.
    pub why: String,
}

/// When nodes of each host left a running world: the part of [`Hosts`] that a shared cell holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::rendezvous) struct Departures(BTreeMap<Origin, VecDeque<Instant>>);

impl Departures {
    /// Departures read from a shared cell.
    pub fn of(known: BTreeMap<Origin, VecDeque<Instant>>) -> Self {
        Self(known)
    }

    /// All departures by host, the earliest first.
    pub fn iter(&self) -> impl Iterator<Item = (&Origin, &VecDeque<Instant>)> {
        self.0.iter()
    }
}

/// What a first failure means for its host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Judged {
    /// First failures are not counted.
    Ignored,
    /// The host has had as many within the window.
    Counted(usize),
    /// The worker is the cause. These hosts are let in again.
    Worker { freed: Vec<Origin> },
    /// The host is out from now on.
    Out,
}

/// What follows from an event of a host.
#[derive(Debug, Default)]
pub(super) struct Consequence {
    /// Events to record, in this order, with their lines in the log.
    pub records: Vec<(Kind, String)>,
    /// Other hosts are kept out than before: the waiting nodes are judged again, and the driver is notified.
    pub changes: bool,
}

/// Whether the host of a node that waits or asks to join may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// A round may count it.
    Open,
    /// Its host is out for a while: it waits, and no round counts it.
    Later,
    /// Its host is out for the job: its session ends.
    Never,
}

/// A first failure.
#[derive(Clone, Copy, Debug)]
struct FirstFailure {
    at: Instant,
    /// The rank of the worker that failed. `None`: the node was lost.
    rank: Option<u32>,
}

#[derive(Clone, Debug, Default)]
struct Record {
    departures: VecDeque<Instant>,
    failures: VecDeque<FirstFailure>,
    times_out: TimesOut,
}

impl Record {
    fn last(&self) -> Option<Instant> {
        self.departures.back().copied().max(self.failures.back().map(|failure| failure.at))
    }

    /// The time since the last first failure.
    fn quiet(&self, now: Instant) -> Duration {
        self.failures.back().map_or(Duration::MAX, |failure| now.saturating_duration_since(failure.at))
    }

    fn recent(&self, rules: &Rules, now: Instant) -> usize {
        self.failures.iter().filter(|failure| is_recent(failure.at, rules.host_failures_window, now)).count()
    }

    fn matters(&self, settings: &Settings, now: Instant) -> bool {
        let departed = self.departures.back().is_some_and(|at| is_recent(*at, settings.rejoin_window, now));
        departed || self.recent(&settings.rules, now) > 0 || self.times_out.after(self.quiet(now)) > 0
    }
}

/// A host that is out because of its first failures.
#[derive(Clone, Debug)]
struct Out {
    since: Instant,
    until: Option<Instant>,
    why: String,
}

impl Out {
    fn holds(&self, now: Instant) -> bool {
        self.until.is_none_or(|until| now < until)
    }
}

/// What is remembered of each host.
#[derive(Clone, Debug, Default)]
pub(in crate::rendezvous) struct Hosts {
    records: BTreeMap<Origin, Record>,
    out: BTreeMap<Origin, Out>,
    /// When the first of them is let in again.
    let_in_at: Option<Instant>,
    /// Ranks whose workers were the cause of their own failures, and when last.
    blamed: BTreeMap<u32, Instant>,
    /// The member whose connection had ended when a worker failed. If it is lost, that was the first failure of the round.
    awaited: Option<NodeId>,
}

impl Hosts {
    /// Whether nothing is remembered.
    pub fn is_blank(&self) -> bool {
        self.records.is_empty() && self.out.is_empty()
    }

    /// The departures of all hosts.
    pub fn departures(&self) -> Departures {
        let of = |(origin, record): (&Origin, &Record)| (origin.clone(), record.departures.clone());
        Departures(self.records.iter().map(of).filter(|(_, times)| !times.is_empty()).collect())
    }

    /// What is known of departures alone, as read from a shared cell.
    pub fn with_departures(known: Departures) -> Self {
        let of = |(origin, departures)| (origin, Record { departures, ..Record::default() });
        Self { records: known.0.into_iter().map(of).collect(), ..Self::default() }
    }

    /// A running node of this host has left. Returns whether the host is kept out now.
    pub fn on_departure(&mut self, origin: &Origin, settings: &Settings, now: Instant) -> bool {
        if settings.rejoin_limit > 0 {
            let times = &mut self.record(origin, settings, now).departures;
            times.push_back(now);
            while times.len() > settings.rejoin_limit as usize {
                times.pop_front();
            }
        }
        self.refusal(origin, settings, now).is_some()
    }

    /// A round's first failure was at this host: that of the worker with this rank, or of a node that was lost.
    pub(super) fn on_first_failure(
        &mut self,
        origin: &Origin,
        rank: Option<u32>,
        settings: &Settings,
        now: Instant,
    ) -> Consequence {
        let limit = settings.rules.host_failures;
        match self.judge(origin, rank, settings, now) {
            Judged::Ignored => Consequence::default(),
            Judged::Counted(count) => {
                let text = format!("host {origin} has had {count} of {limit} first failures (host_failures)");
                let kind = Kind::HostFailed { host: origin.to_string(), count, limit };
                Consequence { records: vec![(kind, text)], changes: false }
            }
            Judged::Worker { freed } => {
                let text = format!(
                    "rank {} fails first on several hosts, so its failures count against none of them (host_failures)",
                    rank.unwrap_or_default()
                );
                let records = [(Kind::Note {}, text)].into_iter().chain(let_in(&freed)).collect();
                Consequence { records, changes: !freed.is_empty() }
            }
            Judged::Out => {
                let text = self.out_text(origin, now).unwrap_or_default();
                Consequence { records: vec![(Kind::HostOut { host: origin.to_string() }, text)], changes: true }
            }
        }
    }

    /// Count a first failure, and judge whose it is.
    fn judge(&mut self, origin: &Origin, rank: Option<u32>, settings: &Settings, now: Instant) -> Judged {
        let rules = &settings.rules;
        if rules.host_failures == 0 {
            return Judged::Ignored;
        }
        if let Some(rank) = rank.filter(|rank| self.is_own_fault(*rank, origin, rules, now)) {
            let freed = self.blame(rank, rules, now);
            self.note_release();
            return Judged::Worker { freed };
        }
        let limit = rules.host_failures as usize;
        let record = self.record(origin, settings, now);
        let quiet = record.quiet(now);
        record.failures.push_back(FirstFailure { at: now, rank });
        while record.failures.len() > REMEMBERED * limit {
            record.failures.pop_front();
        }
        let count = record.recent(rules, now);
        if count < limit {
            return Judged::Counted(count);
        }
        let until = record.times_out.put_out(quiet, rules.cooldown).map(|lasts| now + lasts);
        let window = rules.host_failures_window;
        let why = match count {
            1 => "the first failure of a round was there (host_failures)".to_owned(),
            _ => format!(
                "{count} rounds had their first failure there within {window:.0?} (host_failures, host_failures_window)"
            ),
        };
        make_room(&mut self.out, origin, MOST_HOSTS, |out| out.since);
        self.out.insert(origin.clone(), Out { since: now, until, why });
        self.note_release();
        Judged::Out
    }

    /// Whether this worker is the cause of its failures: it has failed on another host too.
    fn is_own_fault(&mut self, rank: u32, origin: &Origin, rules: &Rules, now: Instant) -> bool {
        let window = rules.host_failures_window;
        self.blamed.retain(|_, at| is_recent(*at, window, now));
        let there = |failure: &FirstFailure| failure.rank == Some(rank) && is_recent(failure.at, window, now);
        let mut others = self.records.iter().filter(|(other, _)| *other != origin);
        self.blamed.contains_key(&rank) || others.any(|(_, record)| record.failures.iter().any(there))
    }

    /// Count the failures of this worker against no host. Returns the hosts that are let in again.
    fn blame(&mut self, rank: u32, rules: &Rules, now: Instant) -> Vec<Origin> {
        make_room(&mut self.blamed, &rank, MOST_BLAMED, |at| *at);
        self.blamed.insert(rank, now);
        let mut freed = Vec::new();
        for (origin, record) in &mut self.records {
            let before = record.failures.len();
            record.failures.retain(|failure| failure.rank != Some(rank));
            let enough = record.recent(rules, now) >= rules.host_failures as usize;
            if record.failures.len() < before && !enough && self.out.remove(origin).is_some() {
                record.times_out.take_back();
                freed.push(origin.clone());
            }
        }
        freed
    }

    /// Let in the hosts whose time is over.
    pub(super) fn release(&mut self, now: Instant) -> Consequence {
        if self.let_in_at.is_none_or(|at| now < at) {
            return Consequence::default();
        }
        let over: Vec<_> =
            self.out.iter().filter(|(_, out)| !out.holds(now)).map(|(origin, _)| origin.clone()).collect();
        over.iter().for_each(|origin| _ = self.out.remove(origin));
        self.note_release();
        Consequence { records: let_in(&over).collect(), changes: !over.is_empty() }
    }

    /// Whether a node that waits or asks to join may come in.
    pub(super) fn entry(&self, node: &Node, now: Instant) -> Entry {
        match self.out_until(&node.origin(), now) {
            None => Entry::Open,
            Some(Some(_)) => Entry::Later,
            Some(None) => Entry::Never,
        }
    }

    /// The waiting nodes, each with whether its host may be used.
    pub(super) fn entries(&self, roster: &Roster, now: Instant) -> Vec<(NodeId, Option<SessionId>, Entry)> {
        let waiting = roster.iter().filter(|(_, node)| matches!(node.status, Status::Waiting { .. }));
        waiting.map(|(id, node)| (id, node.session, self.entry(node, now))).collect()
    }

    /// Whether the loss of a member is the first failure of its round, and its host's alone: members of other hosts are connected.
    pub(super) fn is_first_failure(&self, id: NodeId, roster: &Roster, current: &Current) -> bool {
        let Some(node) = roster.get(id).filter(|node| node.status == Status::Active && !node.done) else {
            return false;
        };
        let undisturbed = current.interrupted().is_none() && !current.notified();
        let explains = self.awaited == Some(id);
        let origin = node.origin();
        let is_there = |node: &Node| node.session.is_some() && !node.suspect;
        let mut others = roster.of(roster.active()).filter(|(other, _)| *other != id);
        (undisturbed || explains)
            && current.closed().is_none()
            && others.all(|(_, other)| is_there(other) || other.origin() == origin)
    }

    /// The hosts that are out have changed: note when the first one is let in again.
    fn note_release(&mut self) {
        self.let_in_at = self.out.values().filter_map(|out| out.until).min();
    }

    /// When the first host is let in again.
    pub fn next_release(&self) -> Option<Instant> {
        self.let_in_at
    }

    /// Until when a host is out because of its first failures, if it is. `Some(None)`: for the job.
    pub fn out_until(&self, origin: &Origin, now: Instant) -> Option<Option<Instant>> {
        self.out.get(origin).filter(|out| out.holds(now)).map(|out| out.until)
    }

    /// That a host is out, and for how long, in words.
    pub fn out_text(&self, origin: &Origin, now: Instant) -> Option<String> {
        let out = self.out.get(origin).filter(|out| out.holds(now))?;
        Some(format!("host {origin} is out {}: {}", left(out.until, now), out.why))
    }

    /// Why no new node of this host is let in, if none is. With a cool-down it is let in, and waits.
    pub fn refusal(&self, origin: &Origin, settings: &Settings, now: Instant) -> Option<(Refused, String)> {
        if self.out_until(origin, now) == Some(None) {
            let text = self.out_text(origin, now)?;
            return Some((Refused::Failures, format!("{text}; look for a fault of the host, or raise host_failures")));
        }
        let until = self.flaps_until(origin, settings, now)?;
        let (limit, window) = (settings.rejoin_limit, settings.rejoin_window);
        let text = format!(
            "nodes at {origin} left the running job {limit} times within {window:.0?} (rejoin_limit, rejoin_window): check why \
             they exit, or raise rejoin_limit; the host is out {}",
            left(Some(until), now)
        );
        Some((Refused::Flapping, text))
    }

    /// Until when nodes of a host have left too often, if they have.
    fn flaps_until(&self, origin: &Origin, settings: &Settings, now: Instant) -> Option<Instant> {
        let times = &self.records.get(origin)?.departures;
        let first = times.len().checked_sub(settings.rejoin_limit as usize).filter(|_| settings.rejoin_limit > 0)?;
        times.get(first).map(|at| *at + settings.rejoin_window).filter(|until| now < *until)
    }

    /// All hosts that are kept out.
    pub fn exclusions(&self, settings: &Settings, now: Instant) -> Vec<Exclusion> {
        let of = |origin: &Origin, until, why| {
            let (addr, name) = origin.parts();
            Exclusion { addr, name, until, why }
        };
        let out = self.out.iter().filter(|(_, out)| out.holds(now));
        let out = out.map(|(origin, out)| of(origin, out.until, out.why.clone()));
        let flapping =
            self.records.keys().filter(|origin| self.out_until(origin, now).is_none()).filter_map(|origin| {
                let until = self.flaps_until(origin, settings, now)?;
                Some(of(origin, Some(until), self.refusal(origin, settings, now)?.1))
            });
        out.chain(flapping).collect()
    }

    /// The hosts that are out because of their first failures, in words, if any is.
    pub fn describe(&self, now: Instant) -> Option<String> {
        let out: Vec<_> = self.out.iter().filter(|(_, out)| out.holds(now)).collect();
        let named = |(origin, out): &(&Origin, &Out)| format!("{origin} {}", left(out.until, now));
        let mut names: Vec<_> = out.iter().take(SHOWN).map(named).collect();
        if out.len() > SHOWN {
            names.push(format!("and {} more", out.len() - SHOWN));
        }
        (!names.is_empty()).then(|| format!("hosts that are out (host_failures): {}", names.join(", ")))
    }

    /// A worker failed while the connection of this member had ended.
    pub fn await_loss(&mut self, id: Option<NodeId>) {
        self.awaited = id;
    }

    /// The record of a host, which is made if there is none.
    fn record(&mut self, origin: &Origin, settings: &Settings, now: Instant) -> &mut Record {
        let (count, known) = (self.records.len(), self.records.contains_key(origin));
        if !known && (count.is_power_of_two() || count >= MOST_HOSTS) {
            self.records.retain(|_, record| record.matters(settings, now));
        }
        make_room(&mut self.records, origin, MOST_HOSTS, Record::last);
        self.records.entry(origin.clone()).or_default()
    }
}

/// Forget the oldest entry, if `key` would make more than so many.
fn make_room<K: Ord + Clone, V, A: Ord>(entries: &mut BTreeMap<K, V>, key: &K, most: usize, age: impl Fn(&V) -> A) {
    if entries.len() < most || entries.contains_key(key) {
        return;
    }
    if let Some(oldest) = entries.iter().min_by_key(|(_, value)| age(value)).map(|(key, _)| key.clone()) {
        entries.remove(&oldest);
    }
}

fn is_recent(at: Instant, window: Duration, now: Instant) -> bool {
    now.saturating_duration_since(at) < window
}

/// The events of hosts that are let in again.
fn let_in(hosts: &[Origin]) -> impl Iterator<Item = (Kind, String)> {
    let event = |origin: &Origin| {
        let text = format!("host {origin} is let in again (host_failures)");
        (Kind::HostLetIn { host: origin.to_string() }, text)
    };
    hosts.iter().map(event)
}

/// How long something holds, in words.
fn left(until: Option<Instant>, now: Instant) -> String {
    match until {
        None => "for the job".to_owned(),
        Some(until) => format!("for {:.1} s more", until.saturating_duration_since(now).as_secs_f64()),
    }
}

#[cfg(test)]
mod tests;
