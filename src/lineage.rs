//! What `/proc` says of other processes: whether they live, and from whom they descend.

use std::fs;

/// Most generations between a process and its ancestor.
const GENERATIONS: usize = 64;

/// The kernel's letter for a process's state, as in `/proc`: `D` is uninterruptible sleep, `Z` has ended. `None` if it is gone.
pub(crate) fn state_of(pid: u32) -> Option<char> {
    state_and_parent(pid).map(|(state, _)| state)
}

/// Whether a process has not ended.
pub(crate) fn is_alive(pid: u32) -> bool {
    state_of(pid).is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// A process and its ancestors, nearest first.
pub(crate) fn lineage(pid: u32) -> impl Iterator<Item = u32> {
    let parent = |pid: &u32| state_and_parent(*pid).map(|(_, parent)| parent).filter(|parent| *parent > 0);
    std::iter::successors(Some(pid), parent).take(GENERATIONS)
}

fn state_and_parent(pid: u32) -> Option<(char, u32)> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    // The process's name precedes them and may contain anything, including parentheses.
    let stat = String::from_utf8_lossy(&stat);
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use std::process::{self, Command};

    use super::*;

    #[test]
    fn a_process_descends_from_itself_and_from_its_parents_and_a_zombie_has_ended() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        assert_eq!(lineage(child.id()).take(2).collect::<Vec<_>>(), [child.id(), process::id()]);
        assert!(is_alive(child.id()));
        child.kill().unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        // It is not reaped, so it stays a zombie.
        let ended = rustix::process::WaitIdOptions::EXITED | rustix::process::WaitIdOptions::NOWAIT;
        rustix::process::waitid(rustix::process::WaitId::Pid(pid), ended).unwrap();
        assert_eq!(state_of(child.id()), Some('Z'));
        assert!(!is_alive(child.id()));
        child.wait().unwrap();
        assert_eq!(lineage(u32::MAX).count(), 1, "nothing is known of it");
    }
}
