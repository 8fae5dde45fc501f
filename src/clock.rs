//! The monotonic clock, sleeping until an optional deadline, and warnings about slow waits.

use std::future::{Future, pending};
use std::pin::pin;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use tokio::time::{sleep, sleep_until};

/// Sleep until `deadline`; for ever without one.
pub(crate) async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(at) => sleep_until(at.into()).await,
        None => pending().await,
    }
}

/// Waits longer than this are reported to the operator.
const SLOW: Duration = Duration::from_secs(1);

/// Do some work, and log what it waits for if it takes more than a second.
pub(crate) async fn log_if_slow<T>(work: impl Future<Output = T>, text: impl FnOnce() -> String) -> T {
    let mut work = pin!(work);
    tokio::select! {
        biased;
        done = &mut work => done,
        () = sleep(SLOW) => {
            tracing::warn!("{}", text());
            work.await
        }
    }
}

/// Nanoseconds of the system's monotonic clock, which all processes of a machine share.
pub fn monotonic_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let (seconds, nanos) = (u64::try_from(time.tv_sec).unwrap_or(0), u64::try_from(time.tv_nsec).unwrap_or(0));
    seconds.wrapping_mul(1_000_000_000).wrapping_add(nanos)
}

/// The instant of a time of [`monotonic_ns`]. The same time is the same instant whenever it is asked for, so that it can be compared
/// with an earlier answer.
pub fn instant_of(ns: u64) -> Instant {
    static ORIGIN: OnceLock<(Instant, u64)> = OnceLock::new();
    let (origin, origin_ns) = *ORIGIN.get_or_init(|| (Instant::now(), monotonic_ns()));
    let before = Duration::from_nanos(origin_ns.saturating_sub(ns));
    origin.checked_sub(before).unwrap_or(origin) + Duration::from_nanos(ns.saturating_sub(origin_ns))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_the_same_instant_whenever_it_is_asked_for() {
        let ns = monotonic_ns();
        let instant = instant_of(ns);
        for _ in 0..1000 {
            assert_eq!(instant_of(ns), instant);
        }
        assert_eq!(instant_of(ns + 7), instant + Duration::from_nanos(7));
        assert_eq!(instant_of(ns - 7), instant - Duration::from_nanos(7));
    }
}
