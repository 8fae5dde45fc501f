//! What must be true of a job over one cell: judged from what the cell held and what agents hold. Part of [`super`].

use super::super::shared::{Content, check_alone};
use super::super::worlds::{Violation, ensure_contract as ensure};
use super::Job;
use elastic_rs::rendezvous::cell::blob::Blob;
use elastic_rs::rendezvous::messages::message::Round;

impl Job {
    /// Judge a state that is about to be written.
    pub(super) fn check_write(&mut self, bytes: &[u8]) -> Result<(), Violation> {
        let decode = |bytes: &[u8]| Blob::decode(bytes).map_err(|error| Violation::contract(error.to_string()));
        let after = decode(bytes)?;
        let before = self.cell.as_ref().map(Content::bytes).map(decode).transpose()?;
        let (last, verdict, world) = match &before {
            Some(before) => (before.round(), before.closed(), before.world()),
            None => (Round(0), None, None),
        };
        let revision = before.as_ref().map_or(0, Blob::revision);
        ensure(after.revision() == revision + 1, || "a revision is skipped".into())?;
        ensure(verdict.is_none() || verdict == after.closed(), || "a verdict is changed".into())?;
        let round = after.round();
        if round == last {
            return ensure(after.world() == world, || format!("the world of round {round} is changed"));
        }
        ensure(verdict.is_none(), || format!("round {round} completes in a closed rendezvous"))?;
        let (_, active) = after.nodes();
        let (members, master) = after.world().ok_or_else(|| Violation::contract("a round without a world".into()))?;
        ensure(round == last.next(), || format!("round {last} is followed by {round}"))?;
        let (min, max) = (self.settings.min_nodes as usize, self.settings.max_nodes as usize);
        ensure((min..=max).contains(&members.len()), || format!("round {round} has {} nodes", members.len()))?;
        let mut sorted = members.clone();
        sorted.sort_unstable();
        sorted.dedup();
        // The node that writes may have given up its join after a message of its own that closed the round. The round is
        // interrupted then, as with a coordinator.
        let (there, gone) = (sorted.iter().filter(|node| active.contains(node)).count(), sorted.len() - active.len());
        ensure(sorted.len() == members.len() && there == active.len() && gone <= 1, || {
            format!("round {round} names others than it has")
        })?;
        check_alone(&mut self.hosts, &self.engine, round, true)?;
        self.worlds.insert(round, (members, master));
        self.report.rounds += 1;
        Ok(())
    }

    /// Judge a place that a node was given.
    pub(super) fn check_placement(&self, host: usize) -> Result<(), Violation> {
        let Some(placement) = self.hosts[host].running() else { return Ok(()) };
        let world = self.worlds.get(&placement.round);
        let holds = world.is_some_and(|(members, master)| {
            members.len() == placement.world_size as usize
                && *master == (placement.master_addr.clone(), placement.master_port)
                && (placement.rank as usize) < members.len()
        });
        ensure(holds, || format!("host {host} holds a place nobody gave it: {placement:?}"))?;
        let port = placement.master_port;
        let open = if placement.rank == 0 { port == self.hosts[host].store } else { port % 1000 > 0 };
        ensure(open, || format!("host {host} holds a place whose store is not open: {placement:?}"))
    }
}
