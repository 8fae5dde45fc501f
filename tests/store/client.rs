//! The client against our server: operations, time-outs, and the state of the connection afterwards.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use elastic_rs::net::listen;
use elastic_rs::store::client::{ClientOptions, LostCause, StoreClient, StoreError};
use elastic_rs::store::protocol::ProtoError;
use elastic_rs::store::server::{ServerOptions, StoreServer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

fn server() -> StoreServer {
    let listener = listen::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    StoreServer::start(vec![listener], ServerOptions::default()).unwrap()
}

async fn client(port: u16) -> StoreClient {
    StoreClient::connect("127.0.0.1", port, ClientOptions::default()).await.unwrap()
}

fn within(limit: Duration) -> ClientOptions {
    ClientOptions { connect_timeout: limit, timeout: Some(limit) }
}

const SHORT: Duration = Duration::from_millis(60);

#[tokio::test]
async fn every_operation_does_what_its_name_says() {
    let server = server();
    let store = client(server.port()).await;
    store.set(b"k", b"v").await.unwrap();
    assert_eq!(store.get(b"k").await.unwrap(), "v");
    store.append(b"k", b"w").await.unwrap();
    assert_eq!(store.compare_set(b"k", b"vw", b"x").await.unwrap(), "x");
    assert_eq!(store.add(b"n", -3).await.unwrap(), -3);
    assert!(store.check(&["k", "n"]).await.unwrap());
    assert!(!store.check(&["k", "none"]).await.unwrap());
    store.multi_set(&["a", "b"], &["1", "2"]).await.unwrap();
    assert_eq!(store.multi_get(&["b", "a"]).await.unwrap(), ["2", "1"]);
    assert_eq!(store.multi_get::<&str>(&[]).await.unwrap(), Vec::<&str>::new());
    assert!(store.delete_key(b"a").await.unwrap());
    assert!(!store.delete_key(b"a").await.unwrap());
    store.queue_push(b"q", b"item").await.unwrap();
    assert_eq!(store.queue_len(b"q").await.unwrap(), 1);
    assert_eq!(store.queue_pop(b"q", true).await.unwrap(), "item");
    assert_eq!(store.join_workers().await.unwrap(), 1);
    store.wait_for_workers(1, Some(SHORT)).await.unwrap();
    let mut keys = store.list_keys().await.unwrap();
    keys.sort();
    assert_eq!(keys, ["b", "k", "n"], "without init/");
    assert_eq!(store.num_keys().await.unwrap(), 4, "with init/");
    store.barrier(b"alone", 1).await.unwrap();
    store.wait(&["k"]).await.unwrap();
    let big = vec![9; 8 << 20];
    store.set(b"big", &big).await.unwrap();
    assert_eq!(store.connect_again().await.unwrap().get(b"big").await.unwrap(), big);
}

#[tokio::test]
async fn a_wait_times_out_names_its_keys_and_leaves_the_connection_usable() {
    let server = server();
    let store = client(server.port()).await;
    let error = store.wait_within(&["x", "y"], Some(SHORT)).await.unwrap_err();
    let StoreError::WaitTimeout { operation, keys, timeout, elapsed, peer } = &error else { panic!("{error}") };
    assert_eq!((*operation, *timeout, *peer), ("wait", SHORT, server.local_addr()));
    assert_eq!(keys.to_string(), "`x`, `y`");
    assert!(*elapsed >= SHORT);
    assert!(error.is_timeout() && error.is_transient() && error.leaves_connection_usable());
    store.set_timeout(Some(SHORT));
    assert!(store.get(b"x").await.unwrap_err().is_timeout());
    assert!(store.barrier(b"b", 2).await.unwrap_err().is_timeout());
    assert!(store.queue_pop(b"q", true).await.unwrap_err().is_timeout());
    let empty = store.queue_pop(b"q", false).await.unwrap_err();
    assert!(matches!(empty, StoreError::QueueEmpty { .. }), "{empty}");
    let workers = {
        store.join_workers().await.unwrap();
        store.wait_for_workers(2, Some(SHORT)).await.unwrap_err()
    };
    assert!(matches!(workers, StoreError::WorkersTimeout { joined: 1, world_size: 2, .. }), "{workers}");
    let unequal = store.multi_set(&["a"], &["1", "2"]).await.unwrap_err();
    assert!(matches!(unequal, StoreError::LengthMismatch { keys: 1, values: 2 }), "{unequal}");
    assert_eq!(server.stats().waiting, 0, "each wait was cancelled");
    store.set(b"x", b"1").await.unwrap();
    assert_eq!(store.get(b"x").await.unwrap(), "1");
}

#[tokio::test]
async fn a_wait_ends_when_another_client_sets_the_key() {
    let server = server();
    let (waiter, setter) = (client(server.port()).await, client(server.port()).await);
    waiter.set_timeout(None);
    let waiting = tokio::spawn(async move { waiter.get(b"k").await });
    while server.stats().waiting == 0 {
        tokio::task::yield_now().await;
    }
    setter.set(b"k", b"v").await.unwrap();
    assert_eq!(waiting.await.unwrap().unwrap(), "v");
}

#[tokio::test]
async fn operations_of_one_client_are_carried_out_one_after_the_other() {
    let server = server();
    let store = Arc::new(client(server.port()).await);
    let adding: Vec<_> = (0..50)
        .map(|_| {
            let store = store.clone();
            tokio::spawn(async move { store.add(b"n", 1).await.unwrap() })
        })
        .collect();
    let mut sums = Vec::new();
    for one in adding {
        sums.push(one.await.unwrap());
    }
    sums.sort_unstable();
    assert_eq!(sums, (1..=50).collect::<Vec<i64>>());
}

#[tokio::test]
async fn a_dropped_operation_leaves_the_connection_in_step() {
    let server = server();
    let store = client(server.port()).await;
    let other = client(server.port()).await;
    let big = vec![7; 8 << 20];
    store.set(b"big", &big).await.unwrap();
    // Drop each operation after one poll: a wait, a big reply, and a big request that does not fit into the socket.
    drop_after_a_poll(store.wait(&["never"])).await;
    assert_eq!(store.num_keys().await.unwrap(), 1);
    assert_eq!(server.stats().waiting, 0, "the wait was cancelled");
    drop_after_a_poll(store.get(b"big")).await;
    drop_after_a_poll(store.compare_set(b"big", b"", b"")).await;
    assert_eq!(store.add(b"n", 5).await.unwrap(), 5);
    drop_after_a_poll(store.set(b"big2", &big)).await;
    assert_eq!(store.add(b"n", 5).await.unwrap(), 10);
    assert_eq!(other.get(b"big2").await.unwrap(), big, "the next operation finished it");
    // The release of this wait arrives after the wait was dropped.
    drop_after_a_poll(store.wait(&["late"])).await;
    other.set(b"late", b"").await.unwrap();
    other.num_keys().await.unwrap();
    assert_eq!(store.add(b"n", 1).await.unwrap(), 11);
}

async fn drop_after_a_poll<T>(operation: impl Future<Output = T>) {
    tokio::select! {
        biased;
        _ = operation => {}
        () = tokio::task::yield_now() => {}
    }
}

#[tokio::test]
async fn after_the_server_has_gone_every_operation_fails_at_once_with_the_same_cause() {
    let server = server();
    let store = client(server.port()).await;
    let peer = server.local_addr();
    server.stop();
    let first = store.get(b"k").await.unwrap_err();
    let StoreError::ConnectionLost { operation: "get", peer: named, cause, .. } = &first else { panic!("{first}") };
    assert_eq!(*named, peer);
    assert!(first.to_string().contains("`k`") && !first.leaves_connection_usable());
    let second = store.set(b"k", b"v").await.unwrap_err();
    let StoreError::ConnectionLost { operation: "set", cause: again, .. } = &second else { panic!("{second}") };
    assert_eq!(again, cause);
}

#[tokio::test]
async fn a_server_that_ends_during_a_wait_ends_the_wait() {
    let server = server();
    let store = client(server.port()).await;
    let waiting = tokio::spawn(async move { store.wait(&["k"]).await });
    while server.stats().waiting == 0 {
        tokio::task::yield_now().await;
    }
    server.stop();
    let error = waiting.await.unwrap().unwrap_err();
    assert!(matches!(error, StoreError::ConnectionLost { operation: "wait", .. }), "{error}");
}

#[tokio::test]
async fn a_refused_connection_fails_in_time_and_says_how_long_it_took() {
    // A bound socket that does not listen: the port refuses connections, and no other process can take it.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let port = socket.local_addr().unwrap().port();
    let limit = Duration::from_millis(200);
    let start = Instant::now();
    let error = StoreClient::connect("127.0.0.1", port, within(limit)).await.unwrap_err();
    let StoreError::ConnectTimeout { elapsed, attempts, last, .. } = &error else { panic!("{error}") };
    assert!(*elapsed >= limit && start.elapsed() >= *elapsed);
    assert!(*attempts >= 2, "{attempts} attempts");
    assert!(last.contains("refused"), "{last}");
    assert!(error.is_transient());
    let once = StoreClient::connect("127.0.0.1", port, within(Duration::ZERO)).await.unwrap_err();
    assert!(matches!(once, StoreError::ConnectTimeout { attempts: 1, .. }), "{once}");
}

#[tokio::test]
async fn a_store_that_starts_later_is_reached() {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_reuseaddr(true).unwrap();
    socket.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let port = socket.local_addr().unwrap().port();
    let connecting = tokio::spawn(async move { client(port).await });
    // Long enough for the first attempt to be refused. If it is not, the test passes as well.
    tokio::time::sleep(Duration::from_millis(20)).await;
    let listener = socket.listen(16).unwrap().into_std().unwrap();
    let _server = StoreServer::start(vec![listener], ServerOptions::default()).unwrap();
    connecting.await.unwrap().set(b"k", b"v").await.unwrap();
}

#[tokio::test]
async fn every_address_of_a_host_is_tried() {
    // The server listens on IPv4 only. On many machines `localhost` is an IPv6 address first.
    let server = server();
    let store = StoreClient::connect("localhost", server.port(), ClientOptions::default()).await.unwrap();
    assert_eq!(store.peer_addr(), server.local_addr());
    let error = StoreClient::connect("no-such-host.invalid", 1, within(Duration::ZERO)).await.unwrap_err();
    assert!(error.to_string().contains("cannot resolve `no-such-host.invalid`"), "{error}");
}

#[tokio::test]
async fn a_listener_that_is_no_store_is_a_connect_error_in_time() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    // This listener accepts and never answers. PyTorch's client would hang.
    let error = StoreClient::connect("127.0.0.1", port, within(SHORT)).await.unwrap_err();
    assert!(matches!(error, StoreError::ConnectTimeout { .. }), "{error}");
    assert!(error.to_string().contains("no answer"), "{error}");
}

