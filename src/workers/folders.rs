//! The folders of workers' logs and error files, with torchrun's layout.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use rand::RngExt;
use rustix::fs::Access;

/// Longest beginning of a folder's name. A file system allows 255 bytes, and `_RANDOM` follows, which is 9 bytes long in
/// PyTorch.
const NAME_BYTES: usize = 246;

/// The beginning of a log folder's name: the run id and this machine's name, so that nodes can share the folder above it.
///
/// A run id may have any character and 1,024 bytes. The name of a folder may not. Of a run id that is too long, the
/// beginning and the end are kept. The random part that follows still distinguishes the folders of two such ids.
pub fn folder_name(run_id: &str) -> String {
    name_on(&rustix::system::uname().nodename().to_string_lossy(), run_id)
}

fn name_on(machine: &str, run_id: &str) -> String {
    let run_id = run_id.replace(['/', '\0'], "_");
    let room = NAME_BYTES.saturating_sub(machine.len() + 1);
    if run_id.len() <= room {
        return format!("{run_id}_{machine}");
    }
    // Three dots are between the two ends.
    let kept = room.saturating_sub(3) / 2;
    let head = (0..=kept).rev().find_map(|end| run_id.get(..end)).unwrap_or_default();
    let tail = (run_id.len() - kept..).find_map(|start| run_id.get(start..)).unwrap_or_default();
    format!("{head}...{tail}_{machine}")
}

/// Gives the folders of workers the names of their global ranks, as links in the run's folder: `rank_3.attempt_1` is the
/// folder with the logs of rank 3 in attempt 1. A worker that lives through a change of the world goes on with the logs of
/// the attempt in which it was started, and the link leads there.
///
/// `error_files` is the error file of each worker, by global rank. Those that are not in folders with this layout have no links, nor
/// does a file system that knows none.
pub(crate) fn link_ranks(error_files: &BTreeMap<u32, PathBuf>, attempt: u64) {
    for (rank, error_file) in error_files {
        let Some([worker, began, run]) = above(error_file) else { continue };
        let (Some(began), Some(worker)) = (began.file_name(), worker.file_name()) else { continue };
        let link = run.join(format!("rank_{rank}.attempt_{attempt}"));
        if let Err(error) = symlink(Path::new(began).join(worker), &link)
            && error.kind() != io::ErrorKind::AlreadyExists
        {
            return tracing::debug!(link = %link.display(), %error, "log folders have no names by rank");
        }
    }
}

/// The worker's folder, the attempt's and the run's, of a file in torchrun's layout.
fn above(error_file: &Path) -> Option<[&Path; 3]> {
    let worker = error_file.parent()?;
    let attempt = worker.parent()?;
    attempt.file_name()?.to_str()?.starts_with("attempt_").then_some([worker, attempt, attempt.parent()?])
}

/// The logs of one agent's run: `LOG_DIR/RUN_ID_MACHINE_RANDOM/attempt_GENERATION/LOCAL_RANK/{stdout.log,stderr.log,error.json}`.
///
/// Nothing is deleted while the job runs. (PyTorch numbers attempts by a restart count that does not advance on every node.
/// On a node where it does not, it deletes the logs of the previous attempt.)
#[derive(Debug)]
pub struct LogFolders {
    run: PathBuf,
    /// The temporary folder, made because none was given.
    temporary: Option<PathBuf>,
}

impl LogFolders {
    /// Makes the run's folder in `log_dir`, or in a new temporary folder (`torchelastic_RANDOM`) if that is `None`.
    ///
    /// # Errors
    /// The folder cannot be made. The error names it.
    pub fn create(log_dir: Option<&Path>, run_id: &str) -> io::Result<LogFolders> {
        let temporary = match log_dir {
            Some(_) => None,
            None => Some(create_unique(&temporary_base(), "torchelastic_")?),
        };
        let base = match (log_dir, &temporary) {
            (Some(folder), _) => folder,
            (None, Some(folder)) => folder,
            (None, None) => unreachable!("made above"),
        };
        fs::create_dir_all(base).map_err(|error| naming(base, &error))?;
        Ok(LogFolders { run: create_unique(base, &format!("{}_", folder_name(run_id)))?, temporary })
    }

