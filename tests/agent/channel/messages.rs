//! The messages as bytes: what is written is read again, and nothing that arrives panics or reserves memory.

use bytes::{BufMut, BytesMut};
use elastic_rs::channel::message::{HeldState, MessageError, ToAgent, ToWorker, World};
use elastic_rs::rendezvous::messages::codec::{CodecError, FRAME_LIMIT_BYTES, decode_frame, encode_frame};
use elastic_rs::rendezvous::messages::message::{Generation, Round};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use super::world;

fn bytes(message: ToWorker) -> BytesMut {
    let mut out = BytesMut::new();
    message.encode(&mut out).unwrap();
    out
}

fn generation() -> impl Strategy<Value = Generation> {
    any::<(u64, u64)>().prop_map(|(round, world)| Generation { round: Round(round), world })
}

fn any_to_worker() -> impl Strategy<Value = ToWorker> {
    // Reasons of one line, as they arrive.
    let reason = || "[a-z]{0,20}";
    let variable = ("[A-Z_]{1,12}", "[ -~]{0,20}");
    let world = (vec(variable, 0..20), generation(), any::<u32>(), any::<(bool, bool)>(), reason()).prop_map(
        |(variables, generation, source, (sync, equal), reason)| {
            ToWorker::World(Box::new(World { variables, generation, source, sync, equal, reason }))
        },
    );
    prop_oneof![
        world,
        (any::<u64>(), any::<u8>(), reason()).prop_map(|(seq, flags, reason)| ToWorker::Change { seq, flags, reason }),
        (any::<u64>(), any::<u64>()).prop_map(|(seq, check)| ToWorker::RaiseAt { seq, check }),
        (reason(), any::<Option<u32>>()).prop_map(|(reason, rank)| ToWorker::PeerFailed { reason, rank }),
        reason().prop_map(|reason| ToWorker::Refused { reason }),
    ]
}

fn any_to_agent() -> impl Strategy<Value = ToAgent> {
    prop_oneof![
        any::<u16>().prop_map(|version| ToAgent::Hello { version }),
        (any::<u64>(), any::<u64>()).prop_map(|(seq, count)| ToAgent::Ack { seq, count }),
        (option::of(generation()), any::<Option<u64>>())
            .prop_map(|(generation, commit)| ToAgent::Parked(HeldState { generation, commit })),
    ]
}

/// All messages of a stream, up to the first error.
fn read<M, E>(pieces: &[&[u8]], decode: impl Fn(&mut BytesMut) -> Result<Option<M>, E>) -> (Vec<M>, Option<E>) {
    let (mut buffer, mut found, mut fed) = (BytesMut::new(), Vec::new(), 0);
    for piece in pieces {
        buffer.extend_from_slice(piece);
        fed += piece.len();
        loop {
            match decode(&mut buffer) {
                Ok(Some(message)) => found.push(message),
                Ok(None) => break,
                Err(error) => return (found, Some(error)),
            }
        }
        assert!(buffer.capacity() <= 64 + 2 * fed, "an announced length was reserved");
    }
    (found, None)
}

proptest! {
    #[test]
    fn any_cut_of_a_stream_gives_the_same_messages(sent in vec(any_to_worker(), 0..5), cut in any::<prop::sample::Index>()) {
        let mut stream = BytesMut::new();
        sent.iter().for_each(|message| message.clone().encode(&mut stream).unwrap());
        let (one, other) = stream.split_at(cut.index(stream.len() + 1));
        prop_assert_eq!(read(&[one, other], ToWorker::decode), (sent, None));
    }

    #[test]
    fn what_a_worker_says_comes_back(sent in vec(any_to_agent(), 0..5)) {
        let mut stream = BytesMut::new();
        sent.iter().for_each(|message| encode_frame(message, &mut stream));
        prop_assert_eq!(read(&[&stream], decode_frame::<ToAgent>), (sent, None));
    }

    #[test]
    fn bytes_never_panic(stream in vec(any::<u8>(), 0..300), step in 1..40_usize) {
        let pieces: Vec<&[u8]> = stream.chunks(step).collect();
        read(&pieces, ToWorker::decode);
        read(&pieces, decode_frame::<ToAgent>);
    }

    #[test]
    fn damaged_messages_never_panic(message in any_to_worker(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut stream = bytes(message);
        let at = at.index(stream.len());
        stream[at] = byte;
        read(&[&stream], ToWorker::decode);
    }

    #[test]
    fn bodies_of_the_right_length_never_panic(body in vec(any::<u8>(), 0..100)) {
        let mut stream = BytesMut::new();
        stream.put_u32_le(body.len() as u32);
        stream.put_slice(&body);
        read(&[&stream], ToWorker::decode);
        read(&[&stream], decode_frame::<ToAgent>);
    }
}

#[test]
fn reasons_become_one_line_of_bounded_length() {
    let reason = format!("two\nlines\x1b[2J{}", "x".repeat(2 * FRAME_LIMIT_BYTES));
    let sent = ToWorker::PeerFailed { reason, rank: None };
    let Ok(Some(ToWorker::PeerFailed { reason, .. })) = ToWorker::decode(&mut bytes(sent)) else {
        panic!("not the message that was sent");
    };
    assert!(reason.starts_with("two lines [2Jxxx") && reason.len() <= 4096, "{} bytes", reason.len());
}

#[test]
fn a_world_that_is_too_long_is_not_written() {
    let variables = vec![("A".to_owned(), "x".repeat(FRAME_LIMIT_BYTES))];
    let mut out = BytesMut::from(&b"before"[..]);
    let error = ToWorker::World(Box::new(World { variables, ..world(1) })).encode(&mut out).unwrap_err();
    assert!(matches!(error, CodecError::TooLong { limit: FRAME_LIMIT_BYTES, .. }), "{error}");
    assert_eq!(out, b"before"[..]);
}

#[test]
fn a_variable_that_no_environment_can_have_is_refused() {
    for (name, value) in [("", "x"), ("A=B", "x"), ("A\0", "x"), ("A", "x\0y")] {
        let variables = vec![("OK".to_owned(), "=".to_owned()), (name.to_owned(), value.to_owned())];
        let error =
            ToWorker::decode(&mut bytes(ToWorker::World(Box::new(World { variables, ..world(1) })))).unwrap_err();
        assert!(matches!(error, MessageError::Variable(_)), "{error}");
    }
}

#[test]
fn hello_and_refused_have_the_same_bytes_in_every_version() {
    let mut hello = BytesMut::new();
    encode_frame(&ToAgent::Hello { version: 1 }, &mut hello);
    assert_eq!(hello, b"\x02\0\0\0\0\x01"[..]);
    assert_eq!(bytes(ToWorker::Refused { reason: "no".to_owned() }), b"\x04\0\0\0\0\x02no"[..]);
}
