//! A process as the kernel shows it in `/proc`: whether it runs, and what it waits for. Pure, but for [`driver`].

pub mod calls;
#[cfg(feature = "io")]
pub mod driver;
pub mod texts;

use std::time::Duration;

use super::view::{Call, Class};

/// Most threads whose use of CPU and bytes is looked at.
pub const THREAD_LIMIT: usize = 1024;
/// Most children of a process that are looked at.
pub const CHILD_LIMIT: usize = 256;
/// From this share of one CPU on, a process is busy.
const BUSY_SHARE: f64 = 0.1;
/// From so many bytes in a second on, a process moves.
const MOVING_BYTES: f64 = (1 << 20) as f64;

/// What the kernel knows of a process at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// The process.
    pub pid: u32,
    /// Its name, as `pt_data_worker`. At most 15 bytes.
    pub name: String,
    /// The kernel's letter for the main thread's state: `S` sleeps, `R` runs, `D` sleeps and cannot be woken, `T` was stopped, `t` is
    /// traced, `Z` has ended.
    pub state: char,
    /// The call in which the main thread stands, if it stands in one that can be seen.
    pub call: Option<Call>,
    /// The kernel's function in which the main thread sleeps, if that can be seen.
    pub kernel_function: Option<String>,
    /// What its threads have used until now.
    pub usage: Vec<Usage>,
    /// Its children.
    pub children: Vec<u32>,
}

/// What a thread has used until now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// The thread.
    pub tid: u32,
    /// How long it has run or has waited for a CPU. A crowded host lets a busy thread wait.
    pub runnable: Duration,
    /// How many bytes it has read and written, by whatever call.
    pub bytes: u64,
}

impl Look {
    /// Whether a signal or a debugger has stopped it.
    pub fn is_stopped(&self) -> bool {
        matches!(self.state, 'T' | 't')
    }

    /// Whether it has ended, and only its exit status is left.
    pub fn has_ended(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }

    /// What it did since an earlier look.
    pub fn class_since(&self, earlier: &Self, elapsed: Duration) -> Class {
        let (mut runnable, mut bytes) = (Duration::ZERO, 0_u64);
        for usage in &self.usage {
            // What a thread has used that has begun since, it has used since.
            let before = earlier.usage.iter().find(|before| before.tid == usage.tid).copied().unwrap_or_default();
            runnable += usage.runnable.saturating_sub(before.runnable);
            bytes = bytes.saturating_add(usage.bytes.saturating_sub(before.bytes));
        }
        let seconds = elapsed.as_secs_f64();
        if bytes as f64 >= MOVING_BYTES * seconds && bytes > 0 {
            Class::Moving
        } else if runnable.as_secs_f64() >= BUSY_SHARE * seconds && !runnable.is_zero() {
            Class::Busy
        } else {
            Class::Idle
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenth_of_a_cpu_is_busy_and_a_mebibyte_a_second_moves() {
        let look = |usages: &[(u32, u64, u64)]| Look {
            usage: usages
                .iter()
                .map(|(tid, ms, bytes)| Usage { tid: *tid, runnable: Duration::from_millis(*ms), bytes: *bytes })
                .collect(),
            ..Look::default()
        };
        let before = look(&[(1, 60_000, 5 << 20), (2, 5_000, 0)]);
        let second = Duration::from_secs(1);
        for (after, expected) in [
            (look(&[(1, 60_099, 5 << 20), (2, 5_000, 0)]), Class::Idle),
            (look(&[(1, 60_100, 5 << 20), (2, 5_000, 0)]), Class::Busy),
            (look(&[(1, 60_050, 5 << 20), (2, 5_050, 0)]), Class::Busy),
            (look(&[(1, 60_000, 5 << 20), (3, 100, 0)]), Class::Busy),
            // A thread that has ended takes what it had used with it.
            (look(&[(2, 5_000, 0)]), Class::Idle),
            (look(&[(1, 60_900, 6 << 20), (2, 5_000, 0)]), Class::Moving),
            (look(&[(1, 60_000, (6 << 20) - 1), (2, 5_000, 0)]), Class::Idle),
        ] {
            assert_eq!(after.class_since(&before, second), expected, "{after:?}");
        }
        assert_eq!(before.class_since(&before, Duration::ZERO), Class::Idle);
    }
}
