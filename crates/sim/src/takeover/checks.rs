//! The invariants of a job with a list. They are checked after every event.
//!
//! - *One world*: workers of two worlds never run at once, by what their guards do and not by what agents believe. Workers that are being
//!   stopped run until they have ended. A host is exempt while the leader has seen the connection of its node end, and the node has not come
//!   back (decision 28); so are worlds of a history that nobody remembers.
//! - *One leader*: one process leads at most.
//! - *Nothing is forgotten*: whoever leads knows each round, restart, verdict and excluded host that any leader before has sent to anybody. A
//!   leader sends rounds and restarts that do not go back, either, and a round has one world.
//! - *One history*: a run begins once. It begins anew only if no process lives that was sent its record, which takes the end of all of them.
//! - *One answer*: no join has two.
//! - *Somebody leads*: if a process is killed that leads, and for [`STEADY`] before no fault has happened to it and to those that it names as
//!   its successors, or to any listed host, and for [`LEADS_WITHIN`] after to none at all, another one leads by then. It may have been
//!   started again.
//! - *The job goes on*: once faults have ended and every host is on and runs an agent (unless the job has refused it, and if that leaves
//!   enough nodes), then within the time that agents wait for a coordinator and for a place, twice over, one process leads, and as many
//!   nodes as may run do so in one world, or the job is over. Within that time also those end that know a record and cannot go on from
//!   it, because most who knew it have died at once, or the leader after its voters' leases: the known limits of `docs/takeover.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::agent::{COORDINATOR_TIMEOUT, JOIN_TIMEOUT, RUN_ID};
use super::event::Event;
use super::host::{Agent, Host};
use super::job::Job;
use super::plan::Action;
use super::wiring::{address, endpoint};
use crate::engine::history::History;
use crate::engine::paths::HostId;
use crate::worlds::{Held, Invariant, Violation, check_world, ensure_contract};
use elastic_rs::rendezvous::messages::message::{CoordinatorMessage, Hello, Placement, Verdict};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::run::Exclusion;

/// For so long nothing has happened to these hosts before the one is killed that leads.
const STEADY: Duration = Duration::from_secs(20);
/// Within this time another one leads.
pub(super) const LEADS_WITHIN: Duration = Duration::from_secs(5);

/// What leaders have sent, since the run has begun.
#[derive(Clone, Debug, Default)]
pub(super) struct Sent {
    /// Number of histories that have begun.
    histories: u32,
    round: u64,
    restart: u32,
    /// Worlds by their rounds, and those that this history has formed or taken up.
    worlds: BTreeMap<u64, u64>,
    known: BTreeSet<u64>,
    /// Places that were taken, by world.
    placed: BTreeMap<u64, Vec<Held>>,
    closed: Option<Verdict>,
    excluded: BTreeSet<String>,
    /// Over all histories.
    pub rounds: u64,
    pub takeovers: u64,
    pub promises: u64,
}

fn broken(invariant: Invariant, text: String) -> Result<(), Violation> {
    Err(Violation { invariant, text })
}

