//! A recovery in one line, from what this node knows: what failed, and what it cost. Pure.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use crate::events::metrics::PHASES;
use crate::events::record::Phase;
use crate::rendezvous::messages::message::{Failure, NEVER, Placement, Round};
use crate::rendezvous::node::View;

/// Most characters of a cause in a log line.
const LONGEST: usize = 120;

/// Why the world of this node re-forms, and since when: what is known so far.
#[derive(Clone, Debug, Default)]
pub(super) struct Disturbance {
    since: Option<Instant>,
    cause: Option<Cause>,
    /// A worker of this node has failed, so its workers do not go on as they are.
    own: bool,
}

/// Why, the most specific cause first.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Cause {
    /// The first failure of the round, on whatever node.
    Failed(Box<Failure>),
    /// In words.
    Reported(String),
}

impl Disturbance {
    /// A worker of this node has failed. Whether another failure was the first is not known yet.
    pub fn own(&mut self, failure: &Failure, own_name: &str, now: Instant) {
        self.since.get_or_insert(now);
        self.own = true;
        if self.cause.is_none() {
            let named = Failure { node: own_name.to_owned(), ..failure.clone() };
            self.cause = Some(Cause::Failed(Box::new(named)));
        }
    }

    /// The world must re-form. `failure`: the one that the coordinator has counted as the first, if it was one.
    pub fn note(&mut self, reason: &str, failure: Option<&Failure>, now: Instant) {
        self.since.get_or_insert(now);
        match (failure, &self.cause) {
            (Some(failure), _) => self.cause = Some(Cause::Failed(Box::new(failure.clone()))),
            (None, None) => self.cause = Some(Cause::Reported(reason.to_owned())),
            (None, Some(_)) => {}
        }
    }

    /// What the session says. `runs`: this node's workers do. If the reason is gone, they go on, and nothing has happened.
    pub fn on_view(&mut self, view: &View, runs: bool, now: Instant) {
        let change = view.change.as_ref().filter(|_| view.raise_at.is_none_or(|(_, check)| check != NEVER));
        if view.waiting > 0 {
            self.note(&view.reason, view.failure.as_ref(), now);
        } else if let Some(change) = change {
            self.note(&change.reason, None, now);
        } else if runs && !self.own {
            *self = Self::default();
        }
    }

    /// The workers run again: what to log, if there was a disturbance. The next one begins. `limit`: the job's budget of restarts, if
    /// the job has one.
    pub fn over(&mut self, phase: Phase, placement: &Placement, limit: Option<u32>, now: Instant) -> Option<Recovered> {
        let Self { since, cause, .. } = std::mem::take(self);
        let lasted = now.saturating_duration_since(since?);
        let restart = limit.map(|limit| super::restart_of(placement.restart, limit));
        Some(Recovered { lasted, cause, phase, round: placement.round, nodes: placement.world_size, restart })
    }
}

/// The workers run again after a disturbance.
#[derive(Clone, Debug)]
pub(super) struct Recovered {
    lasted: Duration,
    cause: Option<Cause>,
    phase: Phase,
    round: Round,
    nodes: u32,
    restart: Option<String>,
}

impl Recovered {
    /// The round that ended the disturbance.
    pub fn round(&self) -> Round {
        self.round
    }

    /// `recovered in 1.3 s: n17 rank 3 SIGKILL; stop 0.2, rendezvous 0.03, start 0.1; 2 nodes, restart 1 of 3`. `import`: how long the
    /// workers took for it after their start, if that is known.
    pub fn line(&self, import: Option<Duration>) -> String {
        let Self { lasted, cause, phase, nodes, restart, .. } = self;
        let mut line = format!("recovered in {} s", seconds(*lasted + import.unwrap_or_default()));
        match cause {
            Some(Cause::Failed(failure)) => {
                let Failure { node, global_rank, exit, .. } = &**failure;
                let _ = write!(line, ": {} rank {global_rank} {exit}", host(node));
            }
            Some(Cause::Reported(reason)) => {
                let _ = write!(line, ": {}", shortened(reason));
            }
            None => {}
        }
        let import_us = import.and_then(|import| u64::try_from(import.as_micros()).ok());
        let part =
            |(name, micros): (&str, Option<u64>)| Some(format!("{name} {}", seconds(Duration::from_micros(micros?))));
        let parts: Vec<_> = PHASES.into_iter().zip(Phase { import_us, ..*phase }.parts()).filter_map(part).collect();
        if !parts.is_empty() {
            let _ = write!(line, "; {}", parts.join(", "));
        }
        let _ = write!(line, "; {nodes} node{}", if *nodes == 1 { "" } else { "s" });
        if let Some(restart) = restart {
            let _ = write!(line, ", {restart}");
        }
        line
    }
}

/// The host of a node, whose label is `host:pid`, or `address (host:pid)`. Without its domain.
fn host(label: &str) -> &str {
    let name = label.rsplit_once('(').map_or(label, |(_, name)| name.trim_end_matches(')'));
    let host = match name.rsplit_once(':') {
        Some((host, pid)) if !host.is_empty() && pid.bytes().all(|byte| byte.is_ascii_digit()) => host,
        _ => name,
    };
    let is_address = host.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    if is_address { host } else { host.split('.').next().unwrap_or(host) }
}

