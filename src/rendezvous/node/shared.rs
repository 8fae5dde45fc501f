//! The state that a session shares with its transport.

use std::fmt::Debug;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use super::NodeMachine;
use crate::events::file::EventFile;
use crate::events::line::line_with;
use crate::net::life::LifePort;

/// What ends a node's workers at a deadline, without any help of this process.
pub trait WorkersEnd: Debug + Send + Sync {
    /// Replace the deadline. `None`: withdraw it. Returns whether the one before has passed.
    fn set(&self, until: Option<Instant>) -> bool;

    /// Whether the deadline has passed.
    fn has_passed(&self) -> bool;
}

/// A node's machine with its transport.
pub trait MachineSlot: Debug + Send {
    /// The node's state machine.
    fn machine(&mut self) -> &mut NodeMachine;

    /// Called after each call into the machine.
    fn on_request(&mut self, _now: Instant) {}
}

impl MachineSlot for NodeMachine {
    fn machine(&mut self) -> &mut NodeMachine {
        self
    }
}

/// The state that a session's callers and its driver share.
#[derive(Debug)]
pub(in crate::rendezvous) struct Shared {
    pub slot: Arc<Mutex<dyn MachineSlot>>,
    /// Wakes the driver after a call into the machine.
    pub requested: Notify,
    /// Number of the driver's steps. A caller that waits for an outcome looks again after each.
    pub steps: watch::Sender<u64>,
    /// Whether the `Leave` was sent, or given up.
    pub gone: watch::Sender<bool>,
    /// What ends this node's workers, and its present deadline.
    pub workers_end: Mutex<Option<Ending>>,
    /// Where this node's events are written.
    pub events: Mutex<Option<Recording>>,
    /// By what the coordinator knows that this process lives. It is kept for as long as the session is.
    pub life: Mutex<Option<LifePort>>,
}

/// What ends the workers, and when.
#[derive(Debug)]
pub(in crate::rendezvous) struct Ending {
    pub by: Box<dyn WorkersEnd>,
    pub until: Option<Instant>,
}

/// A file of events, and the run that they are of.
#[derive(Clone, Debug)]
pub(in crate::rendezvous) struct Recording {
    pub run_id: Arc<str>,
    pub file: EventFile,
}

impl Shared {
    /// Where this process listens, on this address of this machine, for as long as it lives.
    pub fn live_at(&self, local: IpAddr) -> Option<SocketAddr> {
        let mut life = self.life.lock();
        if life.as_ref().is_none_or(|life| life.at().ip() != local) {
            *life = LifePort::open(local)
                .inspect_err(|error| {
                    tracing::info!(
                        "the other nodes will hear later of this process's end: no port on {local}: {error}"
                    );
                })
                .ok();
        }
        life.as_ref().map(LifePort::at)
    }

    /// The driver has made a step.
    pub fn on_step(&self) {
        self.keep_workers_end(self.slot.lock().machine());
        self.write_events();
        self.steps.send_modify(|step| *step += 1);
    }

    /// Set the deadline of the workers as the machine has it now. If the one before has passed, the node fences itself.
    pub fn keep_workers_end(&self, machine: &mut NodeMachine) {
        let mut ending = self.workers_end.lock();
        let Some(Ending { by, until }) = &mut *ending else { return };
        let wanted = machine.workers_until();
        if *until == wanted {
            return;
        }
        *until = wanted;
        if by.set(wanted) {
            machine.fence_by_guards(Instant::now());
        }
    }

    /// Fence the node if the deadline of its workers has passed.
    pub fn look_at_workers_end(&self, machine: &mut NodeMachine) {
        if self.workers_end.lock().as_ref().is_some_and(|ending| ending.by.has_passed()) {
            machine.fence_by_guards(Instant::now());
        }
    }

    /// Hand what was recorded to the file, if there is one. Never waits.
    pub fn write_events(&self) {
        let recording = self.events.lock();
        let Some(Recording { run_id, file }) = &*recording else { return };
        let mut slot = self.slot.lock();
        let machine = slot.machine();
        let (events, missed) = machine.take_events();
        if events.is_empty() {
            return;
        }
        let (origin, began) = (machine.journal().origin().to_owned(), machine.journal().began());
        drop(slot);
        let (now, wall) = (Instant::now(), SystemTime::now());
        for (index, entry) in events.iter().enumerate() {
            let at = wall.checked_sub(now.saturating_duration_since(entry.at)).unwrap_or(wall);
            let since = entry.at.saturating_duration_since(began);
            let line = line_with(&entry.record, &entry.causes, run_id, &origin, since, at);
            file.push(run_id, line, if index == 0 { missed } else { 0 });
        }
    }
}
