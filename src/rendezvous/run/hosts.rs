//! What is remembered of each host, and which hosts are kept out of the job.
//!
//! - **Departures.** Nodes of the host have left a running world, whatever the cause. With `rejoin_limit` of them within `rejoin_window`
//!   no node of the host is let in, until fewer are that recent.
//! - **Illness.** The health check of a node has found something. Its host is out for ten minutes, and doubled each time. A day without takes
//!   one doubling back.
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
//! A host's standing is a [`Standing`], as at a driver of hosts: failures, departures, times out, and the answer to "why is it not used?".
//!
//! The instants are those of the process that decides. A coordinator that is restarted has forgotten everything here; a successor
//! knows [`KeptHosts`].

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::Run;
use super::event::SessionId;
use super::membership::Roster;
use super::node::{Node, Origin, Status};
use super::round::Current;
use crate::events::record::Kind;
use crate::events::tally::Refused;
use crate::hosts::{Book, Cooldown, Standing, Unused, UnusedHosts, WhyUnused, is_recent};
use crate::rendezvous::messages::message::NodeId;
use crate::rendezvous::messages::settings::{Rules, Settings};
use crate::wire::text::validate_name;

/// Number of hosts that are remembered. The ones that were quiet for longest, or have been out for longest, are forgotten first.
const MOST_HOSTS: usize = 10_000;
/// Number of ranks that are remembered as the cause of their own failures. Those that failed last are kept.
const MOST_BLAMED: usize = 1_000;
/// First failures of a host that are remembered, as a multiple of `host_failures`. Some may turn out to be a worker's.
const REMEMBERED: usize = 2;
/// How long a host is out whose health check has found something.
const ILL: Cooldown = Cooldown { min: Duration::from_secs(600), max: Duration::from_secs(24 * 3600) };
/// Number of hosts that a text names.
const SHOWN: usize = 4;
/// Number of hosts, and of ranks that cause their own failures, of which a successor knows.
const MOST_KEPT: usize = 256;
/// Departures and failures of each such host of which it knows.
const MOST_OF_EACH: usize = 64;
/// Bytes that these hosts may take on the wire.
const KEPT_BYTES: usize = 16 * 1024;
/// A time that takes as many bytes on the wire as any: ten years, in milliseconds.
pub(super) const LONGEST_AGE_MS: i64 = 10 * 366 * 24 * 3600 * 1000;

/// The hosts that are kept out, by run id. Runs without such hosts are not in it.
pub type Exclusions = BTreeMap<String, Vec<Exclusion>>;

/// A host that is kept out of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exclusion {
    /// The address from which its nodes connect.
    pub addr: String,
    /// Its name, if its nodes have said one (`host_name`).
    pub name: Option<String>,
    /// Why, and until when.
    pub out: Unused,
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

/// What is remembered of each host.
#[derive(Clone, Debug, Default)]
pub(in crate::rendezvous) struct Hosts {
    book: Book<Origin>,
    /// Whether a host may be out because of its first failures.
    any_out: bool,
    /// When the first of these hosts is let in again.
    let_in_at: Option<Instant>,
    /// Ranks whose workers were the cause of their own failures, and when last.
    blamed: BTreeMap<u32, Instant>,
    /// The member whose connection had ended when a worker failed. If it is lost, that was the first failure of the round.
    awaited: Option<NodeId>,
    /// What a successor must know, once that was asked for since the last change.
    kept: OnceLock<Arc<KeptHosts>>,
}

/// What the successor of a coordinator must know of hosts. `T`: as in [`Standing`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct KeptHosts<T = Instant> {
    book: BTreeMap<Origin, Standing<T>>,
    blamed: BTreeMap<u32, T>,
}

impl<T> KeptHosts<T> {
    /// The same, with its times as another kind of number.
    pub fn map<U>(self, of: &mut impl FnMut(T) -> U) -> KeptHosts<U> {
        let book = self.book.into_iter().map(|(origin, standing)| (origin, standing.map(of))).collect();
        KeptHosts { book, blamed: self.blamed.into_iter().map(|(rank, at)| (rank, of(at))).collect() }
    }

