//! Both ends of connections: ours on each side, and rustls' own stream on the other.

use tokio::io::{AsyncWriteExt, DuplexStream, duplex, split};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::secure::tls::{self, ClientStream, ServerStream};

async fn streams() -> (ClientStream<TcpStream>, ServerStream<TcpStream>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let coordinator = async {
        let (stream, _) = listener.accept().await.unwrap();
        tls::accept(tls::server_config().unwrap(), stream).await.ok().unwrap()
    };
    let node = async {
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        tls::connect(tls::client_config().unwrap(), tls::no_name(), stream).await.unwrap()
    };
    tokio::join!(node, coordinator)
}

/// The keys of both ends of one connection.
async fn keys() -> (Keys, Keys) {
    let (node, coordinator) = streams().await;
    (tls::keys_of_client(node).unwrap().1, tls::keys_of_server(coordinator).unwrap().1)
}

/// All that a reader gets, to the end.
async fn read(mut reader: impl AsyncRead + Unpin) -> io::Result<Vec<u8>> {
    let mut all = Vec::new();
    reader.read_to_end(&mut all).await.map(|_| all)
}

/// What has been written by a node in records, one for each of these texts, and the reader's key.
async fn recorded(texts: &[&[u8]]) -> (Vec<Vec<u8>>, Keys) {
    let (node, coordinator) = keys().await;
    let mut records = Vec::new();
    let (_, mut writer) = node.halves(tokio::io::empty(), &mut records).unwrap();
    let mut lengths = vec![0];
    for text in texts {
        writer.write_all(text).await.unwrap();
        lengths.push(writer.to.len());
    }
    writer.shutdown().await.unwrap();
    lengths.push(writer.to.len());
    let cut = lengths.windows(2).map(|ends| records[ends[0]..ends[1]].to_vec()).collect();
    (cut, coordinator)
}

/// What a coordinator reads of these bytes.
async fn read_of(coordinator: Keys, bytes: &[u8]) -> io::Result<Vec<u8>> {
    read(coordinator.halves(bytes, tokio::io::sink()).unwrap().0).await
}

const LONG: usize = 100_000;

fn long() -> Vec<u8> {
    (0..LONG).map(|number| (number % 251) as u8).collect()
}

#[tokio::test]
async fn an_end_with_records_and_one_with_rustls_understand_each_other() {
    let (node, mut coordinator) = streams().await;
    let (stream, keys) = tls::keys_of_client(node).unwrap();
    let (from, to) = stream.into_split();
    let (reader, mut writer) = keys.halves(from, to).unwrap();
    let node = async {
        writer.write_all(&long()).await.unwrap();
        writer.shutdown().await.unwrap();
        read(reader).await.unwrap()
    };
    let coordinator = async {
        let mut got = Vec::new();
        coordinator.read_to_end(&mut got).await.unwrap();
        coordinator.write_all(&got).await.unwrap();
        coordinator.shutdown().await.unwrap();
    };
    assert_eq!(tokio::join!(node, coordinator).0, long());
}

#[tokio::test]
async fn bytes_come_through_however_they_are_cut() {
    for room in [1, 4, 5, 6, 1000, 70_000] {
        let (node, coordinator) = keys().await;
        let ends: (DuplexStream, DuplexStream) = duplex(room);
        let ((node_from, node_to), (from, to)) = (split(ends.0), split(ends.1));
        let (node_reader, mut node_writer) = node.halves(node_from, node_to).unwrap();
        let (reader, mut writer) = coordinator.halves(from, to).unwrap();
        let node = async {
            for part in long().chunks(9_999) {
                node_writer.write_all(part).await.unwrap();
            }
            node_writer.shutdown().await.unwrap();
        };
        let coordinator = async {
            writer.write_all(b"short").await.unwrap();
            writer.shutdown().await.unwrap();
        };
        let (to_node, to_coordinator, (), ()) = tokio::join!(read(node_reader), read(reader), node, coordinator);
        assert_eq!(to_node.unwrap(), b"short", "room for {room} bytes");
        assert!(to_coordinator.unwrap() == long(), "room for {room} bytes");
    }
}

