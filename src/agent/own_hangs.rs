//! Standstills of one node, where no coordinator judges: the agent judges its own workers by the same [`Judge`]. Pure.
//!
//! It sees the ranks of its node alone. So whoever is waited for on another node is not named here, but by that node.

use std::time::{Duration, Instant};

use crate::hang::finding::Finding;
use crate::hang::judge::{BEFORE_RESTART, Effect, Judge, Options};
use crate::hang::text::{self, Facts, Next};
use crate::hang::view::View;
use crate::rendezvous::messages::hang::{Found, HangChange, HangNews, PaceReport, StillReport};
use crate::rendezvous::messages::message::Round;
use crate::wire::time::micros;

/// This node, for the judge.
const NODE: u128 = 0;

/// What the agent does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Act {
    /// Look at the workers. Answered by [`OwnHangs::on_views`].
    Look,
    /// Tell the user.
    Tell(HangNews),
    /// Restart the workers, since the training hangs: why, and a rank that is waited for, if one of this node is known.
    Restart { why: String, rank: Option<u32> },
}

/// The standstills of this node's workers.
#[derive(Clone, Debug)]
pub(super) struct OwnHangs {
    judge: Judge,
    /// The round whose workers run.
    round: Option<Round>,
    /// Number of ranks in the world.
    ranks: u32,
    /// What the workers have said last.
    last: StillReport,
    /// The judge's look that is under way.
    looking: Option<u64>,
    /// When the workers are restarted, and the rest of [`Act::Restart`].
    restart: Option<(Instant, String, Option<u32>)>,
}

impl OwnHangs {
    pub fn new(options: Options) -> Self {
        let (judge, last) = (Judge::new(options), StillReport::default());
        Self { judge, round: None, ranks: 0, last, looking: None, restart: None }
    }

    /// All workers of a round run, in a world of so many ranks. `None`: they are being stopped.
    pub fn on_round(&mut self, world: Option<(Round, u32)>, now: Instant) {
        let (round, ranks) = world.unzip();
        if round != self.round {
            (self.round, self.ranks, self.looking, self.restart) = (round, ranks.unwrap_or_default(), None, None);
            self.judge.on_round(round.map_or(0, |round| round.0), round.map(|_| NODE), now);
        }
    }

    /// The workers of a round make no step, or have moved since.
    pub fn on_pace(&mut self, round: Round, pace: PaceReport, now: Instant) {
        match pace {
            PaceReport::Still(report) => {
                self.last = report;
                self.judge.on_still(NODE, report.still(round, now), now);
            }
            PaceReport::Moved(report) => {
                self.judge.on_moved(NODE, round.0, report.at(now), report.has_stepped, now);
            }
        }
    }

    /// What the look has found.
    pub fn on_views(&mut self, mut views: Vec<View>, now: Instant) {
        let Some(look) = self.looking.take() else { return };
        let own: Vec<u32> = views.iter().map(|view| view.rank).collect();
        for ranks in views.iter_mut().flat_map(|view| &mut view.groups).filter_map(|group| group.ranks.as_mut()) {
            *ranks = own.iter().copied().filter(|rank| ranks.contains(*rank)).collect();
        }
        self.judge.on_views(look, views, now);
    }

    /// Time has passed, or something has happened. Returns what the agent does next.
    pub fn act(&mut self, now: Instant) -> Vec<Act> {
        self.judge.on_tick(now);
        let mut acts = Vec::new();
        for effect in self.judge.take_effects() {
            match effect {
                Effect::Look(look) => {
                    self.looking = Some(look);
                    acts.push(Act::Look);
                }
                // No event has a place to go, and nothing is printed.
                Effect::Waits { .. } => {}
                Effect::Suspended => {
                    let suspended = self.judge.finding().map(|(finding, since)| (finding.clone(), since));
                    acts.extend(suspended.map(|(finding, since)| {
                        self.tell(now.saturating_duration_since(since), Some((finding, Next::Report)))
                    }));
                }
                Effect::Found { finding, still, next, .. } => acts.push(self.tell(still, Some((*finding, next)))),
                Effect::Over { still } => {
                    self.restart = None;
                    acts.push(self.tell(still, None));
                }
                Effect::Restart { finding } => {
                    let facts =
                        Facts { is_own: true, ..self.found(*finding.clone(), Next::Restart).facts(Duration::ZERO) };
                    let rank = finding.ranks.first();
                    self.restart = Some((now + BEFORE_RESTART, text::cause(&finding, &facts), rank));
                }
            }
        }
        let due = self.restart.take_if(|(at, ..)| *at <= now);
        acts.extend(due.map(|(_, why, rank)| Act::Restart { why, rank }));
        acts
    }

    /// When to call [`Self::act`] at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        let restart = self.restart.as_ref().map(|(at, ..)| *at);
        self.judge.next_deadline().into_iter().chain(restart).min()
    }

    fn tell(&self, still: Duration, found: Option<(Finding, Next)>) -> Act {
        let change =
            found.map_or(HangChange::Over, |(finding, next)| HangChange::Found(Box::new(self.found(finding, next))));
        Act::Tell(HangNews { round: self.round.unwrap_or_default(), still_us: micros(still), change })
    }

    fn found(&self, finding: Finding, next: Next) -> Found {
        let StillReport { step, step_time_us, .. } = self.last;
        Found { finding, step, step_time_us, ranks: self.ranks, node: None, next }
    }
}

#[cfg(test)]
mod tests;
