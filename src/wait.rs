//! Waiting for a moment that there may not be.

use std::future::pending;
use std::time::Instant;

use tokio::time::sleep_until;

/// Waits until `deadline`; for ever without one.
pub(crate) async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(at) => sleep_until(at.into()).await,
        None => pending().await,
    }
}
