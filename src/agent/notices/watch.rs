//! Waits for notices in files and from commands.
//!
//! A file is looked at when the kernel says that something was written or moved into its folder, and every half minute for file systems
//! that do not say it. A command runs in a thread; the kernel kills it when that thread ends.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use tokio::io::unix::AsyncFd;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::super::shell::Shell;
use super::{Options, Source};
use crate::threads;
use crate::wire::text::tidy;

/// How often a file is looked at though nobody has said that it is there.
const LOOK_EVERY: Duration = Duration::from_secs(30);
/// How long a command rests before it runs again. EC2 asks for a look every 5 s.
const REST: Duration = Duration::from_secs(5);
/// How long a command rests that has failed again and again.
const LONGEST_REST: Duration = Duration::from_secs(60);
/// How much of a file, or of a command's output, is read.
const READ_BYTES: usize = 4096;

/// The longest time that counts: a day.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// What a notice says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Notice {
    /// When the machine goes.
    pub at: Instant,
    /// Who says so, in words.
    pub from: String,
}

/// How much time a notice leaves, by its first word. `Err`: what stands there instead of a number of seconds.
fn left_by(text: &str, default: Duration) -> Result<Duration, String> {
    let Some(word) = text.split_whitespace().next() else { return Ok(default) };
    let seconds = word.parse::<f64>().ok().filter(|seconds| *seconds >= 0.0);
    seconds.map(|seconds| Duration::from_secs_f64(seconds.min(LONGEST.as_secs_f64()))).ok_or_else(|| tidy(word))
}

/// What waits for notices. Ends when it is dropped, with its commands.
#[derive(Debug)]
pub(crate) struct Watches {
    _files: JoinSet<()>,
    commands: Vec<Arc<Shell>>,
}

impl Watches {
    /// Wait for notices, and send each.
    pub fn start(options: &Options, notices: impl Fn(Notice) + Clone + Send + 'static) -> Self {
        let (mut files, mut commands) = (JoinSet::new(), Vec::new());
        for source in options.sources.clone() {
            let (notices, default) = (notices.clone(), options.deadline);
            match source {
                Source::File(path) => {
                    files.spawn(async move {
                        if let Some(notice) = wait_for_file(path, default).await {
                            notices(notice);
                        }
                    });
                }
                Source::Command { command, name } => {
                    let shell = Arc::new(Shell::default());
                    let ours = Arc::clone(&shell);
                    let wait = move || {
                        if let Some(notice) = wait_for(&ours, &command, &name, default) {
                            notices(notice);
                        }
                    };
                    match threads::spawn("preempt-notice".to_owned(), wait) {
                        Ok(_) => commands.push(shell),
                        Err(error) => {
                            tracing::warn!("no thread for --preempt-notice, whose command is not run: {error}")
                        }
                    }
                }
            }
        }
        Self { _files: files, commands }
    }
}

impl Drop for Watches {
    fn drop(&mut self) {
        self.commands.iter().for_each(|shell| shell.end());
    }
}

/// Wait until a file is there. `None`: it cannot be watched.
async fn wait_for_file(path: PathBuf, default: Duration) -> Option<Notice> {
    let name = format!("--preempt-notice file:{}", path.display());
    let watch = match watch_folder_of(&path) {
        Ok(watch) => Some(watch),
        Err(error) => {
            tracing::warn!("{name}: its folder cannot be watched, so it is looked at every {LOOK_EVERY:.0?}: {error}");
            None
        }
    };
    let mut said = String::new();
    loop {
        let looked_at = path.clone();
        // File systems may hang.
        match threads::aside("preempt-notice", move || look(&looked_at)).await.and_then(|read| read) {
            Ok(Some(text)) => {
                return Some(Notice { at: Instant::now() + left_or_warn(&text, &name, default), from: name });
            }
            Ok(None) => {}
            Err(error) => warn_once(&mut said, format!("{name}: it cannot be read, and is looked at again: {error}")),
        }
        let something_happens = async {
            match &watch {
                Some(watch) => match watch.readable().await {
                    Ok(mut ready) => {
                        drain(watch.get_ref());
                        ready.clear_ready();
                    }
                    Err(_) => std::future::pending().await,
                },
                None => std::future::pending().await,
            }
        };
        let _ = timeout(LOOK_EVERY, something_happens).await;
    }
}

