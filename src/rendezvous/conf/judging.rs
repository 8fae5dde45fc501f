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
        if self.restart_window.is_some() && (self.restart_budget, self.agent) != (RestartBudget::Job, Agent::Rust) {
            return Err("--rdzv-conf restart_window needs restart_budget=job and agent=rust: with others each node counts its own \
                 restarts, as PyTorch's agent does"
                .to_owned());
        }
        check_pair(("min_workers", self.min_workers.map(f64::from)), ("max_workers", self.max_workers.map(f64::from)))
    }

    /// What the coordinator is asked for.
    pub(super) fn rules(&self) -> Rules {
        let cooldown = self.blacklist_cooldown_min.zip(self.blacklist_cooldown_max);
        let cooldown = cooldown.map(|(min, max)| Cooldown { min, max });
        // With a window they are counted like those after crashes, and not by the judge.
        let restarts = self.restart_window.map_or(judge::Options::default().restarts, |_| u32::MAX);
        Rules {
            workers: self.min_workers.zip(self.max_workers).map(|(min, max)| WorkerBounds { min, max }),
            host_failures: self.host_failures.unwrap_or(u32::from(cooldown.is_some())),
            host_failures_window: self.host_failures_window,
            cooldown,
            restart_window: self.restart_window,
            reset_limit: self.reset_limit,
            store_tunnel: self.has_tunnel(),
            hang: judge::Options { mode: self.hang, timeout: self.hang_timeout, restarts },
        }
    }
}

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
