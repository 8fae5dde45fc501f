//! What a judge of hosts knows of each host, and the answer to "why is this host not used?".
//!
//! Three judges keep such a book: a run at the coordinator (`src/rendezvous/run/hosts.rs`), the table of the hosts that discovery has
//! found (`src/discovery/manager.rs`), and the driver of agents (`src/discovery/machine.rs`), which shares the table's. They may be in
//! different processes, so they share the type, its rules and the reasons, not one instance
//! (`docs/decisions/0117-one-type-keeps-the-standing-of-a-host.md`).
//!
//! | part | what |
//! |---|---|
//! | [`Standing`], [`Book`] | failures, departures, times out and the next try of a host; which host is forgotten first |
//! | [`why`] | the reasons, each with its text, its end and what to do; the hosts that an observer is shown |
//! | [`cooldown`] | for how long a host is kept out |

use std::borrow::Borrow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::wire::text::tidy;

pub mod cooldown;
pub mod why;

#[cfg(test)]
mod tests;

pub use cooldown::Cooldown;
use cooldown::TimesOut;
pub use why::{Unused, UnusedHost, UnusedHosts, WhyUnused};

/// A failure that counts against a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Failure<T> {
    at: T,
    /// The rank of the worker that failed. `None`: the node or its agent.
    rank: Option<u32>,
}

/// What a judge knows of one host. `T`: an instant or, on the way to another process, a number of milliseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Standing<T = Instant> {
    /// When nodes of it left a running world, the earliest first.
    departures: VecDeque<T>,
    /// The earliest first.
    failures: VecDeque<Failure<T>>,
    /// The last failure, in words, if it has some.
    last: Option<String>,
    times_out: TimesOut,
    /// When it was last put out, and until when. It stays after its time is over, until it is let in.
    out: Option<(T, Unused<T>)>,
    /// When its health check last found something.
    ill_at: Option<T>,
    /// It is not tried before.
    retry_at: Option<T>,
    /// Since when discovery does not list it, after it did.
    unlisted_since: Option<T>,
}

impl Default for Standing {
    fn default() -> Self {
        Self {
            departures: VecDeque::new(),
            failures: VecDeque::new(),
            last: None,
            times_out: TimesOut::default(),
            out: None,
            ill_at: None,
            retry_at: None,
            unlisted_since: None,
        }
    }
}

impl<T> Standing<T> {
    /// The same, with its times as another kind of number.
    pub fn map<U>(self, of: &mut impl FnMut(T) -> U) -> Standing<U> {
        let Self { departures, failures, last, times_out, out, ill_at, retry_at, unlisted_since } = self;
        Standing {
            departures: departures.into_iter().map(&mut *of).collect(),
            failures: failures.into_iter().map(|Failure { at, rank }| Failure { at: of(at), rank }).collect(),
            last,
            times_out,
            out: out.map(|(since, unused)| (of(since), unused.map(of))),
            ill_at: ill_at.map(&mut *of),
            retry_at: retry_at.map(&mut *of),
            unlisted_since: unlisted_since.map(of),
        }
    }

    /// Check what another process has written, and reduce its texts to one safe line each. It may have `most` departures and failures.
    ///
    /// # Errors
    /// It has more.
    pub fn validated(self, most: usize) -> Result<Self, String> {
        let (departures, failures) = (self.departures.len(), self.failures.len());
        if departures > most || failures > most {
            return Err(format!(
                "a host has {departures} departures and {failures} failures, at most {most} of each may be sent"
            ));
        }
        let out = self.out.map(|(since, Unused { why, until })| (since, Unused { why: why.tidied(), until }));
        Ok(Self { out, last: self.last.map(|last| tidy(&last)), ..self })
    }
}

impl Standing {
    /// The standing of a host of which only departures are known.
    pub fn with_departures(departures: VecDeque<Instant>) -> Self {
        Self { departures, ..Self::default() }
    }

    /// When nodes of it left a running world, the earliest first.
    pub fn departures(&self) -> &VecDeque<Instant> {
        &self.departures
    }

    /// A node of it has left a running world. The last `most` of these are remembered.
    pub fn depart(&mut self, most: usize, now: Instant) {
        self.departures.push_back(now);
        while self.departures.len() > most {
            self.departures.pop_front();
        }
    }

    /// Why no new node of it is let in, if `limit` nodes have left a running world within the window. 0: no limit.
    pub fn left_often(&self, limit: u32, window: Duration, now: Instant) -> Option<Unused> {
        let first = self.departures.len().checked_sub(limit as usize).filter(|_| limit > 0)?;
        let until = *self.departures.get(first)? + window;
        (now < until).then_some(Unused { why: WhyUnused::LeftOften { count: limit, window }, until: Some(until) })
    }

