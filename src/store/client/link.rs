//! One connection to a store, with unsent requests and unread replies.
//!
//! Owns the order of requests and replies. A future that is dropped half-way leaves its unsent bytes and its unread reply
//! here. The next operation completes these first, so the two ends cannot fall out of step.

use std::borrow::Cow;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::error::LostCause;
use crate::store::protocol::{CheckReply, ProtoError, Reply, ReplyDecoder, ReplyShape, Request, WaitReply};

/// A request that borrows keys and values where possible.
pub(super) type Outgoing<'a> = Request<Cow<'a, [u8]>>;

#[derive(Debug)]
pub(super) struct Link {
    stream: TcpStream,
    /// Received and not decoded yet.
    input: BytesMut,
    /// Encoded and not yet sent.
    output: BytesMut,
    owed: Option<Owed>,
    lost: Option<LostCause>,
}

/// The reply that is still expected to the last request.
#[derive(Debug)]
enum Owed {
    Reply(ReplyDecoder),
    /// To `WAIT` or `BARRIER`.
    Release(ReplyDecoder),
    /// To `CANCEL_WAIT`, perhaps after a release that had been sent already.
    Cancel {
        decoder: ReplyDecoder,
        released: bool,
    },
}

/// Why an exchange failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// A wait was given up. Both ends are in step.
    Timeout(Duration),
    Lost(LostCause),
}

impl<E: Into<LostCause>> From<E> for Failure {
    fn from(cause: E) -> Self {
        Failure::Lost(cause.into())
    }
}

impl Link {
    /// Sends `VALIDATE` and `PING` on a new connection, in one write: PyTorch's libuv server requires `VALIDATE` in one segment.
    pub(super) async fn open(stream: TcpStream, nonce: u32) -> Result<Link, Failure> {
        stream.set_nodelay(true)?;
        let keepalive = TcpKeepalive::new().with_time(KEEPALIVE_IDLE).with_interval(KEEPALIVE_INTERVAL);
        SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
        let (input, output) = Default::default();
        let mut link = Link { stream, input, output, owed: None, lost: None };
        Outgoing::Validate.encode(&mut link.output);
        let reply = link.call(&Outgoing::Ping { nonce }).await?;
        match reply {
            Reply::Nonce(got) if got == nonce => Ok(link),
            Reply::Nonce(got) => Err(ProtoError::BadNonce { expected: nonce, got }.into()),
            other => unreachable!("a ping was answered with {other:?}"),
        }
    }

    pub(super) fn addresses(&self) -> io::Result<(SocketAddr, SocketAddr)> {
        Ok((self.stream.local_addr()?, self.stream.peer_addr()?))
    }

    /// Sends a request that has no reply.
    pub(super) async fn send(&mut self, request: &Outgoing<'_>) -> Result<(), Failure> {
        self.settle().await?;
        request.encode(&mut self.output);
        let sent = self.flush().await;
        self.checked(sent)
    }

    pub(super) async fn value(&mut self, request: &Outgoing<'_>) -> Result<Bytes, Failure> {
        match self.call(request).await? {
            Reply::Value(value) => Ok(value),
            other => unreachable!("{:?} was answered with {other:?}", request.query()),
        }
    }

    pub(super) async fn integer(&mut self, request: &Outgoing<'_>) -> Result<i64, Failure> {
        match self.call(request).await? {
            Reply::Integer(number) => Ok(number),
            other => unreachable!("{:?} was answered with {other:?}", request.query()),
        }
    }

    pub(super) async fn check(&mut self, request: &Outgoing<'_>) -> Result<bool, Failure> {
        match self.call(request).await? {
            Reply::Check(reply) => Ok(reply == CheckReply::Ready),
            other => unreachable!("{:?} was answered with {other:?}", request.query()),
        }
    }

    pub(super) async fn values(&mut self, request: &Outgoing<'_>) -> Result<Vec<Bytes>, Failure> {
        match self.call(request).await? {
            Reply::Values(values) | Reply::Keys(values) => Ok(values),
            other => unreachable!("{:?} was answered with {other:?}", request.query()),
        }
    }

    pub(super) async fn popped(&mut self, request: &Outgoing<'_>) -> Result<Option<Bytes>, Failure> {
        match self.call(request).await? {
            Reply::Popped { item, .. } => Ok(item),
            other => unreachable!("{:?} was answered with {other:?}", request.query()),
        }
    }

    /// Sends `WAIT` or `BARRIER` and waits for its release; for ever without a limit.
    ///
    /// The time starts when the request has been sent. When it is over, the wait is cancelled, and has failed even if the
    /// release turns out to have been on its way, as in PyTorch.
    pub(super) async fn wait(&mut self, request: &Outgoing<'_>, limit: Option<Duration>) -> Result<(), Failure> {
        self.settle().await?;
        request.encode(&mut self.output);
        self.owed = Some(Owed::Release(ReplyDecoder::new(ReplyShape::Wait)));
        let sent = self.flush().await;
        self.checked(sent)?;
        let released = match limit {
            None => self.read_owed().await,
            Some(limit) => match timeout(limit, self.read_owed()).await {
                Ok(released) => released,
                Err(_) => {
                    self.cancel();
                    let canceled = self.finish_owed().await;
                    self.checked(canceled)?;
                    return Err(Failure::Timeout(limit));
                }
            },
        };
        let understood = match released {
            Ok(Reply::Wait(WaitReply::StopWaiting)) => Ok(()),
            Ok(_) => Err(ProtoError::BadStopWaiting(WaitReply::WaitCanceled as u8).into()),
            Err(cause) => Err(cause),
        };
        self.checked(understood)
    }

