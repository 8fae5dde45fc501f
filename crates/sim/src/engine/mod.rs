//! One engine for all models of jobs: virtual time, events in order, seeded randomness, processes that stand still, paths that are
//! cut, and the record of a history.
//!
//! A model implements [`Model`]: it says which process an event happens to, and what the event does. The engine decides when events
//! happen, defers those of processes that stand still, and records the others. It reads no clock and no socket, and all its
//! randomness comes from one seeded generator. So a seed determines a whole history, which can be replayed.
//!
//! | file | what |
//! |---|---|
//! | [`queue`] | virtual time, and events in order |
//! | [`dice`] | the seeded generator |
//! | [`paths`] | hosts, transit times, and paths that are cut |
//! | [`processes`] | processes that stand still, and the faults of each |
//! | [`record`] | the digest and the lines of a history |
//! | [`alarm`] | the one pending event of a machine's deadline |
//! | [`history`] | the three parts of a drawn history, and the report of one that fails |

pub mod alarm;
pub mod dice;
pub mod history;
pub mod paths;
pub mod processes;
pub mod queue;
pub mod record;

use std::fmt;
use std::time::{Duration, Instant};

use dice::Dice;
use paths::Paths;
use processes::{Owner, Processes};
use queue::{Queue, Time};
use record::Record;

/// The engine of one job. `E` is what happens in its model.
#[derive(Clone, Debug)]
pub struct Engine<E> {
    /// Virtual time zero as an instant of the machines. Only differences to it are used.
    pub(super) origin: Instant,
    pub(super) queue: Queue<E>,
    pub(super) dice: Dice,
    pub(super) paths: Paths,
    pub(super) processes: Processes<E>,
    pub(super) record: Record,
}

impl<E> Engine<E> {
    /// An engine at time zero. `delay`: shortest and longest transit time of a message.
    pub fn new(dice: Dice, delay: (Duration, Duration)) -> Self {
        Self {
            origin: Instant::now(),
            queue: Queue::new(),
            dice,
            paths: Paths::new(delay),
            processes: Processes::new(),
            record: Record::default(),
        }
    }

    /// Virtual time.
    pub fn now(&self) -> Time {
        self.queue.now()
    }

    /// Virtual time as an instant of the machines.
    pub fn instant(&self) -> Instant {
        self.origin + self.now()
    }

    /// When a machine's deadline is due: now, if it has passed.
    pub fn due(&self, deadline: Instant) -> Time {
        deadline.saturating_duration_since(self.origin).max(self.now())
    }

    /// Adds an event. An event in the past happens now.
    pub fn push(&mut self, at: Time, event: E) {
        self.queue.push(at, event);
    }

    /// Adds an event that happens `after` this time from now.
    pub fn push_after(&mut self, after: Duration, event: E) {
        self.push(self.now() + after, event);
    }

    /// Draws the transit time of a message.
    pub fn transit(&mut self) -> Duration {
        self.paths.transit(&mut self.dice)
    }

    /// Adds a line to the history, if it is kept.
    pub fn remark(&mut self, text: impl FnOnce() -> String) {
        self.record.remark(self.queue.now(), text);
    }
}

/// Where an event happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Happens {
    /// In no process: always.
    Outside,
    /// In a process, once that does not stand still.
    In(Owner),
    /// Nowhere any more.
    Nowhere,
}

/// A job under virtual time.
pub trait Model {
    /// What happens in it.
    type Event: fmt::Debug;
    /// Why its history cannot go on.
    type Broken;

    /// Its engine.
    fn engine(&mut self) -> &mut Engine<Self::Event>;

    /// Where an event happens.
    fn happens(&self, event: &Self::Event) -> Happens;

    /// Performs an event.
    ///
    /// # Errors
    /// The first invariant that does not hold.
    fn handle(&mut self, event: Self::Event) -> Result<(), Self::Broken>;

    /// A process goes on: what it has missed happens now.
    ///
    /// # Errors
    /// As [`handle`](Self::handle).
    fn resume(&mut self, owner: Owner) -> Result<(), Self::Broken> {
        let engine = self.engine();
        let now = engine.now();
        let missed = engine.processes.missed(owner, now);
        missed.into_iter().flatten().try_for_each(|event| self.happen(event))
    }

    /// Lets all events up to and including `until` happen.
    ///
    /// # Errors
    /// As [`handle`](Self::handle).
    fn pass(&mut self, until: Time) -> Result<(), Self::Broken> {
        while let Some(event) = self.engine().queue.pop(until) {
            self.happen(event)?;
        }
        Ok(())
    }

    /// Records and performs an event. If its process stands still, defers it.
    ///
    /// # Errors
    /// As [`handle`](Self::handle).
    fn happen(&mut self, event: Self::Event) -> Result<(), Self::Broken> {
        let happens = self.happens(&event);
        let engine = self.engine();
        let now = engine.now();
        let event = match happens {
            Happens::Outside => event,
            Happens::In(owner) => match engine.processes.defer(owner, event, now) {
                Some(event) => event,
                None => return Ok(()),
            },
            Happens::Nowhere => return Ok(()),
        };
        engine.record.event(now, &event);
        self.handle(event)
    }
}
