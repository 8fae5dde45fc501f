//! Frames in made-up memory: each form of Python, and memory that lies.

use std::cell::Cell;

use proptest::prelude::*;

use super::offsets::{Gil, Offsets, ToFrame};
use super::reader::Reader;
use super::*;

const BASE: u64 = 0x10_0000;

/// Memory that is written by tests.
#[derive(Default)]
struct Image {
    bytes: Vec<u8>,
    reads: Cell<u32>,
}

impl Memory for Image {
    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        self.reads.set(self.reads.get() + 1);
        let at = usize::try_from(address.checked_sub(BASE).ok_or(Unreadable)?).map_err(|_| Unreadable)?;
        into.copy_from_slice(self.bytes.get(at..).and_then(|bytes| bytes.get(..into.len())).ok_or(Unreadable)?);
        Ok(())
    }
}

impl Image {
    fn room(&mut self, bytes: usize) -> u64 {
        let at = self.bytes.len().next_multiple_of(16);
        self.bytes.resize(at + bytes, 0);
        BASE + at as u64
    }

    fn put(&mut self, address: u64, bytes: &[u8]) {
        let at = (address - BASE) as usize;
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn word(&mut self, address: u64, word: u64) {
        self.put(address, &word.to_ne_bytes());
    }

    /// A `str` as Python stores it. `shift`: where the bits of its kind begin.
    fn text(&mut self, offsets: &Offsets, text: &str, shift: u32) -> u64 {
        let widest = text.chars().map(u32::from).max().unwrap_or(0);
        let (kind, ascii) = match widest {
            0..128 => (1, 1),
            128..256 => (1, 0),
            256..65_536 => (2, 0),
            _ => (4, 0),
        };
        let data = if ascii == 1 { offsets.ascii_size } else { offsets.compact_size };
        let units: Vec<u8> = text.chars().flat_map(|c| u32::from(c).to_ne_bytes()[..kind as usize].to_vec()).collect();
        let address = self.room(data as usize + units.len() + 8);
        self.word(address + offsets.unicode_length, text.chars().count() as u64);
        let state: u32 = kind << shift | 1 << (shift + 3) | ascii << (shift + 4) | 2;
        self.put(address + offsets.unicode_state, &state.to_ne_bytes());
        self.put(address + data, &units);
        address
    }

    /// A code object with this table of lines.
    fn code(&mut self, offsets: &Offsets, names: [u64; 2], first: i32, table: &[u8]) -> u64 {
        let lines = self.room(offsets.bytes_data as usize + table.len());
        self.word(lines + offsets.bytes_size, table.len() as u64);
        self.put(lines + offsets.bytes_data, table);
        let code = self.room(512);
        self.word(code + offsets.code_qualname, names[0]);
        self.word(code + offsets.code_file, names[1]);
        self.put(code + offsets.code_first_line, &first.to_ne_bytes());
        self.word(code + offsets.code_lines, lines);
        code
    }

    fn frame(&mut self, offsets: &Offsets, code: u64, instruction: u64, previous: u64) -> u64 {
        let frame = self.room(256);
        self.word(frame + offsets.frame_code, code);
        self.word(
            frame + offsets.frame_instruction,
            code.wrapping_add(offsets.code_bytecode).wrapping_add(instruction),
        );
        self.word(frame + offsets.frame_previous, previous);
        frame
    }

    fn thread(&mut self, offsets: &Offsets, tid: u64, frame: u64, next: u64) -> u64 {
        let thread = self.room(512);
        self.word(thread + offsets.native_thread_id, tid);
        self.word(thread + offsets.thread_next, next);
        match offsets.to_frame {
            ToFrame::Current(at) => self.word(thread + at, frame),
            ToFrame::CFrame(at, within) => {
                let cframe = self.room(64);
                self.word(thread + at, cframe);
                self.word(cframe + within, frame);
            }
        }
        thread
    }

    /// `_PyRuntime` with one interpreter, whose GIL a thread holds.
    fn runtime(&mut self, python: &Python, threads: u64, holder: u64) -> Runtime {
        let offsets = &python.offsets;
        let (runtime, interpreter, gil) = (self.room(1024), self.room(1024), self.room(64));
        for (at, word) in python.words.iter().enumerate() {
            self.word(runtime + 8 * at as u64, *word);
        }
        self.word(runtime + offsets.interpreters_head, interpreter);
        self.word(interpreter + offsets.threads_head, threads);
        let gil = match offsets.gil {
            Gil::InRuntime(at) => runtime + at,
            Gil::OfInterpreter(at) => {
                self.word(interpreter + at, gil);
                gil
            }
        };
        if let Some(enabled) = offsets.gil_enabled {
            self.put(gil + enabled, &1_u32.to_ne_bytes());
        }
        self.put(gil + offsets.gil_locked, &u32::from(holder != 0).to_ne_bytes());
        self.word(gil + offsets.gil_holder, holder);
        Runtime { address: runtime, version: Some(python.version) }
    }
}

/// A release, where its structures have what, and where the bits of a `str` begin.
struct Python {
    version: Version,
    offsets: Offsets,
    words: Vec<u64>,
    shift: u32,
}

/// The words of `_Py_DebugOffsets`.
fn described(minor: u8, free_threaded: bool) -> Vec<u64> {
    let of_3_15 = |words: &[u64]| if minor < 15 { Vec::new() } else { words.to_vec() };
    let head: u64 = if free_threaded { 32 } else { 16 };
    let cookie = u64::from_ne_bytes(*b"xdebugpy");
    let mut words = vec![cookie, u64::from(u32::from_be_bytes([3, minor, 0, 0xf0])), u64::from(free_threaded)];
    words.extend([283_320, 600, if minor == 13 { 632 } else { 960 }]);
    let threads: &[u64] = if minor == 13 { &[736] } else { &[736, 744] };
    words.extend([&[194_968, 100, 624], threads, &[1, 2, 3, 4, 640, 696, 24, 712, 704]].concat());
    words.extend(if minor == 13 { vec![] } else { vec![8, 8] });
    words.extend([304, 0, 8, 16, 72]);
    words.extend(of_3_15(&[80, 88, 96]));
    words.extend([152, 160, 208, 24]);
    words.extend(of_3_15(&[28, 32, 112, 120, 8]));
    words.extend([88, 8, 0, 56, 80, 74]);
    words.extend(if minor == 13 { vec![] } else { vec![64, 76] });
    words.extend([224, 112, 120, 128, 136, 68, 52, 96, 104, 208]);
    words.extend(if minor == 13 { vec![] } else { vec![200] });
    words.extend([head, head - 8, 416, head + 8, 88, 168]);
    words.extend(of_3_15(&[32, 288, 928, 880]));
    words.extend([32, 24, 16, 40, 24, 16]);
    words.extend(if minor == 13 { vec![] } else { vec![200, 24, 40, 32] });
    words.extend([48, 32, 40, 24, 16]);
    words.extend([head + 16, head, head + 8, head + 17, head, head + 16]);
    words.extend([head + 48, head + 16, head, head + 24, 300, 8]);
    words
}

fn python(minor: u8, free_threaded: bool, shift: u32) -> Python {
    let version = Version { major: 3, minor };
    let words = if minor < 13 { Vec::new() } else { described(minor, free_threaded) };
    let mut image = Image::default();
    let runtime = image.room(1024);
    for (at, word) in words.iter().enumerate() {
        image.word(runtime + 8 * at as u64, *word);
    }
    let (offsets, found) =
        Offsets::of(&Reader::new(&image), Runtime { address: runtime, version: Some(version) }).unwrap();
    assert_eq!(found, version);
    Python { version, offsets, words, shift }
}

fn pythons() -> Vec<Python> {
    vec![
        python(11, false, 2),
        python(12, false, 2),
        python(13, false, 2),
        python(13, true, 8),
        python(14, false, 16),
        python(14, true, 8),
        python(15, false, 16),
        python(15, true, 16),
    ]
}

/// Lines 7 (four bytes of code), then 9, then none.
const LINES: [u8; 8] = [0x80 | 10 << 3 | 1, 0, 0, 0x80 | 13 << 3, 4, 0x80 | 15 << 3, 0x80 | 11 << 3, 0];

/// Two threads: the main one in `inner` of `outer`, the other nowhere.
fn two_threads(image: &mut Image, python: &Python) -> Runtime {
    let offsets = &python.offsets;
    let file = image.text(offsets, "/u/é/训练.py", python.shift);
    let names = ["inner", "été", "训练.<locals>.f", "𐎠"].map(|name| image.text(offsets, name, python.shift));
    let mut previous = 0;
    for (at, name) in names.into_iter().enumerate().rev() {
        let code = image.code(offsets, [name, file], 7, &LINES);
        previous = image.frame(offsets, code, [0, 2, 4, 6][at], previous);
    }
    let shim = image.frame(offsets, 0, 0, previous);
    image.put(shim + offsets.frame_owner, &[3]);
    let main = image.thread(offsets, 100, shim, 0);
    let other = image.thread(offsets, 101, 0, main);
    image.runtime(python, other, main)
}

#[test]
fn names_lines_and_the_holder_of_the_gil_are_read_in_every_form() {
    for python in pythons() {
        let mut image = Image::default();
        let runtime = two_threads(&mut image, &python);
        let stacks = read(&image, 100, runtime).unwrap();
        assert_eq!((stacks.version, stacks.cut), (python.version, false));
        let threads: Vec<_> = stacks.threads.iter().map(|it| (it.tid, it.main, it.holds_gil, it.cut)).collect();
        assert_eq!(threads, [(100, true, Some(true), false), (101, false, Some(false), false)]);
        let frames: Vec<_> = stacks.threads[0].frames.iter().map(|frame| (&*frame.function, frame.line)).collect();
        let expected = [("inner", Some(7)), ("été", Some(7)), ("训练.<locals>.f", Some(9)), ("𐎠", None)];
        assert_eq!(frames, expected, "{}", python.version);
        assert!(stacks.threads[0].frames.iter().all(|frame| frame.file == "/u/é/训练.py"));
        // Without a main thread of that number it is the oldest one.
        assert_eq!(read(&image, 7, runtime).unwrap().threads[0].tid, 100);
    }
}

#[test]
fn a_free_threaded_build_has_copies_of_the_bytecode_and_no_gil() {
    let python = python(14, true, 8);
    let offsets = &python.offsets;
    let mut image = Image::default();
    let name = image.text(offsets, "f", 8);
    let code = image.code(offsets, [name, name], 7, &LINES);
    let (copies, bytecode) = (image.room(64), image.room(64));
    let (index, list) = offsets.copies.unwrap();
    image.word(code + list, copies);
    image.word(copies + 16, bytecode);
    let frame = image.frame(offsets, code, 0, 0);
    image.put(frame + index, &1_u32.to_ne_bytes());
    image.word(frame + offsets.frame_instruction, bytecode + 4);
    let thread = image.thread(offsets, 100, frame, 0);
    let runtime = image.runtime(&python, thread, thread);
    assert_eq!(read(&image, 100, runtime).unwrap().threads[0].frames[0].line, Some(9));
    assert_eq!(read(&image, 100, runtime).unwrap().threads[0].holds_gil, Some(true), "it has been switched on");
    let Gil::OfInterpreter(gil) = offsets.gil else { panic!("{offsets:?}") };
    let reader = Reader::new(&image);
    let gil = reader.word(reader.word(runtime.address, offsets.interpreters_head).unwrap(), gil).unwrap();
    image.put(gil + offsets.gil_enabled.unwrap(), &0_u32.to_ne_bytes());
    assert_eq!(read(&image, 100, runtime).unwrap().threads[0].holds_gil, None);
}

#[test]
fn the_peer_is_an_argument_of_send_or_recv() {
    for python in pythons() {
        let offsets = &python.offsets;
        let mut image = Image::default();
        let int = image.room(512);
        let name = image.room(8);
        image.put(name, b"int\0");
        image.word(int + offsets.tp_name, name);
        let number = |image: &mut Image, size: u64, digit: u32| {
            let number = image.room(64);
            image.word(number + offsets.ob_type, int);
            image.word(number + offsets.long_size, size);
            image.put(number + offsets.long_digit, &digit.to_ne_bytes());
            number
        };
        let one = if offsets.long_has_tag { 1 << 3 } else { 1 };
        let (five, zero) = (number(&mut image, one, 5), number(&mut image, offsets.long_has_tag.into(), 0));
        let negative = number(&mut image, if offsets.long_has_tag { 1 << 3 | 2 } else { u64::MAX }, 5);
        let none = image.room(64);
        let file = image.text(offsets, "/s/torch/distributed/distributed_c10d.py", python.shift);
        for (function, rank, group_rank, expected) in [
            ("recv", five, none, Some(Peer::Rank(5))),
            ("send", zero, none, Some(Peer::Rank(0))),
            ("send", five | 1, none, Some(Peer::Rank(5))),
            ("send", none, five, Some(Peer::GroupRank(5))),
            ("send", negative, none, None),
            ("broadcast", five, none, None),
        ] {
            let function = image.text(offsets, function, python.shift);
            let code = image.code(offsets, [function, file], 7, &LINES);
            let frame = image.frame(offsets, code, 0, 0);
            image.word(frame + offsets.frame_locals + 8, rank);
            image.word(frame + offsets.frame_locals + 32, group_rank);
            let thread = image.thread(offsets, 100, frame, 0);
            let runtime = image.runtime(&python, thread, thread);
            assert_eq!(read(&image, 100, runtime).unwrap().threads[0].frames[0].peer, expected, "{}", python.version);
        }
    }
}

#[test]
fn circles_end() {
    for python in pythons() {
        let offsets = &python.offsets;
        let mut image = Image::default();
        let name = image.text(offsets, "f", python.shift);
        let code = image.code(offsets, [name, name], 7, &LINES);
        let frame = image.frame(offsets, code, 0, 0);
        image.word(frame + offsets.frame_previous, frame);
        let thread = image.thread(offsets, 100, frame, 0);
        image.word(thread + offsets.thread_next, thread);
        let runtime = image.runtime(&python, thread, 0);
        let interpreter = Reader::new(&image).word(runtime.address, offsets.interpreters_head).unwrap();
        image.word(interpreter + offsets.interpreter_next, interpreter);
        let stacks = read(&image, 100, runtime).unwrap();
        assert_eq!((stacks.threads.len(), stacks.threads[0].frames.len()), (1, 1));
        assert!(stacks.cut && stacks.threads[0].cut);
    }
}

#[test]
fn what_lies_about_its_size_is_cut_or_unknown() {
    for python in pythons() {
        let offsets = &python.offsets;
        let mut image = Image::default();
        let long = image.text(offsets, &"long".repeat(2000), python.shift);
        for size in [u64::MAX, 1 << 62, 1 << 20] {
            let lies = image.text(offsets, "short", python.shift);
            image.word(lies + offsets.unicode_length, size);
            let code = image.code(offsets, [lies, long], 7, &LINES);
            let lines = Reader::new(&image).word(code, offsets.code_lines).unwrap();
            image.word(lines + offsets.bytes_size, size);
            let frame = image.frame(offsets, code, 4, 0);
            let thread = image.thread(offsets, 100, frame, 0);
            let runtime = image.runtime(&python, thread, 0);
            let stacks = read(&image, 100, runtime).unwrap();
            let frame = &stacks.threads[0].frames[0];
            assert!(frame.file.starts_with("longlong") && frame.file.len() <= NAME_LIMIT_BYTES, "{}", frame.file.len());
            assert!(frame.function.len() <= NAME_LIMIT_BYTES);
        }
    }
}

#[test]
fn reads_threads_and_frames_are_bounded() {
    for python in pythons() {
        let offsets = &python.offsets;
        let mut image = Image::default();
        let name = image.text(offsets, "f", python.shift);
        let code = image.code(offsets, [name, name], 7, &LINES);
        let mut frame = 0;
        for _ in 0..2000 {
            frame = image.frame(offsets, code, 0, frame);
        }
        let main = image.thread(offsets, 100, frame, 0);
        let mut thread = main;
        for tid in 0..900 {
            thread = image.thread(offsets, 1000 + tid, frame, thread);
        }
        let runtime = image.runtime(&python, thread, main);
        let stacks = read(&image, 100, runtime).unwrap();
        assert_eq!((stacks.threads.len(), stacks.cut), (THREAD_LIMIT, true));
        assert_eq!(image.reads.get(), READ_LIMIT);
        let main = &stacks.threads[0];
        assert_eq!((main.tid, main.holds_gil, main.frames.len(), main.cut), (100, Some(true), FRAME_LIMIT, true));
    }
}

#[test]
fn an_unknown_python_is_an_error_that_says_what_to_do() {
    let mut image = Image::default();
    let runtime = image.room(2048);
    let at = |version| Runtime { address: runtime, version };
    let version = |minor| Version { major: 3, minor };
    assert_eq!(read(&image, 1, at(None)), Err(FramesError::NoVersion));
    assert_eq!(read(&image, 1, at(Some(version(10)))), Err(FramesError::UnknownVersion(version(10))));
    assert_eq!(read(&image, 1, at(Some(version(13)))), Err(FramesError::Nonsense(version(13))));
    assert_eq!(read(&image, 1, at(Some(version(11)))), Err(FramesError::NoInterpreter));
    for (minor, described_as, expected) in [
        (16, 14, Err(FramesError::UnknownVersion(version(16)))),
        (14, 13, Err(FramesError::Nonsense(version(14)))),
        (13, 14, Err(FramesError::Nonsense(version(13)))),
        (14, 14, Err(FramesError::NoInterpreter)),
    ] {
        let mut words = described(described_as, false);
        words[1] = u64::from(u32::from_be_bytes([3, minor, 0, 0xf0]));
        for (index, word) in words.iter().enumerate() {
            image.word(runtime + 8 * index as u64, *word);
        }
        assert_eq!(read(&image, 1, at(None)), expected, "3.{minor} described as 3.{described_as}");
    }
    assert!(FramesError::UnknownVersion(version(16)).to_string().contains("install py-spy"));
}

/// Memory that goes on for ever: these bytes again and again.
struct Endless(Vec<u8>, Cell<u32>);

impl Memory for Endless {
    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        self.1.set(self.1.get() + 1);
        if address % 7 == 6 || self.0.is_empty() {
            return Err(Unreadable);
        }
        let from = (address % self.0.len() as u64) as usize;
        for (byte, value) in into.iter_mut().zip(self.0[from..].iter().chain(self.0.iter().cycle())) {
            *byte = *value;
        }
        Ok(())
    }
}

