//! Work that may hang, on a dedicated thread, and how to tell that it does.
//!
//! A file system that hangs and a machine that is busy look alike to a time limit: nothing comes. They differ in what the thread is doing.
//! One that hangs sleeps in the kernel; one that is late waits for a processor. So whoever is in a hurry asks which it is.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};

use super::spawn;

/// How often the thread is looked at. The clock that timers go by has no finer one.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);
/// After how many looks in a row at a thread that sleeps it is said to hang: one look may meet a short sleep.
const ASLEEP_LOOKS: u8 = 2;

/// Work on a dedicated thread. Dropping it lets the thread go on alone. It must wait for nothing but what may hang.
#[derive(Debug)]
pub struct Errand<T> {
    answer: oneshot::Receiver<T>,
    /// The thread's number; 0 until it runs.
    thread: Arc<AtomicI32>,
    look_at: Instant,
    asleep_looks: u8,
}

/// What became of an errand so far.
#[derive(Debug, PartialEq, Eq)]
pub enum Progress<T> {
    /// It is done.
    Done(T),
    /// It sleeps in the kernel, and may do so for ever.
    Hangs,
    /// There was no thread for it, or it panicked.
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
            // Nobody may want to know any more.
            let _ = sender.send(work());
        });
        if let Err(error) = started {
            tracing::warn!(%error, "no thread for work that may hang");
        }
        Self { answer, thread, look_at: Instant::now() + LOOK_INTERVAL, asleep_looks: 0 }
    }

    /// Wait until it is done or is seen to hang, which takes 2 to 3 ms. May be dropped and called again.
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

    /// Wait until it is done, however long that takes; `None` if it is lost. May be dropped and called again.
    pub async fn done(&mut self) -> Option<T> {
        (&mut self.answer).await.ok()
    }

    fn is_asleep(&self) -> bool {
        let number = self.thread.load(Ordering::Relaxed);
        let stat = std::fs::read_to_string(format!("/proc/self/task/{number}/stat")).unwrap_or_default();
        // The name before it may hold anything, parentheses too.
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
        // Many times as long as a hang takes to be seen.
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
