//! Standbys: processes that have run the workers' program up to its world, and wait there. Part of [`super`].
//!
//! One of them takes the place of a worker that has failed, so that nothing has to be started, imported and made
//! (`docs/decisions/0140-a-standby-waits-where-a-worker-gets-its-world.md`). They are possible if workers can change in place and let the
//! library make the process group, as those that are started ahead ([`super::replace`]). One is known by its slot ([`crate::agent::slots`]).

use std::collections::BTreeMap;

use super::worker_states::WorkerState;
use super::{AgentMachine, Phase, Way};
use crate::agent::command::Command;
use crate::rendezvous::messages::message::Placement;

/// The standbys of a node.
#[derive(Clone, Debug, Default)]
pub(super) struct Standbys {
    /// By slot.
    of: BTreeMap<u32, Standby>,
    /// A start was asked for, and has not been answered.
    asked: bool,
    /// No more are started, for a reason that was said.
    over: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Standby {
    /// It is connected, and waits for a place.
    waits: bool,
    /// It has come so far.
    has_waited: bool,
}

impl Standbys {
    /// All of them are stopped.
    pub(super) fn forget(&mut self) {
        self.of.clear();
        self.asked = false;
    }

    /// A start that was asked for is not wanted any more.
    pub(super) fn cancelled(&mut self) {
        self.asked = false;
    }

    /// One that waits. One that is on its way may not get there.
    fn take(&mut self) -> Option<u32> {
        let slot = self.of.iter().find(|(_, standby)| standby.waits).map(|(slot, _)| *slot)?;
        self.of.remove(&slot).map(|_| slot)
    }
}

impl AgentMachine {
    /// Have a missing standby started once the workers of the round are in their world, which it would hold up.
    pub(super) fn start_standbys(&mut self) {
        let wanted = self.policy.standbys as usize;
        let Standbys { of, asked, over } = &self.standbys;
        if *over || *asked || of.len() >= wanted || self.leaving.is_some() || self.closed_well {
            return;
        }
        let Some(placement) = self.placement.clone().filter(|_| self.is_running() && self.can_park()) else { return };
        if !(self.worker_states.all_attend() && self.worker_states.no_process_group) {
            return;
        }
        self.standbys.asked = true;
        let placement = Placement { reason: "a standby".to_owned(), resume: None, ..*placement };
        self.commands.push(Command::StartStandby(Box::new(placement)));
    }

    /// The world ends, and a start that was asked for is not wanted any more.
    pub(super) fn cancel_standby(&mut self) {
        if std::mem::take(&mut self.standbys.asked) {
            self.commands.push(Command::CancelStart);
        }
    }

    /// A standby runs.
    pub fn on_standby_started(&mut self, slot: u32) {
        self.standbys.asked = false;
        self.standbys.of.insert(slot, Standby::default());
        self.start_standbys();
    }

    /// A standby cannot be started.
    pub fn on_standby_not_started(&mut self, reason: &str) {
        self.standbys.asked = false;
        self.no_standbys(&format!("a standby cannot be started: {reason}"));
    }

    /// There is no room for a standby while others that were replaced end. The next world may have one.
    pub fn on_no_room_for_standby(&mut self) {
        self.standbys.asked = false;
        self.log(
            "no standby is started in this world: the workers that others have replaced have not ended yet".to_owned(),
        );
    }

    /// Whether a standby is connected, and waits for a place.
    pub fn on_standby_waits(&mut self, slot: u32, waits: bool) {
        let Some(standby) = self.standbys.of.get_mut(&slot) else { return };
        standby.waits = waits;
        if waits && !std::mem::replace(&mut standby.has_waited, true) {
            self.log("a standby waits for the place of a worker that fails".to_owned());
        }
    }

    /// A standby has ended. `how` names it. `killed`: it was not its script that ended it.
    pub fn on_standby_ended(&mut self, slot: u32, how: &str, killed: bool) {
        let Some(Standby { has_waited, .. }) = self.standbys.of.remove(&slot) else { return };
        if matches!(self.phase, Phase::Stopping { way: Way::Stop, .. } | Phase::Ended) {
            return;
        }
        match has_waited || killed {
            true => self.warn(format!("{how}; another one is started with the next world")),
            false => self.no_standbys(&format!("{how} before it reached `elastic_rs.elastic.run`")),
        }
    }

    /// Without a standby it goes as ever.
    fn no_standbys(&mut self, why: &str) {
        if !std::mem::replace(&mut self.standbys.over, true) {
            self.warn(format!(
                "{why}: there are no more standbys (--standby), and a worker that fails is started again"
            ));
        }
    }

    /// Give the places of workers that have failed to standbys.
    pub(super) fn call_standbys(&mut self) {
        if self.policy.standbys == 0 || !self.is_followed_by_another_world() || self.closed_well {
            return;
        }
        if !self.worker_states.no_process_group {
            let has_said =
                |worker_state| matches!(worker_state, WorkerState::Attends { .. } | WorkerState::Parked { .. });
            if !self.worker_states.any(has_said) {
                return; // none has come so far in this world
            }
            return self.no_standbys("the script makes its process group itself, into which a standby would come");
        }
        // A device has no room for both: its memory is free only once the dead worker's process is gone.
        let is_open = |worker_state| match worker_state {
            WorkerState::Missing => true,
            WorkerState::Ended { well } => !well && self.policy.replaces_dying,
            _ => false,
        };
        let tried = &self.worker_states.tried;
        let open: Vec<_> = self.worker_states.which(is_open).filter(|rank| !tried.contains(rank)).collect();
        if open.is_empty() {
            return;
        }
        for local_rank in open {
            let Some(standby) = self.standbys.take() else { break };
            self.worker_states.tried.insert(local_rank);
            self.worker_states.of.insert(local_rank, WorkerState::Ahead { waits: true });
            self.commands.push(Command::Call { standby, local_rank });
        }
        self.look_at_parked();
    }
}
