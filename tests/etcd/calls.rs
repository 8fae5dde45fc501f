//! Each call, against a healthy cluster.

use std::time::Duration;

use elastic_rs::etcd_client::{EtcdError, Put, TxnOutcome};
use tokio::time::timeout;

use crate::cluster::{Cluster, PATIENCE};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_and_transactions() {
    let Some(cluster) = Cluster::start(1, &[]).await else { return };
    let client = cluster.client();
    assert_eq!(client.get(b"/a/x").await.unwrap().0, None);
    let first = client.put(b"/a/x", b"1", 0).await.unwrap();
    let second = client.put(b"/a/x", b"2", 0).await.unwrap();
    assert!(second > first);
    client.put(b"/a/y", b"3", 0).await.unwrap();
    client.put(b"/b", b"4", 0).await.unwrap();
    let (found, revision) = client.get(b"/a/x").await.unwrap();
    let found = found.unwrap();
    assert_eq!((found.value.as_slice(), found.created, found.modified, found.lease), (&b"2"[..], first, second, 0));
    assert_eq!(revision, second + 2);
    let (found, _) = client.range(b"/a/").await.unwrap();
    let keys: Vec<_> = found.iter().map(|kv| (kv.key.as_slice(), kv.value.as_slice())).collect();
    assert_eq!(keys, [(&b"/a/x"[..], &b"2"[..]), (b"/a/y", b"3")]);

    // 0 expects that the key does not exist.
    assert_eq!(client.compare_and_put(b"/a/x", 0, b"9", 0).await.unwrap().unwrap_err().unwrap().value, b"2");
    assert_eq!(client.compare_and_put(b"/c", first, b"9", 0).await.unwrap(), Err(None));
    let third = client.compare_and_put(b"/a/x", second, b"5", 0).await.unwrap().unwrap();
    let fourth = client.compare_and_put(b"/c", 0, b"6", 0).await.unwrap().unwrap();
    assert!(fourth > third);

    let puts = || ["/a/x", "/a/z"].map(|key| Put { key: key.into(), value: b"7".to_vec(), lease: 0 }).to_vec();
    let TxnOutcome::Refused(found, at) = client.txn(b"/a/x", second, puts(), b"/a/").await.unwrap() else { panic!() };
    assert_eq!((found.len(), at), (2, fourth));
    let TxnOutcome::Done(at) = client.txn(b"/a/x", third, puts(), b"/a/").await.unwrap() else { panic!() };
    let (found, _) = client.range(b"/a/").await.unwrap();
    assert_eq!(found.iter().filter(|kv| kv.modified == at).count(), 2);

    assert_eq!((client.delete(b"/b").await.unwrap(), client.delete(b"/b").await.unwrap()), (1, 0));
    assert_eq!(client.delete_all(b"/a/").await.unwrap(), 3);
    // What is too large is an answer, and the connection lives.
    let error = client.put(b"/d", &vec![0; 1_700_000], 0).await.unwrap_err();
    assert!(matches!(error, EtcdError::Other(_)) && error.to_string().contains("too large"), "{error}");
    assert_eq!(client.get(b"/d").await.unwrap().0, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_hold_their_keys() {
    let Some(cluster) = Cluster::start(1, &[]).await else { return };
    let client = cluster.client();
    // Rounded up.
    let lease = client.lease_grant(Duration::from_millis(14_100)).await.unwrap();
    let ttl = cluster.gateway("/v3/lease/timetolive", &format!(r#"{{"ID":"{lease}"}}"#), None).await;
    assert!(ttl.contains(r#""grantedTTL":"15""#), "{ttl}");
    client.put(b"/a", b"1", lease).await.unwrap();
    client.put(b"/b", b"1", lease).await.unwrap();
    assert_eq!(client.get(b"/a").await.unwrap().0.unwrap().lease, lease);
    assert!(client.lease_renew(lease).await.unwrap());
    let from = client.get(b"/a").await.unwrap().1 + 1;
    let mut watch = client.watch(b"/", from).await.unwrap();
    client.lease_revoke(lease).await.unwrap();
    // Its keys go in one revision.
    let report = timeout(PATIENCE, watch.next()).await.unwrap().unwrap();
    let gone: Vec<_> =
        report.changes.iter().flat_map(|(_, changes)| changes).map(|change| change.now.is_none()).collect();
    assert_eq!((report.changes.len(), gone), (1, vec![true, true]));
    assert!(!client.lease_renew(lease).await.unwrap());
    client.lease_revoke(lease).await.unwrap();
    let error = client.put(b"/a", b"1", lease).await.unwrap_err();
    assert!(matches!(error, EtcdError::LeaseNotFound(_)), "{error}");
    let put = Put { key: b"/a".to_vec(), value: Vec::new(), lease };
    let error = client.txn(b"/a", 0, vec![put], b"/").await.unwrap_err();
    assert!(matches!(error, EtcdError::LeaseNotFound(_)), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watches_report_changes_in_order_until_their_past_is_compacted() {
    let Some(cluster) = Cluster::start(1, &[]).await else { return };
    let client = cluster.client();
    let first = client.put(b"/w/1", b"a", 0).await.unwrap();
    for number in 0..50u8 {
        client.put(b"/w/1", &[number], 0).await.unwrap();
        client.put(b"/other", &[number], 0).await.unwrap();
    }
    client.delete(b"/w/1").await.unwrap();
    let mut watch = client.watch(b"/w/", first).await.unwrap();
    let mut seen = Vec::new();
    while seen.len() < 52 {
        let report = timeout(PATIENCE, watch.next()).await.unwrap().unwrap();
        seen.extend(report.changes);
    }
    assert!(seen.is_sorted_by(|(one, _), (other, _)| one < other));
    assert_eq!((seen[0].0, seen[51].1[0].now.as_ref()), (first, None));
    // Progress is reported on request, and it is not behind.
    let now = client.get(b"/w/1").await.unwrap().1;
    watch.ask_progress();
    let report = timeout(PATIENCE, watch.next()).await.unwrap().unwrap();
    assert!(report.changes.is_empty() && report.revision >= now, "{report:?}");

    // Values of more than what one message may hold come whole.
    let mut watch = client.watch(b"/w/", now + 1).await.unwrap();
    for _ in 0..4 {
        client.put(b"/w/large", &vec![7; 1 << 20], 0).await.unwrap();
    }
    let mut bytes = 0;
    while bytes < 4 << 20 {
        let report = timeout(PATIENCE, watch.next()).await.unwrap().unwrap();
        bytes += report
            .changes
            .iter()
            .flat_map(|(_, changes)| changes)
            .map(|change| change.now.as_ref().unwrap().value.len())
            .sum::<usize>();
    }
    assert_eq!(bytes, 4 << 20);

    let now = client.get(b"/w/1").await.unwrap().1;
    cluster.gateway("/v3/kv/compaction", &format!(r#"{{"revision":"{now}"}}"#), None).await;
    let outcome = match client.watch(b"/w/", first).await {
        Ok(mut watch) => timeout(PATIENCE, watch.next()).await.unwrap().map(|_| ()),
        Err(error) => Err(error),
    };
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains(&format!("has compacted the revisions before {now}")), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_for_one_key_ends_when_that_key_changes() {
    let Some(cluster) = Cluster::start(1, &[]).await else { return };
    let client = cluster.client();
    let (_, now) = client.get(b"/key").await.unwrap();
    let waiting = tokio::spawn({
        let client = client.clone();
        async move { client.changed(b"/key", now).await }
    });
    // Longer than a watch may be silent without being asked for a sign of life.
    let silent = client.options().patience * 3;
    client.put(b"/key2", b"1", 0).await.unwrap();
    tokio::time::sleep(silent).await;
    assert!(!waiting.is_finished());
    client.put(b"/key", b"1", 0).await.unwrap();
    timeout(PATIENCE, waiting).await.unwrap().unwrap().unwrap();
    // A change before the call counts.
    timeout(PATIENCE, client.changed(b"/key", now)).await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_look_shows_each_member() {
    let Some(mut cluster) = Cluster::start(3, &[]).await else { return };
    let client = cluster.client();
    let look = client.look().await;
    let members: Vec<_> = look.endpoints.iter().map(|(_, member)| member.clone().unwrap()).collect();
    assert_eq!(members.iter().filter(|member| member.is_leader()).count(), 1);
    assert_eq!(members.iter().map(|member| member.name.as_str()).collect::<Vec<_>>(), ["m0", "m1", "m2"]);
    assert!(
        members.iter().all(|member| member.version.starts_with("3.") && member.alarms.is_empty() && !member.is_learner)
    );
    assert!(members.iter().all(|member| member.db_size.0 > 0 && member.round_trip > Duration::ZERO));
    assert_eq!(look.members.len(), 3);
    assert!(look.members.iter().all(|member| member.client_urls.len() == 1));
    cluster.kill(1);
    let look = client.look().await;
    let error = look.endpoints[1].1.as_ref().unwrap_err();
    assert!(matches!(error, EtcdError::Unavailable(_)) && error.to_string().contains("Connection refused"), "{error}");
    assert!(look.endpoints[0].1.is_ok() && look.endpoints[2].1.is_ok() && look.members.len() == 3);
}
