//! A coordinator that was restarted is notified by members what happened before, over real sockets.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::bench::failure;
use elastic_rs::endpoint::EndpointServer;
use elastic_rs::events::record::Phase;
use elastic_rs::rendezvous::messages::message::{Hello, NodeId, Observe, Round};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::node::session::Session;
use elastic_rs::rendezvous::observer::Observer;
use elastic_rs::store::server::ServerOptions;
use serde_json::Value;
use tokio::runtime::{Builder, Handle};
use tokio::time::timeout;

/// Time limit for a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn host(port: u16) -> EndpointServer {
    let listener = elastic_rs::net::listen::bind(([127, 0, 0, 1], port).into()).unwrap();
    EndpointServer::start(vec![listener], ServerOptions::default(), None).unwrap()
}

fn node(number: u8, port: u16) -> Session {
    let settings = Settings { max_restarts: Some(3), ..Settings::new(2, 2) };
    let hello = Hello::new("job", NodeId(number.into()), format!("node{number}:7"), settings);
    Session::open(&Handle::current(), hello, "127.0.0.1", port, PATIENCE, None)
}

/// The events of the coordinator, until there are so many that members have reported.
async fn reported(port: u16, count: usize) -> Vec<Value> {
    let mut observer = Observer::connect("127.0.0.1", port, None, PATIENCE).await.unwrap();
    let (mut events, mut after) = (Vec::<Value>::new(), 0);
    loop {
        let ask = Observe { run_id: Some("job".into()), after, waits: true, state: false };
        let Ok(seen) = observer.ask(ask).await else {
            // No member has come yet.
            observer = Observer::connect("127.0.0.1", port, None, PATIENCE).await.unwrap();
            tokio::task::yield_now().await;
            continue;
        };
        events.extend(seen.lines.iter().map(|line| serde_json::from_str::<Value>(line).unwrap()));
        after = seen.last;
        let reported: Vec<_> = events.iter().filter(|event| event["type"] == "replayed").cloned().collect();
        if reported.len() >= count {
            return reported;
        }
    }
}

#[test]
fn members_replay_to_a_restarted_coordinator_what_happened_before() {
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let first = host(0);
    let port = first.port();
    runtime.block_on(async {
        let nodes = [node(1, port), node(2, port)];
        let join =
            async || tokio::join!(nodes[0].join(1, None, None, PATIENCE), nodes[1].join(2, None, None, PATIENCE));
        let (one, other) = join().await;
        assert_eq!((one.unwrap().round.0, other.unwrap().round.0), (1, 1));
        nodes[1].report_failure(Round(1), *failure());
        for node in &nodes {
            timeout(PATIENCE, node.view_when(|view| view.waiting > 0)).await.unwrap();
        }
        let (one, other) = join().await;
        let round = one.unwrap().round;
        assert_eq!((round.0, other.unwrap().round.0), (2, 2));
        for node in &nodes {
            node.report_phases(round, Phase { stop_us: Some(5), ..Phase::default() });
        }
        drop(first);
        let second = host(port);

        // Two rounds, one failure, one break; each once, although both members know them. And the phases of both.
        let reported = timeout(PATIENCE, reported(port, 6)).await.unwrap();
        let mut kinds: Vec<_> = reported
            .iter()
            .map(|event| (event["data"]["type"].as_str().unwrap(), event["data"]["round"].as_u64().unwrap()))
            .collect();
        kinds.sort_unstable();
        let expected = [
            ("phase", 2),
            ("phase", 2),
            ("received.broken", 1),
            ("received.completed", 1),
            ("received.completed", 2),
            ("received.exited", 1),
        ];
        assert_eq!(kinds, expected);
        let of = |kind: &str| reported.iter().find(|event| event["data"]["type"] == kind).unwrap();
        let (exited, broken) = (of("received.exited"), of("received.broken"));
        assert_eq!(exited["data"]["node"], "node2:7");
        assert_eq!(exited["data"]["data"]["rank"], 3);
        assert_eq!(broken["data"]["cause"], serde_json::json!([exited["data"]["id"]]));
        assert!(broken["data"]["text"].as_str().unwrap().contains("ended with SIGKILL: out of memory"));
        let phases = reported.iter().filter(|event| event["data"]["type"] == "phase");
        let phases: BTreeSet<_> = phases.map(|event| event["data"]["node"].as_str().unwrap()).collect();
        assert_eq!(phases, BTreeSet::from(["node1:7", "node2:7"]));
        for event in &reported {
            // The coordinator marks them: they are a member's, with its origin and its clock.
            assert!(
                event["id"].as_str().unwrap().starts_with('c')
                    && event["data"]["id"].as_str().unwrap().starts_with('n')
            );
            assert!(event["data"]["ago_us"].as_u64().unwrap() > 0);
            assert!(event["node"].as_str().unwrap().starts_with("node"));
        }
        // Nobody was disturbed.
        for node in &nodes {
            let view = node.view();
            assert_eq!((view.round, view.waiting), (round, 0), "{view:?}");
        }
        drop((nodes, second));
    });
}