    /// Sends a request and reads its reply, without a time limit, as in PyTorch.
    async fn call(&mut self, request: &Outgoing<'_>) -> Result<Reply, Failure> {
        self.settle().await?;
        request.encode(&mut self.output);
        let shape = request.reply_shape().expect("only requests with a reply are called");
        self.owed = Some(Owed::Reply(ReplyDecoder::new(shape)));
        let reply = match self.flush().await {
            Ok(()) => self.read_owed().await,
            Err(cause) => Err(cause),
        };
        self.checked(reply)
    }

    /// Completes what a dropped operation has left, and notices a connection that has ended meanwhile.
    async fn settle(&mut self) -> Result<(), Failure> {
        if let Some(cause) = &self.lost {
            return Err(cause.clone().into());
        }
        if let Some(Owed::Release(_)) = self.owed {
            self.cancel();
        }
        let settled = match self.finish_owed().await {
            Ok(()) => self.look_for_the_unexpected(),
            Err(cause) => Err(cause),
        };
        self.checked(settled)
    }

    /// Between two exchanges nothing may arrive, except the end of the stream.
    fn look_for_the_unexpected(&mut self) -> Result<(), LostCause> {
        if !self.input.is_empty() {
            return Err(ProtoError::Unsolicited.into());
        }
        match self.stream.try_read(&mut [0; 1]) {
            Ok(0) => Err(LostCause::Closed),
            Ok(_) => Err(ProtoError::Unsolicited.into()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Sends `CANCEL_WAIT` for the open wait.
    fn cancel(&mut self) {
        Outgoing::CancelWait.encode(&mut self.output);
        self.owed = Some(Owed::Cancel { decoder: ReplyDecoder::new(ReplyShape::Wait), released: false });
    }

    /// Sends what is left to send and reads what is owed, with no interest in what it says.
    async fn finish_owed(&mut self) -> Result<(), LostCause> {
        self.flush().await?;
        while self.owed.is_some() {
            let reply = self.read_owed().await?;
            let Some(Owed::Cancel { released, .. }) = self.owed else {
                continue;
            };
            match (reply, released) {
                (Reply::Wait(WaitReply::WaitCanceled), _) => self.owed = None,
                // The release and the cancellation have crossed: the reply to the latter follows.
                (Reply::Wait(WaitReply::StopWaiting), false) => {
                    self.owed = Some(Owed::Cancel { decoder: ReplyDecoder::new(ReplyShape::Wait), released: true });
                }
                _ => return Err(ProtoError::BadWaitCanceled(WaitReply::StopWaiting as u8).into()),
            }
        }
        Ok(())
    }

    /// Reads the owed reply. Keeps its place when dropped; a reply to `CANCEL_WAIT` stays owed, since two may come.
    async fn read_owed(&mut self) -> Result<Reply, LostCause> {
        loop {
            let (Some(Owed::Reply(decoder) | Owed::Release(decoder)) | Some(Owed::Cancel { decoder, .. })) =
                &mut self.owed
            else {
                unreachable!("a reply is read that is not owed");
            };
            if let Some(reply) = decoder.decode(&mut self.input)? {
                if !matches!(self.owed, Some(Owed::Cancel { .. })) {
                    self.owed = None;
                }
                if self.input.is_empty() {
                    self.input = BytesMut::new();
                }
                return Ok(reply);
            }
            // Room grows with what has arrived, not with what was announced.
            let missing = decoder.needed().saturating_sub(self.input.len());
            let most = missing.clamp(SMALL_READ_BYTES, self.input.len().max(LARGE_READ_BYTES));
            self.input.reserve(most);
            if self.stream.read_buf(&mut (&mut self.input).limit(most)).await? == 0 {
                return Err(LostCause::Closed);
            }
        }
    }

    async fn flush(&mut self) -> Result<(), LostCause> {
        while !self.output.is_empty() {
            self.stream.write_buf(&mut self.output).await?;
        }
        if self.output.capacity() > LARGE_READ_BYTES {
            self.output = BytesMut::new();
        }
        Ok(())
    }

    /// A failure is final: it is what every later operation will hear.
    fn checked<T>(&mut self, result: Result<T, LostCause>) -> Result<T, Failure> {
        result.map_err(|cause| {
            self.lost = Some(cause.clone());
            self.owed = None;
            // Tells the store not to wait for more. It may have gone already.
            let _ = SockRef::from(&self.stream).shutdown(std::net::Shutdown::Both);
            Failure::Lost(cause)
        })
    }
}

const SMALL_READ_BYTES: usize = 1024;
const LARGE_READ_BYTES: usize = 64 * 1024;

/// A store whose host vanished without a word is found dead after some minutes. PyTorch's client waits for ever.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);
