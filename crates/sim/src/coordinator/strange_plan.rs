//! Histories of jobs among odd hosts: the plans of [`super::plan`] with several runs on one coordinator, agents at the address and
//! name of another, nodes with other settings or of another version, requested ranks, hosts that leave more often than they may,
//! and connections that claim anything.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::history::{Report, live_plan};
use super::ledger::OTHER_SETTINGS;
use super::odd_hosts::OddHosts;
use super::options::{Action, run_id};
use super::plan::Plan;
use super::simulation::Simulation;
use crate::engine::dice::Dice;
use crate::engine::history::Failure;
use crate::engine::paths::HostId;
use crate::worlds::Violation;
use elastic_rs::rendezvous::messages::message::{Generation, Hello, NodeId, NodeMessage, Placed, Round};
use elastic_rs::rendezvous::messages::settings::{LONGEST_GRACE, LONGEST_LEASE, LONGEST_WAIT, Settings};

/// Number of refused nodes, by reason.
pub type Refusals = BTreeMap<&'static str, usize>;

/// Texts of refusals, and their names here.
const REFUSALS: [(&str, &str); 5] = [
    (OTHER_SETTINGS, "settings"),
    ("was replaced by a newer agent", "replaced before"),
    ("registered from the same address, so this one", "replaced"),
    ("rejoin_limit", "flapping"),
    ("rendezvous protocol version", "version"),
];

/// Draw a plan with odd hosts.
pub fn draw(seed: u64) -> Plan {
    let mut plan = Plan::draw(seed);
    // A separate generator, so that the rest of a seed's plan is the same as without odd hosts.
    let mut dice = Dice::new(seed ^ 0x57A6);
    if dice.chance(40) {
        draw_runs(&mut plan, &mut dice);
    }
    if dice.chance(50) {
        draw_ranks(&mut plan, &mut dice);
    }
    if dice.chance(50) {
        draw_twins(&mut plan, &mut dice);
    }
    if dice.chance(40) {
        draw_settings(&mut plan, &mut dice);
    }
    if dice.chance(25) {
        plan.options.odd_hosts.versions = some_hosts(&plan, &mut dice, 4);
    }
    if dice.chance(30) {
        draw_flapping(&mut plan, &mut dice);
    }
    // Again a separate generator.
    let mut dice = Dice::new(seed ^ 0xC1A1);
    if dice.chance(30) {
        draw_intruders(&mut plan, &mut dice);
    }
    plan
}

/// Connections that belong to no host, make claims, and end: times beyond any job's, and places in worlds that never existed.
fn draw_intruders(plan: &mut Plan, dice: &mut Dice) {
    let settings = Settings {
        keep_alive_interval: LONGEST_LEASE,
        keep_alive_max_attempt: 1,
        reconnect_grace: LONGEST_GRACE,
        last_call_timeout: LONGEST_WAIT,
        settle_timeout: LONGEST_WAIT,
        ..plan.options.settings.clone()
    };
    for number in 0..dice.between(1, 6) {
        let run = dice.between(0, plan.options.odd_hosts.runs() as u64 - 1) as usize;
        let claims = dice.chance(70).then(|| Placed {
            round: Round(dice.between(1, 1 << 40)),
            rank: 0,
            world_size: settings.max_nodes,
            world: dice.number(),
            active: dice.chance(50),
            restart: 0,
            host: None,
            began_with: Generation { round: Round(dice.between(0, 1 << 40)), world: dice.number() },
        });
        let node = NodeId(u128::from(dice.number()));
        let hello = Hello::new(run_id(run), node, format!("intruder{number}"), settings.clone());
        let hello = Hello { placed: claims, process: dice.number(), ..hello };
        // An odd host that joins is a member until it goes. The scenarios have the consequences.
        let reported = [vec![], vec![NodeMessage::Heartbeat { rtt_us: None }], vec![NodeMessage::Withdraw]];
        let reported = reported[dice.between(0, 2) as usize].clone();
        let at = dice.duration((Duration::ZERO, plan.calm_at));
        plan.add(at, Action::Intrude(Box::new(hello), reported), Duration::ZERO);
    }
}

fn some_hosts(plan: &Plan, dice: &mut Dice, at_most: u64) -> BTreeSet<HostId> {
    let last = plan.options.hosts as u64 - 1;
    (0..dice.between(1, at_most)).map(|_| dice.between(0, last) as usize).collect()
}

/// Two to four runs share the coordinator.
fn draw_runs(plan: &mut Plan, dice: &mut Dice) {
    let runs = dice.between(2, 4);
    let of = (0..plan.options.hosts).map(|host| (host, dice.between(0, runs - 1) as usize));
    plan.options.odd_hosts.runs = of.filter(|(_, run)| *run > 0).collect();
    // Otherwise hardly any run would have enough nodes.
    let min = &mut plan.options.settings.min_nodes;
    *min = (*min / runs as u32).max(1);
}