    /// A failure counts against it. The last `most` are remembered.
    pub fn fail(&mut self, rank: Option<u32>, most: usize, now: Instant) {
        self.failures.push_back(Failure { at: now, rank });
        while self.failures.len() > most {
            self.failures.pop_front();
        }
    }

    /// Number of failures within the window.
    pub fn failed_within(&self, window: Duration, now: Instant) -> usize {
        self.failures.iter().filter(|failure| is_recent(failure.at, window, now)).count()
    }

    /// Whether the worker with this rank has failed within the window.
    pub fn has_failed(&self, rank: u32, window: Duration, now: Instant) -> bool {
        self.failures.iter().any(|failure| failure.rank == Some(rank) && is_recent(failure.at, window, now))
    }

    /// The failures of this worker do not count against it. Returns whether there were any.
    pub fn acquit(&mut self, rank: u32) -> bool {
        let before = self.failures.len();
        self.failures.retain(|failure| failure.rank != Some(rank));
        self.failures.len() < before
    }

    /// None of its failures counts any longer.
    pub fn forget_failures(&mut self) {
        self.failures.clear();
    }

    /// The time since its last failure, or since it was last ill.
    pub fn quiet(&self, now: Instant) -> Duration {
        let last = self.failures.back().map(|failure| failure.at).max(self.ill_at);
        last.map_or(Duration::MAX, |at| now.saturating_duration_since(at))
    }

    /// The time since it was last put out.
    pub fn since_out(&self, now: Instant) -> Duration {
        self.out.as_ref().map_or(Duration::MAX, |(since, _)| now.saturating_duration_since(*since))
    }

    /// Keep it out, after a time without a failure: for the job or, with a cool-down, for a while.
    pub fn put_out(&mut self, why: WhyUnused, quiet: Duration, cooldown: Option<Cooldown>, now: Instant) -> &Unused {
        let until = self.times_out.put_out(quiet, cooldown).and_then(|lasts| now.checked_add(lasts));
        self.retry_at = None;
        &self.out.insert((now, Unused { why, until })).1
    }

    /// Its health check has found this. It is kept out, for longer each time.
    pub fn fall_ill(&mut self, what: &str, cooldown: Cooldown, now: Instant) {
        let quiet = self.quiet(now);
        self.ill_at = Some(now);
        self.put_out(WhyUnused::Ill { what: what.to_owned() }, quiet, Some(cooldown), now);
    }

    /// It is let in again. Returns whether it was out, or its time is over.
    pub fn let_in(&mut self) -> bool {
        self.out.take().is_some()
    }

    /// It was put out once without its fault, and is let in. Returns whether it was out.
    pub fn absolve(&mut self) -> bool {
        let was_out = self.let_in();
        if was_out {
            self.times_out.take_back();
        }
        was_out
    }

    /// Why it is kept out, and until when, if it is.
    pub fn out(&self, now: Instant) -> Option<&Unused> {
        self.put_out_at_all().filter(|out| out.holds(now))
    }

    /// The same, also if its time is over and it was not let in.
    pub fn put_out_at_all(&self) -> Option<&Unused> {
        self.out.as_ref().map(|(_, out)| out)
    }

    /// Its last failure, in words. It is not tried before `retry_at`.
    pub fn retry(&mut self, last: &str, retry_at: Option<Instant>) {
        (self.last, self.retry_at) = (Some(last.to_owned()), retry_at);
    }

    /// It is tried again.
    pub fn tried(&mut self) {
        self.retry_at = None;
    }

    /// It is used again, so its last failure is over.
    pub fn recovered(&mut self) {
        (self.last, self.retry_at) = (None, None);
    }

    /// When it is tried again, if a failure has delayed that.
    pub fn retry_at(&self) -> Option<Instant> {
        self.retry_at
    }

    /// Its last failure, in words.
    pub fn last(&self) -> Option<&str> {
        self.last.as_deref()
    }

    /// Discovery lists it or, since this instant, does not.
    pub fn list(&mut self, unlisted_since: Option<Instant>) {
        self.unlisted_since = unlisted_since;
    }

    /// Since when discovery does not list it, after it did.
    pub fn unlisted_since(&self) -> Option<Instant> {
        self.unlisted_since
    }

    /// Why it is not used: it is kept out, discovery does not list it, or it waits for its next try. A host that discovery lists again
    /// is still kept out, so that reason comes first.
    pub fn unused(&self, now: Instant) -> Option<Unused> {
        let unlisted = || self.unlisted_since.map(|_| Unused { why: WhyUnused::NotListed, until: None });
        let waits = || {
            let until = self.retry_at.filter(|at| now < *at)?;
            Some(Unused { why: WhyUnused::Retried { last: self.last.clone()? }, until: Some(until) })
        };
        self.out(now).cloned().or_else(unlisted).or_else(waits)
    }

