//! Tokens from a file, which is read again when it has changed.
//!
//! With two tokens an end shows the first, and accepts both: so a token is replaced while jobs run.

use std::fs::{File, Metadata};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use parking_lot::Mutex;

use super::protection::ProtectionError;
use super::token::Token;

/// No token file is larger.
const LIMIT_BYTES: u64 = 4096;
/// What others, and everybody but the owner who writes, may not do.
const FORBIDDEN: u32 = 0o137;

/// The tokens of a file: one, or two while one is replaced by another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tokens(pub Token, pub Option<Token>);

impl Tokens {
    /// Both.
    pub fn into_vec(self) -> Vec<Token> {
        [Some(self.0), self.1].into_iter().flatten().collect()
    }

    fn parse(text: &str) -> Result<Self, String> {
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let mut tokens = lines.map(|line| Token::parse(line).map_err(|error| format!("has {error}")));
        let Some(first) = tokens.next().transpose()? else {
            return Err("holds no token; `elastic-rs token new` writes one".to_owned());
        };
        let second = tokens.next().transpose()?;
        match tokens.count() {
            0 => Ok(Self(first, second)),
            more => Err(format!("holds {} tokens; one, or two while one replaces the other, are allowed", more + 2)),
        }
    }
}

/// Tells whether a file has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    inode: (u64, u64),
    size: u64,
    modified: Option<SystemTime>,
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        let inode = (metadata.dev(), metadata.ino());
        Self { inode, size: metadata.len(), modified: metadata.modified().ok() }
    }
}

/// A file with tokens.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    read: Mutex<(Stamp, Tokens)>,
}

impl TokenFile {
    /// Read the file.
    ///
    /// # Errors
    /// It cannot be read, others than its owner and group may read it, or it does not hold one or two tokens.
    pub fn open(path: &Path) -> Result<Self, ProtectionError> {
        Ok(Self { path: path.to_owned(), read: Mutex::new(read(path)?) })
    }

    /// The tokens that it holds now. If it has been changed and cannot be used any more, those that it held before.
    pub fn tokens(&self) -> Tokens {
        let mut known = self.read.lock();
        let stamp = std::fs::metadata(&self.path).map(|metadata| Stamp::of(&metadata));
        if !matches!(stamp, Ok(stamp) if stamp == known.0) {
            match read(&self.path) {
                Ok(new) => {
                    if new.1 != known.1 {
                        let ids: Vec<_> = new.1.clone().into_vec().iter().map(|token| token.id().to_string()).collect();
                        let (path, ids) = (self.path.display(), ids.join(", "));
                        tracing::info!("the token file `{path}` has changed; the ids of its keys are now: {ids}");
                    }
                    *known = new;
                }
                Err(error) => {
                    if let Ok(stamp) = stamp {
                        known.0 = stamp; // told once for each change
                        tracing::warn!("{error}; the tokens that it held before stay valid in this process");
                    }
                }
            }
        }
        known.1.clone()
    }
}

fn read(path: &Path) -> Result<(Stamp, Tokens), ProtectionError> {
    let failed = |source| ProtectionError::Read { path: path.to_owned(), source };
    let unusable = |what| ProtectionError::Unusable { path: path.to_owned(), what };
    let file = File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(unusable("is not a file".to_owned()));
    }
    let mode = metadata.mode() & 0o777;
    if mode & FORBIDDEN != 0 {
        return Err(unusable(format!(
            "has the mode {mode:04o}: others may read or change it; 0600, 0400, 0640 and 0440 are allowed"
        )));
    }
    let mut text = String::new();
    file.take(LIMIT_BYTES + 1).read_to_string(&mut text).map_err(failed)?;
    if text.len() as u64 > LIMIT_BYTES {
        return Err(unusable(format!("has more than {LIMIT_BYTES} bytes")));
    }
    Ok((Stamp::of(&metadata), Tokens::parse(&text).map_err(unusable)?))
}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, set_permissions, write};
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const ONE: &str = "0123456789abcdef0123456789abcdef";
    const TWO: &str = "fedcba9876543210fedcba9876543210";

    fn file(name: &str, text: &str, mode: u32) -> PathBuf {
        let path = std::env::temp_dir().join(format!("elastic_rs-token-{}-{name}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        write(&path, text).unwrap();
        set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        path
    }

    #[test]
    fn a_file_that_cannot_be_used_is_named_with_the_reason() {
        let long = "#".repeat(4097);
        for (name, text, mode, why) in [
            ("world", ONE, 0o644, "has the mode 0644: others may read"),
            ("group", ONE, 0o660, "has the mode 0660"),
            ("empty", "\n# nothing\n", 0o600, "holds no token"),
            ("short", "abc", 0o600, "has a token of 12 bits"),
            ("three", &[ONE, TWO, ONE].join("\n"), 0o600, "holds 3 tokens"),
            ("long", &long, 0o600, "has more than 4096 bytes"),
        ] {
            let path = file(name, text, mode);
            let error = TokenFile::open(&path).unwrap_err().to_string();
            assert!(error.contains(why) && error.contains(&path.display().to_string()), "{error}");
            std::fs::remove_file(path).unwrap();
        }
        let error = TokenFile::open(Path::new("/nowhere/token")).unwrap_err().to_string();
        assert_eq!(error, "the token file `/nowhere/token` cannot be read: No such file or directory (os error 2)");
        assert!(TokenFile::open(Path::new("/tmp")).unwrap_err().to_string().contains("is not a file"));
    }

    #[test]
    fn a_changed_file_is_read_again_and_a_broken_one_changes_nothing() {
        let path = file("changing", &format!("# ours\n{ONE}\n"), 0o640);
        let tokens = TokenFile::open(&path).unwrap();
        let ids = || tokens.tokens().into_vec().iter().map(|token| token.reveal().to_owned()).collect::<Vec<_>>();
        assert_eq!(ids(), [ONE]);
        write(&path, format!("{TWO}\n{ONE}")).unwrap();
        assert_eq!(ids(), [TWO, ONE]);
        write(&path, "half a tok").unwrap();
        assert_eq!(ids(), [TWO, ONE]);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(ids(), [TWO, ONE]);
        file("changing", TWO, 0o400);
        assert_eq!(ids(), [TWO]);
        std::fs::remove_file(path).unwrap();
    }
}
