//! The events of all runs, and the observers that wait for the next ones.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;
use tokio::sync::{oneshot, watch};

use super::hangs::Shown;
use super::machine::{Led, Machine};
use crate::events::families;
use crate::events::file::{EventFile, LAST_LINES};
use crate::events::line::line;
use crate::events::metrics::Metrics;
use crate::events::open_metrics::OpenMetrics;
use crate::events::record::Record;
use crate::events::ring::Rings;
use crate::events::tally::Tally;
use crate::hosts::{UnusedHost, UnusedHosts};
use crate::rendezvous::messages::message::{Observe, Observed};
use crate::rendezvous::run::{Activity, Run, RunState};
use crate::wire::time::micros;

/// Bytes of an answer: a frame has room for more, and for one event that is longer.
const ANSWER_BYTES: usize = 32 * 1024;
/// Lines are made of events once nothing has happened for so long. Nodes of a round get their messages first.
const QUIET: Duration = Duration::from_millis(10);
/// How long it may take until then.
const LINES_WITHIN: Duration = Duration::from_millis(100);
/// Most events that wait for that.
const FRESH: usize = 2048;
/// Most runs that a page lists.
const LISTED: usize = 200;
/// How long an answer waits for a node that was asked how far the training is.
const STEP_LIMIT: Duration = Duration::from_millis(200);
/// Most runs that an error names.
const NAMED: usize = 8;

/// What an observer gets: an answer, or why there is none.
pub(super) type Answer = Result<Observed, String>;

/// What a page shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    /// A list of these runs, and the number of those that are left out.
    Runs(Vec<String>, usize),
    /// A run, as observers get it.
    Run {
        /// Its events as lines of JSON, the oldest first.
        lines: Vec<Arc<str>>,
        /// Its state as JSON.
        state: String,
    },
}

/// The hosts that drivers of agents do not use, by run id. A driver hosts the coordinator of its run.
pub type DriversHosts = BTreeMap<String, UnusedHosts>;

/// A run's state, the hosts that are not used, and the time on the clock of its events. Fields are only added.
#[derive(Serialize)]
struct Dated<'a> {
    #[serde(flatten)]
    state: RunState,
    /// The first of them: those that the run keeps out, and those that its driver does not use.
    unused_hosts: Vec<UnusedHost>,
    /// How many more there are.
    unused_hosts_more: usize,
    /// The training, if it stands still.
    #[serde(skip_serializing_if = "Option::is_none")]
    hang: Option<Shown>,
    /// Who leads, if the job has a list of endpoints.
    #[serde(skip_serializing_if = "Option::is_none")]
    list: Option<&'a Led>,
    mono_us: u64,
}

/// An observer that waits for the next event of a run, or for how far its training is.
#[derive(Debug)]
struct Waiting {
    run_id: String,
    ask: Observe,
    reply: oneshot::Sender<Answer>,
    /// Until when a node may report how far the training is.
    step_until: Option<Instant>,
}

/// An event that is not a line yet.
#[derive(Debug)]
struct Fresh {
    run_id: String,
    record: Record,
    at: Instant,
    wall: SystemTime,
}

/// The events of all runs of a coordinator.
#[derive(Debug)]
pub(super) struct EventLog {
    rings: Rings,
    fresh: Vec<Fresh>,
    /// Names this process of the coordinator in the ids of its events.
    origin: String,
    began: Instant,
    waiting: Vec<Waiting>,
    metrics: Metrics,
    /// The number of each run's opening. A run that is forgotten and opened again numbers its events anew.
    openings: BTreeMap<String, u64>,
    opened: u64,
    /// Where events are written, so that they outlive this process.
    file: Option<EventFile>,
    drivers: watch::Receiver<DriversHosts>,
}

impl EventLog {
    /// A log without events. `instance`: a random number of this process.
    pub fn new(instance: u32, drivers: watch::Receiver<DriversHosts>, now: Instant) -> Self {
        Self {
            rings: Rings::default(),
            fresh: Vec::new(),
            origin: format!("c{instance:08x}"),
            began: now,
            waiting: Vec::new(),
            metrics: Metrics::default(),
            openings: BTreeMap::new(),
            opened: 0,
            file: None,
            drivers,
        }
    }

    /// Write all events into a file from now on, beginning with those that are kept.
    pub fn write_into(&mut self, file: EventFile) {
        if self.file.is_some() {
            return;
        }
        self.make_lines();
        for (run_id, kept) in self.rings.all() {
            file.push(&run_id.into(), Arc::clone(&kept.line), 0);
        }
        self.file = Some(file);
    }

