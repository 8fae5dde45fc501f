//! What the files of `/proc/PID` say. Pure. A process may choose its name and its files' names, so these are tidied.

use std::time::Duration;

use super::calls::{Arch, Operand, named};
use crate::hang::view::{Call, NAME_LIMIT_BYTES, PATH_LIMIT_BYTES};
use crate::wire::text::{cut, plain};

/// Where a thread is, by `/proc/PID/syscall`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// It runs.
    Running,
    /// It waits, but not in a system call: for a page, or it is stopped.
    Elsewhere,
    /// In a system call, with its arguments.
    Call(u64, [u64; 6]),
}

/// What an argument of a call refers to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Referred {
    /// A file descriptor: its number, what `/proc/PID/fd/N` says, and the type of the file system.
    File(u64, Option<String>, Option<String>),
    /// A path.
    Path(String),
    /// Nothing is known.
    Nothing,
}

/// The contents of `/proc/PID/syscall`.
pub fn at(syscall: &str) -> Option<At> {
    let mut fields = syscall.split_whitespace();
    match fields.next()? {
        "running" => Some(At::Running),
        "-1" => Some(At::Elsewhere),
        number => {
            let number = number.parse().ok()?;
            let mut arguments = [0; 6];
            for argument in &mut arguments {
                *argument = u64::from_str_radix(fields.next()?.strip_prefix("0x")?, 16).ok()?;
            }
            Some(At::Call(number, arguments))
        }
    }
}

/// Which argument of a call says what it waits for.
pub fn operand(arch: Option<Arch>, at: &At) -> Operand {
    match (arch, at) {
        (Some(arch), At::Call(number, _)) => named(arch, *number).map_or(Operand::Nothing, |(_, operand)| operand),
        _ => Operand::Nothing,
    }
}

/// The call in which a thread stands. `None`: it stands in none, or nothing is known.
pub fn call(arch: Option<Arch>, at: &At, referred: &Referred) -> Option<Call> {
    let At::Call(number, _) = at else { return None };
    let Some((name, _)) = arch.and_then(|arch| named(arch, *number)) else {
        return Some(Call { name: format!("system call {number}"), ..Call::default() });
    };
    let (file, file_system, fd) = match referred {
        Referred::File(fd, link, file_system) => {
            let fd = u32::try_from(*fd).ok();
            (link.as_deref().map(|link| tidied(kind(link))), file_system.clone(), fd)
        }
        Referred::Path(path) => (Some(tidied(path)), None, None),
        Referred::Nothing => (None, None, None),
    };
    let is_path = file.as_deref().is_some_and(|file| file.starts_with('/'));
    Some(Call { name: name.to_owned(), file, file_system: file_system.filter(|_| is_path), fd })
}

fn tidied(words: &str) -> String {
    cut(plain(words.to_owned()), PATH_LIMIT_BYTES)
}

/// What a file is: `pipe` of `pipe:[123]`, `eventfd` of `anon_inode:[eventfd]`, else its path.
fn kind(link: &str) -> &str {
    let anonymous = link.strip_prefix("anon_inode:").map(|kind| kind.trim_matches(['[', ']']));
    anonymous.unwrap_or_else(|| match link.split_once(":[") {
        Some((kind @ ("pipe" | "socket"), _)) => kind,
        _ => link,
    })
}

/// State and name in `/proc/PID/stat`. The name may have any characters, parentheses too.
pub fn state_and_name(stat: &str) -> Option<(char, String)> {
    let (before, after) = stat.rsplit_once(") ")?;
    let (_, name) = before.split_once('(')?;
    Some((after.chars().next()?, cut(plain(name.to_owned()), NAME_LIMIT_BYTES)))
}

/// How long a thread has run or has waited for a CPU, by `/proc/PID/task/TID/schedstat`.
pub fn runnable(schedstat: &str) -> Option<Duration> {
    let mut fields = schedstat.split_whitespace().map(str::parse::<u64>);
    let (ran, waited) = (fields.next()?.ok()?, fields.next()?.ok()?);
    Some(Duration::from_nanos(ran.saturating_add(waited)))
}

/// How many bytes were read and written, by `/proc/PID/task/TID/io`.
pub fn bytes(io: &str) -> Option<u64> {
    let field = |name: &str| io.lines().find_map(|line| line.strip_prefix(name))?.trim().parse::<u64>().ok();
    Some(field("rchar:")?.saturating_add(field("wchar:")?))
}

/// Which mount a file is on, by `/proc/PID/fdinfo/N`.
pub fn mount_of(fdinfo: &str) -> Option<u64> {
    fdinfo.lines().find_map(|line| line.strip_prefix("mnt_id:"))?.trim().parse().ok()
}

