//! Both ends of connections: ours on each side, and rustls' own stream on the other.

use std::io::Write as _;
use std::sync::Arc;
use std::task::Waker;

use bytes::BytesMut;
use tokio::io::{AsyncWriteExt, DuplexStream, duplex, split};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::crypto::CryptoProvider;
use tokio_rustls::rustls::crypto::ring::default_provider;

use super::*;
use crate::secure::claim::Claim;
use crate::secure::door::Door;
use crate::secure::refusals::{Kind, Refusal};
use crate::secure::tls::{self, ClientStream, ServerStream};
use crate::secure::token::Token;
use crate::secure::{Halves, Protection, Writer, proof};

async fn streams() -> (ClientStream<TcpStream>, ServerStream<TcpStream>) {
    streams_by(tls::client_config().unwrap()).await
}

async fn streams_by(config: Arc<ClientConfig>) -> (ClientStream<TcpStream>, ServerStream<TcpStream>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let coordinator = async {
        let (stream, _) = listener.accept().await.unwrap();
        tls::accept(tls::server_config().unwrap(), stream).await.ok().unwrap()
    };
    let node = async {
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        tls::connect(config, tls::no_name(), stream).await.unwrap()
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

/// The bytes of a node's records, one record for each of these texts and one for its last word; and the keys of the coordinator, which
/// reads them.
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

fn token() -> Token {
    Token::parse(&"a".repeat(64)).unwrap()
}

/// What a node of ours and a coordinator make of their connection, if this is what they do with it.
async fn met<N, C>(
    node: impl AsyncFnOnce(TcpStream) -> N,
    coordinator: impl AsyncFnOnce(Door, TcpStream) -> C,
) -> (N, C) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let door = Door::new(Protection::by_token(token()).unwrap().into()).unwrap();
    let node = async { node(TcpStream::connect(listener.local_addr().unwrap()).await.unwrap()).await };
    let coordinator = async { coordinator(door, listener.accept().await.unwrap().0).await };
    tokio::join!(node, coordinator)
}

/// A node's end in records.
async fn in_records(stream: TcpStream) -> Halves {
    Protection::by_token(token()).unwrap().begin(stream, "host", "run").await.unwrap()
}

/// A node's end with rustls' stream, whose key has changed before the proof if that is asked for.
async fn with_rustls(stream: TcpStream, change: bool) -> ClientStream<TcpStream> {
    let mut stream = tls::connect(tls::client_config().unwrap(), tls::no_name(), stream).await.unwrap();
    if change {
        stream.get_mut().1.refresh_traffic_keys().unwrap();
    }
    let secret = tls::secret_of_client(&stream).unwrap();
    proof::prove(&mut stream, Some(&token()), "run", &secret).await.unwrap();
    stream
}

async fn admitted(door: Door, stream: TcpStream) -> Result<Halves, Refusal> {
    door.admit(stream, BytesMut::new()).await.map(|(proven, _)| proven.halves().unwrap())
}

async fn talk(one: Halves, other: Halves) {
    async fn send(mut writer: Writer) {
        writer.write_all(&long()).await.unwrap();
        writer.shutdown().await.unwrap();
    }
    let (to_one, to_other, (), ()) =
        tokio::join!(read(one.reader), read(other.reader), send(one.writer), send(other.writer));
    assert!(to_one.unwrap() == long() && to_other.unwrap() == long());
}

/// The proofs were records of the same keys, so the numbers go on behind them: both ends in records could agree on wrong ones.
#[tokio::test]
async fn after_the_proofs_records_go_on_where_rustls_has_ended() {
    let tunnel = async |door: Door, stream| door.admit_to_tunnel(stream).await.unwrap().0;
    let (node, coordinator) = met(in_records, tunnel).await;
    talk(node, coordinator).await;
    for change in [false, true] {
        let node = async |stream| Halves::of(with_rustls(stream, change).await);
        let (node, coordinator) = met(node, admitted).await;
        talk(node, coordinator.unwrap()).await;
    }
    let (node, coordinator) = met(in_records, admitted).await;
    talk(node, coordinator.unwrap()).await;
}

/// A node that does not wait for the answer to its proof. With a run id of 21 bytes the proof fills what the coordinator reads at once,
/// so that the rest stays with rustls.
#[tokio::test]
async fn nothing_of_a_hasty_peer_is_lost_unseen() {
    for run_id in ["run", "a-run-id-of-20-bytes", "a-run-id-of-21-bytes!"] {
        let hasty = async |stream| {
            let mut stream = tls::connect(tls::client_config().unwrap(), tls::no_name(), stream).await.unwrap();
            let secret = tls::secret_of_client(&stream).unwrap();
            let claim = Claim { key: Some(token().id().0), run_id: run_id.to_owned() }.encode().unwrap();
            let mac = token().mac(&[b"c", &secret, &claim]);
            let said = [&claim[..], mac.as_ref()].concat();
            let mut writer = stream.get_mut().1.writer();
            writer.write_all(&said).unwrap();
            writer.write_all(b"more").unwrap();
            stream.flush().await.unwrap();
            let _ = stream.read(&mut [0; 1024]).await;
        };
        let ((), coordinator) = met(hasty, admitted).await;
        let refusal = coordinator.unwrap_err();
        assert!(refusal.why.contains("follow"), "{run_id}: {refusal:?}");
        assert!(matches!(refusal.kind, Kind::Unproven | Kind::NoTls), "{refusal:?}");
    }
}

#[tokio::test]
async fn an_end_with_records_and_one_with_rustls_understand_each_other() {
    for suite in default_provider().cipher_suites.into_iter().filter(|suite| suite.tls13().is_some()) {
        let only = CryptoProvider { cipher_suites: vec![suite], ..default_provider() };
        let (node, mut coordinator) = streams_by(tls::client_config_by(only).unwrap()).await;
        assert_eq!(coordinator.get_ref().1.negotiated_cipher_suite(), Some(suite));
        let (stream, keys) = tls::keys_of_client(node).unwrap();
        let (from, to) = stream.into_split();
        let (reader, mut writer) = keys.halves(from, to).unwrap();
        let node = async {
            // More than 256 records, so that their numbers need two bytes.
            for number in 0..300_u16 {
                writer.write_all(&number.to_be_bytes()).await.unwrap();
            }
            writer.write_all(&long()).await.unwrap();
            writer.shutdown().await.unwrap();
            read(reader).await.unwrap()
        };
        let coordinator = async {
            let mut got = Vec::new();
            coordinator.read_to_end(&mut got).await.unwrap();
            for part in got.chunks(301) {
                coordinator.write_all(part).await.unwrap();
            }
            coordinator.shutdown().await.unwrap();
        };
        let begin: Vec<u8> = (0..300_u16).flat_map(u16::to_be_bytes).collect();
        assert!(tokio::join!(node, coordinator).0 == [begin, long()].concat(), "{suite:?}");
    }
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

/// The room is smaller than a record, as large as one, or has room for both.
#[tokio::test]
async fn a_text_comes_behind_what_the_callers_buffer_has() {
    for room in [1, 2, 6, 25, 26, 27, 28, 60, 1000] {
        let (records, coordinator) = recorded(&[b"first", b"second"]).await;
        let bytes = records.concat();
        let mut reader = coordinator.halves(&bytes[..], tokio::io::sink()).unwrap().0;
        assert_eq!(reader.read(&mut []).await.unwrap(), 0, "there is no room, and no end");
        let mut memory = vec![0; 6 + room];
        let mut got = Vec::new();
        loop {
            let mut buf = ReadBuf::new(&mut memory);
            buf.put_slice(b"before");
            std::future::poll_fn(|cx| Pin::new(&mut reader).poll_read(cx, &mut buf)).await.unwrap();
            let text = buf.filled().strip_prefix(b"before").unwrap();
            if text.is_empty() {
                break;
            }
            got.extend_from_slice(text);
        }
        assert_eq!(got, b"firstsecond", "room for {room} bytes");
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
async fn after_something_odd_nothing_more_is_read() {
    let (node, coordinator) = keys().await;
    let mut bytes = Vec::new();
    let (_, mut writer) = node.halves(tokio::io::empty(), &mut bytes).unwrap();
    for (typ, text) in [(ContentType::Handshake, &[4, 0, 0, 0][..]), (ContentType::ApplicationData, b"later")] {
        writer.put(typ, text).unwrap();
        writer.flush().await.unwrap();
    }
    let mut reader = coordinator.halves(&bytes[..], tokio::io::sink()).unwrap().0;
    for why in ["of the type Handshake in a session", "before was refused", "before was refused"] {
        let error = reader.read(&mut [0; 100]).await.unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
    }
}

/// Takes a part of what it gets, and is not ready at every other call.
#[derive(Default)]
struct Slow {
    taken: Vec<u8>,
    calls: usize,
    fails_at: Option<usize>,
}

impl Slow {
    fn ready(&mut self) -> Poll<io::Result<usize>> {
        self.calls += 1;
        if Some(self.calls) == self.fails_at {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        if self.calls % 2 == 1 { Poll::Pending } else { Poll::Ready(Ok(self.calls * 7919 % 4000 + 1)) }
    }
}

impl AsyncWrite for Slow {
    fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let count = ready!(self.ready())?.min(buf.len());
        self.taken.extend_from_slice(&buf[..count]);
        Poll::Ready(Ok(count))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.ready().map_ok(drop)
    }
}

/// Every call may be the last one before others, as when a future is dropped.
#[tokio::test]
async fn what_a_writer_takes_goes_out_once_whatever_is_called_next() {
    let (node, coordinator) = keys().await;
    let mut slow = Slow::default();
    let (_, mut writer) = node.halves(tokio::io::empty(), &mut slow).unwrap();
    let mut cx = Context::from_waker(Waker::noop());
    let mut written = Vec::new();
    for turn in 0..400_usize {
        let text = vec![turn as u8; turn * 997 % 40_000];
        match turn % 3 {
            0 => drop(Pin::new(&mut writer).poll_flush(&mut cx)),
            _ => {
                if let Poll::Ready(taken) = Pin::new(&mut writer).poll_write(&mut cx, &text) {
                    written.extend_from_slice(&text[..taken.unwrap()]);
                }
            }
        }
    }
    let flushed = (0..1000).find(|_| Pin::new(&mut writer).poll_flush(&mut cx).is_ready());
    assert!(flushed.is_some() && writer.bytes.is_empty(), "a flush sends all");
    let ended = (0..1000).find(|_| Pin::new(&mut writer).poll_shutdown(&mut cx).is_ready());
    assert!(ended.is_some(), "the last word is said once");
    assert!(matches!(Pin::new(&mut writer).poll_write(&mut cx, b"more"), Poll::Ready(Err(_))));
    assert!(read_of(coordinator, &slow.taken).await.unwrap() == written);
}

#[tokio::test]
async fn a_connection_that_fails_under_a_write_is_told() {
    let (node, _) = keys().await;
    let slow = Slow { fails_at: Some(1), ..Slow::default() };
    let (_, mut writer) = node.halves(tokio::io::empty(), slow).unwrap();
    let error = writer.write(b"text").await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
}

/// Our own ends send no padding, but a peer may.
#[tokio::test]
async fn zeros_behind_a_records_type_are_taken_off() {
    let full = [vec![7; PLAIN_LIMIT], vec![0x17]].concat();
    for (inner, got) in [
        (&b"first\x17"[..], Ok(&b"first"[..])),
        (b"first\x17\0\0\0", Ok(b"first")),
        (b"first\0\x17\0", Ok(b"first\0")),
        (&full[..PLAIN_LIMIT], Err("of the type ContentType(0x7)")),
        (b"\x01\x00\x15\0\0", Err("ended")),
        (b"\x02\x00\x15\0\0", Err("of the type Alert")),
        (b"\0\0\0", Err("without a type")),
        (b"", Err("without a type")),
        (&full, Err("a record has 16386 bytes of text and type")),
    ] {
        let (node, coordinator) = keys().await;
        let mut bytes = Vec::new();
        let (_, mut writer) = node.halves(tokio::io::empty(), &mut bytes).unwrap();
        // `put` appends a type. With the type 0 that is one more zero of padding.
        writer.put(ContentType::from(0), inner).unwrap();
        writer.flush().await.unwrap();
        let mut reader = coordinator.halves(&bytes[..], tokio::io::sink()).unwrap().0;
        let mut text = [0; 100];
        match (reader.read(&mut text).await, got) {
            (Ok(0), got) => assert_eq!(got, Err("ended")),
            (Ok(count), got) => assert_eq!(Ok(&text[..count]), got),
            (Err(error), got) => {
                assert!(got.is_err_and(|why| error.to_string().contains(why)), "{error}, expected {got:?}");
            }
        }
    }
}

#[tokio::test]
async fn an_empty_record_is_no_end() {
    let (node, coordinator) = keys().await;
    let mut bytes = Vec::new();
    let (_, mut writer) = node.halves(tokio::io::empty(), &mut bytes).unwrap();
    for text in [&b""[..], b"first", b"", b"", b"second", b""] {
        writer.put(ContentType::ApplicationData, text).unwrap();
        writer.flush().await.unwrap();
    }
    writer.shutdown().await.unwrap();
    assert_eq!(read_of(coordinator, &bytes).await.unwrap(), b"firstsecond");
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
    writer.limit = writer.cipher.number + 2;
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
    assert!(reader.bytes.capacity() <= 2 * (HEADER + BODY_LIMIT + ROOM), "{}", reader.bytes.capacity());
    node.write_all(&[7; 10]).await.unwrap();
    node.flush().await.unwrap();
    assert_eq!(reader.read(&mut [0; 100]).await.unwrap(), 10);
    assert_eq!(reader.bytes.capacity(), 0);
}
