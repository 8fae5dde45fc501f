//! Splitting a stream into lines, and keeping its last bytes. Pure. Memory is bounded.

use std::time::{Duration, Instant};

use memchr::{memchr, memchr2, memrchr};

/// A line longer than this is passed on in pieces.
const LINE_BYTES: usize = 1 << 20;

/// Bytes at the end of stderr that are kept for failure reports.
pub(super) const TAIL_BYTES: usize = 8 << 10;

/// A part of a stream that can be written between the lines of other workers.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Part<'a> {
    /// A line with its end: `\n`, `\r` or `\r\n`; and how many of its bytes were [shown](Lines::show) before.
    Line(&'a [u8], usize),
    /// A line without an end: the last of its stream, or a piece of one that is too long; and how many of its bytes were shown before.
    Unended(&'a [u8], usize),
    /// The `\n` of a `\r\n` whose `\r` was part of the line before.
    Newline,
}

/// What a console shows at the end of all that was written there: the stream whose line has no end yet, if there is such a line.
pub(crate) type OpenLine = Option<u64>;

impl Part<'_> {
    /// Append it with a prefix, as whole lines, to what a console is to show. `stream_id` is the stream that it is a part of.
    pub(crate) fn append_to(&self, out: &mut Vec<u8>, prefix: &[u8], stream_id: u64, open: &mut OpenLine) {
        let (line, shown) = match *self {
            Part::Newline => (&b"\n"[..], 1),
            Part::Line(line, shown) | Part::Unended(line, shown) => (line, shown),
        };
        let rest = if *self == Part::Newline { line } else { &line[shown..] };
        let was_closed = shown > 0 && *open != Some(stream_id);
        if was_closed && matches!(rest, b"" | b"\n" | b"\r\n") && *self != Part::Newline {
            return; // another stream has begun a line after what was shown, which is complete
        }
        if *self != Part::Newline {
            begin(out, prefix, stream_id, shown > 0, open);
        }
        out.extend_from_slice(rest);
        if matches!(self, Part::Unended(..)) {
            out.push(b'\n');
        }
        *open = None;
    }
}

/// Append a line's beginning that has no end yet. `continues`: more of it was shown before.
pub(crate) fn append_open(
    text: &[u8],
    continues: bool,
    out: &mut Vec<u8>,
    prefix: &[u8],
    stream_id: u64,
    open: &mut OpenLine,
) {
    begin(out, prefix, stream_id, continues, open);
    out.extend_from_slice(text);
    *open = Some(stream_id);
}

/// Begin a line, or go on with the one that was begun.
fn begin(out: &mut Vec<u8>, prefix: &[u8], stream_id: u64, continues: bool, open: &mut OpenLine) {
    if continues && *open == Some(stream_id) {
        return;
    }
    if open.take().is_some() {
        out.push(b'\n');
    }
    out.extend_from_slice(prefix);
}

/// The part of a stream that is not a whole line yet.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    partial: Vec<u8>,
    /// Bytes of it that were shown already.
    shown: usize,
    after_return: bool,
    /// Since when there has been text that has no end of its line and was not shown.
    unshown_since: Option<Instant>,
}

/// Text without an end of its line is shown after this time: a prompt, the dots of a progress.
const SHOW_AFTER: Duration = Duration::from_secs(1);

impl Lines {
    /// Takes the next bytes, and passes every part that they complete to `emit`.
    ///
    /// `\r` ends a line at once, because a progress bar writes nothing after it until its next step.
    pub(crate) fn feed(&mut self, mut chunk: &[u8], mut emit: impl FnMut(Part<'_>)) {
        let all = self.partial.len() + chunk.len();
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
            emit(Part::Unended(&self.partial, self.shown));
            self.partial.clear();
            self.shown = 0;
            chunk = rest;
        }
        self.partial.extend_from_slice(chunk);
        if self.partial.len() < all {
            self.unshown_since = None; // what is left has just begun
        }
    }

    /// The beginning of a line that was not shown yet; empty if there is none.
    pub(crate) fn unshown(&self) -> &[u8] {
        &self.partial[self.shown..]
    }

    /// What was emitted is written, which may have taken long. Text without an end of its line waits from now on.
    pub(crate) fn written(&mut self, now: Instant) {
        self.unshown_since = (!self.unshown().is_empty()).then(|| self.unshown_since.unwrap_or(now));
    }

    /// When text that has no end of its line is to be shown, if some waits.
    pub(crate) fn show_at(&self) -> Option<Instant> {
        self.unshown_since.map(|since| since + SHOW_AFTER)
    }

    /// It is shown now. Returns it, and whether the line's beginning was shown before.
    pub(crate) fn show(&mut self) -> (&[u8], bool) {
        self.unshown_since = None;
        let from = std::mem::replace(&mut self.shown, self.partial.len());
        (&self.partial[from..], from > 0)
    }

