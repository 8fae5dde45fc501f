//! What the registry of runs has its driver do, and who would lead in its place.

use serde::Serialize;

use crate::events::record::Record;
use crate::events::tally::Tally;
use crate::rendezvous::messages::message::CoordinatorMessage;
use crate::rendezvous::run::{Exclusion, SessionId};

/// A command to the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Send a message.
    Send {
        /// The session.
        session: SessionId,
        /// The message.
        message: CoordinatorMessage,
    },
    /// Close the connection once everything sent to it has left.
    End {
        /// The session.
        session: SessionId,
    },
    /// Keep an event, and log its sentence.
    Record {
        /// The run's id.
        run_id: String,
        /// The event.
        record: Record,
    },
    /// Log a warning that is no event.
    Warn {
        /// The run's id.
        run_id: String,
        /// The warning.
        text: String,
    },
    /// Count something that is no event.
    Tally {
        /// The run's id.
        run_id: String,
        /// What is counted.
        tally: Tally,
    },
    /// Forget the events of a run that is forgotten.
    Forget {
        /// The run's id.
        run_id: String,
        /// Why, in words, if there was anything to remember.
        why: Option<String>,
    },
    /// Replace the table of the endpoint's store before the commands that follow are performed.
    EmptyStore,
    /// Another process of the list is to lead: this one ends.
    HandOver,
    /// The hosts that are kept out of a run have changed.
    Exclusions {
        /// The run's id.
        run_id: String,
        /// All of them.
        hosts: Vec<Exclusion>,
    },
}

/// Who leads a job that has a list of endpoints, as its leader sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Led {
    /// The endpoint of the leader.
    pub leader: String,
    /// The endpoints of those of which one would lead if the leader died now. Empty while too few voters are there.
    pub successors: Vec<String>,
    /// The endpoints at which nobody is reached.
    pub missing: Vec<String>,
    /// Whether another one would lead if this one handed over.
    #[serde(skip)]
    pub may_hand_over: bool,
}
