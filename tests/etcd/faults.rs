//! Members that die, stop, lose their quorum, or run out of space.

use std::time::{Duration, Instant};

use elastic_rs::etcd_client::{Client, EtcdError};
use tokio::time::timeout;

use crate::cluster::{Cluster, PATIENCE};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_member_may_die_or_stop() {
    let Some(mut cluster) = Cluster::start(3, &[]).await else { return };
    let client = cluster.client();
    let lease = client.lease_grant(Duration::from_secs(60)).await.unwrap();
    client.put(b"/key", b"1", lease).await.unwrap();
    // One of the three is the one that the client is connected to, and one is the leader.
    for member in 0..3 {
        cluster.kill(member);
        let began = Instant::now();
        let value = client.get(b"/key").await;
        // An election may be in the way: 1 to 2 s.
        assert!(value.is_ok(), "{value:?} after {:?}", began.elapsed());
        println!("member {member} killed: {:?}", began.elapsed());
        assert!(client.lease_renew(lease).await.unwrap());
        cluster.launch(member);
        cluster.until_served().await;
    }
    for member in 0..3 {
        cluster.pause(member);
        let began = Instant::now();
        let renewed = client.lease_renew(lease).await;
        assert!(renewed == Ok(true), "{renewed:?} after {:?}", began.elapsed());
        println!("member {member} stopped: {:?}", began.elapsed());
        assert!(client.get(b"/key").await.unwrap().0.is_some());
        cluster.resume(member);
        cluster.until_served().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_without_an_answer_is_reported_as_unknown() {
    let Some(cluster) = Cluster::start(1, &[]).await else { return };
    let client = cluster.client();
    client.put(b"/key", b"1", 0).await.unwrap();
    cluster.pause(0);
    let error = client.compare_and_put(b"/key", 0, b"2", 0).await.unwrap_err();
    assert!(matches!(error, EtcdError::Unknown(_)), "{error:?}");
    assert!(error.to_string().contains("did not answer within 2s: the write may have been done"), "{error}");
    // Nothing was sent this time.
    let error = client.put(b"/key", b"3", 0).await.unwrap_err();
    assert!(matches!(error, EtcdError::Unavailable(_)), "{error:?}");
    cluster.resume(0);
    assert_eq!(client.get(b"/key").await.unwrap().0.unwrap().value, b"1");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_ends_with_its_member() {
    let Some(mut cluster) = Cluster::start(3, &[]).await else { return };
    let client = cluster.client();
    let (_, now) = client.get(b"/key").await.unwrap();
    let mut watch = client.watch(b"/", now + 1).await.unwrap();
    let port = watch.member().rsplit_once(':').unwrap().1.parse::<u16>().unwrap();
    let member = cluster.members.iter().position(|member| member.port == port).unwrap();
    cluster.kill(member);
    let error = timeout(PATIENCE, watch.next()).await.unwrap().unwrap_err();
    assert!(matches!(error, EtcdError::Unavailable(_)), "{error:?}");
    // The next one is at another member, and misses nothing.
    timeout(PATIENCE, async { while client.put(b"/key", b"1", 0).await.is_err() {} }).await.unwrap();
    let mut watch = client.watch(b"/", now + 1).await.unwrap();
    let report = timeout(PATIENCE, watch.next()).await.unwrap().unwrap();
    assert_eq!(report.changes[0].1[0].key, b"/key");
    assert!(!watch.member().ends_with(&port.to_string()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_survey_proves_a_lost_quorum_and_only_that() {
    let Some(mut cluster) = Cluster::start(3, &[]).await else { return };
    let client = cluster.client();
    client.prepare_survey().await;
    assert!(!client.survey().await);
    let leader = cluster.until_served().await;
    let others: Vec<_> = (0..3).filter(|member| *member != leader).collect();
    cluster.kill(leader);
    cluster.kill(others[0]);
    // The last one notices within an election's time.
    until(&client, true).await;
    let error = client.get(b"/key").await.unwrap_err();
    assert!(matches!(error, EtcdError::Unavailable(_)) && error.to_string().contains("knows no leader"), "{error}");
    // One that does not answer may be anything.
    cluster.pause(others[1]);
    assert!(!client.survey().await);
    cluster.resume(others[1]);
    // Two of three elect a leader.
    cluster.launch(leader);
    until(&client, false).await;
    timeout(PATIENCE, async { while client.get(b"/key").await.is_err() {} }).await.unwrap();
}

async fn until(client: &Client, leaderless: bool) {
    timeout(PATIENCE, async { while client.survey().await != leaderless {} }).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_cluster_takes_no_writes_and_renews_leases() {
    let Some(cluster) = Cluster::start(1, &["--quota-backend-bytes=2000000"]).await else { return };
    let client = cluster.client();
    let lease = client.lease_grant(Duration::from_secs(60)).await.unwrap();
    let error = loop {
        if let Err(error) = client.put(b"/key", &vec![1; 200_000], lease).await {
            break error;
        }
    };
    assert!(matches!(error, EtcdError::NoSpace(_)) && !error.is_final(), "{error:?}");
    assert!(error.to_string().contains("etcdctl"), "{error}");
    assert!(matches!(client.lease_grant(Duration::from_secs(60)).await, Err(EtcdError::NoSpace(_))));
    assert!(client.get(b"/key").await.unwrap().0.is_some() && client.lease_renew(lease).await.unwrap());
    assert_eq!(client.look().await.endpoints[0].1.as_ref().unwrap().alarms, ["NOSPACE"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_wait_for_a_connection_fail_together() {
    let Some(cluster) = Cluster::start(1, &[]).await else { return };
    let client = cluster.client();
    cluster.pause(0);
    let began = Instant::now();
    let calls: tokio::task::JoinSet<_> = (0..8)
        .map(|_| {
            let client = client.clone();
            async move { client.get(b"/key").await }
        })
        .collect();
    assert!(calls.join_all().await.iter().all(|answer| matches!(answer, Err(EtcdError::Unavailable(_)))));
    // One after the other, they would take the patience each.
    assert!(began.elapsed() < 7 * client.options().patience, "{:?}", began.elapsed());
}
