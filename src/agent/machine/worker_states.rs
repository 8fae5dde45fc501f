//! The lives of a node's workers, as far as they can change in place. Part of [`super`].

use std::collections::{BTreeMap, BTreeSet};

use crate::channel::message::HeldState;
use crate::rendezvous::messages::message::{Resume, Survival, Survivor};

/// A worker's part in its world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WorkerState {
    /// It is to be started.
    Missing,
    /// It was started, and does not attend.
    Started,
    /// It has attended, and its connection has ended: so has it, or no message reaches it.
    Deaf,
    /// It is connected, and works in its world.
    Attends {
        /// Its answer to the change that it was notified of: the number of its last check.
        counted: Option<u64>,
    },
    /// It has left its world, and waits for the next one.
    Parked {
        /// The state that it has.
        state: HeldState,
    },
    /// It was started for a world that its node has no rank in yet: see [`super::replace`].
    Ahead {
        /// It is connected, and waits for that world.
        waits: bool,
    },
    /// It has ended. Processes that it started may be left: for a moment, or if it has ended well, for as long as they may run on.
    Ended {
        /// With exit code 0.
        well: bool,
    },
}

/// The lives of a node's workers.
#[derive(Clone, Debug, Default)]
pub(super) struct WorkerStates {
    pub(super) of: BTreeMap<u32, WorkerState>,
    /// Workers of the world before are in this one, so that new ones will attend.
    pub(super) continues: bool,
    /// The local ranks whose workers have attended, in this world or an earlier one. Their program uses the API.
    pub(super) users: BTreeSet<u32>,
    /// The change that the workers were notified of.
    pub(super) change: Option<u64>,
    /// The check of that change, once it is known.
    pub(super) raise_at: Option<u64>,
    /// What the last join brought.
    pub(super) brought: Vec<Survivor>,
    /// The workers let the library make their process groups.
    pub(super) no_process_group: bool,
    /// The workers' program does not live through a change: it saves at the check, and is started anew.
    pub(super) saves: bool,
    /// Workers whose start ahead of the next world has been asked for, and has not been answered.
    pub(super) asked: BTreeSet<u32>,
    /// Workers that are not started ahead of the next world, because that has been tried.
    pub(super) tried: BTreeSet<u32>,
}

impl WorkerStates {
    /// A world is about to begin. Returns the workers that have to be started.
    pub(super) fn begin(&mut self, workers: u32, resume: Option<&Resume>) -> BTreeSet<u32> {
        self.continues = matches!(resume, Some(Resume::Continue { survivors: 1.., .. }));
        self.tried.clear();
        let worker_state = |rank| self.of.get(&rank).copied().unwrap_or(WorkerState::Missing);
        self.of = (0..workers).map(|rank| (rank, worker_state(rank))).collect();
        self.which(|worker_state| !matches!(worker_state, WorkerState::Parked { .. } | WorkerState::Ahead { .. }))
            .collect()
    }

    pub(super) fn which(&self, is: impl Fn(WorkerState) -> bool) -> impl Iterator<Item = u32> {
        self.of.iter().filter(move |(_, worker_state)| is(**worker_state)).map(|(rank, _)| *rank)
    }

    pub(super) fn any(&self, is: impl Fn(WorkerState) -> bool) -> bool {
        self.of.values().any(|worker_state| is(*worker_state))
    }

    pub(super) fn attending(&self) -> Vec<u32> {
        self.which(|worker_state| matches!(worker_state, WorkerState::Attends { .. })).collect()
    }

    pub(super) fn started(&self) -> Vec<u32> {
        self.which(|worker_state| worker_state == WorkerState::Started).collect()
    }

    /// Whether every worker runs and attends.
    pub(super) fn all_attend(&self) -> bool {
        !self.of.is_empty() && !self.any(|worker_state| !matches!(worker_state, WorkerState::Attends { .. }))
    }

    /// A worker that was started waits for its first world.
    pub(super) fn park(&mut self, local_rank: u32) {
        self.users.insert(local_rank);
        self.of.insert(local_rank, WorkerState::Parked { state: HeldState::default() });
    }

    /// Whether every worker waits for a world.
    pub(super) fn all_wait(&self) -> bool {
        !self.any(|worker_state| !matches!(worker_state, WorkerState::Parked { .. }))
    }

    /// Whether workers can survive the end of their world, or could have: their program uses the API.
    pub(super) fn can_park(&self) -> bool {
        let unknown = |(rank, worker_state): (&u32, &WorkerState)| {
            *worker_state == WorkerState::Started && !self.users.contains(rank)
        };
        self.continues || (!self.users.is_empty() && !self.of.iter().any(unknown))
    }

    /// What the node says of its workers if none of them survives.
    pub(super) fn if_none_survives(&self) -> Survival {
        match (self.can_park(), self.users.is_empty()) {
            (true, _) => Survival::Attended(Vec::new()),
            (false, false) => Survival::NotYetAttended,
            (false, true) => Survival::NeverAttended,
        }
    }

    /// Whether no worker is in a world any more.
    pub(super) fn all_parked(&self) -> bool {
        !self.any(|worker_state| {
            matches!(worker_state, WorkerState::Started | WorkerState::Deaf | WorkerState::Attends { .. })
        })
    }

    pub(super) fn parked(&self) -> Vec<Survivor> {
        let survivor = |(rank, worker_state): (&u32, &WorkerState)| match worker_state {
            WorkerState::Parked { state: HeldState { generation, commit } } => {
                Some(Survivor { local_rank: *rank, generation: *generation, commit: *commit })
            }
            _ => None,
        };
        self.of.iter().filter_map(survivor).collect()
    }

    /// Whether a worker was started for a world that has not begun.
    pub(super) fn is_ahead(&self, local_rank: u32) -> bool {
        matches!(self.of.get(&local_rank), Some(WorkerState::Ahead { .. }))
    }

    /// Whether the last join brought all of so many workers, and none that had ever had the state of its world.
    pub(super) fn brought_none_with_state(&self, workers: u32) -> bool {
        self.brought.len() == workers as usize && self.brought.iter().all(|survivor| survivor.generation.is_none())
    }

    pub(super) fn forget_counts(&mut self) {
        self.raise_at = None;
        for worker_state in self.of.values_mut() {
            if let WorkerState::Attends { counted } = worker_state {
                *counted = None;
            }
        }
    }

    /// The largest count of all workers, if each has answered.
    pub(super) fn counted(&self) -> Option<u64> {
        let count = |worker_state: &WorkerState| match worker_state {
            WorkerState::Attends { counted } => *counted,
            _ => None,
        };
        let counts: Option<Vec<u64>> = self.of.values().map(count).collect();
        counts?.into_iter().max()
    }
}
