//! What must be true of the coordinator's decisions, of what nodes are told, and of a settled job. Part of [`super`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::super::agent::worker_count;
use super::super::event::Loss;
use super::super::host::{self, Agent, Host, Process};
use super::completion::check_told_again;
use super::{Ledger, OTHER_SETTINGS, Said};
use crate::engine::paths::HostId;
use crate::engine::queue::Time;
use crate::worlds::{self, Violation, ensure_contract as ensure};
use elastic_rs::events::record::{Kind, Record, Why};
use elastic_rs::rendezvous::coordinator::machine::{Command, Machine};
use elastic_rs::rendezvous::messages::message::{CoordinatorMessage, NodeId, NodeMessage, Placement, Resume, Round};
use elastic_rs::rendezvous::messages::settings::WorkerBounds;
use elastic_rs::rendezvous::messages::settings::{OnPartition, Settings};
use elastic_rs::rendezvous::node::JoinError;
use elastic_rs::rendezvous::run::{Exclusion, Run, Status};

/// The coordinator's counters are compared with a recount after each decision, in jobs with fewer nodes than this.
const RECOUNTED_NODES: u64 = 64;

impl Ledger {
    /// Time within which survivors hear of a loss if no other fault happens: the lease, the last look after it (250 ms), and the push,
    /// each with some transit times.
    pub fn notice_bound(&self, delay: Duration) -> Duration {
        self.settings.lease() + Duration::from_millis(260) + delay * 10
    }

    /// Checks that a member of a running world is not refused for its settings because of newcomers.
    pub(in crate::coordinator) fn check_refusal(&self, message: &NodeMessage, reason: &str) -> Result<(), Violation> {
        let NodeMessage::Hello(hello) = message else { return Ok(()) };
        let member = hello.placed.is_some_and(|placed| placed.active);
        // If a member reports later than a lease, newcomers may have determined the run's settings.
        let late = self.settings.on_partition == OnPartition::Continue;
        ensure(!member || !reason.contains(OTHER_SETTINGS) || self.highest > Round(0) || self.closed || late, || {
            format!("{} runs in a world and is refused by newcomers: {reason}", hello.name)
        })
    }

