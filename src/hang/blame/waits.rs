//! Who waits for whom. A wait is kept once for all that share it: a thousand ranks in one collective wait once.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::world::{Team, World};
use crate::hang::finding::{DETAILS_LIMIT, Wait};
use crate::hang::view::{View, WaitsIn, waits_in};

/// What a rank waits in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum On {
    /// A collective: the index of its group, and its number.
    Collective(usize, u64),
    /// A message to or from this rank.
    Peer(u32),
    /// All that do not make a process group yet.
    Store,
}

/// Who waits for whom.
pub(super) struct Waits<'a> {
    pub teams: Vec<Team<'a>>,
    /// What each rank waits in, by index of its view.
    on: Vec<Vec<On>>,
    /// Ranks that do not wait in the store, rising.
    outside_store: Vec<u32>,
    /// Ranks that wait for somebody, rising.
    pub waiting: BTreeSet<u32>,
    /// Ranks that others wait for, each with the wait that says it best.
    pub awaited: BTreeMap<u32, On>,
}

impl<'a> Waits<'a> {
    pub fn new(world: &World<'a>) -> Self {
        let teams = world.teams();
        let mut on = vec![Vec::new(); world.views.len()];
        for (at, team) in teams.iter().enumerate() {
            for (seq, waiters) in &team.pending {
                waiters.iter().for_each(|waiter| on[*waiter].push(On::Collective(at, *seq)));
            }
        }
        let stands_in = |view: &View| {
            let can_wait = !view.has_ended() && !view.is_stopped();
            waits_in(&view.frames).filter(|_| can_wait).map(|(_, waits)| waits)
        };
        for (at, view) in world.views.iter().enumerate() {
            match stands_in(view) {
                Some(WaitsIn::Peer(Some(peer))) => on[at].push(On::Peer(peer)),
                Some(WaitsIn::Store) => on[at].push(On::Store),
                Some(WaitsIn::Peer(None) | WaitsIn::Collective) | None => {}
            }
        }
        let in_store = |at: usize| on[at].contains(&On::Store);
        let outside_store = match (0..on.len()).any(in_store) {
            true => {
                world.views.iter().enumerate().filter(|(at, _)| !in_store(*at)).map(|(_, view)| view.rank).collect()
            }
            false => Vec::new(),
        };
        let mut waits = Self { teams, on, outside_store, waiting: BTreeSet::new(), awaited: BTreeMap::new() };
        waits.waiting = world.ranks().filter(|rank| waits.blocker(world, *rank).is_some()).collect();
        waits.awaited = waits.find_awaited(world);
        waits
    }

    /// What a rank waits in.
    pub fn of(&self, world: &World<'a>, rank: u32) -> &[On] {
        world.at(rank).map_or(&[], |at| &self.on[at])
    }

