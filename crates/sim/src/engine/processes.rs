//! Processes that stand still (SIGSTOP), the events that wait for them, and the last fault of each.

use std::collections::BTreeMap;

use super::paths::HostId;
use super::queue::Time;

/// The process of a host; or (`None`) the process that all hosts talk to.
pub type Owner = Option<HostId>;

/// The condition of all processes.
#[derive(Clone, Debug)]
pub struct Processes<E> {
    conditions: BTreeMap<Owner, Condition<E>>,
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

    fn condition(&mut self, owner: Owner) -> &mut Condition<E> {
        let sound = || Condition { stalled_until: Time::ZERO, last_fault: Time::ZERO, deferred: Vec::new() };
        self.conditions.entry(owner).or_insert_with(sound)
    }

    /// The process stands still until then, or longer if it does already.
    pub fn stall(&mut self, owner: Owner, until: Time) {
        let condition = self.condition(owner);
        condition.stalled_until = condition.stalled_until.max(until);
    }

    /// Until when the process stands still, or stood still last.
    pub fn stalled_until(&self, owner: Owner) -> Time {
        self.conditions.get(&owner).map_or(Time::ZERO, |condition| condition.stalled_until)
    }

    /// The process has ended. Its events are lost, and its successor does not stand still.
    pub fn end(&mut self, owner: Owner, now: Time) {
        self.wake(owner, now);
        self.condition(owner).deferred.clear();
    }

    /// End the stall of a process. Its deferred events stay deferred until [`missed`](Self::missed).
    pub fn wake(&mut self, owner: Owner, now: Time) {
        self.condition(owner).stalled_until = now;
    }

    /// A fault affects the process until then.
    pub fn note_fault(&mut self, owner: Owner, until: Time) {
        let condition = self.condition(owner);
        condition.last_fault = condition.last_fault.max(until);
    }

    /// Until when the last fault affected the process. Zero: there was none.
    pub fn last_fault(&self, owner: Owner) -> Time {
        self.conditions.get(&owner).map_or(Time::ZERO, |condition| condition.last_fault)
    }

    /// Defers an event if its process stands still. Else returns it.
    pub(super) fn defer(&mut self, owner: Owner, event: E, now: Time) -> Option<E> {
        if self.stalled_until(owner) <= now {
            return Some(event);
        }
        self.condition(owner).deferred.push(event);
        None
    }

    /// Takes the deferred events of a process that continues. `None` if it still stands still, having been stopped again.
    pub fn missed(&mut self, owner: Owner, now: Time) -> Option<Vec<E>> {
        let condition = self.condition(owner);
        (condition.stalled_until <= now).then(|| std::mem::take(&mut condition.deferred))
    }

    /// All deferred events.
    pub fn deferred(&self) -> impl Iterator<Item = (Owner, &[E])> {
        let all = self.conditions.iter().map(|(owner, condition)| (*owner, &*condition.deferred));
        all.filter(|(_, events)| !events.is_empty())
    }
}
