//! A coordinator at one of the endpoints of a list: it decides while it leads, and says nothing that its successor could forget.
//!
//! Pure. Each decision that a successor must know changes the run's snapshot. That is recorded by the voters, and what the coordinator has to
//! say from then on is held until the snapshot is chosen. Nodes repeat what they have asked on a new connection, so what is held when the
//! process ends is lost to nobody.

use std::collections::VecDeque;
use std::mem;
use std::time::Instant;

use super::ensemble::{Command as Do, Ensemble, Link, PeerMessage};
use super::machine::{Command, Machine};
use crate::rendezvous::messages::ids::NodeId;
use crate::rendezvous::messages::message::CoordinatorMessage;
use crate::rendezvous::messages::peer::PeerHello;
use crate::rendezvous::run::snapshot::Snapshot;
use crate::wire::text::tidy;

/// A coordinator's part in its ensemble.
#[derive(Clone, Debug)]
pub struct Succession {
    ensemble: Ensemble,
    /// The snapshot that was recorded last.
    recorded: Option<Snapshot>,
    /// The version of the last content that is chosen.
    chosen: u64,
    /// What is to be done once the content of a version is chosen, the first first.
    held: VecDeque<(u64, Command)>,
    /// [`Ensemble::led`] may have changed.
    led_changed: bool,
}

/// What the driver must do now.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Todo {
    /// As coordinator.
    pub commands: Vec<Command>,
    /// What to send, and to the process at which endpoint.
    pub peers: Vec<(usize, PeerMessage)>,
    /// Whether this process has begun to lead, or has ceased to.
    pub changed: bool,
}

impl Succession {
    /// The part of the process that introduces itself so.
    pub fn new(hello: PeerHello, now: Instant) -> Self {
        let ensemble = Ensemble::new(hello, now);
        Self { ensemble, recorded: None, chosen: 0, held: VecDeque::new(), led_changed: false }
    }

    /// How this process introduces itself.
    pub fn hello(&self) -> &PeerHello {
        self.ensemble.hello()
    }

    /// Whether this process leads.
    pub fn leads(&self) -> bool {
        self.ensemble.leads()
    }

    /// Why somebody who asks for this run, or for the only one, is sent away, if that is so.
    pub fn turns_away(&self, run_id: Option<&str>, now: Instant) -> Option<CoordinatorMessage> {
        let ours = &self.hello().run_id;
        if let Some(other) = run_id.filter(|run_id| run_id != ours) {
            let reason = format!(
                "the endpoints {} serve run `{ours}` alone, not `{}`: give each job its own list",
                self.hello().endpoints.join(","),
                tidy(other)
            );
            return Some(CoordinatorMessage::Rejected { reason });
        }
        (!self.leads()).then(|| self.redirect(now))
    }

    /// Whether a process with this introduction belongs to the same list. The error is why not.
    ///
    /// # Errors
    /// The introduction is invalid, or another run's or list's.
    pub fn admits(&self, hello: &PeerHello) -> Result<NodeId, String> {
        hello.validate()?;
        self.hello().disagreement(hello).map_or(Ok(self.hello().process), Err)
    }

    /// Something has happened to the connection to an endpoint.
    pub fn on_link(&mut self, place: usize, link: Link, now: Instant) {
        self.led_changed = true;
        self.ensemble.on_link(place, link, now);
    }

    /// A message of the process at an endpoint has arrived.
    ///
    /// # Errors
    /// It is none that a process of this version sends. Says why.
    pub fn on_message(&mut self, place: usize, from: NodeId, message: PeerMessage, now: Instant) -> Result<(), String> {
        self.led_changed = true;
        self.ensemble.on_message(place, from, message, now)
    }

    /// Time has passed.
    pub fn on_tick(&mut self, now: Instant) {
        if now >= self.ensemble.next_deadline() {
            self.led_changed = true;
            self.ensemble.on_tick(now);
        }
    }

    /// When to call [`Succession::on_tick`] at the latest.
    pub fn next_deadline(&self) -> Instant {
        self.ensemble.next_deadline()
    }