    /// Whether what is known of it may still matter: departures and failures within these windows, a doubling of its time out, or that it
    /// was put out.
    pub fn matters(&self, departures: Duration, failures: Duration, now: Instant) -> bool {
        self.departures.back().is_some_and(|at| is_recent(*at, departures, now))
            || self.failed_within(failures, now) > 0
            || self.times_out.after(self.quiet(now)) > 0
            || self.out.is_some()
    }

    /// Whether it was put out, or something counts against it.
    fn counts(&self) -> bool {
        let is_clear = self.departures.is_empty() && self.failures.is_empty() && self.times_out == TimesOut::default();
        self.out.is_some() || !is_clear
    }

    /// The same, with its last `most` departures and failures alone.
    fn with_latest(&self, most: usize) -> Self {
        Self {
            departures: latest(&self.departures, most),
            failures: latest(&self.failures, most),
            last: self.last.clone(),
            out: self.out.clone(),
            ..*self
        }
    }

    /// When something last happened to it.
    fn last_at(&self) -> Option<Instant> {
        let failed = self.failures.back().map(|failure| failure.at);
        let out = self.out.as_ref().map(|(since, _)| *since);
        self.departures.back().copied().max(failed).max(out).max(self.ill_at).max(self.unlisted_since)
    }
}

/// What a judge knows of each host.
#[derive(Clone, Debug)]
pub struct Book<K>(BTreeMap<K, Standing>);

impl<K> Default for Book<K> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<K: Ord> FromIterator<(K, Standing)> for Book<K> {
    fn from_iter<I: IntoIterator<Item = (K, Standing)>>(hosts: I) -> Self {
        Self(hosts.into_iter().collect())
    }
}

impl<K: Ord + Clone> Book<K> {
    /// Whether nothing is known of any host.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Number of hosts.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// What is known of a host, if anything is.
    pub fn get<Q: Ord + ?Sized>(&self, host: &Q) -> Option<&Standing>
    where
        K: Borrow<Q>,
    {
        self.0.get(host)
    }

    /// The same, to change it.
    pub fn get_mut<Q: Ord + ?Sized>(&mut self, host: &Q) -> Option<&mut Standing>
    where
        K: Borrow<Q>,
    {
        self.0.get_mut(host)
    }

    /// All hosts, in the order of their keys.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &Standing)> {
        self.0.iter()
    }

    /// The same, to change them.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&K, &mut Standing)> {
        self.0.iter_mut()
    }

    /// Why a host is kept out, and until when, if it is.
    pub fn out<Q: Ord + ?Sized>(&self, host: &Q, now: Instant) -> Option<&Unused>
    where
        K: Borrow<Q>,
    {
        self.get(host)?.out(now)
    }

    /// Forget the hosts for which this does not hold.
    pub fn retain(&mut self, matters: impl Fn(&Standing) -> bool) {
        self.0.retain(|_, standing| matters(standing));
    }

    /// What a successor of this judge must know: the hosts that were put out, and of the others first those to which something happened
    /// last. They are `most` at most, each with its last `each` departures and failures, and end before the first one that does not fit.
    pub fn latest(
        &self,
        most: usize,
        each: usize,
        mut fits: impl FnMut(&K, &Standing) -> bool,
    ) -> BTreeMap<K, Standing> {
        let mut hosts: Vec<_> = self.0.iter().filter(|(_, standing)| standing.counts()).collect();
        hosts.sort_by_key(|(_, standing)| Reverse((standing.out.is_some(), standing.last_at())));
        let hosts = hosts.into_iter().take(most).map(|(host, standing)| (host.clone(), standing.with_latest(each)));
        hosts.take_while(|(host, standing)| fits(host, standing)).collect()
    }

    /// The standing of a host, which is made if there is none. Of `most` hosts one is forgotten then: none that must `stay`, one that is
    /// not out and does not wait for its next try if there is any, and of these the one to which nothing has happened for longest.
    pub fn standing(&mut self, host: &K, most: usize, stay: impl Fn(&K) -> bool, now: Instant) -> &mut Standing {
        if self.0.len() >= most && !self.0.contains_key(host) {
            let holds = |it: &Standing| it.out(now).is_some() || it.retry_at.is_some_and(|at| now < at);
            let others = self.0.iter().filter(|(name, _)| !stay(name));
            let first = others.min_by_key(|(_, standing)| (holds(standing), standing.last_at()));
            if let Some(name) = first.map(|(name, _)| name.clone()) {
                self.0.remove(&name);
            }
        }
        self.0.entry(host.clone()).or_default()
    }
}

/// The last `most` of them.
pub(crate) fn latest<T: Clone>(all: &VecDeque<T>, most: usize) -> VecDeque<T> {
    all.iter().skip(all.len().saturating_sub(most)).cloned().collect()
}

/// Whether something happened within the window.
pub(crate) fn is_recent(at: Instant, window: Duration, now: Instant) -> bool {
    now.saturating_duration_since(at) < window
}
