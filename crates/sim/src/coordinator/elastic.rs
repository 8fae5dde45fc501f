//! Agents whose workers live through changes of the world: they attend, count their checks, stop at one check, and join with those that
//! live. Such an agent is PyTorch's otherwise, as in [`super::host`].

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::agent::worker_count;
use super::event::Event;
use super::host::{Agent, Exit, Process};
use super::ledger::NONE_HAS_THE_STATE;
use super::simulation::Simulation;
use crate::engine::paths::HostId;
use crate::engine::queue::Time;
use crate::worlds::{Violation, ensure_contract as ensure};
use elastic_rs::rendezvous::coordinator::machine::Command;
use elastic_rs::rendezvous::messages::message::{
    CoordinatorMessage, Generation, NEVER, Placement, Resume, Round, Survival, Survivor,
};
use elastic_rs::signals::Signal;

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
    /// Shortest and longest time from a place until a node's workers have the state of the source.
    pub sync: (Duration, Duration),
    /// Percentage of changes that a node does not answer.
    pub mute: u64,
    /// Percentage of workers that do not live through a failure of another one.
    pub fragile: u64,
    /// From then on nodes answer, and workers reach a check at once.
    pub well_from: Time,
    /// Nodes name their last world as the generation of each state, whether it has the state of that world or not. So the number of its
    /// commit alone says how new a state is: a test of the tests.
    pub by_number_alone: bool,
}

/// What happens to workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Happening {
    /// All are connected to their agent.
    Attend,
    /// They have the state of the source.
    Synchronise,
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
    generation: Option<Generation>,
    commit: Option<u64>,
    /// The step of the job that it has committed, or that the checkpoint had when it was started. No decision depends on it.
    step: u64,
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
    /// They have got a check.
    sent: bool,
    /// The last change that was called off.
    called_off: u64,
    /// The agent is to go.
    leaves: bool,
    /// They have had a place.
    placed: bool,
    /// Their program uses the API.
    elastic: bool,
    /// They waited for a world, and their guards have killed them.
    fenced: bool,
}

/// A world, as its workers live in it.
#[derive(Clone, Debug)]
struct Lived {
    /// As the generation of a state.
    generation: Generation,
    /// The generation of the state with which it begins.
    began_with: Generation,
    /// Its hosts and their processes.
    members: BTreeSet<(HostId, u64)>,
    /// The hosts on whose survivors it counts.
    brought: BTreeSet<HostId>,
    size: u32,
    /// The life of the coordinator that formed it.
    incarnation: u32,
    /// The state with which it begins. `None`: the source ended before the world began.
    start: Option<State>,
    synchronised: BTreeSet<HostId>,
    /// All were synchronised at once, so that steps could be made.
    trained: bool,
}

/// What has happened to the workers of a job.
#[derive(Clone, Debug, Default)]
pub struct ElasticHistory {
    /// How often each kind of thing has happened.
    pub counts: BTreeMap<&'static str, usize>,
    /// The state with which workers of a world have gone on without that of the source.
    unsynchronised: BTreeMap<u64, State>,
    /// By id.
    worlds: BTreeMap<u64, Lived>,
    /// The last of them.
    last: Option<u64>,
    /// The step of the last checkpoint.
    checkpoint: u64,
}

impl Workers {
    /// All end.
    pub(super) fn lose_all(&mut self) {
        self.living.clear();
    }

    /// Guards kill them while they wait for a world.
    pub(super) fn end_with_the_lease(&mut self) {
        self.lose_all();
        self.fenced = true;
    }

    /// What the agent says of them when it joins. `instead`: the generation that it names for each state.
    pub(super) fn survival(&self, instead: Option<Generation>) -> Survival {
        let survivor = |(local_rank, state): (&u32, &State)| Survivor {
            local_rank: *local_rank,
            generation: instead.or(state.generation),
            commit: state.commit,
        };
        match (self.placed, self.attend, self.elastic) {
            (false, ..) => Survival::New,
            (true, true, _) => Survival::Attended(self.living.iter().map(survivor).collect()),
            (true, false, true) => Survival::NotYetAttended,
            (true, false, false) => Survival::NeverAttended,
        }
    }
}

