//! Tokens from a file, which is read again when it has changed ([`super::watched`]).
//!
//! With two tokens an end shows the first, and accepts both: so a token is replaced while jobs run.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::error::ProtectionError;
use super::token::Token;
use super::watched::{Content, Wanted, Watched};

/// No token file is larger.
const LIMIT_BYTES: u64 = 4096;

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

impl Content for Tokens {
    type Files = PathBuf;
    const KEPT: &'static str = "the tokens that it held before stay valid in this process";

    fn paths(path: &PathBuf) -> Vec<&Path> {
        vec![path]
    }

    fn read(path: &PathBuf) -> Result<Self, ProtectionError> {
        let file = Wanted { what: "token", path, limit_bytes: LIMIT_BYTES, is_secret: true };
        Self::parse(&file.text()?).map_err(|why| file.unusable(why))
    }

    fn news(&self, before: &Self, path: &PathBuf) -> Option<String> {
        let ids = || self.clone().into_vec().iter().map(|token| token.id().to_string()).collect::<Vec<_>>().join(", ");
        (self != before)
            .then(|| format!("the token file `{}` has changed; the ids of its keys are now: {}", path.display(), ids()))
    }
}

/// A file with tokens.
#[derive(Debug)]
pub struct TokenFile(Watched<Tokens>);

impl TokenFile {
    /// Read the file. What it holds is good for a while, before it is looked at again.
    ///
    /// # Errors
    /// It cannot be read, others than its owner and group may read it, or it does not hold one or two tokens.
    pub fn open(path: &Path, good_for: Duration) -> Result<Self, ProtectionError> {
        Watched::open(path.to_owned(), good_for).map(Self)
    }

    /// The tokens that it held at the last look.
    pub fn known(&self) -> Tokens {
        (*self.0.last()).clone()
    }

    /// The tokens that it holds. If it has been changed and cannot be used any more, or does not answer, those that it held before.
    pub async fn tokens(&self) -> Tokens {
        (*self.0.current().await).clone()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, set_permissions, write};
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::secure::watched::GOOD_FOR;

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
            ("short", "abc", 0o600, "has a token of 3 digits"),
            ("three", &[ONE, TWO, ONE].join("\n"), 0o600, "holds 3 tokens"),
            ("long", &long, 0o600, "has more than 4096 bytes"),
        ] {
            let path = file(name, text, mode);
            let error = TokenFile::open(&path, GOOD_FOR).unwrap_err().to_string();
            assert!(error.contains(why) && error.contains(&path.display().to_string()), "{error}");
            std::fs::remove_file(path).unwrap();
        }
        let error = TokenFile::open(Path::new("/nowhere/token"), GOOD_FOR).unwrap_err().to_string();
        assert_eq!(error, "the token file `/nowhere/token` cannot be read: No such file or directory (os error 2)");
        assert!(TokenFile::open(Path::new("/tmp"), GOOD_FOR).unwrap_err().to_string().contains("is not a file"));
    }

    /// Nobody writes to the other end, so whoever waits for that waits for ever.
    #[test]
    fn a_fifo_holds_nobody_up() {
        let path = file("fifo", "", 0o600);
        std::fs::remove_file(&path).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        let (done, opened) = std::sync::mpsc::channel();
        let reader = path.clone();
        std::thread::spawn(move || {
            done.send(TokenFile::open(&reader, GOOD_FOR).map(drop).map_err(|why| why.to_string()))
        });
        let opened = opened.recv_timeout(Duration::from_secs(60)).map_err(|_| "it waits for somebody who writes");
        std::fs::remove_file(&path).unwrap();
        assert_eq!(opened, Ok(Err(format!("the token file `{}` is not a file", path.display()))));
    }

    mod for_root {
        use super::*;

        #[test]
        fn a_file_of_another_user_is_refused_and_roots_is_not() {
            let theirs = file("theirs", ONE, 0o640);
            std::os::unix::fs::chown(&theirs, Some(65533), None).expect("only root can give files away");
            let error = TokenFile::open(&theirs, GOOD_FOR).unwrap_err().to_string();
            assert!(
                error.contains("belongs to uid 65533, who may change it; only this process's user (uid 0)"),
                "{error}"
            );
            let roots = file("roots", ONE, 0o640);
            std::os::unix::fs::chown(&roots, Some(0), Some(65532)).unwrap();
            let as_another = std::thread::spawn({
                let (theirs, roots) = (theirs.clone(), roots.clone());
                move || {
                    let (uid, gid) = (rustix::process::Uid::from_raw(65533), rustix::process::Gid::from_raw(65532));
                    rustix::thread::set_thread_res_gid(gid, gid, gid).unwrap();
                    rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
                    [theirs, roots]
                        .map(|path| TokenFile::open(&path, GOOD_FOR).map(drop).map_err(|error| error.to_string()))
                }
            });
            assert_eq!(as_another.join().unwrap(), [Ok(()), Ok(())]);
            [theirs, roots].iter().for_each(|path| std::fs::remove_file(path).unwrap());
        }
    }

    #[tokio::test]
    async fn a_changed_file_is_read_again_and_a_broken_one_changes_nothing() {
        let path = file("changing", &format!("# ours\n{ONE}\n"), 0o640);
        let tokens = TokenFile::open(&path, Duration::ZERO).unwrap();
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
