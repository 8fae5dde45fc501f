//! The limit of open files of this process, the part of it that connections without a proof may take, and descriptors that are kept
//! apart from the standard streams.
//!
//! A protected endpoint, and an acceptor of a tunnel, let unauthenticated peers in to prove themselves. Each takes a descriptor, and the
//! job's connections need descriptors too. So this process's soft limit is raised by as many as unauthenticated peers may take, as far as
//! the hard limit allows. A driver with many agents raises it, too. Workers, and programs that a driver starts, begin with the limit that
//! this process had before.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use parking_lot::Mutex;
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Most permits of one kind for unauthenticated peers: handshakes that are under way, for instance.
const MOST_PERMITS: usize = 256;
/// Fewest.
const FEWEST_PERMITS: usize = 16;
/// How many connections may wait for a permit, or have sent nothing yet, for each permit: a job's nodes come at the same time.
pub(crate) const WAITING_TO_ONE: usize = 4;
/// Kinds of permits: at the endpoint, for connections that say nothing yet, for handshakes, for those that wait for one, and for
/// requests of HTTP, which are fewer; at a tunnel's acceptor, for handshakes, and for those that wait for one.
const KINDS: usize = 3 + 3 * WAITING_TO_ONE;
/// The part of the limit that unauthenticated peers may take, where it could not be raised.
const SHARE: usize = 4;

/// A soft limit that was changed here. `None` is no limit.
#[derive(Clone, Copy, Debug)]
struct Changed {
    before: Option<u64>,
    now: Option<u64>,
}

static CHANGED: Mutex<Option<Changed>> = Mutex::new(None);
static PERMITS: OnceLock<usize> = OnceLock::new();

/// Set this process's soft limit, if it may. Returns the one before, and the present one.
pub(crate) fn set_soft_limit(wanted: impl FnOnce(Rlimit) -> Option<u64>) -> (Option<u64>, Option<u64>) {
    let mut changed = CHANGED.lock();
    let limit = getrlimit(Resource::Nofile);
    let current = wanted(limit);
    if current == limit.current || setrlimit(Resource::Nofile, Rlimit { current, ..limit }).is_err() {
        return (limit.current, limit.current);
    }
    let first = changed.filter(|changed| changed.now == limit.current).map_or(limit.current, |changed| changed.before);
    *changed = Some(Changed { before: first, now: current });
    (limit.current, current)
}

/// Make room for unauthenticated peers, the first time that it is called in this process. Returns how many permits of one kind there are for
/// them.
pub(crate) fn pending_handshake_permits() -> usize {
    *PERMITS.get_or_init(|| {
        let (before, now) = set_soft_limit(|limit| raised(limit).current);
        permits(before, now)
    })
}

/// The limit that workers and other programs start with. `None`: this process's, which was not raised here, or has been changed since.
pub(crate) fn limit_of_workers() -> Option<Rlimit> {
    let Changed { before, now } = (*CHANGED.lock())?;
    let limit = getrlimit(Resource::Nofile);
    (limit.current == now && now != before).then_some(Rlimit { current: before, ..limit })
}

/// The limit with room for unauthenticated peers, as far as the hard limit allows.
fn raised(limit: Rlimit) -> Rlimit {
    let wanted = limit.current.map(|soft| soft.saturating_add((KINDS * MOST_PERMITS) as u64));
    // No limit is the highest.
    let current = match (wanted, limit.maximum) {
        (Some(wanted), Some(hard)) => Some(wanted.min(hard)),
        (wanted, _) => wanted,
    };
    Rlimit { current, ..limit }
}

/// How many permits of one kind unauthenticated peers have, with this soft limit before it was raised and now.
fn permits(before: Option<u64>, now: Option<u64>) -> usize {
    let (Some(before), Some(now)) = (before, now) else { return MOST_PERMITS };
    let room = usize::try_from((now - before).max(before / SHARE as u64)).unwrap_or(usize::MAX);
    (room / KINDS).clamp(FEWEST_PERMITS, MOST_PERMITS)
}

/// A copy of a descriptor above the standard streams.
pub(crate) fn above_stdio(fd: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    fcntl_dupfd_cloexec(fd, 3)
}

/// Moves a descriptor above the standard streams. It may be below 3 if the agent has closed those.
pub(crate) fn lifted(fd: OwnedFd) -> Result<OwnedFd, Errno> {
    if fd.as_raw_fd() > 2 { Ok(fd) } else { above_stdio(fd.as_fd()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handshakes_take_what_was_added_or_a_quarter_of_what_there_is() {
        for (soft, hard, limit, expected) in [
            (Some(1024), Some(524_288), Some(4864), 256),
            (Some(1024), None, Some(4864), 256),
            (Some(1024), Some(1024), Some(1024), 17),
            (Some(1024), Some(2944), Some(2944), 128),
            (Some(64), Some(64), Some(64), FEWEST_PERMITS),
            (Some(65_536), Some(65_536), Some(65_536), 256),
            (None, None, None, 256),
        ] {
            let now = raised(Rlimit { current: soft, maximum: hard });
            assert_eq!((now.current, now.maximum), (limit, hard), "{soft:?} of {hard:?}");
            assert_eq!(permits(soft, now.current), expected, "{soft:?} of {hard:?}");
        }
    }
}
