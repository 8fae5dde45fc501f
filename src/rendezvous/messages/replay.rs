//! What a member replays to a coordinator that was restarted: the last events that it recorded itself.

use serde::{Deserialize, Serialize};

use super::ids::NodeId;
use crate::events::journal::{Entry, REPLAYED, origin};
use crate::events::record::{Exit, Kind, LONGEST_US, Phase};
use crate::steps::slot::LARGEST_STEP;
use crate::wire::text::{NAME_LIMIT_BYTES, cut, plain};
use crate::wire::time::micros;

/// Most bytes of texts in one [`Replay`], and most that are taken of it.
const TEXTS_BYTES: usize = 24 * 1024;
/// Longest sentence in a replay, in bytes.
const TEXT_BYTES: usize = 512;

/// A member's last events, the oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replay {
    /// The name with which the ids of its events begin: that of the member.
    pub origin: String,
    /// At most [`REPLAYED`].
    pub events: Vec<ReplayedEvent>,
}

/// An event of a member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplayedEvent {
    /// The member's number of it, up to [`LARGEST_STEP`].
    pub number: u64,
    /// The number of its cause.
    pub cause: Option<u64>,
    /// The round, when it happened, up to [`LARGEST_STEP`].
    pub round: u64,
    /// The job's restart number, when it happened.
    pub restart: u32,
    /// How long ago it happened, in microseconds.
    pub ago_us: u64,
    /// The name of the node that it is about.
    pub node: Option<String>,
    /// Its sentence.
    pub text: Option<String>,
    /// What happened.
    pub what: What,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum What {
    /// [`Kind::ReceivedCompleted`].
    Completed {
        /// The member's rank.
        rank: u32,
        /// Number of nodes.
        nodes: u32,
        /// Number of workers, if it is known.
        workers: Option<u32>,
    },
    /// [`Kind::ReceivedExited`].
    Exited(Box<Exit>),
    /// [`Kind::ReceivedBroken`].
    Broken {
        /// Its workers may have lived on.
        in_place: bool,
    },
    /// [`Kind::Phase`].
    Phase(Phase),
}

impl Replay {
    /// The last events that fit into a message. `origin` is that of all of them.
    pub fn of<'a>(origin: &str, entries: impl DoubleEndedIterator<Item = &'a Entry>, now: std::time::Instant) -> Self {
        let (mut events, mut bytes) = (Vec::new(), 0);
        for entry in entries.rev() {
            let Some(event) = ReplayedEvent::of(origin, entry, now) else { continue };
            bytes += event.texts();
            if bytes > TEXTS_BYTES || events.len() == REPLAYED {
                break;
            }
            events.push(event);
        }
        events.reverse();
        Self { origin: origin.to_owned(), events }
    }

    /// As a coordinator takes it from this member: the last events within the limits, by rising numbers, with texts tidied. `None`: it
    /// is no event of a member, or it is another member's.
    pub fn validated(mut self, member: NodeId) -> Option<Self> {
        let rises = self.events.windows(2).all(|pair| pair[0].number < pair[1].number);
        let possible = self.events.iter().all(|event| event.number.max(event.round) <= LARGEST_STEP);
        if self.origin != origin(member.0) || !rises || !possible || self.events.len() > REPLAYED {
            return None;
        }
        let (events, mut bytes) = (std::mem::take(&mut self.events), 0);
        let tidied = events.into_iter().rev().map(ReplayedEvent::tidied).take_while(|event| {
            bytes += event.texts();
            bytes <= TEXTS_BYTES
        });
        self.events = tidied.collect();
        self.events.reverse();
        Some(self)
    }
}

impl ReplayedEvent {
    fn of(origin: &str, entry: &Entry, now: std::time::Instant) -> Option<Self> {
        let record = &entry.record;
        let what = match &record.kind {
            Kind::ReceivedCompleted { rank, nodes, workers } => {
                What::Completed { rank: *rank, nodes: *nodes, workers: *workers }
            }
            Kind::ReceivedExited(exit) => What::Exited(exit.clone()),
            Kind::ReceivedBroken { in_place } => What::Broken { in_place: *in_place },
            Kind::Phase(phase) => What::Phase(*phase),
            _ => return None,
        };
        let own = |id: &String| id.strip_prefix(origin)?.strip_prefix('.')?.parse().ok();
        let ago = now.saturating_duration_since(entry.at);
        let event = Self {
            number: record.number.0,
            cause: entry.causes.first().and_then(own),
            round: record.round,
            restart: record.restart,
            ago_us: micros(ago),
            node: record.node.clone(),
            text: record.text.clone(),
            what,
        };
        Some(event.tidied())
    }

