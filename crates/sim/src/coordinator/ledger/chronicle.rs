//! Checks what is recorded: numbers without gaps, and causes that explain.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::worlds::{Violation, ensure_contract};
use elastic_rs::events::record::{Kind, Number, Record, Why};

/// The events of a run in one life of the coordinator.
#[derive(Clone, Default)]
pub struct Chronicle {
    incarnation: u32,
    last: u64,
    /// Those that may be causes.
    kinds: BTreeMap<Number, Kind>,
}

/// The explorer must not distinguish states by it.
impl fmt::Debug for Chronicle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Chronicle")
    }
}

impl Chronicle {
    /// The run is forgotten. If it is opened again, its numbers begin again.
    pub fn forget(&mut self) {
        *self = Self { incarnation: self.incarnation, ..Self::default() };
    }

    /// Check the next event.
    ///
    /// # Errors
    /// A number is missing, or its causes do not explain it.
    pub fn check(&mut self, record: &Record, incarnation: u32) -> Result<(), Violation> {
        if self.incarnation != incarnation {
            *self = Self { incarnation, ..Self::default() };
        }
        let Record { number, causes, kind, .. } = record;
        ensure_contract(number.0 == self.last + 1, || format!("event {number:?} follows event {}", self.last))?;
        self.last = number.0;
        let earlier = |cause: &Number| cause < number && self.kinds.contains_key(cause);
        ensure_contract(causes.iter().all(earlier), || format!("{record:?} has a cause that was not recorded before"))?;
        let distinct: BTreeSet<_> = causes.iter().collect();
        ensure_contract(distinct.len() == causes.len(), || format!("{record:?} has a cause twice"))?;
        let cause = causes.first().and_then(|cause| self.kinds.get(cause));
        let explains = match kind {
            Kind::RoundBroken { why } => cause.is_some_and(|cause| explains(cause, *why)),
            Kind::RoundChanges {} => {
                cause.is_none_or(|cause| matches!(cause, Kind::NodeLeaves {} | Kind::NodeJoined { .. }))
            }
            Kind::RoundCompleted { .. } => {
                matches!(cause, Some(Kind::NodeJoined { .. } | Kind::RoundBroken { .. } | Kind::RoundChanges {}))
            }
            Kind::WorkerExited(exit) if exit.first => cause.is_none(),
            Kind::WorkerExited(_) => matches!(cause, Some(Kind::RoundBroken { .. } | Kind::RoundChanges {})),
            _ => true,
        };
        ensure_contract(explains, || format!("{record:?} is not explained by {cause:?}"))?;
        self.kinds.insert(*number, kind.clone());
        Ok(())
    }
}

/// Whether an event can be the cause that a world must re-form for this reason.
pub fn explains(cause: &Kind, why: Why) -> bool {
    match why {
        Why::WorkerFailed => matches!(cause, Kind::WorkerExited(exit) if exit.first),
        Why::NodeLost => matches!(cause, Kind::NodeLost { .. }),
        Why::NodeLeft => matches!(cause, Kind::NodeLeft { .. } | Kind::NodeLeaves {}),
        Why::NodeWithdrew => matches!(cause, Kind::NodeWithdrew {}),
        Why::NodeReplaced => matches!(cause, Kind::NodeReplaced { .. }),
        Why::NodesWait => matches!(cause, Kind::NodeJoined { .. }),
        Why::ChangeFailed => matches!(cause, Kind::RoundChanges {} | Kind::RoundBroken { .. }),
        Why::NodeCameBack => matches!(cause, Kind::NodeCameBack {}),
        Why::CoordinatorRestarted => matches!(cause, Kind::MembersMissing {}),
        Why::HangFound => matches!(cause, Kind::HangFound(_)),
    }
}
