//! Agents whose workers live through changes of the world: they attend, count their checks, stop at one check, and join with those that
//! live. Such an agent is PyTorch's otherwise, as in [`super::host`].

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::agent::worker_count;
use super::event::Event;
use super::host::{Exit, Process};
use super::simulation::Simulation;
use crate::process::Signal;
use crate::rendezvous::protocol::message::{NEVER, Placement, Resume, Round, Survivor};
use crate::sim::engine::paths::HostId;
use crate::sim::engine::queue::Time;
use crate::sim::worlds::{Violation, ensure_contract as ensure};

/// How long an agent that was asked to go waits for the others to change in place.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);

/// The hosts whose workers live through changes of the world, and how they behave. Default: none.
#[derive(Clone, Debug, Default)]
pub struct Elastic {
    /// The hosts.
    pub hosts: BTreeSet<HostId>,
    /// Shortest and longest time from a place until all workers attend.
    pub attend: (Duration, Duration),
    /// Shortest and longest time until a node has counted.
    pub count: (Duration, Duration),
    /// Shortest and longest time until workers have reached the check.
    pub stop: (Duration, Duration),
    /// Percentage of changes that a node does not answer.
    pub mute: u64,
    /// Percentage of workers that do not live through a failure of another one.
    pub fragile: u64,
    /// From then on nodes answer, and workers reach a check at once.
    pub well_from: Time,
}

/// What happens to workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Happening {
    /// All are connected to their agent.
    Attend,
    /// They have counted for the change with this number.
    Count(u64),
    /// They have reached the check.
    Stop,
    /// The agent waits no longer for leave to go.
    MustLeave,
}

/// What a worker has computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct State {
    commit: Option<u64>,
    /// The world and the check at which it has stopped. `None`: it is at its commit.
    stopped_at: Option<(u64, u64)>,
}

/// The workers of one agent.
#[derive(Clone, Debug, Default)]
pub struct Workers {
    /// The states of those that live, by local rank.
    living: BTreeMap<u32, State>,
    /// All are, or were when they stopped, connected to their agent.
    attend: bool,
    /// Checks that the furthest has passed.
    checks: u64,
    /// The last change that the agent has asked them about.
    asked: u64,
    /// They have been told a check.
    told: bool,
    /// The last change that was called off.
    called_off: u64,
    /// The agent is to go.
    leaves: bool,
}

/// What has happened to the workers of a job.
#[derive(Clone, Debug, Default)]
pub struct Lives {
    /// How often each kind of thing has happened.
    pub counts: BTreeMap<&'static str, usize>,
    /// The state with which workers of a world have gone on without that of the source.
    unsynchronised: BTreeMap<u64, State>,
}

impl Workers {
    /// The list of survivors that the agent names.
    pub(super) fn survivors(&self) -> Option<Vec<Survivor>> {
        let survivor = |(local_rank, state): (&u32, &State)| Survivor { local_rank: *local_rank, commit: state.commit };
        self.attend.then(|| self.living.iter().map(survivor).collect())
    }
}

