//! The views of one round, by rank, and the process groups as all ranks know them together.

use std::collections::{BTreeMap, HashMap};

use crate::hang::view::{Group, Signature, View, WORLD};

/// Most members of groups that are looked at, of all groups together. Groups that claim more count as unknown.
const MEMBERS_LIMIT: usize = 1 << 22;

/// Why a rank holds up whoever waits for it, whatever it has entered. The worst is the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Trouble {
    Ended,
    Absent,
    Stopped,
    Silent,
}

/// All ranks of which there are views.
pub(super) struct World<'a> {
    /// By rising rank, one of each.
    pub views: Vec<&'a View>,
    index: HashMap<u32, usize>,
    /// Of each view, its signatures as numbers that are the same for all.
    numbers: Vec<Vec<u32>>,
    /// Ranks that are in trouble, rising.
    pub troubled: Vec<u32>,
    /// Some rank has answered. Otherwise nobody was asked, so that silence says nothing.
    answers: bool,
}

/// A process group, as all ranks know it together.
#[derive(Default)]
pub(super) struct Team<'a> {
    pub name: &'a str,
    pub desc: &'a str,
    /// Ranks that know it and have answered, by index of their view.
    pub known: Vec<(usize, &'a Group)>,
    /// Which ranks have collectives pending, by the number of these. Indices of their views.
    pub pending: BTreeMap<u64, Vec<usize>>,
    /// A member has sent who the members are, or they are all ranks.
    is_known: bool,
    /// Members that are in trouble.
    troubled: Vec<u32>,
    /// The other members and the last collective that each has entered, by that.
    entered: Vec<(u64, u32)>,
}

impl<'a> World<'a> {
    pub fn new(views: &'a [View]) -> Self {
        let round = views.iter().map(|view| view.round).max().unwrap_or_default();
        let mut views: Vec<_> = views.iter().filter(|view| view.round == round).collect();
        views.sort_by_key(|view| view.rank);
        if views.windows(2).any(|pair| pair[0].rank == pair[1].rank) {
            // Two views of one rank: any choice that does not depend on their order will do.
            views.sort_by_cached_key(|view| (view.rank, view.encode()));
            views.dedup_by_key(|view| view.rank);
        }
        let index = views.iter().enumerate().map(|(at, view)| (view.rank, at)).collect();
        let mut all: HashMap<&Signature, u32> = HashMap::new();
        let mut number = |signature| {
            let next = all.len() as u32;
            *all.entry(signature).or_insert(next)
        };
        let numbers = views.iter().map(|view| view.signatures.iter().map(&mut number).collect()).collect();
        let answers = views.iter().any(|view| view.answered);
        let mut world = Self { views, index, numbers, troubled: Vec::new(), answers };
        world.troubled = world.ranks().filter(|rank| world.trouble(*rank).is_some()).collect();
        world
    }

    pub fn ranks(&self) -> impl Iterator<Item = u32> + '_ {
        self.views.iter().map(|view| view.rank)
    }

    pub fn view(&self, rank: u32) -> Option<&'a View> {
        self.at(rank).map(|at| self.views[at])
    }

    /// The index of a rank's view.
    pub fn at(&self, rank: u32) -> Option<usize> {
        self.index.get(&rank).copied()
    }

    pub fn trouble(&self, rank: u32) -> Option<Trouble> {
        match self.view(rank) {
            None => Some(Trouble::Absent),
            Some(view) if view.has_ended() => Some(Trouble::Ended),
            Some(view) if view.is_stopped() => Some(Trouble::Stopped),
            Some(view) if view.is_silent() && self.answers => Some(Trouble::Silent),
            Some(_) => None,
        }
    }

    /// The number of a signature, the same in all views. `None`: the view does not have it.
    pub fn number(&self, at: usize, signature: u16) -> Option<u32> {
        self.numbers[at].get(usize::from(signature)).copied()
    }

    /// All process groups, by name. The members of those in which ranks wait are worked out.
    pub fn teams(&self) -> Vec<Team<'a>> {
        let mut teams: Vec<Team<'a>> = Vec::new();
        let mut index: HashMap<&str, usize> = HashMap::new();
        for (at, view) in self.views.iter().enumerate().filter(|(_, view)| self.trouble(view.rank).is_none()) {
            for group in &view.groups {
                let team = *index.entry(&group.name).or_insert_with(|| {
                    teams.push(Team { name: &group.name, ..Team::default() });
                    teams.len() - 1
                });
                teams[team].add(at, group);
            }
        }
        teams.sort_by_key(|team| team.name);
        let mut left = MEMBERS_LIMIT;
        for team in teams.iter_mut().filter(|team| !team.pending.is_empty()) {
            team.find_members(self, &mut left);
        }
        teams
    }
}

