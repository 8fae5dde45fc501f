//! Where CPython's structures have what a reader of frames needs.
//!
//! 3.11 and 3.12: tables, since all patch releases of a minor one have the same. From 3.13 on `_PyRuntime` begins with them
//! (`_Py_DebugOffsets`). Which words stand there differs between releases, so a form counts only if all that it says fits together.

use super::reader::{Reader, word_in};
use super::{FramesError, Runtime, Version};

/// How a thread's state points to its innermost frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ToFrame {
    /// Through a structure on the C stack: where the pointer to that is, and where that has the frame.
    CFrame(u64, u64),
    /// Directly.
    Current(u64),
}

/// Where the lock of the GIL is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gil {
    /// In `_PyRuntime`.
    InRuntime(u64),
    /// The interpreter has a pointer to it.
    OfInterpreter(u64),
}

/// Offsets in bytes. Names are as in CPython's structures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Offsets {
    pub interpreters_head: u64,
    pub interpreter_next: u64,
    pub threads_head: u64,
    pub gil: Gil,
    /// Free-threaded builds have a GIL that may be off.
    pub gil_enabled: Option<u64>,
    pub gil_locked: u64,
    pub gil_holder: u64,
    pub thread_next: u64,
    pub native_thread_id: u64,
    pub to_frame: ToFrame,
    pub frame_code: u64,
    pub frame_previous: u64,
    pub frame_instruction: u64,
    pub frame_owner: u64,
    pub frame_locals: u64,
    /// Free-threaded builds from 3.14 on have copies of the bytecode: which of them a frame runs, and where the code has the list.
    pub copies: Option<(u64, u64)>,
    pub code_file: u64,
    pub code_qualname: u64,
    pub code_first_line: u64,
    pub code_lines: u64,
    pub code_bytecode: u64,
    pub unicode_length: u64,
    pub unicode_state: u64,
    pub ascii_size: u64,
    pub compact_size: u64,
    pub bytes_size: u64,
    pub bytes_data: u64,
    pub ob_type: u64,
    pub tp_name: u64,
    pub long_size: u64,
    pub long_digit: u64,
    /// The size of an `int` is a tag (3.12 and later).
    pub long_has_tag: bool,
}

const PYTHON_3_11: Offsets = Offsets {
    interpreters_head: 40,
    interpreter_next: 0,
    threads_head: 16,
    gil: Gil::InRuntime(360),
    gil_enabled: None,
    gil_locked: 16,
    gil_holder: 8,
    thread_next: 8,
    native_thread_id: 160,
    to_frame: ToFrame::CFrame(56, 8),
    frame_code: 32,
    frame_previous: 48,
    frame_instruction: 56,
    frame_owner: 69,
    frame_locals: 72,
    copies: None,
    code_file: 112,
    code_qualname: 128,
    code_first_line: 72,
    code_lines: 136,
    code_bytecode: 184,
    unicode_length: 16,
    unicode_state: 32,
    ascii_size: 48,
    compact_size: 72,
    bytes_size: 16,
    bytes_data: 32,
    ob_type: 8,
    tp_name: 24,
    long_size: 16,
    long_digit: 24,
    long_has_tag: false,
};

const PYTHON_3_12: Offsets = Offsets {
    threads_head: 72,
    gil: Gil::OfInterpreter(384),
    native_thread_id: 144,
    to_frame: ToFrame::CFrame(56, 0),
    frame_code: 0,
    frame_previous: 8,
    frame_owner: 70,
    code_first_line: 68,
    code_bytecode: 192,
    ascii_size: 40,
    compact_size: 56,
    long_has_tag: true,
    ..PYTHON_3_11
};

