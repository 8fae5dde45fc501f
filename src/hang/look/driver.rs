//! Looks at live processes: `/proc` first, then frames, then the children of a thread that waits for data workers.
//!
//! The reads may hang for ever: of `/proc/PID` if the process's memory is locked, of memory whose file is on a dead file system. So a look
//! is taken [`within`] a limit, on a dedicated thread that is given up if it hangs.

use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::time::Duration;

use thiserror::Error;
use tokio::sync::oneshot;

use super::calls::{HERE, Operand};
use super::texts::{self, At, Referred};
use super::{CHILD_LIMIT, Look, THREAD_LIMIT, Usage};
use crate::hang::frames::process::{Process, Refusal};
use crate::hang::frames::{Frame, Memory, Runtime, Stacks};
use crate::hang::view::{Call, DATA_LOADER, DATA_WORKER, is_pythons};
use crate::threads;

/// Most bytes of a file of `/proc` that are read.
const FILE_LIMIT_BYTES: u64 = 1 << 20;
/// Longest path in a process's memory that is read.
const PATH_LIMIT_BYTES: usize = 256;
/// Most children of a process whose frames are read.
const CHILD_FRAMES_LIMIT: usize = 64;
/// Most looks that hang at the same time. Further ones are refused.
const HANGING_LIMIT: usize = 64;

/// A process as it was seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// What the kernel knows of it.
    pub look: Look,
    /// Its frames, or why they could not be read.
    pub stacks: Result<Stacks, Refusal>,
    /// Its children, if its main thread waits for data workers.
    pub children: Vec<Child>,
}

/// A child of a process that waits for data workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Child {
    /// What the kernel knows of it.
    pub look: Look,
    /// Its frames.
    pub stacks: Stacks,
}

/// Look at a process, and at the data workers that it waits for. May hang: call it [`within`] a limit.
///
/// # Errors
/// It has ended.
pub fn seen(process: &Process, runtime: Option<Runtime>) -> Result<Seen, Refusal> {
    let look = look(process)?;
    let stacks = process.stacks(runtime);
    if let Err(Refusal::Ended(pid)) = stacks {
        return Err(Refusal::Ended(pid));
    }
    let main = stacks.as_ref().ok().and_then(Stacks::main);
    let mut children = Vec::new();
    if main.is_some_and(|main| waits_for_data(&main.frames)) {
        for pid in look.children.iter().take(CHILD_FRAMES_LIMIT) {
            let Ok(process) = Process::open(*pid) else { continue };
            let Ok(look) = self::look(&process) else { continue };
            // A forked child has its Python where its parent has it. One that was spawned has its own.
            let stacks = process.stacks(runtime).or_else(|_| process.stacks(None));
            if let Some(stacks) = stacks.ok().filter(loads_data) {
                children.push(Child { look, stacks });
            }
        }
    }
    Ok(Seen { look, stacks, children })
}

/// Whether a process runs torch's loop of data workers. A rank may have started other processes too.
fn loads_data(stacks: &Stacks) -> bool {
    stacks.main().is_some_and(|main| main.frames.iter().any(|frame| frame.file.ends_with(DATA_WORKER)))
}

/// Whether a thread waits for data workers: its innermost frame outside of the standard library is in torch's data loader.
fn waits_for_data(frames: &[Frame]) -> bool {
    frames.iter().find(|frame| !is_pythons(&frame.file)).is_some_and(|frame| frame.file.ends_with(DATA_LOADER))
}

/// What the kernel knows of a process. What cannot be read is left out. May hang: call it [`within`] a limit.
///
/// # Errors
/// It has ended.
pub fn look(process: &Process) -> Result<Look, Refusal> {
    let pid = process.pid();
    let folder = format!("/proc/{pid}");
    let stat = text(&format!("{folder}/stat")).ok_or(Refusal::Ended(pid))?;
    let (state, name) = texts::state_and_name(&stat).ok_or(Refusal::Ended(pid))?;
    let call = call(process, &folder);
    let kernel_function = text(&format!("{folder}/wchan")).and_then(|wchan| texts::kernel_function(&wchan));
    let (mut usage, mut children) = (Vec::new(), Vec::new());
    let tasks = fs::read_dir(format!("{folder}/task")).into_iter().flatten().flatten().take(THREAD_LIMIT);
    for task in tasks {
        let Some(tid) = task.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let file = |name: &str| text(&format!("{folder}/task/{tid}/{name}"));
        let runnable = file("schedstat").and_then(|text| texts::runnable(&text)).unwrap_or_default();
        let bytes = file("io").and_then(|text| texts::bytes(&text)).unwrap_or_default();
        usage.push(Usage { tid, runnable, bytes });
        let of_thread = file("children").unwrap_or_default();
        let room = CHILD_LIMIT - children.len();
        children.extend(of_thread.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()).take(room));
    }
    // The number may have been another process's by now.
    if !process.is_alive() {
        return Err(Refusal::Ended(pid));
    }
    Ok(Look { pid, name, state, call, kernel_function, usage, children })
}