impl Simulation {
    /// What has happened to workers that live through changes.
    pub fn lives(&self) -> &BTreeMap<&'static str, usize> {
        &self.lives.counts
    }

    fn count_life(&mut self, what: &'static str) {
        *self.lives.counts.entry(what).or_default() += 1;
    }

    fn is_elastic(&self, host: HostId) -> bool {
        self.options.elastic.hosts.contains(&host)
    }

    fn push_elastic(&mut self, host: HostId, round: Round, happening: Happening, within: (Duration, Duration)) {
        let well = self.now() >= self.options.elastic.well_from && happening != Happening::MustLeave;
        let after = if well { within.0 } else { self.engine.dice.duration(within) };
        let Some(pid) = self.hosts[host].process.as_ref().map(|process| process.pid) else { return };
        self.engine.push(self.now() + after, Event::Elastic(host, pid, round, happening));
    }

    /// The workers of a new world begin: survivors go on, and the missing are started.
    pub(super) fn place_elastic(&mut self, host: HostId, placement: &Placement) -> Result<(), Violation> {
        if !self.is_elastic(host) {
            return Ok(());
        }
        let count = placement.workers_of(worker_count(host));
        let Some(Process { workers, .. }) = &mut self.hosts[host].process else { return Ok(()) };
        let survive = !workers.living.is_empty();
        let before: Vec<_> = (0..count).map(|local_rank| workers.living.get(&local_rank).copied()).collect();
        // Everybody begins with the state of the source, or with those of the script.
        let state = State { commit: Some(10 * placement.round.0), stopped_at: None };
        let living = (0..count).map(|local_rank| (local_rank, state)).collect();
        *workers = Workers { living, leaves: workers.leaves, ..Workers::default() };
        match &placement.resume {
            Some(Resume::Continue { sync: false, .. }) => {
                self.count_life("go on with their states");
                for state in before {
                    let alike = state.filter(|state| state.commit.is_some() && state.stopped_at.is_some());
                    let first = alike.map(|state| *self.lives.unsynchronised.entry(placement.world).or_insert(state));
                    ensure(alike.is_some() && alike == first, || {
                        format!("workers of host{host} go on in {placement:?} with {state:?}, others with {first:?}")
                    })?;
                }
            }
            Some(Resume::Continue { sync: true, .. }) if survive => self.count_life("go on with the source's state"),
            Some(Resume::Restart { .. }) if survive => self.count_life("are restarted"),
            _ => {}
        }
        let attend = self.options.elastic.attend;
        self.push_elastic(host, placement.round, Happening::Attend, attend);
        Ok(())
    }

    /// Pass the news of a change to the workers.
    pub(super) fn follow_change(&mut self, host: HostId) -> Result<(), Violation> {
        let Some(process) = self.hosts[host].process.as_mut().filter(|process| !process.done) else { return Ok(()) };
        let Process { machine, workers, agent, .. } = process;
        let view = machine.view();
        let (Some(round), Some(change)) = (agent.placement().map(|placement| placement.round), &view.change) else {
            return Ok(());
        };
        ensure(workers.attend && change.round == round, || {
            format!("host{host} is told of {change:?} in round {round}")
        })?;
        let (number, check) = (change.number, view.raise_at.map(|(_, check)| check));
        let asks = workers.asked < number;
        let stops = check.filter(|check| *check != NEVER && !workers.told);
        let called_off = check == Some(NEVER) && workers.called_off < number;
        (workers.asked, workers.told) = (number, workers.told || stops.is_some());
        if called_off {
            workers.called_off = number;
        }
        if let Some(check) = stops {
            let checks = workers.checks;
            ensure(check > checks, || format!("host{host} is to stop at check {check}, and has passed {checks}"))?;
        }
        let elastic = &self.options.elastic;
        let (count, stop, mute, well) = (elastic.count, elastic.stop, elastic.mute, self.now() >= elastic.well_from);
        if asks && (well || !self.engine.dice.chance(mute)) {
            self.push_elastic(host, round, Happening::Count(number), count);
        }
        if stops.is_some() {
            self.push_elastic(host, round, Happening::Stop, stop);
        }
        if called_off {
            self.count_life("are told that a change is called off");
        }
        Ok(())
    }

    /// The workers have to go back to their commits, and the agent joins again or leaves.
    pub(super) fn fall_back(&mut self, host: HostId) -> Result<(), Violation> {
        let elastic = self.is_elastic(host);
        let fragile = self.options.elastic.fragile;
        let Some(process) = self.hosts[host].process.as_mut().filter(|_| elastic) else {
            self.stop_workers(host, true);
            return Ok(());
        };
        if process.workers.leaves {
            return self.terminate(host, Signal::TERM);
        }
        let fenced = process.machine.view().fenced.is_some();
        let mut ahead = self.engine.dice.chance(20);
        let dies: Vec<_> = (0..worker_count(host)).map(|_| fenced || self.engine.dice.chance(fragile)).collect();
        if let Some(Process { workers, .. }) = &mut self.hosts[host].process {
            workers.living.retain(|local_rank, _| workers.attend && !dies[*local_rank as usize]);
            for state in workers.living.values_mut() {
                // The last commit of some may not have reached the others.
                let commit = state.commit.map(|commit| commit + u64::from(std::mem::take(&mut ahead)));
                *state = State { commit, stopped_at: None };
            }
        }
        self.count_life("go back to their commits");
        self.stop_workers(host, true);
        Ok(())
    }

    /// A worker ends, and the others of its host go back to their commits.
    pub(super) fn lose_worker(&mut self, host: HostId) {
        if let Some(Process { workers, .. }) = &mut self.hosts[host].process {
            workers.living.pop_first();
            workers.living.values_mut().for_each(|state| state.stopped_at = None);
            if !workers.attend {
                workers.living.clear();
            }
        }
    }

    /// SIGTERM for an agent whose workers may stop together with the others'.
    pub(super) fn ask_to_leave(&mut self, host: HostId) -> Result<(), Violation> {
        let round = self.running(host).map(|placement| placement.round);
        let Some(process) = &mut self.hosts[host].process else { return Ok(()) };
        let asked = round.is_some_and(|round| process.machine.will_leave(round, "SIGTERM", Some(Signal::TERM.0)));
        let Some(round) = round.filter(|_| asked && !process.done) else { return self.terminate(host, Signal::TERM) };
        process.workers.leaves = true;
        self.push_elastic(host, round, Happening::MustLeave, (PATIENCE, PATIENCE));
        self.after_node(host)
    }

    pub(super) fn on_elastic(
        &mut self,
        host: HostId,
        pid: u64,
        round: Round,
        happening: Happening,
    ) -> Result<(), Violation> {
        if happening == Happening::MustLeave {
            return match self.process(host, pid) {
                Some(_) => self.terminate(host, Signal::TERM),
                None => Ok(()),
            };
        }
        let more = self.engine.dice.between(0, 30);
        let Some(process) = self.process(host, pid).filter(|process| !process.done) else { return Ok(()) };
        let Process { machine, workers, agent, .. } = process;
        let Some(placement) = agent.placement().filter(|placement| placement.round == round) else { return Ok(()) };
        let (view, world) = (machine.view(), placement.world);
        match happening {
            Happening::Attend => {
                workers.attend = true;
                machine.attending(round);
            }
            Happening::Count(number)
                if view.raise_at.is_none() && view.change.as_ref().is_some_and(|change| change.number == number) =>
            {
                workers.checks += more;
                machine.counted(round, workers.checks);
            }
            Happening::Stop => {
                let Some((_, check)) = view.raise_at.filter(|_| view.waiting == 0) else { return Ok(()) };
                workers.checks = check;
                workers.living.values_mut().for_each(|state| state.stopped_at = Some((world, check)));
                if workers.leaves {
                    machine.parked(round);
                    self.count_life("stop at a check, and leave");
                    return self.leave_by(host, "SIGTERM", Some(Signal::TERM.0), Exit::Terminated);
                }
                self.count_life("stop at a check");
                return self.join(host);
            }
            Happening::Count(_) | Happening::MustLeave => {}
        }
        self.after_node(host)
    }
}
