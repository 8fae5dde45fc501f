//! Probing which server answers at an address.

use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use super::protocol::Request;
use crate::net::connect::{race, resolve};

/// The nonce that a store has to return.
const NONCE: u32 = 0x454C_525A;

/// Whether a c10d store answers there within `limit`. The probe greets as a c10d client does, and the store has to return the ping.
pub async fn speaks_c10d(host: &str, port: u16, limit: Duration) -> bool {
    let deadline = Instant::now() + limit;
    let greeted = async {
        let addresses = resolve(host, port, deadline).await.ok()?;
        let connected = async |stream| Ok::<TcpStream, String>(stream);
        let mut stream = race(&addresses, deadline, TcpStream::connect, connected).await.ok()?;
        let mut greeting = BytesMut::new();
        Request::<&[u8]>::Validate.encode(&mut greeting);
        Request::<&[u8]>::Ping { nonce: NONCE }.encode(&mut greeting);
        stream.write_all(&greeting).await.ok()?;
        stream.read_u32_le().await.ok()
    };
    timeout(limit, greeted).await == Ok(Some(NONCE))
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    /// Answers the first connection with these bytes, once it has been written to.
    async fn answering(bytes: &'static [u8]) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.read_u8().await.unwrap();
            stream.write_all(bytes).await.unwrap();
        });
        port
    }

    #[tokio::test]
    async fn only_who_returns_the_ping_speaks_c10d() {
        let nonce = NONCE.to_le_bytes();
        let store = answering(Box::leak(Box::new(nonce))).await;
        assert!(speaks_c10d("127.0.0.1", store, LIMIT).await);
        for other in [&b"HTTP/1.1 400 Bad Request\r\n"[..], b"", b"\x00\x01"] {
            let port = answering(other).await;
            assert!(!speaks_c10d("127.0.0.1", port, LIMIT).await, "{other:?}");
        }
        let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        assert!(!speaks_c10d("127.0.0.1", nobody, LIMIT).await);
    }
}