    /// Check the coordinator's commands after an event.
    pub(in crate::coordinator) fn check_decision<'a>(
        &mut self,
        machine: &Machine,
        commands: impl IntoIterator<Item = &'a Command>,
        life: u32,
    ) -> Result<(), Violation> {
        let run = machine.run(&self.run_id);
        // A recount looks at all nodes. In large jobs most decisions are about a heartbeat, and some are left out.
        let seldom = 1 + run.map_or(0, Run::connected) as u64 / RECOUNTED_NODES;
        let recounted = run.filter(|_| (self.messages.0 + self.messages.1).is_multiple_of(seldom));
        recounted.map_or(Ok(()), Run::check).map_err(Violation::contract)?;
        let mut completed: BTreeMap<Round, Vec<(NodeId, &Placement)>> = BTreeMap::new();
        let mut resumes: BTreeMap<Round, Vec<&Resume>> = BTreeMap::new();
        let mut members: BTreeMap<NodeId, Vec<IpAddr>> = BTreeMap::new();
        for command in commands {
            let (session, message) = match command {
                Command::Send { session, message } => (session, message),
                Command::Record { record, .. } => {
                    self.check_growth(record, run)?;
                    continue;
                }
                _ => continue,
            };
            self.messages.1 += 1;
            if message.placement().is_some() {
                self.stopped.remove(session);
            }
            if let Some(placement) = message.placement() {
                let said = self.said.get(session);
                let said =
                    said.ok_or_else(|| Violation::contract(format!("a place is given to {session:?}, a stranger")))?;
                completed.entry(placement.round).or_default().push((said.node, placement));
            }
            match message {
                CoordinatorMessage::Complete(Placement { round, resume: Some(resume), .. }) => {
                    resumes.entry(*round).or_default().push(resume);
                }
                CoordinatorMessage::RaiseAt { round, check } => self.check_raise_at(*round, *check)?,
                CoordinatorMessage::Members { addresses, .. } => {
                    if let Some(said) = self.said.get(session) {
                        members.entry(said.node).or_default().extend(addresses);
                    }
                }
                CoordinatorMessage::Status { waiting, reason, .. } => {
                    match waiting {
                        0 => self.stopped.remove(session),
                        1.. => self.stopped.insert(*session),
                    };
                    ensure(*waiting == 0 || !reason.is_empty(), || {
                        "members are interrupted without a reason".to_owned()
                    })?;
                }
                CoordinatorMessage::Closed { .. } | CoordinatorMessage::Over { .. } => self.closed = true,
                // Another node has its place, because its process is assumed to have ended. That is not proven either.
                CoordinatorMessage::Ended { .. } => {
                    self.gone.extend(self.said.get(session).map(|said| said.node));
                }
                _ => {}
            }
        }
        recounted.map_or(Ok(()), |run| self.check_left_behind(run))?;
        for (round, places) in completed {
            match self.worlds.get(&(life, round)) {
                Some(told) => check_told_again(told, round, &places)?,
                None => {
                    self.check_resume(life, &places, resumes.get(&round).map_or(&[], Vec::as_slice))?;
                    self.check_completion(life, round, &places)?;
                    self.check_members(&places, &members)?;
                }
            }
        }
        Ok(())
    }

    /// Checks that a healthy world is not stopped for growth while no round can close. One that has begun to change under an earlier
    /// coordinator goes on with it.
    fn check_growth(&self, record: &Record, run: Option<&Run>) -> Result<(), Violation> {
        let leaves = record.text.as_ref().is_some_and(|text| text.contains("is about to leave"));
        let began = |run: &Run| self.counted.contains_key(&run.round()) || self.said.values().any(Said::has_stopped);
        let grows = match record.kind {
            Kind::RoundBroken { why: Why::NodesWait } => true,
            Kind::RoundChanges {} => record.text.is_some() && !leaves && !run.is_some_and(began),
            _ => false,
        };
        let held = run.filter(|_| grows).and_then(Run::held_until);
        ensure(held.is_none(), || format!("a healthy world is stopped for growth, and no round can close: {record:?}"))
    }

    /// Checks that a world never runs on without one of its members that has asked for another round: the others were told to stop. A
    /// member whose workers have stopped at a check is one that the others follow.
    fn check_left_behind(&self, run: &Run) -> Result<(), Violation> {
        let member = |placed: Option<(Round, u32)>| placed.is_some_and(|(round, _)| round == run.round());
        let asks = |node: &NodeId| {
            let said = self.newest.get(node).and_then(|session| self.said.get(session));
            said.is_some_and(|said| said.join.is_some() && !said.has_stopped())
        };
        let waits = |status: &Status| matches!(status, Status::Waiting { .. });
        let mut waiting = run.nodes().filter(|(node, status, placed)| waits(status) && member(*placed) && asks(node));
        let Some((asks, ..)) = waiting.next().filter(|_| run.closed().is_none()) else { return Ok(()) };
        let runs_on = |node: NodeId| run.session(node).is_some_and(|session| !self.stopped.contains(&session));
        let others = run.nodes().find(|(node, status, _)| **status == Status::Active && runs_on(*node));
        ensure(others.is_none(), || format!("{others:?} runs on without {asks:?}, which asks for another round"))
    }

    /// Checks that no node at this address gets a place in a new world, if its host is kept out.
    pub(in crate::coordinator) fn check_host(
        &self,
        placement: &Placement,
        addr: IpAddr,
        now: Instant,
    ) -> Result<(), Violation> {
        let addr = addr.to_string();
        let holds = |host: &&Exclusion| host.addr == addr && host.out.holds(now);
        let out = self.excluded.iter().find(holds).filter(|_| placement.round > self.highest);
        ensure(out.is_none(), || format!("{addr} has a place in round {}, and is kept out: {out:?}", placement.round))
    }

    /// Checks that no two worlds run at once among these hosts. A node of an earlier world was cut off, and its workers must be dead.
    /// Workers that are being stopped are not. Nodes whose connection has ended are exempt: TCP reported their end, within
    /// `reconnect_grace`. So are nodes that have said goodbye: the others do not wait for the grace of their workers. PyTorch's agent has
    /// no guards: what it stops counts as dead.
    pub(in crate::coordinator) fn check_one_world<'a>(
        &self,
        life: u32,
        hosts: impl Iterator<Item = (HostId, &'a Host)>,
    ) -> Result<(), Violation> {
        if self.settings.on_partition == OnPartition::Continue {
            return Ok(());
        }
        let bound = |(number, host): (HostId, &Host)| {
            let process = host.process.as_ref().filter(|process| !process.done && !process.machine.has_left())?;
            let held = match &host.ours {
                Some(_) => host.crew.as_ref()?.held()?,
                None => process.held(number)?,
            };
            let world = self.world_of(process.id, Round(held.round), held.rank);
            let known = world.is_some_and(|world| world.0 == life || self.learned.contains(&world));
            (known && !self.gone.contains(&process.id)).then_some(held)
        };
        worlds::check_one_world(self.highest.0, hosts.filter_map(bound))
    }

    /// Check the outcome of a node's join.
    pub(in crate::coordinator) fn check_outcome(
        &mut self,
        process: &Process,
        outcome: &Result<Placement, JoinError>,
    ) -> Result<(), Violation> {
        ensure(process.answers <= process.joins, || {
            format!("process {} is answered more often than it asked", process.pid)
        })?;
        let placement = match outcome {
            Ok(placement) => placement,
            Err(error) => {
                return ensure(!error.to_string().is_empty(), || "an error without words".to_owned());
            }
        };
        let (reached, restart) =
            self.reached.insert(process.id, (placement.round, placement.restart)).unwrap_or_default();
        ensure(placement.restart >= restart, || {
            format!("process {} goes from restart {restart} to {}", process.pid, placement.restart)
        })?;
        ensure(placement.round > reached, || {
            format!("process {} goes from round {reached} to {}", process.pid, placement.round)
        })?;
        let told = self.worlds.iter().any(|((_, round), told)| {
            *round == placement.round
                && told.size == placement.world_size
                && told.master == (placement.master_addr.clone(), placement.master_port)
                && told.members.get(placement.rank as usize) == Some(&process.id)
        });
        ensure(told, || format!("process {} holds a place nobody gave it: {placement:?}", process.pid))?;
        let asks = placement.rank == 0 && self.interfaces.contains(&process.id);
        ensure(placement.members.is_some() == asks, || format!("it is told members, or is not: {placement:?}"))
    }

    /// Checks that the node with rank 0 of a new world is told all addresses of its members, if it has asked. `told`: what each node was
    /// told with its place. One that is told its place again is told of those that have not left since.
    fn check_members(
        &self,
        places: &[(NodeId, &Placement)],
        told: &BTreeMap<NodeId, Vec<IpAddr>>,
    ) -> Result<(), Violation> {
        let Some((first, _)) = places.iter().find(|(_, placement)| placement.rank == 0) else { return Ok(()) };
        let others = told.keys().find(|node| *node != first);
        ensure(others.is_none(), || format!("{others:?} is told members, and {first:?} has rank 0"))?;
        let told = told.get(first).map_or(&[][..], Vec::as_slice);
        let mut named = places.iter().map(|(node, _)| *node).filter(|node| self.interfaces.contains(node));
        let missing = named.find(|node| !told.contains(&host::interface(*node)));
        ensure(missing.is_none() || !self.interfaces.contains(first), || {
            format!("rank 0 is not told of {missing:?}: {told:?}")
        })
    }

    /// Checks that all joins of an agent that ends were answered.
    pub(in crate::coordinator) fn check_answers(&self, process: &Process) -> Result<(), Violation> {
        ensure(process.answers == process.joins, || {
            format!("process {} asked {} times and was answered {} times", process.pid, process.joins, process.answers)
        })
    }

    /// Checks that survivors of a loss know by now that their world must re-form, if no other fault happened. `hosts` come with the
    /// time of the last fault of each.
    pub(in crate::coordinator) fn check_noticed<'a>(
        &self,
        loss: &Loss,
        hosts: impl Iterator<Item = (HostId, &'a Host, Time)>,
        coordinator_fault: Time,
        now: Time,
    ) -> Result<(), Violation> {
        let clear = |fault: Time| fault == Time::ZERO || fault + 3 * self.settings.lease() < loss.at;
        if !clear(coordinator_fault) || !clear(loss.fault) {
            return Ok(());
        }
        let undisturbed = |process: &Process| {
            process.running().is_some_and(|place| place.round == loss.round && process.machine.view().waiting == 0)
        };
        let survivors = hosts.filter(|(_, _, fault)| clear(*fault));
        let undisturbed = survivors.filter(|(_, host, _)| host.process.as_ref().is_some_and(undisturbed));
        worlds::check_noticed(loss.round.0, loss.at, now, undisturbed.map(|(number, ..)| number))
    }
}

