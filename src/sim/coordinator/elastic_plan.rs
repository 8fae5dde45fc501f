//! Histories of jobs whose workers live through changes of the world: the plans of [`super::plan`], in which the workers of some or all
//! hosts do, and agents ask to leave.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::actions::DRAIN;
use super::elastic::{Elastic, PATIENCE};
use super::history::{Report, live_plan};
use super::options::Action;
use super::plan::Plan;
use crate::sim::engine::dice::Dice;
use crate::sim::engine::history::Failure;

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
        sync: millis(&[1, 500, 20_000], &mut dice),
        mute: [0, 0, 2, 20][dice.between(0, 3) as usize],
        fragile: [0, 10, 50][dice.between(0, 2) as usize],
        well_from: plan.calm_at,
    };
    draw_departures(&mut plan, &mut dice);
    plan
}

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
    plan.options.elastic.well_from = plan.calm_at;
}

/// Live through the history of a seed. Also returns what happened to workers.
///
/// # Errors
/// The first invariant that breaks. With `keep_history`, the last events before it.
pub fn live(seed: u64, keep_history: bool) -> Result<(Report, BTreeMap<&'static str, usize>), Box<Failure>> {
    let (report, job) = live_plan(seed, &draw(seed), keep_history)?;
    Ok((report, job.lives().clone()))
}
