//! The certificates of `tests/data/tls`, for tests.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use super::CertificateFiles;

/// A folder with a node's files, which is gone at the end.
#[derive(Debug)]
pub(crate) struct Folder(PathBuf);

impl Folder {
    /// The files of this name, and the authorities of these.
    pub fn new(name: &str, authorities: &[&str]) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("elastic_rs-tls-{}-{number}", std::process::id()));
        fs::create_dir_all(&path).expect("a folder for a test");
        let folder = Self(path);
        folder.put("cert.pem", &data(&format!("{name}.pem")));
        folder.put("key.pem", &data(&format!("{name}.key")));
        folder.put("ca.pem", &authorities.iter().map(|name| data(&format!("{name}.pem"))).collect::<String>());
        folder
    }

    /// Write a file that its owner alone may read.
    pub fn put(&self, name: &str, text: &str) {
        let path = self.0.join(name);
        fs::write(&path, text).expect("it can be written");
        fs::set_permissions(path, Permissions::from_mode(0o600)).expect("it is ours");
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub fn files(&self) -> CertificateFiles {
        let [cert, key, ca] = ["cert.pem", "key.pem", "ca.pem"].map(|name| self.path(name));
        CertificateFiles { cert, key, ca }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The text of a file.
pub(crate) fn data(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tls").join(name))
        .expect("a file of tests/data/tls")
}
