//! A second opinion on where a worker stands: `py-spy dump --nonblocking`, if that is installed.
//!
//! It does not pause the worker. Without `--nonblocking` it would hang at one that a signal has stopped, or that sleeps uninterruptibly.

use std::env;
use std::ffi::OsStr;
use std::io::{self, PipeReader, Read};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Access, access};
use rustix::process::Pid;

use super::shell::kill_group;
use crate::hang::look::driver::within;
use crate::open_files;
use crate::processes::{Life, start_session};
use crate::rendezvous::messages::look::PY_SPY_BYTES;
use crate::wire::text::tidy_lines;

/// How long it may take. As a rule that is 0.1 s.
const TIME_LIMIT: Duration = Duration::from_secs(2);
/// Until it must be gone after it was killed. A file system may hold it for longer.
const END_LIMIT: Duration = Duration::from_millis(200);
/// How much of its output is read.
const OUTPUT_BYTES: u64 = 64 << 10;
const NOT_INSTALLED: &str =
    "it is not installed on this rank's node, neither beside the agent's Python nor on its PATH: pip install py-spy";

/// What it prints of this process, or a sentence that says why it prints nothing.
pub(super) async fn dump(pid: u32) -> String {
    let dumped = within(TIME_LIMIT + END_LIMIT, "py-spy", move || {
        let Some(program) = find() else { return NOT_INSTALLED.to_owned() };
        let dumped = run(&program, pid, TIME_LIMIT);
        dumped.unwrap_or_else(|error| format!("`{}` cannot be run: {error}", program.display()))
    });
    dumped.await.unwrap_or_else(|why| format!("there is no answer of it: {why}"))
}

/// The program beside this process's Python, which is the workers' as a rule, or on `PATH`. A worker has no say in that: it may be another
/// user's.
fn find() -> Option<PathBuf> {
    let python = env::args_os().next().map(PathBuf::from).filter(|python| python.is_absolute());
    let beside = python.as_deref().and_then(Path::parent).map(Path::to_owned);
    find_in(beside.into_iter().chain(env::var_os("PATH").iter().flat_map(env::split_paths)))
}

fn find_in(folders: impl Iterator<Item = PathBuf>) -> Option<PathBuf> {
    let mut programs = folders.filter(|folder| folder.is_absolute()).map(|folder| folder.join("py-spy"));
    programs.find(|program| program.is_file() && access(program, Access::EXEC_OK).is_ok())
}

/// Run it, and kill all that it has started. The text has no control characters but line ends.
fn run(program: &Path, pid: u32, limit: Duration) -> io::Result<String> {
    let until = Instant::now() + limit;
    let (mut reader, writer) = io::pipe()?;
    let mut made = Command::new(program);
    made.args([OsStr::new("dump"), OsStr::new("--nonblocking"), OsStr::new("--pid")]).arg(pid.to_string());
    made.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
    let started = start_session(&mut made, open_files::limit_of_workers(), Life::UntilThreadEnds);
    // This process's ends of the pipe: without them it ends with the program.
    drop(made);
    let mut child = started?;
    let output = output(&mut reader, until);
    kill_group(Pid::from_child(&child));
    child.wait()?;
    let (output, has_ended) = output?;
    let mut text = tidy_lines(without_command(&String::from_utf8_lossy(&output)), PY_SPY_BYTES);
    if text.is_empty() {
        text.push_str("it has printed nothing");
    }
    if !has_ended {
        text.insert_str(0, &format!("it had not ended after {:.1} s and was killed\n", limit.as_secs_f64()));
    }
    Ok(text)
}

/// The output without the command line of the worker, of any number of lines: it may have a password. The version of Python follows it.
fn without_command(output: &str) -> &str {
    let shown = output.find("\nPython v").map_or(output, |at| &output[at + 1..]);
    if shown.starts_with("Process ") { "" } else { shown }
}

/// What is written into a pipe until this instant, and whether that was all.
fn output(reader: &mut PipeReader, until: Instant) -> io::Result<(Vec<u8>, bool)> {
    let mut output = Vec::new();
    while (output.len() as u64) < OUTPUT_BYTES {
        let left = Timespec::try_from(until.saturating_duration_since(Instant::now())).map_err(io::Error::other)?;
        match poll(&mut [PollFd::from_borrowed_fd(reader.as_fd(), PollFlags::IN)], Some(&left)) {
            Ok(0) => return Ok((output, false)),
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        let mut part = [0; 4096];
        match reader.read(&mut part)? {
            0 => break,
            read => output.extend_from_slice(&part[..read]),
        }
    }
    Ok((output, true))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::processes::is_alive;

    const LONG: Duration = Duration::from_secs(60);

    /// A folder with a program of this name.
    fn folder_with(name: &str, script: &str) -> PathBuf {
        let folder = env::temp_dir().join(format!("py-spy-{}", rand::random::<u64>()));
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join(name), format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(folder.join(name), Permissions::from_mode(0o755)).unwrap();
        folder
    }

    /// What is shown if this is `py-spy`.
    fn ran(script: &str, limit: Duration) -> String {
        let folder = folder_with("py-spy", script);
        let text = run(&folder.join("py-spy"), 42, limit).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        text
    }

    #[test]
    fn its_lines_are_shown_without_the_command_line_of_the_worker() {
        let command = "echo Process 42: python -c 'a;'; echo --password=1";
        let script =
            format!("{command}; echo Python v3.11; echo \"$@\"; printf '  f\\033[2J (a.py:3)\\n'; echo why >&2");
        assert_eq!(ran(&script, LONG), "Python v3.11\ndump --nonblocking --pid 42\n  f [2J (a.py:3)\nwhy");
        assert_eq!(ran(command, LONG), "it has printed nothing");
        assert_eq!(ran("echo Error: no such process", LONG), "Error: no such process");
        assert_eq!(ran("exit 1", LONG), "it has printed nothing");
    }

    #[test]
    fn one_that_hangs_is_killed_with_all_that_it_has_started() {
        let text = ran("echo $$; sleep 600 & echo $!; wait", Duration::from_millis(500));
        let mut lines = text.lines();
        assert_eq!(lines.next(), Some("it had not ended after 0.5 s and was killed"));
        let pids: Vec<u32> = lines.map(|pid| pid.parse().unwrap()).collect();
        assert_eq!(pids.len(), 2);
        assert!(!is_alive(pids[0]));
        let killed = Instant::now();
        while is_alive(pids[1]) {
            assert!(killed.elapsed() < LONG, "what it had started lives");
        }
    }

    #[test]
    fn one_that_prints_for_ever_is_cut() {
        let text = ran("while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done", LONG);
        assert!((PY_SPY_BYTES - 4..=PY_SPY_BYTES).contains(&text.len()), "{}", text.len());
    }

    #[test]
    fn the_first_that_can_be_run_is_taken() {
        let (other, has_it) = (folder_with("other", ""), folder_with("py-spy", ""));
        let shut = folder_with("py-spy", "");
        fs::set_permissions(shut.join("py-spy"), Permissions::from_mode(0o644)).unwrap();
        let folders = [PathBuf::from("."), other.clone(), shut.clone(), has_it.clone()];
        assert_eq!(find_in(folders.into_iter()), Some(has_it.join("py-spy")));
        assert_eq!(find_in([other.clone()].into_iter()), None);
        for folder in [other, shut, has_it] {
            fs::remove_dir_all(folder).unwrap();
        }
    }
}
