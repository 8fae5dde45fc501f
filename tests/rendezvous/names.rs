//! Two jobs without a run id at one endpoint, and a run id that is used again.

use std::time::Duration;

use elastic_rs::rendezvous::messages::message::{
    CoordinatorMessage, EndClass, Hello, Join, JoinWorkers, NodeMessage, Round, Verdict, Waits,
};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::node::status_log::StatusLog;
use elastic_rs::rendezvous::node::{JoinError, NodeMachine};

use crate::bench::{Bench, failure, hello, join};

/// A node of a job that has this run id.
fn of(run_id: &str, node: u64, settings: &Settings) -> Hello {
    Hello { run_id: run_id.to_owned(), ..hello(node, settings) }
}

fn runs(role: &str, entrypoint: &str) -> NodeMessage {
    let workers = Some(JoinWorkers::new(role, 2).running(entrypoint));
    NodeMessage::Join(Join { round: Round(0), store_port: 1, node_rank: None, workers, health: Default::default() })
}

/// Node 1 of one node runs `/a/train.py`. Returns whether node 2 is refused, and why.
fn second(run_id: &str, settings: &Settings, message: NodeMessage) -> Option<String> {
    let mut bench = Bench::new();
    bench.greet(1, of(run_id, 1, settings), 1);
    bench.send(1, runs("default", "/a/train.py"));
    bench.pass(Duration::from_secs(180));
    bench.send(1, NodeMessage::Heartbeat { rtt_us: None });
    bench.greet(2, of(run_id, 2, settings), 2);
    bench.send(2, message);
    match bench.last(2) {
        CoordinatorMessage::Ended { reason } => {
            assert_eq!(bench.ended.len(), 1, "its session ends");
            Some(reason.clone())
        }
        _ => None,
    }
}

fn of_nodes(min: u32, max: u32) -> Settings {
    Settings { keep_alive_interval: Duration::from_secs(600), ..Settings::new(min, max) }
}

#[test]
fn a_second_job_of_one_node_without_a_run_id_is_refused_with_the_first_ones_host_script_and_age() {
    let refused = second("none", &of_nodes(1, 1), runs("default", "/b/train.py")).unwrap();
    assert_eq!(
        refused,
        "10.0.0.2 (host:2) belongs to another job than 10.0.0.1 (host:1), which runs `train.py` and came 3 min ago: that job takes 1 \
         node (--nnodes), and neither has a --rdzv-id. Give each job a --rdzv-id of its own. (In a job that has one, a node too many \
         waits as a spare.)"
    );
    // PyTorch's agent does not say what it runs.
    assert!(second("none", &of_nodes(1, 1), join(0)).is_some());
}

#[test]
fn a_node_without_a_run_id_that_runs_another_script_is_refused() {
    let refused = second("none", &of_nodes(2, 4), runs("default", "/a/evaluate.py")).unwrap();
    assert!(refused.contains("which runs `train.py`") && refused.contains("does not run `evaluate.py`"), "{refused}");
    for same in [
        runs("default", "/b/train.py"),      // another folder
        runs("evaluator", "/a/evaluate.py"), // another role
        join(0),                             // an agent that does not say
    ] {
        assert_eq!(second("none", &of_nodes(2, 4), same.clone()), None, "{same:?}");
    }
}

#[test]
fn a_second_job_with_other_settings_is_named_as_such_only_without_a_run_id() {
    for (run_id, settings) in [("none", of_nodes(1, 4)), ("job", of_nodes(1, 4))] {
        let mut bench = Bench::new();
        bench.greet(1, of(run_id, 1, &of_nodes(1, 1)), 1);
        bench.send(1, runs("default", "/a/train.py"));
        bench.greet(2, of(run_id, 2, &settings), 2);
        let reason = bench.rejection(2);
        assert!(reason.contains("give every node the same `--nnodes`"), "{reason}");
        let other = "Or these are two jobs, that of 10.0.0.1 (host:1), which runs `train.py` and came 0 s ago, and this one, and neither \
                     has a --rdzv-id: give each one of its own";
        assert_eq!(reason.contains(other), run_id == "none", "{reason}");
    }
}

#[test]
fn in_a_job_that_has_a_run_id_nobody_is_refused_for_another_script() {
    assert_eq!(second("job", &of_nodes(1, 1), runs("default", "/a/evaluate.py")), None);
    assert_eq!(second("job", &of_nodes(2, 4), runs("default", "/a/evaluate.py")), None);
}

#[test]
fn an_agent_that_is_started_again_is_no_other_job() {
    // The connection of the first one has ended, and its grace runs.
    let settings = of_nodes(1, 1);
    let mut bench = Bench::new();
    bench.greet(1, of("none", 1, &settings), 1);
    bench.send(1, runs("default", "train.py"));
    bench.machine.on_disconnected(elastic_rs::rendezvous::run::SessionId(1), bench.now);
    bench.greet(2, of("none", 2, &settings), 2);
    bench.send(2, runs("default", "train.py"));
    assert!(!matches!(bench.last(2), CoordinatorMessage::Ended { .. }), "{:?}", bench.last(2));
    bench.pass(Duration::from_secs(1));
    assert!(bench.is_placed(2, 2), "{:?}", bench.last(2));
    // A member that comes back has been in a round.
    bench.send(2, join(2));
    assert!(bench.is_placed(2, 3), "{:?}", bench.last(2));
}