    /// The run's folder.
    pub fn run(&self) -> &Path {
        &self.run
    }

    /// Makes the folder of one attempt, which this names, with one folder for each worker.
    pub fn attempt(&self, attempt: &str, local_world_size: u32) -> io::Result<AttemptFolder> {
        let folder = self.run.join(format!("attempt_{attempt}"));
        for local_rank in 0..local_world_size {
            let worker = folder.join(local_rank.to_string());
            fs::create_dir_all(&worker).map_err(|error| naming(&worker, &error))?;
        }
        Ok(AttemptFolder { folder })
    }

    /// Removes a temporary folder after success, unless workers have printed into it: users will look for that.
    ///
    /// After a failure, drop this instead: the logs stay.
    ///
    /// # Errors
    /// The folder cannot be removed. The error names it.
    pub fn remove_if_temporary(&self) -> io::Result<()> {
        match &self.temporary {
            Some(folder) if !holds_logs(folder) => remove(folder).map_err(|error| naming(folder, &error)),
            _ => Ok(()),
        }
    }
}

/// Tries to remove a folder, while a thread that writes events may make a file in it.
const REMOVALS: usize = 10;

fn remove(folder: &Path) -> io::Result<()> {
    for _ in 1..REMOVALS {
        match fs::remove_dir_all(folder) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {}
            removed => return removed,
        }
    }
    fs::remove_dir_all(folder)
}

/// The folder of one generation.
#[derive(Debug, Clone)]
pub struct AttemptFolder {
    folder: PathBuf,
}

impl AttemptFolder {
    /// The folder itself. Its `filtered_stdout.log` and `filtered_stderr.log` get the lines that filters select.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// A worker's `stdout.log`.
    pub fn stdout(&self, local_rank: u32) -> PathBuf {
        self.of(local_rank, "stdout.log")
    }

    /// A worker's `stderr.log`.
    pub fn stderr(&self, local_rank: u32) -> PathBuf {
        self.of(local_rank, "stderr.log")
    }

    /// The file into which `@record` writes a worker's exception: its `TORCHELASTIC_ERROR_FILE`.
    pub fn error_file(&self, local_rank: u32) -> PathBuf {
        self.of(local_rank, "error.json")
    }

    fn of(&self, local_rank: u32, name: &str) -> PathBuf {
        self.folder.join(local_rank.to_string()).join(name)
    }
}

/// Whether a log in the folder, or below it, is not empty.
fn holds_logs(folder: &Path) -> bool {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).any(|path| match path.is_dir() {
        true => holds_logs(&path),
        false => path.extension().is_some_and(|it| it == "log") && path.metadata().is_ok_and(|file| file.len() > 0),
    })
}

/// The folder for temporary folders, by the rules of Python's `tempfile`: the first candidate that is writable.
fn temporary_base() -> PathBuf {
    let asked = ["TMPDIR", "TEMP", "TMP"].into_iter().filter_map(std::env::var_os).filter(|folder| !folder.is_empty());
    let known = ["/tmp", "/var/tmp", "/usr/tmp"].map(Into::into);
    let here = std::env::current_dir().unwrap_or_default();
    let usable =
        |folder: &PathBuf| folder.is_dir() && rustix::fs::access(folder, Access::WRITE_OK | Access::EXEC_OK).is_ok();
    asked.chain(known).map(|folder| here.join(folder)).find(usable).unwrap_or(here)
}

/// Makes a new folder that only its owner can read, as `mkdtemp(3)`.
fn create_unique(base: &Path, prefix: &str) -> io::Result<PathBuf> {
    use std::os::unix::fs::DirBuilderExt;
    loop {
        let random: u64 = rand::rng().random();
        let folder = base.join(format!("{prefix}{:08x}", random >> 32));
        match fs::DirBuilder::new().mode(0o700).create(&folder) {
            Ok(()) => return Ok(folder),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(naming(&folder, &error)),
        }
    }
}

