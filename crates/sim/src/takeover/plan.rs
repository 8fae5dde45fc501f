//! Jobs and their faults, drawn from a seed.

use std::time::Duration;

use crate::engine::dice::Dice;
use crate::engine::paths::{HostId, Partition};
use crate::engine::queue::Time;
use elastic_rs::rendezvous::messages::settings::Settings;

/// Something that happens to a host, or that its agent does by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// An agent starts, unless one is there.
    Start(HostId),
    /// SIGKILL of the agent.
    Kill(HostId),
    /// The same of whoever leads. It is started again after this time.
    KillLeader(Duration),
    /// The host is switched off: no connection is closed, and nobody is refused.
    PowerOff(HostId),
    /// SIGTERM of the agent.
    Terminate(HostId),
    /// A worker fails.
    Fail(HostId),
    /// The agent declares that the job has succeeded.
    Close(HostId),
    /// SIGSTOP of the agent, and SIGCONT later.
    Stall(HostId, Duration),
    /// The connections of the host with others are reset.
    Sever(HostId),
    /// What one host sends to another does not arrive.
    Cut(HostId, HostId, Duration, Partition),
}

/// A mistake that an invariant must show: of a driver, or of the machines as their neighbours see them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// A voter that was started again has the id it had before.
    KeepsItsId,
    /// A refused connection renews a node's lease.
    RefusalRenews,
    /// A leader sends what it has decided before that is chosen.
    SaidEarly,
    /// A new leader takes members that have not reported for gone.
    NobodyIsWaitedFor,
    /// An ended connection is taken for the proof of a death.
    EndIsProof,
    /// A reset connection is taken for the proof of a death.
    ResetIsProof,
    /// A process that starts takes a silent endpoint for one at which nobody listens.
    SilenceIsAbsence,
    /// When the thread of a coordinator panics, its process lives on.
    ThreadDiesAlone,
    /// Guards have no deadline.
    NoDeadline,
}

/// A job.
#[derive(Clone, Debug)]
pub struct Options {
    /// Number of hosts.
    pub hosts: usize,
    /// How many of them, the first ones, are in the list.
    pub listed: usize,
    /// The settings of all nodes.
    pub settings: Settings,
    /// Shortest and longest transit time of a message.
    pub delay: (Duration, Duration),
    /// Shortest and longest time that it takes to stop workers.
    pub stop: (Duration, Duration),
    /// By how many millionths the clock of each host is fast.
    pub drift: Vec<i64>,
    /// A mistake.
    pub mutation: Option<Mutation>,
}

/// A job and its faults.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The job.
    pub options: Options,
    /// What happens, and when.
    pub actions: Vec<(Time, Action)>,
    /// The time after which no fault happens.
    pub calm_at: Time,
}

/// Clocks differ from the true time by up to one in a hundred.
const DRIFT_PPM: u64 = 10_000;
const SECOND: Duration = Duration::from_secs(1);

impl Plan {
    /// The plan of a seed.
    pub fn draw(seed: u64, mutation: Option<Mutation>) -> Self {
        let mut dice = Dice::new(seed);
        let mut plan = Self { options: Options::draw(&mut dice, mutation), actions: Vec::new(), calm_at: SECOND * 60 };
        let spread = [0, 300, 5_000][dice.between(0, 2) as usize];
        for host in 0..plan.options.hosts {
            plan.add(Duration::from_millis(dice.between(0, spread)), Action::Start(host));
        }
        // Most mistakes show when whoever leads dies.
        match dice.between(0, if mutation.is_some() { 1 } else { 3 }) {
            0 => plan.one_after_another(&mut dice),
            1 => plan.with_another_fault(&mut dice),
            _ => plan.at_any_time(&mut dice),
        }
        plan
    }

    fn add(&mut self, at: Time, action: Action) {
        self.actions.push((at, action));
        let lasts = match action {
            Action::Stall(_, lasts) | Action::Cut(_, _, lasts, _) | Action::KillLeader(lasts) => lasts,
            _ => Duration::ZERO,
        };
        self.calm_at = self.calm_at.max(at + lasts);
    }

    /// Listed processes end one after another. Each has time to come back, so that another one leads each time.
    fn one_after_another(&mut self, dice: &mut Dice) {
        let mut at = SECOND * 30;
        for _ in 0..dice.between(1, 4) {
            let host = dice.between(0, self.options.listed as u64 - 1) as usize;
            if dice.chance(40) {
                let other = dice.between(0, self.options.hosts as u64 - 1) as usize;
                self.add(at - SECOND * 8, Action::Fail(other));
            }
            let back = dice.duration((SECOND / 10, SECOND * 8));
            match dice.between(0, 3) {
                0 => self.add(at, Action::Terminate(host)),
                1 => self.add(at, Action::Kill(host)),
                _ => self.add(at, Action::KillLeader(back)),
            }
            self.add(at + back, Action::Start(host));
            at += back + SECOND * 30;
        }
    }

