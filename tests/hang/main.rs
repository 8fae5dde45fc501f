//! Tests of what is seen of other processes from outside: frames of real Pythons, and what the kernel knows of them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

use std::time::Duration;

mod frames;
mod look;

/// Time limit for a step that takes milliseconds on an idle machine.
const LIMIT: Duration = Duration::from_secs(60);
