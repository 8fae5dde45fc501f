//! From `_PyRuntime` over interpreters and threads to frames.

use std::collections::HashMap;

use super::lines::line;
use super::objects::{rank, text};
use super::offsets::{Gil, LARGEST_CODE, LARGEST_FRAME, Offsets, ToFrame};
use super::reader::{Reader, half_in, word_in};
use super::{
    FRAME_LIMIT, Frame, FramesError, Memory, Peer, Runtime, Stacks, THREAD_LIMIT, Thread, UNKNOWN, Unreadable, Version,
};

/// Most interpreters of a process that are looked at. A worker has one.
const INTERPRETER_LIMIT: usize = 16;
/// Most threads of an interpreter that are listed. The main thread is the last in the list.
const LISTED_LIMIT: usize = 1024;
/// How often a thread's frames are read if they change while they are.
const TRIES: usize = 16;
/// A frame with a higher owner belongs to the interpreter and is no call of a Python function.
const OWNERS: u8 = 3;
/// Bits of a reference to a code object that are flags from 3.14 on.
const FLAGS: u64 = 7;
/// Where the functions that name a peer are, and which of their arguments do: a rank of the world, and a rank of the group.
const PEERS_FILE: &str = "torch/distributed/distributed_c10d.py";
const RANK_ARGUMENT: u64 = 1;
const GROUP_RANK_ARGUMENT: u64 = 4;

/// A look at one process.
pub(super) struct Walk<'a> {
    reader: Reader<'a>,
    offsets: Offsets,
    version: Version,
    runtime: u64,
    /// Code objects that were read already: their function, file, table of lines, and first line.
    codes: HashMap<u64, Option<Code>>,
    cut: bool,
}

#[derive(Clone)]
struct Code {
    function: String,
    file: String,
    first: i32,
    lines: u64,
    lines_size: u64,
}

/// A thread's state: the structure's address, the kernel's number, and the innermost frame.
#[derive(Clone, Copy)]
struct State {
    address: u64,
    tid: u64,
    holds_gil: Option<bool>,
    /// The oldest thread of the first interpreter.
    oldest: bool,
}

/// A frame as it stands in memory.
struct Raw {
    address: u64,
    code: u64,
    instruction: u64,
    owner: u8,
    copy: u32,
}

impl<'a> Walk<'a> {
    pub(super) fn of(memory: &'a dyn Memory, runtime: Runtime) -> Result<Self, FramesError> {
        let reader = Reader::new(memory);
        let (offsets, version) = Offsets::of(&reader, runtime)?;
        Ok(Self { reader, offsets, version, runtime: runtime.address, codes: HashMap::new(), cut: false })
    }

    pub(super) fn stacks(mut self, pid: u32) -> Result<Stacks, FramesError> {
        let mut states = self.states()?;
        // A child of a fork may still have its parent's number of the main thread, and a container numbers differently.
        let main = states.iter().position(|state| state.tid == u64::from(pid));
        if let Some(main) = main.or_else(|| states.iter().position(|state| state.oldest)) {
            states[..=main].rotate_right(1);
        }
        self.cut |= states.len() > THREAD_LIMIT;
        states.truncate(THREAD_LIMIT);
        let mut threads = Vec::new();
        for (at, state) in states.into_iter().enumerate() {
            let (frames, cut) = self.frames(&state);
            threads.push(Thread { tid: state.tid, main: at == 0, holds_gil: state.holds_gil, frames, cut });
        }
        Ok(Stacks { version: self.version, threads, cut: self.cut || self.reader.is_used_up() })
    }

    /// All threads, in the interpreters' order: newest first.
    fn states(&mut self) -> Result<Vec<State>, FramesError> {
        let first = self.reader.word(self.runtime, self.offsets.interpreters_head);
        let (mut interpreter, mut seen) = (first.unwrap_or(0), Vec::new());
        let mut states = Vec::new();
        while interpreter != 0 {
            if seen.contains(&interpreter) || seen.len() == INTERPRETER_LIMIT {
                self.cut = true;
                break;
            }
            seen.push(interpreter);
            if self.threads(interpreter, &mut states).is_err() {
                self.cut = true;
            }
            let Ok(next) = self.reader.word(interpreter, self.offsets.interpreter_next) else { break };
            interpreter = next;
        }
        if let Some(oldest) = states.last_mut() {
            oldest.oldest = true;
        }
        if states.is_empty() { Err(FramesError::NoInterpreter) } else { Ok(states) }
    }

    fn threads(&mut self, interpreter: u64, states: &mut Vec<State>) -> Result<(), Unreadable> {
        let holder = self.gil_holder(interpreter);
        let mut thread = self.reader.word(interpreter, self.offsets.threads_head)?;
        let before = states.len();
        while thread != 0 {
            if states.len() - before == LISTED_LIMIT || states[before..].iter().any(|state| state.address == thread) {
                self.cut = true;
                break;
            }
            let tid = self.reader.word(thread, self.offsets.native_thread_id)?;
            let holds_gil = holder.map(|holder| holder == Some(thread));
            states.push(State { address: thread, tid, holds_gil, oldest: false });
            thread = self.reader.word(thread, self.offsets.thread_next)?;
        }
        Ok(())
    }

    /// The state of the thread that holds an interpreter's GIL, if one does. `None`: there is no GIL, or it cannot be read.
    fn gil_holder(&self, interpreter: u64) -> Option<Option<u64>> {
        let gil = match self.offsets.gil {
            Gil::InRuntime(at) => self.runtime.checked_add(at)?,
            Gil::OfInterpreter(at) => self.reader.word(interpreter, at).ok()?,
        };
        if let Some(enabled) = self.offsets.gil_enabled
            && self.reader.half(gil, enabled).ok()? == 0
        {
            return None;
        }
        let locked = self.reader.half(gil, self.offsets.gil_locked).ok()?;
        let holder = self.reader.word(gil, self.offsets.gil_holder).ok()?;
        Some((locked == 1).then_some(holder))
    }