impl Sent {
    /// A leader sends this.
    pub fn on_message(&mut self, by: HostId, message: &CoordinatorMessage) -> Result<(), Violation> {
        match message {
            CoordinatorMessage::Complete(placement) => {
                let (round, world) = (placement.round.0, placement.world);
                // A place may be repeated, as it was, after a later failure was counted.
                let is_new = round > self.round;
                if self.closed.is_some() || round < self.round || is_new && placement.restart < self.restart {
                    return Err(Violation::contract(format!("n{by} sends {placement:?} after {self:?}")));
                }
                self.rounds += u64::from(is_new);
                (self.round, self.restart) = (round, self.restart.max(placement.restart));
                let first = *self.worlds.entry(round).or_insert(world);
                self.known.insert(world);
                if first != world {
                    let text = format!("round {round} has the worlds {first:x} and {world:x}");
                    return broken(Invariant::SameWorld, text);
                }
            }
            CoordinatorMessage::Status { restart, .. } => {
                if *restart < self.restart {
                    return Err(Violation::contract(format!("n{by} sends restart {restart} after {}", self.restart)));
                }
                self.restart = *restart;
            }
            CoordinatorMessage::Closed { verdict, .. } | CoordinatorMessage::Over { verdict, .. } => {
                let first = self.closed.get_or_insert_with(|| verdict.clone());
                if first != verdict {
                    return Err(Violation::contract(format!("n{by} sends {verdict:?} after {first:?}")));
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// A node has got its place.
    pub fn on_place(&mut self, host: HostId, placement: &Placement, settings: &Settings) -> Result<(), Violation> {
        let Placement { round, world, rank, world_size, .. } = *placement;
        let places = self.placed.entry(world).or_default();
        places.push(Held { host, round: round.0, world, rank, size: world_size });
        check_world(round.0, places, settings)
    }

    pub fn on_exclusions(&mut self, hosts: &[Exclusion]) {
        self.excluded = hosts.iter().map(|host| host.addr.clone()).collect();
    }

    /// A node reports to a leader that has formed no world. If the node is in one, that is taken up.
    pub fn on_member(&mut self, hello: &Hello) {
        let placed = hello.placed.filter(|placed| placed.active);
        self.known.extend(placed.map(|placed| placed.world));
    }
}

impl Job {
    /// This process has begun to lead. If it does not know the run's record, its history begins.
    pub(super) fn check_history(&mut self, host: HostId) -> Result<(), Violation> {
        let Some(process) = &mut self.hosts[host].process else { return Ok(()) };
        if std::mem::replace(&mut process.knows, true) {
            self.told.takeovers += 1;
            return self.check_exclusions(host);
        }
        let others = self.hosts.iter().enumerate().filter(|(other, _)| *other != host);
        let mut knowing = others.filter(|(_, at)| at.process.as_ref().is_some_and(|process| process.knows));
        if let Some((other, _)) = knowing.next() {
            return Err(Violation::contract(format!("n{host} begins a history, and n{other} knows another one")));
        }
        let Sent { histories, rounds, takeovers, promises, .. } = self.told;
        self.told = Sent { histories: histories + 1, rounds, takeovers, promises, ..Sent::default() };
        Ok(())
    }

    /// Check everything.
    pub(super) fn check(&self) -> Result<(), Violation> {
        self.check_one_world()?;
        match self.leaders()[..] {
            [] => Ok(()),
            [leader] => self.check_memory(leader),
            ref all => Err(Violation::contract(format!("the processes at {all:?} lead at once"))),
        }
    }

    fn check_one_world(&self) -> Result<(), Violation> {
        let running = |(host, at): (HostId, &Host)| {
            let workers = at.workers.filter(|workers| !workers.is_torn && self.told.known.contains(&workers.world))?;
            Some((workers.world, (host, workers.round)))
        };
        let worlds: BTreeMap<_, _> = self.hosts.iter().enumerate().filter_map(running).collect();
        if worlds.len() < 2 {
            return Ok(());
        }
        let text: Vec<_> = worlds.values().map(|(host, round)| format!("round {round} on n{host}")).collect();
        broken(Invariant::OneWorld, format!("workers run at once: {}", text.join(", ")))
    }

    /// Whoever leads knows what was sent.
    fn check_memory(&self, leader: HostId) -> Result<(), Violation> {
        let part = self.hosts[leader].part();
        let told = &self.told;
        let Some(run) = part.and_then(|part| part.machine.run(RUN_ID)) else {
            return match told.round > 0 || told.closed.is_some() {
                true => Err(Violation::contract(format!("n{leader} leads, and knows nothing of {told:?}"))),
                false => Ok(()),
            };
        };
        let knows_end = told.closed.is_none() || run.closed() == told.closed.as_ref();
        let knows = run.round().0 >= told.round && run.restart() >= told.restart && knows_end;
        ensure_contract(knows, || {
            let (round, restart, end) = (run.round(), run.restart(), run.closed());
            format!("n{leader} leads in round {round}, restart {restart}, end {end:?}, and has forgotten {told:?}")
        })
    }

    /// Whoever takes over keeps the hosts out that its predecessor has kept out. If it knows a later failure, that may have let some in. A run
    /// that is closed admits nobody, and has none out.
    fn check_exclusions(&self, leader: HostId) -> Result<(), Violation> {
        let part = self.hosts[leader].part();
        let Some(run) = part.and_then(|part| part.machine.run(RUN_ID)) else { return Ok(()) };
        if run.closed().is_some() {
            return Ok(());
        }
        let now = self.hosts[leader].clock(self.engine.now());
        let out: BTreeSet<_> = run.exclusions(now).into_iter().map(|host| host.addr).collect();
        let excluded = &self.told.excluded;
        ensure_contract(run.restart() > self.told.restart || out.is_superset(excluded), || {
            format!("n{leader} takes over and keeps {out:?} out, not {excluded:?}")
        })
    }

    /// Whether another process has to lead soon if the one on this host is killed now. It has to if that one leads, and either its named
    /// successors and itself have been steady, or all listed hosts.
    pub(super) fn promises_a_leader(&self, host: HostId) -> bool {
        let now = self.engine.now();
        let is_steady =
            |host: HostId| self.hosts[host].part().is_some() && now >= self.hosts[host].steady_since + STEADY;
        let led = self.hosts[host].part().and_then(|part| part.machine.led());
        led.is_some_and(|led| {
            let of = |place: &HostId| led.successors.contains(&endpoint(*place));
            let named: Vec<_> = (0..self.options.listed).filter(of).collect();
            is_steady(host) && named.iter().all(|place| is_steady(*place)) && !named.is_empty()
                || (0..self.options.listed).all(is_steady)
        })
    }

    pub(super) fn check_led(&mut self, faults: u64) -> Result<(), Violation> {
        if faults != self.faults {
            return Ok(());
        }
        self.told.promises += 1;
        match self.leaders().is_empty() {
            true => broken(Invariant::Settles, format!("nobody leads {LEADS_WITHIN:?} after the death of the leader")),
            false => Ok(()),
        }
    }
}

impl History for Job {
    /// Agents that can go on no more wait for a coordinator, or for a place, and are started again. Then those that wait for them do the
    /// same once more.
    const SETTLE_WITHIN: Duration = Duration::from_secs(2 * COORDINATOR_TIMEOUT.as_secs() + 2 * JOIN_TIMEOUT.as_secs());
    /// An agent that has not learnt how the job ended, because the processes that knew have gone, waits for a coordinator.
    const GONE_WITHIN: Duration = Duration::from_secs(COORDINATOR_TIMEOUT.as_secs() + JOIN_TIMEOUT.as_secs() + 30);

    fn calm(&mut self) {
        self.is_calm = true;
        let now = self.engine.now();
        (0..self.hosts.len()).for_each(|host| self.engine.push(now, Event::Act(Action::Start(host))));
    }

    fn check_settled(&mut self) -> Result<(), Violation> {
        let least = self.options.settings.min_nodes as usize;
        if self.told.closed.is_some() || self.hosts.iter().filter(|at| at.process.is_some()).count() < least {
            return Ok(());
        }
        let [leader] = self.leaders()[..] else {
            return broken(Invariant::Settles, format!("the processes at {:?} lead", self.leaders()));
        };
        let part = self.hosts[leader].part();
        let run = part.and_then(|part| part.machine.run(RUN_ID));
        let now = self.hosts[leader].clock(self.engine.now());
        let out = run.map(|run| run.exclusions(now)).unwrap_or_default();
        let is_out = |host: HostId| out.iter().any(|out| out.addr == address(host).to_string());
        let processes = self.hosts.iter().enumerate().filter(|(host, _)| !is_out(*host));
        let may_run: Vec<_> = processes.filter_map(|(_, at)| Some((at, at.process.as_ref()?))).collect();
        let runs = may_run.iter().filter(|(at, it)| it.agent == Agent::Runs && at.workers.is_some()).count();
        let worlds: BTreeSet<_> = self.hosts.iter().filter_map(|at| at.workers).map(|workers| workers.world).collect();
        if may_run.len() < least {
            return Ok(());
        }
        let wanted = may_run.len().min(self.options.settings.max_nodes as usize);
        let unanswered = may_run.iter().filter(|(_, it)| it.agent == Agent::Runs && it.answers != it.joins).count();
        if runs == wanted && worlds.len() <= 1 && unanswered == 0 {
            return Ok(());
        }
        let waits: Vec<_> = may_run.iter().map(|(_, it)| (it.agent, it.node.waits().map(|(_, why)| why))).collect();
        let text = format!("{wanted} nodes should run in one world, and {runs} do in {worlds:?}: {waits:?}");
        broken(Invariant::Settles, text)
    }

    fn close(&mut self) -> Vec<HostId> {
        self.ends = true;
        let now = self.engine.now();
        let runs = |at: &Host| at.process.as_ref().is_some_and(|process| process.agent == Agent::Runs);
        let any = self.hosts.iter().position(runs).or(self.hosts.iter().position(|at| at.process.is_some()));
        any.into_iter().for_each(|host| self.engine.push(now, Event::Act(Action::Close(host))));
        any.into_iter().collect()
    }

    fn check_ended(&mut self, _: &[HostId]) -> Result<(), Violation> {
        let left = self.hosts.iter().position(|at| at.process.is_some() || at.workers.is_some());
        left.map_or(Ok(()), |host| Err(Violation::contract(format!("n{host} has not ended with the job"))))
    }
}
