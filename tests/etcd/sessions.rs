//! Sessions over etcd: the driver with the machine. The simulator tests the decisions.

use std::time::{Duration, Instant};

use elastic_rs::etcd_client::{Client, ClientOptions, Credentials, EtcdError, Password};
use elastic_rs::rendezvous::etcd::driver;
use elastic_rs::rendezvous::etcd::keys::Keys;
use elastic_rs::rendezvous::messages::message::{Hello, NodeId, Placement, Round, Verdict};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::node::session::Session;
use elastic_rs::rendezvous::node::{JoinError, View};
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::cluster::{Cluster, PATIENCE};
use crate::users::add_users;

const PREFIX: &str = "/p";

fn succeeded() -> Verdict {
    Verdict::Succeeded { by: "test".into() }
}

/// A session with a client of its own, as in a process of its own.
fn session(options: &ClientOptions, number: u128, settings: &Settings) -> Session {
    let name = format!("node{number}");
    let hello = Hello { local_addr: Some(name.clone()), ..Hello::new("job", NodeId(number), name, settings.clone()) };
    driver::open(&Handle::current(), hello, Client::new(options.clone()).unwrap(), PREFIX, PATIENCE)
}

/// Join with all sessions at once. Returns the placements in the order of the sessions, and how long all of it took.
async fn join_all(sessions: Vec<Session>) -> (Vec<Session>, Vec<Placement>, Duration) {
    let began = Instant::now();
    let mut joining = JoinSet::new();
    for (index, session) in sessions.into_iter().enumerate() {
        joining.spawn(async move {
            let placement = session.join(1000 + index as u16, None, None, PATIENCE).await.unwrap();
            (index, session, placement)
        });
    }
    let mut joined = joining.join_all().await;
    let took = began.elapsed();
    joined.sort_by_key(|(index, ..)| *index);
    let (sessions, placements) = joined.into_iter().map(|(_, session, placement)| (session, placement)).unzip();
    (sessions, placements, took)
}

async fn until_view(session: &Session, wanted: impl Fn(&View) -> bool) -> View {
    timeout(PATIENCE, session.view_when(wanted)).await.unwrap()
}

/// A lease of this many seconds, renewed three times within it.
fn with_lease(mut settings: Settings, seconds: u64) -> Settings {
    settings.keep_alive_max_attempt = 3;
    settings.keep_alive_interval = Duration::from_secs(seconds) / 3;
    assert_eq!(settings.lease(), Duration::from_secs(seconds));
    settings
}