fn bounded(memory: &dyn Memory, runtime: Runtime) {
    let Ok(stacks) = read(memory, 100, runtime) else { return };
    assert!(stacks.threads.len() <= THREAD_LIMIT);
    for frame in stacks.threads.iter().inspect(|it| assert!(it.frames.len() <= FRAME_LIMIT)).flat_map(|it| &it.frames) {
        assert!(frame.function.len() <= NAME_LIMIT_BYTES && frame.file.len() <= NAME_LIMIT_BYTES);
        assert!(!frame.function.contains('\n'));
    }
}

proptest! {
    #[test]
    fn random_memory_is_read_within_all_bounds(bytes in prop::collection::vec(any::<u8>(), 0..2000), minor in 10..17_u8, address: u64) {
        let memory = Endless(bytes, Cell::new(0));
        let version = Some(Version { major: 3, minor });
        bounded(&memory, Runtime { address, version });
        bounded(&memory, Runtime { address: 0x10_0000, version });
        prop_assert!(memory.1.get() <= 2 * READ_LIMIT);
    }

    #[test]
    fn memory_that_was_changed_anywhere_is_read_within_all_bounds(
        form in any::<prop::sample::Index>(), changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u64>(), any::<bool>()), 1..40),
    ) {
        let pythons = pythons();
        let python = form.get(&pythons);
        let mut image = Image::default();
        let runtime = two_threads(&mut image, python);
        for (at, word, points) in changes {
            let at = BASE + (at.index(image.bytes.len() - 8) / 8 * 8) as u64;
            let inside = BASE + word % image.bytes.len() as u64 / 8 * 8;
            image.word(at, if points { inside } else { word });
        }
        bounded(&image, runtime);
        prop_assert!(image.reads.get() <= READ_LIMIT);
    }
}
