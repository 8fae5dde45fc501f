//! Splitting a stream into lines, and keeping its last bytes. Pure. Memory is bounded.

use memchr::memchr2;

/// A line longer than this is passed on in pieces.
const LINE_BYTES: usize = 1 << 20;

/// Bytes at the end of stderr that are kept for failure reports.
pub(super) const TAIL_BYTES: usize = 8 << 10;

/// A part of a stream that can be written between the lines of other workers.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Part<'a> {
    /// A line with its end: `\n`, `\r` or `\r\n`.
    Line(&'a [u8]),
    /// A line without an end: the last of its stream, or a piece of one that is too long.
    Unended(&'a [u8]),
    /// The `\n` of a `\r\n` whose `\r` was part of the line before.
    Newline,
}

impl Part<'_> {
    /// Append it with a prefix, as whole lines.
    pub(crate) fn append_to(&self, out: &mut Vec<u8>, prefix: &[u8]) {
        match self {
            Part::Newline => out.push(b'\n'),
            Part::Line(line) => {
                out.extend_from_slice(prefix);
                out.extend_from_slice(line);
            }
            Part::Unended(line) => {
                out.extend_from_slice(prefix);
                out.extend_from_slice(line);
                out.push(b'\n');
            }
        }
    }
}

/// The part of a stream that is not a whole line yet.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    partial: Vec<u8>,
    after_return: bool,
}

impl Lines {
    /// Takes the next bytes, and passes every part that they complete to `emit`.
    ///
    /// `\r` ends a line at once, because a progress bar writes nothing after it until its next step.
    pub(crate) fn feed(&mut self, mut chunk: &[u8], mut emit: impl FnMut(Part<'_>)) {
        if self.after_return && !chunk.is_empty() {
            self.after_return = false;
            if let Some(rest) = chunk.strip_prefix(b"\n") {
                emit(Part::Newline);
                chunk = rest;
            }
        }
        while let Some(at) = memchr2(b'\n', b'\r', chunk) {
            let mut end = at + 1;
            if chunk[at] == b'\r' {
                match chunk.get(end) {
                    Some(b'\n') => end += 1,
                    Some(_) => {}
                    None => self.after_return = true,
                }
            }
            let (line, rest) = chunk.split_at(end);
            self.line(line, &mut emit);
            chunk = rest;
        }
        while self.partial.len() + chunk.len() > LINE_BYTES {
            let (piece, rest) = chunk.split_at(LINE_BYTES - self.partial.len());
            self.partial.extend_from_slice(piece);
            emit(Part::Unended(&self.partial));
            self.partial.clear();
            chunk = rest;
        }
        self.partial.extend_from_slice(chunk);
    }

    /// The stream has ended: passes the rest to `emit`.
    pub(crate) fn finish(&mut self, mut emit: impl FnMut(Part<'_>)) {
        if !self.partial.is_empty() {
            emit(Part::Unended(&self.partial));
            self.partial = Vec::new();
        }
    }

    fn line(&mut self, end: &[u8], emit: &mut impl FnMut(Part<'_>)) {
        if self.partial.is_empty() {
            return emit(Part::Line(end));
        }
        self.partial.extend_from_slice(end);
        emit(Part::Line(&self.partial));
        self.partial.clear();
    }
}

/// The last bytes of a stream, at least [`TAIL_BYTES`] of them if there were so many.
#[derive(Debug, Default)]
pub(super) struct Tail {
    bytes: Vec<u8>,
}

impl Tail {
    pub(super) fn push(&mut self, chunk: &[u8]) {
        if chunk.len() >= TAIL_BYTES {
            self.bytes.clear();
            self.bytes.extend_from_slice(&chunk[chunk.len() - TAIL_BYTES..]);
            return;
        }
        // Cut only when as much again has arrived, so that small writes do not move the whole tail each time.
        if self.bytes.len() + chunk.len() > 2 * TAIL_BYTES {
            self.bytes.drain(..self.bytes.len() - TAIL_BYTES);
        }
        self.bytes.extend_from_slice(chunk);
    }

    /// The last [`TAIL_BYTES`].
    pub(super) fn last(&self) -> &[u8] {
        &self.bytes[self.bytes.len().saturating_sub(TAIL_BYTES)..]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parts(chunks: &[&[u8]]) -> Vec<String> {
        let mut lines = Lines::default();
        let mut seen = Vec::new();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let mut note = |part: Part<'_>| {
            seen.push(match part {
                Part::Line(line) => text(line),
                Part::Unended(line) => format!("{}$", text(line)),
                Part::Newline => "+\n".into(),
            });
        };
        for chunk in chunks {
            lines.feed(chunk, &mut note);
        }
        lines.finish(&mut note);
        seen
    }

    #[test]
    fn only_whole_lines_are_given_whatever_the_chunks() {
        assert_eq!(parts(&[b"one\ntwo\nthr", b"ee", b"\nfour"]), ["one\n", "two\n", "three\n", "four$"]);
        assert_eq!(parts(&[b"", b"\n\n"]), ["\n", "\n"]);
        assert_eq!(parts(&[]), Vec::<String>::new());
    }

    #[test]
    fn a_progress_bars_return_ends_a_line_at_once() {
        assert_eq!(parts(&[b"1%\r2%\r", b"3%\r\n"]), ["1%\r", "2%\r", "3%\r\n"]);
        assert_eq!(parts(&[b"a\r", b"", b"\nb\n"]), ["a\r", "+\n", "b\n"]);
        assert_eq!(parts(&[b"a\r\r\n"]), ["a\r", "\r\n"]);
    }

    #[test]
    fn a_line_that_is_too_long_comes_in_pieces() {
        let long = vec![b'x'; 2 * LINE_BYTES + 5];
        let mut lines = Lines::default();
        let mut lengths = Vec::new();
        let mut note = |part: Part<'_>| match part {
            Part::Line(line) | Part::Unended(line) => lengths.push(line.len()),
            Part::Newline => unreachable!("there is no return"),
        };
        for chunk in long.chunks(300_000) {
            lines.feed(chunk, &mut note);
            assert!(lines.partial.len() <= LINE_BYTES);
        }
        lines.feed(b"\n", &mut note);
        assert_eq!(lengths, [LINE_BYTES, LINE_BYTES, 6]);
    }

    proptest! {
        #[test]
        fn nothing_is_lost_or_reordered(chunks in proptest::collection::vec("[ab\r\n]{0,8}", 0..8)) {
            let mut lines = Lines::default();
            let mut joined = Vec::new();
            let mut note = |part: Part<'_>| match part {
                Part::Line(line) | Part::Unended(line) => joined.extend_from_slice(line),
                Part::Newline => joined.push(b'\n'),
            };
            for chunk in &chunks {
                lines.feed(chunk.as_bytes(), &mut note);
            }
            lines.finish(&mut note);
            prop_assert_eq!(joined, chunks.concat().into_bytes());
        }

        #[test]
        fn the_tail_is_the_end(lengths in proptest::collection::vec(0..3 * TAIL_BYTES, 0..6)) {
            let all: Vec<u8> = (0..lengths.iter().sum::<usize>()).map(|at| (at % 251) as u8).collect();
            let (mut tail, mut from) = (Tail::default(), 0);
            for length in lengths {
                tail.push(&all[from..from + length]);
                from += length;
            }
            prop_assert_eq!(tail.last(), &all[all.len().saturating_sub(TAIL_BYTES)..]);
            prop_assert!(tail.bytes.len() <= 2 * TAIL_BYTES);
        }
    }
}