impl Simulation {
    /// What has happened to workers that live through changes.
    pub fn elastic_history(&self) -> &BTreeMap<&'static str, usize> {
        &self.elastic_history.counts
    }

    fn count(&mut self, what: &'static str) {
        *self.elastic_history.counts.entry(what).or_default() += 1;
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
    pub(super) fn on_elastic_placement(&mut self, host: HostId, placement: &Placement) -> Result<(), Violation> {
        let elastic = self.is_elastic(host);
        let count = placement.workers_of(worker_count(host));
        let checkpoint = self.elastic_history.checkpoint;
        let Some(Process { workers, .. }) = &mut self.hosts[host].process else { return Ok(()) };
        (workers.placed, workers.elastic) = (true, elastic);
        if !elastic {
            return Ok(());
        }
        let counted_on =
            self.elastic_history.worlds.get(&placement.world).is_some_and(|world| world.brought.contains(&host));
        let continues = matches!(placement.resume, Some(Resume::Continue { survivors: 1.., .. }));
        ensure(!(workers.fenced && counted_on && continues), || {
            format!("host{host} is in {placement:?}, which counts on its survivors, and they have ended with its lease")
        })?;
        let survive = !workers.living.is_empty();
        let before: Vec<_> = (0..count).map(|local_rank| workers.living.get(&local_rank).copied()).collect();
        let equal = !continues || matches!(placement.resume, Some(Resume::Continue { sync: false, .. }));
        let state = |state: &Option<State>| {
            let begun = State { generation: None, commit: None, step: checkpoint, stopped_at: None };
            let state = state.filter(|_| continues).unwrap_or(begun);
            let generation = if equal { Some(placement.generation()) } else { state.generation };
            State { generation, stopped_at: None, ..state }
        };
        let living = (0..count).zip(before.iter().map(state)).collect();
        *workers = Workers { living, leaves: workers.leaves, placed: true, elastic, ..Workers::default() };
        match &placement.resume {
            Some(Resume::Continue { sync: false, .. }) => {
                self.count("go on with their states");
                for state in before {
                    let alike = state.filter(|state| state.commit.is_some() && state.stopped_at.is_some());
                    let first =
                        alike.map(|state| *self.elastic_history.unsynchronised.entry(placement.world).or_insert(state));
                    ensure(alike.is_some() && alike == first, || {
                        format!("workers of host{host} go on in {placement:?} with {state:?}, others with {first:?}")
                    })?;
                }
            }
            Some(Resume::Continue { sync: true, .. }) if survive => self.count("go on with the source's state"),
            Some(Resume::Restart { .. }) if survive => self.count("are restarted"),
            _ => {}
        }
        let attend = self.options.elastic.attend;
        self.push_elastic(host, placement.round, Happening::Attend, attend);
        self.push_elastic(host, placement.round, Happening::Synchronise, self.options.elastic.sync);
        Ok(())
    }

    /// Worlds were formed. Notes with which states their workers begin, and checks that these are not older than what workers have
    /// committed that were in the last world and are in this one, and not older than the last checkpoint. If one of these has the state of
    /// the last world, so has the source.
    pub(super) fn note_worlds(&mut self, commands: &[Command]) -> Result<(), Violation> {
        let mut formed: BTreeMap<u64, Vec<(HostId, &Placement, &Resume)>> = BTreeMap::new();
        for command in commands {
            let Command::Send { session, message } = command else { continue };
            let CoordinatorMessage::Complete(placement) = message else { continue };
            let Some(resume) = &placement.resume else { continue };
            let host = self.coordinator.host_of(*session).filter(|_| !self.options.elastic.hosts.is_empty());
            if let Some(host) = host.filter(|_| !self.elastic_history.worlds.contains_key(&placement.world)) {
                formed.entry(placement.world).or_default().push((host, placement, resume));
            }
        }
        for (world, placements) in formed {
            self.note_world(world, &placements)?;
        }
        Ok(())
    }

    fn note_world(&mut self, world: u64, placements: &[(HostId, &Placement, &Resume)]) -> Result<(), Violation> {
        let Some((_, placement, resume)) = placements.first() else { return Ok(()) };
        let process = |host: HostId| self.hosts[host].process.as_ref();
        let (generation, checkpoint) = (placement.generation(), self.elastic_history.checkpoint);
        let begun = State { generation: Some(generation), commit: None, step: checkpoint, stopped_at: None };
        let of_source = |source: u32| {
            let (host, local_rank) = placements.iter().find_map(|(host, placement, _)| {
                let local_rank = source.checked_sub(placement.workers?.first_rank)?;
                (local_rank < placement.workers_of(worker_count(*host))).then_some((*host, local_rank))
            })?;
            Some((host, *process(host)?.workers.living.get(&local_rank)?))
        };
        let members = placements.iter().filter_map(|(host, ..)| Some((*host, process(*host)?.pid))).collect();
        let has_survivors = |host: &HostId| process(*host).is_some_and(|it| !it.workers.living.is_empty());
        let brought = placements.iter().map(|(host, ..)| *host).filter(has_survivors).collect();
        let source = match resume {
            Resume::Continue { source, survivors: 1.., .. } => Some(of_source(*source)),
            Resume::Continue { .. } | Resume::Restart { .. } => None,
        };
        let start = source.map_or(Some(begun), |source| source.map(|(_, state)| state));
        let last = self.elastic_history.last.and_then(|last| self.elastic_history.worlds.get(&last));
        if let Some((last, start)) = last.zip(start) {
            let same_incarnation = last.incarnation == self.coordinator.incarnation;
            let was_there = |host: HostId| process(host).filter(|it| last.members.contains(&(host, it.pid)));
            // A coordinator that is restarted knows the members that name the world. One that was never sent its place does not.
            let world = last.generation.world;
            let named = |host: HostId| self.hosts[host].placements.iter().any(|placement| placement.world == world);
            let known = |host: HostId| was_there(host).filter(|_| same_incarnation || named(host));
            let here =
                placements.iter().filter_map(|(host, ..)| known(*host)).flat_map(|it| it.workers.living.values());
            // A node that missed a world may have one commit more of the generation with which the last one began.
            let had = |state: &State| last.start.is_some_and(|start| state.commit <= start.commit);
            let has_state = |state: &&State| {
                let of = |generation| state.generation == Some(generation);
                of(last.generation) || of(last.began_with) && had(state)
            };
            let newest = here.filter(has_state).map(|state| state.step).max();
            let sent = || format!("{resume:?} begins round {} at step {}", generation.round, start.step);
            let cannot = matches!(resume, Resume::Restart { reason } if !reason.starts_with(NONE_HAS_THE_STATE));
            // Two lives of the coordinator may have used one round number, and it knows of the earlier world first.
            let twin = |of: Generation| of.round == last.generation.round && of.world != last.generation.world;
            let unknown = !same_incarnation && start.generation.is_some_and(twin);
            let kept = cannot || unknown || newest.is_none_or(|newest| start.step >= newest);
            ensure(kept, || format!("{}, and a member has committed {newest:?}: {last:?}", sent()))?;
            let other = start.generation.filter(|of| ![last.generation, last.began_with].contains(of));
            let follows = cannot || unknown || newest.is_none() || other.is_none();
            ensure(follows, || format!("{}, of {other:?}, and a member has the state of {last:?}", sent()))?;
            // A coordinator that is restarted may not hear of a world all of whose members have gone.
            if !unknown && (same_incarnation || newest.is_some()) {
                ensure(start.step >= checkpoint, || format!("{}, the checkpoint has {checkpoint}: {last:?}", sent()))?;
                let missed = source.flatten().filter(|(host, _)| was_there(*host).is_none());
                ensure(missed.is_none(), || format!("{}, of {missed:?}, who missed {last:?}", sent()))?;
            }
        }
        let began_with = start.and_then(|start| start.generation).unwrap_or(generation);
        let lived = Lived {
            generation,
            began_with,
            members,
            brought,
            size: placement.world_size,
            incarnation: self.coordinator.incarnation,
            start,
            synchronised: BTreeSet::new(),
            trained: false,
        };
        self.elastic_history.worlds.insert(world, lived);
        self.elastic_history.last = Some(world);
        Ok(())
    }

    /// The workers of a host get the state with which their world begins.
    fn synchronise(&mut self, host: HostId, pid: u64, round: Round) {
        let process = self.hosts[host].process.as_mut().filter(|process| process.pid == pid && !process.done);
        let Some(Process { workers, agent: Agent::Running(placement), .. }) = process else { return };
        let lived =
            self.elastic_history.worlds.get_mut(&placement.world).filter(|lived| lived.generation.round == round);
        let Some((lived, start)) = lived.and_then(|lived| lived.start.map(|start| (lived, start))) else { return };
        let commit = Some(start.commit.map_or(0, |commit| commit + 1));
        let state = State { generation: Some(lived.generation), commit, stopped_at: None, ..start };
        workers.living.values_mut().for_each(|mine| *mine = state);
        lived.synchronised.insert(host);
        let world = placement.world;
        self.train(world);
    }

    /// The members of a world make steps and commit them, once all are synchronised and run. Sometimes they write a checkpoint.
    fn train(&mut self, world: u64) {
        let Some(lived) = self.elastic_history.worlds.get(&world) else { return };
        let members: Vec<_> = lived.members.iter().map(|(host, _)| *host).collect();
        let runs = |host: &HostId| self.running(*host).is_some_and(|placement| placement.world == world);
        let all = members.len() == lived.size as usize && members.iter().all(runs);
        if lived.trained || !all || lived.synchronised.len() < members.len() {
            return;
        }
        let steps = self.engine.dice.between(1, 20);
        let since = self.engine.dice.between(0, 2 * steps);
        for host in members {
            if let Some(Process { workers, .. }) = &mut self.hosts[host].process {
                for state in workers.living.values_mut() {
                    state.commit = state.commit.map(|commit| commit + steps);
                    state.step += steps;
                    if since <= steps {
                        self.elastic_history.checkpoint = state.step - since;
                    }
                }
            }
        }
        self.count("make steps");
        if let Some(lived) = self.elastic_history.worlds.get_mut(&world) {
            lived.trained = true;
        }
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
            format!("host{host} is notified of {change:?} in round {round}")
        })?;
        let (number, check) = (view.changes, view.raise_at.map(|(_, check)| check));
        let asks = workers.asked < number;
        let stops = check.filter(|check| *check != NEVER && !workers.sent);
        let called_off = check == Some(NEVER) && workers.called_off < number;
        (workers.asked, workers.sent) = (number, workers.sent || stops.is_some());
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
            self.count("are notified that a change is called off");
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
        let world = process.agent.placement().and_then(|placement| self.elastic_history.worlds.get(&placement.world));
        let trained = world.is_some_and(|world| world.trained);
        let mut ahead = self.engine.dice.chance(20) && trained;
        let dies: Vec<_> = (0..worker_count(host)).map(|_| fenced || self.engine.dice.chance(fragile)).collect();
        if let Some(Process { workers, .. }) = &mut self.hosts[host].process {
            workers.living.retain(|local_rank, _| workers.attend && !dies[*local_rank as usize]);
            for state in workers.living.values_mut() {
                // The last commit of some may not have reached the others.
                let more = u64::from(state.commit.is_some() && std::mem::take(&mut ahead));
                let commit = state.commit.map(|commit| commit + more);
                *state = State { commit, step: state.step + more, stopped_at: None, ..*state };
            }
        }
        self.count("go back to their commits");
        self.stop_workers(host, true);
        Ok(())
    }

    /// A worker ends, and the others of its host go back to their commits.
    pub(super) fn lose_worker(&mut self, host: HostId) {
        if let Some(Process { workers, .. }) = &mut self.hosts[host].process {
            workers.living.pop_first();
            workers.living.values_mut().for_each(|state| state.stopped_at = None);
            if !workers.attend {
                workers.lose_all();
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
        if happening == Happening::Synchronise {
            self.synchronise(host, pid, round);
            return Ok(());
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
            Happening::Count(number) if view.raise_at.is_none() && view.change.is_some() && view.changes == number => {
                workers.checks += more;
                machine.counted(round, workers.checks);
            }
            Happening::Stop => {
                let Some((_, check)) = view.raise_at.filter(|_| view.waiting == 0) else { return Ok(()) };
                workers.checks = check;
                workers.living.values_mut().for_each(|state| state.stopped_at = Some((world, check)));
                if workers.leaves {
                    machine.parked(round);
                    self.count("stop at a check, and leave");
                    return self.leave_by(host, "SIGTERM", Some(Signal::TERM.0), Exit::Terminated);
                }
                self.count("stop at a check");
                return self.join(host);
            }
            Happening::Count(_) | Happening::MustLeave | Happening::Synchronise => {}
        }
        self.after_node(host)
    }
}