    /// Write the file to its end. Blocks, for [`LAST_LINES`] at most.
    pub fn finish(&mut self) {
        self.make_lines();
        if let Some(file) = self.file.take() {
            file.finish(LAST_LINES);
        }
    }

    /// Keep an event. Its line is made later: that takes longer than to decide, and nodes wait for decisions.
    pub fn keep(&mut self, run_id: String, record: Record, now: Instant) {
        self.metrics.count(&run_id, &record, now);
        self.fresh.push(Fresh { run_id, record, at: now, wall: SystemTime::now() });
        if self.fresh.len() >= FRESH {
            self.make_lines();
        }
    }

    /// Make lines of what is kept, and write them into the file.
    pub fn make_lines(&mut self) {
        for Fresh { run_id, record, at, wall } in std::mem::take(&mut self.fresh) {
            let since = at.saturating_duration_since(self.began);
            let opening = match self.openings.get(&run_id) {
                Some(opening) => *opening,
                None => {
                    self.opened += 1;
                    self.openings.insert(run_id.clone(), self.opened);
                    self.opened
                }
            };
            let origin = format!("{}-{opening}", self.origin);
            let line = line(&record, &run_id, &origin, since, wall);
            if let Some(file) = &self.file {
                file.push(&run_id.as_str().into(), Arc::clone(&line), 0);
            }
            self.rings.push(&run_id, record.number.0, record.kind.explains(), line);
        }
    }

    /// Make lines if it is time.
    pub fn on_tick(&mut self, now: Instant) {
        if self.lines_due().is_some_and(|due| due <= now) {
            self.make_lines();
        }
    }

    fn lines_due(&self) -> Option<Instant> {
        let (first, last) = (self.fresh.first()?, self.fresh.last()?);
        Some((last.at + QUIET).min(first.at + LINES_WITHIN))
    }

    /// Count what is no event.
    pub fn tally(&mut self, run_id: &str, tally: Tally) {
        self.metrics.tally(run_id, tally);
    }

    /// Answer the observers with the last events of a run, and forget them.
    pub fn forget(&mut self, run_id: &str, machine: &Machine) {
        self.make_lines();
        self.answer_waiting(machine);
        self.rings.forget(run_id);
        self.metrics.forget(run_id);
        self.openings.remove(run_id);
    }

    /// Answer an observer now, or once there is an event. `knows_all`: it may know which runs there are.
    pub fn ask(
        &mut self,
        ask: Observe,
        knows_all: bool,
        reply: oneshot::Sender<Answer>,
        machine: &Machine,
        now: Instant,
    ) {
        let run_id = match chosen(ask.run_id.as_deref(), knows_all, machine) {
            Ok(run_id) => run_id,
            Err(mut reason) => {
                if let Some(hosts) = ask.run_id.as_deref().and_then(|run_id| self.hosts_of_driver(run_id)) {
                    reason += &format!("; hosts that its driver does not use: {}", hosts.text(now));
                }
                let _ = reply.send(Err(reason)); // the observer may have gone
                return;
            }
        };
        self.make_lines();
        let last = self.rings.last(&run_id);
        if ask.after > last {
            let reason =
                format!("run `{run_id}` was started again: its last event is {last}, and {} was asked for", ask.after);
            let _ = reply.send(Err(reason));
        } else if ask.waits && self.rings.after(&run_id, ask.after).next().is_none() {
            self.waiting.push(Waiting { run_id, ask, reply, step_until: None });
        } else if ask.state && machine.run(&run_id).is_some_and(Run::awaits_step) {
            self.waiting.push(Waiting { run_id, ask, reply, step_until: Some(now + STEP_LIMIT) });
        } else {
            let _ = reply.send(Ok(self.answer(run_id, &ask, machine)));
        }
    }

    /// The runs that have metrics of their own.
    pub fn runs(&self) -> impl Iterator<Item = &str> {
        self.metrics.runs()
    }

