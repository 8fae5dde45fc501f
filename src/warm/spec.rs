//! The specification of a fork server (a *template*), and the rules which workers may be forked from it.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use crate::workers::WorkerSpec;

/// A fork server, and the properties that its workers share with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateSpec {
    /// The program of the workers and of the fork server.
    pub program: OsString,
    /// Arguments that make the program a fork server. They precede the workers' arguments.
    pub begin: Vec<OsString>,
    /// The workers' arguments.
    pub args: Vec<OsString>,
    /// Number of leading [`args`](Self::args) that are the same for every worker. The others may differ.
    pub fixed: usize,
    /// The environment that workers inherit.
    pub env: BTreeMap<OsString, OsString>,
    /// Variables that may differ from worker to worker, or be missing here. No other variable may: an import may have used it.
    pub varies: Vec<OsString>,
    /// The workers' working directory. Default: this process's.
    pub cwd: Option<PathBuf>,
    /// The modules that it imports, for the log.
    pub what: String,
}

impl TemplateSpec {
    /// The fork server as a process to start. Its environment reserves memory in which `/proc` can show the variables of workers.
    pub(super) fn process(&self) -> WorkerSpec {
        let mut spec = WorkerSpec::new(0, &self.program);
        spec.args = self.begin.iter().chain(&self.args).cloned().collect();
        spec.env = self.env.clone();
        spec.env.insert(ROOM.into(), " ".repeat(ROOM_BYTES).into());
        spec.cwd = self.cwd.clone();
        spec
    }

    /// Why this worker cannot be forked from the fork server: the first difference. `None` if it can.
    pub(super) fn why_not(&self, worker: &WorkerSpec) -> Option<String> {
        if worker.program != self.program {
            return Some(format!("its program is `{}`, not `{}`", worker.program.display(), self.program.display()));
        }
        let fixed = |args: &[OsString]| args.get(..self.fixed).map(<[OsString]>::to_vec);
        if fixed(&worker.args) != fixed(&self.args) {
            return Some("it runs another script".to_owned());
        }
        if worker.cwd != self.cwd {
            return Some("its working directory differs".to_owned());
        }
        self.other_variable(&worker.env).map(|name| format!("its variable `{}` differs", name.display()))
    }

    fn other_variable<'a>(&'a self, env: &'a BTreeMap<OsString, OsString>) -> Option<&'a OsStr> {
        let names = self.env.keys().chain(env.keys());
        names
            .filter(|name| !self.varies.contains(name))
            .find(|name| self.env.get(*name) != env.get(*name))
            .map(|it| &**it)
    }
}

/// A variable that only reserves memory, for variables that workers have and their fork server has not.
const ROOM: &str = "ELASTIC_RS_TEMPLATE_ROOM";
/// The variables that an agent sets take about 700 bytes, plus paths.
const ROOM_BYTES: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> TemplateSpec {
        TemplateSpec {
            program: "python".into(),
            begin: vec!["-c".into(), "serve".into()],
            args: vec!["-u".into(), "train.py".into(), "--lr=1".into()],
            fixed: 2,
            env: BTreeMap::from([("PATH".into(), "/bin".into()), ("OMP_NUM_THREADS".into(), "1".into())]),
            varies: vec!["RANK".into()],
            cwd: None,
            what: "torch".to_owned(),
        }
    }

    fn worker() -> WorkerSpec {
        let mut worker = WorkerSpec::new(0, "python");
        worker.args = vec!["-u".into(), "train.py".into(), "--lr=2".into()];
        worker.env = spec().env;
        worker.env.insert("RANK".into(), "3".into());
        worker
    }

    #[test]
    fn a_worker_may_have_ranks_and_arguments_of_its_own() {
        assert_eq!(spec().why_not(&worker()), None);
    }

    #[test]
    fn whatever_an_import_may_have_read_must_be_the_same() {
        let why = |change: fn(&mut WorkerSpec)| {
            let mut worker = worker();
            change(&mut worker);
            spec().why_not(&worker).unwrap()
        };
        assert_eq!(why(|it| it.program = "pypy".into()), "its program is `pypy`, not `python`");
        assert_eq!(why(|it| it.args[1] = "other.py".into()), "it runs another script");
        assert_eq!(why(|it| it.args.truncate(1)), "it runs another script");
        assert_eq!(why(|it| it.cwd = Some("/".into())), "its working directory differs");
        let changed = why(|it| drop(it.env.insert("OMP_NUM_THREADS".into(), "8".into())));
        assert_eq!(changed, "its variable `OMP_NUM_THREADS` differs");
        assert_eq!(why(|it| drop(it.env.remove(OsStr::new("PATH")))), "its variable `PATH` differs");
        let added = why(|it| drop(it.env.insert("PYTHONMALLOC".into(), "debug".into())));
        assert_eq!(added, "its variable `PYTHONMALLOC` differs");
    }

    #[test]
    fn a_fork_server_is_started_with_the_workers_command_behind_its_own() {
        let process = spec().process();
        assert_eq!(process.command(), ["python", "-c", "serve", "-u", "train.py", "--lr=1"]);
    }
}