    /// The stream has ended: passes the rest to `emit`.
    pub(crate) fn finish(&mut self, mut emit: impl FnMut(Part<'_>)) {
        self.unshown_since = None;
        if !self.partial.is_empty() {
            emit(Part::Unended(&self.partial, self.shown));
            (self.partial, self.shown) = (Vec::new(), 0);
        }
    }

    fn line(&mut self, end: &[u8], emit: &mut impl FnMut(Part<'_>)) {
        if self.partial.is_empty() {
            return emit(Part::Line(end, 0));
        }
        self.partial.extend_from_slice(end);
        emit(Part::Line(&self.partial, self.shown));
        self.partial.clear();
        self.shown = 0;
    }
}

/// The last bytes of a stream, at least [`TAIL_BYTES`] of them if there were so many.
///
/// A state of a progress bar that the next state has overwritten counts for nothing: of each line only what follows its last `\r` is
/// kept, with that `\r`. So a bar of thousands of states is one line here, as it is on a terminal.
#[derive(Debug, Default)]
pub(super) struct Tail {
    bytes: Vec<u8>,
    /// Where the last line begins in `bytes`.
    line: usize,
}

impl Tail {
    pub(super) fn push(&mut self, mut chunk: &[u8]) {
        // In most streams there is no `\r` at all.
        if !self.ends_in_return() && memchr(b'\r', chunk).is_none() {
            let line = memrchr(b'\n', chunk).map(|at| at + 1);
            self.append(chunk, line);
            return;
        }
        while !chunk.is_empty() {
            let end = memchr2(b'\n', b'\r', chunk).map_or(chunk.len(), |at| at + 1);
            let (part, rest) = chunk.split_at(end);
            chunk = rest;
            if self.ends_in_return() {
                match part {
                    b"\r" => continue,
                    b"\n" => {}
                    _ => {
                        self.bytes.truncate(self.line);
                        self.bytes.push(b'\r');
                    }
                }
            }
            self.append(part, part.ends_with(b"\n").then_some(part.len()));
        }
    }

    /// The last [`TAIL_BYTES`].
    pub(super) fn last(&self) -> &[u8] {
        &self.bytes[self.bytes.len().saturating_sub(TAIL_BYTES)..]
    }

    /// Whether the next byte overwrites the last line, unless it ends that line.
    fn ends_in_return(&self) -> bool {
        self.bytes[self.line..].last() == Some(&b'\r')
    }

    /// Append bytes. `line`: where the last line begins in them, if it does.
    fn append(&mut self, bytes: &[u8], line: Option<usize>) {
        let skipped = bytes.len().saturating_sub(TAIL_BYTES);
        if skipped > 0 {
            self.drop_first(self.bytes.len());
        } else if self.bytes.len() + bytes.len() > 2 * TAIL_BYTES {
            // Cut only when as much again has arrived, so that small writes do not move the whole tail each time.
            self.drop_first(self.bytes.len() - TAIL_BYTES);
        }
        if let Some(line) = line {
            self.line = self.bytes.len() + line.saturating_sub(skipped);
        }
        self.bytes.extend_from_slice(&bytes[skipped..]);
    }

    fn drop_first(&mut self, count: usize) {
        self.bytes.drain(..count);
        self.line = self.line.saturating_sub(count);
    }
}

/// What a terminal shows of a line, and whether something was written over: the line is a progress bar's. A `\r` at the end has nothing
/// after it that could be written over the line.
pub(crate) fn shown(line: &str) -> (&str, bool) {
    let is_ended = line.ends_with('\n');
    let line = line.strip_suffix('\n').unwrap_or(line);
    let line = if is_ended { line.strip_suffix('\r').unwrap_or(line) } else { line };
    let text = line.trim_end_matches('\r');
    (text.rsplit_once('\r').map_or(text, |(_, last)| last), line.contains('\r'))
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
                Part::Line(line, _) => text(line),
                Part::Unended(line, _) => format!("{}$", text(line)),
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

    /// What a console shows of two streams. `.` in place of a text: what has no end is shown.
    fn console(steps: &[(u64, &str)]) -> String {
        let mut lines = [Lines::default(), Lines::default()];
        let (mut out, mut open) = (Vec::new(), None);
        for (stream_id, text) in steps {
            let (lines, prefix) = (&mut lines[*stream_id as usize], format!("{stream_id}:"));
            if *text == "." {
                let (text, continues) = lines.show();
                append_open(text, continues, &mut out, prefix.as_bytes(), *stream_id, &mut open);
            } else {
                lines.feed(text.as_bytes(), |part| part.append_to(&mut out, prefix.as_bytes(), *stream_id, &mut open));
            }
        }
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn what_has_no_end_is_shown_once_and_goes_on_in_its_line_unless_another_has_begun_one() {
        assert_eq!(console(&[(0, "name? "), (0, "."), (0, "joe\n"), (1, "b\n")]), "0:name? joe\n1:b\n");
        assert_eq!(console(&[(0, "."), (0, "..")]), "0:", "nothing was there to show, then it is held");
        assert_eq!(console(&[(0, "a"), (0, "."), (0, "b"), (0, "."), (0, "c\n")]), "0:abc\n");
        assert_eq!(console(&[(0, "a"), (0, "."), (1, "b\n"), (0, "c\n")]), "0:a\n1:b\n0:c\n");
        assert_eq!(console(&[(0, "a"), (0, "."), (1, "b\n"), (0, "\n"), (0, "c\n")]), "0:a\n1:b\n0:c\n");
        assert_eq!(console(&[(0, "a"), (0, "."), (1, "b"), (1, "."), (0, "c"), (0, ".")]), "0:a\n1:b\n0:c");
        assert_eq!(console(&[(0, "1%\r"), (0, "\n"), (1, "b\n")]), "0:1%\r\n1:b\n");
    }

    #[test]
    fn a_line_that_is_too_long_comes_in_pieces() {
        let long = vec![b'x'; 2 * LINE_BYTES + 5];
        let mut lines = Lines::default();
        let mut lengths = Vec::new();
        let mut note = |part: Part<'_>| match part {
            Part::Line(line, _) | Part::Unended(line, _) => lengths.push(line.len()),
            Part::Newline => unreachable!("there is no return"),
        };
        for chunk in long.chunks(300_000) {
            lines.feed(chunk, &mut note);
            assert!(lines.partial.len() <= LINE_BYTES);
        }
        lines.feed(b"\n", &mut note);
        assert_eq!(lengths, [LINE_BYTES, LINE_BYTES, 6]);
    }

    #[test]
    fn a_progress_bar_of_thousands_of_states_is_one_line_of_the_tail() {
        let mut tail = Tail::default();
        tail.push(b"loading\n");
        for state in 0..20_000 {
            tail.push(format!("\r{state}/20000").as_bytes());
        }
        tail.push(b"\nTraceback\n");
        assert_eq!(String::from_utf8_lossy(tail.last()), "loading\n\r19999/20000\nTraceback\n");
        let mut tail = Tail::default();
        for state in 0..20_000 {
            tail.push(format!("{state}/20000\r").as_bytes());
        }
        assert_eq!(tail.last(), b"\r19999/20000\r");
        tail.push(&vec![b'x'; 3 * TAIL_BYTES]);
        tail.push(b"\rshort");
        assert_eq!(tail.last(), b"\rshort");
    }

    #[test]
    fn of_a_line_is_shown_what_was_not_written_over() {
        assert_eq!(shown("text\n"), ("text", false));
        assert_eq!(shown("text\r\n"), ("text", false));
        assert_eq!(shown("\r10%\r20%\n"), ("20%", true));
        assert_eq!(shown("10%\r20%\r"), ("20%", true));
        assert_eq!(shown("10%\rTraceback\n"), ("Traceback", true));
        assert_eq!(shown(""), ("", false));
    }

    proptest! {
        #[test]
        fn nothing_is_lost_or_reordered(chunks in proptest::collection::vec("[ab\r\n]{0,8}", 0..8)) {
            let mut lines = Lines::default();
            let mut joined = Vec::new();
            let mut note = |part: Part<'_>| match part {
                Part::Line(line, _) | Part::Unended(line, _) => joined.extend_from_slice(line),
                Part::Newline => joined.push(b'\n'),
            };
            for chunk in &chunks {
                lines.feed(chunk.as_bytes(), &mut note);
            }
            lines.finish(&mut note);
            prop_assert_eq!(joined, chunks.concat().into_bytes());
        }

        #[test]
        fn the_tail_keeps_of_each_line_what_follows_its_last_return(chunks in proptest::collection::vec("[ab\r\n]{0,8}", 0..8)) {
            let mut tail = Tail::default();
            chunks.iter().for_each(|chunk| tail.push(chunk.as_bytes()));
            let visible = |text: &str| {
                text.split_inclusive('\n').map(|line| (shown(line).0.to_owned(), line.ends_with('\n'))).collect::<Vec<_>>()
            };
            let kept = String::from_utf8(tail.last().to_vec()).unwrap();
            prop_assert_eq!(visible(&kept), visible(&chunks.concat()));
            for line in kept.split_inclusive('\n') {
                prop_assert!(line.trim_start_matches('\r').trim_end_matches(['\r', '\n']).find('\r').is_none(), "{line:?}");
            }
        }

        #[test]
        fn the_tail_is_the_end(lengths in proptest::collection::vec(0..3 * TAIL_BYTES, 0..6)) {
            let all: Vec<u8> = (0..lengths.iter().sum::<usize>()).map(|at| b'a' + (at % 23) as u8).collect();
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
