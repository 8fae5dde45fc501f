//! How the workers of a new world begin: whether survivors go on, and with whose state. Pure functions.

use std::cmp::Reverse;

use crate::rendezvous::protocol::message::{JoinWorkers, Resume, Survivor};

/// A member of the next world.
#[derive(Clone, Debug)]
pub(super) struct Comer {
    /// Its name in messages.
    pub label: String,
    /// Whether it was a member of the last world.
    pub returning: bool,
    /// Whether it understands changes in place.
    pub capable: bool,
    /// The check at which its workers have stopped. `None`: they have gone back to their commits.
    pub check: Option<u64>,
    /// Global rank of its first worker, if known.
    pub first_rank: Option<u32>,
    /// Its workers in the next world, if it has told them.
    pub workers: Option<JoinWorkers>,
}

impl Comer {
    fn survivors(&self) -> &[Survivor] {
        self.workers.as_ref().and_then(|workers| workers.survivors.as_deref()).unwrap_or_default()
    }

    /// The survivors, by global rank, with their last commits.
    fn commits(&self) -> impl Iterator<Item = (u32, Option<u64>)> {
        let first = self.first_rank.unwrap_or_default();
        self.survivors().iter().map(move |survivor| (first.saturating_add(survivor.local_rank), survivor.commit))
    }

    /// Why workers of other nodes cannot go on beside this one's.
    fn obstacle(&self) -> Option<String> {
        let label = &self.label;
        match &self.workers {
            _ if !self.capable => Some(format!("{label} has a release or an agent that cannot change in place")),
            None => Some(format!("the agent of {label} does not tell its number of workers")),
            Some(workers) if self.returning && workers.survivors.is_none() => Some(format!(
                "{label} had to stop its workers, which cannot change in place (they do not use `elastic_rs.elastic`)"
            )),
            Some(_) => None,
        }
    }

    /// Whether all its workers live, have stopped at this check, and have this commit.
    fn is_whole(&self, check: Option<u64>, commit: Option<u64>) -> bool {
        let all = self.workers.as_ref().is_some_and(JoinWorkers::have_all_survived);
        let alike = self.survivors().iter().all(|survivor| survivor.commit == commit);
        self.returning && self.check == check && all && alike
    }
}

