//! What a node of `elastic-run` runs: the same in every round but for the place, of which [`Job::workers`] makes the workers.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::time::Duration;

use super::streams::LogOptions;
use super::substitute::substitute;
use crate::agent::AgentOptions;
use crate::agent::environment;
use crate::agent::worker_group::captured;
use crate::channel::watch::WATCH;
use crate::rendezvous::messages::message::Placement;
use crate::warm::TemplateSpec;
use crate::workers::{AttemptFolder, Filter, FilterOptions, WorkerSpec};

/// What a node is to run, and how.
#[derive(Clone, Debug)]
pub struct Job {
    /// The agent's options.
    pub agent: AgentOptions,
    /// Program and arguments of every worker; never empty. In arguments `${local_rank}` is replaced.
    pub command: Vec<OsString>,
    /// How long the others may take to hear that the job is over.
    pub close_timeout: Duration,
    /// Workers' master is not the round's.
    pub fixed: Option<Fixed>,
    /// The CPUs of the worker of each local rank. Empty, or missing: the agent's.
    pub cpus: Vec<Vec<u32>>,
    /// Where logs are kept.
    pub log_folder: LogFolder,
    /// Of workers' output.
    pub logs: LogOptions,
    /// Workers are forked from a template, if there is to be one.
    pub warm: Option<Warm>,
    /// Variables that workers get besides those of this process.
    pub variables: BTreeMap<OsString, OsString>,
}

/// How the workers' program becomes a template; see [`TemplateSpec`], whose fields these are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warm {
    /// What is put between program and arguments.
    pub begin: Vec<OsString>,
    /// How many arguments are the same for every worker.
    pub fixed: usize,
    /// What it loads, for the log.
    pub what: String,
}

/// A master that the command line names: `--rdzv-backend=static`. The coordinator at that address empties its store for every round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fixed {
    /// `MASTER_ADDR`.
    pub addr: String,
    /// `MASTER_PORT`.
    pub port: u16,
}

/// Where logs are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogFolder {
    /// In a temporary folder, which is removed after success if nothing is in it.
    Temporary,
    /// In a folder in this one.
    In(PathBuf),
    /// Nowhere: `--log-dir=/dev/null`. There are no error files either.
    Nowhere,
}

impl Job {
    /// The workers of a round. `restarts` is the restart count that they get, `inherited` the environment they have besides.
    ///
    /// # Errors
    /// As [`environment::variables`]; or a node has not reported its number of workers, so that there are no ranks.
    pub fn workers(
        &self,
        placement: &Placement,
        restarts: u32,
        attempt: Option<&AttemptFolder>,
        inherited: &BTreeMap<OsString, OsString>,
    ) -> Result<Vec<WorkerSpec>, String> {
        let ranks = placement.workers.ok_or(NO_RANKS)?;
        let placement = self.seen(placement);
        let look_up = |name: &str| inherited.get(name.as_ref() as &OsStr)?.to_str().map(str::to_owned);
        let worker = |local_rank| {
            let variables =
                environment::variables(&self.agent.workers, &placement, &ranks, restarts, local_rank, look_up)?;
            let mut env = inherited.clone();
            env.extend(variables.into_iter().map(|(name, value)| (name.into(), value.into())));
            let error_file = attempt.map(|attempt| attempt.error_file(local_rank)).unwrap_or_default();
            env.insert("TORCHELASTIC_ERROR_FILE".into(), error_file.into());
            let files = attempt.map(|attempt| (attempt.stdout(local_rank), attempt.stderr(local_rank)));
            let rank = ranks.first_rank + local_rank;
            let (stdout, stderr) = self.logs.outputs((local_rank, rank), files, &self.prefix(local_rank, rank));
            let (program, args) = self.command.split_first().ok_or("the command is empty")?;
            let args = args.iter().map(|arg| argument(arg, local_rank)).collect();
            let cpus = self.cpus.get(local_rank as usize).cloned().unwrap_or_default();
            Ok(WorkerSpec { args, cpus, env, stdout, stderr: captured(stderr), ..WorkerSpec::new(local_rank, program) })
        };
        (0..placement.workers_of(self.agent.workers.local_world_size)).map(worker).collect()
    }

    /// The template of workers that inherit this environment.
    pub fn template(&self, inherited: &BTreeMap<OsString, OsString>) -> Option<TemplateSpec> {
        let (Warm { begin, fixed, what }, (program, args)) = (self.warm.clone()?, self.command.split_first()?);
        let mut env = inherited.clone();
        env.remove(WATCH.as_ref() as &OsStr); // a thread that answers another agent would make its forks useless
        Some(TemplateSpec {
            program: program.clone(),
            begin,
            args: args.to_vec(),
            fixed,
            env,
            varies: environment::VARIES.iter().map(Into::into).collect(),
            cwd: None,
            what,
        })
    }

