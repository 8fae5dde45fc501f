//! What a node of `elastic-run` runs: the same in every round but for the place, of which [`Job::workers`] makes the workers.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::time::Duration;

use super::streams::LogOptions;
use super::template::substitute;
use crate::agent::crew::overheard;
use crate::agent::environment::{self, Workers};
use crate::agent::{Budget, Policy};
use crate::process::{AttemptFolder, Filter, FilterOptions, WorkerSpec};
use crate::rendezvous::message::Placement;

/// What a node is to run, and how.
#[derive(Clone, Debug)]
pub struct Job {
    /// How others call the node: `host:pid`.
    pub name: String,
    /// What the final report calls the workers: the script.
    pub entrypoint: String,
    /// Program and arguments of every worker; never empty. In arguments `${local_rank}` is replaced.
    pub command: Vec<OsString>,
    /// What is the same for all workers' variables.
    pub workers: Workers,
    /// Who counts restarts.
    pub budget: Budget,
    /// How long workers may take to end once they were asked to.
    pub grace: Duration,
    /// How long a worker may sleep uninterruptibly; zero: as long as it likes.
    pub uninterruptible_sleep: Duration,
    /// The rank to ask for.
    pub node_rank: Option<u32>,
    /// How long a join may take.
    pub join_timeout: Duration,
    /// How long the others may take to hear that the job is over.
    pub close_timeout: Duration,
    /// How long this process serves others at the end.
    pub drain_timeout: Duration,
    /// Where others find this node's worker store, if the user has said so.
    pub local_addr: Option<String>,
    /// Workers' master is not the round's.
    pub fixed: Option<Fixed>,
    /// Where logs are kept.
    pub log_folder: LogFolder,
    /// Of workers' output.
    pub logs: LogOptions,
}

/// A master that the command line names: `--rdzv-backend=static`. The store at that address serves every round.
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
    /// What the agent is told beforehand.
    pub fn policy(&self) -> Policy {
        Policy {
            budget: self.budget,
            workers: self.workers.local_world_size,
            grace: self.grace,
            exit_barrier_timeout: EXIT_BARRIER_TIMEOUT,
        }
    }

    /// The workers of a round. `restarts` is the restart count that they are told, `inherited` the environment they have besides.
    ///
    /// # Errors
    /// As [`environment::variables`]; or a node has not said how many workers it has, so that there are no ranks.
    pub fn workers(
        &self,
        placement: &Placement,
        restarts: u32,
        attempt: Option<&AttemptFolder>,
        inherited: &BTreeMap<OsString, OsString>,
    ) -> Result<Vec<WorkerSpec>, String> {
        let ranks = placement.workers.ok_or(NO_RANKS)?;
        let placement = self.seen(placement);
        let look_up = |name: &str| inherited.get(name.as_ref() as &std::ffi::OsStr)?.to_str().map(str::to_owned);
        let worker = |local_rank| {
            let variables = environment::variables(&self.workers, &placement, &ranks, restarts, local_rank, look_up)?;
            let mut env = inherited.clone();
            env.extend(variables.into_iter().map(|(name, value)| (name.into(), value.into())));
            let error_file = attempt.map(|attempt| attempt.error_file(local_rank)).unwrap_or_default();
            env.insert("TORCHELASTIC_ERROR_FILE".into(), error_file.into());
            let files = attempt.map(|attempt| (attempt.stdout(local_rank), attempt.stderr(local_rank)));
            let prefix = self.prefix(local_rank, ranks.first_rank + local_rank);
            let (stdout, stderr) = self.logs.outputs(local_rank, files, &prefix);
            let (program, args) = self.command.split_first().ok_or("the command is empty")?;
            let args = args.iter().map(|arg| argument(arg, local_rank)).collect();
            Ok(WorkerSpec { args, env, stdout, stderr: overheard(stderr), ..WorkerSpec::new(local_rank, program) })
        };
        (0..self.workers.local_world_size).map(worker).collect()
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
            "role_name" => Some(self.workers.role.clone()),
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

/// PyTorch's, which no flag of torchrun changes.
const EXIT_BARRIER_TIMEOUT: Duration = Duration::from_secs(300);

const NO_RANKS: &str = "a node of this job has not said how many workers it has, so that they have no ranks: it runs \
    PyTorch's agent (`--rdzv-conf agent=torch`), which cannot be mixed with others";
