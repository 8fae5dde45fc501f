//! Frames of real Python processes. Each Python that is found here is read: the one that the tests have, and those of pyenv.

mod torch;

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use elastic_rs::hang::frames::process::{Process, Refusal};
use elastic_rs::hang::frames::{FRAME_LIMIT, NAME_LIMIT_BYTES, Runtime, Stacks, THREAD_LIMIT, Thread, Version, find};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

use crate::LIMIT;

/// Reads of a process whose frames change: of the tests' own Python, and of each other one.
const BUSY_READS: [usize; 2] = [10_000, 2_000];

/// The Pythons from 3.11 on that are found here. The tests' own is the first.
pub fn pythons() -> Vec<PathBuf> {
    let own = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/build/venv/bin/python"));
    let mut found = vec![if own.exists() { own } else { PathBuf::from("python3") }];
    let home = std::env::var_os("PYENV_ROOT").map(PathBuf::from).or_else(|| Some(std::env::home_dir()?.join(".pyenv")));
    for minor in 11..=15 {
        let Some(versions) = home.as_ref().and_then(|home| fs::read_dir(home.join("versions")).ok()) else { break };
        let name = format!("python3.{minor}");
        found.extend(versions.flatten().map(|version| version.path().join("bin").join(&name)).filter(|it| it.exists()));
    }
    found
}

/// A Python that stands somewhere. It ends with this.
pub struct Stands {
    child: Child,
    /// What it has printed: its number, or that of a child.
    pub pid: u32,
    pub runtime: Runtime,
    script: PathBuf,
}

impl Stands {
    pub fn new(python: &PathBuf, script: &str, how: &str) -> Self {
        let script = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hang/frames")).join(script);
        let mut command = Command::new(python);
        command.arg(&script).arg(how).stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0);
        let mut child = command.env("OMP_NUM_THREADS", "1").spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let numbers: Vec<u64> = line.split_whitespace().map(|number| number.parse().unwrap()).collect();
        let [pid, address, hex] = numbers[..] else { panic!("{python:?} has printed {line:?}") };
        let version = Some(Version::of_hex(hex.try_into().unwrap()));
        Self { child, pid: pid.try_into().unwrap(), runtime: Runtime { address, version }, script }
    }

    /// The process that was started.
    pub fn parent(&self) -> u32 {
        self.child.id()
    }

    pub fn process(&self) -> Process {
        Process::open(self.pid).unwrap()
    }

    /// The frames once the main thread has come to where it stands.
    ///
    /// One read finds who holds the GIL before it finds the frames, and the process may go on between the two. So the
    /// second of two reads in a row is taken: what it says of the GIL is younger than the frames of the first one.
    pub fn stacks_when(&self, there: impl Fn(&Stacks) -> bool) -> Stacks {
        let (process, began, mut was_there) = (self.process(), Instant::now(), false);
        loop {
            let stacks = process.stacks(Some(self.runtime)).unwrap();
            let is_there = there(&stacks);
            if is_there && was_there {
                return stacks;
            }
            was_there = is_there;
            assert!(began.elapsed() < LIMIT, "{stacks:#?}");
            std::thread::yield_now();
        }
    }

    /// The number of the line that ends with `# LINE name`.
    pub fn line(&self, name: &str) -> Option<u32> {
        let script = fs::read_to_string(&self.script).unwrap();
        let at = script.lines().position(|line| line.ends_with(&format!("# LINE {name}"))).unwrap();
        Some(u32::try_from(at).unwrap() + 1)
    }
}

impl Drop for Stands {
    fn drop(&mut self) {
        let group = Pid::from_child(&self.child);
        rustix::process::kill_process_group(group, Signal::KILL).unwrap();
        self.child.wait().unwrap();
    }
}

pub fn functions(thread: &Thread) -> Vec<&str> {
    thread.frames.iter().map(|frame| &*frame.function).collect()
}

/// Whether the main thread waits in a function: it is called with the GIL held, and gives it up to wait.
fn main_waits_in<'a>(function: &'a str) -> impl Fn(&Stacks) -> bool + 'a {
    move |stacks| {
        stacks.main().is_some_and(|main| {
            main.holds_gil != Some(true) && main.frames.first().is_some_and(|frame| frame.function == function)
        })
    }
}