    fn tidied(mut self) -> Self {
        let short = |text: &String, limit| cut(plain(text.clone()), limit);
        self.cause = self.cause.filter(|cause| *cause < self.number);
        self.ago_us = self.ago_us.min(LONGEST_US);
        self.node = self.node.as_ref().map(|node| short(node, NAME_LIMIT_BYTES));
        self.text = self.text.as_ref().map(|text| short(text, TEXT_BYTES));
        match &mut self.what {
            What::Exited(exit) => {
                exit.role = short(&exit.role, NAME_LIMIT_BYTES);
                exit.exit = short(&exit.exit, NAME_LIMIT_BYTES);
                exit.message = short(&exit.message, TEXT_BYTES);
            }
            What::Phase(phase) => *phase = phase.bounded(),
            What::Completed { .. } | What::Broken { .. } => {}
        }
        self
    }

    fn texts(&self) -> usize {
        let len = |text: &Option<String>| text.as_ref().map_or(0, String::len);
        let exit = match &self.what {
            What::Exited(exit) => exit.role.len() + exit.exit.len() + exit.message.len(),
            _ => 0,
        };
        len(&self.node) + len(&self.text) + exit
    }

    /// What is recorded of it.
    pub fn kind(&self) -> Kind {
        match &self.what {
            What::Completed { rank, nodes, workers } => {
                Kind::ReceivedCompleted { rank: *rank, nodes: *nodes, workers: *workers }
            }
            What::Exited(exit) => Kind::ReceivedExited(exit.clone()),
            What::Broken { in_place } => Kind::ReceivedBroken { in_place: *in_place },
            What::Phase(phase) => Kind::Phase(*phase),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::events::journal::Journal;

    fn journal(count: u64, text: &str) -> Journal {
        let begin = Instant::now();
        let mut journal = Journal::new(7, begin);
        for second in 1..=count {
            journal.tick(begin + Duration::from_secs(second));
            let cause = journal.broken();
            journal.record(Kind::ReceivedBroken { in_place: false }, Some("n1:7"), cause, Some(text.to_owned()));
        }
        journal
    }

    fn replay(journal: &Journal, after: u64) -> Replay {
        Replay::of(journal.origin(), journal.recent(), journal.began() + Duration::from_secs(after))
    }

    #[test]
    fn the_last_events_are_replayed_with_their_causes_and_ages() {
        let journal = journal(100, "gone");
        let replay = replay(&journal, 101);
        assert_eq!((replay.events.len(), replay.events[0].number), (REPLAYED, 37));
        let last = replay.events.last().unwrap();
        assert_eq!((last.number, last.cause, last.ago_us), (100, Some(99), 1_000_000));
        assert_eq!(replay.clone().validated(NodeId(7)), Some(replay.clone()));
        let bytes = postcard::to_stdvec(&replay).unwrap();
        assert_eq!(postcard::from_bytes::<Replay>(&bytes), Ok(replay));
    }

    #[test]
    fn texts_are_short_and_few_enough_for_a_message() {
        let replay = replay(&journal(100, &"\u{1b}".repeat(5000)), 100);
        assert!(replay.events.len() > 32 && replay.events.len() < REPLAYED, "{}", replay.events.len());
        assert!(postcard::to_stdvec(&replay).unwrap().len() < 32 * 1024);
    }

    #[test]
    fn what_no_member_replays_is_not_taken() {
        let honest = replay(&journal(3, "gone"), 3);
        let wrong = |change: &dyn Fn(&mut Replay)| {
            let mut replay = honest.clone();
            change(&mut replay);
            replay.validated(NodeId(7))
        };
        assert_eq!(wrong(&|replay| replay.origin = "c0".into()), None);
        assert_eq!(wrong(&|replay| replay.origin = origin(8)), None, "it is another member's");
        assert_eq!(wrong(&|replay| replay.events[2].number = u64::MAX), None);
        assert_eq!(wrong(&|replay| replay.events[2].round = LARGEST_STEP + 1), None);
        assert_eq!(wrong(&|replay| replay.events.reverse()), None);
        assert_eq!(wrong(&|replay| replay.events = vec![replay.events[0].clone(); 65]), None);
        let later = wrong(&|replay| replay.events[1].cause = Some(7)).unwrap();
        assert_eq!(later.events[1].cause, None, "a cause is earlier");
        let long = wrong(&|replay| replay.events[1].text = Some("x".repeat(60_000))).unwrap();
        assert!(long.events[1].text.as_ref().unwrap().len() <= TEXT_BYTES + 8);
        assert_eq!(wrong(&|replay| replay.events[1].ago_us = u64::MAX).unwrap().events[1].ago_us, LONGEST_US);
        let endless = Phase { stop_us: Some(u64::MAX), ..Phase::default() };
        let bounded = wrong(&|replay| replay.events[1].what = What::Phase(endless)).unwrap();
        assert_eq!(bounded.events[1].what, What::Phase(Phase { stop_us: Some(LONGEST_US), ..Phase::default() }));
    }
}