impl Offsets {
    /// Those of a process's Python, and its version.
    pub(super) fn of(reader: &Reader<'_>, runtime: Runtime) -> Result<(Self, Version), FramesError> {
        let mut words = [0; WORDS * 8];
        let begins = reader.bytes(runtime.address, 0, &mut words).is_ok() && words.starts_with(COOKIE);
        if begins {
            let words: [u64; WORDS] = std::array::from_fn(|at| word_in(&words, at as u64 * 8));
            let version = Version::of_hex(u32::try_from(words[1]).unwrap_or(u32::MAX));
            let form = form_of(version).ok_or(FramesError::UnknownVersion(version))?;
            return Ok((form.offsets(&words).ok_or(FramesError::Nonsense(version))?, version));
        }
        match runtime.version.ok_or(FramesError::NoVersion)? {
            version @ Version { major: 3, minor: 11 } => Ok((PYTHON_3_11, version)),
            version @ Version { major: 3, minor: 12 } => Ok((PYTHON_3_12, version)),
            version @ Version { major: 3, minor: 13..=15 } => Err(FramesError::Nonsense(version)),
            version => Err(FramesError::UnknownVersion(version)),
        }
    }
}

const COOKIE: &[u8] = b"xdebugpy";
/// How many words are read. The longest form has fewer.
const WORDS: usize = 112;

/// How many words each part of `_Py_DebugOffsets` has, of those parts that differ between releases.
#[derive(Clone, Copy, Debug)]
struct Form {
    /// Whether `threads_main` stands behind `threads_head`.
    threads_main: bool,
    interpreter: usize,
    thread: usize,
    /// How many words stand between `current_frame` and `thread_id`.
    before_thread_id: usize,
    /// How many words describe an exception.
    exception: usize,
    frame: usize,
    code: usize,
    kind: usize,
    /// How many words describe a class.
    class: usize,
    /// Whether sets are described.
    sets: bool,
}

const FORM_3_13: Form = Form {
    threads_main: false,
    interpreter: 13,
    thread: 9,
    before_thread_id: 0,
    exception: 0,
    frame: 6,
    code: 10,
    kind: 4,
    class: 0,
    sets: false,
};
const FORM_3_14: Form = Form { threads_main: true, interpreter: 16, frame: 8, code: 11, sets: true, ..FORM_3_13 };
const FORM_3_15: Form = Form { thread: 16, before_thread_id: 3, exception: 1, kind: 6, class: 2, ..FORM_3_14 };

fn form_of(version: Version) -> Option<Form> {
    match version {
        Version { major: 3, minor: 13 } => Some(FORM_3_13),
        Version { major: 3, minor: 14 } => Some(FORM_3_14),
        Version { major: 3, minor: 15 } => Some(FORM_3_15),
        _ => None,
    }
}

/// One part of `_Py_DebugOffsets`: a structure's size, and offsets in it.
struct Part<'a> {
    words: &'a [u64],
    largest: u64,
}

impl Part<'_> {
    fn size(&self) -> Option<u64> {
        self.words.first().copied().filter(|size| (8..=self.largest).contains(size))
    }

    /// An offset of a field of so many bytes, aligned, inside of the structure.
    fn at(&self, index: usize, bytes: u64) -> Option<u64> {
        let (size, offset) = (self.size()?, *self.words.get(index)?);
        (offset.is_multiple_of(bytes) && offset.checked_add(bytes)? <= size).then_some(offset)
    }
}

/// Largest structures that are believed.
const LARGEST: usize = 64 << 20;
/// Largest frames and code objects. They are read as a whole.
pub(super) const LARGEST_FRAME: usize = 256;
pub(super) const LARGEST_CODE: usize = 512;

