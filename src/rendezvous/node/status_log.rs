//! Log lines about a node for its operator: what it waits for, and that the coordinator is out of reach, or back.

use std::time::{Duration, Instant};

use super::NodeMachine;

/// Interval at which it logs a changed text from then on.
const WAITING_EVERY: Duration = Duration::from_secs(30);
/// Interval at which it repeats an unchanged text. A spare may wait for days.
const UNCHANGED_EVERY: Duration = Duration::from_secs(600);
/// A shorter absence of the coordinator is not logged.
const AWAY_AFTER: Duration = Duration::from_secs(1);

/// Decides what to log, and remembers what was logged.
#[derive(Debug, Default)]
pub struct StatusLog {
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
    logged: Option<(Instant, String)>,
}

impl StatusLog {
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
                let in_reach = node.view().out_of_reach_since.is_none();
                in_reach.then(|| format!("{} is back after {:.0?}", node.backend_name(), now - since))
            }
            _ => None,
        }
    }

    fn report_join(&mut self, node: &NodeMachine, now: Instant) -> Option<String> {
        let Some((since, what)) = node.waits() else {
            self.waiting = None;
            return None;
        };
        let first = || Waiting { since, look_at: since + node.silent_for(), logged: None };
        let waiting = self.waiting.get_or_insert_with(first);
        if now < waiting.look_at {
            return None;
        }
        waiting.look_at = now + WAITING_EVERY;
        if waiting.logged.as_ref().is_some_and(|(at, before)| *before == what && now < *at + UNCHANGED_EVERY) {
            return None;
        }
        let text = format!("waiting for {:.0?}{}: {what}", now - waiting.since, patience_text(node));
        waiting.logged = Some((now, what));
        Some(text)
    }
}

/// How long a node may still wait for a rank assignment, in words.
fn patience_text(node: &NodeMachine) -> String {
    match node.pending_join() {
        Some(join) if join.is_spare() => ", as a spare, until a node is lost or the job ends (no limit)".to_owned(),
        Some(join) => format!(" of up to {:.0?} (join_timeout)", join.patience()),
        None => String::new(),
    }
}