#[tokio::test]
async fn unsolicited_bytes_end_the_connection() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let fake = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut hello = [0; 10];
        stream.read_exact(&mut hello).await.unwrap();
        stream.write_all(&hello[6..]).await.unwrap();
        let mut get_num_keys = [0];
        stream.read_exact(&mut get_num_keys).await.unwrap();
        // One byte too many.
        stream.write_all(&[1, 0, 0, 0, 0, 0, 0, 0, 0]).await.unwrap();
        stream.read(&mut get_num_keys).await
    });
    let store = client(port).await;
    assert_eq!(store.num_keys().await.unwrap(), 1);
    for operation in 1..3 {
        let error = store.num_keys().await.unwrap_err();
        let StoreError::Protocol { what, .. } = &error else { panic!("{operation}: {error}") };
        assert_eq!(*what, ProtoError::Unsolicited);
        assert!(!error.is_transient());
    }
    assert_eq!(fake.await.unwrap().unwrap(), 0, "closed by the client");
}

#[test]
fn errors_can_be_sent_between_threads() {
    fn assert_travels<T: Send + Sync + Clone + 'static>() {}
    fn assert_shared<T: Send + Sync>() {}
    assert_travels::<StoreError>();
    assert_travels::<LostCause>();
    assert_shared::<StoreClient>();
    assert_shared::<StoreServer>();
}
