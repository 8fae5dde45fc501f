//! Python's texts and numbers in the memory of another process.

use super::offsets::Offsets;
use super::reader::{Reader, half_in, word_in};
use super::{NAME_LIMIT_BYTES, UNKNOWN, Unreadable};
use crate::wire::text::{cut, plain};

/// The head of a `str` up to its state, in all versions.
const STR_HEAD: usize = 64;

/// A `str` as one line of at most [`NAME_LIMIT_BYTES`]. What is no `str` becomes [`UNKNOWN`].
pub(super) fn text(reader: &Reader<'_>, offsets: &Offsets, address: u64) -> String {
    str_at(reader, offsets, address).unwrap_or_else(|| UNKNOWN.to_owned())
}

fn str_at(reader: &Reader<'_>, offsets: &Offsets, address: u64) -> Option<String> {
    let mut head = [0; STR_HEAD];
    let end = usize::try_from(offsets.unicode_state + 4).ok()?;
    reader.bytes(address, 0, head.get_mut(..end)?).ok()?;
    let length = word_in(&head, offsets.unicode_length);
    let State { kind, ascii } = state(half_in(&head, offsets.unicode_state))?;
    let data = if ascii { offsets.ascii_size } else { offsets.compact_size };
    let mut bytes = [0; NAME_LIMIT_BYTES];
    let size = length.checked_mul(kind as u64)?;
    let taken = usize::try_from(size).unwrap_or(NAME_LIMIT_BYTES).min(NAME_LIMIT_BYTES) / kind * kind;
    let bytes = &mut bytes[..taken];
    reader.bytes(address, data, bytes).ok()?;
    let mut text = String::new();
    for unit in bytes.chunks_exact(kind) {
        let code = match *unit {
            [latin1] => u32::from(latin1),
            [a, b] => u32::from(u16::from_ne_bytes([a, b])),
            [a, b, c, d] => u32::from_ne_bytes([a, b, c, d]),
            _ => return None,
        };
        // Python's texts may have halves of surrogate pairs: names of files that are not UTF-8 do.
        text.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER));
    }
    if size > taken as u64 {
        text.push('…');
    }
    Some(cut(plain(text), NAME_LIMIT_BYTES))
}

struct State {
    /// Bytes of a character.
    kind: usize,
    ascii: bool,
}

/// How a `str` is stored (PEP 393). The bits stand behind those that say whether it is interned: 2 of them up to 3.13, 8 or 16 in later
/// and free-threaded releases. Those before are then 0 to 3, which is no kind, so the first that makes sense is right.
fn state(bits: u32) -> Option<State> {
    [2, 8, 16].into_iter().find_map(|shift| {
        let (kind, compact, ascii) = (bits >> shift & 7, bits >> (shift + 3) & 1 == 1, bits >> (shift + 4) & 1 == 1);
        let sound = compact && matches!(kind, 1 | 2 | 4) && (kind == 1 || !ascii);
        sound.then_some(State { kind: kind as usize, ascii })
    })
}

/// The value of an `int` that is no rank if it is negative or above 2³⁰. `None` for any other object.
pub(super) fn rank(reader: &Reader<'_>, offsets: &Offsets, address: u64) -> Option<u32> {
    rank_at(reader, offsets, address).ok().flatten()
}

fn rank_at(reader: &Reader<'_>, offsets: &Offsets, address: u64) -> Result<Option<u32>, Unreadable> {
    // The lowest bits of a reference in a frame are flags from 3.14 on. Objects are aligned.
    let address = address & !7;
    let mut name = [0; 4];
    let name_at = reader.word(reader.word(address, offsets.ob_type)?, offsets.tp_name)?;
    reader.bytes(name_at, 0, &mut name)?;
    if &name != b"int\0" {
        return Ok(None);
    }
    let size = reader.word(address, offsets.long_size)?;
    let digits = if offsets.long_has_tag {
        // 0: positive, 1: zero, 2: negative; above it the number of digits.
        match (size & 3, size >> 3) {
            (1, _) => 0,
            (0, digits) => digits,
            _ => return Ok(None),
        }
    } else {
        size
    };
    Ok(match digits {
        0 => Some(0),
        1 => Some(reader.half(address, offsets.long_digit)?).filter(|digit| *digit < 1 << 30),
        _ => None,
    })
}