    /// Check what another process has written, and reduce its texts to one safe line each.
    ///
    /// # Errors
    /// Names the value that is not allowed.
    pub fn validated(self) -> Result<Self, String> {
        let (hosts, ranks) = (self.book.len(), self.blamed.len());
        if hosts > MOST_KEPT || ranks > MOST_KEPT {
            return Err(format!("{hosts} hosts and {ranks} ranks were sent, at most {MOST_KEPT} of each may be"));
        }
        let book = self.book.into_iter().map(|(it, standing)| Ok((check_host(it)?, standing.validated(MOST_OF_EACH)?)));
        Ok(Self { book: book.collect::<Result<_, String>>()?, blamed: self.blamed })
    }
}

impl Hosts {
    /// What a successor must know: at most [`MOST_KEPT`] hosts, first those that were put out, then those to which something happened last.
    pub(super) fn kept(&self) -> &Arc<KeptHosts> {
        self.kept.get_or_init(|| {
            let mut room = KEPT_BYTES;
            let fits = |origin: &Origin, standing: &Standing| {
                let host = (origin, standing.clone().map(&mut |_| LONGEST_AGE_MS));
                let size = postcard::serialize_with_flavor(&host, postcard::ser_flavors::Size::default());
                let left = size.ok().and_then(|size| room.checked_sub(size));
                left.inspect(|left| room = *left).is_some()
            };
            let book = self.book.latest(MOST_KEPT, MOST_OF_EACH, fits);
            let mut blamed: Vec<_> = self.blamed.iter().map(|(rank, at)| (*rank, *at)).collect();
            blamed.sort_by_key(|(_, at)| *at);
            Arc::new(KeptHosts { book, blamed: blamed.into_iter().rev().take(MOST_KEPT).collect() })
        })
    }

    /// Go on with what the coordinator before this one knew.
    pub(super) fn inherited(kept: KeptHosts) -> Self {
        let mut hosts = Self { book: kept.book.into_iter().collect(), blamed: kept.blamed, ..Self::default() };
        hosts.note_release();
        hosts
    }

    /// Whether nothing is remembered.
    pub fn is_blank(&self) -> bool {
        self.book.is_empty()
    }

    /// The departures of all hosts.
    pub fn departures(&self) -> Departures {
        let of = |(origin, standing): (&Origin, &Standing)| (origin.clone(), standing.departures().clone());
        Departures(self.book.iter().map(of).filter(|(_, times)| !times.is_empty()).collect())
    }

    /// What is known of departures alone, as read from a shared cell.
    pub fn with_departures(known: Departures) -> Self {
        let of = |(origin, departures)| (origin, Standing::with_departures(departures));
        Self { book: known.0.into_iter().map(of).collect(), ..Self::default() }
    }

