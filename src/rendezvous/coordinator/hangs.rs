//! Standstills of one run: what its nodes say of their steps, the looks that its judge asks for, and what follows. Pure.
//!
//! [`Judge`] decides; this file gives it the world's nodes and the views of looks, and makes messages and events of what it says.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::looks::Looks;
use crate::events::record::{HANG_RANKS_LIMIT, Hang, Kind};
use crate::hang::finding::{Finding, Kind as FindingKind};
use crate::hang::judge::{BEFORE_RESTART, Effect, Judge, Options};
use crate::hang::text::{self, Next};
use crate::rendezvous::messages::hang::{Found, HangChange, HangNews, PaceReport, StillReport};
use crate::rendezvous::messages::message::{CoordinatorMessage, NodeId, Round};
use crate::rendezvous::run::{Event, Run, SessionId, Standing};
use crate::wire::time::{micros, millis};

/// What is to be done.
#[derive(Clone, Debug)]
pub(super) enum Act {
    /// Send this to these nodes.
    Send(Vec<SessionId>, CoordinatorMessage),
    /// Let the run decide.
    Apply(Event),
}

/// What observers are shown of a training that stands still.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Shown {
    /// In a line: `waits 12 s for rank 3 at train.py:88 (usually 0.2 s)`.
    pub text: String,
    /// What holds it up.
    pub kind: &'static str,
    /// The ranks that are waited for: the first of them.
    pub ranks: Vec<u32>,
    /// It never goes on by itself.
    pub certain: bool,
    /// It is a hang, and not only late.
    pub found: bool,
    /// The time without progress.
    pub still_s: f64,
    /// All of it in at most six lines.
    pub lines: Vec<String>,
}

/// The standstills of a run.
#[derive(Clone, Debug, Default)]
pub(super) struct Hangs {
    judge: Option<(Judge, Options)>,
    /// The world that the judge knows.
    round: Option<Round>,
    /// Number of its ranks.
    ranks: u32,
    /// What its nodes have said last.
    reports: BTreeMap<NodeId, StillReport>,
    /// The judge's look that is under way.
    looking: Option<u64>,
    /// The names of the nodes of the ranks that the last finding names.
    node: Option<String>,
    found: bool,
    /// When the workers are restarted, and why.
    restart: Option<(Instant, String)>,
}

impl Hangs {
    /// The run may have another world now, or none that runs undisturbed. Costs the same with any number of nodes, unless that has
    /// changed.
    pub fn on_run(&mut self, run: &Run, now: Instant) {
        let round = matches!(run.standing(), Standing::Undisturbed | Standing::Holding).then(|| run.round());
        if round == self.round {
            return;
        }
        let judge = self.judge.take();
        *self = Self { round, ..Self::default() };
        let members: Vec<_> = round.map_or_else(Vec::new, |_| run.roster().of(run.roster().active()).collect());
        // Whether all workers stand still is not known where one agent does not say it.
        let nodes: Vec<_> = match members.iter().all(|(_, node)| node.reports_steps) {
            true => members.iter().map(|(id, _)| id.0).collect(),
            false => Vec::new(),
        };
        let options = run.hang_options();
        let judge = judge.filter(|(_, known)| *known == options);
        let Some((mut judge, _)) = judge.or_else(|| (!nodes.is_empty()).then(|| (Judge::new(options), options))) else {
            return;
        };
        self.ranks = run.worker_count().unwrap_or(0);
        judge.on_round(round.map_or(0, |round| round.0), nodes, now);
        self.judge = Some((judge, options));
    }

    /// A node's workers make no step, or have moved since.
    pub fn on_pace(&mut self, id: NodeId, round: Round, pace: PaceReport, now: Instant) {
        let Some((judge, _)) = self.judge.as_mut().filter(|_| self.round == Some(round)) else { return };
        match pace {
            PaceReport::Still(report) => {
                self.reports.insert(id, report);
                judge.on_still(id.0, report.still(round, now), now);
            }
            PaceReport::Moved(report) => {
                self.reports.remove(&id);
                judge.on_moved(id.0, round.0, report.at(now), report.has_stepped, now);
            }
        }
    }

