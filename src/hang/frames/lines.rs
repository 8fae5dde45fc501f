//! The line of an instruction, from a code object's location table (PEP 626, the form of 3.11 and later).

use super::Unreadable;
use super::reader::Reader;

/// Longest table that is read.
const LIMIT_BYTES: u64 = 256 * 1024;
/// The table is read in pieces.
const PIECE: usize = 512;
/// Most bytes of one number in it.
const NUMBER_BYTES: usize = 8;

/// Largest number of a line that is believed.
const MOST_LINES: u32 = 10_000_000;

/// The line of the instruction that begins `offset` bytes behind the code's first one. `None`: it has no line, or the table is nonsense.
pub(super) fn line(reader: &Reader<'_>, table: u64, size: u64, first: i32, offset: i64) -> Option<u32> {
    // A frame that has not begun stands before its first instruction.
    let Ok(offset) = u64::try_from(offset) else { return u32::try_from(first).ok() };
    let mut table = Table { reader, at: table, left: size.min(LIMIT_BYTES), piece: [0; PIECE], read: 0, used: 0 };
    let (mut line, mut end) = (i64::from(first), 0_u64);
    loop {
        let head = table.byte().ok()??;
        let code = head >> 3 & 15;
        end += (u64::from(head & 7) + 1) * 2;
        match code {
            15 => (),
            14 => {
                line = line.saturating_add(table.signed()?);
                for _ in 0..3 {
                    table.number()?;
                }
            }
            13 => line = line.saturating_add(table.signed()?),
            10..=12 => {
                line += i64::from(code) - 10;
                table.skip(2)?;
            }
            _ => table.skip(1)?,
        }
        if offset < end {
            return u32::try_from(line).ok().filter(|line| code != 15 && *line <= MOST_LINES);
        }
    }
}

struct Table<'a> {
    reader: &'a Reader<'a>,
    at: u64,
    left: u64,
    piece: [u8; PIECE],
    read: usize,
    used: usize,
}

impl Table<'_> {
    /// The next byte, `None` at the end.
    fn byte(&mut self) -> Result<Option<u8>, Unreadable> {
        if self.used == self.read {
            let next = usize::try_from(self.left).unwrap_or(PIECE).min(PIECE);
            if next == 0 {
                return Ok(None);
            }
            self.reader.bytes(self.at, 0, &mut self.piece[..next])?;
            self.at += next as u64;
            self.left -= next as u64;
            (self.read, self.used) = (next, 0);
        }
        self.used += 1;
        Ok(Some(self.piece[self.used - 1]))
    }

    fn skip(&mut self, bytes: usize) -> Option<()> {
        for _ in 0..bytes {
            self.byte().ok()??;
        }
        Some(())
    }

    fn number(&mut self) -> Option<u64> {
        let mut number = 0;
        for at in 0..NUMBER_BYTES {
            let byte = self.byte().ok()??;
            number |= u64::from(byte & 63) << (6 * at);
            if byte & 64 == 0 {
                return Some(number);
            }
        }
        None
    }

    /// The lowest bit is the sign.
    fn signed(&mut self) -> Option<i64> {
        let number = self.number()?;
        let value = i64::try_from(number >> 1).ok()?;
        Some(if number & 1 == 1 { -value } else { value })
    }
}
