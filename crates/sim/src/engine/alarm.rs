//! The deadline of a machine, of which one event is pending at most.

use super::queue::Time;

/// When the pending event of a machine's deadline happens. Events that were replaced by earlier ones still happen, and are ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Alarm(Option<Time>);

impl Alarm {
    /// Sets it, unless it rings sooner anyway. Returns the time if an event has to be added.
    pub fn set(&mut self, at: Time) -> Option<Time> {
        if self.0.is_some_and(|set| set <= at) {
            return None;
        }
        self.0 = Some(at);
        self.0
    }

    /// Whether it rings now. If so, it has to be set again.
    pub fn rings(&mut self, now: Time) -> bool {
        self.0.take_if(|at| *at <= now).is_some()
    }

    /// Whether it is set for this time.
    pub fn is_set_for(&self, at: Time) -> bool {
        self.0 == Some(at)
    }
}
