//! The state of a process.

use std::fs;

/// The kernel's letter for a process's state, as in `/proc`: `D` is uninterruptible sleep, `Z` has ended. `None` if it is gone.
pub(crate) fn state_of(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The process's name precedes it and may contain anything, including parentheses.
    stat.rsplit_once(") ")?.1.chars().next()
}