fn naming(folder: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("cannot make or remove log folder `{}`: {error}", folder.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_was_asked_for_keeps_every_attempt() {
        let base = create_unique(&std::env::temp_dir(), "elastic_rs-test-").unwrap();
        let asked = base.join("logs");
        let folders = LogFolders::create(Some(&asked), "my/run").unwrap();
        let name = folders.run().file_name().unwrap().to_str().unwrap();
        assert!(name.starts_with(&folder_name("my/run")) && folders.run().parent() == Some(&*asked), "{name}");
        for generation in [0, 1] {
            let attempt = folders.attempt(&generation.to_string(), 2).unwrap();
            assert_eq!(attempt.stdout(1), folders.run().join(format!("attempt_{generation}/1/stdout.log")));
            fs::write(attempt.stderr(1), "text").unwrap();
        }
        // The same again, as after a restart on another node only.
        let again = folders.attempt("0", 2).unwrap();
        assert_eq!(fs::read_to_string(again.stderr(1)).unwrap(), "text");
        folders.remove_if_temporary().unwrap();
        assert!(again.error_file(0).parent().unwrap().is_dir());
        fs::remove_dir_all(base).unwrap();
    }

    #[test]
    fn a_temporary_folder_is_removed_after_success() {
        let folders = LogFolders::create(None, "none").unwrap();
        let temporary = folders.run().parent().unwrap().to_owned();
        let attempt = folders.attempt("0", 1).unwrap();
        fs::write(attempt.error_file(0), "{}").unwrap();
        fs::write(attempt.stdout(0), "told").unwrap();
        folders.remove_if_temporary().unwrap();
        assert!(temporary.is_dir(), "somebody will look for what workers have printed");
        fs::write(attempt.stdout(0), "").unwrap();
        folders.remove_if_temporary().unwrap();
        assert!(!temporary.exists());
    }

    #[test]
    fn a_run_id_of_any_allowed_length_names_a_folder() {
        let base = create_unique(&std::env::temp_dir(), "elastic_rs-test-").unwrap();
        let most = "a".repeat(240);
        assert_eq!(name_on("node1", &most), format!("{most}_node1"), "what a file system takes stays as it is");
        for run_id in ["a".repeat(241), "a".repeat(1024), "\u{e4}/".repeat(341), "\u{1f680}".repeat(256)] {
            for machine in ["node1", &"m".repeat(64)] {
                let name = name_on(machine, &run_id);
                assert!(name.len() <= NAME_BYTES && name.contains("...") && name.ends_with(machine), "{name}");
            }
            let made = [(); 2].map(|()| LogFolders::create(Some(&base), &run_id).unwrap());
            assert_ne!(made[0].run(), made[1].run());
            assert!(made[0].attempt("0", 1).unwrap().stdout(0).parent().unwrap().is_dir());
        }
        fs::remove_dir_all(base).unwrap();
    }

    #[test]
    fn the_logs_of_a_global_rank_are_found_by_its_name() {
        let base = create_unique(&std::env::temp_dir(), "elastic_rs-test-").unwrap();
        let folders = LogFolders::create(Some(&base), "job").unwrap();
        let attempts = [0, 1].map(|number| folders.attempt(&number.to_string(), 2).unwrap());
        fs::write(attempts[0].stdout(1), "of the worker that lives on").unwrap();
        fs::write(attempts[1].stdout(0), "of the one that is started again").unwrap();
        link_ranks(&[(4, attempts[0].error_file(0)), (5, attempts[0].error_file(1))].into(), 0);
        // The other node has gone, so that this one's ranks are others.
        link_ranks(&[(0, attempts[1].error_file(0)), (1, attempts[0].error_file(1))].into(), 1);
        link_ranks(&[(0, PathBuf::from("/somewhere/else/error.json"))].into(), 2);
        let read = |link: &str| fs::read_to_string(folders.run().join(link).join("stdout.log")).unwrap();
        for link in ["rank_5.attempt_0", "rank_1.attempt_1"] {
            assert_eq!(read(link), "of the worker that lives on");
        }
        assert_eq!(read("rank_0.attempt_1"), "of the one that is started again");
        fs::remove_dir_all(base).unwrap();
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named() {
        let error = LogFolders::create(Some(Path::new("/dev/null/logs")), "none").unwrap_err().to_string();
        assert!(error.starts_with("cannot make or remove log folder `/dev/null/logs`: "), "{error}");
    }
}
