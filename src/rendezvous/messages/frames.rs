//! Reading messages from a connection.

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncReadExt};

use super::codec::{self, CodecError};

/// Bytes of free room before each read. Most messages fit, so that one read gets a whole message.
const ROOM: usize = 512;

/// Read the next message; `None` at the end of the connection.
pub(crate) async fn read_message<M: serde::de::DeserializeOwned>(
    reader: &mut (impl AsyncRead + Unpin),
    buffer: &mut BytesMut,
) -> Result<Option<M>, CodecError> {
    loop {
        if let Some(message) = codec::decode_frame(buffer)? {
            return Ok(Some(message));
        }
        buffer.reserve(ROOM);
        match reader.read_buf(buffer).await {
            Ok(1..) => {}
            Ok(0) | Err(_) => return Ok(None),
        }
    }
}
