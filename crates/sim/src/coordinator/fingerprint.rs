//! The state of a simulated job as text, for [`super::explore`]. Two jobs with equal texts differ at most in the time of day.
//!
//! Made from the types' debug output, so that no field of the product is forgotten, but the machines' records
//! ([`DecisionState`](elastic_rs::rendezvous::decision_state::DecisionState)). Instants are written relative to now. On a
//! platform that prints instants in another way, more states are distinguished than necessary, and nothing is missed.

use std::fmt::{self, Write};

use super::event::Event;
use super::simulation::Simulation;
use crate::engine::paths::End;
use crate::engine::queue::Time;

/// Makes texts, and holds the buffers.
#[derive(Debug, Default)]
pub(super) struct Fingerprint {
    text: String,
    lines: Vec<String>,
}

impl Fingerprint {
    pub fn text(&mut self, job: &Simulation) -> &str {
        self.text.clear();
        // Writing into a string cannot fail.
        let _ = self.write(job);
        &self.text
    }

    fn write(&mut self, job: &Simulation) -> fmt::Result {
        let now = job.now();
        let mut out = Relative::new(&mut self.text, job);
        job.coordinator.describe(job.instant(), &mut out)?;
        write!(out, "{:?}", job.ledgers)?;
        for (number, host) in job.hosts.iter().enumerate() {
            write!(out, "\n{:?}", job.stalled_until(number).saturating_sub(now))?;
            if let Some(process) = &host.process {
                process.describe(job.instant(), &mut out)?;
            }
        }
        job.network.describe(&mut out)?;
        job.engine.paths.describe(now, &mut out)?;
        for (owner, events) in job.engine.processes.deferred() {
            write!(out, "\n{owner:?} {events:?}")?;
        }
        // Order matters only within a stream, where it is the order of the list.
        self.lines.clear();
        for (position, ((at, _), event)) in job.engine.queue.pending().enumerate() {
            let order = stream(event).map_or(0, |_| position_in_stream(job, event, position));
            self.lines.push(format!("{:?} {order} {event:?}", at.saturating_sub(now)));
        }
        self.lines.sort_unstable();
        self.lines.iter().try_for_each(|line| write!(self.text, "\n{line}"))
    }
}

/// The stream of an event: one direction of a connection.
pub(super) fn stream(event: &Event) -> Option<(u64, End)> {
    match event {
        Event::Deliver { conn, to, .. } | Event::Eof { conn, to } => Some((conn.0, *to)),
        _ => None,
    }
}

fn position_in_stream(job: &Simulation, event: &Event, position: usize) -> usize {
    let of = stream(event);
    job.engine.queue.pending().take(position).filter(|(_, other)| stream(other) == of).count()
}

/// Writes text with instants relative to now. Their debug output is `tv_sec: …, tv_nsec: …`, in pieces.
struct Relative<'a> {
    out: &'a mut String,
    now: i128,
    seconds: Option<i128>,
    expects: Expects,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Expects {
    Text,
    Seconds,
    Nanos,
}

impl<'a> Relative<'a> {
    fn new(out: &'a mut String, job: &Simulation) -> Self {
        let mut text = String::new();
        let mut origin = Relative { out: &mut text, now: 0, seconds: None, expects: Expects::Text };
        let _ = write!(origin, "{:?}", job.engine.origin);
        let at = text.split(|c: char| !c.is_ascii_digit()).find_map(|number| number.parse::<i128>().ok());
        let now = at.unwrap_or(0) + nanos(job.now());
        Self { out, now, seconds: None, expects: Expects::Text }
    }
}

fn nanos(time: Time) -> i128 {
    time.as_nanos() as i128
}

impl Write for Relative<'_> {
    fn write_str(&mut self, piece: &str) -> fmt::Result {
        match (self.expects, piece) {
            (_, "tv_sec") => self.expects = Expects::Seconds,
            (_, "tv_nsec") => self.expects = Expects::Nanos,
            (Expects::Text, _) => self.out.push_str(piece),
            (expects, _) => {
                let Ok(number) = piece.parse::<i128>() else { return Ok(()) };
                match (expects, self.seconds.take()) {
                    (Expects::Seconds, _) => self.seconds = Some(number),
                    (_, seconds) => {
                        let at = seconds.unwrap_or(0) * 1_000_000_000 + number;
                        self.expects = Expects::Text;
                        write!(self.out, "{}", at - self.now)?;
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::explore;
    use super::super::options::Options;
    use super::*;
    use elastic_rs::rendezvous::messages::settings::Settings;

    /// A running job at rest has the same text each time, right after a heartbeat was answered.
    #[test]
    fn the_time_of_day_makes_no_difference() {
        let mut job = explore::job(Options::exact(2, Settings::new(2, 2)));
        job.start_all(Time::ZERO);
        let mut text = |at| {
            job.run_until(Duration::from_secs(at)).expect("invariants hold");
            explore::forget(&mut job);
            let text = Fingerprint::default().text(&job).to_owned();
            // The time of a node's last connection attempt decides nothing while the connection is up.
            let parts =
                text.split("attempt_at: Instant { ").map(|part| part.split_once('}').map_or(part, |rest| rest.1));
            parts.collect::<String>()
        };
        let (one, other, between) = (text(50), text(100), text(102));
        assert_eq!(one, other);
        assert_ne!(one, between);
        assert!(!one.contains("tv_sec"), "{one}");
    }
}
