//! Who has sent a signal.

use std::fs;
use std::process;

/// The sender of a signal, as far as the kernel reports it. It may have ended by now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sender {
    /// The kernel does not say.
    Unknown,
    /// The kernel: a key on the terminal, or its end.
    Kernel,
    /// A process that this one cannot see: outside of its container.
    Outside,
    /// This process, for the driver that has started it.
    Driver,
    /// A process.
    Process {
        /// Its id.
        pid: u32,
        /// Its user's id.
        uid: u32,
    },
}

/// Numbers that are no process's id.
const UNKNOWN: u32 = 0;
const KERNEL: u32 = u32::MAX;
const OUTSIDE: u32 = u32::MAX - 1;
const DRIVER: u32 = u32::MAX - 2;
/// Longest a name is that is shown.
const SHOWN: usize = 64;

impl Sender {
    /// From what the kernel gives a handler. Does only what a handler may.
    ///
    /// # Safety
    /// `info` is of a signal that a handler got.
    pub(super) unsafe fn of(info: &libc::siginfo_t) -> Self {
        match info.si_code {
            // SAFETY: these have a sender.
            libc::SI_USER | libc::SI_QUEUE | libc::SI_TKILL => match unsafe { (info.si_pid(), info.si_uid()) } {
                (0, _) => Self::Outside,
                (pid, uid) => Self::Process { pid: pid.unsigned_abs(), uid },
            },
            libc::SI_KERNEL => Self::Kernel,
            _ => Self::Unknown,
        }
    }

    /// In one number, for an atomic.
    pub(super) const fn packed(self) -> u64 {
        let (pid, uid) = match self {
            Self::Unknown => (UNKNOWN, 0),
            Self::Kernel => (KERNEL, 0),
            Self::Outside => (OUTSIDE, 0),
            Self::Driver => (DRIVER, 0),
            Self::Process { pid, uid } => (pid, uid),
        };
        (pid as u64) << 32 | uid as u64
    }

    /// The same from that number.
    pub(super) fn unpacked(packed: u64) -> Self {
        match ((packed >> 32) as u32, packed as u32) {
            (UNKNOWN, _) => Self::Unknown,
            (KERNEL, _) => Self::Kernel,
            (OUTSIDE, _) => Self::Outside,
            (DRIVER, _) => Self::Driver,
            (pid, uid) => Self::Process { pid, uid },
        }
    }

    /// The same in a process that signals itself as its driver asks.
    pub(super) fn passed_on(self) -> Self {
        match self {
            Self::Process { pid, .. } if pid == process::id() => Self::Driver,
            sender => sender,
        }
    }

    /// In words, after "it was"; empty if nothing is known. Reads `/proc` and `/etc/passwd`.
    pub fn text(self) -> String {
        match self {
            Self::Unknown => String::new(),
            Self::Kernel => "sent by the terminal, or by the kernel".to_owned(),
            Self::Outside => "sent from outside of this container".to_owned(),
            Self::Driver => "passed on by the driver".to_owned(),
            Self::Process { pid, uid } if pid == process::id() => format!("sent by this process, {}", user(uid)),
            Self::Process { pid, uid } => match name(pid) {
                Some(name) => format!("sent by pid {pid} (`{name}`), {}", user(uid)),
                None => format!("sent by pid {pid}, which has ended, {}", user(uid)),
            },
        }
    }
}

/// The name of a process, if it is there.
fn name(pid: u32) -> Option<String> {
    let name = fs::read(format!("/proc/{pid}/comm")).ok()?;
    let name = String::from_utf8_lossy(&name);
    Some(name.trim_end_matches('\n').escape_debug().take(SHOWN).collect())
}

/// A user by its name in the local file: name services may take for ever to answer.
fn user(uid: u32) -> String {
    let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
    match users.lines().find_map(|line| named(line, uid)) {
        Some(name) => format!("user {}", name.escape_debug().take(SHOWN).collect::<String>()),
        None => format!("user id {uid}"),
    }
}

/// The name in a line of `/etc/passwd`, if the line is of this user.
fn named(line: &str, uid: u32) -> Option<&str> {
    let mut fields = line.split(':');
    let (name, _, id) = (fields.next()?, fields.next()?, fields.next()?);
    (id.parse() == Ok(uid)).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sender_comes_out_of_a_number_as_it_went_in() {
        let process = Sender::Process { pid: 4_194_303, uid: u32::MAX };
        for sender in [Sender::Unknown, Sender::Kernel, Sender::Outside, Sender::Driver, process] {
            assert_eq!(Sender::unpacked(sender.packed()), sender);
        }
    }

    #[test]
    fn a_sender_is_named_by_pid_name_and_user() {
        let child = process::Command::new("sleep").arg("60").spawn();
        let mut child = child.unwrap();
        let sender = Sender::Process { pid: child.id(), uid: 0 };
        // It may not have been executed yet, and has the name of this program then.
        let text = sender.text();
        assert!(text.starts_with(&format!("sent by pid {} (`", child.id())), "{text}");
        assert!(text.ends_with("user root") || text.ends_with("user id 0"), "{text}");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(sender.text().contains(", which has ended, user "), "{}", sender.text());
        assert_eq!(Sender::Unknown.text(), "");
        assert_eq!(named("me:x:1000:1000:Me:/home/me:/bin/sh", 1000), Some("me"));
        assert_eq!(named("me:x:1000:1000:Me:/home/me:/bin/sh", 100), None);
    }
}
