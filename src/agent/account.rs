//! The cause of a worker's failure in words: its error file, else the end of its standard error, and a hint about memory.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::workers::shown;

/// Lines of standard error that are reported.
const TAIL_LINES: usize = 12;
/// How the traceback of an exception begins in Python.
const TRACEBACK: &str = "Traceback (most recent call last):";

/// The words that a worker recorded: first the summary, then the call stack. `None` if it recorded nothing.
///
/// `text` is the content of the file that PyTorch's `@record` writes: `{"message": {"message": "ValueError: x", "extraInfo":
/// {"py_callstack": "Traceback …"}}}`, or a plain text as `message` (`torch/distributed/elastic/multiprocessing/errors`).
pub fn recorded(text: &str) -> Option<String> {
    let parsed: Value = serde_json::from_str(text).ok()?;
    let message = parsed.get("message")?;
    if let Some(text) = message.as_str() {
        return Some(text.to_owned()).filter(|text| !text.is_empty());
    }
    let summary = message.get("message").and_then(Value::as_str).unwrap_or_default();
    let stack = message.pointer("/extraInfo/py_callstack").and_then(Value::as_str).unwrap_or_default();
    let text = [summary.trim(), last_lines(stack).as_str()].join("\n");
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// The last lines of a worker's standard error, beginning with the one that sums them up: the exception of the last traceback, else the
/// last line. Empty if there are none.
pub fn summary_of(stderr_tail: &[u8]) -> String {
    last_lines(&String::from_utf8_lossy(stderr_tail))
}

/// The last non-empty lines, after the one that sums them up.
///
/// Of a line that was written over (a progress bar's) counts what a terminal would show. Of several such lines in a row only the last
/// one does: nested bars move up and down. A bar that was drawn once more at the end sums up nothing.
fn last_lines(text: &str) -> String {
    let mut lines: Vec<(&str, bool)> = Vec::new();
    for (line, is_bar) in text.split_inclusive('\n').map(shown) {
        let line = without_rank(line.trim_end());
        if line.is_empty() {
            continue;
        }
        if is_bar && lines.last().is_some_and(|(_, is_bar)| *is_bar) && !line.contains(TRACEBACK) {
            lines.pop();
        }
        lines.push((line, is_bar));
    }
    let Some(last) = lines.iter().rposition(|(_, is_bar)| !is_bar).or(lines.len().checked_sub(1)) else {
        return String::new();
    };
    let sum = exception(&lines).unwrap_or(last);
    // What programs print after the exception, when they end, must not push it out.
    let end = if sum + TAIL_LINES < lines.len() { sum + 1 } else { lines.len() };
    let shown: Vec<&str> = lines[end.saturating_sub(TAIL_LINES)..end].iter().map(|(line, _)| *line).collect();
    if let [only] = shown[..] { only.to_owned() } else { format!("{}\n{}", lines[sum].0, shown.join("\n")) }
}

/// A line without the `[rank3]: ` that torch.distributed writes before each line of an exception once there is a process group.
fn without_rank(line: &str) -> &str {
    match line.strip_prefix("[rank").and_then(|rest| rest.split_once("]:")) {
        Some((rank, rest)) if rank.bytes().all(|digit| digit.is_ascii_digit()) => {
            rest.strip_prefix(' ').unwrap_or(rest)
        }
        _ => line,
    }
}

/// The line of the last traceback's exception: the first one after it that is not indented. Tracebacks of exceptions that Python has
/// ignored, in finalizers, do not count.
fn exception(lines: &[(&str, bool)]) -> Option<usize> {
    let ignored = |at: usize| at > 0 && lines[at - 1].0.starts_with("Exception ignored in");
    let traceback = (0..lines.len()).rfind(|at| lines[*at].0.contains(TRACEBACK) && !ignored(*at))?;
    (traceback + 1..lines.len()).find(|at| !lines[*at].0.starts_with([' ', '\t']))
}

/// Number of OOM kills, in this process's control group and on this host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OomKills {
    group: Option<u64>,
    host: Option<u64>,
}