    /// The files for lines that are kept apart.
    pub fn filters(&self, attempt: Option<&AttemptFolder>) -> FilterOptions {
        let filter = |texts: &Vec<String>, name: &str| {
            let folder = attempt.filter(|_| !texts.is_empty())?;
            Some(Filter { file: folder.path().join(name), texts: texts.clone() })
        };
        FilterOptions {
            stdout: filter(&self.logs.stdout_filters, "filtered_stdout.log"),
            stderr: filter(&self.logs.stderr_filters, "filtered_stderr.log"),
            ..FilterOptions::default()
        }
    }

    /// The place as workers see it.
    fn seen(&self, placement: &Placement) -> Placement {
        let mut placement = placement.clone();
        if let Some(Fixed { addr, port }) = &self.fixed {
            (placement.master_addr, placement.master_port) = (addr.clone(), *port);
        }
        placement
    }

    fn prefix(&self, local_rank: u32, rank: u32) -> String {
        let template = self.logs.prefix.as_deref().unwrap_or("[${role_name}${local_rank}]:");
        let known = |name: &str| match name {
            "role_name" => Some(self.agent.workers.role.clone()),
            "rank" => Some(rank.to_string()),
            "local_rank" => Some(local_rank.to_string()),
            "hostname" => Some(rustix::system::uname().nodename().to_string_lossy().into_owned()),
            _ => None,
        };
        String::from_utf8_lossy(&substitute(template.as_bytes(), known)).into_owned()
    }
}

fn argument(arg: &OsString, local_rank: u32) -> OsString {
    let known = |name: &str| (name == "local_rank").then(|| local_rank.to_string());
    OsString::from_vec(substitute(arg.as_bytes(), known))
}