    /// Whoever leads is killed, and something else happens at about that time.
    fn with_another_fault(&mut self, dice: &mut Dice) {
        let (mut at, last) = (SECOND * 25, self.options.hosts as u64 - 1);
        for _ in 0..dice.between(1, 2) {
            let host = dice.between(0, last) as usize;
            let lasts = dice.duration((SECOND, SECOND * 25));
            let most = [SECOND / 8, SECOND, SECOND * 4][dice.between(0, 2) as usize];
            let before = dice.duration((Duration::ZERO, most));
            match dice.between(0, 5) {
                0 => self.add(at - before.min(SECOND / 8), Action::Fail(host)),
                1 => self.add(at - before, Action::Sever(host)),
                2 => self.add(at - before, Action::Stall(host, lasts)),
                _ => self.cut(host, at - before, lasts, dice),
            }
            self.add(at, Action::KillLeader(dice.duration((SECOND / 10, SECOND * 20))));
            at += SECOND * 35;
        }
    }

    /// Anything at any time.
    fn at_any_time(&mut self, dice: &mut Dice) {
        let last = self.options.hosts as u64 - 1;
        for _ in 0..dice.between(0, 9) {
            let at = dice.duration((Duration::ZERO, SECOND * 60));
            let lasts = dice.duration((SECOND / 100, SECOND * 25));
            // Those that are listed matter more.
            let most = if dice.chance(70) { self.options.listed as u64 - 1 } else { last };
            let host = dice.between(0, most) as usize;
            let end = |plan: &mut Self, action, dice: &mut Dice| {
                plan.add(at, action);
                if dice.chance(70) {
                    plan.add(at + lasts, Action::Start(host));
                }
            };
            match dice.between(0, 11) {
                0..=2 => end(self, Action::Kill(host), dice),
                3 => end(self, Action::PowerOff(host), dice),
                4 => end(self, Action::Terminate(host), dice),
                5 => self.add(at, Action::Fail(host)),
                6 | 7 => self.add(at, Action::Stall(host, lasts)),
                8 => self.add(at, Action::Sever(host)),
                9 if dice.chance(8) => self.add(at, Action::Close(host)),
                _ => self.cut(host, at, lasts, dice),
            }
        }
    }

    /// A host is cut off from another one, or from all; one way or both.
    fn cut(&mut self, host: HostId, at: Time, lasts: Duration, dice: &mut Dice) {
        let kind = if dice.chance(50) { Partition::Lost } else { Partition::Held };
        let (both, outwards) = (dice.chance(60), dice.chance(50));
        let only = dice.chance(40).then(|| dice.between(0, self.options.hosts as u64 - 1) as usize);
        for other in (0..self.options.hosts).filter(|other| *other != host && only.is_none_or(|only| only == *other)) {
            if both || outwards {
                self.add(at, Action::Cut(host, other, lasts, kind));
            }
            if both || !outwards {
                self.add(at, Action::Cut(other, host, lasts, kind));
            }
        }
    }
}

impl Options {
    /// A job on so many hosts with right clocks, of which so many are listed. Its workers stop at once.
    pub fn new(hosts: usize, listed: usize, settings: Settings) -> Self {
        let (delay, stop) = ((SECOND / 1000, SECOND / 1000), (SECOND / 20, SECOND / 20));
        Self { hosts, listed, settings, delay, stop, drift: vec![0; hosts], mutation: None }
    }

    fn draw(dice: &mut Dice, mutation: Option<Mutation>) -> Self {
        let hosts = dice.between(3, 5);
        let listed = if dice.chance(10) { hosts } else { dice.between(2, 3) };
        let least = dice.between(1, hosts - 1) as u32;
        let mut settings = Settings::new(least, hosts as u32 - u32::from(dice.chance(20) && least < hosts as u32 - 1));
        settings.last_call_timeout = dice.duration((SECOND / 2, SECOND * 5));
        settings.settle_timeout = dice.duration((SECOND / 2, SECOND * 3));
        settings.max_restarts = Some(if dice.chance(10) { 1 } else { 100 });
        if dice.chance(25) {
            settings.rules.host_failures = dice.between(1, 2) as u32;
        }
        let slowest = Duration::from_millis([1, 20, 100][dice.between(0, 2) as usize]);
        let drift = |_| dice.between(0, 2 * DRIFT_PPM) as i64 - DRIFT_PPM as i64;
        Self {
            hosts: hosts as usize,
            listed: listed as usize,
            settings,
            delay: (Duration::from_micros(100), slowest),
            stop: (SECOND / 20, SECOND * 5),
            drift: (0..hosts).map(drift).collect(),
            mutation,
        }
    }
}
