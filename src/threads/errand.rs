//! Work that may hang, on a dedicated thread, and detection of the hang.
//!
//! A time limit cannot tell a file system that hangs from a machine that is busy. The state of the thread can: a thread that
//! hangs sleeps in the kernel, and a thread that is late waits for a processor. So a caller in a hurry looks at that state.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread::sleep;
use std::time::Duration;

use tokio::sync::mpsc;

use super::spawn;

/// How often the thread's state is looked at. The runtime's timers would round this up to 2 ms, so a second thread looks.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);
/// Number of looks in a row that find the thread asleep, after which it counts as hanging. One look may meet a short sleep.
const ASLEEP_LOOKS: u8 = 2;

/// Work on a dedicated thread. Dropping it detaches the thread. The work must not sleep for any other reason than a hang.
#[derive(Debug)]
pub struct Errand<T> {
    progress: mpsc::UnboundedReceiver<Progress<T>>,
}

/// The state of an errand.
#[derive(Debug, PartialEq, Eq)]
pub enum Progress<T> {
    /// It is done.
    Done(T),
    /// It sleeps in the kernel, and may do so for ever. Returned once.
    Hangs,
    /// The thread could not be started, or the work panicked.
    Lost,
}

/// The id of the working thread: [`NOT_YET`] until it runs, [`ENDED`] after it has ended.
type ThreadId = Arc<AtomicI32>;

const NOT_YET: i32 = 0;
const ENDED: i32 = -1;

/// Says that the thread has ended, also when the work panics.
struct Ends(ThreadId);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.store(ENDED, Ordering::Relaxed);
    }
}

impl<T: Send + 'static> Errand<T> {
    /// Begin.
    pub fn run(name: &str, work: impl FnOnce() -> T + Send + 'static) -> Self {
        let (sender, progress) = mpsc::unbounded_channel();
        let (thread, watched) = (ThreadId::default(), sender.clone());
        let ends = Ends(thread.clone());
        let works = spawn(name.to_owned(), move || {
            ends.0.store(rustix::thread::gettid().as_raw_pid(), Ordering::Relaxed);
            // The caller may have stopped waiting.
            let _ = sender.send(Progress::Done(work()));
        });
        let watches = works.and_then(|_| {
            spawn(format!("{name}-watch"), move || {
                if is_found_asleep(&thread) {
                    let _ = watched.send(Progress::Hangs);
                }
            })
        });
        if let Err(error) = watches {
            tracing::warn!(%error, "cannot start a thread for work that may hang");
        }
        Self { progress }
    }

    /// Wait until the work is done or found to hang, which takes 2 ms. May be dropped and called again.
    pub async fn done_or_hangs(&mut self) -> Progress<T> {
        self.progress.recv().await.unwrap_or(Progress::Lost)
    }

    /// Wait until the work is done, however long that takes; `None` if it is lost. May be dropped and called again.
    pub async fn done(&mut self) -> Option<T> {
        loop {
            match self.done_or_hangs().await {
                Progress::Done(answer) => return Some(answer),
                Progress::Hangs => {}
                Progress::Lost => return None,
            }
        }
    }
}

/// Watches the thread until it ends or is found asleep.
fn is_found_asleep(thread: &AtomicI32) -> bool {
    let mut asleep_looks = 0;
    while asleep_looks < ASLEEP_LOOKS {
        sleep(LOOK_INTERVAL);
        match thread.load(Ordering::Relaxed) {
            ENDED => return false,
            NOT_YET => {}
            id if is_asleep(id) => asleep_looks += 1,
            _ => asleep_looks = 0,
        }
    }
    true
}

fn is_asleep(id: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{id}/stat")).unwrap_or_default();
    // The thread's name precedes the state and may contain anything, including parentheses.
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    matches!(state, Some('S' | 'D'))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[tokio::test]
    async fn work_that_is_done_is_told() {
        let mut errand = Errand::run("test", || 7);
        assert_eq!(errand.done_or_hangs().await, Progress::Done(7));
    }

    #[tokio::test]
    async fn work_that_sleeps_hangs_and_may_be_done_later() {
        let (read, write) = rustix::pipe::pipe().expect("a pipe");
        let mut errand = Errand::run("test", move || rustix::io::read(read, &mut [0; 8]));
        assert_eq!(errand.done_or_hangs().await, Progress::Hangs);
        rustix::io::write(write, b"four").expect("room");
        assert_eq!(errand.done().await, Some(Ok(4)));
    }

    #[tokio::test]
    async fn work_that_takes_long_does_not_hang() {
        let enough = Arc::new(AtomicBool::new(false));
        let seen = enough.clone();
        let mut errand = Errand::run("test", move || {
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
        let mut errand: Errand<()> = Errand::run("test", || panic!("as asked"));
        assert_eq!(errand.done().await, None);
    }
}