/// The number of seconds, with two digits that matter.
fn seconds(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    let digits = match seconds {
        seconds if seconds < 0.001 => 4,
        seconds if seconds < 0.01 => 3,
        seconds if seconds < 0.095 => 2,
        seconds if seconds < 9.95 => 1,
        _ => 0,
    };
    format!("{seconds:.digits$}")
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::messages::message::WorldChange;

    fn placement() -> Placement {
        Placement {
            round: Round(2),
            rank: 0,
            world_size: 4,
            world: 0,
            master_addr: "localhost".to_owned(),
            master_port: 1000,
            reason: String::new(),
            restart: 1,
            workers: None,
            host: None,
            local_world_size: None,
            resume: None,
            members: None,
        }
    }

    fn failure(node: &str) -> Failure {
        Failure {
            node: node.to_owned(),
            role: "default".to_owned(),
            local_rank: 1,
            global_rank: 3,
            pid: 5,
            exit: "SIGKILL".to_owned(),
            returncode: -9,
            message: "words".to_owned(),
            counts: true,
            lived: Duration::from_secs(60),
            step: None,
        }
    }

    fn phase() -> Phase {
        Phase { stop_us: Some(200_000), rendezvous_us: Some(31_000), start_us: Some(4_000), ..Phase::default() }
    }

    #[test]
    fn a_recovery_is_one_line_of_what_failed_and_what_it_cost() {
        let note = |reason: &'static str, failure: Option<Failure>| {
            move |it: &mut Disturbance, now| it.note(reason, failure.as_ref(), now)
        };
        let own = |it: &mut Disturbance, now| it.own(&failure(""), "n2:7", now);
        type Event = Box<dyn Fn(&mut Disturbance, Instant)>;
        let detected = Phase { detect_us: Some(12_000), ..phase() };
        type Row = (&'static str, Vec<Event>, (Phase, Option<u64>), Option<u32>, &'static str);
        let table: Vec<Row> = vec![
            (
                "a failure elsewhere",
                vec![Box::new(note("words", Some(failure("10.0.0.17 (n17.example.org:4711)"))))],
                (phase(), None),
                Some(3),
                "recovered in 1.3 s: n17 rank 3 SIGKILL; stop 0.2, rendezvous 0.03, start 0.004; 4 nodes, \
                 restart 1 of 3",
            ),
            (
                "one's own failure, which nobody has counted",
                vec![Box::new(own), Box::new(note("a node was lost", None))],
                (phase(), None),
                None,
                "recovered in 1.3 s: n2 rank 3 SIGKILL; stop 0.2, rendezvous 0.03, start 0.004; 4 nodes",
            ),
            (
                "one's own failure, which follows from another",
                vec![Box::new(own), Box::new(note("", Some(failure("10.0.0.9:3"))))],
                (Phase::default(), None),
                None,
                "recovered in 1.3 s: 10.0.0.9 rank 3 SIGKILL; 4 nodes",
            ),
            (
                "no failure, and all phases",
                vec![Box::new(note("n19:4 joined", None))],
                (detected, Some(1_100)),
                None,
                "recovered in 2.4 s: n19:4 joined; detect 0.01, stop 0.2, rendezvous 0.03, start 0.004, import 1.1; \
                 4 nodes",
            ),
        ];
        let begin = Instant::now();
        for (name, events, (phase, import_ms), limit, expected) in table {
            let mut disturbance = Disturbance::default();
            for (at, event) in events.iter().enumerate() {
                event(&mut disturbance, begin + Duration::from_millis(at as u64));
            }
            let now = begin + Duration::from_millis(1_300);
            let recovered = disturbance.over(phase, &placement(), limit, now).unwrap();
            assert_eq!(recovered.line(import_ms.map(Duration::from_millis)), expected, "{name}");
            assert!(disturbance.over(phase, &placement(), limit, now).is_none(), "{name}: it is logged once");
        }
    }

    #[test]
    fn what_was_called_off_has_cost_nothing_unless_a_worker_has_failed() {
        let begin = Instant::now();
        let later = begin + Duration::from_secs(60);
        let (calm, mut disturbance) = (View::default(), Disturbance::default());
        let waits = View { waiting: 1, reason: "n19:4 joined".to_owned(), ..View::default() };
        let change = WorldChange { round: Round(1), flags: 0, reason: "n19:4 joined".to_owned() };
        let changes = View { change: Some(change), ..View::default() };
        let goes_on = View { raise_at: Some((Round(1), NEVER)), ..changes.clone() };
        for (broken, mended) in [(&waits, &calm), (&changes, &goes_on)] {
            disturbance.on_view(broken, true, begin);
            disturbance.on_view(mended, true, begin);
            assert!(disturbance.over(phase(), &placement(), None, later).is_none());
            disturbance.on_view(broken, true, begin);
            disturbance.on_view(mended, false, begin); // they were stopped already
            let line = disturbance.over(phase(), &placement(), None, later).unwrap().line(None);
            assert!(line.contains(" s: n19:4 joined; "), "{line}");
        }
        disturbance.own(&failure(""), "n2:7", later);
        disturbance.on_view(&calm, true, later);
        let line = disturbance.over(phase(), &placement(), None, later).unwrap().line(None);
        assert!(line.starts_with("recovered in 0.0000 s: n2 rank 3 SIGKILL; "), "{line}");
    }

    #[test]
    fn a_cause_in_words_is_bounded() {
        let mut disturbance = Disturbance::default();
        let now = Instant::now();
        disturbance.note(&"ä".repeat(10_000), None, now);
        let line = disturbance.over(phase(), &placement(), None, now).unwrap().line(None);
        assert!(line.starts_with("recovered in 0.0000 s: ää") && line.chars().count() < LONGEST + 120, "{line}");
    }

    #[test]
    fn hosts_are_named_without_process_and_domain() {
        for (label, expected) in [
            ("n17:4711", "n17"),
            ("n17.example.org:4711", "n17"),
            ("10.1.2.3 (10.1.2.3:5)", "10.1.2.3"),
            ("fe80::1 (n1:5)", "n1"),
            ("n17", "n17"),
            ("n17:x", "n17:x"),
            ("", ""),
        ] {
            assert_eq!(host(label), expected, "{label}");
        }
    }
}
