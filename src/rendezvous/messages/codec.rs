//! Frames of the session protocol: `u32` little-endian length, then that many bytes of postcard.

use bytes::{Buf, BufMut, BytesMut};
use serde::{Serialize, de::DeserializeOwned};

use super::message::{CoordinatorMessage, MAGIC, PROTOCOL_VERSION};

/// Longest frame either side accepts. The longest legitimate one is a few KiB of text.
pub const FRAME_LIMIT_BYTES: usize = 64 * 1024;

/// Why bytes are not a session's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// The connection does not open with [`MAGIC`].
    #[error("not a connection of an elastic_rs node: its first bytes are `{0}`; ignore a port scan or a health check")]
    Foreign(String),
    /// The other end speaks another version.
    #[error(
        "rendezvous protocol version {theirs} is not spoken here, only version {ours}: install one release of elastic_rs on every node"
    )]
    Version {
        /// The peer's version.
        theirs: u16,
        /// [`PROTOCOL_VERSION`].
        ours: u16,
    },
    /// A frame has, or announces, more than [`FRAME_LIMIT_BYTES`].
    #[error("frame of {announced} bytes announced, at most {limit} are allowed")]
    TooLong {
        /// The announced length.
        announced: usize,
        /// [`FRAME_LIMIT_BYTES`].
        limit: usize,
    },
    /// The bytes are the answer of an HTTP server.
    #[error("an HTTP server answers there; the endpoint must be the rendezvous port of a node (29400 by default)")]
    Http,
    /// A frame's bytes are not a message.
    #[error("frame of {0} bytes is not a message of this protocol")]
    Malformed(usize),
    /// A message has no bytes.
    #[error("the message cannot be serialised: {0}")]
    Unserialisable(String),
}

/// Append the bytes that open a session.
pub fn encode_preamble(out: &mut BytesMut) {
    out.put_slice(MAGIC);
    out.put_u16_le(PROTOCOL_VERSION);
}

/// Take the bytes that open a session; `Ok(false)` until all have arrived.
///
/// # Errors
/// [`CodecError::Foreign`], [`CodecError::Version`].
pub fn decode_preamble(buffer: &mut BytesMut) -> Result<bool, CodecError> {
    let seen = buffer.len().min(MAGIC.len());
    if buffer[..seen] != MAGIC[..seen] {
        return Err(CodecError::Foreign(buffer[..seen].escape_ascii().to_string()));
    }
    if buffer.len() < MAGIC.len() + 2 {
        return Ok(false);
    }
    buffer.advance(MAGIC.len());
    let theirs = buffer.get_u16_le();
    if theirs != PROTOCOL_VERSION {
        return Err(CodecError::Version { theirs, ours: PROTOCOL_VERSION });
    }
    Ok(true)
}

/// Append the bytes that ask a coordinator for its version: a preamble of version 0, which every coordinator refuses. No session
/// begins.
pub fn encode_version_question(out: &mut BytesMut) {
    out.put_slice(MAGIC);
    out.put_u16_le(0);
}

/// The version that a coordinator names when it refuses version 0; `None` for all other bytes.
pub fn decode_version_answer(answer: &[u8]) -> Option<u16> {
    let Ok(Some(CoordinatorMessage::Rejected { reason })) = decode_frame(&mut BytesMut::from(answer)) else {
        return None;
    };
    // A coordinator of another version may give other advice behind it.
    let refusal = CodecError::Version { theirs: 0, ours: 0 }.to_string();
    let (_, version) = reason.split_once(refusal.split_inclusive("only version ").next()?)?;
    let digits = version.find(|it: char| !it.is_ascii_digit()).unwrap_or(version.len());
    version[..digits].parse().ok()
}

/// How a coordinator that is protected begins its answer to everybody who does not speak TLS.
const PROTECTED: &str = "it is protected by";

/// The answer of a coordinator that is protected to a peer that does not speak TLS. `wanted` says by what, and where to name it.
pub fn encode_protected(wanted: &str, out: &mut BytesMut) {
    // Without an answer the connection is closed all the same.
    let _ = try_encode_frame(&CoordinatorMessage::Rejected { reason: format!("{PROTECTED} {wanted}") }, out);
}

/// Whether this is the answer of a coordinator that is protected.
pub fn is_protected_answer(answer: &[u8]) -> bool {
    let message = decode_frame(&mut BytesMut::from(answer));
    matches!(message, Ok(Some(CoordinatorMessage::Rejected { reason })) if reason.starts_with(PROTECTED))
}

/// Append `message` as one frame, in tests and simulations: a panic would end all sessions of a coordinator.
///
/// # Panics
/// As [`try_encode_frame`] fails.
#[cfg(any(test, feature = "sim"))]
pub fn encode_frame<M: Serialize>(message: &M, out: &mut BytesMut) {
    if let Err(error) = try_encode_frame(message, out) {
        panic!("a message was built that cannot be sent: {error}");
    }
}

/// Append `message` as one frame. Code that builds messages keeps their texts short. If it has missed a bound, that costs the message or
/// its connection.
///
/// # Errors
/// [`CodecError::TooLong`], [`CodecError::Unserialisable`]; `out` is then as it was.
pub fn try_encode_frame<M: Serialize>(message: &M, out: &mut BytesMut) -> Result<(), CodecError> {
    let body = postcard::to_stdvec(message).map_err(|error| CodecError::Unserialisable(error.to_string()))?;
    if body.len() > FRAME_LIMIT_BYTES {
        return Err(CodecError::TooLong { announced: body.len(), limit: FRAME_LIMIT_BYTES });
    }
    out.reserve(4 + body.len());
    out.put_u32_le(body.len() as u32);
    out.put_slice(&body);
    Ok(())
}

