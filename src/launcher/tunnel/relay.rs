//! Passing bytes on between a store's client and its server.

use std::io;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::pin;

use crate::secure::{Halves, Reader, Writer};

/// Bytes of a buffer at first. Most requests and replies are smaller, and most connections are idle.
const FIRST_BYTES: usize = 1024;
/// Bytes of a buffer that was full again and again: four records of TLS.
const MOST_BYTES: usize = 64 * 1024;

/// Pass bytes on in both directions until the server has closed the connection, or it fails.
///
/// A client that shuts its sending side down still gets what the server sends. A server that closes takes nothing more. What one end
/// does not read is not read from the other either, so at most a buffer's bytes wait here.
///
/// # Errors
/// One of the two connections has failed. Both are closed when this returns.
pub(super) async fn relay(client: Halves, server: Halves) -> io::Result<()> {
    let requests = pass_on(client.reader, server.writer);
    let replies = pass_on(server.reader, client.writer);
    pin!(requests, replies);
    tokio::select! {
        ended = &mut replies => return ended,
        ended = &mut requests => ended?,
    }
    replies.await
}

/// Pass bytes on until there are no more, and say so to the receiver.
async fn pass_on(mut from: Reader, mut to: Writer) -> io::Result<()> {
    let mut bytes = vec![0; FIRST_BYTES];
    loop {
        let count = from.read(&mut bytes).await?;
        if count == 0 {
            return to.shutdown().await;
        }
        to.write_all(&bytes[..count]).await?;
        to.flush().await?;
        if count == bytes.len() && count < MOST_BYTES {
            bytes.resize(2 * count, 0);
        }
    }
}