#[test]
fn a_node_that_comes_after_the_end_learns_when_and_how_the_job_ended() {
    let settings = Settings::new(1, 1);
    for failed in [false, true] {
        let mut bench = Bench::formed(1, &settings);
        let verdict = match failed {
            false => Verdict::Succeeded { by: "host:1".into() },
            true => Verdict::Failed {
                by: "host:1".into(),
                cause: "exit code 1".into(),
                failure: Some(failure()),
                class: EndClass::Program,
            },
        };
        bench.send(1, NodeMessage::Close(verdict));
        assert!(matches!(bench.last(1), CoordinatorMessage::Closed { .. }), "a member");
        bench.send(1, NodeMessage::Leave { reason: "over".into(), signal: None });
        bench.pass(Duration::from_secs(600));
        bench.greet(2, hello(2, &settings), 2);
        let CoordinatorMessage::Over { verdict, ago } = bench.last(2) else { panic!("{:?}", bench.last(2)) };
        assert_eq!((verdict.is_failure(), *ago), (failed, Some(Duration::from_secs(600))));

        let now = bench.now;
        let mut node = NodeMachine::new(hello(2, &settings), "head:1".into(), Duration::from_secs(9), now);
        node.on_connected(now);
        node.join(1, None, None, Duration::from_secs(60), now);
        let addr = "10.0.0.2".to_owned();
        node.on_message(CoordinatorMessage::Welcome { addr, hosted: false, running: None, wants_replay: false }, now);
        node.on_message(bench.last(2).clone(), now);
        let error = node.take_outcome().unwrap().unwrap_err();
        assert!(matches!(error, JoinError::Over { .. }) && error.is_after_success() != failed, "{error:?}");
        let expected = match failed {
            false => {
                "the job with the run id `job` has succeeded 10 min ago (closed by host:1): a coordinator remembers that for an \
                      hour. A new job needs another --rdzv-id"
            }
            true => {
                "the job with the run id `job` has failed 10 min ago (closed by host:1 after a failure: exit code 1): a coordinator \
                     remembers that for an hour. A new job needs another --rdzv-id"
            }
        };
        assert_eq!(error.to_string(), expected);
        // Each further join fails alike.
        node.join(1, None, None, Duration::from_secs(60), now);
        assert_eq!(node.take_outcome(), Some(Err(error)));
    }
}

#[test]
fn a_spare_says_on_each_line_that_it_is_one_and_waits_without_a_limit() {
    let settings = Settings::new(1, 1);
    let now = std::time::Instant::now();
    let mut node = NodeMachine::new(hello(2, &settings), "head:1".into(), Duration::from_secs(9), now);
    node.on_connected(now);
    let addr = "10.0.0.2".to_owned();
    node.on_message(CoordinatorMessage::Welcome { addr, hosted: false, running: None, wants_replay: false }, now);
    node.join(1, None, None, Duration::from_secs(60), now);
    let mut status_log = StatusLog::default();
    status_log.look(&node, now);
    for (second, text) in [(3, "round 2: 1 node waits"), (40, "round 2: 2 nodes wait")] {
        node.on_message(CoordinatorMessage::Waits(Waits { progress: text.into(), spare: true }), now);
        let line = status_log.look(&node, now + Duration::from_secs(second)).pop().unwrap();
        let expected =
            format!("waiting for {second}s, as a spare, until a node is lost or the job ends (no limit): {text}");
        assert_eq!(line, expected);
    }
}

#[test]
fn several_agents_of_a_job_on_one_machine_are_named_once_with_their_slots() {
    let settings = Settings { settle_timeout: Duration::ZERO, ..Settings::new(3, 3) };
    let mut bench = Bench::new();
    // Nodes 1 and 2 are on one machine.
    for (node, address, name) in [(1, 1, "a:10"), (2, 1, "a:11"), (3, 3, "a:10")] {
        bench.greet(node, Hello { name: name.to_owned(), ..hello(node, &settings) }, address);
        bench.send(node, join(0));
    }
    assert_eq!(
        bench.warnings,
        [
            "2 agents of this job run on one machine, 10.0.0.1 (a), with 2 + 2 workers. If that is not meant, start one agent on each \
          machine, by `srun --ntasks-per-node=1` for example"
        ]
    );
    bench.send(1, join(1));
    bench.send(2, join(1));
    bench.send(3, join(1));
    assert!(bench.is_placed(1, 2) && bench.warnings.len() == 1, "{:?}", bench.warnings);
    // A driver's agents have their hosts' names.
    let mut bench = Bench::new();
    for node in 1..=3 {
        let name = Some(format!("host{node}"));
        bench.greet(node, Hello { name: format!("a:{node}"), host_name: name, ..hello(node, &settings) }, 1);
        bench.send(node, join(0));
    }
    assert!(bench.is_placed(1, 1) && bench.warnings.is_empty(), "{:?}", bench.warnings);
}
