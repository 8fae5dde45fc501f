//! `elastic-run`'s front end over a cell in a file. Ranks, restarts and failures come from the cell, as they do from a coordinator. And over
//! a coordinator, in a world that counts workers.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use elastic_rs::agent::{AgentOptions, Budget, Outcome};
use elastic_rs::launcher::launch::{Ended, Job, LogFolder, LogOptions, run};
use elastic_rs::launcher::node::{Node, NodeOptions, Reach};
use elastic_rs::rendezvous::cell::driver::{CellDriver, Step};
use elastic_rs::rendezvous::cell::node::CellCommand;
use elastic_rs::rendezvous::messages::message::{Hello, NodeId};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::messages::settings::{Rules, WorkerBounds};
use elastic_rs::rendezvous::node::JoinError;
use elastic_rs::rendezvous::node::session::Session;
use elastic_rs::signals::Receiver;

use rustix::fs::{FlockOperation, flock};
use tokio::runtime::Handle;

use crate::node::{host, options, settings};
use crate::workers::support::{Folder, LIMIT, Traces, within};

/// A cell in a file. A write takes effect if the file still has what this node last read or wrote.
struct File {
    path: PathBuf,
    known: Option<Vec<u8>>,
}

impl File {
    fn read(&mut self) -> io::Result<Option<Vec<u8>>> {
        self.known = match fs::read(&self.path) {
            Ok(state) => Some(state),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        Ok(self.known.clone())
    }

    /// Write the state. If it returns false, `known` is the content of the file.
    fn write(&mut self, state: Vec<u8>) -> io::Result<bool> {
        let lock = fs::File::create(self.path.with_extension("lock"))?;
        flock(&lock, FlockOperation::LockExclusive)?;
        let expected = self.known.take();
        if self.read()? != expected {
            return Ok(false);
        }
        let new = self.path.with_extension("new");
        fs::write(&new, &state)?;
        fs::rename(&new, &self.path)?;
        self.known = Some(state);
        Ok(true)
    }
}

/// Perform a node's steps until it has left.
async fn serve(driver: CellDriver, mut file: File) {
    loop {
        let done = match driver.next_step().await {
            Step::Stop => return,
            Step::Perform(CellCommand::Read) => {
                file.read().map(|state| driver.apply(|node, now| node.on_state(state.as_deref(), now)))
            }
            Step::Perform(CellCommand::Write(state)) => file.write(state).map(|written| match written {
                true => driver.apply(|node, now| node.on_written(now)),
                false => driver.apply(|node, now| node.on_conflict(file.known.as_deref(), now)),
            }),
        };
        if let Err(error) = done {
            driver.apply(|node, _| node.on_broken(JoinError::connection(error.to_string())));
        }
    }
}

/// Run a node whose two workers are shells that execute `script`, until its part has ended.
async fn node(cell: &Path, number: u128, max_restarts: u32, script: &str, traces: &Traces) -> Ended {
    // Two nodes on one machine need different addresses.
    let (name, addr) = (format!("node{number}"), format!("127.0.0.{number}"));
    let hello = Hello::new("job", NodeId(number), name.clone(), settings(2, 2, max_restarts));
    let (session, driver) = CellDriver::new(Hello { local_addr: Some(addr.clone()), ..hello }, false);
    let serving = tokio::spawn(serve(driver, File { path: cell.to_owned(), known: None }));
    let ended = launch(session, name, addr, script, traces).await;
    within(serving).await.unwrap();
    ended
}

/// Run the node of this session as `elastic-run` does.
async fn launch(session: Session, name: String, addr: String, script: &str, traces: &Traces) -> Ended {
    let node = NodeOptions {
        run_id: "job".into(),
        name: name.clone(),
        reach: Reach { local_addr: Some(addr), ..Reach::default() },
        join_timeout: LIMIT,
        ..NodeOptions::default()
    };
    let node = Arc::new(Node::new(Arc::new(session), node, None));
    let job = Job {
        agent: AgentOptions { name, ..options(Budget::Job, 2) },
        command: ["sh", "-c", script].map(Into::into).to_vec(),
        close_timeout: LIMIT,
        fixed: None,
        cpus: Vec::new(),
        log_folder: LogFolder::Nowhere,
        logs: LogOptions::default(),
        warm: None,
        variables: BTreeMap::from([traces.variable()]),
    };
    within(run(job, node, Receiver::of_nothing())).await.unwrap()
}

/// Run two nodes. Returns how each ended, and the sorted lines that workers wrote to the file `lines`.
async fn two_nodes(max_restarts: u32, script: impl Fn(&Folder) -> String) -> ([Ended; 2], Vec<String>) {
    let traces = Traces::new();
    let folder = Folder::new(&traces);
    let (cell, script) = (folder.0.join("cell"), script(&folder));
    let one = node(&cell, 1, max_restarts, &script, &traces);
    let (one, two) = tokio::join!(one, node(&cell, 2, max_restarts, &script, &traces));
    let text = fs::read_to_string(folder.0.join("lines")).unwrap_or_default();
    let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
    lines.sort();
    ([one, two], lines)
}

/// A script that kills the worker with rank 3 in the first round, in which the others run for ever. In the second round all succeed.
/// In workers' arguments `$$` stands for `$`.
fn killed_once(folder: &Folder) -> String {
    format!(
        "case $RANK-$TORCHELASTIC_RESTART_COUNT in 3-0) kill -9 $$$$;; *-0) exec sleep 1000;; esac\n\
         echo $RANK of $WORLD_SIZE restart $TORCHELASTIC_RESTART_COUNT >> {}/lines",
        folder.0.display()
    )
}

#[tokio::test]
async fn a_job_over_a_cell_in_a_file_restarts_after_a_worker_was_killed() {
    let (ended, lines) = two_nodes(1, killed_once).await;
    assert_eq!(ended.map(|ended| ended.outcome), [Outcome::Succeeded, Outcome::Succeeded]);
    let expected: Vec<_> = (0..4).map(|rank| format!("{rank} of 4 restart 1")).collect();
    assert_eq!(lines, expected);
}

#[tokio::test]
async fn a_failure_without_restarts_left_ends_all_nodes_of_a_cell() {
    let (ended, lines) = two_nodes(0, killed_once).await;
    let causes = ended.map(|ended| match ended.outcome {
        Outcome::Failed { cause: Some(cause), .. } => (cause.global_rank, cause.exit),
        outcome => panic!("{outcome:?}"),
    });
    assert_eq!(causes[0], (3, "SIGKILL".to_owned()));
    assert_eq!(causes[0], causes[1]);
    assert_eq!(lines, Vec::<String>::new());
}

/// Two nodes with two workers each, in a world of three workers.
#[tokio::test]
async fn the_node_that_would_pass_the_maximum_starts_one_worker() {
    let traces = Traces::new();
    let folder = Folder::new(&traces);
    let lines = folder.0.join("lines");
    let script = format!(
        "echo $RANK of $WORLD_SIZE >> {0}\necho local $LOCAL_RANK of $LOCAL_WORLD_SIZE, role of $ROLE_WORLD_SIZE >> {0}",
        lines.display()
    );
    let rules = Rules { workers: Some(WorkerBounds { min: 3, max: 3 }), ..Rules::default() };
    let (host, settings) = (host(), Settings { rules, ..settings(1, 9, 0) });
    let node = |number: u128| {
        let (name, addr) = (format!("node{number}"), format!("127.0.0.{number}"));
        let hello = Hello::new("job", NodeId(number), name.clone(), settings.clone());
        let hello = Hello { local_addr: Some(addr.clone()), ..hello };
        let session = Session::open(&Handle::current(), hello, "127.0.0.1", host.port(), LIMIT, None);
        launch(session, name, addr, &script, &traces)
    };
    let (one, two) = tokio::join!(node(1), node(2));
    assert_eq!([one.outcome, two.outcome], [Outcome::Succeeded, Outcome::Succeeded]);
    let text = fs::read_to_string(lines).unwrap();
    let mut lines: Vec<_> = text.lines().collect();
    lines.sort_unstable();
    let (ranks, local) = lines.split_at(3);
    assert_eq!(ranks, ["0 of 3", "1 of 3", "2 of 3"]);
    assert_eq!(local, ["local 0 of 1, role of 3", "local 0 of 2, role of 3", "local 1 of 2, role of 3"]);
}