/// The type of a mount's file system, by `/proc/PID/mountinfo`.
pub fn file_system(mountinfo: &str, mount: u64) -> Option<String> {
    let line = mountinfo.lines().find(|line| line.split(' ').next().and_then(|id| id.parse().ok()) == Some(mount))?;
    let (_, after) = line.split_once(" - ")?;
    after.split(' ').next().map(str::to_owned)
}

/// The kernel's function in which a thread sleeps, by `/proc/PID/wchan`. `0` is none.
pub fn kernel_function(wchan: &str) -> Option<String> {
    let name = wchan.trim();
    (!name.is_empty() && name != "0").then(|| cut(plain(name.to_owned()), NAME_LIMIT_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;

    const X86: Option<Arch> = Some(Arch::X86_64);

    fn words(syscall: &str, referred: Referred) -> String {
        call(X86, &at(syscall).unwrap(), &referred).map(|call| call.to_string()).unwrap_or_default()
    }

    #[test]
    fn a_call_is_named_with_its_file() {
        let read = "0 0x3 0x7f00 0x1000 0x0 0x0 0x0 0x7ffd 0x7f01\n";
        let file =
            |fd, link: &str, system: Option<&str>| Referred::File(fd, Some(link.to_owned()), system.map(str::to_owned));
        for (syscall, referred, expected) in [
            ("running\n", Referred::Nothing, ""),
            ("-1 0x7ffd 0x7f01\n", Referred::Nothing, ""),
            (read, file(3, "/data/shard-17", Some("nfs4")), "read(/data/shard-17, nfs4)"),
            (read, file(3, "pipe:[123]", Some("pipefs")), "read(pipe)"),
            (read, file(3, "socket:[5]", None), "read(socket)"),
            (read, file(3, "anon_inode:[eventfd]", None), "read(eventfd)"),
            (read, file(3, "anon_inode:inotify", None), "read(inotify)"),
            (read, Referred::File(3, None, None), "read(fd 3)"),
            (read, file(3, "/data/a\nb\x1b[2J", Some("xfs")), "read(/data/a b [2J, xfs)"),
            ("202 0x1 0x0 0x0 0x0 0x0 0x0 0x1 0x1", Referred::Nothing, "futex"),
            ("257 0x1 0x0 0x0 0x0 0x0 0x0 0x1 0x1", Referred::Path("/data/x".to_owned()), "openat(/data/x)"),
            ("9999 0x1 0x0 0x0 0x0 0x0 0x0 0x1 0x1", Referred::Nothing, "system call 9999"),
        ] {
            assert_eq!(words(syscall, referred), expected);
        }
        let long = words(read, file(3, &"é".repeat(4000), None));
        assert!(long.len() <= PATH_LIMIT_BYTES + "read()".len() && long.ends_with("…)"), "{long}");
        for nonsense in ["", "0", "0 0x1", "-7 0x1", "0 3 4 5 6 7 8", "x 0x1 0x1 0x1 0x1 0x1 0x1"] {
            assert_eq!(at(nonsense), None, "{nonsense}");
        }
    }

    #[test]
    fn standard_input_is_named() {
        let read = "0 0x0 0x7f00 0x1000 0x0 0x0 0x0 0x7ffd 0x7f01";
        let from = |link: &str| words(read, Referred::File(0, Some(link.to_owned()), None));
        assert_eq!(from("/dev/pts/3"), "reads standard input (/dev/pts/3)");
        assert_eq!(from("pipe:[7]"), "reads standard input (pipe)");
    }

    #[test]
    fn files_of_the_kernel_are_read() {
        assert_eq!(state_and_name("7 (a) R (b) S 1 7"), Some(('S', "a) R (b".to_owned())));
        assert_eq!(state_and_name("7 (a"), None);
        assert_eq!(runnable("5000 3000 7\n"), Some(Duration::from_nanos(8000)));
        assert_eq!(bytes("rchar: 10\nwchar: 5\nsyscr: 1\n"), Some(15));
        assert_eq!(bytes("rchar: x\nwchar: 5\n"), None);
        assert_eq!(mount_of("pos:\t0\nflags:\t0100000\nmnt_id:\t29\nino:\t5\n"), Some(29));
        let mounts =
            "28 1 0:24 / / rw - ext4 /dev/a rw\n29 28 0:25 / /data rw,relatime shared:1 - nfs4 host:/data rw\n";
        assert_eq!(file_system(mounts, 29).as_deref(), Some("nfs4"));
        assert_eq!(file_system(mounts, 2), None);
        assert_eq!(kernel_function("0"), None);
        assert_eq!(kernel_function("do_signal_stop").as_deref(), Some("do_signal_stop"));
    }
}
