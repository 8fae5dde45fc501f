//! Finding out, after a connection failed, whether the other end speaks TLS or not.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Time for one question. etcd answers either at once.
const LIMIT: Duration = Duration::from_millis(500);

/// An HTTP/2 client's first bytes: the preface, and an empty SETTINGS frame.
const HTTP2: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
/// The type of a SETTINGS frame, at the fourth byte of a server's first frame.
const SETTINGS: u8 = 4;

/// A `ClientHello` of TLS 1.2 with one cipher suite and no extensions. A server answers with its own, or with an alert.
const TLS: &[u8] = b"\x16\x03\x01\0\x2d\
    \x01\0\0\x29\x03\x03\
    elastic_rs asks: is this one TLS\
    \0\0\x02\xc0\x2f\x01\0";
/// The types of the records with which a TLS server answers.
const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;

/// Whether a server of HTTP/2 without TLS is at the other end of a new connection.
pub(super) async fn speaks_plain(stream: TcpStream) -> bool {
    answer::<4>(stream, HTTP2).await.is_some_and(|bytes| bytes[3] == SETTINGS)
}

/// Whether a server of TLS is at the other end of a new connection.
pub(super) async fn speaks_tls(stream: TcpStream) -> bool {
    answer::<2>(stream, TLS).await.is_some_and(|bytes| matches!(bytes, [ALERT | HANDSHAKE, 3]))
}

/// The first bytes that come after `question`. `None`: the connection ended before, or nothing came in time.
async fn answer<const BYTES: usize>(mut stream: TcpStream, question: &[u8]) -> Option<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    let asked = async {
        stream.write_all(question).await?;
        stream.read_exact(&mut bytes).await
    };
    timeout(LIMIT, asked).await.ok()?.ok()?;
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_client_hello_has_the_lengths_that_it_states() {
        let length = |bytes: &[u8]| bytes.iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte));
        assert_eq!(TLS.len(), 5 + length(&TLS[3..5]));
        assert_eq!(TLS.len(), 9 + length(&TLS[6..9]));
    }
}
