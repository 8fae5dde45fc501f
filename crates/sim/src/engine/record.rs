//! The record of a history: a digest of all events, and a line for each if they are kept.

use std::fmt::{self, Write as _};

use super::queue::Time;

/// The record of the events so far.
#[derive(Clone, Debug, Default)]
pub struct Record {
    digest: Digest,
    lines: Option<Vec<String>>,
}

impl Record {
    /// Keep a line for each event from now on.
    pub fn keep_lines(&mut self) {
        self.lines = Some(Vec::new());
    }

    /// The lines, if they are kept.
    pub fn lines(&self) -> &[String] {
        self.lines.as_deref().unwrap_or_default()
    }

    /// Digest of all events so far.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    pub(super) fn event(&mut self, now: Time, event: &impl fmt::Debug) {
        // Writing into a digest or a string cannot fail.
        let _ = write!(self.digest, "{} {event:?}", now.as_micros());
        if let Some(lines) = &mut self.lines {
            lines.push(format!("{:>12.6} {event:?}", now.as_secs_f64()));
        }
    }

    pub(super) fn remark(&mut self, now: Time, text: impl FnOnce() -> String) {
        if let Some(lines) = &mut self.lines {
            lines.push(format!("{:>12.6}   {}", now.as_secs_f64(), text()));
        }
    }
}

/// A digest of a history (FNV-1a). Equal seeds must give equal digests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digest(pub u64);

impl Default for Digest {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Digest {
    /// Add bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

impl fmt::Write for Digest {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.add(text.as_bytes());
        Ok(())
    }
}
