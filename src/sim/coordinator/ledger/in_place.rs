//! What must be true of changes in place: of the check at which workers stop, and of how those of a new world begin. Part of [`super`].

use super::Ledger;
use crate::rendezvous::protocol::message::{NEVER, NodeId, Placement, Resume, Round};
use crate::sim::worlds::{Violation, ensure_contract as ensure};

impl Ledger {
    /// Checks that all members are told the same check, and that none of them has named it or a later one.
    pub(super) fn check_raise_at(&mut self, round: Round, check: u64) -> Result<(), Violation> {
        let counted = self.counted.get(&round).copied().unwrap_or_default();
        ensure(check > counted, || {
            format!("workers of round {round} are to stop at {check}, one has passed {counted}")
        })?;
        if check == NEVER {
            return Ok(());
        }
        let told = *self.raised.entry(round).or_insert(check);
        ensure(told == check, || format!("workers of round {round} are to stop at check {told}, and at {check}"))
    }

    /// Checks that all members of a new world begin in the same way. If survivors go on, the source is one with the highest commit among
    /// those of the last world. If they are restarted, a member cannot change in place.
    pub(super) fn check_resume(
        &self,
        life: u32,
        places: &[(NodeId, &Placement)],
        resumes: &[&Resume],
    ) -> Result<(), Violation> {
        let Some(first) = resumes.first() else { return Ok(()) };
        ensure(resumes.iter().all(|resume| resume == first), || {
            format!("members begin in different ways: {resumes:?}")
        })?;
        let Some(last) = self.last_places(life) else { return Ok(()) };
        let (mut of_last, mut of_others, mut obstacle) = (Vec::new(), Vec::new(), resumes.len() < places.len());
        for (node, placement) in places {
            let said = self.newest.get(node).and_then(|session| self.said.get(session));
            let survivors = said.and_then(|said| said.survivors.as_ref());
            let returns = last.contains_key(node);
            obstacle |= (returns && survivors.is_none()) || placement.workers.is_none();
            let size = placement.local_world_size.unwrap_or(u32::MAX);
            // Survivors without a place end.
            let placed = survivors.into_iter().flatten().filter(|survivor| survivor.local_rank < size);
            let ranks = placed.map(|survivor| {
                let first_rank = placement.workers.map_or(0, |workers| workers.first_rank);
                (survivor.commit, first_rank + survivor.local_rank)
            });
            if returns { &mut of_last } else { &mut of_others }.extend(ranks);
        }
        let count = of_last.len() + of_others.len();
        let candidates = if of_last.is_empty() { of_others } else { of_last };
        let highest = candidates.iter().map(|(commit, _)| *commit).max();
        let fits = match first {
            Resume::Restart { reason } => obstacle && highest.is_some() && !reason.is_empty(),
            Resume::Continue { source, sync, survivors } => match highest {
                None => *source == 0 && *sync && *survivors == 0,
                Some(highest) => {
                    let best = candidates.iter().filter(|(commit, _)| *commit == highest).map(|(_, rank)| *rank);
                    !obstacle && best.min() == Some(*source) && *survivors as usize == count
                }
            },
        };
        ensure(fits, || format!("{first:?} follows for members with {candidates:?} (obstacle: {obstacle})"))
    }
}