#[tokio::test]
async fn nothing_is_read_of_what_somebody_has_changed() {
    type Change = fn(&mut Vec<Vec<u8>>);
    let changes: &[(&str, Change)] = &[
        ("a byte of its text", |records| records[1][HEADER] ^= 1),
        ("a byte of its tag", |records| *records[1].last_mut().unwrap() ^= 1),
        ("its length", |records| records[1][4] -= 1),
        ("sent twice", |records| records.insert(1, records[0].clone())),
        ("left out", |records| drop(records.remove(1))),
        ("in another order", |records| records.swap(1, 2)),
        ("an alert that is not encrypted", |records| records.insert(1, vec![0x15, 3, 3, 0, 2, 1, 0])),
        ("longer than a record may be", |records| records.insert(1, vec![0x17, 3, 3, 0x41, 1])),
        ("too short for a tag", |records| records.insert(1, vec![0x17, 3, 3, 0, 0])),
    ];
    for (what, change) in changes {
        let (mut records, coordinator) = recorded(&[b"first", b"second", b"third"]).await;
        change(&mut records);
        let bytes = records.concat();
        let mut reader = coordinator.halves(&bytes[..], tokio::io::sink()).unwrap().0;
        let mut got = Vec::new();
        let error = reader.read_to_end(&mut got).await.unwrap_err();
        assert_eq!((error.kind(), got.as_slice()), (io::ErrorKind::InvalidData, &b"first"[..]), "{what}");
    }
}

#[tokio::test]
async fn an_end_without_a_last_word_is_told_from_one_with() {
    let (records, coordinator) = recorded(&[b"first", b"second"]).await;
    assert_eq!(read_of(coordinator, &records.concat()).await.unwrap(), b"firstsecond");
    for cut in [1, HEADER, 20] {
        let (records, coordinator) = recorded(&[b"first", b"second"]).await;
        let all = records.concat();
        let end = all.len() - records[2].len() - cut;
        let error = read_of(coordinator, &all[..end]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{cut} bytes are missing");
    }
    let (records, coordinator) = recorded(&[b"first", b"second"]).await;
    let error = read_of(coordinator, &records[..2].concat()).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
}

#[tokio::test]
async fn a_key_protects_only_as_many_records_as_it_may() {
    let (node, _) = keys().await;
    let (_, mut writer) = node.halves(tokio::io::empty(), tokio::io::sink()).unwrap();
    assert!((1 << 23..=1 << 24).contains(&writer.limit), "{}", writer.limit);
    writer.limit = writer.number + 2;
    writer.write_all(b"one").await.unwrap();
    writer.write_all(b"two").await.unwrap();
    let error = writer.write_all(b"three").await.unwrap_err();
    assert!(error.to_string().contains("as many as one key may protect"), "{error}");
}

#[tokio::test]
async fn a_peer_that_changes_its_key_is_refused() {
    let (mut node, coordinator) = streams().await;
    node.get_mut().1.refresh_traffic_keys().unwrap();
    node.write_all(b"with another key").await.unwrap();
    node.flush().await.unwrap();
    let (stream, keys) = tls::keys_of_server(coordinator).unwrap();
    let (from, to) = stream.into_split();
    let error = read(keys.halves(from, to).unwrap().0).await.unwrap_err();
    assert!(error.to_string().contains("of the type Handshake in a session"), "{error}");
}

#[tokio::test]
async fn room_is_kept_only_while_it_is_needed() {
    let (mut node, coordinator) = streams().await;
    let (stream, keys) = tls::keys_of_server(coordinator).unwrap();
    let (from, to) = stream.into_split();
    let mut reader = keys.halves(from, to).unwrap().0;
    node.write_all(&[7; PLAIN_LIMIT]).await.unwrap();
    node.flush().await.unwrap();
    reader.read_exact(&mut [0; PLAIN_LIMIT]).await.unwrap();
    node.write_all(&[7; 10]).await.unwrap();
    node.flush().await.unwrap();
    reader.read_exact(&mut [0; 10]).await.unwrap();
    assert!(reader.bytes.capacity() <= KEPT, "{}", reader.bytes.capacity());
}