impl Form {
    /// The offsets, if all that the words say in this form fits together.
    fn offsets(&self, words: &[u64; WORDS]) -> Option<Offsets> {
        let free_threaded = match words[2] {
            0 => false,
            1 => true,
            _ => return None,
        };
        let mut rest = &words[3..];
        let mut part = |length: usize, largest: usize| {
            let (words, behind) = rest.split_at_checked(length)?;
            rest = behind;
            Some(Part { words, largest: largest as u64 })
        };
        let runtime = part(3, LARGEST)?;
        let interpreter = part(self.interpreter, LARGEST)?;
        let thread = part(self.thread, LARGEST)?;
        part(self.exception, LARGEST)?;
        let frame = part(self.frame, LARGEST_FRAME)?;
        let code = part(self.code, LARGEST_CODE)?;
        let objects = [part(2, 64)?, part(self.kind, 4096)?];
        part(self.class, 4096)?;
        part(3 + 3 + if self.sets { 4 } else { 0 } + 3 + 2, 4096)?;
        let [object, kind] = objects;
        let (long, bytes, unicode) = (part(3, 64)?, part(3, 128)?, part(4, 256)?);

        // The head of every object is known, so what stands behind it is, too.
        let head = object.size()?;
        let ob_type = object.at(1, 8)?;
        let size_of_str = *unicode.words.get(3)?;
        let fits = head == if free_threaded { 32 } else { 16 }
            && ob_type + 8 == head
            && kind.at(1, 8)? == head + 8
            && (long.at(1, 8)?, long.at(2, 4)?) == (head, head + 8)
            && (bytes.at(1, 8)?, bytes.at(2, 1)?) == (head, head + 16)
            && (unicode.at(2, 8)?, unicode.at(1, 4)?, size_of_str) == (head, head + 16, head + 24);
        if !fits {
            return None;
        }
        let behind_threads = 4 + usize::from(self.threads_main);
        let gil = interpreter.at(behind_threads + 5, 8)?;
        let locked = interpreter.at(behind_threads + 7, 4)?.checked_sub(gil)?;
        let holder = interpreter.at(behind_threads + 8, 8)?.checked_sub(gil)?;
        let copies = if free_threaded && self.frame > 7 { Some((frame.at(7, 4)?, code.at(10, 8)?)) } else { None };
        Some(Offsets {
            interpreters_head: runtime.at(2, 8)?,
            interpreter_next: interpreter.at(2, 8)?,
            threads_head: interpreter.at(3, 8)?,
            gil: Gil::OfInterpreter(interpreter.at(behind_threads + 4, 8)?),
            gil_enabled: free_threaded.then_some(*interpreter.words.get(behind_threads + 6)?).filter(|at| *at < 4096),
            gil_locked: locked,
            gil_holder: holder,
            thread_next: thread.at(2, 8)?,
            to_frame: ToFrame::Current(thread.at(4, 8)?),
            native_thread_id: thread.at(6 + self.before_thread_id, 8)?,
            frame_previous: frame.at(1, 8)?,
            frame_code: frame.at(2, 8)?,
            frame_instruction: frame.at(3, 8)?,
            frame_locals: frame.words.get(4).copied().filter(|at| *at <= LARGEST_FRAME as u64)?,
            frame_owner: frame.at(5, 1)?,
            copies,
            code_file: code.at(1, 8)?,
            code_qualname: code.at(3, 8)?,
            code_lines: code.at(4, 8)?,
            code_first_line: code.at(5, 4)?,
            code_bytecode: code.at(9, 1)?,
            unicode_length: head,
            unicode_state: head + 16,
            ascii_size: size_of_str,
            compact_size: size_of_str + 16,
            bytes_size: head,
            bytes_data: head + 16,
            ob_type,
            tp_name: head + 8,
            long_size: head,
            long_digit: head + 8,
            long_has_tag: true,
        })
    }
}

impl Offsets {
    /// How many bytes of a frame are read.
    pub(super) fn frame_end(&self) -> usize {
        let copy = self.copies.map_or(0, |(copy, _)| copy + 4);
        let ends =
            [self.frame_code + 8, self.frame_previous + 8, self.frame_instruction + 8, self.frame_owner + 1, copy];
        end(&ends, LARGEST_FRAME)
    }

    /// How many bytes of a code object are read.
    pub(super) fn code_end(&self) -> usize {
        let ends = [self.code_file + 8, self.code_qualname + 8, self.code_lines + 8, self.code_first_line + 4];
        end(&ends, LARGEST_CODE)
    }
}

fn end(ends: &[u64], largest: usize) -> usize {
    ends.iter().max().and_then(|end| usize::try_from(*end).ok()).map_or(largest, |end| end.min(largest))
}