/// The call in which the main thread stands.
fn call(process: &Process, folder: &str) -> Option<Call> {
    let at = text(&format!("{folder}/syscall")).and_then(|text| texts::at(&text))?;
    let arguments = if let At::Call(_, arguments) = at { arguments } else { [0; 6] };
    let operand = texts::operand(HERE, &at);
    let fd = match operand {
        Operand::Fd(argument) => Some(arguments[argument]),
        Operand::Polled if arguments[1] == 1 => {
            let mut fd = [0; 4];
            process.read(arguments[0], &mut fd).ok().map(|()| u64::from(u32::from_ne_bytes(fd)))
        }
        Operand::Selected if arguments[0] == 1 => Some(0),
        _ => None,
    };
    let referred = match (operand, fd) {
        // Only the lower half of the register is the number.
        (_, Some(fd)) => file(process, folder, fd & u64::from(u32::MAX)),
        (Operand::Path(argument), _) => path(process, arguments[argument]).map_or(Referred::Nothing, Referred::Path),
        _ => Referred::Nothing,
    };
    texts::call(HERE, &at, &referred)
}

/// A file that a process has open. Its file system is not asked.
fn file(process: &Process, folder: &str, fd: u64) -> Referred {
    let link = fs::read_link(format!("{folder}/fd/{fd}")).ok().map(|link| link.to_string_lossy().into_owned());
    let is_path = link.as_deref().is_some_and(|link| link.starts_with('/'));
    let mount =
        if is_path { text(&format!("{folder}/fdinfo/{fd}")).and_then(|text| texts::mount_of(&text)) } else { None };
    let file_system =
        mount.and_then(|mount| texts::file_system(&text(&format!("/proc/{}/mountinfo", process.pid()))?, mount));
    Referred::File(fd, link, file_system)
}

/// A path in a process's memory. What is read may end with the page.
fn path(process: &Process, address: u64) -> Option<String> {
    const PAGE: u64 = 4096;
    let mut bytes = [0; PATH_LIMIT_BYTES];
    let here = usize::try_from(PAGE - address % PAGE).unwrap_or(PATH_LIMIT_BYTES).min(PATH_LIMIT_BYTES);
    if process.read(address, &mut bytes).is_err() {
        process.read(address, &mut bytes[..here]).ok()?;
    }
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(PATH_LIMIT_BYTES);
    Some(String::from_utf8_lossy(&bytes[..end]).into_owned())
}

fn text(path: &str) -> Option<String> {
    let mut bytes = Vec::new();
    File::open(Path::new(path)).ok()?.take(FILE_LIMIT_BYTES).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Why there is no answer.
#[derive(Debug, Error)]
pub enum NoAnswer {
    /// It took too long, and its thread was given up.
    #[error("no answer within {0:?}: it hangs in the kernel")]
    Hangs(Duration),
    /// Too many others hang already.
    #[error("{0} earlier looks hang in the kernel, so no further one is begun")]
    TooManyHang(usize),
    /// The system has no further thread.
    #[error("no thread could be started: {0}")]
    NoThread(std::io::Error),
}

static GIVEN_UP: AtomicUsize = AtomicUsize::new(0);
const RUNS: u8 = 0;
const DONE: u8 = 1;
const ABANDONED: u8 = 2;

/// How many pieces of work were given up and still hang.
pub fn hanging() -> usize {
    GIVEN_UP.load(Ordering::Relaxed)
}

/// Do work that may hang on a dedicated thread, and wait for it so long.
///
/// # Errors
/// It has not ended by then, or was not begun.
pub async fn within<T: Send + 'static>(
    limit: Duration,
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, NoAnswer> {
    let before = hanging();
    if before >= HANGING_LIMIT {
        return Err(NoAnswer::TooManyHang(before));
    }
    let state = Arc::new(AtomicU8::new(RUNS));
    let (sender, done) = oneshot::channel();
    let of_thread = Arc::clone(&state);
    let run = move || {
        let counted = Counted(of_thread);
        let answer = work();
        drop(counted);
        // The caller may have stopped waiting.
        drop(sender.send(answer));
    };
    threads::spawn(name.to_owned(), run).map_err(NoAnswer::NoThread)?;
    match tokio::time::timeout(limit, done).await {
        Ok(Ok(answer)) => Ok(answer),
        // A panic has been printed by the thread.
        Ok(Err(_)) => Err(NoAnswer::NoThread(ErrorKind::Other.into())),
        Err(_) => {
            // Before the thread may take it back.
            GIVEN_UP.fetch_add(1, Ordering::Relaxed);
            if state.compare_exchange(RUNS, ABANDONED, Ordering::Relaxed, Ordering::Relaxed).is_err() {
                GIVEN_UP.fetch_sub(1, Ordering::Relaxed);
            }
            Err(NoAnswer::Hangs(limit))
        }
    }
}

/// Ends with the work.
struct Counted(Arc<AtomicU8>);

impl Drop for Counted {
    fn drop(&mut self) {
        if self.0.swap(DONE, Ordering::Relaxed) == ABANDONED {
            GIVEN_UP.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
