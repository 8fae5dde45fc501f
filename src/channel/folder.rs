//! The folder of an agent's socket, which only the agent's user may enter.

use std::env;
use std::ffi::{CString, OsString};
use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Longest path of a socket, in bytes. The kernel takes 107.
const PATH_LIMIT_BYTES: usize = 100;
const SOCKET: &str = "agent";

/// A temporary folder. Dropping it removes it with its socket.
#[derive(Debug)]
pub(super) struct Folder(PathBuf);

impl Folder {
    /// Makes a folder below the first of these that takes it: the folder for temporary files, and the system's.
    pub(super) fn make() -> io::Result<Folder> {
        let bases = [env::temp_dir(), "/tmp".into(), "/var/tmp".into(), "/dev/shm".into()];
        let mut failed = Vec::new();
        for base in bases {
            match make_below(&base) {
                Ok(path) => return Ok(Folder(path)),
                Err(error) => failed.push(format!("`{}`: {error}", base.display())),
            }
        }
        Err(io::Error::other(format!("cannot make a folder for the agent's socket; tried {}", failed.join(", "))))
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.0.join(SOCKET)
    }
}

/// Workers may have another working directory, so the path is absolute.
fn make_below(base: &Path) -> io::Result<PathBuf> {
    let template = std::path::absolute(base)?.join("elastic_rs-XXXXXX");
    if template.join(SOCKET).as_os_str().len() > PATH_LIMIT_BYTES {
        return Err(io::Error::other(format!("too long for a socket, whose path may have {PATH_LIMIT_BYTES} bytes")));
    }
    let template = CString::new(template.as_os_str().as_bytes())?.into_raw();
    // SAFETY: the call replaces six letters of a string that is taken back afterwards. The folder's mode is 0700.
    let (made, path) = unsafe {
        let made = if libc::mkdtemp(template).is_null() { Err(io::Error::last_os_error()) } else { Ok(()) };
        (made, CString::from_raw(template))
    };
    made.map(|()| OsString::from_vec(path.into_bytes()).into())
}

impl Drop for Folder {
    fn drop(&mut self) {
        // If this fails, only an empty socket is left.
        let _ = fs::remove_file(self.socket());
        let _ = fs::remove_dir(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_folder_is_its_owners_alone_and_goes() {
        let folder = Folder::make().unwrap();
        let path = folder.socket();
        let parent = path.parent().unwrap();
        assert!(path.is_absolute() && path.as_os_str().len() <= PATH_LIMIT_BYTES, "{}", path.display());
        assert_eq!(parent.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        fs::write(&path, "").unwrap();
        drop(folder);
        assert!(!parent.exists());
    }

    #[test]
    fn a_folder_whose_socket_would_have_too_long_a_path_is_not_made() {
        let long = env::temp_dir().join("x".repeat(PATH_LIMIT_BYTES));
        assert!(make_below(&long).unwrap_err().to_string().starts_with("too long"));
        assert!(make_below(Path::new("/dev/null")).is_err());
    }
}
