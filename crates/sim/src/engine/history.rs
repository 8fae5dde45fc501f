//! Drawn histories, which have three parts.
//!
//! *Trouble*: hosts start, and faults happen. *Calm*: no fault happens any more, and after [`History::SETTLE_WITHIN`] the job must have
//! settled. *End*: the job is closed, and after [`History::GONE_WITHIN`] all agents must be gone.

use std::time::Duration;

use super::super::worlds::Violation;
use super::paths::HostId;
use super::queue::Time;
use super::{Engine, Model};

/// A history that broke an invariant.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Its seed.
    pub seed: u64,
    /// The virtual time.
    pub at: Time,
    /// The invariant that broke.
    pub violation: Violation,
    /// The last events, if they were kept.
    pub history: Vec<String>,
}

impl Failure {
    pub(crate) fn new<E>(seed: u64, engine: &Engine<E>, violation: Violation) -> Box<Self> {
        Box::new(Self { seed, at: engine.now(), violation, history: engine.record.lines().to_vec() })
    }
}

/// A model with the three parts of a history.
pub trait History: Model<Broken = Violation> + Sized {
    /// Time after the last fault within which the job settles: the sum of the events that may have to follow one another.
    const SETTLE_WITHIN: Duration;
    /// Time after the close within which all agents are gone.
    const GONE_WITHIN: Duration;

    /// Faults end.
    fn calm(&mut self);

    /// Checks that the job has settled.
    ///
    /// # Errors
    /// A node that does not do what it should.
    fn check_settled(&mut self) -> Result<(), Violation>;

    /// Closes the job. Returns the hosts that do so, if any host is left.
    fn close(&mut self) -> Vec<HostId>;

    /// Checks the job after its end.
    ///
    /// # Errors
    /// An agent that is still there, say.
    fn check_ended(&mut self, closed_by: &[HostId]) -> Result<(), Violation>;

    /// Lives through a history whose faults have been added. The calm begins at `calm_at`. Returns the final state of the job.
    ///
    /// # Errors
    /// The first invariant that breaks, with the last events if they are kept.
    fn live(mut self, seed: u64, calm_at: Time) -> Result<Self, Box<Failure>> {
        match self.live_through(calm_at) {
            Ok(()) => Ok(self),
            Err(violation) => Err(Failure::new(seed, self.engine(), violation)),
        }
    }

    /// [`live`](Self::live) for a job that is kept.
    ///
    /// # Errors
    /// The first invariant that breaks.
    fn live_through(&mut self, calm_at: Time) -> Result<(), Violation> {
        self.pass(calm_at)?;
        self.calm();
        self.pass(calm_at + Self::SETTLE_WITHIN)?;
        self.check_settled()?;
        let closed_by = self.close();
        let now = self.engine().now();
        self.pass(now + Self::GONE_WITHIN)?;
        self.check_ended(&closed_by)
    }
}
