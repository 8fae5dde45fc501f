//! The words of failed workers, found at once, late or never, and the reports to other nodes. Part of [`super`].

use std::time::Duration;

use super::super::event::Event;
use super::super::simulation::Simulation;
use super::{Agents, Found, Listening, pid_of_workers};
use crate::engine::paths::HostId;
use crate::worlds::Violation;
use elastic_rs::agent::machine::MESSAGE_LIMIT;
use elastic_rs::rendezvous::messages::message::{Failure, Round};

/// Time after which a driver takes collecting words to hang.
const SEEN_TO_HANG_AFTER: Duration = Duration::from_millis(500);
/// Longest hang, unless it is for ever.
const HANGS_UP_TO: Duration = Duration::from_secs(2);

fn message_of(host: HostId) -> String {
    format!("words of host{host}")
}

impl Simulation {
    /// Our agent asks for the words of a worker.
    pub(super) fn listen(&mut self, host: HostId, local_rank: u32) -> Result<(), Violation> {
        let now = self.now();
        let Agents { message_delay, hanging_files, restarts_left, .. } = self.options.agents;
        let Some((process, ours)) = self.ours(host) else { return Ok(()) };
        let (pid, round) = (process.pid, ours.machine.round());
        if let Some(before) = ours.listening.as_ref().filter(|before| before.round == round) {
            return Err(Violation::contract(format!("host{host} has a first failure after {before:?}")));
        }
        // A node that counts for itself reports only when it gives up. One that has not joined has nobody to notify.
        let moot = restarts_left.is_some() || round == Round(0);
        ours.listening =
            Some(Listening { round, local_rank, since: now, found: None, in_time: false, reported: false, moot });
        if hanging_files > 0 && self.engine.dice.chance(hanging_files) {
            self.engine.push(now + SEEN_TO_HANG_AFTER, Event::FailureMessage(host, pid, round, Found::Hang));
            if self.engine.dice.chance(50) {
                let after = SEEN_TO_HANG_AFTER + self.engine.dice.duration((Duration::ZERO, HANGS_UP_TO));
                self.engine.push(now + after, Event::FailureMessage(host, pid, round, Found::All));
            }
        } else {
            let after = self.engine.dice.duration(message_delay);
            if after > SEEN_TO_HANG_AFTER {
                self.engine.push(now + SEEN_TO_HANG_AFTER, Event::FailureMessage(host, pid, round, Found::Hang));
            }
            if after.is_zero() {
                self.hand_over_message(host, Found::All);
            } else {
                self.engine.push(now + after, Event::FailureMessage(host, pid, round, Found::All));
            }
        }
        Ok(())
    }

    pub(in crate::coordinator) fn on_failure_message(
        &mut self,
        host: HostId,
        pid: u64,
        round: Round,
        found: Found,
    ) -> Result<(), Violation> {
        let Some((process, ours)) = self.ours(host) else { return Ok(()) };
        let wanted = ours.listening.as_ref().is_some_and(|listening| listening.round == round);
        if process.pid == pid && wanted && ours.machine.round() == round {
            self.hand_over_message(host, found);
            self.after_node(host)?;
            self.check_reported(host, Duration::ZERO)?;
        }
        Ok(())
    }

    fn hand_over_message(&mut self, host: HostId, found: Found) {
        let now = self.now();
        let Some((_, ours)) = self.ours(host) else { return };
        let Some(listening) = &mut ours.listening else { return };
        listening.found = Some(found);
        listening.in_time = now < listening.since + MESSAGE_LIMIT;
        let message_delay = if found == Found::All { message_of(host) } else { String::new() };
        ours.machine.on_failure_message(listening.local_rank, message_delay, found == Found::All);
    }

    /// Checks that a round's first failure is reported once, at once, and with the known words.
    pub(super) fn check_report(&mut self, host: HostId, failure: &Failure) -> Result<(), Violation> {
        let now = self.now();
        let stalled_until = self.stalled_until(host);
        let Some((_, ours)) = self.ours(host) else { return Ok(()) };
        // A worker that could not be started has no words.
        let Some(listening) = &mut ours.listening else { return Ok(()) };
        let all = listening.found == Some(Found::All);
        let known = if all { message_of(host) } else { String::new() };
        let limit = if listening.found == Some(Found::Hang) { SEEN_TO_HANG_AFTER } else { MESSAGE_LIMIT };
        let is_late = now > listening.since + limit && stalled_until <= listening.since;
        // If both come at the same time, either may be first.
        let has_message = failure.message == known || !listening.in_time && failure.message.is_empty();
        let is_other = failure.local_rank != listening.local_rank || !has_message;
        if listening.reported || is_late || is_other {
            return Err(Violation::contract(format!("host{host} reports {failure:?}, while {listening:?}")));
        }
        listening.reported = true;
        Ok(())
    }

    /// Checks that a failure was reported if its words are known, or if it is `older` than this.
    pub(super) fn check_reported(&mut self, host: HostId, older: Duration) -> Result<(), Violation> {
        let now = self.now();
        let stalled_until = self.stalled_until(host);
        let Some((process, ours)) = self.ours(host) else { return Ok(()) };
        let Some(listening) = &ours.listening else { return Ok(()) };
        let due = now > listening.since + older && stalled_until <= listening.since;
        // A node that was lost when the others finished has nobody to notify either.
        let moot = listening.moot || process.machine.view().closed.is_some();
        if due && !listening.reported && !moot {
            return Err(Violation::contract(format!("host{host} has not notified the others: {listening:?}")));
        }
        Ok(())
    }

    /// Checks that an agent that ends because of its own worker reports the worker's words, if they were found before the end.
    pub(super) fn check_last_message(&mut self, host: HostId, cause: Option<&Failure>) -> Result<(), Violation> {
        let Some((_, ours)) = self.ours(host) else { return Ok(()) };
        let (Some(listening), Some(cause)) = (&ours.listening, cause) else { return Ok(()) };
        let own = cause.pid == pid_of_workers(host) && cause.local_rank == listening.local_rank;
        if own && listening.in_time && listening.found == Some(Found::All) && cause.message != message_of(host) {
            return Err(Violation::contract(format!("host{host} ends with {cause:?}, though {listening:?}")));
        }
        Ok(())
    }
}
