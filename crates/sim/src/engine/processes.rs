//! Processes that stand still (SIGSTOP), the events that wait for them, and the last fault of each.

use std::collections::BTreeMap;

use super::paths::HostId;
use super::queue::Time;

/// The process of a host; or (`None`) the process that all hosts talk to.
pub type Whose = Option<HostId>;

/// The condition of all processes.
#[derive(Clone, Debug)]
pub struct Processes<E> {
    conditions: BTreeMap<Whose, Condition<E>>,
}

#[derive(Clone, Debug)]
struct Condition<E> {
    stalled_until: Time,
    last_fault: Time,
    /// In the order in which they arrived.
    deferred: Vec<E>,
}

impl<E> Processes<E> {
    pub(super) fn new() -> Self {
        Self { conditions: BTreeMap::new() }
    }

    fn condition(&mut self, whose: Whose) -> &mut Condition<E> {
        let sound = || Condition { stalled_until: Time::ZERO, last_fault: Time::ZERO, deferred: Vec::new() };
        self.conditions.entry(whose).or_insert_with(sound)
    }

    /// The process stands still until then, or longer if it does already.
    pub fn stall(&mut self, whose: Whose, until: Time) {
        let condition = self.condition(whose);
        condition.stalled_until = condition.stalled_until.max(until);
    }

    /// Until when the process stands still, or stood still last.
    pub fn stalled_until(&self, whose: Whose) -> Time {
        self.conditions.get(&whose).map_or(Time::ZERO, |condition| condition.stalled_until)
    }

    /// The process has ended. Its events are lost, and its successor does not stand still.
    pub fn end(&mut self, whose: Whose, now: Time) {
        self.wake(whose, now);
        self.condition(whose).deferred.clear();
    }

    /// End the stall of a process. Its deferred events stay deferred until [`missed`](Self::missed).
    pub fn wake(&mut self, whose: Whose, now: Time) {
        self.condition(whose).stalled_until = now;
    }

    /// A fault affects the process until then.
    pub fn note_fault(&mut self, whose: Whose, until: Time) {
        let condition = self.condition(whose);
        condition.last_fault = condition.last_fault.max(until);
    }

    /// Until when the last fault affected the process. Zero: there was none.
    pub fn last_fault(&self, whose: Whose) -> Time {
        self.conditions.get(&whose).map_or(Time::ZERO, |condition| condition.last_fault)
    }

    /// Defers an event if its process stands still. Else returns it.
    pub(super) fn defer(&mut self, whose: Whose, event: E, now: Time) -> Option<E> {
        if self.stalled_until(whose) <= now {
            return Some(event);
        }
        self.condition(whose).deferred.push(event);
        None
    }

    /// Takes the deferred events of a process that continues. `None` if it still stands still, having been stopped again.
    pub fn missed(&mut self, whose: Whose, now: Time) -> Option<Vec<E>> {
        let condition = self.condition(whose);
        (condition.stalled_until <= now).then(|| std::mem::take(&mut condition.deferred))
    }

    /// All deferred events.
    pub fn deferred(&self) -> impl Iterator<Item = (Whose, &[E])> {
        let all = self.conditions.iter().map(|(whose, condition)| (*whose, &*condition.deferred));
        all.filter(|(_, events)| !events.is_empty())
    }
}
