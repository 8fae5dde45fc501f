//! Users, roles and tokens.

use std::time::{Duration, Instant};

use elastic_rs::etcd_client::{Client, ClientOptions, Credentials, EtcdError, Password};
use tokio::time::timeout;

use crate::cluster::{Cluster, PATIENCE};

/// Users `root` and `trainer`, each with its name as password; `trainer` may read and write below `/p/`.
pub async fn add_users(cluster: &Cluster) {
    let calls = [
        ("/v3/auth/user/add", r#"{"name":"root","password":"root"}"#),
        ("/v3/auth/role/add", r#"{"name":"root"}"#),
        ("/v3/auth/user/grant", r#"{"user":"root","role":"root"}"#),
        ("/v3/auth/user/add", r#"{"name":"trainer","password":"trainer"}"#),
        ("/v3/auth/user/add", r#"{"name":"stranger","password":"stranger"}"#),
        ("/v3/auth/role/add", r#"{"name":"training"}"#),
        // `/p/` to `/p0`, in base64.
        (
            "/v3/auth/role/grant",
            r#"{"name":"training","perm":{"permType":"READWRITE","key":"L3Av","range_end":"L3Aw"}}"#,
        ),
        ("/v3/auth/user/grant", r#"{"user":"trainer","role":"training"}"#),
        ("/v3/auth/enable", "{}"),
    ];
    for (path, body) in calls {
        cluster.gateway(path, body, None).await;
    }
}

fn with(options: ClientOptions, username: &str, password: &str) -> Client {
    let credentials = Credentials { username: username.to_owned(), password: Password::new(password) };
    Client::new(ClientOptions { credentials: Some(credentials), ..options }).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_gets_what_its_role_grants() {
    let Some(cluster) = Cluster::start(1, &[]).await else { return };
    // Also one that came before there were users.
    let earlier = with(cluster.options(), "trainer", "trainer");
    earlier.put(b"/p/key", b"0", 0).await.unwrap();
    add_users(&cluster).await;
    earlier.put(b"/p/key", b"1", 0).await.unwrap();
    let client = with(cluster.options(), "trainer", "trainer");
    let lease = client.lease_grant(Duration::from_secs(60)).await.unwrap();
    client.put(b"/p/key", b"2", lease).await.unwrap();
    assert!(client.lease_renew(lease).await.unwrap());
    assert_eq!(client.range(b"/p/").await.unwrap().0.len(), 1);
    client.watch(b"/p/", 1).await.unwrap();
    for error in [
        client.get(b"/q").await.unwrap_err(),
        client.put(b"/q", b"", 0).await.unwrap_err(),
        client.watch(b"/q", 1).await.unwrap_err(),
        with(cluster.options(), "stranger", "stranger").range(b"/p/").await.unwrap_err(),
    ] {
        assert!(matches!(error, EtcdError::Denied(_)) && error.is_final(), "{error:?}");
        assert!(error.to_string().contains("permission denied") && error.to_string().contains("user `"), "{error}");
    }
    let look = client.look().await;
    assert!(look.endpoints[0].1.is_ok(), "{look:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_password_and_none_are_reported_at_once() {
    let Some(cluster) = Cluster::start(3, &[]).await else { return };
    add_users(&cluster).await;
    let began = Instant::now();
    let error = with(cluster.options(), "trainer", "sesame").get(b"/p/key").await.unwrap_err();
    assert!(matches!(error, EtcdError::WrongPassword(_)) && error.is_final(), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("`trainer`") && text.contains("password_file") && !text.contains("sesame"), "{text}");
    let error = with(cluster.options(), "nobody", "sesame").get(b"/p/key").await.unwrap_err();
    assert!(matches!(error, EtcdError::WrongPassword(_)), "{error:?}");
    let error = cluster.client().get(b"/p/key").await.unwrap_err();
    assert!(matches!(error, EtcdError::Denied(_)) && error.to_string().contains("give `username`"), "{error:?}");
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    let look = with(cluster.options(), "trainer", "sesame").look().await;
    assert!(look.endpoints.iter().all(|(_, member)| matches!(member, Err(EtcdError::WrongPassword(_)))), "{look:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_that_has_ended_is_replaced() {
    let Some(mut cluster) = Cluster::start(3, &["--auth-token-ttl=2"]).await else { return };
    add_users(&cluster).await;
    let client = with(cluster.options(), "trainer", "trainer");
    client.put(b"/p/key", b"1", 0).await.unwrap();
    // etcd looks for ended tokens once a second.
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert!(client.get(b"/p/key").await.unwrap().0.is_some());
    tokio::time::sleep(Duration::from_secs(4)).await;
    let mut watch = client.watch(b"/p/", 1).await.unwrap();
    assert!(!timeout(PATIENCE, watch.next()).await.unwrap().unwrap().changes.is_empty());
    // At the next member too.
    for member in 0..3 {
        cluster.kill(member);
        let began = Instant::now();
        let found = client.get(b"/p/key").await;
        assert!(found.as_ref().is_ok_and(|(found, _)| found.is_some()), "{found:?} after {:?}", began.elapsed());
        cluster.launch(member);
        timeout(PATIENCE, async {
            while client
                .look()
                .await
                .endpoints
                .iter()
                .any(|(_, member)| member.as_ref().is_ok_and(|m| m.leader == 0) || member.is_err())
            {}
        })
        .await
        .unwrap();
    }
}
