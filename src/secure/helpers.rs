//! The threads on which handshakes run, so that unauthenticated peers delay neither sessions nor decisions.

use std::io;
use std::mem;
use std::process;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio::runtime::{Builder, Handle, Runtime};

use crate::threads;

/// How many there are, for all acceptors of the process.
const THREADS: usize = 2;

static SHARED: Mutex<Weak<Helpers>> = Mutex::new(Weak::new());

/// A small runtime. It begins with the process's first acceptor, and ends with its last.
#[derive(Debug)]
pub(super) struct Helpers {
    /// `None` only while `self` is dropped.
    runtime: Option<Runtime>,
    handle: Handle,
    started_by: u32,
}

impl Helpers {
    /// The process's, which are started if there are none.
    ///
    /// # Errors
    /// The threads cannot be started.
    pub fn shared() -> io::Result<Arc<Self>> {
        let mut shared = SHARED.lock();
        // Threads do not survive a fork.
        if let Some(running) = shared.upgrade().filter(|running| running.started_by == process::id()) {
            return Ok(running);
        }
        let number = AtomicUsize::new(1);
        let runtime = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name_fn(move || format!("handshake-{}", number.fetch_add(1, Ordering::Relaxed)))
            .on_thread_start(threads::take_no_signals)
            .enable_io()
            .enable_time()
            .build()?;
        let handle = runtime.handle().clone();
        let started = Arc::new(Self { runtime: Some(runtime), handle, started_by: process::id() });
        *shared = Arc::downgrade(&started);
        Ok(started)
    }

    /// Where to spawn what they are to do.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }
}

impl Drop for Helpers {
    fn drop(&mut self) {
        match self.runtime.take() {
            // It may be dropped by one of its own threads.
            Some(runtime) if self.started_by == process::id() => runtime.shutdown_background(),
            none_of_ours => mem::forget(none_of_ours),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn all_acceptors_share_the_threads_which_take_no_signals() {
        let (one, other) = (Helpers::shared().unwrap(), Helpers::shared().unwrap());
        assert!(Arc::ptr_eq(&one, &other));
        let look = async { (std::thread::current().name().unwrap_or_default().to_owned(), threads::blocked()) };
        let (name, mask) = one.handle().spawn(look).await.unwrap();
        assert!(name.starts_with("handshake-"), "{name}");
        let inside = threads::spawn("test".to_owned(), threads::blocked).unwrap().join().unwrap();
        assert_eq!(mask, inside);
    }
}
