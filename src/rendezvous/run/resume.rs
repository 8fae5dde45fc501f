//! How the workers of a new world begin: whether survivors go on, and with whose state. Pure functions.
//!
//! A survivor names the generation in which it last had the job's state, and the number of its last commit. It has the state of the last
//! world if it had it in that world, or in the generation with which that world began: a world makes no step before all its workers are
//! synchronised, so a worker that is not has lost nothing (`docs/decisions/0097-a-state-has-a-generation.md`).

use std::cmp::Reverse;
use std::collections::BTreeSet;

use super::parts::Parts;
use super::round::Assignment;
use crate::rendezvous::messages::message::{Generation, JoinWorkers, Resume, Survival, Survivor, WorkerRanks};

/// A member of the next world.
#[derive(Clone, Debug)]
struct NextMember {
    /// Its name in messages.
    pub label: String,
    /// Whether it was a member of the last world, also if it was lost meanwhile. Its state may be the job's.
    pub was_member: bool,
    /// Whether it was a member of the last world, and has not been lost since. Only such a node has had to stop its workers for this one.
    pub returning: bool,
    /// Whether its workers may survive a change.
    pub capable: bool,
    /// The check at which its workers have stopped. `None`: they have gone back to their commits.
    pub check: Option<u64>,
    /// Global rank of its first worker, if known.
    pub first_rank: Option<u32>,
    /// Its workers in the next world, if it has reported them.
    pub workers: Option<JoinWorkers>,
}

/// The last world that was formed.
#[derive(Clone, Copy, Debug)]
struct Last {
    /// That world, as the generation of a state.
    pub generation: Generation,
    /// The generation of the state with which its workers began.
    pub began_with: Generation,
}

/// How new a state is.
type Age = (Generation, Option<u64>);

impl Last {
    /// How new a survivor's state is, if it is the state of this world.
    fn age_of(&self, survivor: &Survivor) -> Option<Age> {
        let is_state = |generation: &Generation| [self.generation, self.began_with].contains(generation);
        Some((survivor.generation.filter(is_state)?, survivor.commit))
    }
}

impl NextMember {
    fn survivors(&self) -> &[Survivor] {
        self.workers.as_ref().map(JoinWorkers::survivors).unwrap_or_default()
    }

    /// The survivors that have the state of the last world: how new it is, and their global ranks.
    fn states(&self, last: Option<Last>) -> impl Iterator<Item = (Age, u32)> {
        let last = last.filter(|_| self.was_member);
        let first = self.first_rank.unwrap_or_default();
        let survivors = self.survivors().iter();
        survivors.filter_map(move |it| Some((last?.age_of(it)?, first.saturating_add(it.local_rank))))
    }

    /// Why workers of other nodes cannot go on beside this one's.
    fn obstacle(&self) -> Option<String> {
        let label = &self.label;
        let had_to_stop = |why| format!("{label} had to stop its workers: {why}");
        let workers = match &self.workers {
            _ if !self.capable => return Some(format!("{label} has an agent that does not change in place")),
            None => return Some(format!("the agent of {label} does not report its number of workers")),
            Some(workers) => workers,
        };
        match &workers.survival {
            Survival::NeverAttended if self.returning => Some(had_to_stop(
                "they cannot change in place, since none of them has used `elastic_rs.elastic` so far",
            )),
            Survival::NotYetAttended if self.returning => {
                Some(had_to_stop("some of them had not come to `elastic_rs.elastic` yet"))
            }
            Survival::New if self.returning => Some(format!("{label} does not report what became of its workers")),
            _ => None,
        }
    }

    /// Whether all its workers live, have stopped at this check, and have this state.
    fn is_whole(&self, check: Option<u64>, (generation, commit): Age) -> bool {
        let all = self.workers.as_ref().is_some_and(JoinWorkers::have_all_survived);
        let has_it = |survivor: &Survivor| (survivor.generation, survivor.commit) == (Some(generation), commit);
        self.returning && self.check == check && all && self.survivors().iter().all(has_it)
    }
}