    /// A running node of this host has left. Returns whether the host is kept out now.
    pub fn on_departure(&mut self, origin: &Origin, settings: &Settings, now: Instant) -> bool {
        if settings.rejoin_limit > 0 {
            self.standing(origin, settings, now).depart(settings.rejoin_limit as usize, now);
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

    /// The host is at fault, for this reason.
    pub(super) fn put_out(
        &mut self,
        origin: &Origin,
        why: WhyUnused,
        settings: &Settings,
        now: Instant,
    ) -> Consequence {
        let standing = self.standing(origin, settings, now);
        let quiet = standing.quiet(now);
        standing.put_out(why, quiet, settings.rules.cooldown, now);
        self.note_release();
        let text = self.out_text(origin, now).unwrap_or_default();
        Consequence { records: vec![(Kind::HostOut { host: origin.to_string() }, text)], changes: true }
    }

    /// The health check of a node has found this at its host.
    pub(super) fn on_ill(&mut self, origin: &Origin, what: &str, settings: &Settings, now: Instant) -> Consequence {
        if self.book.out(origin, now).is_some() {
            return Consequence::default();
        }
        self.standing(origin, settings, now).fall_ill(what, ILL, now);
        self.note_release();
        let text = self.out_text(origin, now).unwrap_or_default();
        Consequence { records: vec![(Kind::HostOut { host: origin.to_string() }, text)], changes: true }
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
        let standing = self.standing(origin, settings, now);
        let quiet = standing.quiet(now);
        standing.fail(rank, REMEMBERED * limit, now);
        let window = rules.host_failures_window;
        let count = standing.failed_within(window, now);
        if count < limit {
            return Judged::Counted(count);
        }
        standing.put_out(WhyUnused::FailedFirst { count, window }, quiet, rules.cooldown, now);
        self.note_release();
        Judged::Out
    }

    /// Whether this worker is the cause of its failures: it has failed on another host too.
    fn is_own_fault(&mut self, rank: u32, origin: &Origin, rules: &Rules, now: Instant) -> bool {
        let window = rules.host_failures_window;
        self.blamed.retain(|_, at| is_recent(*at, window, now));
        let mut others = self.book.iter().filter(|(other, _)| *other != origin);
        self.blamed.contains_key(&rank) || others.any(|(_, standing)| standing.has_failed(rank, window, now))
    }

    /// Count the failures of this worker against no host. Returns the hosts that are let in again.
    fn blame(&mut self, rank: u32, rules: &Rules, now: Instant) -> Vec<Origin> {
        self.kept.take();
        if self.blamed.len() >= MOST_BLAMED && !self.blamed.contains_key(&rank) {
            let first = self.blamed.iter().min_by_key(|(_, at)| **at).map(|(rank, _)| *rank);
            first.iter().for_each(|rank| _ = self.blamed.remove(rank));
        }
        self.blamed.insert(rank, now);
        let mut freed = Vec::new();
        for (origin, standing) in self.book.iter_mut() {
            let acquitted = standing.acquit(rank);
            let enough = standing.failed_within(rules.host_failures_window, now) >= rules.host_failures as usize;
            let ill = standing.put_out_at_all().is_some_and(|out| matches!(out.why, WhyUnused::Ill { .. }));
            if acquitted && !enough && !ill && standing.absolve() {
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
        self.kept.take();
        let mut over = Vec::new();
        for (origin, standing) in self.book.iter_mut() {
            if standing.out(now).is_none() && standing.let_in() {
                over.push(origin.clone());
            }
        }
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

    /// The hosts that are out have changed: note whether there is any, and when the first one is let in again.
    fn note_release(&mut self) {
        let mut outs = self.book.iter().filter_map(|(_, standing)| standing.put_out_at_all()).peekable();
        self.any_out = outs.peek().is_some();
        self.let_in_at = outs.filter_map(|out| out.until).min();
    }

    /// When the first host is let in again.
    pub fn next_release(&self) -> Option<Instant> {
        self.let_in_at
    }

    /// Until when a host is out because of its first failures, if it is. `Some(None)`: for the job.
    pub fn out_until(&self, origin: &Origin, now: Instant) -> Option<Option<Instant>> {
        self.book.out(origin, now).map(|out| out.until)
    }

    /// That a host is out, and for how long, in words.
    pub fn out_text(&self, origin: &Origin, now: Instant) -> Option<String> {
        Some(out_text(origin, self.book.out(origin, now)?, now))
    }

    /// Why no new node of this host is let in, if none is. With a cool-down it is let in, and waits.
    pub fn refusal(&self, origin: &Origin, settings: &Settings, now: Instant) -> Option<(Refused, String)> {
        let standing = self.book.get(origin)?;
        let failed = standing.out(now).filter(|out| out.until.is_none()).cloned();
        let (why, out) = match failed {
            Some(out) => (Refused::Failures, out),
            None => (Refused::Flapping, left_often(standing, settings, now)?),
        };
        Some((why, format!("{}; {}", out_text(origin, &out, now), out.advice())))
    }

    /// All hosts that are kept out.
    pub fn exclusions(&self, settings: &Settings, now: Instant) -> Vec<Exclusion> {
        let of = |origin: &Origin, out| {
            let (addr, name) = origin.parts();
            Exclusion { addr, name, out }
        };
        let out = self.book.iter().filter_map(|(origin, standing)| Some(of(origin, standing.out(now)?.clone())));
        let others = self.book.iter().filter(|(_, standing)| standing.out(now).is_none());
        let left = others.filter_map(|(origin, standing)| Some(of(origin, left_often(standing, settings, now)?)));
        out.chain(left).collect()
    }

    /// The same, as observers get it.
    pub fn unused(&self, settings: &Settings, now: Instant) -> UnusedHosts {
        let named = |host: Exclusion| (host.name.unwrap_or(host.addr), host.out);
        self.exclusions(settings, now).into_iter().map(named).collect()
    }

    /// The hosts that are out because of their first failures, in words, if any is.
    pub fn describe(&self, now: Instant) -> Option<String> {
        // Each waiting node is sent this, and most often no host is out.
        let book = self.any_out.then_some(&self.book)?;
        let out: Vec<_> = book.iter().filter_map(|(origin, standing)| Some((origin, standing.out(now)?))).collect();
        let named = |(origin, out): &(&Origin, &Unused)| format!("{origin} {}", out.how_long(now));
        let mut names: Vec<_> = out.iter().take(SHOWN).map(named).collect();
        if out.len() > SHOWN {
            names.push(format!("and {} more", out.len() - SHOWN));
        }
        (!names.is_empty()).then(|| format!("hosts that are out: {}", names.join(", ")))
    }

    /// A worker failed while the connection of this member had ended.
    pub fn await_loss(&mut self, id: Option<NodeId>) {
        self.awaited = id;
    }

    /// The standing of a host, which is made if there is none.
    fn standing(&mut self, origin: &Origin, settings: &Settings, now: Instant) -> &mut Standing {
        self.kept.take();
        let count = self.book.len();
        if (count.is_power_of_two() || count >= MOST_HOSTS) && self.book.get(origin).is_none() {
            let (departures, failures) = (settings.rejoin_window, settings.rules.host_failures_window);
            self.book.retain(|standing| standing.matters(departures, failures, now));
        }
        self.book.standing(origin, MOST_HOSTS, |_| false, now)
    }
}

/// Which hosts are kept out, for the coordinator and observers.
impl Run {
    /// Whether a node waits until its host is let in again.
    pub fn is_out(&self, id: NodeId) -> bool {
        self.roster.get(id).is_some_and(Node::is_kept_out)
    }

    /// The hosts that are kept out of the job, as observers get them.
    pub fn unused_hosts(&self, now: Instant) -> UnusedHosts {
        self.hosts.unused(&self.settings, now)
    }

    /// The hosts that are kept out of the job, because of their failures or departures.
    pub fn exclusions(&self, now: Instant) -> Vec<Exclusion> {
        self.hosts.exclusions(&self.settings, now)
    }
}

/// Check a host that another process has named.
pub(super) fn check_host(origin: Origin) -> Result<Origin, String> {
    let (address, name) = origin.parts();
    validate_name("name of a host", &name.unwrap_or(address))?;
    Ok(origin)
}

/// Until when nodes of a host have left too often, if they have.
fn left_often(standing: &Standing, settings: &Settings, now: Instant) -> Option<Unused> {
    standing.left_often(settings.rejoin_limit, settings.rejoin_window, now)
}

/// That a host is out, for how long and why, in words.
fn out_text(origin: &Origin, out: &Unused, now: Instant) -> String {
    format!("host {origin} is out {}", out.text(now))
}

/// The events of hosts that are let in again.
fn let_in(hosts: &[Origin]) -> impl Iterator<Item = (Kind, String)> {
    let event = |origin: &Origin| {
        let text = format!("host {origin} is let in again");
        (Kind::HostLetIn { host: origin.to_string() }, text)
    };
    hosts.iter().map(event)
}

#[cfg(test)]
mod tests;
