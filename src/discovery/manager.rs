//! The known hosts by age, and which of them may be used.
//!
//! Horovod's `HostManager` (`horovod/runner/elastic/discovery.py`) with these differences: hosts have the order of the list they
//! first appeared in, a change is judged by comparing lists, and times are monotonic.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::hosts::Host;
use crate::cooldown::{Cooldown, TimesOut};

/// The known hosts.
#[derive(Clone, Debug, Default)]
pub struct HostManager {
    /// The oldest first.
    hosts: Vec<Known>,
    /// How many hosts were ever added.
    added: u64,
    cooldown: Option<Cooldown>,
    /// The hosts that have failed, whether they are known now or not. No more than [`MOST_GONE`] beyond the known ones.
    failed: BTreeMap<String, Failed>,
}

/// A host that has failed.
#[derive(Clone, Debug)]
struct Failed {
    /// The last time.
    at: Instant,
    times_out: TimesOut,
    /// Until when it is kept out; `None`: for the whole job.
    until: Option<Instant>,
}

impl Failed {
    fn is_out(&self, now: Instant) -> bool {
        self.until.is_none_or(|until| now < until)
    }
}

/// A host, and its age.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    /// The host.
    pub host: Host,
    /// Its number in the order of appearance. A host that vanishes, or is kept out, loses it.
    pub age: u64,
}

/// What a new list changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Update {
    /// Names of hosts that were not known.
    pub added: Vec<String>,
    /// Names of hosts that have vanished.
    pub removed: Vec<String>,
    /// Hosts with another number of slots: their names, and the number before.
    pub resized: Vec<(String, u32)>,
}

/// How many hosts are remembered that are no longer in the list. A cluster may give every machine another name.
pub const MOST_GONE: usize = 4096;

/// Something was taken away. Horovod's `HostUpdateResult.removed`.
pub const REMOVED: u8 = 1;
/// Something was added. Horovod's `HostUpdateResult.added`.
pub const ADDED: u8 = 2;

impl HostManager {
    /// A manager that knows no host yet. Without a cool-down, hosts that fail are out for the whole job.
    pub fn new(cooldown: Option<Cooldown>) -> Self {
        Self { cooldown, ..Self::default() }
    }

    /// Take a new list. Known hosts keep their order, and new ones follow in that of the list.
    pub fn update(&mut self, found: &[Host]) -> Update {
        let mut update = Update::default();
        let slots: BTreeMap<&str, u32> = found.iter().map(|host| (&*host.name, host.slots)).collect();
        self.hosts.retain_mut(|known| {
            let Some(slots) = slots.get(&*known.host.name) else {
                update.removed.push(known.host.name.clone());
                return false;
            };
            let before = std::mem::replace(&mut known.host.slots, *slots);
            if before != *slots {
                update.resized.push((known.host.name.clone(), before));
            }
            true
        });
        let known: BTreeSet<String> = self.hosts.iter().map(|known| known.host.name.clone()).collect();
        for host in found.iter().filter(|host| !known.contains(&host.name)) {
            update.added.push(host.name.clone());
            self.append(host.clone());
        }
        update
    }

    /// Keep a host out, since it has failed. It loses its age. A host that is out already stays out for as long as before.
    pub fn blacklist(&mut self, name: &str, now: Instant) {
        if self.is_blacklisted(name, now) {
            return;
        }
        let before = self.failed.get(name);
        let quiet = before.map_or(Duration::MAX, |failed| now.saturating_duration_since(failed.at));
        let mut times_out = before.map(|failed| failed.times_out).unwrap_or_default();
        let until = times_out.put_out(quiet, self.cooldown).and_then(|lasts| now.checked_add(lasts));
        self.failed.insert(name.to_owned(), Failed { at: now, times_out, until });
        self.forget_one(now);
        if let Some(at) = self.hosts.iter().position(|known| known.host.name == name) {
            let known = self.hosts.remove(at);
            self.append(known.host);
        }
    }

    /// Forget one unknown host if there are too many: one that is not out if there is any, of these the one that failed first.
    fn forget_one(&mut self, now: Instant) {
        if self.failed.len() <= self.hosts.len() + MOST_GONE {
            return;
        }
        let known: BTreeSet<&str> = self.hosts.iter().map(|known| &*known.host.name).collect();
        let unknown = self.failed.iter().filter(|(name, _)| !known.contains(&***name));
        let first = unknown.min_by_key(|(_, failed)| (failed.is_out(now), failed.at));
        if let Some(name) = first.map(|(name, _)| name.clone()) {
            self.failed.remove(&name);
        }
    }

    /// Whether a host is kept out, known or not.
    pub fn is_blacklisted(&self, name: &str, now: Instant) -> bool {
        self.failed.get(name).is_some_and(|failed| failed.is_out(now))
    }

    /// When a host that is kept out may come back. `None` if it is not out, or for the whole job.
    pub fn back_at(&self, name: &str, now: Instant) -> Option<Instant> {
        self.failed.get(name)?.until.filter(|until| now < *until)
    }

    /// All hosts of the last list, the oldest first.
    pub fn hosts(&self) -> &[Known] {
        &self.hosts
    }

    /// The hosts of the last list that are not kept out, the oldest first.
    pub fn available(&self, now: Instant) -> impl Iterator<Item = &Known> {
        self.hosts.iter().filter(move |known| !self.is_blacklisted(&known.host.name, now))
    }

    fn append(&mut self, host: Host) {
        self.hosts.push(Known { host, age: self.added });
        self.added += 1;
    }
}

