//! Machines are checked beside joins, and ill ones are in no world.

use std::time::Duration;

use super::super::event::Event;
use super::super::simulation::Simulation;
use crate::engine::paths::HostId;
use crate::engine::queue::Time;
use crate::worlds::Violation;
use elastic_rs::rendezvous::messages::message::Health;

/// Which machines are ill, and how long checks take.
#[derive(Clone, Debug, Default)]
pub struct Ill {
    /// From when to when a host is.
    pub hosts: Vec<(HostId, Time, Time)>,
    /// Shortest and longest time that a check takes.
    pub lasts: (Duration, Duration),
}

/// What an agent knows of its machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Checked {
    Never,
    Since(Time),
    Found { ill: bool },
}

/// A check takes less, whatever happens to its machine.
const LONGEST: Duration = Duration::from_secs(30);

impl Simulation {
    /// A check begins, unless one runs.
    pub(super) fn check_health(&mut self, host: HostId) {
        let (now, lasts) =
            (self.now(), self.options.agents.health.as_ref().map(|health| health.lasts).unwrap_or_default());
        let Some((process, ours)) = self.ours(host) else { return };
        process.machine.set_health(Health::Checking);
        if matches!(ours.health, Checked::Since(_)) {
            return;
        }
        ours.health = Checked::Since(now);
        let pid = process.pid;
        let after = self.engine.dice.duration(lasts).min(LONGEST);
        self.engine.push(now + after, Event::Checked(host, pid));
    }

    /// A check is over.
    pub(in crate::coordinator) fn on_checked(&mut self, host: HostId, pid: u64) -> Result<(), Violation> {
        let now = self.now();
        let hosts = self.options.agents.health.as_ref().map(|health| health.hosts.clone()).unwrap_or_default();
        let ill = hosts.iter().any(|(its, from, until)| *its == host && (*from..*until).contains(&now));
        let Some((process, ours)) = self.ours(host).filter(|(process, _)| process.pid == pid) else { return Ok(()) };
        ours.health = Checked::Found { ill };
        process.machine.set_health(if ill { Health::Ill("it is hot".to_owned()) } else { Health::Well });
        self.after_node(host)
    }

    /// A node is placed in a world.
    pub(super) fn check_placed(&mut self, host: HostId) -> Result<(), Violation> {
        let now = self.now();
        let checks = self.options.agents.health.is_some();
        let Some((_, ours)) = self.ours(host).filter(|_| checks) else { return Ok(()) };
        match ours.health {
            Checked::Found { ill: false } => Ok(()),
            // It may have been stopped meanwhile, or cut off.
            Checked::Since(since) if now > since + LONGEST => Ok(()),
            health => Err(Violation::contract(format!("host{host} is in a world, and its machine is {health:?}"))),
        }
    }
}
