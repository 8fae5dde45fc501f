//! What torch's flight recorder knows of a rank's collectives: its JSON becomes groups of a view.
//!
//! The JSON is made in the worker, so it may be anything. At most [`DUMP_LIMIT_BYTES`] are read, and of these the last
//! [`ENTRIES_LIMIT`] entries.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::{self, Write as _};

use serde::Deserialize;
use serde::de::{Deserializer, SeqAccess, Visitor};

use super::ranks::Ranks;
use super::view::{
    Entry, GROUPS_LIMIT, Group, NAME_LIMIT_BYTES, PENDING_LIMIT, SHAPE_LIMIT_BYTES, Signature, TAIL_LIMIT, View,
};
use crate::wire::text::{cut, plain};

/// Longest dump that is read.
pub const DUMP_LIMIT_BYTES: usize = 4 << 20;
/// Most entries of a dump: the last ones.
pub const ENTRIES_LIMIT: usize = 4096;

/// What the recorder knows.
#[derive(Debug, Default, Deserialize)]
pub struct Recorded<'a> {
    #[serde(borrow, default)]
    entries: Entries<'a>,
}

#[derive(Debug, Deserialize)]
struct Raw<'a> {
    #[serde(borrow)]
    process_group: (Cow<'a, str>, Cow<'a, str>),
    #[serde(default)]
    pg_id: i64,
    collective_seq_id: u64,
    #[serde(borrow)]
    profiling_name: Cow<'a, str>,
    #[serde(default)]
    input_sizes: Sizes,
    #[serde(default)]
    input_dtypes: Types,
    #[serde(default)]
    output_sizes: Sizes,
    #[serde(default)]
    output_dtypes: Types,
    #[serde(borrow, default)]
    state: Cow<'a, str>,
    #[serde(default)]
    time_created_ns: u64,
    #[serde(default)]
    retired: bool,
    #[serde(default)]
    is_p2p: bool,
}

impl<'a> Recorded<'a> {
    /// Read a dump.
    ///
    /// # Errors
    /// A sentence that says why it is none.
    pub fn parse(json: &'a [u8]) -> Result<Self, String> {
        if json.len() > DUMP_LIMIT_BYTES {
            return Err(format!("the dump has {} bytes, must have at most {DUMP_LIMIT_BYTES}", json.len()));
        }
        serde_json::from_slice(json).map_err(|error| format!("the flight recorder's dump cannot be read: {error}"))
    }

    /// Several recorders of one process as one. Of a group that more than one of them has, the first one's collectives count: each
    /// backend of a group counts for itself.
    pub fn join(recorders: Vec<Self>) -> Self {
        let (mut all, several) = (Self::default(), recorders.len() > 1);
        for Self { mut entries } in recorders {
            let known: BTreeSet<_> = all.entries.0.iter().map(|raw| raw.process_group.0.clone()).collect();
            entries.0.retain(|raw| !known.contains(&raw.process_group.0));
            all.entries.0.extend(entries.0);
        }
        if several {
            all.entries.0.make_contiguous().sort_by_key(|raw| raw.time_created_ns);
        }
        all
    }

