//! Plans: the faults of a history and their times, drawn from a seed.

use std::collections::BTreeMap;
use std::time::Duration;

use super::agent::Agents;
use super::elastic::Elastic;
use super::odd_hosts::OddHosts;
use super::options::{Action, Options};
use crate::engine::dice::Dice;
use crate::engine::paths::{End, HostId, Partition};
use crate::engine::queue::Time;
use elastic_rs::rendezvous::messages::settings::{OnPartition, Settings};

/// The plan of a history.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The job's options.
    pub options: Options,
    /// The actions on the job, and their times.
    pub actions: Vec<(Time, Action)>,
    /// When the calm begins.
    pub calm_at: Time,
}

impl Plan {
    /// Draw a plan.
    pub fn draw(seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        // Small jobs find the most and cost the least: half have at most eight nodes.
        let hosts = match dice.between(0, 19) {
            0..=9 => dice.between(3, 8),
            10..=16 => dice.between(9, 30),
            17..=18 => dice.between(31, 100),
            _ => dice.between(101, 300),
        } as usize;
        let max_nodes = match dice.between(0, 2) {
            0 => hosts as u64,
            1 => dice.between(1, hosts as u64),
            _ => hosts as u64 + dice.between(0, 3),
        };
        let min_nodes = match dice.between(0, 2) {
            0 => max_nodes,
            1 => dice.between(1, max_nodes),
            _ => 1 + max_nodes / 2,
        };
        let mut settings = Settings::new(min_nodes.min(max_nodes) as u32, max_nodes as u32);
        if dice.chance(30) {
            settings.last_call_timeout = dice.duration((Duration::ZERO, Duration::from_secs(30)));
            settings.settle_timeout = dice.duration((Duration::ZERO, Duration::from_secs(5)));
            settings.reconnect_grace = dice.duration((Duration::ZERO, Duration::from_secs(3)));
            // With a lease shorter than a few messages' time, healthy nodes would be lost for ever.
            settings.keep_alive_interval = dice.duration((Duration::from_secs(2), Duration::from_secs(5)));
            settings.keep_alive_max_attempt = dice.between(2, 3) as u32;
        }
        if dice.chance(50) {
            // More than a history has failures: a budget that is used up is a separate scenario.
            settings.max_restarts = Some(1_000_000);
        }
        if dice.chance(15) {
            settings.on_partition = OnPartition::Continue;
        }
        // Hosts of a plan come and go without a limit.
        settings.rejoin_limit = 0;
        let slowest = [1, 5, 50, 1000][dice.between(0, 3) as usize];
        let options = Options {
            seed,
            hosts,
            settings,
            coordinator_timeout: Duration::from_secs(dice.between(30, 300)),
            join_timeout: Duration::from_secs(3600),
            delay: (Duration::from_micros(100), Duration::from_millis(slowest)),
            stop: super::host::STOP,
            rejoin: dice.chance(50),
            local_addrs: BTreeMap::new(),
            node_ranks: BTreeMap::new(),
            clocks: draw_clocks(seed, hosts),
            agents: Agents::default(),
            elastic: Elastic::default(),
            odd_hosts: OddHosts::default(),
            // A separate generator, so that later draws stay as they were.
            members: Dice::new(seed ^ 0x3E3B).chance(25),
            life_ports: true,
            coordinator_on: None,
        };
        let mut plan = Self { options, actions: Vec::new(), calm_at: Time::ZERO };
        plan.draw_starts(&mut dice);
        plan.draw_faults(&mut dice);
        plan
    }

    /// The same, with the coordinator in the process of the first host's agent: it dies and comes back with that agent.
    pub fn draw_with_host(seed: u64) -> Self {
        let mut plan = Self::draw(seed);
        plan.options.coordinator_on = Some(0);
        for (_, action) in &mut plan.actions {
            match action {
                Action::CrashCoordinator => *action = Action::Kill(0),
                Action::StartCoordinator => *action = Action::Start(0, plan.options.join_timeout),
                _ => {}
            }
        }
        plan
    }