/// Take one frame from `buffer`; `Ok(None)` until a whole one has arrived.
///
/// # Errors
/// [`CodecError::TooLong`] as soon as the length is known, [`CodecError::Malformed`], [`CodecError::Http`].
pub fn decode_frame<M: DeserializeOwned>(buffer: &mut BytesMut) -> Result<Option<M>, CodecError> {
    let Some(length) = buffer.first_chunk::<4>() else {
        return Ok(None);
    };
    // A request that is none is answered with a status line, or, by some servers, with a page alone.
    if [&b"HTTP"[..], b"<!DO", b"<!do", b"<htm", b"<HTM"].contains(&&length[..]) {
        return Err(CodecError::Http);
    }
    let length = u32::from_le_bytes(*length) as usize;
    if length > FRAME_LIMIT_BYTES {
        return Err(CodecError::TooLong { announced: length, limit: FRAME_LIMIT_BYTES });
    }
    let Some(body) = buffer.get(4..4 + length) else {
        return Ok(None);
    };
    let Ok((message, [])) = postcard::take_from_bytes(body) else {
        return Err(CodecError::Malformed(length));
    };
    buffer.advance(4 + length);
    Ok(Some(message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::messages::message::NodeMessage;

    #[test]
    fn a_giant_length_is_refused_before_its_body_arrives() {
        let mut buffer = BytesMut::from(&[0xff, 0xff, 0xff, 0xff][..]);
        let error = decode_frame::<NodeMessage>(&mut buffer).unwrap_err();
        assert_eq!(error, CodecError::TooLong { announced: u32::MAX as usize, limit: FRAME_LIMIT_BYTES });
    }

    #[test]
    fn the_answer_of_an_http_server_is_named() {
        for answer in ["HTTP/1.1 400 Bad Request\r\n\r\n", "<!DOCTYPE HTML>\n<html lang=\"en\">", "<html><head>"] {
            let error = decode_frame::<CoordinatorMessage>(&mut BytesMut::from(answer)).unwrap_err();
            assert_eq!(error, CodecError::Http);
            assert!(error.to_string().contains("an HTTP server answers there"), "{error}");
        }
    }

    #[test]
    fn any_split_of_the_stream_gives_the_same_messages() {
        let sent = [
            NodeMessage::Heartbeat { rtt_us: None },
            NodeMessage::Leave { reason: "SIGTERM".into(), signal: None },
            NodeMessage::Withdraw,
        ];
        let mut stream = BytesMut::new();
        for message in &sent {
            encode_frame(message, &mut stream);
        }
        for cut in 0..=stream.len() {
            let mut received = Vec::new();
            let mut buffer = BytesMut::new();
            for part in [&stream[..cut], &stream[cut..]] {
                buffer.extend_from_slice(part);
                while let Some(message) = decode_frame::<NodeMessage>(&mut buffer).unwrap() {
                    received.push(message);
                }
            }
            assert_eq!(received, sent, "cut at {cut}");
        }
    }

    #[test]
    fn bytes_after_the_message_inside_a_frame_are_refused() {
        let mut buffer = BytesMut::new();
        encode_frame(&NodeMessage::Heartbeat { rtt_us: None }, &mut buffer);
        buffer[0] += 1;
        buffer.put_u8(0);
        assert!(matches!(decode_frame::<NodeMessage>(&mut buffer), Err(CodecError::Malformed(3))));
    }

    #[test]
    fn a_preamble_of_another_version_names_both() {
        let mut buffer = BytesMut::from(&b"ELRZ\x09\x00"[..]);
        let text = decode_preamble(&mut buffer).unwrap_err().to_string();
        assert_eq!(
            text,
            "rendezvous protocol version 9 is not spoken here, only version 4: install one release of elastic_rs on every node"
        );
    }

    #[test]
    fn a_coordinator_of_any_version_says_which_it_is() {
        let mut question = BytesMut::new();
        encode_version_question(&mut question);
        let CodecError::Version { theirs, .. } = decode_preamble(&mut question).unwrap_err() else { panic!() };
        for ours in [PROTOCOL_VERSION, 12_345] {
            for more in ["", "; install the same release everywhere"] {
                let reason = format!("{}{more}", CodecError::Version { theirs, ours });
                let mut answer = BytesMut::new();
                encode_frame(&CoordinatorMessage::Rejected { reason }, &mut answer);
                assert_eq!(decode_version_answer(&answer), Some(ours));
            }
        }
        let mut other = BytesMut::new();
        encode_frame(&CoordinatorMessage::Rejected { reason: "closed".to_owned() }, &mut other);
        assert_eq!(decode_version_answer(&other), None);
        assert!(!is_protected_answer(&other) && !is_protected_answer(b"HTTP/1.1 400 Bad Request"));
        let mut protected = BytesMut::new();
        encode_protected("name its file", &mut protected);
        assert!(is_protected_answer(&protected));
        assert_eq!(decode_version_answer(b"HTTP/1.1 400 Bad Request"), None);
        assert_eq!(decode_version_answer(b""), None);
    }

    #[test]
    fn a_foreign_protocol_is_recognised_at_its_first_wrong_byte() {
        let mut buffer = BytesMut::from(&b"EHLO"[..]);
        assert!(matches!(decode_preamble(&mut buffer), Err(CodecError::Foreign(_))));
    }
}