    /// What was counted, and the state of the runs.
    pub fn metrics(&mut self, machine: &Machine) -> OpenMetrics {
        self.make_lines();
        let (mut out, now) = (OpenMetrics::default(), Instant::now());
        out.family(&families::BUILD_INFO);
        out.value(&families::BUILD_INFO, &[env!("CARGO_PKG_VERSION")], 1);
        self.metrics.write(&mut out, now);
        out.family(&families::EVENTS_DROPPED);
        out.value(&families::EVENTS_DROPPED, &[], self.rings.dropped());
        out.family(&families::SESSIONS);
        out.value(&families::SESSIONS, &[], machine.session_count());
        let states: Vec<_> = self.metrics.runs().filter_map(|id| Some(machine.run(id)?.state(now))).collect();
        out.family(&families::RUN_STATE);
        for run in &states {
            for state in Activity::ALL {
                out.value(&families::RUN_STATE, &[run.run.as_str(), state.name()], u8::from(run.state == state));
            }
        }
        out.family(&families::ROUND);
        states.iter().for_each(|run| out.value(&families::ROUND, &[run.run.as_str()], run.round));
        out.family(&families::RESTARTS_LEFT);
        for run in &states {
            let of_all = run.max_restarts.map(|most| most.saturating_sub(run.restart));
            if let Some(left) = run.budget.map(|budget| budget.crashes).or(of_all) {
                out.value(&families::RESTARTS_LEFT, &[run.run.as_str()], left);
            }
        }
        out.family(&families::NODES);
        for run in &states {
            for (state, count) in [("running", run.running), ("waiting", run.waiting), ("finished", run.finished)] {
                out.value(&families::NODES, &[run.run.as_str(), state], count);
            }
        }
        out.family(&families::STEP);
        for run in &states {
            run.step.iter().for_each(|step| out.value(&families::STEP, &[run.run.as_str()], step));
        }
        out.family(&families::STILL_SECONDS);
        for run in &states {
            let still = machine.still(&run.run, now).unwrap_or_default();
            out.value(&families::STILL_SECONDS, &[run.run.as_str()], still.as_secs_f64());
        }
        out.family(&families::WORKERS);
        for run in &states {
            run.workers.iter().for_each(|workers| out.value(&families::WORKERS, &[run.run.as_str()], workers));
        }
        out
    }

    /// Answer the observers that have waited for what was kept.
    pub fn answer_waiting(&mut self, machine: &Machine) {
        if self.waiting.is_empty() {
            return;
        }
        let now = Instant::now();
        for Waiting { run_id, ask, reply, step_until } in std::mem::take(&mut self.waiting) {
            if let Some(until) = step_until {
                if now < until && machine.run(&run_id).is_some_and(Run::awaits_step) {
                    self.waiting.push(Waiting { run_id, ask, reply, step_until });
                } else {
                    let _ = reply.send(Ok(self.answer(run_id, &ask, machine)));
                }
            } else if self.rings.after(&run_id, ask.after).next().is_some() {
                let _ = reply.send(Ok(self.answer(run_id, &ask, machine)));
            } else if machine.run(&run_id).is_none() {
                let _ = reply.send(Err(format!("run `{run_id}` is forgotten")));
            } else if !reply.is_closed() {
                self.waiting.push(Waiting { run_id, ask, reply, step_until });
            }
        }
    }

    /// What the page of a run shows; without a name the only run, or a list of them.
    pub fn subject(&mut self, run_id: Option<&str>, machine: &Machine) -> Result<Subject, String> {
        self.make_lines();
        if run_id.is_none() && machine.run_ids().nth(1).is_some() {
            let mut ids = machine.run_ids();
            let names = ids.by_ref().take(LISTED).map(str::to_owned).collect();
            return Ok(Subject::Runs(names, ids.count()));
        }
        let run_id = chosen(run_id, true, machine)?;
        let lines = self.rings.after(&run_id, 0).map(|kept| Arc::clone(&kept.line)).collect();
        Ok(Subject::Run { lines, state: self.state_of(&run_id, machine).unwrap_or_default() })
    }

    /// When to call [`Self::on_tick`] and [`Self::answer_waiting`] at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.waiting.iter().filter_map(|waiting| waiting.step_until).chain(self.lines_due()).min()
    }

    /// The hosts that the driver of this run does not use, if a driver hosts this coordinator, and there are any.
    fn hosts_of_driver(&self, run_id: &str) -> Option<UnusedHosts> {
        self.drivers.borrow().get(run_id).filter(|hosts| !hosts.is_empty()).cloned()
    }

    fn state_of(&self, run_id: &str, machine: &Machine) -> Option<String> {
        let now = Instant::now();
        let mono_us = micros(now.saturating_duration_since(self.began));
        let run = machine.run(run_id)?;
        let unused = run.unused_hosts(now).and(self.hosts_of_driver(run_id).unwrap_or_default());
        let (unused_hosts, unused_hosts_more) = (unused.shown(now), unused.more());
        let hang = machine.hang(run_id, now);
        let list = machine.led();
        let state = Dated { state: run.state(now), unused_hosts, unused_hosts_more, hang, list, mono_us };
        // All of its keys are texts, so nothing in it can fail.
        Some(serde_json::to_string(&state).unwrap_or_default())
    }

    fn answer(&mut self, run_id: String, ask: &Observe, machine: &Machine) -> Observed {
        self.make_lines();
        let state = if ask.state { self.state_of(&run_id, machine) } else { None };
        let mut bytes = state.as_ref().map_or(0, String::len);
        let (mut lines, mut last, mut more) = (Vec::new(), ask.after, false);
        for kept in self.rings.after(&run_id, ask.after) {
            bytes += kept.line.len();
            if bytes > ANSWER_BYTES && (state.is_some() || !lines.is_empty()) {
                more = true;
                break;
            }
            lines.push(kept.line.to_string());
            last = kept.number;
        }
        Observed { run_id, state, lines, last, more }
    }
}

