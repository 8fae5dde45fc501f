//! Servers that are no etcd. They need none to be tested.

use std::time::{Duration, Instant};

use elastic_rs::etcd_client::{Client, ClientOptions, Endpoints, EtcdError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

/// Serve these bytes on each connection, after the first that come in, and call the server as if it were etcd.
async fn answered_with(bytes: Vec<u8>, tls: bool) -> EtcdError {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let serving = tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let bytes = bytes.clone();
            tokio::spawn(async move {
                let _ = stream.read(&mut [0; 1024]).await;
                let _ = stream.write_all(&bytes).await;
                let _ = stream.read_to_end(&mut Vec::new()).await;
            });
        }
    });
    let endpoints = Endpoints { tls, members: vec![("127.0.0.1".to_owned(), port)] };
    let mut options = ClientOptions::new(endpoints);
    options.patience = Duration::from_millis(500);
    options.tls.ca = tls.then(|| crate::cluster::certificate("ca.pem"));
    let began = Instant::now();
    let error = Client::new(options).unwrap().get(b"key").await.unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    assert!(error.to_string().contains(&format!("127.0.0.1:{port}")), "{error}");
    serving.abort();
    error
}

/// A frame of HTTP/2.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_no_etcd_is_an_error() {
    for bytes in [
        b"HTTP/1.1 404 Not Found\r\n\r\n".to_vec(),
        b"-ERR unknown command\r\n".to_vec(),
        vec![0xff; 100_000],
        // HTTP/2, and then silence, or frames that make no sense.
        frame(4, 0, 0, &[]),
        [frame(4, 0, 0, &[]), frame(0, 0, 1, b"data")].concat(),
        [frame(4, 0, 0, &[]), frame(1, 4, 1, &[0xff; 40])].concat(),
        // 200, `application/grpc`, and a message of 4 GiB less one byte.
        [
            frame(4, 0, 0, &[]),
            frame(1, 4, 1, b"\x88\x5f\x10application/grpc"),
            frame(0, 0, 1, &[0, 255, 255, 255, 255]),
        ]
        .concat(),
        // The same with a message that is none of etcd's.
        [
            frame(4, 0, 0, &[]),
            frame(1, 4, 1, b"\x88\x5f\x10application/grpc"),
            frame(0, 1, 1, &[0, 0, 0, 0, 3, 255, 255, 255]),
        ]
        .concat(),
    ] {
        let error = answered_with(bytes.clone(), false).await;
        assert!(!error.is_final(), "{bytes:?}: {error:?}");
    }
    for bytes in [b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(), vec![0x16; 1000], Vec::new()] {
        let error = answered_with(bytes.clone(), true).await;
        assert!(!error.is_final(), "{bytes:?}: {error:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_that_are_not_there_are_all_named() {
    let endpoints =
        elastic_rs::etcd_client::parse_endpoints("127.0.0.1:1,127.0.0.2:1,no-such-host.invalid", None).unwrap();
    let error = Client::new(ClientOptions::new(endpoints)).unwrap().get(b"key").await.unwrap_err();
    assert!(matches!(error, EtcdError::Unavailable(_)), "{error:?}");
    let text = error.to_string();
    assert!(
        text.matches("Connection refused").count() == 2 && text.contains("cannot resolve `no-such-host.invalid`"),
        "{text}"
    );
}