impl OomKills {
    /// Reads the counters. A counter that cannot be read is left out.
    pub fn now() -> Self {
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let group = groups.lines().find_map(memory_events).and_then(|file| counter(&file, "oom_kill"));
        Self { group, host: counter("/proc/vmstat", "oom_kill") }
    }

    /// A hint for a worker that SIGKILL ended and that this agent did not kill.
    pub fn hint(self, since: Self) -> &'static str {
        let more =
            |now: Option<u64>, before: Option<u64>| matches!((now, before), (Some(now), Some(before)) if now > before);
        if more(self.group, since.group) {
            "killed because memory ran out: its control group's limit was reached (OOM)"
        } else if more(self.host, since.host) {
            "probably killed because memory ran out: the kernel's OOM killer ended a process on this host"
        } else {
            "killed by another process, or because memory ran out (OOM?): see the kernel's log"
        }
    }
}

/// The shared memory of this machine or container, in bytes: what `/dev/shm` may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedMemory {
    size: u64,
    free: u64,
}

impl SharedMemory {
    /// As it is. `None`: there is none.
    pub fn now() -> Option<Self> {
        let found = rustix::fs::statvfs("/dev/shm").ok()?;
        let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
        let (size, free) = (bytes(found.f_blocks), bytes(found.f_bavail));
        (size > 0).then_some(Self { size, free })
    }

    /// A hint for a worker that SIGBUS ended.
    pub fn hint(self) -> String {
        let Self { size, free } = self;
        let held = format!("/dev/shm holds {}, of which {} are free", mebibytes(size), mebibytes(free));
        if free <= size / FULL_SHARE {
            format!(
                "shared memory is full: {held}; give it more (docker run --shm-size=..., in Kubernetes a volume emptyDir with medium: \
                 Memory at /dev/shm), or start fewer data loaders"
            )
        } else {
            format!(
                "a file that the worker has mapped was cut, or shared memory was full, which it is no longer: {held}"
            )
        }
    }
}

/// Shared memory of which less than this part is free is full: a tensor no longer fits.
const FULL_SHARE: u64 = 50;

fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// The file that counts a control group's OOM kills, from its line in `/proc/self/cgroup`; `None` if it is not the memory group.
fn memory_events(line: &str) -> Option<String> {
    let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
    let path = path.trim_end_matches('/');
    let file = if controllers.split(',').any(|name| name == "memory") {
        format!("/sys/fs/cgroup/memory{path}/memory.oom_control") // version 1
    } else if controllers.is_empty() {
        format!("/sys/fs/cgroup{path}/memory.events")
    } else {
        return None;
    };
    Path::new(&file).is_file().then_some(file)
}