const NO_RANKS: &str = "a node of this job has not reported its number of workers, so workers have no ranks: it runs \
    PyTorch's agent (`--rdzv-conf agent=torch`), which cannot be mixed with others";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::Budget;
    use crate::agent::environment::Workers;
    use crate::agent::notices;
    use crate::hang::judge;
    use crate::rendezvous::conf::InPlace;
    use crate::rendezvous::messages::message::{Round, WorkerRanks};
    use crate::signals::{FirstSignal, Meanings};
    use crate::workers::{LogFolders, Output};

    fn job() -> Job {
        let workers = Workers {
            run_id: "job".to_owned(),
            role: "trainer".to_owned(),
            local_world_size: 2,
            max_restarts: 3,
            use_agent_store: true,
            virtual_local_rank: false,
            resizes_nccl: false,
        };
        let agent = AgentOptions {
            name: "host:1".to_owned(),
            entrypoint: "train.py".to_owned(),
            workers,
            budget: Budget::Job,
            grace: Duration::from_secs(30),
            first_signal: FirstSignal::default(),
            signals: Meanings::default(),
            notices: notices::Options::default(),
            health: None,
            exit_barrier_timeout: None,
            uninterruptible_sleep: Duration::ZERO,
            in_place: InPlace::Gloo,
            standbys: 0,
            hang: judge::Options::default(),
            on_hang: None,
            progress_log: None,
        };
        Job {
            agent,
            command: ["program$rank", "--device=${local_rank}", "$$x"].map(Into::into).to_vec(),
            close_timeout: Duration::from_secs(30),
            fixed: None,
            cpus: Vec::new(),
            log_folder: LogFolder::Temporary,
            logs: LogOptions { tee: "3".parse().unwrap(), ..LogOptions::default() },
            warm: None,
            variables: BTreeMap::new(),
        }
    }

    fn placement() -> Placement {
        Placement {
            round: Round(4),
            rank: 1,
            world_size: 2,
            world: 0,
            master_addr: "10.0.0.1".to_owned(),
            master_port: 4000,
            reason: String::new(),
            restart: 2,
            workers: Some(WorkerRanks { first_rank: 6, world_size: 8, first_role_rank: 6, role_world_size: 8 }),
            host: None,
            local_world_size: None,
            resume: None,
            members: None,
        }
    }

    fn inherited() -> BTreeMap<OsString, OsString> {
        [("HOME", "/root"), ("RANK", "of another job"), ("TORCHELASTIC_ERROR_FILE", "the agent's")]
            .into_iter()
            .map(|(name, value)| (name.into(), value.into()))
            .collect()
    }

    fn of<'a>(worker: &'a WorkerSpec, name: &str) -> &'a str {
        worker.env.get(name.as_ref() as &OsStr).and_then(|value| value.to_str()).unwrap()
    }

    #[test]
    fn a_template_knows_which_variables_workers_have_of_their_own() {
        let warm = Warm { begin: vec!["serve".into()], fixed: 1, what: "torch".to_owned() };
        let mut job = Job { warm: Some(warm), ..job() };
        job.agent.workers.virtual_local_rank = true;
        let mut inherited = inherited();
        inherited.insert("HIP_VISIBLE_DEVICES".into(), "4,5".into());
        let template = job.template(&inherited).unwrap();
        assert_eq!(template.args, job.command[1..]);
        for worker in job.workers(&placement(), 2, None, &inherited).unwrap() {
            let other = worker.env.keys().filter(|name| worker.env.get(*name) != template.env.get(*name));
            let unknown: Vec<_> = other.filter(|name| !template.varies.contains(name)).collect();
            assert_eq!(unknown, Vec::<&OsString>::new());
        }
        assert_eq!(Job { warm: None, ..job }.template(&inherited), None);
    }

    #[test]
    fn workers_are_made_of_the_command_the_placement_and_the_environment() {
        let workers = job().workers(&placement(), 2, None, &inherited()).unwrap();
        assert_eq!(workers.len(), 2);
        let second = &workers[1];
        assert_eq!(
            second.command(),
            ["program$rank", "--device=1", "$x"],
            "the program's own name is nobody's template"
        );
        for (name, value) in [
            ("RANK", "7"),
            ("LOCAL_RANK", "1"),
            ("MASTER_ADDR", "10.0.0.1"),
            ("MASTER_PORT", "4000"),
            ("TORCHELASTIC_RESTART_COUNT", "2"),
            ("HOME", "/root"),
            // There is no folder for it, and the agent's own is not the worker's.
            ("TORCHELASTIC_ERROR_FILE", ""),
        ] {
            assert_eq!(of(second, name), value, "{name}");
        }
        assert_eq!(second.stdout, Output::Inherit);
    }

    #[test]
    fn a_folder_takes_error_files_streams_and_filters() {
        let mut job = job();
        job.logs.prefix = Some("<${role_name} $rank $other>".to_owned());
        job.logs.stderr_filters = vec!["loss".to_owned()];
        let folders = LogFolders::create(None, "job").unwrap();
        let attempt = folders.attempt("3", 2).unwrap();
        let workers = job.workers(&placement(), 2, Some(&attempt), &inherited()).unwrap();
        assert_eq!(of(&workers[1], "TORCHELASTIC_ERROR_FILE"), attempt.error_file(1).to_str().unwrap());
        let Output::Copied(copies) = &workers[1].stderr else { panic!("{:?}", workers[1].stderr) };
        assert_eq!(copies.file, Some(attempt.stderr(1)));
        assert_eq!(copies.prefix.as_deref(), Some("<trainer 7 $other>"));
        let filters = job.filters(Some(&attempt));
        assert_eq!(filters.stdout, None);
        assert_eq!(filters.stderr.unwrap().file, attempt.path().join("filtered_stderr.log"));
        assert_eq!(job.filters(None).stderr, None);
        folders.remove_if_temporary().unwrap();
    }

    #[test]
    fn a_master_that_is_given_is_every_rounds() {
        let fixed = Some(Fixed { addr: "node0".to_owned(), port: 29500 });
        let workers = Job { fixed, ..job() }.workers(&placement(), 3, None, &inherited()).unwrap();
        assert_eq!((of(&workers[0], "MASTER_ADDR"), of(&workers[0], "MASTER_PORT")), ("node0", "29500"));
        assert_eq!(of(&workers[0], "TORCHELASTIC_RESTART_COUNT"), "3");
    }

    #[test]
    fn a_placement_for_fewer_workers_starts_fewer() {
        let placement = Placement { local_world_size: Some(1), ..placement() };
        let workers = job().workers(&placement, 0, None, &inherited()).unwrap();
        assert_eq!(workers.iter().map(|worker| of(worker, "LOCAL_WORLD_SIZE")).collect::<Vec<_>>(), ["1"]);
        assert_eq!(of(&workers[0], "RANK"), "6");
    }

    #[test]
    fn without_ranks_nothing_is_started() {
        let placement = Placement { workers: None, ..placement() };
        let error = job().workers(&placement, 0, None, &inherited()).unwrap_err();
        assert!(error.starts_with("a node of this job has not reported its number of workers"), "{error}");
    }
}