/// The run that is meant.
pub(super) fn chosen(asked: Option<&str>, knows_all: bool, machine: &Machine) -> Result<String, String> {
    if let Some(run_id) = asked.filter(|run_id| machine.run(run_id).is_some()) {
        return Ok(run_id.to_owned());
    }
    let mut ids = machine.run_ids();
    let first: Vec<_> = ids.by_ref().take(NAMED).collect();
    let more = ids.count();
    match (asked, first.as_slice()) {
        (None, [only]) => return Ok((*only).to_owned()),
        (Some(run_id), _) if !knows_all => return Err(format!("there is no run `{run_id}` here")),
        (_, []) => return Err("no node has come to this coordinator yet, so there is no run".to_owned()),
        _ => {}
    }
    let names = first.iter().map(|id| format!("`{id}`")).collect::<Vec<_>>().join(", ");
    let names = if more > 0 { format!("{names} and {more} more") } else { names };
    Err(match asked {
        Some(run_id) => format!("there is no run `{run_id}` here; there are {names}"),
        None => format!("there are several runs here: {names}; name one"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::record::{Kind, Number};

    fn record(number: u64) -> Record {
        let text = Some(format!("sentence {number}"));
        Record {
            number: Number(number),
            causes: Vec::new(),
            round: 1,
            restart: 0,
            node: None,
            kind: Kind::Note {},
            text,
        }
    }

    fn lines(log: &EventLog) -> usize {
        log.rings.after("job", 0).count()
    }

    #[test]
    fn lines_are_made_once_it_is_quiet() {
        let began = Instant::now();
        let at = |ms| began + Duration::from_millis(ms);
        let mut log = EventLog::new(1, watch::channel(DriversHosts::new()).1, began);
        assert_eq!(log.next_deadline(), None);
        for number in 0..5 {
            log.keep("job".to_owned(), record(number + 1), at(5 * number));
            log.on_tick(at(5 * number));
        }
        assert_eq!((lines(&log), log.next_deadline()), (0, Some(at(30))));
        log.on_tick(at(30));
        assert_eq!((lines(&log), log.next_deadline()), (5, None));
        // It is never quiet.
        for number in 0..20 {
            log.keep("job".to_owned(), record(number + 6), at(100 + 9 * number));
        }
        assert_eq!(log.next_deadline(), Some(at(200)));
        log.on_tick(at(200));
        assert_eq!(lines(&log), 25);
        let line = log.rings.after("job", 0).last().unwrap().line.clone();
        assert!(line.contains("\"id\":\"c00000001-1.25\"") && line.contains("\"mono_us\":271000,"), "{line}");
    }

    #[test]
    fn events_that_wait_to_be_lines_are_bounded() {
        let now = Instant::now();
        let mut log = EventLog::new(1, watch::channel(DriversHosts::new()).1, now);
        (1..=FRESH as u64).for_each(|number| log.keep("job".to_owned(), record(number), now));
        assert_eq!((lines(&log), log.fresh.len()), (FRESH, 0));
    }

    #[test]
    fn who_asks_is_answered_with_all_that_has_happened() {
        let now = Instant::now();
        let mut log = EventLog::new(1, watch::channel(DriversHosts::new()).1, now);
        log.keep("job".to_owned(), record(1), now);
        let ask = Observe { run_id: None, after: 0, waits: false, state: false };
        assert_eq!(log.answer("job".to_owned(), &ask, &Machine::new()).last, 1);
        log.keep("job".to_owned(), record(2), now);
        log.forget("job", &Machine::new());
        assert_eq!((lines(&log), log.next_deadline()), (0, None));
    }
}