fn counter(file: &str, name: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recorded_exception_comes_first_and_its_stack_after() {
        let file = r#"{"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "Traceback\n  File \"a.py\"\nValueError: x\n"}}}"#;
        let text = recorded(file).unwrap();
        assert!(text.starts_with("ValueError: x\n"), "{text}");
        assert!(text.contains("File \"a.py\""), "{text}");
    }

    #[test]
    fn a_file_that_says_nothing_has_recorded_nothing() {
        for file in ["not json", "{}", r#"{"message": ""}"#, r#"{"message": {}}"#] {
            assert_eq!(recorded(file), None, "{file}");
        }
        assert_eq!(recorded(r#"{"message": "SIGSEGV"}"#).as_deref(), Some("SIGSEGV"));
    }

    #[test]
    fn the_last_line_of_stderr_comes_first() {
        assert_eq!(
            summary_of(b"Traceback\n  line\nValueError: x\n\n"),
            "ValueError: x\nTraceback\n  line\nValueError: x"
        );
        assert_eq!(summary_of(b"only\n"), "only");
        assert_eq!(summary_of(b""), "");
    }

    #[test]
    fn a_progress_bar_neither_hides_a_traceback_nor_sums_it_up() {
        let bar: String = (0..300).map(|state| format!("\r{state:3}%|{}| {state}/300", "#".repeat(60))).collect();
        let traceback = "Traceback (most recent call last):\n  File \"train.py\", line 1\nValueError: x\n";
        let after = "\r299%|##| 299/300\n";
        let text = summary_of(format!("{bar}{traceback}{after}").as_bytes());
        assert!(text.starts_with("ValueError: x\n"), "{text}");
        assert!(text.contains("  File \"train.py\", line 1\nValueError: x"), "{text}");
        assert!(text.len() < 400, "{text}");
    }

    #[test]
    fn a_worker_that_ends_in_mid_bar_has_said_one_line() {
        assert_eq!(summary_of(b"10%\r20%\r30%\r"), "30%");
        assert_eq!(summary_of(b"\r10%\r20%"), "20%");
        assert_eq!(summary_of(b"loading\n\r10%\r20%"), "loading\nloading\n20%");
        // Nested bars go down a line for the inner one, and up again.
        assert_eq!(summary_of("\router 1\n\rinner 1\x1b[A\n\rinner 2\x1b[A\n\rinner 3".as_bytes()), "inner 3");
    }

    #[test]
    fn the_exception_sums_up_whatever_is_printed_after_it() {
        let traceback =
            "Traceback (most recent call last):\n  File \"a.py\"\nRuntimeError: CUDA error\nCompile with x\n";
        assert!(summary_of(traceback.as_bytes()).starts_with("RuntimeError: CUDA error\nTraceback"), "{traceback}");
        let noise = "wandb: done\n".repeat(30);
        let text = summary_of(format!("{traceback}{noise}").as_bytes());
        assert!(text.starts_with("RuntimeError: CUDA error\nTraceback") && !text.contains("wandb"), "{text}");
        let ignored = "Exception ignored in: <x>\nTraceback (most recent call last):\n  File \"b\"\nTypeError: late\n";
        let text = summary_of(format!("{traceback}{ignored}").as_bytes());
        assert!(text.starts_with("RuntimeError: CUDA error\n"), "{text}");
    }

    #[test]
    fn an_exception_of_a_rank_in_a_process_group_is_one_as_others_are() {
        let traceback = "[rank3]: Traceback (most recent call last):\n[rank3]:   File \"a.py\"\n[rank3]:     f()\n[rank3]: \
                         RuntimeError: [pair.cc:561] Connection closed by peer\n[rank3]:\n";
        assert_eq!(
            summary_of(traceback.as_bytes()),
            "RuntimeError: [pair.cc:561] Connection closed by peer\nTraceback (most recent call last):\n  File \"a.py\"\n    f()\n\
             RuntimeError: [pair.cc:561] Connection closed by peer"
        );
        assert_eq!(summary_of(b"[rank3] is here: ]: x\n"), "[rank3] is here: ]: x");
    }

    #[test]
    fn a_bus_error_is_put_down_to_shared_memory_with_its_size() {
        let full = SharedMemory { size: 64 << 20, free: 1 << 20 }.hint();
        assert!(
            full.starts_with("shared memory is full: /dev/shm holds 64.0 MiB, of which 1.0 MiB are free; "),
            "{full}"
        );
        let free = SharedMemory { size: 64 << 20, free: 8 << 20 }.hint();
        assert!(free.ends_with("no longer: /dev/shm holds 64.0 MiB, of which 8.0 MiB are free"), "{free}");
    }

    #[test]
    fn a_kill_is_put_down_to_memory_if_the_counters_say_so() {
        let before = OomKills { group: Some(1), host: Some(4) };
        assert!(OomKills { group: Some(2), host: Some(5) }.hint(before).contains("control group"));
        assert!(OomKills { group: Some(1), host: Some(5) }.hint(before).contains("this host"));
        assert!(before.hint(before).contains("OOM?"));
        assert!(OomKills::default().hint(before).contains("OOM?"));
    }
}