#[test]
fn functions_files_and_lines_are_right_in_each_python() {
    for python in pythons() {
        let stands = Stands::new(&python, "stands.py", "sleep");
        let stacks = stands.stacks_when(main_waits_in("été"));
        assert_eq!(Some(stacks.version), stands.runtime.version);
        assert!(!stacks.cut);
        let [main] = &stacks.threads[..] else { panic!("{stacks:?}") };
        assert_eq!((main.tid, main.main, main.holds_gil, main.cut), (stands.pid.into(), true, Some(false), false));
        assert_eq!(functions(main), ["été", "𐎠", "говорит", "main", "<module>"], "{python:?}");
        assert_eq!(main.frames[0].line, stands.line("sleeps"), "{python:?}");
        let script = fs::read_to_string(&stands.script).unwrap();
        for (frame, text) in
            main.frames.iter().zip(["time.sleep(600)", "été()", "𐎠()", "говорит()", "main(sys.argv[1])"])
        {
            assert_eq!(frame.file, stands.script.to_string_lossy());
            let line = frame.line.and_then(|line| script.lines().nth(line as usize - 1)).unwrap();
            assert!(line.trim().starts_with(text), "{python:?}: {frame:?}: {line}");
        }
    }
}

#[test]
fn the_runtime_is_found_by_its_symbol() {
    for python in pythons() {
        let stands = Stands::new(&python, "stands.py", "sleep");
        assert_eq!(find::runtime(stands.pid, &stands.process()), Ok(stands.runtime), "{python:?}");
        let stacks = stands.stacks_when(main_waits_in("été"));
        assert_eq!(stands.process().stacks(None).unwrap(), stacks);
    }
}

#[test]
fn all_threads_are_read_the_main_thread_first() {
    for python in pythons() {
        let stands = Stands::new(&python, "stands.py", "threads");
        let waits = |thread: &&Thread| functions(thread).starts_with(&["Loader.load.<locals>.inner", "Loader.load"]);
        let stacks = stands
            .stacks_when(|stacks| main_waits_in("été")(stacks) && stacks.threads.iter().filter(waits).count() == 7);
        assert_eq!(stacks.threads.len(), 8);
        assert_eq!(stacks.threads.iter().filter(|thread| thread.main).count(), 1);
        assert!(stacks.threads[0].main);
        for thread in &stacks.threads[1..] {
            assert_eq!(thread.frames[0].line, stands.line("waits"), "{python:?}");
            assert!(fs::exists(format!("/proc/{}/task/{}", stands.pid, thread.tid)).unwrap(), "{thread:?}");
        }
    }
}

#[test]
fn of_many_threads_the_main_thread_is_read() {
    for python in pythons() {
        let stands = Stands::new(&python, "stands.py", "crowd");
        let stacks = stands.stacks_when(main_waits_in("été"));
        assert_eq!((stacks.threads.len(), stacks.cut), (THREAD_LIMIT, true));
        assert_eq!(stacks.threads[0].tid, u64::from(stands.pid));
    }
}

#[test]
fn a_stopped_process_is_read() {
    for python in pythons() {
        let stands = Stands::new(&python, "stands.py", "sleep");
        let before = stands.stacks_when(main_waits_in("été"));
        kill_process(Pid::from_child(&stands.child), Signal::STOP).unwrap();
        waitid(WaitId::Pid(Pid::from_child(&stands.child)), WaitIdOptions::STOPPED).unwrap();
        assert_eq!(stands.process().stacks(None).unwrap(), before);
    }
}

#[test]
fn the_thread_that_holds_the_gil_is_known() {
    for python in pythons() {
        let stands = Stands::new(&python, "stands.py", "gil");
        let line = stands.line("holds");
        let there =
            |stacks: &Stacks| stacks.main().is_some_and(|main| main.frames.first().is_some_and(|it| it.line == line));
        let stacks = stands.stacks_when(there);
        let main = stacks.main().unwrap();
        assert_eq!((functions(main), main.holds_gil), (vec!["main", "<module>"], Some(true)), "{python:?}");
    }
}