    /// Fill a view's groups with what is recorded. `members`: those of each group, by its name. Groups beyond [`GROUPS_LIMIT`] are left
    /// out: first those without anything pending.
    pub fn fill(&self, view: &mut View, members: &BTreeMap<String, Ranks>) {
        // A group that was made anew has the old name, a higher number, and counts from 1 again.
        let mut newest: BTreeMap<&str, i64> = BTreeMap::new();
        for raw in self.collectives() {
            let pg_id = newest.entry(&raw.process_group.0).or_insert(raw.pg_id);
            *pg_id = raw.pg_id.max(*pg_id);
        }
        let mut groups: BTreeMap<&str, Kept<'_>> = BTreeMap::new();
        for (at, raw) in self.collectives().enumerate() {
            let (name, desc) = &raw.process_group;
            // What a group that is gone has left unfinished ends no more.
            let is_there = members.is_empty() || members.contains_key(name.as_ref());
            if is_there && newest.get(name.as_ref()) == Some(&raw.pg_id) {
                groups.entry(name).or_insert_with(|| Kept::new(desc)).add(at as u32, raw);
            }
        }
        for name in members.keys() {
            groups.entry(name).or_insert_with(|| Kept::new(""));
        }
        let mut groups: Vec<_> = groups.into_iter().collect();
        groups.sort_by_key(|(_, kept)| kept.pending.is_empty());
        groups.truncate(GROUPS_LIMIT);
        // Signatures of what is pending come first: there is room for some.
        let pending: Vec<Vec<_>> = groups.iter().map(|(_, kept)| entries(view, kept.pending.iter())).collect();
        view.groups = groups
            .iter()
            .zip(pending)
            .map(|((name, kept), pending)| Group {
                name: short(name),
                desc: short(kept.desc),
                ranks: members.get(*name).cloned(),
                last: kept.last,
                oldest: kept.oldest.unwrap_or_default(),
                pending,
                tail: entries(view, kept.tail.iter()),
            })
            .collect();
    }

    fn collectives(&self) -> impl Iterator<Item = &Raw<'a>> {
        self.entries.0.iter().filter(|raw| !raw.is_p2p)
    }
}

/// What is kept of a group's entries, each with its place in the dump.
struct Kept<'a> {
    desc: &'a str,
    last: u64,
    oldest: Option<u64>,
    pending: Vec<(u32, &'a Raw<'a>)>,
    tail: VecDeque<(u32, &'a Raw<'a>)>,
}

impl<'a> Kept<'a> {
    fn new(desc: &'a str) -> Self {
        Self { desc, last: 0, oldest: None, pending: Vec::new(), tail: VecDeque::new() }
    }

    fn add(&mut self, at: u32, raw: &'a Raw<'a>) {
        let seq = raw.collective_seq_id;
        self.last = self.last.max(seq);
        self.oldest = Some(self.oldest.map_or(seq, |oldest| oldest.min(seq)));
        if raw.is_pending() && self.pending.len() < PENDING_LIMIT {
            self.pending.push((at, raw));
        }
        self.tail.push_back((at, raw));
        if self.tail.len() > TAIL_LIMIT {
            self.tail.pop_front();
        }
    }
}

/// Entries of a view, by their numbers. Without an index a signature is unknown: there are too many different ones.
fn entries<'a>(view: &mut View, kept: impl Iterator<Item = &'a (u32, &'a Raw<'a>)>) -> Vec<Entry> {
    let entry = |(at, raw): &(u32, &Raw<'_>)| {
        let signature = view.intern(raw.signature()).unwrap_or(u16::MAX);
        Entry { seq: raw.collective_seq_id, at: *at, signature }
    };
    let mut entries: Vec<_> = kept.map(entry).collect();
    entries.sort_by_key(|entry| entry.seq);
    entries
}

impl Raw<'_> {
    fn is_pending(&self) -> bool {
        !self.retired && self.state != "completed"
    }

    /// What must be the same on all ranks. Of an operation that is not known, that is its name alone.
    fn signature(&self) -> Signature {
        let op = self.profiling_name.split_once(':').map_or(self.profiling_name.as_ref(), |(_, op)| op);
        let shape = match op {
            "all_reduce"
            | "broadcast"
            | "all_gather"
            | "_all_gather_base"
            | "all_gather_into_tensor_coalesced"
            | "reduce"
            | "reduce_scatter"
            | "_reduce_scatter_base"
            | "gather" => shape(&self.input_sizes, &self.input_dtypes),
            "scatter" => shape(&self.output_sizes, &self.output_dtypes),
            _ => String::new(),
        };
        Signature { op: short(op), shape }
    }
}

