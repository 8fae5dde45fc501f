//! Exhaustive exploration of small jobs: every order of messages, ends of connections, deadlines and faults, up to a bound.
//!
//! A state is a whole [`Simulation`]. A step lets one pending event happen, passes time up to the next deadline, or does something
//! to the job. Messages of one connection keep their order. All other events may overtake one another. Time may pass while messages
//! are in transit, but not beyond a deadline of a process that does not stand still. The bound is on faults and on passings of time,
//! so the exploration covers *all* histories within it, however long. Every invariant of [`super::ledger`] is checked after
//! every step. From some or all states the job must also settle once faults stop.
//!
//! States that differ only in the time of day are equal: a state is identified by a digest of everything that decides its future,
//! with instants relative to now. `docs/decisions/0038-the-exhaustive-checker-is-our-own.md` says why this is not `stateright`.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use super::event::Event;
use super::fingerprint::{Fingerprint, stream};
use super::history::SETTLE_WITHIN;
use super::ledger::check_settled;
use super::options::{Action, Options};
use super::simulation::Simulation;
use crate::engine::Model;
use crate::engine::dice::Dice;
use crate::engine::queue::{Key, Time};
use crate::worlds::Violation;

/// The bounds of an exploration.
#[derive(Clone, Debug)]
pub struct Bounds {
    /// Most faults of a history.
    pub faults: u8,
    /// Most passings of time of a history.
    pub waits: u8,
    /// The faults. Agents that are gone, and a coordinator that is down, may be started again at any time.
    pub kinds: Vec<Action>,
    /// From one in this many states it is checked that the job settles. 1: all.
    pub settle_one_in: u64,
}

/// The result of an exploration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Distinct states.
    pub states: usize,
    /// Steps between them.
    pub steps: usize,
    /// Length of the longest history without a repeated state.
    pub longest: usize,
    /// States from which settling was checked.
    pub settled: usize,
}

#[derive(Clone, Debug)]
enum Step {
    /// A pending event happens now.
    Happens(Key),
    /// Time passes up to the next deadline.
    Wait,
    Fault(Action),
    /// Start an agent or a coordinator that is down.
    Start(Action),
}

#[derive(Clone, Copy, Debug, Hash)]
struct Budget {
    faults: u8,
    waits: u8,
}

struct Explorer<'a> {
    bounds: &'a Bounds,
    seen: HashSet<u64>,
    found: Found,
    trace: Vec<Step>,
    /// Limit on the length of histories, for finding the shortest that fails.
    limit: usize,
    fingerprint: Fingerprint,
}

/// A job from which [`explore`] may start: without delays and without randomness.
pub fn job(options: Options) -> Simulation {
    let mut job = Simulation::new(options);
    job.engine.dice = Dice::fixed();
    job.network.numbered_by_host = true;
    job
}

/// Go through all states that can be reached from `start`.
///
/// # Errors
/// The shortest history that breaks an invariant, event by event.
pub fn explore(start: &Simulation, bounds: &Bounds) -> Result<Found, String> {
    let mut explorer = Explorer::new(bounds, usize::MAX);
    let Err(failure) = explorer.run(start) else { return Ok(explorer.found) };
    let (mut violation, mut trace) = (failure, explorer.trace);
    // Increasing lengths, until a history fails. That one is the shortest.
    for limit in 1..trace.len() {
        let mut shorter = Explorer::new(bounds, limit);
        if let Err(failure) = shorter.run(start) {
            (violation, trace) = (failure, shorter.trace);
            break;
        }
    }
    Err(report(start, &trace, &violation))
}

impl<'a> Explorer<'a> {
    fn new(bounds: &'a Bounds, limit: usize) -> Self {
        let (seen, found, trace) = (HashSet::new(), Found::default(), Vec::new());
        Self { bounds, seen, found, trace, limit, fingerprint: Fingerprint::default() }
    }

    fn run(&mut self, start: &Simulation) -> Result<(), Violation> {
        self.visit(start, Budget { faults: self.bounds.faults, waits: self.bounds.waits })
    }

    fn visit(&mut self, job: &Simulation, budget: Budget) -> Result<(), Violation> {
        self.found.longest = self.found.longest.max(self.trace.len());
        if self.trace.len() >= self.limit {
            return Ok(());
        }
        for step in steps(job, budget, self.bounds) {
            let mut next = job.clone();
            let left = match step {
                Step::Happens(_) | Step::Start(_) => budget,
                Step::Wait => Budget { waits: budget.waits - 1, ..budget },
                Step::Fault(_) => Budget { faults: budget.faults - 1, ..budget },
            };
            self.trace.push(step.clone());
            self.found.steps += 1;
            take(&mut next, step)?;
            if let Some(key) = self.new_state(&next, left) {
                if key % self.bounds.settle_one_in == 0 {
                    self.found.settled += 1;
                    settle(next.clone())?;
                }
                self.visit(&next, left)?;
            }
            self.trace.pop();
        }
        Ok(())
    }

    /// The digest of a state, if it was not seen before.
    fn new_state(&mut self, job: &Simulation, left: Budget) -> Option<u64> {
        let mut hasher = DefaultHasher::new();
        self.fingerprint.text(job).hash(&mut hasher);
        left.hash(&mut hasher);
        if self.limit != usize::MAX {
            // A state that is reached with more budget left may be explored further.
            self.trace.len().hash(&mut hasher);
        }
        let key = hasher.finish();
        let new = self.seen.insert(key);
        self.found.states = self.seen.len();
        new.then_some(key)
    }
}

