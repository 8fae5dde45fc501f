//! Whether this process was forked since some moment.
//!
//! `getpid(2)` would say so too, at the price of a system call in each check. Instead the C library counts: it calls a handler in
//! every child of its `fork`, with which Python forks.

use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

/// The forks between the first process and this one, since [`count`] was called first.
static FORKS: AtomicU64 = AtomicU64::new(0);

// Declared here because the crate `libc` lacks it on Linux.
unsafe extern "C" {
    fn pthread_atfork(
        prepare: Option<unsafe extern "C" fn()>,
        parent: Option<unsafe extern "C" fn()>,
        child: Option<unsafe extern "C" fn()>,
    ) -> libc::c_int;
}

/// The current count. In a child that is forked later, [`now`] returns another.
pub(crate) fn count() -> u64 {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        // SAFETY: the handler may run in a forked child, since it changes one atomic number. It is never unloaded: Python does not
        // unload extension modules.
        let failed = unsafe { pthread_atfork(None, None, Some(in_child)) };
        if failed != 0 {
            tracing::warn!(
                "a child that is forked from this process will not notice it: pthread_atfork failed with {failed}"
            );
        }
    });
    now()
}

/// The current count, after a call of [`count`].
#[inline]
pub(crate) fn now() -> u64 {
    FORKS.load(Ordering::Relaxed)
}

unsafe extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}