fn watch_folder_of(path: &Path) -> io::Result<AsyncFd<OwnedFd>> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let watch = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
    inotify::add_watch(&watch, folder, WatchFlags::CLOSE_WRITE | WatchFlags::MOVED_TO)?;
    // SAFETY: an `OwnedFd` always refers to the same open descriptor until it is dropped.
    unsafe { AsyncFd::register(watch) }.map_err(io::Error::from)
}

/// Discard the events: the file is looked at after any of them.
fn drain(watch: &OwnedFd) {
    let mut bytes = [0_u8; READ_BYTES];
    while rustix::io::read(watch, &mut bytes).is_ok_and(|read| read > 0) {}
}

/// The beginning of a file, if there is one.
fn look(path: &Path) -> io::Result<Option<String>> {
    match std::fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
        Ok(found) if !found.is_file() => Err(io::Error::other("it is no file")),
        Ok(_) => match File::open(path) {
            Ok(file) => beginning(file).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        },
    }
}

/// The first bytes as text, and what follows is read and dropped, so that whoever writes is not held up.
fn beginning(mut from: impl Read) -> io::Result<String> {
    let mut bytes = Vec::new();
    from.by_ref().take(READ_BYTES as u64).read_to_end(&mut bytes)?;
    io::copy(&mut from, &mut io::sink())?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn left_or_warn(text: &str, name: &str, default: Duration) -> Duration {
    left_by(text, default).unwrap_or_else(|word| {
        tracing::warn!(
            "{name} begins with `{word}`, must begin with the number of seconds that are left: {default:.0?} \
             are taken (--preempt-deadline)"
        );
        default
    })
}

fn warn_once(said: &mut String, text: String) {
    if *said != text {
        tracing::warn!("{text}");
        *said = text;
    }
}

/// Run a command again and again, until it says something. `None`: the agent has ended.
fn wait_for(shell: &Shell, command: &OsString, name: &str, default: Duration) -> Option<Notice> {
    let (mut said, mut rest) = (String::new(), REST);
    loop {
        match written(shell, command) {
            Ok(None) => return None,
            Ok(Some(text)) if !text.trim().is_empty() => {
                return Some(Notice { at: Instant::now() + left_or_warn(&text, name, default), from: name.to_owned() });
            }
            Ok(Some(_)) => rest = REST,
            Err(error) => {
                let error = tidy(&error.to_string());
                warn_once(&mut said, format!("{name} tells nothing, and is asked again: {error}"));
                rest = (rest * 2).min(LONGEST_REST);
            }
        }
        if !shell.rest(rest) {
            return None;
        }
    }
}

/// What a command has written, if it has ended well. `None`: the agent has ended.
fn written(shell: &Shell, command: &OsString) -> io::Result<Option<String>> {
    match shell.read(command, false, None)? {
        Some(ran) if !ran.exit.is_success() => Err(io::Error::other(format!("it ended with {}", ran.exit))),
        ran => Ok(ran.map(|ran| ran.output)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_word_is_how_many_seconds_are_left() {
        let default = Duration::from_secs(30);
        for (text, left) in [
            ("", Ok(30_000)),
            (" \n", Ok(30_000)),
            ("120", Ok(120_000)),
            ("0.5 seconds\nmore", Ok(500)),
            ("0", Ok(0)),
            ("86400", Ok(86_400_000)),
            ("172800", Ok(86_400_000)),
            ("-1", Err("-1")),
            ("nan", Err("nan")),
            ("inf", Ok(86_400_000)),
            ("terminate in 30", Err("terminate")),
        ] {
            let expected = left.map(Duration::from_millis).map_err(ToOwned::to_owned);
            assert_eq!(left_by(text, default), expected, "{text:?}");
        }
    }
}