    fn draw_starts(&mut self, dice: &mut Dice) {
        let spread = [0, 100, 3_000, 60_000, 180_000][dice.between(0, 4) as usize];
        let impatient = [0, 0, 5, 40][dice.between(0, 3) as usize];
        for host in 0..self.options.hosts {
            let at = Duration::from_millis(dice.between(0, spread));
            // Some agents have short join time-outs. In the calm all have long ones.
            let timeout = if dice.chance(impatient) { dice.between(1, 60) } else { 3600 };
            self.add(at, Action::Start(host, Duration::from_secs(timeout)), Duration::ZERO);
            if timeout < 3600 {
                self.calm_at = self.calm_at.max(at + Duration::from_secs(timeout + 2));
            }
        }
    }

    fn draw_faults(&mut self, dice: &mut Dice) {
        let length = Duration::from_secs(dice.between(20, 300));
        let count = match dice.between(0, 3) {
            0 => dice.between(0, 3),
            1 | 2 => dice.between(3, 15),
            _ => dice.between(10, 40),
        };
        // The kinds of fault are drawn too, so that rare combinations occur without others.
        let kinds: Vec<u64> = (0..dice.between(1, 8)).map(|_| dice.between(0, 12)).collect();
        for _ in 0..count {
            let at = dice.duration((Duration::ZERO, length));
            let host = dice.between(0, self.options.hosts as u64 - 1) as usize;
            let kind = kinds[dice.between(0, kinds.len() as u64 - 1) as usize];
            self.draw_fault(kind, host, at, dice);
        }
        self.calm_at = self.calm_at.max(length);
    }

    fn draw_fault(&mut self, kind: u64, host: usize, at: Time, dice: &mut Dice) {
        let hosts = self.options.hosts;
        let brief = dice.duration((Duration::from_millis(1), Duration::from_secs(3)));
        let long = dice.duration((Duration::from_secs(1), Duration::from_secs(60)));
        let some = if dice.chance(70) { brief } else { long };
        let kind_of_cut = if dice.chance(50) { Partition::Held } else { Partition::Lost };
        match kind {
            0..=2 => {
                let death =
                    [Action::Kill(host), Action::PowerOff(host), Action::Terminate(host)][kind as usize].clone();
                self.add(at, death, Duration::ZERO);
                if dice.chance(60) {
                    let patience = self.options.join_timeout;
                    self.add(at + some, Action::Start(host, patience), Duration::ZERO);
                }
            }
            3 => self.add(at, Action::Stall(host, some), some),
            4 => self.add(at, Action::Sever(host), brief),
            5 => {
                // A flapping connection.
                for i in 0..dice.between(2, 12) {
                    self.add(at + brief * i as u32 / 4, Action::Sever(host), brief);
                }
            }
            6 | 7 => {
                // One host, or several that share a switch. One direction or both.
                let width = if dice.chance(50) { 1 } else { dice.between(1, 1 + hosts as u64 / 2) as usize };
                let ways = dice.between(1, 3);
                for host in (host..host + width).map(|host| host % hosts) {
                    for (bit, to) in [(1, End::Coordinator), (2, End::Node)] {
                        if ways & bit > 0 {
                            self.add(at, Action::Cut(host, to, some, kind_of_cut), some);
                        }
                    }
                }
            }
            8 => self.add(at, Action::FailWorkers(host), Duration::ZERO),
            12 => self.add(at, Action::ReportFailure(host), Duration::ZERO),
            9 => self.add(at, Action::StallCoordinator(some), some),
            10 => {
                self.add(at, Action::CrashCoordinator, some);
                self.add(at + some, Action::StartCoordinator, Duration::ZERO);
            }
            _ => {
                // All connections at one instant: a switch was restarted.
                for host in 0..hosts {
                    self.add(at, Action::Sever(host), brief);
                }
            }
        }
    }

    /// Add an action whose effect lasts for `lasts`.
    pub(super) fn add(&mut self, at: Time, action: Action, lasts: Duration) {
        self.calm_at = self.calm_at.max(at + lasts);
        self.actions.push((at, action));
    }
}

/// Draw the clocks. In half of all jobs they are right. In the others each is off by up to a minute or, in a few jobs, an hour.
fn draw_clocks(seed: u64, hosts: usize) -> BTreeMap<HostId, i64> {
    // A separate generator, so that later draws stay as they were.
    let mut dice = Dice::new(seed ^ 0xC10C);
    let most = [0, 0, 60, 3600][dice.between(0, 3) as usize] * 1_000_000;
    (0..hosts).map(|host| (host, dice.between(0, 2 * most) as i64 - most as i64)).collect()
}
