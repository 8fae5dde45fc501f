//! One time without progress, and what its looks have shown.

use std::time::{Duration, Instant};

use super::limits::{Limit, Section};
use super::{BETWEEN_LOOKS, LONGEST_BETWEEN, LOOK_LIMIT, MOVING_LIMIT};
use crate::hang::finding::{Finding, Kind};
use crate::hang::view::{Call, Class, State, View};

/// Shortest time from one look to the next.
pub(super) const SHORTEST_BETWEEN: Duration = Duration::from_secs(1);

/// What a look shows beside the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// Nothing has moved.
    None,
    /// A rank has entered a collective.
    Made,
    /// The awaited rank reads or writes.
    Moving,
}

/// What one look has shown.
#[derive(Clone, Debug)]
struct Seen {
    at: Instant,
    views: Vec<View>,
    finding: Finding,
}

/// One time without progress.
#[derive(Clone, Debug)]
pub(super) struct Standing {
    /// The last progress.
    pub since: Instant,
    /// From when on the limit of all time counts: the last progress, or when the awaited rank last read or wrote.
    counts_from: Instant,
    pub step_time: Option<Duration>,
    /// That is the time from one step of an optimizer to the next one.
    pub is_counted: bool,
    pub section: Option<Section>,
    pub is_found: bool,
    pub is_suspended: bool,
    /// It was late, and not only between two steps.
    pub is_late: bool,
    pub is_restarted: bool,
    /// The look that is under way, and until when its answers may come.
    asked: Option<(u64, Instant)>,
    next_look: Instant,
    /// Time from the last look to the next one.
    between: Duration,
    /// The last look.
    seen: Option<Seen>,
    /// Since when all looks have shown the same.
    same_since: Option<Instant>,
    /// Since when the awaited rank is idle.
    idle_since: Option<Instant>,
    class: Option<Class>,
    /// Two looks have shown what the awaited rank does.
    is_classed: bool,
    /// Since when the awaited rank reads or writes without a step.
    moving_since: Option<Instant>,
    /// Whom the last event has named.
    reported: Option<Finding>,
}

impl Standing {
    pub fn new(
        since: Instant,
        step_time: Option<Duration>,
        is_counted: bool,
        section: Option<Section>,
        first_look: Instant,
    ) -> Self {
        Self {
            since,
            counts_from: since,
            step_time,
            is_counted,
            section,
            is_found: false,
            is_suspended: false,
            is_late: false,
            is_restarted: false,
            asked: None,
            next_look: first_look,
            between: BETWEEN_LOOKS,
            seen: None,
            same_since: None,
            idle_since: None,
            class: None,
            is_classed: false,
            moving_since: None,
            reported: None,
        }
    }

    pub fn next_deadline(&self) -> Instant {
        self.asked.map_or(self.next_look, |(_, until)| until)
    }

    pub fn is_asked(&self, look: u64) -> bool {
        self.asked.is_some_and(|(asked, _)| asked == look)
    }

    pub fn ask(&mut self, look: u64, now: Instant) {
        self.asked = Some((look, now + LOOK_LIMIT));
    }

    pub fn finding(&self) -> Option<&Finding> {
        self.seen.as_ref().map(|seen| &seen.finding)
    }

    /// Take in what a look has shown.
    pub fn on_look(&mut self, views: Vec<View>, finding: Finding, now: Instant) -> Progress {
        self.asked = None;
        let before = self.seen.take();
        let stands = |seen: &Seen| {
            seen.finding.names_as(&finding)
                && seen.views.len() == views.len()
                && seen.views.iter().all(|view| find(&views, view.rank).is_some_and(|new| new.stands_as(view)))
        };
        if !before.as_ref().is_some_and(stands) {
            self.same_since = Some(now);
        }
        let has_grown = before.as_ref().is_some_and(|seen| seen.views.iter().any(|view| has_grown(view, &views)));
        let was_at = before.map(|seen| seen.at);
        self.class = class_of(&finding);
        self.seen = Some(Seen { at: now, views, finding });
        let is_moving = self.class == Some(Class::Moving);
        if !is_moving {
            self.moving_since = None;
        }
        if has_grown {
            return Progress::Made;
        }
        if is_moving {
            let since = *self.moving_since.get_or_insert(was_at.unwrap_or(now));
            if now.saturating_duration_since(since) < MOVING_LIMIT {
                return Progress::Moving;
            }
        }
        match self.class {
            Some(Class::Idle) => {
                // Before the first two looks it was probably idle too.
                let from = if self.is_classed { was_at.unwrap_or(now).max(self.counts_from) } else { self.counts_from };
                self.idle_since.get_or_insert(from);
            }
            Some(Class::Busy | Class::Moving) => self.idle_since = None,
            None => {}
        }
        self.is_classed |= self.class.is_some();
        Progress::None
    }

