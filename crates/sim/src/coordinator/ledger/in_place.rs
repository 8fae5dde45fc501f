//! What must be true of changes in place: of the check at which workers stop, and of how those of a new world begin. Part of [`super`].

use super::Ledger;
use crate::worlds::{Violation, ensure_contract as ensure};
use elastic_rs::rendezvous::messages::message::{NEVER, NodeId, Placement, Resume, Round, Survival};

impl Ledger {
    /// Checks that all members get the same check, and that none of them has named it or a later one.
    pub(super) fn check_raise_at(&mut self, round: Round, check: u64) -> Result<(), Violation> {
        let counted = self.counted.get(&round).copied().unwrap_or_default();
        ensure(check > counted, || {
            format!("workers of round {round} are to stop at {check}, one has passed {counted}")
        })?;
        if check == NEVER {
            return Ok(());
        }
        let sent = *self.raised.entry(round).or_insert(check);
        ensure(sent == check, || format!("workers of round {round} are to stop at check {sent}, and at {check}"))
    }

    /// Checks that all members of a new world begin in the same way. If survivors go on, the source was in the last world, and nobody who
    /// was has a newer state of the same generation or of that world. If they are restarted, a member cannot change in place, or nobody has
    /// a state of the last world. [`Simulation::note_worlds`](super::super::simulation::Simulation) checks what workers really have.
    pub(super) fn check_resume(
        &self,
        incarnation: u32,
        placements: &[(NodeId, &Placement)],
        resumes: &[&Resume],
    ) -> Result<(), Violation> {
        let Some(first) = resumes.first() else { return Ok(()) };
        ensure(resumes.iter().all(|resume| resume == first), || {
            format!("members begin in different ways: {resumes:?}")
        })?;
        let Some(last) = self.last_ranks(incarnation) else { return Ok(()) };
        let formed = self.worlds.get(&(incarnation, self.highest));
        let (mut of_last, mut count, mut obstacle) = (Vec::new(), 0, resumes.len() < placements.len());
        for (node, placement) in placements {
            let reported = self.newest.get(node).and_then(|session| self.reported.get(session));
            let survival = reported.and_then(|reported| reported.workers()).map(|workers| &workers.survival);
            let returns = last.contains_key(node);
            // A member that was lost meanwhile, and has come back.
            let was_member = returns || formed.is_some_and(|sent| sent.members.contains(node));
            obstacle |= (returns && !matches!(survival, Some(Survival::Attended(_) | Survival::Saved)))
                || placement.workers.is_none();
            let Some(Survival::Attended(survivors)) = survival else { continue };
            let size = placement.local_world_size.unwrap_or(u32::MAX);
            // Survivors without a rank end.
            let placed = survivors.iter().filter(|survivor| survivor.local_rank < size);
            let first_rank = placement.workers.map_or(0, |workers| workers.first_rank);
            count += placed.clone().count();
            of_last
                .extend(placed.filter(|_| was_member).map(|it| (it.generation, it.commit, first_rank + it.local_rank)));
        }
        let fits = match first {
            Resume::Restart { reason } if reason.starts_with(NONE_HAS_THE_STATE) => count > 0,
            Resume::Restart { reason } => obstacle && count > 0 && !reason.is_empty(),
            Resume::Continue { source, sync, survivors: 0, .. } => count == 0 && *source == 0 && *sync,
            Resume::Continue { source, survivors, .. } => {
                let newest = of_last.iter().find(|(.., rank)| rank == source);
                let newer = |(generation, commit, rank): &(_, _, u32)| {
                    newest.is_some_and(|newest| *generation == newest.0 && (*commit, newest.2) > (newest.1, *rank))
                };
                !obstacle && newest.is_some() && !of_last.iter().any(newer) && *survivors as usize == count
            }
        };
        ensure(fits, || format!("{first:?} follows for members with {of_last:?} (obstacle: {obstacle})"))
    }
}

/// How the reason begins for which all workers are restarted because the state of the last world is lost.
pub(in crate::coordinator) const NONE_HAS_THE_STATE: &str = "no worker lives that has the state of";
