//! The keys by which a coordinator judges hosts and a job: how they go together, and the [`Rules`] that they make.

use super::{Agent, Conf, RestartBudget};
use crate::hang::judge;
use crate::hosts::Cooldown;
use crate::rendezvous::messages::settings::{Rules, WorkerBounds};

impl Conf {
    /// Check the values that depend on one another.
    pub(super) fn check_rules(&self) -> Result<(), String> {
        let seconds = |time: Option<std::time::Duration>| time.map(|time| time.as_secs_f64());
        check_pair(
            ("blacklist_cooldown_min", seconds(self.blacklist_cooldown_min)),
            ("blacklist_cooldown_max", seconds(self.blacklist_cooldown_max)),
        )?;
        self.check_ends()?;
        check_pair(("min_workers", self.min_workers.map(f64::from)), ("max_workers", self.max_workers.map(f64::from)))
    }

    /// Check the values about the end of a job.
    fn check_ends(&self) -> Result<(), String> {
        let (no_restart_on, exit_code) = (!self.no_restart_on.is_empty(), self.exit_code.is_some());
        let window = self.restart_window.is_some();
        let counts = self.restart_budget == RestartBudget::Node;
        for (given, key, other, why) in [
            (
                no_restart_on && counts,
                "no_restart_on",
                "restart_budget=node",
                "the coordinator ends the job, and is not asked there",
            ),
            (window && counts, "restart_window", "restart_budget=node", "each node counts its own restarts there"),
            (window && self.agent == Agent::Torch, "restart_window", "agent=torch", PYTORCHS),
            (no_restart_on && self.agent == Agent::Torch, "no_restart_on", "agent=torch", PYTORCHS),
            (exit_code && self.agent == Agent::Torch, "exit_code", "agent=torch", PYTORCHS),
        ] {
            if given {
                return Err(format!("--rdzv-conf has `{key}` and `{other}`, which cannot be combined: {why}"));
            }
        }
        Ok(())
    }

    /// How hangs are judged.
    pub fn hang_options(&self) -> judge::Options {
        // With a window they are counted like those after crashes, and not by the judge.
        let restarts = self.restart_window.map_or(judge::Options::default().restarts, |_| u32::MAX);
        judge::Options { mode: self.hang, timeout: self.hang_timeout, restarts }
    }

    /// What the coordinator is asked for.
    pub(super) fn rules(&self) -> Rules {
        let cooldown = self.blacklist_cooldown_min.zip(self.blacklist_cooldown_max);
        let cooldown = cooldown.map(|(min, max)| Cooldown { min, max });
        Rules {
            workers: self.min_workers.zip(self.max_workers).map(|(min, max)| WorkerBounds { min, max }),
            host_failures: self.host_failures.unwrap_or(u32::from(cooldown.is_some())),
            host_failures_window: self.host_failures_window,
            cooldown,
            restart_window: self.restart_window,
            no_restart_on: self.no_restart_on.clone(),
            reset_limit: self.reset_limit,
            store_tunnel: self.has_tunnel(),
            hang: self.hang_options(),
        }
    }
}

/// Why some keys need our agent.
const PYTORCHS: &str = "PyTorch's agent does not report failures";

/// Check two keys that need one another, of which the second must not be smaller.
fn check_pair(least: (&str, Option<f64>), most: (&str, Option<f64>)) -> Result<(), String> {
    match (least, most) {
        ((given, Some(_)), (missing, None)) | ((missing, None), (given, Some(_))) => {
            Err(format!("--rdzv-conf has `{given}` without `{missing}`: give both"))
        }
        ((least, Some(min)), (most, Some(max))) if min > max => {
            Err(format!("--rdzv-conf {most} is `{max}`, must be at least {least} (`{min}`)"))
        }
        _ => Ok(()),
    }
}
