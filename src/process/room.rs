//! Whether a file system still takes what workers write.
//!
//! A worker whose output goes to a file writes it itself, so on a full file system its own writes fail, and what it would say
//! of that is lost with them. The agent therefore looks itself.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::Path;

/// Below this many free bytes a stream that is shown elsewhere as well is not left to its file alone.
const LITTLE_BYTES: u64 = 1 << 20;
/// How much is written to see whether that is possible: more than a worker's last line, less than anybody misses.
const PROBE_BYTES: usize = 16 << 10;

/// Whether an error says that a file system, or a user's share of it, is full.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
}

/// Whether the file system of a folder has so little room that a worker's log would soon fill it.
pub(super) fn is_short(folder: &Path) -> bool {
    // Some file systems count nothing, and say 0 of 0.
    rustix::fs::statvfs(folder)
        .is_ok_and(|at| at.f_blocks > 0 && at.f_bavail.saturating_mul(at.f_frsize) < LITTLE_BYTES)
}

/// What has become of the logs in a worker's folder, if they can no longer be written. `None` if they can, or there are none.
///
/// Writes a small file and removes it: quotas and reserves are in no number that can be read.
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
    // Some file systems find out only when the bytes are to be kept.
    let written = file.write_all(&[0; PROBE_BYTES]).and_then(|()| file.sync_data());
    drop(file);
    fs::remove_file(&path)?;
    written
}

/// How much the file system says it has left.
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
