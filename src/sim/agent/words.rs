//! What failed workers said, found out at once, late or never, and what the other nodes are told. Part of [`super`].

use std::time::Duration;

use super::super::network::HostId;
use super::super::queue::Time;
use super::super::simulation::{Event, Simulation};
use super::super::worlds::Violation;
use super::Agents;
use crate::agent::machine::WORDS_LIMIT;
use crate::rendezvous::protocol::message::{Failure, Round};

/// How soon a driver knows that finding out hangs.
const SEEN_TO_HANG_AFTER: Duration = Duration::from_millis(3);
/// How long it then hangs, unless for ever.
const HANGS_UP_TO: Duration = Duration::from_secs(2);

/// What a driver finds out of what a worker said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// That it hangs.
    Hang,
    /// All.
    All,
}

/// A round's first failure, as the machine's driver and the other nodes see it.
#[derive(Clone, Debug)]
pub(super) struct Listening {
    round: Round,
    local_rank: u32,
    since: Time,
    /// What the machine has been told.
    found: Option<Found>,
    /// That was while it waits for it.
    in_time: bool,
    /// The others have been told.
    pub reported: bool,
    /// The others need not be told: something else ends the round, or they are not concerned.
    pub moot: bool,
}

fn words_of(host: HostId) -> String {
    format!("words of host{host}")
}

impl Simulation {
    /// Our agent wants to know what a worker said.
    pub(super) fn listen(&mut self, host: HostId, local_rank: u32) -> Result<(), Violation> {
        let now = self.now();
        let Agents { words, hanging_files, restarts_left, .. } = self.options.agents;
        let Some((process, ours)) = self.ours(host) else { return Ok(()) };
        let (pid, round) = (process.pid, ours.machine.round());
        if let Some(before) = ours.listening.as_ref().filter(|before| before.round == round) {
            return Err(Violation::contract(format!("host{host} has a first failure after {before:?}")));
        }
        // A node that counts for itself tells the others only when it gives up.
        let moot = restarts_left.is_some();
        ours.listening =
            Some(Listening { round, local_rank, since: now, found: None, in_time: false, reported: false, moot });
        if hanging_files > 0 && self.dice.chance(hanging_files) {
            self.queue.push(now + SEEN_TO_HANG_AFTER, Event::Words(host, pid, round, Found::Hang));
            if self.dice.chance(50) {
                let after = SEEN_TO_HANG_AFTER + self.dice.duration((Duration::ZERO, HANGS_UP_TO));
                self.queue.push(now + after, Event::Words(host, pid, round, Found::All));
            }
        } else {
            let after = self.dice.duration(words);
            if after.is_zero() {
                self.hand_over_words(host, Found::All);
            } else {
                self.queue.push(now + after, Event::Words(host, pid, round, Found::All));
            }
        }
        Ok(())
    }

    pub(in crate::sim) fn on_words(
        &mut self,
        host: HostId,
        pid: u64,
        round: Round,
        found: Found,
    ) -> Result<(), Violation> {
        let Some((process, ours)) = self.ours(host) else { return Ok(()) };
        let wanted = ours.listening.as_ref().is_some_and(|listening| listening.round == round);
        if process.pid == pid && wanted && ours.machine.round() == round {
            self.hand_over_words(host, found);
            self.after_node(host)?;
            self.check_told(host, Duration::ZERO)?;
        }
        Ok(())
    }

    fn hand_over_words(&mut self, host: HostId, found: Found) {
        let now = self.now();
        let Some((_, ours)) = self.ours(host) else { return };
        let Some(listening) = &mut ours.listening else { return };
        listening.found = Some(found);
        listening.in_time = now < listening.since + WORDS_LIMIT;
        let words = if found == Found::All { words_of(host) } else { String::new() };
        ours.machine.on_words(listening.local_rank, words, found == Found::All);
    }

    /// The others are told once a round, of its first failure, at once, and with the words that are known.
    pub(super) fn check_report(&mut self, host: HostId, failure: &Failure) -> Result<(), Violation> {
        let now = self.now();
        let stalled_until = self.hosts[host].stalled_until;
        let Some((_, ours)) = self.ours(host) else { return Ok(()) };
        // Nothing is to be found out of a worker that could not be started.
        let Some(listening) = &mut ours.listening else { return Ok(()) };
        let all = listening.found == Some(Found::All);
        let known = if all { words_of(host) } else { String::new() };
        let limit = if listening.found == Some(Found::Hang) { SEEN_TO_HANG_AFTER } else { WORDS_LIMIT };
        let is_late = now > listening.since + limit && stalled_until <= listening.since;
        // Where both come at once, either may be first.
        let says_it = failure.message == known || !listening.in_time && failure.message.is_empty();
        let is_other = failure.local_rank != listening.local_rank || !says_it;
        if listening.reported || is_late || is_other {
            return Err(Violation::contract(format!("host{host} reports {failure:?}, while {listening:?}")));
        }
        listening.reported = true;
        Ok(())
    }

    /// The others have been told of a failure that was found out of, or is `older` than this.
    pub(super) fn check_told(&mut self, host: HostId, older: Duration) -> Result<(), Violation> {
        let now = self.now();
        let stalled_until = self.hosts[host].stalled_until;
        let Some((_, ours)) = self.ours(host) else { return Ok(()) };
        let Some(listening) = &ours.listening else { return Ok(()) };
        let due = now > listening.since + older && stalled_until <= listening.since;
        if due && !listening.reported && !listening.moot {
            return Err(Violation::contract(format!("host{host} has not told the others: {listening:?}")));
        }
        Ok(())
    }

    /// An agent that ends because of its own worker says what that said, if it was found out before the end.
    pub(super) fn check_last_words(&mut self, host: HostId, cause: Option<&Failure>) -> Result<(), Violation> {
        let Some((_, ours)) = self.ours(host) else { return Ok(()) };
        let (Some(listening), Some(cause)) = (&ours.listening, cause) else { return Ok(()) };
        let own = cause.pid == super::pid_of_workers(host) && cause.local_rank == listening.local_rank;
        if own && listening.in_time && listening.found == Some(Found::All) && cause.message != words_of(host) {
            return Err(Violation::contract(format!("host{host} ends with {cause:?}, though {listening:?}")));
        }
        Ok(())
    }
}