impl<'a> Team<'a> {
    fn add(&mut self, at: usize, group: &'a Group) {
        if self.known.last().is_some_and(|(last, _)| *last == at) {
            return; // a second group with this name
        }
        self.known.push((at, group));
        if self.desc.is_empty() {
            self.desc = &group.desc;
        }
        for entry in &group.pending {
            let waiters = self.pending.entry(entry.seq).or_default();
            if waiters.last() != Some(&at) {
                waiters.push(at);
            }
        }
    }

    fn find_members(&mut self, world: &World<'a>, left: &mut usize) {
        let mut claims = HashMap::new();
        for (at, group) in &self.known {
            let rank = world.views[*at].rank;
            if let Some(ranks) = group.ranks.as_ref().filter(|ranks| !ranks.is_empty()) {
                let (votes, first) = claims.entry(ranks).or_insert((0, rank));
                (*votes, *first) = (*votes + 1, rank.min(*first));
            }
        }
        // Members agree. If one lies, most do not.
        let known = claims.into_iter().max_by_key(|(_, (votes, first))| (*votes, std::cmp::Reverse(*first)));
        let known = known.map(|(ranks, _)| ranks).filter(|ranks| ranks.len() <= *left);
        self.is_known = known.is_some() || self.name == WORLD;
        let members: Vec<u32> = match known {
            Some(ranks) => ranks.iter().collect(),
            None if self.name == WORLD => world.ranks().collect(),
            None => self.users(world).collect(),
        };
        *left = left.saturating_sub(members.len());
        for rank in members {
            match world.trouble(rank) {
                Some(_) => self.troubled.push(rank),
                None => self.entered.push((self.last(world, rank), rank)),
            }
        }
        self.troubled.sort_unstable();
        self.troubled.dedup();
        self.entered.sort_unstable();
        self.entered.dedup();
    }

    /// Ranks that have entered a collective of it.
    fn users(&self, world: &World<'a>) -> impl Iterator<Item = u32> {
        self.known.iter().filter(|(_, group)| last(group) > 0).map(|(at, _)| world.views[*at].rank)
    }

    /// The group as this rank knows it.
    pub fn of(&self, world: &World<'a>, rank: u32) -> Option<&'a Group> {
        let at = world.at(rank)?;
        self.known.binary_search_by_key(&at, |(at, _)| *at).ok().map(|found| self.known[found].1)
    }

    /// The number of the last collective that a rank has entered.
    pub fn last(&self, world: &World<'a>, rank: u32) -> u64 {
        self.of(world, rank).map_or(0, last)
    }

    /// Whom those wait for that have entered its collective of this number: members in trouble, then those that have not entered it.
    pub fn blockers<'t>(&'t self, world: &'t World<'a>, seq: u64) -> impl Iterator<Item = u32> + 't {
        let behind = self.entered.partition_point(|(last, _)| *last < seq);
        // Whose group it is was not sent: any rank that does not answer may belong to it.
        let maybe = if !self.is_known && self.troubled.is_empty() && behind == 0 { &world.troubled[..] } else { &[] };
        let behind = self.entered[..behind].iter().map(|(_, rank)| *rank);
        self.troubled.iter().copied().chain(behind).chain(maybe.iter().copied())
    }

    /// Whether it has this member.
    pub fn has(&self, rank: u32) -> bool {
        self.troubled.binary_search(&rank).is_ok() || self.entered.iter().any(|(_, member)| *member == rank)
    }

    /// The number of the first pending collective that a rank has not entered, if ranks wait for it.
    pub fn awaits(&self, world: &World<'a>, rank: u32) -> Option<u64> {
        let last = self.last(world, rank);
        self.pending.range(last.saturating_add(1)..).next().map(|(seq, _)| *seq)
    }

    /// The signature of a collective in the first view that has it.
    pub fn signature(&self, world: &World<'a>, seq: u64) -> Option<&'a Signature> {
        self.known.iter().find_map(|(at, group)| {
            let entry = group.pending.iter().chain(&group.tail).find(|entry| entry.seq == seq)?;
            world.views[*at].signature(entry)
        })
    }
}

/// The number of the last collective that is known to be entered.
fn last(group: &Group) -> u64 {
    group.pending.iter().chain(&group.tail).map(|entry| entry.seq).fold(group.last, u64::max)
}
