//! When a training that stands still is a hang: a pure state machine over one run.
//!
//! Nodes say that their workers make no step. Once all of them do, the judge asks for a look at all ranks, has [`blame`] say who holds
//! the others up, and compares it with the look before. Naming is fast and prints nothing. A hang is *found* by proof, which is two equal
//! looks at something that never goes on by itself, or late, by [`limits`]. Events come in through `on_…`; [`Judge::take_effects`]
//! returns what to do, and [`Judge::next_deadline`] when to call [`Judge::on_tick`].
//!
//! | file | what |
//! |---|---|
//! | [`pace`] | the agent's part: when steps are late |
//! | [`limits`] | for how long ranks may stand still |
//! | `standing` | one time without progress: what its looks have shown |

use std::collections::BTreeMap;
use std::mem;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::blame::blame;
use super::finding::{Finding, Kind};
use super::text::Next;
use super::view::View;

pub mod limits;
pub mod pace;
mod standing;

use limits::{Limits, Section};
use standing::{Progress, SHORTEST_BETWEEN, Standing};

/// Shortest time between two looks that are compared.
pub const BETWEEN_LOOKS: Duration = Duration::from_secs(5);
/// Longest time between two looks.
pub const LONGEST_BETWEEN: Duration = Duration::from_secs(30);
/// For how long the answers to a look may take.
pub const LOOK_LIMIT: Duration = Duration::from_secs(3);
/// For how long ranks may read or write without a step.
pub const MOVING_LIMIT: Duration = Duration::from_secs(3600);
/// From the report of a hang until its workers are restarted: their agents write down where they stand.
pub const BEFORE_RESTART: Duration = Duration::from_secs(1);
/// Shortest time between two events that say who is waited for.
pub const BETWEEN_WAITS: Duration = Duration::from_secs(60);

/// What happens when a hang is found: `--hang`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    /// Nobody looks.
    Off,
    /// It is reported.
    #[default]
    Report,
    /// It is reported, and the workers are restarted.
    Restart,
}

/// How hangs are judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Options {
    /// What happens when one is found.
    pub mode: Mode,
    /// Instead of all limits, once a step or a collective was seen.
    pub timeout: Option<Duration>,
    /// How many restarts hangs may cost in this run.
    pub restarts: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self { mode: Mode::Report, timeout: None, restarts: 3 }
    }
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Ask all nodes for views. Answered by [`Judge::on_views`] with this number.
    Look(u64),
    /// Record who is waited for (`hang.waits`). Nothing is printed.
    Waits {
        /// Who.
        finding: Box<Finding>,
        /// The time without progress.
        still: Duration,
    },
    /// All ranks are stopped. Said once, and no alarm.
    Suspended,
    /// Report a hang (`hang.found`).
    Found {
        /// Who.
        finding: Box<Finding>,
        /// The time without progress.
        still: Duration,
        /// The limit that is over. `None`: it is certain.
        limit: Option<Duration>,
        /// What happens now.
        next: Next,
    },
    /// What was found, or suspended, goes on (`hang.over`).
    Over {
        /// The time without progress.
        still: Duration,
    },
    /// Restart the workers, after a dump of all ranks.
    Restart {
        /// Why.
        finding: Box<Finding>,
    },
}

/// What a node says of workers that make no step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Still {
    /// The round.
    pub round: u64,
    /// Since when.
    pub since: Instant,
    /// They have made a step in this round.
    pub has_stepped: bool,
    /// The median time of a step, if it is known.
    pub step_time: Option<Duration>,
    /// These are steps of optimizers. Others may be made that nobody counts.
    pub is_counted: bool,
    /// The section of the training in which they are, if it has a name: a hash of that.
    pub section: Option<Section>,
}

/// The judge of one run. See the module's documentation.
#[derive(Clone, Debug)]
pub struct Judge {
    options: Options,
    limits: Limits,
    round: u64,
    /// When the workers of the round were started.
    started: Option<Instant>,
    has_stepped: bool,
    /// Steps or collectives were seen in this round.
    has_begun: bool,
    /// Steps or collectives were seen in some round. Without any, nobody knows whether a program that computes for long makes progress.
    is_training: bool,
    /// The nodes of the world, and which of them stand still.
    nodes: BTreeMap<u128, Option<Still>>,
    standing: Option<Standing>,
    /// Number of the last look, and when it began.
    looks: u64,
    looked_at: Option<Instant>,
    waits_reported: Option<Instant>,
    restarts: u32,
    effects: Vec<Effect>,
}