/// How the workers of a world of these members begin.
///
/// - Nobody has survived: all workers are new. They take the state of rank 0.
/// - A member cannot change in place, or is back without a list of survivors: all workers are restarted.
/// - Otherwise survivors go on. The source is the lowest rank with the highest commit. Survivors of the last world take precedence: those
///   of a node that missed it have an older state, whatever their commit.
/// - States are equal only if no worker is new, all have stopped at one check, and their commits are equal. Workers that were told of a
///   failure have gone back to their commit, and those that had stopped at the check before have not.
pub(super) fn resume(members: &[Comer]) -> Resume {
    const ALL_NEW: Resume = Resume::Continue { source: 0, sync: true, survivors: 0 };
    let best = |returning: bool| {
        let commits = members.iter().filter(|member| member.returning == returning).flat_map(Comer::commits);
        commits.max_by_key(|(rank, commit)| (*commit, Reverse(*rank)))
    };
    let Some((source, commit)) = best(true).or_else(|| best(false)) else { return ALL_NEW };
    if let Some(reason) = members.iter().find_map(Comer::obstacle) {
        return Resume::Restart { reason };
    }
    let check = members.first().and_then(|member| member.check);
    let alike = members.iter().all(|member| member.is_whole(check, commit));
    let survivors: usize = members.iter().map(|member| member.survivors().len()).sum();
    Resume::Continue {
        source,
        sync: !(alike && check.is_some() && commit.is_some()),
        survivors: u32::try_from(survivors).unwrap_or(u32::MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A node with two workers.
    fn workers(survivors: Option<&[(u32, Option<u64>)]>) -> JoinWorkers {
        let named = |list: &[(u32, Option<u64>)]| {
            list.iter().map(|(local_rank, commit)| Survivor { local_rank: *local_rank, commit: *commit }).collect()
        };
        JoinWorkers { role: "trainer".into(), local_world_size: 2, survivors: survivors.map(named) }
    }

    fn member(rank: u32, workers: &JoinWorkers) -> Comer {
        Comer {
            label: format!("node{rank}"),
            returning: true,
            capable: true,
            check: Some(100),
            first_rank: Some(2 * rank),
            workers: Some(workers.clone()),
        }
    }

    fn goes_on(source: u32, sync: bool, survivors: u32) -> Resume {
        Resume::Continue { source, sync, survivors }
    }

    const BOTH: Option<&[(u32, Option<u64>)]> = Some(&[(0, Some(7)), (1, Some(7))]);

    #[test]
    fn a_first_round_begins_with_the_state_of_rank_0() {
        let new = workers(None);
        let newcomer = |rank| Comer { returning: false, check: None, ..member(rank, &new) };
        assert_eq!(resume(&[newcomer(0), newcomer(1)]), goes_on(0, true, 0));
        // Nobody has survived, so nobody has to be restarted either.
        assert_eq!(resume(&[member(0, &new), newcomer(1)]), goes_on(0, true, 0));
        let none = workers(Some(&[]));
        assert_eq!(resume(&[member(0, &none), member(1, &none)]), goes_on(0, true, 0));
    }

    #[test]
    fn states_are_equal_only_after_a_common_check_without_a_new_worker() {
        let whole = workers(BOTH);
        assert_eq!(resume(&[member(0, &whole), member(1, &whole)]), goes_on(0, false, 4));
        let restored = |rank| Comer { check: None, ..member(rank, &whole) };
        assert_eq!(resume(&[member(0, &whole), restored(1)]), goes_on(0, true, 4));
        assert_eq!(resume(&[restored(0), restored(1)]), goes_on(0, true, 4));
        let elsewhere = Comer { check: Some(101), ..member(1, &whole) };
        assert_eq!(resume(&[member(0, &whole), elsewhere]), goes_on(0, true, 4));
        let one_lost = workers(Some(&[(1, Some(7))]));
        assert_eq!(resume(&[member(0, &whole), member(1, &one_lost)]), goes_on(0, true, 3));
        let new = workers(None);
        let newcomer = Comer { returning: false, check: None, ..member(1, &new) };
        assert_eq!(resume(&[member(0, &whole), newcomer]), goes_on(0, true, 2));
        let never = workers(Some(&[(0, None), (1, None)]));
        assert_eq!(resume(&[member(0, &never), member(1, &never)]), goes_on(0, true, 4));
    }

    #[test]
    fn the_source_is_the_lowest_rank_with_the_highest_commit() {
        let (behind, ahead) = (workers(BOTH), workers(Some(&[(0, Some(7)), (1, Some(8))])));
        assert_eq!(resume(&[member(0, &behind), member(1, &ahead), member(2, &ahead)]), goes_on(3, true, 6));
        let (never, once) = (workers(Some(&[(0, None)])), workers(Some(&[(1, Some(0))])));
        assert_eq!(resume(&[member(0, &never), member(1, &once)]), goes_on(3, true, 2));
        assert_eq!(resume(&[member(0, &never), member(1, &never)]), goes_on(0, true, 2));
    }

    #[test]
    fn survivors_of_the_last_world_come_before_those_of_a_node_that_missed_it() {
        let (last, older) = (workers(Some(&[(1, Some(3))])), workers(BOTH));
        let missed = Comer { returning: false, check: None, ..member(0, &older) };
        assert_eq!(resume(&[missed.clone(), member(1, &last)]), goes_on(3, true, 3));
        let none = workers(Some(&[]));
        assert_eq!(resume(&[missed, member(1, &none)]), goes_on(0, true, 2));
    }

    #[test]
    fn one_member_that_cannot_change_in_place_restarts_all() {
        let (whole, stopped) = (workers(BOTH), workers(None));
        let reason = |members: &[Comer]| match resume(members) {
            Resume::Restart { reason } => reason,
            other => panic!("{other:?}"),
        };
        let text = reason(&[member(0, &whole), member(1, &stopped)]);
        assert!(text.starts_with("node1 had to stop its workers") && text.contains("`elastic_rs.elastic`"), "{text}");
        let older = Comer { capable: false, returning: false, ..member(1, &stopped) };
        assert!(reason(&[member(0, &whole), older]).starts_with("node1 has a release or an agent"));
        let untold = Comer { workers: None, ..member(1, &stopped) };
        assert!(reason(&[member(0, &whole), untold]).starts_with("the agent of node1 does not tell"));
    }
}
