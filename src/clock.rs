//! The monotonic clock, sleeping until an optional deadline, and warnings about slow waits.

use std::future::{Future, pending};
use std::pin::pin;
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