    /// Take what to do now, and let the coordinator do what follows for it.
    pub fn take(&mut self, machine: &mut Machine, now: Instant) -> Todo {
        let mut todo = Todo::default();
        loop {
            let commands = machine.take_commands();
            if self.leads() {
                self.record(machine, now);
                for command in commands {
                    match self.may_pass(&command) {
                        true => todo.commands.push(command),
                        false => self.held.push_back((self.ensemble.version(), command)),
                    }
                }
            } else {
                todo.commands.extend(commands);
            }
            let decided = self.ensemble.take_commands();
            let goes_on = !decided.is_empty();
            decided.into_iter().for_each(|decision| self.perform(decision, machine, &mut todo, now));
            if mem::take(&mut self.led_changed) || goes_on {
                machine.set_led(self.leads().then(|| self.ensemble.led()));
            }
            if !self.release(&mut todo, now) && !goes_on {
                return todo;
            }
        }
    }

    /// Whether this may overtake what is held: a heartbeat's answer, for a node that is welcomed. It says that the leader lives, whatever
    /// is recorded. Otherwise nodes would stop their workers because a voter is silent.
    fn may_pass(&self, command: &Command) -> bool {
        let Command::Send { session, message: CoordinatorMessage::Heartbeat { .. } } = command else { return false };
        let welcomes = |held: &Command| matches!(held, Command::Send { session: to, message: CoordinatorMessage::Welcome { .. } } if to == session);
        !self.held.iter().any(|(_, held)| welcomes(held))
    }

    fn redirect(&self, now: Instant) -> CoordinatorMessage {
        let place = self.ensemble.leader().filter(|place| *place != self.hello().place as usize);
        let endpoint = place.and_then(|place| self.hello().endpoints.get(place)).cloned();
        let why = if endpoint.is_none() { self.ensemble.why_nobody(now) } else { String::new() };
        CoordinatorMessage::Redirect { endpoint, why }
    }

    /// Have what the coordinator has decided recorded, if a successor must know it. Not that nodes are gone which it has sent away itself,
    /// because its process ends: their workers may run.
    fn record(&mut self, machine: &Machine, now: Instant) {
        let ends = machine.is_leaving();
        let Some(run) = machine.run(&self.hello().run_id).filter(|run| !ends || run.closed().is_some()) else { return };
        if self.recorded.as_ref().is_some_and(|recorded| run.has_snapshot(recorded)) {
            return;
        }
        let snapshot = run.snapshot();
        if self.recorded.as_ref() != Some(&snapshot) {
            self.ensemble.record(snapshot.clone(), now);
            self.led_changed = true;
        }
        self.recorded = Some(snapshot);
    }

    fn perform(&mut self, decision: Do, machine: &mut Machine, todo: &mut Todo, now: Instant) {
        match decision {
            Do::Send { place, message } => todo.peers.push((place, message)),
            Do::Chosen(version) => self.chosen = self.chosen.max(version),
            Do::Lead { snapshot, is_dead } => {
                todo.changed = true;
                self.recorded = None;
                if let Some(snapshot) = snapshot {
                    self.recorded = Some((*snapshot).clone());
                    machine.take_over(&self.ensemble.hello().run_id, *snapshot, is_dead, now);
                }
            }
            Do::Over => {
                todo.changed = true;
                let message = self.redirect(now);
                machine.step_down(&message);
                // Nobody has heard the rest, and the successor may decide otherwise. The registry has let go of sessions that were to end.
                for (_, command) in self.held.drain(..) {
                    if let Command::End { session } = command {
                        todo.commands.push(Command::Send { session, message: message.clone() });
                        todo.commands.push(Command::End { session });
                    }
                }
            }
        }
    }

    /// Release what is held for a content that is chosen. Returns whether that may do more.
    fn release(&mut self, todo: &mut Todo, now: Instant) -> bool {
        let mut hands_over = false;
        while self.held.front().is_some_and(|(version, _)| *version <= self.chosen) {
            match self.held.pop_front() {
                Some((_, Command::HandOver)) => hands_over = true,
                Some((_, command)) => todo.commands.push(command),
                None => {}
            }
        }
        if hands_over {
            self.led_changed = true;
            self.ensemble.abdicate(now);
        }
        hands_over
    }
}