    /// The awaited rank reads or writes, or is let go on: limits count from now on. What was found stays so: nobody has made a step.
    pub fn count_again(&mut self, now: Instant) {
        self.counts_from = now;
        self.idle_since = None;
    }

    /// Progress: what was known of the time before counts no longer. The last look stays, to be compared with the next one.
    pub fn begin_again(&mut self, now: Instant) {
        (self.since, self.counts_from) = (now, now);
        (self.is_found, self.is_suspended, self.is_late) = (false, false, false);
        (self.idle_since, self.class, self.reported) = (None, None, None);
        self.same_since = Some(now);
    }

    /// Nothing is to be done for now but to see whether it goes on.
    pub fn pause(&mut self, now: Instant) {
        self.next_look = now + LONGEST_BETWEEN;
    }

    /// Whether it is new that these ranks are waited for.
    pub fn is_news(&self) -> bool {
        self.finding().is_some_and(|finding| !self.reported.as_ref().is_some_and(|reported| reported.names_as(finding)))
    }

    pub fn reported(&mut self) {
        self.reported = self.finding().cloned();
    }

    /// Whether two looks, far enough apart, have shown the same.
    pub fn is_repeated(&self, now: Instant) -> bool {
        self.same_since.is_some_and(|since| now.saturating_duration_since(since) >= BETWEEN_LOOKS)
    }

    /// Whether they have shown what never goes on by itself. A debugger lets a rank go on.
    pub fn is_proven(&self, now: Instant) -> bool {
        self.finding().is_some_and(|finding| finding.certain) && self.is_repeated(now) && !self.is_traced()
    }

    fn is_traced(&self) -> bool {
        self.seen.as_ref().is_some_and(|seen| seen.views.iter().any(|view| view.state == State::Traced))
    }

    /// Whether somebody types at a rank: it reads standard input, or a debugger has stopped it.
    pub fn is_attended(&self) -> bool {
        let reads = |view: &View| view.call.as_ref().is_some_and(Call::reads_standard_input);
        self.is_traced() || self.seen.as_ref().is_some_and(|seen| seen.views.iter().any(reads))
    }

    /// Whether the awaited rank computes.
    pub fn is_busy(&self) -> bool {
        self.class == Some(Class::Busy)
    }

    /// The limit that is over.
    pub fn over(&self, limit: Limit, now: Instant) -> Option<Duration> {
        let is_over = |since: Instant, limit: Duration| now.saturating_duration_since(since) >= limit;
        if self.idle_since.is_some_and(|since| is_over(since, limit.idle)) {
            return Some(limit.idle);
        }
        is_over(self.counts_from, limit.total).then_some(limit.total)
    }

    /// Look again when a limit is over, or after twice the last time.
    pub fn schedule(&mut self, limit: Limit, now: Instant) {
        let due = |since: Instant, limit: Duration| since.checked_add(limit);
        let mut limits = vec![due(self.counts_from, limit.total)];
        limits.extend(self.idle_since.map(|since| due(since, limit.idle)));
        let next = limits.into_iter().flatten().filter(|at| *at > now).fold(now + self.between, Instant::min);
        self.next_look = next.max(now + SHORTEST_BETWEEN);
        self.between = (2 * self.between).min(LONGEST_BETWEEN);
    }

    /// How long the awaited rank was idle, or all this time has lasted if it was busy at last.
    pub fn waits(&self, at: Instant) -> Vec<(Class, Duration)> {
        let idle = self.idle_since.map(|since| (Class::Idle, at.saturating_duration_since(since)));
        let busy = matches!(self.class, Some(Class::Busy | Class::Moving));
        let busy = busy.then(|| (Class::Busy, at.saturating_duration_since(self.since)));
        idle.into_iter().chain(busy).collect()
    }
}

/// The view of a rank, in views of which most are at the index of their rank.
fn find(views: &[View], rank: u32) -> Option<&View> {
    let guessed = views.get(rank as usize).filter(|view| view.rank == rank);
    guessed.or_else(|| views.iter().find(|view| view.rank == rank))
}

/// Whether a rank has entered a collective since that look.
fn has_grown(before: &View, views: &[View]) -> bool {
    let Some(now) = find(views, before.rank).filter(|now| now.pid == before.pid) else { return false };
    // Of a rank that has not answered no group is known, old or new.
    let last = |name: &str| before.group(name).map_or(0, |old| old.last);
    before.answered && now.groups.iter().any(|group| group.last > last(&group.name))
}

/// What the awaited ranks do: busy if one of them is. If nobody is named, what the waiting ones do.
fn class_of(finding: &Finding) -> Option<Class> {
    let never_runs = matches!(finding.kind, Kind::Ended | Kind::Absent | Kind::Stopped);
    let places = if finding.places.is_empty() { finding.others.as_slice() } else { &finding.places };
    if never_runs { Some(Class::Idle) } else { places.iter().filter_map(|place| place.class).max() }
}