    /// Time has passed, or something has happened. Returns what is to be done.
    pub fn act(&mut self, run: &Run, looks: &mut Looks, now: Instant) -> Vec<Act> {
        let mut acts = Vec::new();
        let Some((mut judge, options)) = self.judge.take() else { return acts };
        self.deliver(&mut judge, looks, now);
        judge.on_tick(now);
        let mut effects = VecDeque::from(judge.take_effects());
        while let Some(effect) = effects.pop_front() {
            match effect {
                Effect::Look(number) => {
                    let asked = looks.begin(run, None, now);
                    acts.extend(asked.map(|(look, sessions)| Act::Send(sessions, CoordinatorMessage::Look(look))));
                    self.looking = Some(number);
                    // The one that is shared may be over already.
                    self.deliver(&mut judge, looks, now);
                    effects.extend(judge.take_effects());
                }
                Effect::Waits { finding, still } => {
                    let (hang, text) = self.describe(&finding, still, None, Next::Report, looks);
                    acts.push(event(Kind::HangWaits(Box::new(hang)), &self.node, text));
                }
                Effect::Suspended => {
                    if let Some((finding, since)) = judge.finding() {
                        let still = now.saturating_duration_since(since);
                        let finding = finding.clone();
                        let (hang, text) = self.describe(&finding, still, None, Next::Report, looks);
                        acts.push(event(Kind::HangWaits(Box::new(hang)), &None, text));
                        acts.push(self.news(run, still, Some((finding, Next::Report))));
                    }
                }
                Effect::Found { finding, still, limit, next } => {
                    self.found = true;
                    let (hang, text) = self.describe(&finding, still, limit, next, looks);
                    acts.push(event(Kind::HangFound(Box::new(hang)), &self.node, text));
                    acts.push(self.news(run, still, Some((*finding, next))));
                }
                Effect::Over { still } => {
                    self.restart = None;
                    let kind = Kind::HangOver { still_ms: millis(still) };
                    if std::mem::take(&mut self.found) {
                        acts.push(event(kind, &None, text::over(still)));
                    }
                    acts.push(self.news(run, still, None));
                }
                Effect::Restart { finding } => {
                    let facts = self.found(&finding, Next::Restart).facts(Duration::ZERO);
                    self.restart = Some((now + BEFORE_RESTART, text::cause(&finding, &facts)));
                }
            }
        }
        if let Some((_, why)) = self.restart.take_if(|(at, _)| *at <= now) {
            let step = self.furthest_step();
            acts.push(Act::Apply(Event::Hung { why, step }));
        }
        self.judge = Some((judge, options));
        acts
    }

    /// The furthest step that a node has told.
    fn furthest_step(&self) -> Option<u64> {
        self.reports.values().filter_map(|report| report.step).max()
    }

    /// Give the judge the views of its look, if that is over.
    fn deliver(&mut self, judge: &mut Judge, looks: &Looks, now: Instant) {
        let is_over = looks.awaited_until().is_none_or(|until| until <= now);
        let Some(look) = self.looking.take_if(|look| is_over || !judge.awaits(*look)) else { return };
        if judge.awaits(look) {
            let views: Vec<_> = looks.views().cloned().collect();
            // Not all nodes report the number of their workers.
            self.ranks = self.ranks.max(u32::try_from(views.len()).unwrap_or(u32::MAX));
            judge.on_views(look, views, now);
        }
    }

    /// When to call [`Self::act`] at the latest.
    pub fn next_deadline(&self, looks: &Looks) -> Option<Instant> {
        let look = self.looking.and_then(|_| looks.awaited_until());
        let judge = self.judge.as_ref().and_then(|(judge, _)| judge.next_deadline());
        let restart = self.restart.as_ref().map(|(at, _)| *at);
        look.into_iter().chain(judge).chain(restart).min()
    }