#[test]
fn frames_that_change_while_they_are_read_reach_the_outermost_one_or_say_that_they_do_not() {
    for (number, python) in pythons().into_iter().enumerate() {
        let reads = BUSY_READS[number.min(1)];
        let stands = Stands::new(&python, "stands.py", "busy");
        stands.stacks_when(|stacks| stacks.main().is_some_and(|main| functions(main).contains(&"busy")));
        let (process, mut cut) = (stands.process(), 0);
        for at in 0..reads {
            let stacks = process.stacks(Some(stands.runtime)).unwrap();
            let main = stacks.main().unwrap();
            // On a loaded machine the process may be suspended between two of its steps for as long as all tries take.
            if main.cut {
                cut += 1;
                continue;
            }
            let outermost: Vec<_> = functions(main).into_iter().rev().take(3).collect();
            assert_eq!(outermost, ["<module>", "main", "busy"], "{python:?}, read {at}: {main:?}");
        }
        assert!(cut * 10 < reads, "{python:?}: {cut} of {reads} reads were cut");
    }
}

#[test]
fn the_innermost_frames_of_a_deep_recursion_are_read() {
    for python in pythons() {
        let stands = Stands::new(&python, "stands.py", "deep");
        let stacks = stands.stacks_when(|stacks| stacks.main().is_some_and(|main| main.cut));
        let main = stacks.main().unwrap();
        assert_eq!(functions(main), ["deep"; FRAME_LIMIT]);
    }
}

#[test]
fn a_generator_a_long_name_and_an_expression_of_many_lines_are_read() {
    for python in pythons() {
        let stands = Stands::new(&python, "stands.py", "generator");
        let (is_there, line) = (main_waits_in("generated"), stands.line("generator"));
        let stacks = stands.stacks_when(|stacks| is_there(stacks) && stacks.main().unwrap().frames[0].line == line);
        assert_eq!(functions(stacks.main().unwrap()), ["generated", "main", "<module>"]);

        let stands = Stands::new(&python, "stands.py", "lines");
        let line = stands.line("lines");
        stands.stacks_when(|stacks| stacks.main().unwrap().frames.first().is_some_and(|frame| frame.line == line));

        let stands = Stands::new(&python, "stands.py", "long");
        let there = |stacks: &Stacks| stacks.main().is_some_and(|main| functions(main)[0].starts_with("faaa"));
        let stacks = stands.stacks_when(there);
        let name = &stacks.main().unwrap().frames[0].function;
        assert!(name.starts_with("faaa") && name.ends_with('…') && name.len() <= NAME_LIMIT_BYTES, "{}", name.len());
    }
}

#[test]
fn a_forked_child_has_a_main_thread() {
    for python in pythons() {
        let stands = Stands::new(&python, "stands.py", "forked");
        let stacks = stands.stacks_when(main_waits_in("été"));
        assert!(stacks.threads[0].main);
        assert_eq!(stands.process().stacks(None).unwrap(), stacks);
    }
}

#[test]
fn what_is_no_python_or_has_ended_is_refused_in_a_sentence() {
    let mut sleeps = Command::new("sleep").arg("600").spawn().unwrap();
    let process = Process::open(sleeps.id()).unwrap();
    let Err(refusal @ Refusal::NotFound { .. }) = process.stacks(None) else { panic!("it is no Python") };
    assert!(refusal.to_string().contains("`_PyRuntime`"), "{refusal}");
    let wrong = Runtime { address: 0x1000, version: Some(Version { major: 3, minor: 11 }) };
    assert!(matches!(process.stacks(Some(wrong)), Err(Refusal::Frames { .. })));
    assert!(process.is_alive());
    sleeps.kill().unwrap();
    sleeps.wait().unwrap();
    assert!(!process.is_alive());
    assert_eq!(process.stacks(Some(wrong)), Err(Refusal::Ended(sleeps.id())));
    assert!(matches!(Process::open(sleeps.id()), Err(Refusal::Ended(_))));
}
