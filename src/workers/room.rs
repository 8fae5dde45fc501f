//! Whether a file system has room for what workers write.
//!
//! A worker whose output goes to a file writes the file itself. On a full file system its writes fail, and its message about
//! that is lost with them. The agent therefore checks itself (`docs/decisions/0046-a-full-disk-is-reported-not-prevented.md`).

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::Path;

/// With fewer free bytes than this, a stream that is also shown on the console goes through the agent.
const LITTLE_BYTES: u64 = 1 << 20;
/// Bytes of the trial write: more than a worker's last line, less than anybody misses.
const PROBE_BYTES: usize = 16 << 10;

/// Whether an error says that a file system or a quota is full.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
}

/// Whether the file system of a folder has so little free space that a worker's log would soon fill it.
pub(super) fn is_short(folder: &Path) -> bool {
    // Some file systems report nothing: 0 of 0.
    rustix::fs::statvfs(folder)
        .is_ok_and(|at| at.f_blocks > 0 && at.f_bavail.saturating_mul(at.f_frsize) < LITTLE_BYTES)
}

/// Why the logs in a worker's folder can no longer be written, in words. `None` if they can be written, or there are none.
///
/// Writes a small file and removes it, because no number that can be read includes quotas and reserved blocks.
pub(crate) fn why_no_more_logs(folder: &Path) -> Option<String> {
    let is_log = |entry: fs::DirEntry| entry.path().extension().is_some_and(|it| it == "log");
    if !fs::read_dir(folder).ok()?.flatten().any(is_log) {
        return None;
    }
    let error = probe(folder).err().filter(is_full)?;
    Some(format!(
        "its log folder `{}` is full: {error}{}; what it printed there last is lost, and printing fails: make room, or choose \
         another --log-dir",
        folder.display(),
        free(folder).unwrap_or_default(),
    ))
}

fn probe(folder: &Path) -> io::Result<()> {
    let path = folder.join(format!(".room-{}", std::process::id()));
    let mut file = OpenOptions::new().write(true).create_new(true).open(&path)?;
    // Some file systems report the error only on flush.
    let written = file.write_all(&[0; PROBE_BYTES]).and_then(|()| file.sync_data());
    drop(file);
    fs::remove_file(&path)?;
    written
}

/// The free space that the file system reports.
fn free(folder: &Path) -> Option<String> {
    let at = rustix::fs::statvfs(folder).ok()?;
    let bytes = at.f_bavail.saturating_mul(at.f_frsize);
    let files = if at.f_files > 0 { format!(" and {} files", at.f_favail) } else { String::new() };
    Some(format!(" ({bytes} bytes{files} left)"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_with_room_is_no_cause_and_keeps_no_trace() {
        let folder = std::env::temp_dir().join(format!("elastic_rs-room-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        assert_eq!(why_no_more_logs(&folder), None);
        fs::write(folder.join("stdout.log"), "text").unwrap();
        assert_eq!(why_no_more_logs(&folder), None);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(why_no_more_logs(&folder), None);
        assert!(!is_short(&folder));
    }
}