/// How the workers of a world of these members begin. `ranks` has those of their workers, if known; `next` is that world.
pub(super) fn resume_of(
    parts: Parts,
    members: &[Assignment],
    ranks: Option<&[WorkerRanks]>,
    next: Generation,
) -> Resume {
    let world = parts.current.world();
    let last_members: BTreeSet<_> = world.iter().flat_map(|world| world.members.values()).collect();
    let next_member = |(rank, member): (usize, &Assignment)| {
        let node = parts.roster.get(member.id)?;
        Some(NextMember {
            label: node.label(),
            was_member: last_members.contains(&member.id),
            returning: parts.roster.last_rank(node).is_some(),
            capable: node.in_place,
            check: parts.in_place.stopped_at(member.id),
            first_rank: ranks.and_then(|ranks| ranks.get(rank)).map(|ranks| ranks.first_rank),
            workers: member.workers.clone(),
        })
    };
    let members: Vec<_> = members.iter().enumerate().filter_map(next_member).collect();
    let last = world.map(|world| Last {
        generation: Generation { round: parts.round(), world: world.id },
        began_with: world.began_with,
    });
    resume(&members, last, next)
}

/// How the workers of the world `next` begin, which has these members.
///
/// - Nobody has survived: all workers are new. They take the state of rank 0.
/// - A member of the last world cannot change in place: all workers are restarted.
/// - Nobody who has survived has the state of the last world: all workers are restarted, and begin from the checkpoint. A node that missed
///   the last world has an older state, whatever its commit.
/// - Otherwise survivors go on. The source is the lowest rank with the newest state.
/// - States are equal only if no worker is new, all have stopped at one check, and their states are equally new. Workers that were notified of
///   a failure have gone back to their commit, and those that had stopped at the check before have not.
fn resume(members: &[NextMember], last: Option<Last>, next: Generation) -> Resume {
    let survivors: usize = members.iter().map(|member| member.survivors().len()).sum();
    if survivors == 0 {
        return Resume::Continue { source: 0, sync: true, survivors: 0, generation: next };
    }
    if let Some(reason) = members.iter().find_map(NextMember::obstacle) {
        return Resume::Restart { reason };
    }
    let states = members.iter().flat_map(|member| member.states(last));
    let Some((age, source)) = states.max_by_key(|(age, rank)| (*age, Reverse(*rank))) else {
        let of = last.map_or("an earlier round".to_owned(), |last| format!("round {}", last.generation.round));
        let reason =
            format!("no worker lives that has the state of {of}, the last one, so all begin from the checkpoint");
        return Resume::Restart { reason };
    };
    let check = members.first().and_then(|member| member.check);
    let alike = members.iter().all(|member| member.is_whole(check, age));
    Resume::Continue {
        source,
        sync: !(alike && check.is_some() && age.1.is_some()),
        survivors: u32::try_from(survivors).unwrap_or(u32::MAX),
        generation: age.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::messages::message::Round;

    fn generation(round: u64) -> Generation {
        Generation { round: Round(round), world: 100 + round }
    }

    /// Round 5 is the last one. It began with the state of round 3, which nobody had in round 4.
    const LAST: Last = Last {
        generation: Generation { round: Round(5), world: 105 },
        began_with: Generation { round: Round(3), world: 103 },
    };

    /// A worker's local rank, the generation of its state, and its commit.
    type Of = (u32, Option<u64>, Option<u64>);

    /// A node with two workers.
    fn survived(list: &[Of]) -> JoinWorkers {
        let survivor = |(local_rank, round, commit): &Of| Survivor {
            local_rank: *local_rank,
            generation: round.map(generation),
            commit: *commit,
        };
        with(Survival::Attended(list.iter().map(survivor).collect()))
    }

    fn with(survival: Survival) -> JoinWorkers {
        JoinWorkers { survival, ..JoinWorkers::new("trainer", 2) }
    }

    /// Both workers have this state.
    fn both(round: u64, commit: u64) -> JoinWorkers {
        survived(&[(0, Some(round), Some(commit)), (1, Some(round), Some(commit))])
    }

    fn member(rank: u32, workers: &JoinWorkers) -> NextMember {
        NextMember {
            label: format!("node{rank}"),
            was_member: true,
            returning: true,
            capable: true,
            check: Some(100),
            first_rank: Some(2 * rank),
            workers: Some(workers.clone()),
        }
    }

    /// A member of the last world that was lost, and has come back.
    fn lost(rank: u32, workers: &JoinWorkers) -> NextMember {
        NextMember { returning: false, check: None, ..member(rank, workers) }
    }

    /// A node that was not in the last world.
    fn missed(rank: u32, workers: &JoinWorkers) -> NextMember {
        NextMember { was_member: false, ..lost(rank, workers) }
    }

    fn decide(members: &[NextMember]) -> Resume {
        resume(members, Some(LAST), generation(6))
    }

    fn goes_on(source: u32, sync: bool, survivors: u32, of: u64) -> Resume {
        Resume::Continue { source, sync, survivors, generation: generation(of) }
    }

    fn reason(members: &[NextMember]) -> String {
        match decide(members) {
            Resume::Restart { reason } => reason,
            other => panic!("{other:?}"),
        }
    }

    const LOST: &str = "no worker lives that has the state of round 5, the last one, so all begin from the checkpoint";

    #[test]
    fn a_world_of_new_workers_begins_with_the_state_of_rank_0() {
        let (new, none) = (with(Survival::New), survived(&[]));
        assert_eq!(resume(&[missed(0, &new), missed(1, &new)], None, generation(1)), goes_on(0, true, 0, 1));
        for workers in [&new, &none, &with(Survival::NeverAttended), &with(Survival::NotYetAttended)] {
            // Nobody has survived, so nobody has to be restarted either.
            assert_eq!(decide(&[member(0, workers), missed(1, &new)]), goes_on(0, true, 0, 6));
        }
    }

    #[test]
    fn states_are_equal_only_after_a_common_check_without_a_new_worker() {
        let whole = both(5, 7);
        assert_eq!(decide(&[member(0, &whole), member(1, &whole)]), goes_on(0, false, 4, 5));
        let restored = |rank| NextMember { check: None, ..member(rank, &whole) };
        assert_eq!(decide(&[member(0, &whole), restored(1)]), goes_on(0, true, 4, 5));
        assert_eq!(decide(&[restored(0), restored(1)]), goes_on(0, true, 4, 5));
        let elsewhere = NextMember { check: Some(101), ..member(1, &whole) };
        assert_eq!(decide(&[member(0, &whole), elsewhere]), goes_on(0, true, 4, 5));
        let one_lost = survived(&[(1, Some(5), Some(7))]);
        assert_eq!(decide(&[member(0, &whole), member(1, &one_lost)]), goes_on(0, true, 3, 5));
        assert_eq!(decide(&[member(0, &whole), missed(1, &with(Survival::New))]), goes_on(0, true, 2, 5));
        assert_eq!(decide(&[member(0, &whole), member(1, &both(3, 7))]), goes_on(0, true, 4, 5));
        let never = survived(&[(0, Some(5), None), (1, Some(5), None)]);
        assert_eq!(decide(&[member(0, &never), member(1, &never)]), goes_on(0, true, 4, 5));
    }

    #[test]
    fn the_source_is_the_lowest_rank_with_the_newest_generation_and_then_the_highest_commit() {
        let (behind, ahead) = (both(5, 7), survived(&[(0, Some(5), Some(7)), (1, Some(5), Some(8))]));
        assert_eq!(decide(&[member(0, &behind), member(1, &ahead), member(2, &ahead)]), goes_on(3, true, 6, 5));
        // In the last world only some were synchronised. Numbers of different generations have nothing to do with each other.
        assert_eq!(decide(&[member(0, &both(3, 900)), member(1, &both(5, 2))]), goes_on(2, true, 4, 5));
        assert_eq!(decide(&[member(0, &both(3, 8)), member(1, &both(3, 9))]), goes_on(2, true, 4, 3));
        let (unsynced, once) = (survived(&[(0, Some(5), None)]), survived(&[(1, Some(5), Some(0))]));
        assert_eq!(decide(&[member(0, &unsynced), member(1, &once)]), goes_on(3, true, 2, 5));
    }

    /// A world that continues none, and that fails before anybody is synchronised: all have the state with which the script begins.
    #[test]
    fn workers_of_a_first_world_go_on_before_it_is_synchronised() {
        let first = Last { generation: generation(5), began_with: generation(5) };
        let begun = survived(&[(0, Some(5), None), (1, Some(5), None)]);
        let members = [member(0, &begun), member(1, &survived(&[]))];
        assert_eq!(resume(&members, Some(first), generation(6)), goes_on(0, true, 2, 5));
    }

    #[test]
    fn a_node_that_missed_the_last_world_is_never_the_source() {
        let (last, none) = (survived(&[(1, Some(5), Some(3))]), survived(&[]));
        for older in [both(5, 900), both(3, 900), both(1, 900), survived(&[(0, None, None)])] {
            let survivors = 1 + older.survivors().len() as u32;
            assert_eq!(decide(&[missed(0, &older), member(1, &last)]), goes_on(3, true, survivors, 5));
            // Alone with new workers it is restarted, for they begin from the checkpoint.
            assert_eq!(reason(&[missed(0, &older), member(1, &none)]), LOST);
        }
    }

    /// Its lease ended before it was sent its rank assignment, for example, and nothing stops its workers (`on_partition=continue`).
    #[test]
    fn a_member_that_was_lost_meanwhile_has_the_state_of_the_last_world() {
        let none = survived(&[]);
        for state in [both(5, 7), both(3, 900)] {
            let of = state.survivors()[0].generation.map(|of| of.round.0).unwrap_or_default();
            assert_eq!(decide(&[missed(0, &with(Survival::New)), lost(1, &state)]), goes_on(2, true, 2, of));
            assert_eq!(decide(&[member(0, &none), lost(1, &state)]), goes_on(2, true, 2, of));
        }
        // Those that have gone on are ahead of it.
        assert_eq!(decide(&[lost(0, &both(3, 900)), member(1, &both(5, 2))]), goes_on(2, true, 4, 5));
        // It restarts nobody, as it has not stopped its workers for this world.
        for survival in [Survival::NeverAttended, Survival::NotYetAttended, Survival::New] {
            assert_eq!(decide(&[member(0, &both(5, 7)), lost(1, &with(survival))]), goes_on(0, true, 2, 5));
        }
    }

    /// It has come back into the last world, which has failed before it was synchronised.
    #[test]
    fn a_state_that_is_not_that_of_the_last_world_is_never_the_source() {
        for older in [both(1, 900), both(4, 900), survived(&[(0, None, Some(9)), (1, None, None)])] {
            assert_eq!(decide(&[member(0, &older), member(1, &both(5, 2))]), goes_on(2, true, 4, 5));
            assert_eq!(decide(&[member(0, &older), member(1, &both(3, 2))]), goes_on(2, true, 4, 3));
            assert_eq!(reason(&[member(0, &older), member(1, &survived(&[]))]), LOST);
        }
        // The same round number of another world.
        let other = Generation { world: 7, ..generation(5) };
        let mut workers = both(5, 900);
        if let Survival::Attended(survivors) = &mut workers.survival {
            survivors.iter_mut().for_each(|survivor| survivor.generation = Some(other));
        }
        assert_eq!(decide(&[member(0, &workers), member(1, &both(3, 2))]), goes_on(2, true, 4, 3));
    }

    #[test]
    fn a_coordinator_that_knows_of_no_world_trusts_no_state() {
        let Resume::Restart { reason } = resume(&[missed(0, &both(5, 900))], None, generation(1)) else { panic!() };
        assert!(reason.starts_with("no worker lives that has the state of an earlier round"), "{reason}");
    }

    /// Each restart of all workers has its own reason.
    #[test]
    fn a_member_that_cannot_change_in_place_restarts_all() {
        let (whole, never) = (both(5, 7), with(Survival::NeverAttended));
        for (member1, why) in [
            (
                member(1, &never),
                "node1 had to stop its workers: they cannot change in place, since none of them has used",
            ),
            (member(1, &with(Survival::NotYetAttended)), "node1 had to stop its workers: some of them had not come to"),
            (member(1, &with(Survival::New)), "node1 does not report what became of its workers"),
            (NextMember { capable: false, ..missed(1, &never) }, "node1 has an agent that does not change in place"),
            (
                NextMember { workers: None, ..member(1, &never) },
                "the agent of node1 does not report its number of workers",
            ),
        ] {
            let text = reason(&[member(0, &whole), member1]);
            assert!(text.starts_with(why), "{text}");
        }
    }

    /// A node that was cut off for its whole lease, for example.
    #[test]
    fn a_node_none_of_whose_workers_has_survived_restarts_nobody() {
        assert_eq!(decide(&[member(0, &both(5, 7)), member(1, &survived(&[]))]), goes_on(0, true, 2, 5));
        for workers in [with(Survival::NeverAttended), with(Survival::NotYetAttended), with(Survival::New)] {
            assert_eq!(decide(&[member(0, &both(5, 7)), missed(1, &workers)]), goes_on(0, true, 2, 5));
        }
    }
}
