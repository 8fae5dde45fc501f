//! Work that may hang, on a dedicated thread, and detection of the hang.
//!
//! A time limit cannot tell a file system that hangs from a machine that is busy. The state of the thread can: a thread that
//! hangs sleeps in the kernel, and a thread that is late waits for a processor. So a caller in a hurry looks at that state.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};

use super::spawn;

/// How often the thread's state is looked at. Timers have no finer resolution.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);
/// Number of looks in a row that find the thread asleep, after which it counts as hanging. One look may meet a short sleep.
const ASLEEP_LOOKS: u8 = 2;

/// Work on a dedicated thread. Dropping it detaches the thread. The work must not sleep for any other reason than a hang.
#[derive(Debug)]
pub struct Errand<T> {
    answer: oneshot::Receiver<T>,
    /// The thread's id; 0 until it runs.
    thread: Arc<AtomicI32>,
    look_at: Instant,
    asleep_looks: u8,
}

/// The state of an errand.
#[derive(Debug, PartialEq, Eq)]
pub enum Progress<T> {
    /// It is done.
    Done(T),
    /// It sleeps in the kernel, and may do so for ever.
    Hangs,
    /// The thread could not be started, or the work panicked.
    Lost,
}

impl<T: Send + 'static> Errand<T> {
    /// Begin. Needs a tokio runtime with time.
    pub fn run(name: String, work: impl FnOnce() -> T + Send + 'static) -> Self {
        let (sender, answer) = oneshot::channel();
        let thread = Arc::new(AtomicI32::new(0));
        let number = thread.clone();
        let started = spawn(name, move || {
            number.store(rustix::thread::gettid().as_raw_pid(), Ordering::Relaxed);
            // The caller may have stopped waiting.
            let _ = sender.send(work());
        });
        if let Err(error) = started {
            tracing::warn!(%error, "cannot start a thread for work that may hang");
        }
        Self { answer, thread, look_at: Instant::now() + LOOK_INTERVAL, asleep_looks: 0 }
    }

    /// Wait until the work is done or found to hang, which takes 2 to 3 ms. May be dropped and called again.
    pub async fn done_or_hangs(&mut self) -> Progress<T> {
        loop {
            tokio::select! {
                biased;
                done = &mut self.answer => return done.map_or(Progress::Lost, Progress::Done),
                () = sleep_until(self.look_at) => {
                    self.look_at = Instant::now() + LOOK_INTERVAL;
                    self.asleep_looks = if self.is_asleep() { self.asleep_looks + 1 } else { 0 };
                    if self.asleep_looks >= ASLEEP_LOOKS {
                        self.asleep_looks = 0;
                        return Progress::Hangs;
                    }
                }
            }
        }
    }

    /// Wait until the work is done, however long that takes; `None` if it is lost. May be dropped and called again.
    pub async fn done(&mut self) -> Option<T> {
        (&mut self.answer).await.ok()
    }

    fn is_asleep(&self) -> bool {
        let number = self.thread.load(Ordering::Relaxed);
        let stat = std::fs::read_to_string(format!("/proc/self/task/{number}/stat")).unwrap_or_default();
        // The thread's name precedes it and may contain anything, including parentheses.
        let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
        matches!(state, Some('S' | 'D'))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[tokio::test]
    async fn work_that_is_done_is_told() {
        let mut errand = Errand::run("test".to_owned(), || 7);
        assert_eq!(errand.done_or_hangs().await, Progress::Done(7));
    }

    #[tokio::test]
    async fn work_that_sleeps_hangs_and_may_be_done_later() {
        let (read, write) = rustix::pipe::pipe().expect("a pipe");
        let mut errand = Errand::run("test".to_owned(), move || rustix::io::read(read, &mut [0; 8]));
        assert_eq!(errand.done_or_hangs().await, Progress::Hangs);
        rustix::io::write(write, b"four").expect("room");
        assert_eq!(errand.done().await, Some(Ok(4)));
    }

    #[tokio::test]
    async fn work_that_takes_long_does_not_hang() {
        let enough = Arc::new(AtomicBool::new(false));
        let seen = enough.clone();
        let mut errand = Errand::run("test".to_owned(), move || {
            while !seen.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        // Many times as long as the detection of a hang takes.
        let patience = Duration::from_millis(50);
        let early = tokio::time::timeout(patience, errand.done_or_hangs()).await;
        enough.store(true, Ordering::Relaxed);
        assert!(early.is_err(), "{early:?}");
        assert_eq!(errand.done_or_hangs().await, Progress::Done(()));
    }

    #[tokio::test]
    async fn work_that_panics_is_lost() {
        let mut errand: Errand<()> = Errand::run("test".to_owned(), || panic!("as asked"));
        assert_eq!(errand.done().await, None);
    }
}