impl Judge {
    /// A judge of a run that has no round yet.
    pub fn new(options: Options) -> Self {
        Self {
            options,
            limits: Limits::new(options.timeout),
            round: 0,
            started: None,
            has_stepped: false,
            has_begun: false,
            is_training: false,
            nodes: BTreeMap::new(),
            standing: None,
            looks: 0,
            looked_at: None,
            waits_reported: None,
            restarts: 0,
            effects: Vec::new(),
        }
    }

    /// What to do, since the last call.
    pub fn take_effects(&mut self) -> Vec<Effect> {
        mem::take(&mut self.effects)
    }

    /// When to call [`Self::on_tick`].
    pub fn next_deadline(&self) -> Option<Instant> {
        self.standing.as_ref().map(Standing::next_deadline)
    }

    /// Who is waited for, and since when nothing has moved. `None` as well while it may only be between two steps.
    pub fn finding(&self) -> Option<(&Finding, Instant)> {
        let late = self.standing.as_ref().filter(|standing| standing.is_late);
        late.and_then(|standing| Some((standing.finding()?, standing.since)))
    }

    /// How many restarts hangs have cost.
    pub fn restarts(&self) -> u32 {
        self.restarts
    }

    /// A round is complete, with these nodes. Without nodes: no world runs. What was found is not over by that: nothing goes on.
    pub fn on_round(&mut self, round: u64, nodes: impl IntoIterator<Item = u128>, now: Instant) {
        self.standing = None;
        self.round = round;
        self.nodes = nodes.into_iter().map(|node| (node, None)).collect();
        let started = Some(now).filter(|_| !self.nodes.is_empty());
        (self.started, self.has_stepped, self.has_begun) = (started, false, false);
    }

    /// A node's workers make no step.
    pub fn on_still(&mut self, node: u128, still: Still, now: Instant) {
        let Some(of) = self.nodes.get_mut(&node).filter(|_| still.round == self.round) else { return };
        let has_stepped = still.has_stepped;
        *of = Some(still);
        self.has_stepped |= has_stepped;
        self.see(has_stepped);
        self.stand_still(now);
    }

    /// A node's workers have moved since they stood still, at this time: they have made a step, or said otherwise that they go on.
    pub fn on_moved(&mut self, node: u128, round: u64, at: Instant, has_stepped: bool, now: Instant) {
        let Some(of) = self.nodes.get_mut(&node).filter(|_| round == self.round) else { return };
        *of = None;
        self.see(has_stepped);
        let at = at.min(now);
        let is_first = has_stepped && !mem::replace(&mut self.has_stepped, true);
        if let Some(started) = self.started.filter(|_| is_first) {
            self.limits.learn_first(at.saturating_duration_since(started));
        }
        if let Some(standing) = self.standing.take() {
            self.learn(&standing, at);
            self.over(&standing, at);
        }
    }

    /// Whether the views of this look are wanted.
    pub fn awaits(&self, look: u64) -> bool {
        self.standing.as_ref().is_some_and(|standing| standing.is_asked(look))
    }

    /// The views of a look, as far as they have come.
    pub fn on_views(&mut self, look: u64, mut views: Vec<View>, now: Instant) {
        let Some(mut standing) = self.standing.take_if(|standing| standing.is_asked(look)) else { return };
        views.retain(|view| view.round == self.round);
        self.see(views.iter().any(|view| view.groups.iter().any(|group| group.last > 0)));
        let finding = blame(&views);
        match standing.on_look(views, finding, now) {
            Progress::None => {}
            Progress::Made => {
                self.learn(&standing, now);
                self.over(&standing, now);
                standing.begin_again(now);
            }
            Progress::Moving => standing.count_again(now),
        }
        self.judge(&mut standing, now);
        self.standing = Some(standing);
    }

    /// Time has passed.
    pub fn on_tick(&mut self, now: Instant) {
        let Some(standing) = &mut self.standing else { return };
        if now >= standing.next_deadline() {
            self.looks += 1;
            self.looked_at = Some(now);
            standing.ask(self.looks, now);
            self.effects.push(Effect::Look(self.looks));
        }
    }

    /// The training makes steps, or enters collectives.
    fn see(&mut self, trains: bool) {
        self.has_begun |= trains;
        self.is_training |= trains;
    }