/// Checks a settled job: [`worlds::check_settled`].
///
/// # Errors
/// A node that contradicts it.
pub fn check_settled<'a>(
    hosts: impl Iterator<Item = (HostId, &'a Host)>,
    settings: &Settings,
) -> Result<(), Violation> {
    let live: Vec<_> = hosts.filter_map(|(number, host)| Some((number, host.process.as_ref()?))).collect();
    let running: Vec<_> = live.iter().filter_map(|(number, process)| process.held(*number)).collect();
    let stopping = live.iter().filter(|(_, process)| matches!(process.agent, Agent::Stopping { .. })).count();
    match settings.rules.workers {
        None => worlds::check_settled(live.len(), stopping, &running, settings),
        Some(bounds) => check_settled_workers(&live, stopping, bounds),
    }
}

/// The same if rounds count workers: as many run as may. The number of nodes is not limited.
fn check_settled_workers(live: &[(HostId, &Process)], stopping: usize, bounds: WorkerBounds) -> Result<(), Violation> {
    let offered: u32 = live.iter().map(|(host, _)| worker_count(*host)).sum();
    let expected = if offered < bounds.min { 0 } else { offered.min(bounds.max) };
    let places = || live.iter().filter_map(|(_, process)| process.running());
    let run: u32 = places().filter_map(|place| place.local_world_size).sum();
    let rounds: BTreeSet<_> = places().map(|place| place.round).collect();
    ensure(run == expected && stopping == 0 && rounds.len() <= 1, || {
        format!("{offered} workers are offered (of {bounds}), {run} run in {rounds:?}, which should be {expected}")
    })
}
