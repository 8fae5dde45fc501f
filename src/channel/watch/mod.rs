//! What an agent asks a worker during a look: which collectives it has entered. A thread of the worker answers.
//!
//! The agent sends one byte, [`ASK`]. The worker sends [`GOT`] once it has the GIL, and then the length of an [`Answer`], four bytes in
//! little-endian order, and its bytes. Nothing else is sent, but a byte for the version when the worker connects. At rest both sleep.
//!
//! | file | what |
//! |---|---|
//! | `mod.rs` | an answer ↔ bytes, and bounds on it |
//! | [`agent`] | the agent's end: who may connect, and the questions (feature `io`) |
//! | [`worker`] | the worker's end: the thread (feature `io`) |

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::hang::fr::DUMP_LIMIT_BYTES;
use crate::hang::ranks::Ranks;
use crate::hang::view::NAME_LIMIT_BYTES;
use crate::wire::text::{check, cut};

#[cfg(feature = "io")]
pub mod agent;
#[cfg(feature = "io")]
pub mod worker;

/// The variable by which a worker finds the socket.
pub const WATCH: &str = "ELASTIC_RS_WATCH";
/// The first byte that a worker sends.
#[cfg(feature = "io")]
const VERSION: u8 = 1;
/// The byte by which an agent asks.
#[cfg(feature = "io")]
const ASK: u8 = b'?';
/// The byte by which a worker says that it has the GIL.
#[cfg(feature = "io")]
const GOT: u8 = b'!';
/// Longest answer.
pub const ANSWER_LIMIT_BYTES: usize = 5 << 20;
/// Longest part of an answer before the recorders.
const HEAD_LIMIT_BYTES: usize = 512 << 10;
/// Most flight recorders of an answer. A worker has one for each kind of backend.
const RECORDERS_LIMIT: usize = 4;
/// Most process groups of an answer.
const GROUPS_LIMIT: usize = 1024;
/// Longest text that says why nothing is known.
const PROBLEM_LIMIT_BYTES: usize = 512;

/// What a worker knows of its collectives.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Answer<'a> {
    /// An exception has ended the main thread's program, if that has ended.
    pub raised: bool,
    /// The members of its process groups, by name.
    pub members: BTreeMap<String, Ranks>,
    /// Its flight recorders, as JSON.
    pub recorders: Vec<&'a [u8]>,
    /// Why it does not know.
    pub problem: Option<String>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Head {
    raised: bool,
    members: BTreeMap<String, Ranks>,
    problem: Option<String>,
    /// The lengths of the recorders, which follow.
    recorders: Vec<u32>,
}

impl<'a> Answer<'a> {
    /// The bytes of an answer. What is too long is left out.
    pub fn encode(&self) -> Vec<u8> {
        let name_fits = |(name, _): &(&String, &Ranks)| name.len() <= NAME_LIMIT_BYTES;
        let members = self.members.iter().filter(name_fits).take(GROUPS_LIMIT);
        let mut recorders: Vec<_> = self.recorders.iter().take(RECORDERS_LIMIT).collect();
        let mut rest = ANSWER_LIMIT_BYTES - HEAD_LIMIT_BYTES - 4;
        recorders.retain(|recorder| {
            let fits = recorder.len() <= DUMP_LIMIT_BYTES.min(rest);
            rest -= if fits { recorder.len() } else { 0 };
            fits
        });
        let mut head = Head {
            raised: self.raised,
            members: members.map(|(name, ranks)| (name.clone(), ranks.clone())).collect(),
            problem: self.problem.clone().map(|problem| cut(problem, PROBLEM_LIMIT_BYTES)),
            recorders: recorders.iter().map(|recorder| recorder.len() as u32).collect(),
        };
        // Nothing in it can fail to serialise.
        let bytes_of = |head: &Head| postcard::to_stdvec(head).unwrap_or_default();
        let mut bytes = bytes_of(&head);
        if bytes.len() > HEAD_LIMIT_BYTES {
            head.members.clear();
            bytes = bytes_of(&head);
        }
        let mut encoded = (bytes.len() as u32).to_le_bytes().to_vec();
        encoded.extend_from_slice(&bytes);
        recorders.iter().for_each(|recorder| encoded.extend_from_slice(recorder));
        encoded
    }