/// What has changed between two sets of available hosts, as Horovod's flags: [`REMOVED`], [`ADDED`], both, or 0.
pub fn difference(before: &[Host], after: &[Host]) -> u8 {
    let slots = |hosts: &[Host]| hosts.iter().map(|host| (host.name.clone(), host.slots)).collect::<BTreeMap<_, _>>();
    let (before, after) = (slots(before), slots(after));
    let more = |from: &BTreeMap<String, u32>, to: &BTreeMap<String, u32>| {
        to.iter().any(|(name, slots)| from.get(name).is_none_or(|before| before < slots))
    };
    (if more(&after, &before) { REMOVED } else { 0 }) | (if more(&before, &after) { ADDED } else { 0 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discovery::hosts::parse_list;

    fn hosts(text: &str) -> Vec<Host> {
        if text.is_empty() { Vec::new() } else { parse_list(text, 1).unwrap() }
    }

    fn order(manager: &HostManager, now: Instant) -> Vec<String> {
        manager.available(now).map(|known| known.host.to_string()).collect()
    }

    fn manager(text: &str) -> HostManager {
        let mut manager = HostManager::new(None);
        manager.update(&hosts(text));
        manager
    }

    // test_elastic_discovery.py: test_update_available_hosts.
    #[test]
    fn known_hosts_keep_their_order_and_new_ones_follow() {
        let now = Instant::now();
        let mut manager = manager("a:2");
        assert_eq!(manager.update(&hosts("b:2,a:2")).added, ["b"]);
        assert_eq!(order(&manager, now), ["a:2", "b:2"]);
        let update = manager.update(&hosts("c:1,b:3"));
        let resized = vec![("b".to_owned(), 2)];
        assert_eq!(update, Update { added: vec!["c".to_owned()], removed: vec!["a".to_owned()], resized });
        assert_eq!(order(&manager, now), ["b:3", "c:1"]);
        assert_eq!(manager.update(&hosts("b:3,c:1")), Update::default());
    }

    #[test]
    fn a_host_that_vanished_or_failed_comes_back_as_the_youngest() {
        let now = Instant::now();
        let mut manager =
            HostManager::new(Some(Cooldown { min: Duration::from_secs(10), max: Duration::from_secs(60) }));
        manager.update(&hosts("a,b,c"));
        manager.update(&hosts("b,c"));
        manager.update(&hosts("a,b,c"));
        assert_eq!(order(&manager, now), ["b:1", "c:1", "a:1"]);
        manager.blacklist("b", now);
        assert_eq!(order(&manager, now), ["c:1", "a:1"], "a host that is out takes its slots along");
        assert!(manager.is_blacklisted("b", now));
        let back = manager.back_at("b", now).unwrap();
        assert_eq!(order(&manager, back), ["c:1", "a:1", "b:1"]);
        manager.blacklist("b", now + Duration::from_secs(5));
        assert_eq!(manager.back_at("b", now), Some(back), "a host that is out is not punished twice");
        manager.blacklist("b", back);
        assert_eq!(manager.back_at("b", back), Some(back + Duration::from_secs(20)));
        let ages: Vec<_> = manager.hosts().iter().map(|known| known.age).collect();
        assert_eq!(ages, [2, 3, 5], "no age is given twice");
    }

    #[test]
    fn a_host_that_is_out_stays_out_whether_it_is_listed_or_not() {
        let now = Instant::now();
        let mut manager = manager("a,b");
        manager.blacklist("a", now);
        manager.update(&hosts("b"));
        manager.update(&hosts("a,b"));
        assert_eq!(order(&manager, now), ["b:1"]);
        assert_eq!(manager.back_at("a", now), None);
    }

    #[test]
    fn no_more_hosts_that_are_gone_are_remembered_than_the_limit() {
        let now = Instant::now();
        let cooldown = Cooldown { min: Duration::from_secs(10), max: Duration::from_secs(60) };
        let mut manager = HostManager::new(Some(cooldown));
        manager.update(&hosts("known"));
        manager.blacklist("known", now);
        manager.blacklist("over", now);
        let limit = u64::try_from(MOST_GONE).unwrap();
        let over = now + cooldown.min;
        for number in 0..2 * limit {
            manager.blacklist(&format!("gone{number}"), over + Duration::from_millis(number));
        }
        assert_eq!(manager.failed.len(), 1 + MOST_GONE);
        assert!(manager.failed.contains_key("known") && !manager.failed.contains_key("over"));
        assert!(!manager.is_blacklisted(&format!("gone{}", limit - 1), over), "it failed before those that are left");
        assert!(manager.is_blacklisted(&format!("gone{limit}"), over));
    }

    // test_elastic_discovery.py: HostUpdateResult of added, removed, mixed and no changes; more slots count as added.
    #[test]
    fn differences_are_horovods_flags() {
        for (before, after, flags) in [
            ("a:2", "a:2", 0),
            ("a:2,b:2", "b:2,a:2", 0),
            ("", "a:2", ADDED),
            ("a:2", "a:2,b:2", ADDED),
            ("a:2", "a:4", ADDED),
            ("a:2", "", REMOVED),
            ("a:4", "a:2", REMOVED),
            ("a:2", "b:2", REMOVED | ADDED),
            ("a:2,b:2", "a:1,b:3", REMOVED | ADDED),
        ] {
            assert_eq!(difference(&hosts(before), &hosts(after)), flags, "{before} to {after}");
        }
    }
}
