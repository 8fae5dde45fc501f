//! Log lines about a node for its operator: what it waits for, and that the coordinator is out of reach, or back.

use std::time::{Duration, Instant};

use super::NodeMachine;
use crate::rendezvous::messages::message::Placed;

/// Interval at which it logs a changed text from then on.
const WAITING_EVERY: Duration = Duration::from_secs(30);
/// Interval at which it repeats an unchanged text. A spare may wait for days.
const UNCHANGED_EVERY: Duration = Duration::from_secs(600);
/// A shorter absence of the coordinator is not logged.
const AWAY_AFTER: Duration = Duration::from_secs(1);

impl NodeMachine {
    /// For how long this node may still wait for a place, in words.
    fn patience_text(&self) -> String {
        match &self.joining {
            Some(joining) if joining.spare => {
                ", as a spare, until a node is lost or the job ends (no limit)".to_owned()
            }
            Some(joining) => format!(" of up to {:.0?} (join_timeout)", joining.deadline - joining.since),
            None => String::new(),
        }
    }

    /// Since when this node has waited for a place, and what it waits for. `None` if no join is pending.
    pub fn waits(&self) -> Option<(Instant, String)> {
        let joining = self.joining.as_ref().filter(|joining| joining.withdrawn_at.is_none())?;
        let what = match (&joining.progress, self.view.out_of_reach_since) {
            (_, Some(_)) => self.why_out_of_reach(),
            (Some(progress), None) => progress.clone(),
            (None, None) => "the round is not complete".to_owned(),
        };
        Some((joining.since, what))
    }

    /// Since when the coordinator has been out of reach, and the text for the log. `None` if it is in reach.
    fn out_of_reach(&self) -> Option<(Instant, String)> {
        let until = self.needed_until().filter(|_| !self.left && self.view.failed.is_none())?;
        let (why, limit) = (self.why_out_of_reach(), self.counterpart.timeout()?);
        let runs = |placed: Placed| placed.active && self.stopping != Some(placed.round);
        let runs = self.joining.is_none() && self.report.is_none() && self.hello.placed.is_some_and(runs);
        let meanwhile = match runs && self.view.waiting == 0 {
            true => "this node's workers run on, and it retries",
            false => "this node waits for it",
        };
        let text = format!("{why}; {meanwhile} for up to {limit:.0?} (coordinator_timeout)");
        Some((until.checked_sub(limit)?, text))
    }

    /// Whether the coordinator is in reach.
    fn in_reach(&self) -> bool {
        self.view().out_of_reach_since.is_none()
    }
}

/// Decides what to log, and remembers what was logged.
#[derive(Debug, Default)]
pub struct Reporter {
    waiting: Option<Waiting>,
    /// Since when the coordinator has been out of reach, once that was logged.
    away_since: Option<Instant>,
}

/// A pending join.
#[derive(Debug)]
struct Waiting {
    since: Instant,
    look_at: Instant,
    /// The last text, and when it was logged.
    told: Option<(Instant, String)>,
}

impl Reporter {
    /// The lines to log now.
    pub fn look(&mut self, node: &NodeMachine, now: Instant) -> Vec<String> {
        [self.report_reach(node, now), self.report_join(node, now)].into_iter().flatten().collect()
    }

    /// When to look next, if nothing happens before.
    pub fn next_deadline(&self, node: &NodeMachine) -> Option<Instant> {
        let join = self.waiting.as_ref().map(|waiting| waiting.look_at);
        let away = node.out_of_reach().filter(|_| self.away_since.is_none()).map(|(since, _)| since + AWAY_AFTER);
        [join, away].into_iter().flatten().min()
    }

    fn report_reach(&mut self, node: &NodeMachine, now: Instant) -> Option<String> {
        match (node.out_of_reach(), self.away_since) {
            (Some((since, text)), None) if now >= since + AWAY_AFTER => {
                self.away_since = Some(since);
                Some(text)
            }
            (None, Some(since)) => {
                self.away_since = None;
                node.in_reach().then(|| format!("{} is back after {:.0?}", node.counterpart.name(), now - since))
            }
            _ => None,
        }
    }

    fn report_join(&mut self, node: &NodeMachine, now: Instant) -> Option<String> {
        let Some((since, what)) = node.waits() else {
            self.waiting = None;
            return None;
        };
        let first = || Waiting { since, look_at: since + node.counterpart.silent_for(), told: None };
        let waiting = self.waiting.get_or_insert_with(first);
        if now < waiting.look_at {
            return None;
        }
        waiting.look_at = now + WAITING_EVERY;
        if waiting.told.as_ref().is_some_and(|(at, before)| *before == what && now < *at + UNCHANGED_EVERY) {
            return None;
        }
        let text = format!("waiting for {:.0?}{}: {what}", now - waiting.since, node.patience_text());
        waiting.told = Some((now, what));
        Some(text)
    }
}
