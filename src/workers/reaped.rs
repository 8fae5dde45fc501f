//! Waiting for the end of a child.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use tokio::io::unix::AsyncFd;
use tokio::time::sleep;

/// The first pause between two looks at a child that has no pidfd: on kernels before 5.3, in gVisor, and under older seccomp profiles.
/// It may be about to end. Each pause is twice as long as the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
/// The longest one.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// Wait until a child of this process has ended, and reap it. `end`: its pidfd. `reap` must not wait; it returns `None` while the child
/// runs. No thread waits: one for each child would take all of the runtime's.
pub(crate) async fn reaped<T>(
    end: Option<&AsyncFd<OwnedFd>>,
    mut reap: impl FnMut() -> io::Result<Option<T>>,
) -> io::Result<T> {
    let mut pause = FIRST_PAUSE;
    loop {
        if let Some(end) = end {
            let _ = end.readable().await?;
        }
        if let Some(ended) = reap()? {
            return Ok(ended);
        }
        sleep(pause).await;
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
}