/// Check that the nodes run on.
fn assert_undisturbed(sessions: &[Session], what: &str) {
    for session in sessions {
        let view = session.view();
        assert!(view.waiting == 0 && view.fenced.is_none() && view.failed.is_none(), "{what}: {view:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_nodes_form_a_world_and_leave_nothing_but_its_state() {
    let Some(cluster) = Cluster::start(3, &[]).await else { return };
    let options = cluster.options();
    let settings = Settings::new(8, 8);
    let sessions = (0..8).map(|number| session(&options, number, &settings)).collect();
    let (sessions, placements, _) = join_all(sessions).await;
    for (number, placement) in placements.iter().enumerate() {
        assert_eq!(placement.rank, number as u32, "ranks follow the natural order of addresses");
        assert_eq!((placement.world_size, placement.round), (8, Round(1)));
        assert_eq!((placement.master_addr.as_str(), placement.master_port), ("node0", 1000));
    }
    let keys = Keys::new(PREFIX, "job");
    let client = cluster.client();
    let count = async || client.range(keys.prefix()).await.unwrap().0.len();
    assert_eq!(count().await, 9);

    sessions[3].leave("test".into(), Some(15), PATIENCE).await;
    for session in &sessions[4..] {
        let view = until_view(session, |view| view.waiting > 0).await;
        assert!(view.reason.contains("node3"), "{}", view.reason);
    }
    assert!(client.get(&keys.node(NodeId(3))).await.unwrap().0.is_none());
    sessions[0].close_within(succeeded(), PATIENCE).await.unwrap();
    for session in sessions.iter().enumerate().filter(|(number, _)| *number != 3).map(|(_, session)| session) {
        until_view(session, |view| view.closed.is_some()).await;
        session.leave("test is over".into(), None, PATIENCE).await;
    }
    // The state stays for nodes that come late. Its lease ends it.
    assert_eq!(count().await, 1);
    assert_ne!(client.get(&keys.state()).await.unwrap().0.unwrap().lease, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_dies_is_replaced() {
    let Some(cluster) = Cluster::start(1, &[]).await else { return };
    let options = cluster.options();
    let settings = with_lease(Settings::new(2, 2), 3);
    let (mut sessions, ..) = join_all((0..2).map(|number| session(&options, number, &settings)).collect()).await;
    // Its task ends, as with its process: nothing is revoked.
    drop(sessions.remove(0));
    let view = until_view(&sessions[0], |view| view.waiting > 0).await;
    assert!(view.reason.contains("node0"), "{}", view.reason);
    sessions.push(session(&options, 2, &settings));
    let (_, placements, _) = join_all(sessions).await;
    let ranks: Vec<_> = placements.iter().map(|placement| (placement.rank, placement.round)).collect();
    // The survivor keeps its rank only if there is one below it.
    assert!(ranks == [(0, Round(2)), (1, Round(2))] || ranks == [(1, Round(2)), (0, Round(2))], "{ranks:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_that_die_or_stop_disturb_nobody() {
    let Some(mut cluster) = Cluster::start(3, &[]).await else { return };
    let options = cluster.options();
    let settings = with_lease(Settings::new(3, 3), 6);
    let (sessions, ..) = join_all((0..3).map(|number| session(&options, number, &settings)).collect()).await;
    let leader = cluster.until_served().await;
    cluster.kill(leader);
    tokio::time::sleep(settings.lease()).await;
    assert_undisturbed(&sessions, "the leader was killed");
    cluster.launch(leader);
    let leader = cluster.until_served().await;
    // Shorter than the lease: until 3.5.13 a leader that was stopped for longer may revoke leases that hold (`etcd::version`).
    cluster.pause(leader);
    tokio::time::sleep(settings.lease() / 2).await;
    assert_undisturbed(&sessions, "the leader was stopped");
    cluster.resume(leader);
    cluster.until_served().await;
    tokio::time::sleep(settings.lease()).await;
    assert_undisturbed(&sessions, "the stopped leader went on");
    // Changes still arrive.
    sessions[0].close_within(succeeded(), PATIENCE).await.unwrap();
    for session in &sessions {
        until_view(session, |view| view.closed.is_some()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_quorum_disturbs_nobody_for_longer_than_the_lease() {
    let Some(mut cluster) = Cluster::start(3, &[]).await else { return };
    let options = cluster.options();
    let settings = with_lease(Settings::new(1, 3), 6);
    let (sessions, ..) = join_all((0..2).map(|number| session(&options, number, &settings)).collect()).await;
    (0..2).for_each(|member| cluster.kill(member));
    tokio::time::sleep(settings.lease() * 2 + Duration::from_secs(1)).await;
    assert_undisturbed(&sessions, "two of three members are dead");
    (0..2).for_each(|member| cluster.launch(member));
    cluster.until_served().await;
    tokio::time::sleep(settings.lease()).await;
    assert_undisturbed(&sessions, "they are back");
    sessions[1].close_within(succeeded(), PATIENCE).await.unwrap();
    until_view(&sessions[0], |view| view.closed.is_some()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixty_four_nodes_cost_a_few_transactions_each() {
    let Some(cluster) = Cluster::start(3, &[]).await else { return };
    let options = cluster.options();
    let settings = Settings::new(64, 64);
    let (_sessions, placements, took) =
        join_all((0..64).map(|number| session(&options, number, &settings)).collect()).await;
    assert!(placements.iter().all(|placement| placement.world_size == 64 && placement.round == Round(1)));
    let txns = cluster.calls("Txn").await;
    println!("64 joins: {took:?}, {txns} transactions");
    assert!(txns <= 12 * 64, "{txns} transactions");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_rest_nodes_renew_their_leases_and_do_nothing_else() {
    const WATCHED: Duration = Duration::from_secs(11);
    let Some(cluster) = Cluster::start(3, &[]).await else { return };
    let options = cluster.options();
    let settings = Settings::new(4, 4);
    let (sessions, ..) = join_all((0..4).map(|number| session(&options, number, &settings)).collect()).await;
    // The first renewal is the first thing that happens at rest.
    timeout(PATIENCE, async { while cluster.calls("LeaseKeepAlive").await < 4 {} }).await.unwrap();
    let methods =
        ["Range", "Txn", "Put", "LeaseGrant", "LeaseRevoke", "Status", "MemberList", "Watch", "LeaseKeepAlive"];
    let count = async || {
        let mut counts = Vec::new();
        for method in methods {
            counts.push(cluster.calls(method).await);
        }
        counts
    };
    let before = count().await;
    tokio::time::sleep(WATCHED).await;
    let after = count().await;
    let calls: Vec<_> = after.iter().zip(&before).map(|(after, before)| after - before).collect();
    let (renewals, others) = calls.split_last().unwrap();
    assert!(others.iter().all(|calls| *calls == 0), "{methods:?}: {calls:?}");
    // Every 5 s each.
    assert!((6..=12).contains(renewals), "{renewals} renewals");
    assert_undisturbed(&sessions, "nothing happened");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_work_fails_a_join_at_once() {
    let Some(cluster) = Cluster::start(1, &[]).await else { return };
    cluster.client().put(b"/p/job/other", b"", 0).await.unwrap();
    let settings = Settings::new(1, 1);
    let error = async |options: &ClientOptions| {
        let began = Instant::now();
        let error = session(options, 1, &settings).join(1, None, None, PATIENCE).await.unwrap_err();
        // On an idle machine it takes milliseconds.
        assert!(began.elapsed() < PATIENCE / 4, "{:?}", began.elapsed());
        let JoinError::Connection { text, .. } = error else { panic!("{error:?}") };
        text
    };
    let text = error(&cluster.options()).await;
    assert!(text.contains("`/p/job/other` is another program's") && text.contains("key_prefix"), "{text}");
    cluster.client().delete(b"/p/job/other").await.unwrap();

    add_users(&cluster).await;
    let with = |username: &str, password: &str| {
        let credentials = Credentials { username: username.to_owned(), password: Password::new(password) };
        ClientOptions { credentials: Some(credentials), ..cluster.options() }
    };
    assert!(error(&with("trainer", "sesame")).await.contains("rejects the password of user `trainer`"));
    assert!(error(&with("stranger", "stranger")).await.contains("permission denied"));
    assert!(error(&cluster.options()).await.contains("give `username`"));
    let (sessions, ..) = join_all(vec![session(&with("trainer", "trainer"), 1, &settings)]).await;
    // A role that is taken away disturbs no running node.
    let token = cluster.gateway("/v3/auth/authenticate", r#"{"name":"root","password":"root"}"#, None).await;
    let token = token.split('"').skip_while(|part| *part != "token").nth(2).unwrap().to_owned();
    cluster.gateway("/v3/auth/user/revoke", r#"{"name":"trainer","role":"training"}"#, Some(&token)).await;
    let client = Client::new(with("trainer", "trainer")).unwrap();
    assert!(matches!(client.get(b"/p/key").await, Err(EtcdError::Denied(_))));
    tokio::time::sleep(settings.keep_alive_interval * 2).await;
    assert_undisturbed(&sessions, "the role was taken away");
}