/// Some or all hosts ask for a rank, sometimes two for the same.
fn draw_ranks(plan: &mut Plan, dice: &mut Dice) {
    let share = [100, 50, 10][dice.between(0, 2) as usize];
    let hosts = plan.options.hosts;
    let apart = dice.chance(70);
    for host in 0..hosts {
        if !dice.chance(share) {
            continue;
        }
        let rank = if apart { hosts - 1 - host } else { dice.between(0, 3) as usize };
        plan.options.node_ranks.insert(host, rank as u32);
    }
}

/// Restarted pods that have the address and the name of an agent that may still live, and the reverse.
fn draw_twins(plan: &mut Plan, dice: &mut Dice) {
    let mut taken = BTreeSet::new();
    for _ in 0..dice.between(1, 3) {
        let last = plan.options.hosts as u64 - 1;
        let pair = [(); 2].map(|()| dice.between(0, last) as usize);
        if pair[0] == pair[1] || pair.iter().any(|host| taken.contains(host)) {
            continue;
        }
        taken.extend(pair);
        plan.options.odd_hosts.twins.insert(pair[1], pair[0]);
        if let Some(rank) = plan.options.node_ranks.get(&pair[0]).copied() {
            plan.options.node_ranks.insert(pair[1], rank);
        }
        for _ in 0..dice.between(1, 6) {
            let host = pair[dice.between(0, 1) as usize];
            let at = dice.duration((Duration::ZERO, plan.calm_at));
            plan.add(at, Action::Start(host, plan.options.join_timeout), Duration::ZERO);
        }
    }
}

/// Some nodes ask for other numbers of nodes, or for another budget. The first node determines the run's settings.
fn draw_settings(plan: &mut Plan, dice: &mut Dice) {
    let usual = &plan.options.settings;
    let other = match dice.between(0, 2) {
        0 => Settings { max_nodes: usual.max_nodes + 1, ..usual.clone() },
        1 => Settings { min_nodes: usual.min_nodes + 1, max_nodes: usual.max_nodes + 1, ..usual.clone() },
        _ => Settings { max_restarts: Some(7_000_000), ..usual.clone() },
    };
    let hosts = some_hosts(plan, dice, 4);
    plan.options.odd_hosts.settings = hosts.into_iter().map(|host| (host, other.clone())).collect();
}

/// Hosts that leave and join again, with a `rejoin_limit`.
fn draw_flapping(plan: &mut Plan, dice: &mut Dice) {
    plan.options.settings.rejoin_limit = dice.between(1, 4) as u32;
    plan.options.settings.rejoin_window = dice.duration((Duration::from_secs(10), Duration::from_secs(600)));
    let limit = plan.options.settings.rejoin_limit;
    for settings in plan.options.odd_hosts.settings.values_mut() {
        settings.rejoin_limit = limit;
    }
    for host in some_hosts(plan, dice, 3) {
        let every = dice.duration((Duration::from_secs(2), Duration::from_secs(40)));
        let first = dice.duration((Duration::ZERO, Duration::from_secs(60)));
        let end = [Action::Kill(host), Action::Terminate(host)][dice.between(0, 1) as usize].clone();
        for time in 0..limit + 3 {
            plan.add(first + every * time, Action::Start(host, plan.options.join_timeout), Duration::ZERO);
            plan.add(first + every * time + every * 2 / 3, end.clone(), Duration::ZERO);
        }
    }
}

/// Live through the history of a seed. Also returns how often nodes were refused, by reason.
///
/// # Errors
/// The first invariant that breaks. With `keep_history`, the last events before it.
pub fn live(seed: u64, keep_history: bool) -> Result<(Report, Refusals), Box<Failure>> {
    let plan = draw(seed);
    let (report, job) = live_plan(seed, &plan, keep_history)?;
    let mut refusals = refusals(&plan, &job).map_err(|violation| Failure::new(seed, &job.engine, violation))?;
    if plan.options.odd_hosts.runs() > 1 {
        *refusals.entry("several runs").or_default() += 1;
    }
    Ok((report, refusals))
}

/// Counts the refused nodes. Checks that the plan has a cause for each.
fn refusals(plan: &Plan, job: &Simulation) -> Result<Refusals, Violation> {
    let OddHosts { twins, settings, versions, .. } = &plan.options.odd_hosts;
    let shares = |host: HostId| twins.contains_key(&host) || twins.values().any(|of| *of == host);
    let mut counts = Refusals::new();
    for (number, host) in job.hosts().iter().enumerate() {
        for text in host.exits.iter().map(|exit| format!("{exit:?}")) {
            for (_, kind) in REFUSALS.iter().filter(|(part, _)| text.contains(part)) {
                let due = match *kind {
                    "settings" => !settings.is_empty(),
                    "version" => versions.contains(&number),
                    "flapping" => plan.options.settings.rejoin_limit > 0,
                    _ => shares(number),
                };
                if !due {
                    return Err(Violation::contract(format!(
                        "host{number} is refused without a cause ({kind}): {text}"
                    )));
                }
                *counts.entry(kind).or_default() += 1;
            }
        }
    }
    Ok(counts)
}
