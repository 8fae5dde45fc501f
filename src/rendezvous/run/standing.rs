//! The current decision about a run's next round. [`super::progress`] puts it into words.

use serde::Serialize;

/// A decision about the next round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Standing {
    /// The run has no nodes.
    #[default]
    Vacant,
    /// Fewer than `min_nodes` nodes wait, or fewer than `min_workers` workers.
    Gathering,
    /// The world runs and has no reason to re-form.
    Undisturbed,
    /// The world must re-form, and its members run on until they stop their workers together.
    Changing,
    /// The world must re-form, and members still run.
    Reforming,
    /// A restarted coordinator waits for members of a world it did not form to report.
    Recovering,
    /// Enough nodes wait, but the connection of one of them is broken.
    Reconnecting,
    /// Enough nodes wait. More may join until the last call ends.
    LastCall,
    /// Enough nodes wait, no more than the last world had. A replacement may join until `settle_timeout`.
    Settling,
    /// Enough nodes wait, and the health check of one of them runs.
    Checking,
    /// Enough nodes wait. The next start comes later, after several bad ones.
    Pausing,
    /// Members of a world that this coordinator does not know may still run. It waits until they must have stopped.
    Fencing,
    /// The world runs on although nodes wait to join it. No round could close yet, as when it is [`Standing::Fencing`].
    Holding,
    /// The rendezvous is closed.
    Closed,
}

impl Standing {
    /// The reason for which a round with enough nodes does not close yet.
    pub(in crate::rendezvous) fn holds_up(self) -> Option<&'static str> {
        match self {
            Self::Recovering => {
                Some("this coordinator was restarted, and waits for members of the last round to report")
            }
            Self::Reconnecting => Some("a waiting node's connection has ended, and it may reconnect (reconnect_grace)"),
            Self::Checking => Some("the health check of a node runs (--health-check)"),
            Self::LastCall => Some("more nodes may join until the last call ends (last_call_timeout)"),
            Self::Pausing => {
                Some("the workers ended soon after their last starts, so the next one waits (restart_window)")
            }
            Self::Settling => Some("a replacement for a missing member may join (settle_timeout)"),
            Self::Fencing | Self::Holding => {
                Some("members of a world formed before this coordinator restarted may still run until their lease ends")
            }
            _ => None,
        }
    }

    /// What a run with this decision does, for observers.
    pub(super) fn activity(self) -> Activity {
        match self {
            Standing::Vacant => Activity::Empty,
            Standing::Closed => Activity::Closed,
            Standing::Undisturbed | Standing::Holding => Activity::Running,
            Standing::Changing | Standing::Reforming => Activity::Reforming,
            Standing::Gathering
            | Standing::Recovering
            | Standing::Reconnecting
            | Standing::Checking
            | Standing::LastCall
            | Standing::Settling
            | Standing::Pausing
            | Standing::Fencing => Activity::Waiting,
        }
    }
}

/// What a run does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// It has no nodes.
    Empty,
    /// A round waits for nodes, or for a time to pass.
    Waiting,
    /// A world runs, and has no reason to re-form.
    Running,
    /// A world must re-form, and some of its workers still run.
    Reforming,
    /// The rendezvous is closed.
    Closed,
}

impl Activity {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Empty, Self::Waiting, Self::Running, Self::Reforming, Self::Closed];

    /// Its name in answers and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::Waiting => "waiting",
            Self::Running => "running",
            Self::Reforming => "reforming",
            Self::Closed => "closed",
        }
    }
}

impl Serialize for Activity {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}