fn short(text: &str) -> String {
    cut(plain(text.to_owned()), NAME_LIMIT_BYTES)
}

/// Sizes and types in words: `[63310] Float`. What is too long ends with a hash of all of it, so that two long ones still differ.
fn shape(sizes: &Sizes, types: &Types) -> String {
    let mut text = sizes.0.text.clone();
    let mut hash = sizes.0.hash;
    if !types.0.text.is_empty() {
        let _ = write!(text, " {}", types.0.text);
        types.0.text.bytes().for_each(|byte| hash = mixed(hash, byte));
        hash ^= types.0.hash;
    }
    let text = plain(text);
    if text.len() <= SHAPE_LIMIT_BYTES && !sizes.0.is_cut && !types.0.is_cut {
        return text;
    }
    let digits = format!("#{:016x}", hash);
    cut(text, SHAPE_LIMIT_BYTES - digits.len()) + &digits
}

/// A text of which the beginning is kept, and a hash of all of it.
#[derive(Debug, Default)]
struct Hashed {
    text: String,
    hash: u64,
    is_cut: bool,
}

impl Hashed {
    fn push(&mut self, part: &str) {
        part.bytes().for_each(|byte| self.hash = mixed(self.hash, byte));
        match self.text.len() + part.len() <= SHAPE_LIMIT_BYTES {
            true => self.text.push_str(part),
            false => self.is_cut = true,
        }
    }
}

/// One step of FNV-1a.
fn mixed(hash: u64, byte: u8) -> u64 {
    (hash ^ 0xcbf2_9ce4_8422_2325 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3) ^ 0xcbf2_9ce4_8422_2325
}

/// Sizes of tensors: `[[3, 4], [5]]` becomes `[3,4],[5]`.
#[derive(Debug, Default)]
struct Sizes(Hashed);

/// Types of tensors: `["Float", "Float"]` becomes `Float`, and `["Float", "Int"]` becomes `Float,Int`.
#[derive(Debug, Default)]
struct Types(Hashed);

/// Keeps the last entries alone: so small ones as `{}` would take much more memory than their text.
#[derive(Debug, Default)]
struct Entries<'a>(VecDeque<Raw<'a>>);

impl<'de> Deserialize<'de> for Sizes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Sizes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("sizes of tensors")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut tensors: A) -> Result<Sizes, A::Error> {
                let mut sizes = Sizes::default();
                while let Some(tensor) = tensors.next_element::<Vec<i64>>()? {
                    let comma = if sizes.0.text.is_empty() { "" } else { "," };
                    let dims: Vec<_> = tensor.iter().map(i64::to_string).collect();
                    sizes.0.push(&format!("{comma}[{}]", dims.join(",")));
                }
                Ok(sizes)
            }
        }
        deserializer.deserialize_seq(Reader)
    }
}

impl<'de> Deserialize<'de> for Types {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Types;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("types of tensors")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut names: A) -> Result<Types, A::Error> {
                let (mut types, mut last) = (Types::default(), None);
                while let Some(name) = names.next_element::<Cow<'de, str>>()? {
                    if last.as_deref() != Some(name.as_ref()) {
                        types.0.push(if last.is_none() { "" } else { "," });
                        types.0.push(&name);
                    }
                    last = Some(name);
                }
                Ok(types)
            }
        }
        deserializer.deserialize_seq(Reader)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Entries<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Entries<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("entries of the flight recorder")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut all: A) -> Result<Entries<'de>, A::Error> {
                let mut kept = VecDeque::new();
                while let Some(raw) = all.next_element::<Raw<'de>>()? {
                    if kept.len() == ENTRIES_LIMIT {
                        kept.pop_front();
                    }
                    kept.push_back(raw);
                }
                Ok(Entries(kept))
            }
        }
        deserializer.deserialize_seq(Reader).map(|entries| Entries(entries.0))
    }
}

#[cfg(test)]
mod tests;
