//! Who holds the others up, and how that is known.

use serde::{Deserialize, Serialize};

use super::ranks::Ranks;
use super::view::{Call, Class, Frame, Gil, Life, NAME_LIMIT_BYTES, SHAPE_LIMIT_BYTES, Signature, at_most};
use crate::wire::text::check;

/// Most ranks of which a finding says where they stand, and most classes and waits of it.
pub const DETAILS_LIMIT: usize = 8;
/// Longest encoded finding. As a rule it has less than 1 KiB.
pub const FINDING_LIMIT_BYTES: usize = 32 * 1024;
/// Most runs of each set of ranks, if a finding is too long.
const RUNS: usize = 64;

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

impl Finding {
    /// Cut what is too long. The finding then has at most [`FINDING_LIMIT_BYTES`].
    pub fn fit(&mut self) {
        // The largest class is the last one.
        let most = self.classes.len().saturating_sub(1);
        self.classes.drain(DETAILS_LIMIT.min(most + 1).saturating_sub(1)..most);
        self.chain.truncate(DETAILS_LIMIT);
        self.places.truncate(DETAILS_LIMIT);
        for frames in [DETAILS_LIMIT, 2] {
            let places = self.places.iter_mut().chain(&mut self.others);
            places.for_each(|place| place.frames.truncate(frames));
            if !self.is_too_long() {
                return;
            }
        }
        let classes = self.classes.iter_mut().map(|class| &mut class.ranks);
        classes.chain([&mut self.ranks, &mut self.waiting]).for_each(|ranks| ranks.truncate(RUNS));
    }

    fn is_too_long(&self) -> bool {
        self.encode().len() > FINDING_LIMIT_BYTES
    }

    /// The bytes of the finding.
    pub fn encode(&self) -> Vec<u8> {
        // Nothing in it can fail to serialise: lengths are known, and there are no maps.
        postcard::to_stdvec(self).unwrap_or_default()
    }

    /// A finding that a coordinator has sent.
    ///
    /// # Errors
    /// A sentence naming what is not allowed, and what is.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() > FINDING_LIMIT_BYTES {
            return Err(format!("the finding has {} bytes, must have at most {FINDING_LIMIT_BYTES}", bytes.len()));
        }
        let Ok((finding, [])) = postcard::take_from_bytes::<Self>(bytes) else {
            return Err(format!("{} bytes are not a finding of this protocol", bytes.len()));
        };
        finding.validate()?;
        Ok(finding)
    }

    /// Check a finding that a coordinator has sent.
    ///
    /// # Errors
    /// A sentence naming what is not allowed, and what is.
    pub fn validate(&self) -> Result<(), String> {
        at_most("classes", self.classes.len(), DETAILS_LIMIT)?;
        at_most("waits", self.chain.len(), DETAILS_LIMIT)?;
        at_most("places", self.places.len(), DETAILS_LIMIT)?;
        let mut sets = self.classes.iter().map(|class| &class.ranks).chain([&self.ranks, &self.waiting]);
        sets.try_for_each(Ranks::validate)?;
        let signatures = self.classes.iter().map(|class| &class.signature);
        for Signature { op, shape } in signatures.chain(self.collective.as_ref().map(|of| &of.signature)) {
            check("operation", op, NAME_LIMIT_BYTES)?;
            check("shape", shape, SHAPE_LIMIT_BYTES)?;
        }
        let names = self.collective.iter().flat_map(|of| [&of.group, &of.desc]);
        let names = names.chain(self.chain.iter().map(|wait| &wait.group));
        for name in names.chain(self.turned.iter().flat_map(|(first, second)| [first, second])) {
            check("group's name", name, NAME_LIMIT_BYTES)?;
        }
        for place in self.places.iter().chain(&self.others) {
            at_most("frames", place.frames.len(), DETAILS_LIMIT)?;
            place.frames.iter().try_for_each(Frame::validate)?;
            place.call.as_ref().map_or(Ok(()), Call::validate)?;
        }
        Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    fn giant() -> Finding {
        let name = |length: usize| "é".repeat(length);
        let scattered = |from: u32| (0..1000).map(|at| from + at * at).collect::<Ranks>();
        let frame = Frame { function: name(64), file: name(127), line: 7, peer: None };
        let place = Place { frames: vec![frame; 20], ..Place::default() };
        let signature = Signature { op: name(32), shape: name(48) };
        let of = |ranks| Entered { signature: signature.clone(), ranks };
        Finding {
            classes: (0..40).map(|at| of(scattered(at))).collect(),
            waiting: scattered(3),
            chain: vec![Wait { rank: 1, on: 2, group: name(32), seq: u64::MAX }; 40],
            places: vec![place.clone(); 40],
            others: Some(place),
            ..Finding::new(Kind::Mismatch, scattered(5).iter().collect())
        }
    }

    #[test]
    fn a_finding_of_any_size_is_cut_to_what_may_be_sent() {
        let mut finding = giant();
        assert!(finding.validate().is_err() && finding.encode().len() > FINDING_LIMIT_BYTES);
        let last = finding.classes.last().cloned();
        finding.fit();
        assert!(finding.encode().len() <= FINDING_LIMIT_BYTES, "{} bytes", finding.encode().len());
        assert_eq!(Finding::decode(&finding.encode()), Ok(finding.clone()));
        assert_eq!(finding.classes.len(), DETAILS_LIMIT);
        let kept = finding.classes.last().and_then(|class| class.ranks.first());
        assert_eq!(kept, last.and_then(|class| class.ranks.first()), "the largest class stays");
    }

    #[test]
    fn what_is_no_finding_is_refused_with_a_reason() {
        let mut finding = Finding::new(Kind::Odd, vec![1]);
        assert_eq!(Finding::decode(&finding.encode()), Ok(finding.clone()));
        finding.turned = Some(("a\x1b[2J".to_owned(), String::new()));
        assert!(Finding::decode(&finding.encode()).unwrap_err().contains("control characters"));
        assert!(Finding::decode(&[0xff; 40]).unwrap_err().contains("are not a finding"));
        assert!(Finding::decode(&[0; FINDING_LIMIT_BYTES + 1]).unwrap_err().contains("must have at most 32768"));
    }
}
