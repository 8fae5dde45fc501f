//! What the kernel knows of real processes.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use elastic_rs::hang::frames::process::{Process, Refusal};
use elastic_rs::hang::look::Look;
use elastic_rs::hang::look::driver::{NoAnswer, hanging, look, seen, within};
use elastic_rs::hang::view::Class;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::{Pid, Signal, kill_process};

use crate::LIMIT;
use crate::frames::{Stands, pythons};

/// A shell command, which ends with this.
struct Runs(Child);

impl Runs {
    fn new(script: &str) -> Self {
        Self::with(script, Stdio::null())
    }

    fn with(script: &str, stdin: Stdio) -> Self {
        Self(Command::new("sh").args(["-c", script]).stdin(stdin).stdout(Stdio::null()).spawn().unwrap())
    }

    fn process(&self) -> Process {
        Process::open(self.0.id()).unwrap()
    }

    fn until(&self, there: impl Fn(&Look) -> bool) -> Look {
        let (process, began) = (self.process(), Instant::now());
        loop {
            let look = look(&process).unwrap();
            if there(&look) {
                return look;
            }
            assert!(began.elapsed() < LIMIT, "{look:?}");
            std::thread::yield_now();
        }
    }

    /// What it does from now on, once it does that.
    fn until_it_is(&self, activity: Class) {
        let process = self.process();
        let (before, began) = (look(&process).unwrap(), Instant::now());
        while look(&process).unwrap().class_since(&before, began.elapsed()) != activity {
            assert!(began.elapsed() < LIMIT);
            std::thread::yield_now();
        }
    }
}

impl Drop for Runs {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// A folder that is removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("elastic_rs-look-{}-{name}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        Self(folder)
    }

    fn pipe(&self) -> PathBuf {
        let path = self.0.join("fifo");
        mknodat(CWD, &path, FileType::Fifo, Mode::RWXU, 0).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

fn call_of(look: &Look) -> String {
    look.call.as_ref().map(|call| call.to_string()).unwrap_or_default()
}

#[test]
fn a_process_that_reads_standard_input_or_sleeps_is_idle_and_named() {
    let reads = Runs::with("exec cat", Stdio::piped());
    // It may become `cat`, and begin to read, between two files of one look.
    reads.until(|look| call_of(look) == "reads standard input (pipe)" && (look.state, &*look.name) == ('S', "cat"));
    reads.until_it_is(Class::Idle);
    let sleeps = Runs::new("exec sleep 600");
    sleeps.until(|look| ["clock_nanosleep", "nanosleep"].contains(&call_of(look).as_str()));
}

#[test]
fn a_process_that_opens_or_reads_a_file_of_a_dead_file_system_names_it() {
    let folder = Folder::new("opens");
    let pipe = folder.pipe();
    let opens = Runs::new(&format!("exec cat {}", pipe.display()));
    let look = opens.until(|look| call_of(look).starts_with("openat"));
    assert_eq!(call_of(&look), format!("openat({})", pipe.display()));
    // Once it is open, the path is that of the descriptor.
    let writes = fs::OpenOptions::new().read(true).write(true).open(&pipe).unwrap();
    let look = opens.until(|look| call_of(look).starts_with("read("));
    assert!(call_of(&look).starts_with(&format!("read({}, ", pipe.display())), "{look:?}");
    drop(writes);
}

#[test]
fn a_stopped_process_is_seen_and_its_children_are_listed() {
    let parent = Runs::new("sleep 600 & trap 'kill $!' EXIT; wait");
    let children = parent.until(|look| look.children.len() == 1).children;
    kill_process(Pid::from_child(&parent.0), Signal::STOP).unwrap();
    let look = parent.until(Look::is_stopped);
    assert_eq!(look.children, children);
    assert!(!look.has_ended());
    let child = Process::open(children[0]).unwrap();
    kill_process(Pid::from_raw(i32::try_from(children[0]).unwrap()).unwrap(), Signal::KILL).unwrap();
    let began = Instant::now();
    while child.is_alive() {
        assert!(began.elapsed() < LIMIT);
    }
    assert_eq!(self::look(&child), Err(Refusal::Ended(children[0])));
}

#[test]
fn a_busy_process_and_one_that_moves_bytes_differ() {
    Runs::new("while :; do :; done").until_it_is(Class::Busy);
    Runs::new("exec cat /dev/zero").until_it_is(Class::Moving);
}

#[test]
fn the_data_worker_that_loads_is_seen_with_its_frames() {
    let loads = Stands::new(&pythons()[0], "with_torch.py", "loader");
    // The line is the child's: its parent waits for it.
    let parent = Process::open(loads.parent()).unwrap();
    let began = Instant::now();
    let child = loop {
        let seen = seen(&parent, Some(loads.runtime)).unwrap();
        let loads = |child: &elastic_rs::hang::look::driver::Child| child.look.pid == loads.pid;
        if let Some(child) = seen.children.into_iter().find(loads) {
            break child;
        }
        assert!(began.elapsed() < LIMIT);
    };
    assert_eq!(child.look.name, "pt_data_worker");
    assert!(child.stacks.main().unwrap().frames.iter().any(|frame| frame.function == "Shards.__getitem__"));
}

#[tokio::test]
async fn work_that_hangs_is_given_up_and_counted_until_it_ends() {
    let (read, write) = rustix::pipe::pipe().unwrap();
    assert_eq!(within(LIMIT, "test", || 7).await.unwrap(), 7);
    let hangs = within(Duration::from_millis(1), "test", move || rustix::io::read(read, &mut [0; 8])).await;
    assert!(matches!(hangs, Err(NoAnswer::Hangs(_))), "{hangs:?}");
    assert_eq!(hanging(), 1);
    drop(write);
    let began = Instant::now();
    while hanging() > 0 {
        assert!(began.elapsed() < LIMIT);
        tokio::task::yield_now().await;
    }
}
