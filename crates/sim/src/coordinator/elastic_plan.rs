//! Histories of jobs whose workers live through changes of the world: the plans of [`super::plan`], in which the workers of some or all
//! hosts do, and agents ask to leave.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::actions::DRAIN;
use super::elastic::{Elastic, PATIENCE};
use super::history::{Report, live_plan};
use super::options::Action;
use super::plan::Plan;
use crate::engine::dice::Dice;
use crate::engine::history::Failure;
use crate::engine::paths::{End, Partition};

/// Draw a plan with changes in place.
pub fn draw(seed: u64) -> Plan {
    let mut plan = if seed.is_multiple_of(4) { Plan::draw_with_host(seed) } else { Plan::draw(seed) };
    // A separate generator, so that the rest of a seed's plan is the same as without changes in place.
    let mut dice = Dice::new(seed ^ 0xE1A5);
    let share = [100, 100, 100, 50][dice.between(0, 3) as usize];
    let hosts: BTreeSet<_> = (0..plan.options.hosts).filter(|_| dice.chance(share)).collect();
    let millis = |slowest: &[u64], dice: &mut Dice| {
        let most = slowest[dice.between(0, slowest.len() as u64 - 1) as usize];
        (Duration::from_millis(1), Duration::from_millis(most))
    };
    plan.options.elastic = Elastic {
        hosts,
        attend: millis(&[1, 100, 5_000], &mut dice),
        count: millis(&[1, 50, 7_000], &mut dice),
        stop: millis(&[1, 500, 40_000], &mut dice),
        sync: millis(&[1, 500, SLOW.as_millis() as u64], &mut dice),
        mute: [0, 0, 2, 20][dice.between(0, 3) as usize],
        fragile: [0, 10, 50][dice.between(0, 2) as usize],
        well_from: plan.calm_at,
        by_number_alone: false,
    };
    draw_departures(&mut plan, &mut dice);
    if plan.options.hosts <= 8 && dice.chance(50) {
        draw_return(&mut plan, &mut dice);
    }
    plan.options.elastic.well_from = plan.calm_at;
    plan
}

/// A host is out of reach while the workers of all others end, for less than its lease. The others begin again from the checkpoint, and
/// count their commits from 0. It comes back with its workers, whose commits have higher numbers, into worlds most of which break before
/// they are synchronised.
fn draw_return(plan: &mut Plan, dice: &mut Dice) {
    let hosts = plan.options.hosts;
    let seconds = |from, to, dice: &mut Dice| dice.duration((Duration::from_secs(from), Duration::from_secs(to)));
    let any = |dice: &mut Dice| dice.between(0, hosts as u64 - 1) as usize;
    plan.options.elastic.hosts = (0..hosts).collect();
    plan.options.elastic.sync.1 = SLOW;
    plan.options.elastic.fragile = 0;
    // The others are in a new world before it is back.
    plan.options.stop.1 = Duration::from_millis(500);
    let settings = &mut plan.options.settings;
    settings.min_nodes = settings.min_nodes.min(hosts as u32 - 1);
    settings.max_nodes = settings.max_nodes.max(hosts as u32 + [0, 1, 1][dice.between(0, 2) as usize]);
    let start = plan.calm_at;
    for host in 0..hosts {
        plan.add(start, Action::Start(host, plan.options.join_timeout), Duration::ZERO);
    }
    // All are in a world by then, and most worlds commit.
    let mut cut_at = start + seconds(60, 90, dice);
    for _ in 0..dice.between(0, 4) {
        plan.add(cut_at, Action::FailWorkers(any(dice)), Duration::ZERO);
        cut_at += seconds(20, 40, dice);
    }
    let away = dice.between(1, hosts as u64 - 1) as usize;
    let cut_for = seconds(1, 8, dice);
    for to in [End::Coordinator, End::Node] {
        plan.add(cut_at, Action::Cut(away, to, cut_for, Partition::Lost), cut_for);
    }
    plan.add(cut_at, Action::Sever(away), Duration::ZERO);
    for other in (0..hosts).filter(|host| *host != away) {
        plan.add(cut_at, Action::LoseWorkers(other), Duration::ZERO);
    }
    let mut at = cut_at + cut_for + SLOW * dice.between(0, 4) as u32;
    for _ in 0..dice.between(4, 12) {
        at += dice.duration((Duration::ZERO, SLOW / 2));
        plan.add(at, Action::FailWorkers(any(dice)), Duration::ZERO);
    }
}

/// How long a node's workers take to be synchronised, at most.
const SLOW: Duration = Duration::from_secs(20);

/// Agents that ask to leave, several at once now and then. Most come back. All that leave have left when faults are over.
fn draw_departures(plan: &mut Plan, dice: &mut Dice) {
    let until = plan.calm_at;
    for _ in 0..[0, 2, 8][dice.between(0, 2) as usize] {
        let at = dice.duration((Duration::ZERO, until));
        for _ in 0..[1, 1, 2][dice.between(0, 2) as usize] {
            let host = dice.between(0, plan.options.hosts as u64 - 1) as usize;
            plan.add(at, Action::AskToLeave(host), PATIENCE + DRAIN);
            if dice.chance(80) {
                let back = dice.duration((Duration::ZERO, Duration::from_secs(30)));
                plan.add(at + back, Action::Start(host, plan.options.join_timeout), Duration::ZERO);
            }
        }
    }
}

/// Live through the history of a seed. Also returns what happened to workers.
///
/// # Errors
/// The first invariant that breaks. With `keep_history`, the last events before it.
pub fn live(seed: u64, keep_history: bool) -> Result<(Report, BTreeMap<&'static str, usize>), Box<Failure>> {
    let (report, job) = live_plan(seed, &draw(seed), keep_history)?;
    Ok((report, job.elastic_history().clone()))
}
