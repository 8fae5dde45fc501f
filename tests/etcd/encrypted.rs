//! TLS, certificates of clients, and the wrong scheme.

use std::time::{Duration, Instant};

use elastic_rs::etcd_client::{Client, ClientOptions, EtcdError, TlsFiles};

use crate::cluster::{Cluster, Tls, certificate};
use crate::users::add_users;

/// Call etcd, which must fail at once.
async fn error_of(options: ClientOptions) -> EtcdError {
    let began = Instant::now();
    let error = Client::new(options).unwrap().get(b"/p/key").await.unwrap_err();
    // On an idle machine it takes milliseconds, or 1 s if the members do not answer.
    assert!(began.elapsed() < Duration::from_secs(10), "after {:?}: {error}", began.elapsed());
    assert!(error.is_final(), "{error:?}");
    error
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_with_certificates() {
    let Some(mut cluster) = Cluster::start(3, &[]).await else { return };
    // A client that speaks TLS, and members that do not.
    let mut options = cluster.options();
    options.endpoints.tls = true;
    options.tls.ca = Some(certificate("ca.pem"));
    let error = error_of(options).await;
    assert!(
        matches!(error, EtcdError::WrongScheme(_)) && error.to_string().contains("set `protocol=http`"),
        "{error:?}"
    );

    cluster.restart(Tls::Server).await;
    cluster.until_served().await;
    let client = cluster.client();
    client.put(b"/p/key", b"1", 0).await.unwrap();
    let mut watch = client.watch(b"/p/", 1).await.unwrap();
    assert_eq!(watch.next().await.unwrap().changes.len(), 1);

    // The other way round.
    let mut options = cluster.options();
    (options.endpoints.tls, options.tls) = (false, TlsFiles::default());
    let error = error_of(options).await;
    assert!(
        matches!(error, EtcdError::WrongScheme(_)) && error.to_string().contains("set `protocol=https`"),
        "{error:?}"
    );

    // An authority that did not sign the members' certificates.
    let mut options = cluster.options();
    options.tls.ca = Some(certificate("other-ca.pem"));
    let error = error_of(options).await;
    assert!(matches!(error, EtcdError::Tls(_)) && error.to_string().contains("`cacert`"), "{error:?}");

    // A name that is not in them. Every address of 127.0.0.0/8 is this machine, but the members listen at one.
    let mut options = cluster.options();
    options.endpoints.members.iter_mut().for_each(|(host, _)| *host = "localhost.localdomain".to_owned());
    if tokio::net::lookup_host("localhost.localdomain:1").await.is_ok() {
        let error = error_of(options).await;
        assert!(
            matches!(error, EtcdError::Tls(_)) && error.to_string().contains("as its certificate does"),
            "{error:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_is_a_user() {
    let Some(mut cluster) = Cluster::start(3, &[]).await else { return };
    add_users(&cluster).await;
    cluster.restart(Tls::Mutual).await;
    // `trainer` is the name in the certificate, and may read and write below `/p/`.
    cluster.until_served().await;
    let client = cluster.client();
    client.put(b"/p/key", b"1", 0).await.unwrap();
    let error = client.put(b"/q", b"1", 0).await.unwrap_err();
    assert!(matches!(error, EtcdError::Denied(_)), "{error:?}");

    let mut options = cluster.options();
    (options.tls.cert, options.tls.key) = (Some(certificate("stranger.pem")), Some(certificate("stranger.key")));
    let error = error_of(options).await;
    assert!(matches!(error, EtcdError::Denied(_)), "{error:?}");

    let mut options = cluster.options();
    (options.tls.cert, options.tls.key) = (None, None);
    let error = error_of(options).await;
    assert!(matches!(error, EtcdError::Tls(_)) && error.to_string().contains("`cert` and `key`"), "{error:?}");
}