    /// For how long nothing has moved, if all nodes stand still.
    pub fn still(&self, now: Instant) -> Option<Duration> {
        let (_, since) = self.judge.as_ref()?.0.finding()?;
        Some(now.saturating_duration_since(since))
    }

    /// What observers are shown. `None`: the training makes steps, or nobody has looked yet.
    pub fn shown(&self, now: Instant) -> Option<Shown> {
        let (finding, since) = self.judge.as_ref()?.0.finding()?;
        let still = now.saturating_duration_since(since);
        let facts = self.found(finding, Next::Report).facts(still);
        Some(Shown {
            text: text::status(finding, &facts),
            kind: finding.kind.name(),
            ranks: finding.ranks.iter().take(HANG_RANKS_LIMIT).collect(),
            certain: finding.certain,
            found: self.found,
            still_s: still.as_millis() as f64 / 1000.0,
            lines: text::lines(finding, &facts),
        })
    }

    /// A finding as an event, and its sentence.
    fn describe(
        &mut self,
        finding: &Finding,
        still: Duration,
        limit: Option<Duration>,
        next: Next,
        looks: &Looks,
    ) -> (Hang, String) {
        self.node = finding.ranks.first().and_then(|rank| looks.node_of(rank)).map(str::to_owned);
        let facts = self.found(finding, next).facts(still);
        let lines = text::lines(finding, &facts);
        let place = finding.places.first();
        let collective = finding.collective.as_ref();
        let hang = Hang {
            kind: finding.kind.name().to_owned(),
            certain: finding.certain,
            ranks: finding.ranks.iter().take(HANG_RANKS_LIMIT).collect(),
            group: collective.map(|of| if of.desc.is_empty() { of.group.clone() } else { of.desc.clone() }),
            seq: collective.map(|of| of.seq).filter(|seq| *seq > 0),
            op: collective.map(|of| of.signature.op.clone()).filter(|op| !op.is_empty()),
            line: place
                .and_then(|place| place.frames.first())
                .map(|at| format!("{} {}:{}", at.function, at.file, at.line)),
            call: place.and_then(|place| place.call.as_ref()).map(ToString::to_string),
            waiting: finding.waiting.len(),
            still_ms: millis(still),
            limit_ms: limit.map(millis),
            lines,
        };
        let text = match finding.kind {
            FindingKind::Suspended => hang.lines.join("; "),
            _ => format!("{}: {}", text::status(finding, &facts), text::cause(finding, &facts)),
        };
        (hang, text)
    }

    fn found(&self, finding: &Finding, next: Next) -> Found {
        Found {
            finding: finding.clone(),
            step: self.furthest_step(),
            step_time_us: self.reports.values().filter_map(|report| report.step_time_us).max(),
            ranks: self.ranks,
            node: self.node.clone(),
            next,
        }
    }

    /// What all nodes of the world are told.
    fn news(&self, run: &Run, still: Duration, found: Option<(Finding, Next)>) -> Act {
        let change = found.map_or(HangChange::Over, |(mut finding, next)| {
            finding.fit();
            HangChange::Found(Box::new(self.found(&finding, next)))
        });
        let roster = run.roster();
        let sessions =
            roster.of(roster.active()).filter(|(_, node)| node.reports_steps).filter_map(|(_, node)| node.session);
        let round = self.round.unwrap_or(run.round());
        let still_us = micros(still);
        Act::Send(sessions.collect(), CoordinatorMessage::Hang(HangNews { round, still_us, change }))
    }
}

fn event(kind: Kind, node: &Option<String>, text: String) -> Act {
    Act::Apply(Event::Seen { kind, node: node.clone(), text })
}

#[cfg(test)]
mod tests;