    /// An answer that a worker has sent.
    ///
    /// # Errors
    /// A sentence naming what is not allowed, and what is.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, String> {
        let no_answer = || format!("{} bytes are not an answer of a watch thread", bytes.len());
        let (length, rest) = bytes.split_first_chunk().ok_or_else(no_answer)?;
        let length = u32::from_le_bytes(*length) as usize;
        if length > HEAD_LIMIT_BYTES {
            return Err(format!("the head of the answer has {length} bytes, must have at most {HEAD_LIMIT_BYTES}"));
        }
        let (head, mut rest) = rest.split_at_checked(length).ok_or_else(no_answer)?;
        let head: Head = postcard::from_bytes(head).map_err(|_| no_answer())?;
        let (groups, count) = (head.members.len(), head.recorders.len());
        if groups > GROUPS_LIMIT || count > RECORDERS_LIMIT {
            return Err(format!(
                "the answer has {groups} groups and {count} recorders, at most {GROUPS_LIMIT} and {RECORDERS_LIMIT} are allowed"
            ));
        }
        for (name, ranks) in &head.members {
            check("group's name", name, NAME_LIMIT_BYTES)?;
            ranks.validate()?;
        }
        check("problem", head.problem.as_deref().unwrap_or_default(), PROBLEM_LIMIT_BYTES)?;
        let mut recorders = Vec::new();
        for length in head.recorders {
            let (recorder, after) = rest.split_at_checked(length as usize).ok_or_else(no_answer)?;
            recorders.push(recorder);
            rest = after;
        }
        if !rest.is_empty() {
            return Err(no_answer());
        }
        Ok(Self { raised: head.raised, members: head.members, recorders, problem: head.problem })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer<'a>(recorders: &[&'a [u8]]) -> Answer<'a> {
        let members = [("0", 0..4), ("5", 2..4)].map(|(name, ranks)| (name.to_owned(), ranks.collect()));
        Answer { raised: true, members: members.into(), recorders: recorders.to_vec(), problem: None }
    }

    #[test]
    fn an_answer_arrives_as_it_was() {
        let answer = answer(&[b"{}", b"", b"{\"entries\": []}"]);
        assert_eq!(Answer::decode(&answer.encode()), Ok(answer));
    }

    #[test]
    fn what_is_too_long_is_left_out() {
        let (long, longer) = (vec![b' '; DUMP_LIMIT_BYTES], vec![b' '; DUMP_LIMIT_BYTES + 1]);
        let encoded = answer(&[&longer, &long, &long, b"{}"]).encode();
        assert!(encoded.len() <= ANSWER_LIMIT_BYTES);
        assert_eq!(Answer::decode(&encoded), Ok(answer(&[&long, b"{}"])));
        // Members of every second process, in no order that is a run.
        let scattered: Ranks = (0..60_000_u32).filter(|rank| rank.count_ones() % 2 == 0).collect();
        let members = (0..GROUPS_LIMIT).map(|name| (name.to_string(), scattered.clone())).collect();
        let encoded = Answer { members, ..answer(&[b"{}"]) }.encode();
        assert_eq!(Answer::decode(&encoded), Ok(Answer { members: BTreeMap::new(), ..answer(&[b"{}"]) }));
    }

    #[test]
    fn what_is_no_answer_is_refused() {
        let encoded = answer(&[b"{}"]).encode();
        for length in 0..encoded.len() {
            assert!(Answer::decode(&encoded[..length]).is_err(), "{length} bytes");
        }
        assert!(Answer::decode(&[&encoded[..], b" "].concat()).is_err());
        assert!(Answer::decode(&[255; 64]).unwrap_err().contains("must have at most"));
        let longer = Answer { problem: Some("a\nb".to_owned()), ..Answer::default() };
        assert!(Answer::decode(&longer.encode()).is_err(), "a text of two lines");
    }
}