    /// Look at all ranks, once all nodes stand still.
    fn stand_still(&mut self, now: Instant) {
        let all: Option<Vec<_>> = self.nodes.values().map(Option::as_ref).collect();
        let Some(all) = all.filter(|all| !all.is_empty() && self.options.mode != Mode::Off) else { return };
        if self.standing.is_some() {
            return;
        }
        // The node that went on for longest says since when nothing moves.
        let since = all.iter().map(|still| still.since).max().unwrap_or(now).min(now);
        let step_time = all.iter().filter_map(|still| still.step_time).max();
        let is_counted = all.iter().all(|still| still.is_counted || still.step_time.is_none());
        let section = all.iter().find_map(|still| still.section);
        // However often nodes stand still and move, looks are not nearer to one another.
        let first_look = self.looked_at.map_or(now, |at| now.max(at + SHORTEST_BETWEEN));
        self.standing = Some(Standing::new(since, step_time, is_counted, section, first_look));
        self.on_tick(now);
    }

    /// Say what the last look means.
    fn judge(&mut self, standing: &mut Standing, now: Instant) {
        let Some(finding) = standing.finding().cloned() else { return };
        let still = now.saturating_duration_since(standing.since);
        // Where nobody knows how long a step takes, a look may show a step that is under way.
        standing.is_late |= standing.step_time.is_some() || standing.is_repeated(now);
        if finding.kind == Kind::Suspended {
            standing.is_late = true;
            standing.count_again(now);
            if !mem::replace(&mut standing.is_suspended, true) {
                self.effects.push(Effect::Suspended);
            }
            standing.pause(now);
            return;
        }
        let may_report = self.waits_reported.is_none_or(|at| now.saturating_duration_since(at) >= BETWEEN_WAITS);
        if may_report && standing.is_late && standing.is_news() {
            self.waits_reported = Some(now);
            standing.reported();
            self.effects.push(Effect::Waits { finding: Box::new(finding.clone()), still });
        }
        let limit = self.limits.of(standing.section, standing.step_time, self.has_begun);
        // Without a step that tells how long one takes, a rank may compute for hours. So it may if nobody sees some of its steps.
        let is_timed = standing.step_time.is_some() && !standing.is_counted;
        let may_compute = standing.is_busy() && !is_timed && self.options.timeout.is_none();
        let over = standing.over(limit, now).filter(|_| self.is_training && !may_compute);
        let is_proven = standing.is_proven(now);
        if !standing.is_found && (is_proven || over.is_some()) {
            standing.is_found = true;
            let (limit, next) = (over.filter(|_| !is_proven), self.next(standing, is_proven));
            self.effects.push(Effect::Found { finding: Box::new(finding.clone()), still, limit, next });
        }
        let is_due = is_proven || (over.is_some() && standing.over(limit.twice(), now).is_some());
        let may_restart = matches!(self.next(standing, is_due), Next::Restart);
        if standing.is_found && may_restart && !standing.is_restarted {
            self.restarts += 1;
            self.effects.push(Effect::Restart { finding: Box::new(finding) });
            standing.is_restarted = true;
        }
        standing.schedule(limit, now);
    }

    /// Whether workers are restarted for it, now or later. Never while somebody types at one of them, nor, by limits that were only
    /// learnt, while the awaited rank computes: an evaluation may be longer than all before.
    fn next(&self, standing: &Standing, is_due: bool) -> Next {
        match self.options.mode {
            Mode::Off | Mode::Report => Next::Report,
            Mode::Restart if standing.is_attended() => Next::Attended,
            Mode::Restart if standing.is_busy() && self.options.timeout.is_none() => Next::Computes,
            Mode::Restart if self.restarts >= self.options.restarts => Next::NoBudget,
            Mode::Restart if is_due => Next::Restart,
            Mode::Restart => Next::RestartLater,
        }
    }

    /// A wait has ended by itself.
    fn learn(&mut self, standing: &Standing, at: Instant) {
        // Without a pace there is no wait of a step, but that of the first one.
        if standing.step_time.is_none() {
            return;
        }
        for (class, waited) in standing.waits(at) {
            self.limits.learn(standing.section, class, waited);
        }
    }

    fn over(&mut self, standing: &Standing, at: Instant) {
        if standing.is_found || standing.is_suspended {
            self.effects.push(Effect::Over { still: at.saturating_duration_since(standing.since) });
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