/// All possible next steps.
fn steps(job: &Simulation, budget: Budget, bounds: &Bounds) -> Vec<Step> {
    let (mut steps, mut streams) = (Vec::new(), HashSet::new());
    let mut deadline_is_due = false;
    for (key, event) in job.engine.queue.pending() {
        let first = stream(event).is_none_or(|stream| streams.insert(stream));
        if key.0 > job.now() || !first {
            continue;
        }
        deadline_is_due |= is_deadline(event);
        steps.push(Step::Happens(key));
    }
    if budget.waits > 0 && !deadline_is_due && next_time(job).is_some() {
        steps.push(Step::Wait);
    }
    if budget.faults > 0 {
        steps.extend(bounds.kinds.iter().filter(|action| applies(job, action)).cloned().map(Step::Fault));
    }
    // Every fault allows for one start.
    if job.pids < (job.hosts.len() + usize::from(bounds.faults)) as u64 {
        let gone = (0..job.hosts.len()).filter(|host| job.hosts[*host].process.is_none());
        steps.extend(gone.map(|host| Step::Start(Action::Start(host, job.options.join_timeout))));
    }
    if !job.coordinator.up {
        steps.push(Step::Start(Action::StartCoordinator));
    }
    steps
}

/// Whether this is a timer. A process that does not stand still handles its timers in time.
fn is_deadline(event: &Event) -> bool {
    !matches!(event, Event::Deliver { .. } | Event::Eof { .. } | Event::Syn(..) | Event::Connected(..))
}

fn next_time(job: &Simulation) -> Option<Time> {
    job.engine.queue.pending().map(|((at, _), _)| at).find(|at| *at > job.now())
}

fn applies(job: &Simulation, action: &Action) -> bool {
    let process = |host: &usize| job.hosts[*host].process.as_ref();
    match action {
        Action::Sever(host) => process(host).is_some_and(|process| process.conn.is_some()),
        Action::FailWorkers(host)
        | Action::LoseWorkers(host)
        | Action::ReportFailure(host)
        | Action::ReportDone(host) => process(host).is_some_and(|process| process.running().is_some()),
        Action::Kill(host)
        | Action::PowerOff(host)
        | Action::Terminate(host)
        | Action::Interrupt(host)
        | Action::AskToLeave(host)
        | Action::Notice(host, _)
        | Action::Close(host, _) => process(host).is_some(),
        Action::CrashCoordinator | Action::StallCoordinator(_) => job.coordinator.up,
        Action::Start(..)
        | Action::StartCoordinator
        | Action::MoveCoordinator
        | Action::Stall(..)
        | Action::Cut(..)
        | Action::Intrude(..) => true,
    }
}

fn take(job: &mut Simulation, step: Step) -> Result<(), Violation> {
    match step {
        Step::Happens(key) => {
            if let Some(event) = job.engine.queue.take(key) {
                job.happen(event)?;
            }
        }
        Step::Wait => job.engine.queue.advance(next_time(job).unwrap_or(job.now())),
        Step::Fault(action) | Step::Start(action) => job.act(action)?,
    }
    forget(job);
    Ok(())
}

/// Drop state that decides nothing: deadlines that were replaced by earlier ones, counts, and the time limits for noticing a loss,
/// which only hold where messages are quick.
pub(super) fn forget(job: &mut Simulation) {
    let stale = |(key, event): (Key, &Event)| match event {
        Event::NodeTick(host, pid) => {
            let process = job.hosts[*host].process.as_ref().filter(|process| process.pid == *pid);
            process.is_none_or(|process| !process.alarm.is_set_for(key.0)).then_some(key)
        }
        Event::CoordinatorTick => (!job.coordinator.alarm.is_set_for(key.0)).then_some(key),
        Event::Noticed(_) => Some(key),
        _ => None,
    };
    let stale: Vec<_> = job.engine.queue.pending().filter_map(stale).collect();
    for key in stale {
        job.engine.queue.take(key);
    }
    job.ledgers[0].messages = (0, 0);
}

/// Checks that the job settles without further faults.
fn settle(mut job: Simulation) -> Result<(), Violation> {
    let now = job.now();
    job.act(Action::StartCoordinator)?;
    job.run_until(now + FAULTS_END_WITHIN + SETTLE_WITHIN)?;
    check_settled(job.hosts_of(0), &job.options.settings)
}

/// A history in words: the steps, and the violation.
fn report(start: &Simulation, trace: &[Step], violation: &Violation) -> String {
    let mut job = start.clone();
    job.keep_history();
    for step in trace {
        if let Step::Fault(action) | Step::Start(action) = step {
            job.engine.remark(|| format!("{action:?}"));
        }
        if take(&mut job, step.clone()).is_err() {
            break;
        }
    }
    format!("{violation}\nafter {} steps:\n{}", trace.len(), job.history().join("\n"))
}

/// Stalls and cuts of [`explore`] end within this time.
const FAULTS_END_WITHIN: Duration = Duration::from_secs(60);
