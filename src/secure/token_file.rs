//! Tokens from a file, which is read again when it has changed.
//!
//! With two tokens an end shows the first, and accepts both: so a token is replaced while jobs run. A thread of its own looks at the
//! file: it may be in a home on another machine, which does not answer, and those who ask also serve sessions.

use std::fs::{File, Metadata};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::protection::ProtectionError;
use super::token::Token;
use crate::threads;

/// No token file is larger.
const LIMIT_BYTES: u64 = 4096;
/// How long a look at the file is waited for.
const LOOK_LIMIT: Duration = Duration::from_secs(1);
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

/// Tells whether a file has changed, or who may read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    inode: (u64, u64),
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        Self {
            inode: (metadata.dev(), metadata.ino()),
            size: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

/// What was found in a file, and when it cannot be used any more, what was found before.
#[derive(Debug)]
struct Known {
    /// `None`: there was no file at the last look.
    stamp: Option<Stamp>,
    tokens: Tokens,
}

/// A file with tokens.
#[derive(Clone, Debug)]
pub struct TokenFile(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    known: Mutex<Known>,
    /// A thread looks at the file.
    looking: AtomicBool,
}

impl TokenFile {
    /// Read the file.
    ///
    /// # Errors
    /// It cannot be read, others than its owner and group may read it, or it does not hold one or two tokens.
    pub fn open(path: &Path) -> Result<Self, ProtectionError> {
        let (stamp, tokens) = read(path)?;
        let known = Mutex::new(Known { stamp: Some(stamp), tokens });
        Ok(Self(Arc::new(Inner { path: path.to_owned(), known, looking: AtomicBool::new(false) })))
    }

    /// The tokens that it held at the last look.
    pub fn known(&self) -> Tokens {
        self.0.known.lock().tokens.clone()
    }

    /// The tokens that it holds now. If it has been changed and cannot be used any more, or if it cannot be looked at within
    /// [`LOOK_LIMIT`], those that it held before.
    pub async fn tokens(&self) -> Tokens {
        if !self.0.looking.swap(true, Ordering::AcqRel) {
            let (inner, (done, looked)) = (Arc::clone(&self.0), oneshot::channel());
            let look = move || {
                inner.look();
                inner.looking.store(false, Ordering::Release);
                let _ = done.send(()); // nobody may wait any more
            };
            match threads::spawn("token-file".to_owned(), look) {
                Ok(_) => drop(timeout(LOOK_LIMIT, looked).await),
                Err(_) => self.0.looking.store(false, Ordering::Release),
            }
        }
        self.known()
    }
}

impl Inner {
    fn look(&self) {
        let stamp = std::fs::metadata(&self.path).map(|metadata| Stamp::of(&metadata)).ok();
        if stamp.is_some() && stamp == self.known.lock().stamp {
            return;
        }
        let found = read(&self.path);
        let mut known = self.known.lock();
        match found {
            Ok((stamp, tokens)) => {
                if tokens != known.tokens {
                    let ids: Vec<_> = tokens.clone().into_vec().iter().map(|token| token.id().to_string()).collect();
                    let (path, ids) = (self.path.display(), ids.join(", "));
                    tracing::info!("the token file `{path}` has changed; the ids of its keys are now: {ids}");
                }
                *known = Known { stamp: Some(stamp), tokens };
            }
            // Told once for each change.
            Err(error) if stamp != known.stamp => {
                known.stamp = stamp;
                tracing::warn!("{error}; the tokens that it held before stay valid in this process");
            }
            Err(_) => {}
        }
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

    #[tokio::test]
    async fn a_changed_file_is_read_again_and_a_broken_one_changes_nothing() {
        let path = file("changing", &format!("# ours\n{ONE}\n"), 0o640);
        let tokens = TokenFile::open(&path).unwrap();
        let ids = async || {
            let held = tokens.tokens().await.into_vec();
            held.iter().map(|token| token.reveal().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(ids().await, [ONE]);
        write(&path, format!("{TWO}\n{ONE}")).unwrap();
        assert_eq!(ids().await, [TWO, ONE]);
        // The operator makes a mistake, and mends what the warning names.
        set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        write(&path, ONE).unwrap();
        assert_eq!(ids().await, [TWO, ONE]);
        set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        assert_eq!(ids().await, [ONE]);
        write(&path, format!("{TWO}\n{ONE}")).unwrap();
        assert_eq!(ids().await, [TWO, ONE]);
        write(&path, "half a tok").unwrap();
        assert_eq!(ids().await, [TWO, ONE]);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(ids().await, [TWO, ONE]);
        file("changing", TWO, 0o400);
        assert_eq!(ids().await, [TWO]);
        std::fs::remove_file(path).unwrap();
    }
}
