//! Who holds the others up, and how that is known.

use serde::{Deserialize, Serialize};

use super::ranks::Ranks;
use super::view::{Call, Class, Frame, Gil, Life, Signature};

/// Most ranks of which a finding says where they stand, and most classes and waits of it.
pub const DETAILS_LIMIT: usize = 8;

/// What holds the training up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Kind {
    /// A rank has ended that others wait for.
    Ended,
    /// Nobody has a view of a rank that others wait for.
    Absent,
    /// A rank is stopped by a signal or a debugger.
    Stopped,
    /// All ranks are stopped by a signal or a debugger.
    Suspended,
    /// Ranks have entered different collectives under one number.
    Mismatch,
    /// A rank's GIL is held.
    GilHeld,
    /// A rank has not answered, for another reason than its GIL.
    Silent,
    /// A rank has not entered a collective in which others wait, or does not come for a message or a group.
    NotEntered,
    /// Ranks wait for one another, each in another group.
    Crossed,
    /// All ranks of a group have entered a collective that does not end.
    Inside,
    /// Ranks are outside of torch.distributed while others are inside.
    Outside,
    /// Ranks stand elsewhere than the others: a guess.
    Odd,
    /// All ranks stand at one line.
    Alike,
}

impl Kind {
    /// Its name in events and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ended => "ended",
            Self::Absent => "absent",
            Self::Stopped => "stopped",
            Self::Suspended => "suspended",
            Self::Mismatch => "mismatch",
            Self::GilHeld => "gil_held",
            Self::Silent => "silent",
            Self::NotEntered => "not_entered",
            Self::Crossed => "crossed",
            Self::Inside => "inside",
            Self::Outside => "outside",
            Self::Odd => "odd",
            Self::Alike => "alike",
        }
    }

    /// Whether a rank that is in this state never goes on by itself. It must be seen twice all the same.
    pub fn is_certain(self) -> bool {
        matches!(self, Self::Ended | Self::Stopped | Self::Mismatch | Self::Crossed)
    }

    /// Whether the ranks are a guess from where they stand.
    pub fn is_guess(self) -> bool {
        matches!(self, Self::Outside | Self::Odd | Self::Alike)
    }
}

/// Who holds the others up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// What holds them up.
    pub kind: Kind,
    /// The ranks that do.
    pub ranks: Ranks,
    /// It never goes on by itself.
    pub certain: bool,
    /// The collective in which the others wait.
    pub collective: Option<Collective>,
    /// In a mismatch: which ranks have entered what, the fewest ranks first.
    pub classes: Vec<Entered>,
    /// In a mismatch: no class is the smallest, so all ranks are named.
    pub tie: bool,
    /// The ranks that wait.
    pub waiting: Ranks,
    /// Who waits for whom: the circle of a crossing, or the way from a waiting rank to the one that is named.
    pub chain: Vec<Wait>,
    /// In a crossing: the group that the first of `ranks` has entered before another one, other than in its last turns, and that other
    /// one.
    pub turned: Option<(String, String)>,
    /// Where the first of `ranks` stand.
    pub places: Vec<Place>,
    /// Where the waiting ranks stand, taken from the first of them.
    pub others: Option<Place>,
}

impl Finding {
    /// These ranks, without anything that explains it.
    pub fn new(kind: Kind, ranks: Vec<u32>) -> Self {
        Self {
            kind,
            ranks: ranks.into_iter().collect(),
            certain: kind.is_certain(),
            collective: None,
            classes: Vec::new(),
            tie: false,
            waiting: Ranks::default(),
            chain: Vec::new(),
            turned: None,
            places: Vec::new(),
            others: None,
        }
    }

    /// Whether another look has found the same.
    pub fn names_as(&self, other: &Self) -> bool {
        let number = |finding: &Self| finding.collective.as_ref().map(|it| (it.group.clone(), it.seq));
        self.kind == other.kind && self.ranks == other.ranks && number(self) == number(other)
    }
}

/// A collective, as its group numbers it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Collective {
    /// The group's name.
    pub group: String,
    /// The group's description.
    pub desc: String,
    /// The number. 0: unknown.
    pub seq: u64,
    /// What those that wait have entered.
    pub signature: Signature,
}

/// Ranks that have entered the same under one number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entered {
    /// What they have entered.
    pub signature: Signature,
    /// The ranks.
    pub ranks: Ranks,
}

/// One rank waits for another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wait {
    /// The rank that waits.
    pub rank: u32,
    /// The rank that it waits for.
    pub on: u32,
    /// The group in which it waits, by its description if it has one. Empty: for a message, or in the store.
    pub group: String,
    /// The number of the collective. 0: none.
    pub seq: u64,
}

/// Where a rank stands.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The rank.
    pub rank: u32,
    /// Its process.
    pub pid: u32,
    /// Whether it runs.
    pub life: Life,
    /// What it did between two looks.
    pub class: Option<Class>,
    /// Whether its GIL is held.
    pub gil: Gil,
    /// The call to the kernel in which it stands.
    pub call: Option<Call>,
    /// The process that loads its data and in which the lines are, if it waits for one.
    pub data_worker: Option<u32>,
    /// The data worker is stopped by a signal or a debugger.
    pub data_worker_stopped: bool,
    /// The user's frames, the innermost first; at most [`DETAILS_LIMIT`].
    pub frames: Vec<Frame>,
}
