//! What an [`Ensemble`] shows of itself.

use std::collections::BTreeSet;
use std::time::Instant;

use super::super::command::Led;
use super::Ensemble;
use crate::rendezvous::messages::ids::NodeId;
use crate::rendezvous::quorum::bootstrap::Verdict;
use crate::rendezvous::quorum::record::Voters;

impl Ensemble {
    /// Why nobody leads, in words.
    pub fn why_nobody(&self, now: Instant) -> String {
        if self.replica.held().is_some() {
            let has_ended = self.replica.promised().is_none_or(|ballot| self.replica.is_dead(ballot.node));
            let why = if has_ended {
                "the process that led has ended, and its successor is not elected yet"
            } else {
                "the process that leads is not reached, and nobody takes over before its end is proven"
            };
            return why.to_owned();
        }
        if self.is_barred {
            return "this process has followed a leader that could not connect to its endpoint, so it does not know what was decided; let the \
                    listed nodes reach each other's ports"
                .to_owned();
        }
        let name = |place: &usize| self.hello.endpoints.get(*place).map_or("?", String::as_str);
        match self.bootstrap.clone().decide(now) {
            Verdict::Wait { silent, .. } if !silent.is_empty() => {
                let names: Vec<_> = silent.iter().map(name).collect();
                format!(
                    "of the endpoints in the list {} did not answer and did not refuse: a process there may lead already, so all must answer \
                     once before the job begins",
                    names.join(" and ")
                )
            }
            Verdict::Wait { first: Some(first), .. } => format!("the process at {} is about to lead", name(&first)),
            Verdict::Wait { .. } | Verdict::Lead | Verdict::Follow(_) => "nobody leads yet".to_owned(),
        }
    }

    /// Who leads, if this process does.
    pub fn led(&self) -> Led {
        let others =
            self.hello.endpoints.iter().zip(&self.peers).enumerate().filter(|(place, _)| *place != self.mine());
        let (there, missing): (Vec<_>, Vec<_>) = others.partition(|(_, (_, peer))| peer.leased_at.is_some());
        let there: Vec<_> = there.into_iter().filter_map(|(_, (name, peer))| Some((name, peer.process?))).collect();
        let live: BTreeSet<_> = there.iter().map(|(_, process)| *process).collect();
        let with_this = &live | &[self.hello.process].into();
        let successors = there.iter().filter(|(_, process)| self.is_elected(*process, &live));
        Led {
            leader: self.hello.endpoints.get(self.mine()).cloned().unwrap_or_default(),
            successors: successors.map(|(name, _)| (*name).clone()).collect(),
            missing: missing.into_iter().map(|(_, (name, _))| name.clone()).collect(),
            // A leader that hands over votes.
            may_hand_over: live.iter().any(|process| self.is_elected(*process, &with_this)),
        }
    }

    /// Whether a process would be elected after this one, which leads, if these vote. The record that this one is writing may have reached
    /// them or not: the votes must suffice by the voters of that record, and by those of the one that is chosen.
    fn is_elected(&self, process: NodeId, vote: &BTreeSet<NodeId>) -> bool {
        let elects = |voters: &Voters| {
            let is_left = voters.other_of_two(process) == Some(self.hello.process);
            voters.most(|voter| vote.contains(&voter)) || is_left
        };
        let (chosen, written) = (self.replica.chosen(), self.replica.held());
        chosen.is_some_and(|record| record.all_voters().contains(&process))
            && chosen.into_iter().chain(written).all(|record| record.sets().all(elects))
    }
}
