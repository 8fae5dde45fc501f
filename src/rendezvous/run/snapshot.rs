//! The state of a run, for observers.

use std::time::Instant;

use serde::Serialize;

use super::Run;
use super::standing::Standing;
use crate::wire::text::cut;

/// Most nodes that a state names of each kind.
const NAMED: usize = 16;
/// Longest text of a state, in bytes. JSON writes some characters with up to six.
const TEXT_BYTES: usize = 1500;
/// Longest name of a node in a state, in bytes.
const NAME_BYTES: usize = 64;

/// The state of a run. Fields are only added.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RunState {
    /// The run's id.
    pub run: String,
    /// What the next round waits for, or whether the world runs.
    pub state: State,
    /// Number of the last round that completed. 0: none has.
    pub round: u64,
    /// Number of failures that were counted against the job's budget.
    pub restart: u32,
    /// That budget. `None`: each node counts its own.
    pub max_restarts: Option<u32>,
    /// Fewest nodes of a world.
    pub min_nodes: u32,
    /// Most nodes of a world.
    pub max_nodes: u32,
    /// Number of nodes that run workers.
    pub running: usize,
    /// How many of them have finished.
    pub finished: usize,
    /// Number of workers of the current world, if every member tells.
    pub workers: Option<u32>,
    /// Number of nodes that wait for a place.
    pub waiting: usize,
    /// Names of the first of them.
    pub waiting_names: Vec<String>,
    /// Names of the first nodes whose connection has ended, and that may come back.
    pub unreachable_names: Vec<String>,
    /// How far the next round is, in words.
    pub progress: String,
    /// How the job ended, in words, if it has.
    pub verdict: Option<String>,
    /// Whether it has failed, if it has ended.
    pub failed: bool,
    /// Number of the last step of training, when somebody last wanted to know it in this round.
    pub step: Option<u64>,
    /// Mean time of a step in this round until then, in microseconds.
    pub step_time_us: Option<u64>,
    /// Names of the members that are behind the others, and by how many steps: most first. Known while somebody watches.
    pub behind: Vec<(String, u64)>,
}

/// What a run does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It has no nodes.
    Empty,
    /// A round waits for nodes, or for a time to pass.
    Waiting,
    /// A world runs, and has no reason to re-form.
    Running,
    /// A world must re-form, and some of its workers still run.
    Reforming,
    /// The rendezvous is closed.
    Closed,
}

impl State {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Empty, Self::Waiting, Self::Running, Self::Reforming, Self::Closed];

    /// Its name in answers and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::Waiting => "waiting",
            Self::Running => "running",
            Self::Reforming => "reforming",
            Self::Closed => "closed",
        }
    }
}

impl Serialize for State {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl Run {
    /// The state, for observers.
    pub fn state(&self, now: Instant) -> RunState {
        let counts = self.roster.counts();
        let names = |which: &mut dyn Iterator<Item = &super::node::Node>| {
            which.take(NAMED).map(|node| cut(node.name.clone(), NAME_BYTES)).collect::<Vec<_>>()
        };
        let unreachable = self.roster.iter().map(|(_, node)| node).filter(|node| node.session.is_none());
        let verdict = self.current.closed();
        RunState {
            run: self.id.clone(),
            state: match self.standing() {
                Standing::Vacant => State::Empty,
                Standing::Closed => State::Closed,
                Standing::Undisturbed | Standing::Holding => State::Running,
                Standing::Changing | Standing::Reforming => State::Reforming,
                Standing::Gathering
                | Standing::Recalling
                | Standing::Reconnecting
                | Standing::LastCall
                | Standing::Settling
                | Standing::Fencing => State::Waiting,
            },
            round: self.round().0,
            restart: self.restart(),
            max_restarts: self.settings.max_restarts,
            min_nodes: self.settings.min_nodes,
            max_nodes: self.settings.max_nodes,
            running: self.roster.active().len(),
            finished: counts.done,
            workers: self.current.world().and_then(|world| world.worker_count()),
            waiting: self.roster.waiting().len(),
            waiting_names: names(&mut self.roster.of(self.roster.waiting()).map(|(_, node)| node)),
            unreachable_names: names(&mut unreachable.into_iter()),
            progress: cut(self.progress(now), TEXT_BYTES),
            verdict: verdict.map(|verdict| cut(verdict.to_string(), TEXT_BYTES)),
            failed: verdict.is_some_and(crate::rendezvous::messages::message::Verdict::is_failure),
            step: self.trace.watch.step,
            step_time_us: self.trace.watch.step_time_us,
            behind: self.behind(NAMED).into_iter().map(|(name, by)| (cut(name.to_owned(), NAME_BYTES), by)).collect(),
        }
    }
}
