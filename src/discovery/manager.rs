//! The known hosts by age, and which of them may be used.
//!
//! Horovod's `HostManager` (`horovod/runner/elastic/discovery.py`) with these differences: hosts have the order of the list they
//! first appeared in, a change is judged by comparing lists, and times are monotonic.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::hosts::Host;
use crate::hosts::{Book, Cooldown, Standing, Unused, WhyUnused};

/// The known hosts.
#[derive(Clone, Debug, Default)]
pub struct HostManager {
    /// The oldest first.
    hosts: Vec<Known>,
    /// How many hosts were ever added.
    added: u64,
    cooldown: Option<Cooldown>,
    /// What is known of hosts that have failed or vanished, whether they are known now or not. No more than [`MOST_GONE`] beyond the
    /// known ones.
    book: Book<String>,
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
    pub fn update(&mut self, found: &[Host], now: Instant) -> Update {
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
            self.book.get_mut(&host.name).into_iter().for_each(|standing| standing.list(None));
        }
        update.removed.iter().for_each(|name| self.standing(name, now).list(Some(now)));
        update
    }

    /// Keep a host out, since it has failed. It loses its age. A host that is out already stays out for as long as before.
    pub fn blacklist(&mut self, name: &str, why: WhyUnused, now: Instant) {
        if self.out(name, now).is_some() {
            return;
        }
        let cooldown = self.cooldown;
        let standing = self.standing(name, now);
        let quiet = standing.since_out(now);
        standing.put_out(why, quiet, cooldown, now);
        if let Some(at) = self.hosts.iter().position(|known| known.host.name == name) {
            let known = self.hosts.remove(at);
            self.append(known.host);
        }
    }

    /// Why a host is kept out, known or not, and until when, if it is.
    pub fn out(&self, name: &str, now: Instant) -> Option<&Unused> {
        self.book.out(name, now)
    }

    /// What is known of a host, if it has failed or vanished.
    pub fn known_of(&self, name: &str) -> Option<&Standing> {
        self.book.get(name)
    }

    /// The hosts that have failed or vanished.
    pub fn book(&self) -> &Book<String> {
        &self.book
    }

    /// What is known of a host, to change it.
    pub fn standing(&mut self, name: &str, now: Instant) -> &mut Standing {
        let most = self.hosts.len() + MOST_GONE;
        let names = self.hosts.iter().filter(|_| self.book.len() >= most).map(|known| &*known.host.name);
        let known: BTreeSet<&str> = names.collect();
        self.book.standing(&name.to_owned(), most, |name| known.contains(&**name), now)
    }

    /// A host that may have waited for its next try is tried.
    pub fn on_tried(&mut self, name: &str) {
        self.book.get_mut(name).into_iter().for_each(Standing::tried);
    }

    /// A host's agent runs.
    pub fn on_up(&mut self, name: &str) {
        self.book.get_mut(name).into_iter().for_each(Standing::recovered);
    }

    /// All hosts of the last list, the oldest first.
    pub fn hosts(&self) -> &[Known] {
        &self.hosts
    }

    /// The hosts of the last list that are not kept out, the oldest first.
    pub fn available(&self, now: Instant) -> impl Iterator<Item = &Known> {
        self.hosts.iter().filter(move |known| self.out(&known.host.name, now).is_none())
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
    use std::time::Duration;

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
        manager.update(&hosts(text), Instant::now());
        manager
    }

    fn blacklist(manager: &mut HostManager, name: &str, now: Instant) {
        manager.blacklist(name, WhyUnused::Blacklisted, now);
    }

    /// When a host that is kept out for a while comes back.
    fn back_at(manager: &HostManager, name: &str, now: Instant) -> Option<Instant> {
        manager.out(name, now)?.until
    }

    // test_elastic_discovery.py: test_update_available_hosts.
    #[test]
    fn known_hosts_keep_their_order_and_new_ones_follow() {
        let now = Instant::now();
        let mut manager = manager("a:2");
        assert_eq!(manager.update(&hosts("b:2,a:2"), now).added, ["b"]);
        assert_eq!(order(&manager, now), ["a:2", "b:2"]);
        let update = manager.update(&hosts("c:1,b:3"), now);
        let resized = vec![("b".to_owned(), 2)];
        assert_eq!(update, Update { added: vec!["c".to_owned()], removed: vec!["a".to_owned()], resized });
        assert_eq!(order(&manager, now), ["b:3", "c:1"]);
        assert_eq!(manager.update(&hosts("b:3,c:1"), now), Update::default());
    }

    #[test]
    fn a_host_that_vanished_or_failed_comes_back_as_the_youngest() {
        let now = Instant::now();
        let mut manager =
            HostManager::new(Some(Cooldown { min: Duration::from_secs(10), max: Duration::from_secs(60) }));
        manager.update(&hosts("a,b,c"), now);
        manager.update(&hosts("b,c"), now);
        manager.update(&hosts("a,b,c"), now);
        assert_eq!(order(&manager, now), ["b:1", "c:1", "a:1"]);
        blacklist(&mut manager, "b", now);
        assert_eq!(order(&manager, now), ["c:1", "a:1"], "a host that is out takes its slots along");
        assert!(manager.out("b", now).is_some());
        let back = back_at(&manager, "b", now).unwrap();
        assert_eq!(order(&manager, back), ["c:1", "a:1", "b:1"]);
        blacklist(&mut manager, "b", now + Duration::from_secs(5));
        assert_eq!(back_at(&manager, "b", now), Some(back), "a host that is out is not punished twice");
        blacklist(&mut manager, "b", back);
        assert_eq!(back_at(&manager, "b", back), Some(back + Duration::from_secs(20)));
        let ages: Vec<_> = manager.hosts().iter().map(|known| known.age).collect();
        assert_eq!(ages, [2, 3, 5], "no age is given twice");
    }

    #[test]
    fn a_host_that_is_out_stays_out_whether_it_is_listed_or_not() {
        let now = Instant::now();
        let mut manager = manager("a,b");
        blacklist(&mut manager, "a", now);
        manager.update(&hosts("b"), now);
        manager.update(&hosts("a,b"), now);
        assert_eq!(order(&manager, now), ["b:1"]);
        assert_eq!(back_at(&manager, "a", now), None);
    }

    #[test]
    fn no_more_hosts_that_are_gone_are_remembered_than_the_limit() {
        let now = Instant::now();
        let cooldown = Cooldown { min: Duration::from_secs(10), max: Duration::from_secs(60) };
        let mut manager = HostManager::new(Some(cooldown));
        manager.update(&hosts("known"), now);
        blacklist(&mut manager, "known", now);
        blacklist(&mut manager, "over", now);
        let limit = u64::try_from(MOST_GONE).unwrap();
        let over = now + cooldown.min;
        for number in 0..2 * limit {
            blacklist(&mut manager, &format!("gone{number}"), over + Duration::from_millis(number));
        }
        assert_eq!(manager.book.len(), 1 + MOST_GONE);
        assert!(manager.known_of("known").is_some() && manager.known_of("over").is_none());
        assert!(manager.out(&format!("gone{}", limit - 1), over).is_none(), "it failed before those that are left");
        assert!(manager.out(&format!("gone{limit}"), over).is_some());
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
