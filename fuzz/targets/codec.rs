//! Fuzzes the codec. However a connection's bytes are cut, they must decode to the same requests and replies, and encode back.
#![no_main]

use bytes::{Bytes, BytesMut};
use elastic_rs::store::protocol::{Decoder, Limits, ProtoError, ReplyDecoder, ReplyShape, Request};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    // The first two bytes say how to cut, the rest is the stream.
    let Some((&[mode, step], stream)) = input.split_first_chunk() else { return };
    let limits = if mode & 1 == 0 {
        Limits::default()
    } else {
        Limits { key_bytes: 40, value_bytes: 300, list_len: 9, message_bytes: 700 }
    };
    let decoder = || if mode & 2 == 0 { Decoder::new(limits.clone()) } else { Decoder::validated(limits.clone()) };
    let pieces = stream.chunks(usize::from(step).max(1));

    let whole = requests(decoder(), std::iter::once(stream));
    let cut = requests(decoder(), pieces.clone());
    assert_eq!(whole, cut, "cuts matter");
    let mut again = BytesMut::new();
    for request in &whole.0 {
        let before = again.len();
        request.encode(&mut again);
        assert_eq!(again.len() - before, request.encoded_len());
    }
    assert!(stream.starts_with(&again), "the decoded requests encode to other bytes");
    if let Some(error) = whole.1 {
        assert!(!error.to_string().is_empty());
    }

    let shape = match mode >> 2 & 7 {
        0 => ReplyShape::Value,
        1 => ReplyShape::Integer,
        2 => ReplyShape::Check,
        3 => ReplyShape::Wait,
        4 => ReplyShape::Values(usize::from(mode >> 5)),
        5 => ReplyShape::Nonce,
        6 => ReplyShape::Popped,
        _ => ReplyShape::Keys,
    };
    reply(shape, stream, pieces);
});

/// Decode all requests up to the first error, piece by piece as a server does.
fn requests<'a>(mut decoder: Decoder, pieces: impl Iterator<Item = &'a [u8]>) -> (Vec<Request>, Option<ProtoError>) {
    let (mut buffer, mut found) = (BytesMut::new(), Vec::new());
    let mut fed = 0;
    for piece in pieces {
        buffer.extend_from_slice(piece);
        fed += piece.len();
        loop {
            match decoder.decode(&mut buffer) {
                Ok(Some(request)) => found.push(request),
                Ok(None) => break,
                Err(error) => {
                    assert_eq!(decoder.decode(&mut buffer), Err(error), "an error does not stay");
                    return (found, Some(error));
                }
            }
        }
        assert!(decoder.needed() > buffer.len(), "it waits for what is there");
        assert!(buffer.capacity() <= 64 + 2 * fed, "an announced length was reserved");
    }
    (found, None)
}

fn reply<'a>(shape: ReplyShape, stream: &[u8], pieces: impl Iterator<Item = &'a [u8]>) {
    let mut buffer = BytesMut::from(stream);
    let whole = ReplyDecoder::new(shape).decode(&mut buffer);
    let mut decoder = ReplyDecoder::new(shape);
    let mut buffer = BytesMut::new();
    let mut cut = Ok(None);
    for piece in pieces {
        buffer.extend_from_slice(piece);
        cut = decoder.decode(&mut buffer);
        if cut != Ok(None) {
            break;
        }
    }
    // Without bytes nothing is fed, and a reply of zero bytes is complete at once.
    if !stream.is_empty() {
        assert_eq!(whole, cut, "cuts matter");
    }
    if let Ok(Some(reply)) = whole {
        let mut again = BytesMut::new();
        reply.encode(&mut again);
        assert!(Bytes::copy_from_slice(stream).starts_with(&again), "the decoded reply encodes to other bytes");
    }
}