    /// A thread's frames, and whether some are missing. A thread that runs changes them, and is read again then.
    fn frames(&mut self, state: &State) -> (Vec<Frame>, bool) {
        let mut best = (Vec::new(), true);
        for at in 0..TRIES {
            // While Python enters its evaluation loop, there is no innermost frame yet. It may be suspended just then.
            let (raw, whole) = self.chain(state.address, at == TRIES - 1);
            let deep = raw.len() >= FRAME_LIMIT;
            if !whole && !deep && raw.len() <= best.0.len() {
                continue;
            }
            let frames: Vec<_> = raw.iter().filter_map(|raw| self.frame(raw)).collect();
            let sound = frames.iter().all(|frame| frame.function != UNKNOWN);
            if sound && (whole || deep) {
                return (frames, !whole || at == TRIES - 1);
            }
            if frames.len() >= best.0.len() {
                best = (frames, true);
            }
        }
        best
    }

    /// The frames as they stand in memory, quickly, and whether they go on to the outermost one. `outer`: those of the evaluation loop
    /// around the innermost one, where Python has such.
    fn chain(&self, thread: u64, outer: bool) -> (Vec<Raw>, bool) {
        let innermost = match self.offsets.to_frame {
            ToFrame::Current(at) => self.reader.word(thread, at),
            ToFrame::CFrame(at, within) => self.reader.word(thread, at).and_then(|cframe| {
                let cframe = if outer { self.reader.word(cframe, within + 8)? } else { cframe };
                self.reader.word(cframe, within)
            }),
        };
        let Ok(mut address) = innermost else { return (Vec::new(), false) };
        let mut raw: Vec<Raw> = Vec::new();
        while address != 0 {
            let mut bytes = [0; LARGEST_FRAME];
            let bytes = &mut bytes[..self.offsets.frame_end()];
            let again = raw.iter().any(|frame| frame.address == address);
            if raw.len() == FRAME_LIMIT || again || self.reader.bytes(address, 0, bytes).is_err() {
                return (raw, false);
            }
            raw.push(Raw {
                address,
                code: word_in(bytes, self.offsets.frame_code) & !FLAGS,
                instruction: word_in(bytes, self.offsets.frame_instruction),
                owner: usize::try_from(self.offsets.frame_owner)
                    .ok()
                    .and_then(|at| bytes.get(at))
                    .copied()
                    .unwrap_or(OWNERS),
                copy: self.offsets.copies.map_or(0, |(at, _)| half_in(bytes, at)),
            });
            address = word_in(bytes, self.offsets.frame_previous);
        }
        (raw, true)
    }

    /// A call of a Python function. `None` for a frame of the interpreter's own.
    fn frame(&mut self, raw: &Raw) -> Option<Frame> {
        if raw.owner >= OWNERS {
            return None;
        }
        let Some(code) = self.code(raw.code) else {
            return Some(Frame { function: UNKNOWN.to_owned(), file: UNKNOWN.to_owned(), line: None, peer: None });
        };
        let line = self.bytecode(raw).and_then(|begin| {
            let offset = raw.instruction.wrapping_sub(begin).cast_signed();
            line(&self.reader, code.lines, code.lines_size, code.first, offset)
        });
        let peer = self.peer(raw, &code);
        Some(Frame { function: code.function, file: code.file, line, peer })
    }

    fn code(&mut self, address: u64) -> Option<Code> {
        if let Some(known) = self.codes.get(&address) {
            return known.clone();
        }
        let code = self.read_code(address);
        self.codes.insert(address, code.clone());
        code
    }

    fn read_code(&self, address: u64) -> Option<Code> {
        let offsets = &self.offsets;
        let mut bytes = [0; LARGEST_CODE];
        let bytes = &mut bytes[..offsets.code_end()];
        self.reader.bytes(address, 0, bytes).ok()?;
        let function = text(&self.reader, offsets, word_in(bytes, offsets.code_qualname));
        let file = text(&self.reader, offsets, word_in(bytes, offsets.code_file));
        if function == UNKNOWN && file == UNKNOWN {
            return None;
        }
        let lines = word_in(bytes, offsets.code_lines);
        let lines_size = self.reader.word(lines, offsets.bytes_size).unwrap_or(0);
        let lines = lines.wrapping_add(offsets.bytes_data);
        Some(Code { function, file, first: half_in(bytes, offsets.code_first_line).cast_signed(), lines, lines_size })
    }

    /// Where the bytecode begins that a frame runs.
    fn bytecode(&self, raw: &Raw) -> Option<u64> {
        match self.offsets.copies {
            Some((_, list)) if raw.copy != 0 => {
                // The list begins with its length.
                let list = self.reader.word(raw.code, list).ok()?;
                self.reader.word(list, 8 * (u64::from(raw.copy) + 1)).ok()
            }
            _ => raw.code.checked_add(self.offsets.code_bytecode),
        }
    }

    /// The rank with which a call of `send` or `recv` communicates.
    fn peer(&self, raw: &Raw, code: &Code) -> Option<Peer> {
        if !matches!(&*code.function, "send" | "recv") || !code.file.ends_with(PEERS_FILE) {
            return None;
        }
        let argument = |number: u64| {
            let value = self.reader.word(raw.address, self.offsets.frame_locals + 8 * number).ok()?;
            rank(&self.reader, &self.offsets, value)
        };
        argument(RANK_ARGUMENT).map(Peer::Rank).or_else(|| argument(GROUP_RANK_ARGUMENT).map(Peer::GroupRank))
    }
}