    /// Whom those wait for that wait in this.
    fn blockers<'t>(&'t self, world: &'t World<'a>, on: On) -> Box<dyn Iterator<Item = u32> + 't> {
        match on {
            On::Collective(team, seq) => Box::new(self.teams[team].blockers(world, seq)),
            On::Peer(peer) => Box::new(std::iter::once(peer)),
            On::Store => Box::new(self.outside_store.iter().copied()),
        }
    }

    /// A rank that this one waits for, and the wait.
    fn blocker(&self, world: &World<'a>, rank: u32) -> Option<(u32, On)> {
        let of = |on: On| Some((self.blockers(world, on).find(|other| *other != rank)?, on));
        self.of(world, rank).iter().find_map(|on| of(*on))
    }

    fn find_awaited(&self, world: &World<'a>) -> BTreeMap<u32, On> {
        let mut awaited = BTreeMap::new();
        // Collectives that also lack ranks which wait elsewhere: those come later.
        let mut later = Vec::new();
        for (at, team) in self.teams.iter().enumerate() {
            let Some((&first, _)) = team.pending.first_key_value() else { continue };
            let mut lacks_waiting = BTreeMap::new();
            // Whoever holds up a collective holds up the later ones, but for ranks that may belong to a group whose members nobody has sent.
            let mut seqs = vec![team.pending.last_key_value().map_or(first, |(last, _)| *last)];
            seqs.extend((seqs[0] != first).then_some(first));
            for seq in seqs {
                for rank in team.blockers(world, seq) {
                    let awaits = team.awaits(world, rank).unwrap_or(seq);
                    let is_other = |it: &usize| world.views[*it].rank != rank;
                    // Alone in it, it waits for itself: its numbers contradict one another.
                    if !team.pending.get(&awaits).is_none_or(|waiters| waiters.iter().any(is_other)) {
                        continue;
                    }
                    let waits = |other: u32| self.waiting.contains(&other);
                    if *lacks_waiting.entry(awaits).or_insert_with(|| team.blockers(world, awaits).any(waits)) {
                        later.push((rank, On::Collective(at, awaits)));
                    } else {
                        awaited.entry(rank).or_insert(On::Collective(at, awaits));
                    }
                }
            }
        }
        for (rank, on) in later {
            awaited.entry(rank).or_insert(on);
        }
        for on in self.on.iter().flatten().filter(|on| !matches!(on, On::Collective(..))).collect::<BTreeSet<_>>() {
            for rank in self.blockers(world, *on) {
                awaited.entry(rank).or_insert(*on);
            }
        }
        awaited
    }

    /// Ranks that others wait for and that wait for nobody, each with the wait that says it best.
    pub fn roots(&self) -> Vec<(u32, On)> {
        self.awaited.iter().filter(|(rank, _)| !self.waiting.contains(rank)).map(|(rank, on)| (*rank, *on)).collect()
    }

    /// If everybody who is waited for waits: ranks of which each waits for the next, and the last one for the first.
    pub fn circle(&self, world: &World<'a>) -> Vec<(u32, On)> {
        let mut way: Vec<(u32, On)> = Vec::new();
        let mut visited = BTreeMap::new();
        let Some(mut rank) = self.awaited.keys().copied().find(|rank| self.waiting.contains(rank)) else { return way };
        while !visited.contains_key(&rank) {
            visited.insert(rank, way.len());
            let waiting = |on: On| {
                let others = self.blockers(world, on).filter(|other| *other != rank && self.waiting.contains(other));
                Some((others.min()?, on))
            };
            let Some((next, on)) = self.of(world, rank).iter().filter_map(|on| waiting(*on)).min() else {
                return Vec::new();
            };
            way.push((rank, on));
            rank = next;
        }
        way.split_off(visited[&rank])
    }

    /// The way from the lowest rank that waits to one of these, if it does not wait for one of them itself.
    pub fn chain(&self, world: &World<'a>, to: &[u32]) -> Vec<Wait> {
        let Some(from) = self.waiting.iter().copied().find(|rank| !to.contains(rank)) else { return Vec::new() };
        let mut before: BTreeMap<u32, (u32, On)> = BTreeMap::new();
        let (mut next, mut seen_waits) = (VecDeque::from([from]), BTreeSet::new());
        while let Some(rank) = next.pop_front() {
            if to.contains(&rank) {
                break;
            }
            for on in self.of(world, rank).iter().filter(|on| seen_waits.insert(**on)) {
                for other in self.blockers(world, *on).filter(|other| *other != from) {
                    if let std::collections::btree_map::Entry::Vacant(entry) = before.entry(other) {
                        entry.insert((rank, *on));
                        next.push_back(other);
                    }
                }
            }
        }
        let Some(mut at) = to.iter().copied().find(|rank| before.contains_key(rank)) else { return Vec::new() };
        let mut chain = Vec::new();
        while let Some((rank, on)) = before.get(&at) {
            chain.push(self.wait(*rank, *on, at));
            at = *rank;
        }
        chain.reverse();
        // What is known without it: all wait for the named rank itself.
        if chain.len() < 2 || chain.len() > DETAILS_LIMIT { Vec::new() } else { chain }
    }

    /// A wait in words.
    pub fn wait(&self, rank: u32, on: On, other: u32) -> Wait {
        let (group, seq) = match on {
            On::Collective(team, seq) => (self.teams[team].title(), seq),
            On::Peer(_) | On::Store => ("", 0),
        };
        Wait { rank, on: other, group: group.to_owned(), seq }
    }
}

impl<'a> Team<'a> {
    /// Its description, or its name.
    pub fn title(&self) -> &'a str {
        if self.desc.is_empty() || self.desc == "undefined" { self.name } else { self.desc }
    }
}
