//! The end of a coordinator that is protected: TLS, then the proof. A peer that has not proven itself yet is called a stranger.
//!
//! [`hall`] lets as many strangers in as there are [`Door::places`], each for [`LIMIT`], and each may send [`BYTES`]. If all places
//! are taken, the stranger that has had one for longest loses it to the next, but not before [`PATIENCE`]. As many more wait for a
//! place, and the last to come is the next to get one: in a flood, most of those who have waited for long have given up. Handshakes run on [`super::helpers`]: a socket stays
//! with the reactor of the runtime that accepted it, and any runtime may poll what waits for it.

use std::collections::VecDeque;
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep_until, timeout};

use super::helpers::Helpers;
use super::objection::{in_words, is_of_certificate};
use super::proof::{Pass, check, refuse};
use super::refusals::{Kind, Refusal};
use super::stream::Halves;
use super::tls::{self, ServerConfig, ServerStream};
use super::{Protection, ProtectionError};
use crate::open_files::places_for_strangers;

/// The first bytes of a connection that is meant for a door.
pub use super::tls::FIRST_BYTES;

/// Time for TLS and the proof.
pub const LIMIT: Duration = Duration::from_secs(5);
/// How long a stranger keeps its place while others wait for one. A handshake takes two or three times the way there and back.
const PATIENCE: Duration = Duration::from_millis(500);
/// Bytes that a stranger may send.
const BYTES: usize = 16 * 1024;

/// Where strangers prove that they belong to the job.
#[derive(Debug)]
pub struct Door {
    protection: Arc<Protection>,
    config: Arc<ServerConfig>,
    helpers: Arc<Helpers>,
    places: usize,
}

impl Door {
    /// A door with a new key.
    ///
    /// # Errors
    /// TLS cannot be set up, or the threads for handshakes cannot be started.
    pub fn new(protection: Arc<Protection>) -> Result<Self, ProtectionError> {
        let config = tls::server_config().map_err(|error| ProtectionError::Tls(error.to_string()))?;
        let helpers = Helpers::shared().map_err(ProtectionError::Threads)?;
        Ok(Self { protection, config, helpers, places: places_for_strangers() })
    }

    /// How many strangers may prove themselves at once, and how many may wait for that.
    pub fn places(&self) -> usize {
        self.places
    }

    /// Where handshakes run.
    pub fn helpers(&self) -> &Handle {
        self.helpers.handle()
    }

    /// What is asked of strangers. It counts those that are refused.
    pub fn protection(&self) -> &Arc<Protection> {
        &self.protection
    }

    /// Begin TLS with a stranger whose first bytes have been read, and let both ends prove themselves, for a session.
    ///
    /// # Errors
    /// Why it is refused. [`Protection::refuse`] has still to count it.
    pub async fn admit(&self, stream: TcpStream, first_bytes: BytesMut) -> Result<(Halves, Pass), Refusal> {
        let (stream, pass) = self.meet(stream, first_bytes).await?;
        let (stranger, keys) =
            tls::keys_of_server(stream).map_err(|error| Refusal::new(Kind::NoTls, error.to_string()))?;
        let halves = Halves::in_records(stranger.stream, keys).map_err(|why| Refusal::new(Kind::NoTls, why))?;
        Ok((halves, pass))
    }

    /// As [`Self::admit`], for a connection that may carry more than a session ever does.
    ///
    /// # Errors
    /// As [`Self::admit`].
    pub async fn admit_to_tunnel(&self, stream: TcpStream) -> Result<(Halves, Pass), Refusal> {
        let (mut stream, pass) = self.meet(stream, BytesMut::new()).await?;
        stream.get_mut().0.left = usize::MAX;
        Ok((Halves::of(stream), pass))
    }

    async fn meet(&self, stream: TcpStream, first_bytes: BytesMut) -> Result<(ServerStream<Stranger>, Pass), Refusal> {
        let done = async {
            // TLS tries once to say what was wrong, and has to find the socket ready.
            stream.writable().await.map_err(|error| Refusal::new(Kind::NoTls, error.to_string()))?;
            let stranger = Stranger { stream, first_bytes, left: BYTES };
            let own = self.protection.certificates();
            let config = match own {
                Some(own) => Arc::clone(&own.identity().await.server),
                None => Arc::clone(&self.config),
            };
            let mut stream = match tls::accept(config, stranger).await {
                Ok(stream) => stream,
                Err((error, stranger)) => return Err(no_tls(&error, stranger).await),
            };
            if let Some(own) = own
                && let Err(why) = own.check_peer(stream.get_ref().1.peer_certificates())
            {
                refuse(&mut stream, why.clone()).await;
                read_out(&mut stream).await;
                return Err(Refusal { kind: Kind::Certificate, why });
            }
            let unproven = |why| Refusal { kind: Kind::Unproven, why };
            let secret = tls::secret_of_server(&stream).map_err(unproven)?;
            let accepted = async |run_id: &str| self.protection.accepted(run_id).await;
            let pass = check(&mut stream, accepted, &secret).await.map_err(unproven)?;
            Ok((stream, pass))
        };
        timeout(LIMIT, done).await.unwrap_or_else(|_| Err(late()))
    }
}

/// The refusal of a stranger that has not proven itself within [`LIMIT`].
pub fn late() -> Refusal {
    Refusal::new(Kind::Late, format!("no proof within {LIMIT:?}"))
}

/// Tell a stranger that does not speak TLS why it is refused, and close the connection.
pub async fn turn_away(mut stream: TcpStream, words: &[u8]) {
    let told = async {
        stream.write_all(words).await?;
        stream.shutdown().await?;
        read_out(&mut stream).await;
        io::Result::Ok(())
    };
    let _ = timeout(LIMIT, told).await;
}

/// Read what a stranger has sent that was told why it is refused: else the kernel resets the connection, and the words are lost.
async fn read_out(stream: &mut (impl AsyncRead + Unpin)) {
    let mut rest = [0; 1024];
    let mut left = BYTES;
    while left > 0
        && let Ok(count @ 1..) = stream.read(&mut rest).await
    {
        left = left.saturating_sub(count);
    }
}

/// The refusal of a stranger with which TLS could not be begun.
async fn no_tls(error: &io::Error, mut stranger: Stranger) -> Refusal {
    if is_of_certificate(error) {
        // It takes TLS as begun, and has sent more.
        let _ = stranger.shutdown().await;
        read_out(&mut stranger).await;
        return Refusal::new(Kind::Certificate, in_words(error).unwrap_or_default());
    }
    Refusal::new(Kind::NoTls, in_words(error).unwrap_or_else(|| format!("no TLS: {error}")))
}

/// Bring strangers to the door, as many at once as there are `places`, until there are no more of them. What `welcome` makes of a
/// stranger runs on `helpers`. `lost` is told why one got no place, or lost it.
pub async fn hall<S, F, T>(
    (helpers, places): (&Handle, usize),
    mut strangers: mpsc::UnboundedReceiver<S>,
    welcome: impl Fn(S) -> F,
    mut proven: impl FnMut(T),
    mut lost: impl FnMut(Refusal),
) where
    F: Future<Output = Option<T>> + Send + 'static,
    T: Send + 'static,
{
    let mut inside: JoinSet<Option<T>> = JoinSet::new();
    let mut oldest: VecDeque<(Instant, AbortHandle)> = VecDeque::new();
    let mut waiting: VecDeque<S> = VecDeque::new();
    loop {
        while inside.len() < places
            && let Some(next) = waiting.pop_back()
        {
            // Those who have left are dropped when they are the first, or now and then: looking at all costs more than a stranger does.
            if oldest.len() >= 2 * places {
                oldest.retain(|(_, stranger)| !stranger.is_finished());
            }
            oldest.push_back((Instant::now(), inside.spawn_on(welcome(next), helpers)));
        }
        while oldest.front().is_some_and(|(_, stranger)| stranger.is_finished()) {
            oldest.pop_front();
        }
        let until = oldest.front().map(|(since, _)| *since + PATIENCE).filter(|_| !waiting.is_empty());
        let mut impatient = pin!(async {
            match until {
                Some(until) => sleep_until(until).await,
                None => std::future::pending().await,
            }
        });
        tokio::select! {
            biased;
            Some(done) = inside.join_next() => {
                if let Ok(Some(done)) = done {
                    proven(done);
                }
            }
            stranger = strangers.recv() => match stranger {
                Some(stranger) => {
                    waiting.push_back(stranger);
                    if waiting.len() > places {
                        waiting.pop_front();
                        lost(Refusal::new(Kind::Crowded, "too many others wait to prove themselves"));
                    }
                }
                None => return,
            },
            () = &mut impatient => {
                if let Some((_, stranger)) = oldest.pop_front()
                    && !stranger.is_finished()
                {
                    stranger.abort();
                    lost(Refusal::new(Kind::Late, "no proof while others waited"));
                }
            }
        }
    }
}

/// A connection whose peer has not proven itself: what it may send is counted.
struct Stranger {
    stream: TcpStream,
    first_bytes: BytesMut,
    left: usize,
}

impl AsyncRead for Stranger {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.left == 0 {
            return Poll::Ready(Err(io::Error::other(format!("more than {BYTES} bytes before the proof"))));
        }
        let before = buf.filled().len();
        if self.first_bytes.is_empty() {
            let read = Pin::new(&mut self.stream).poll_read(cx, buf);
            if !matches!(read, Poll::Ready(Ok(()))) {
                return read;
            }
        } else {
            let count = self.first_bytes.len().min(buf.remaining());
            buf.put_slice(&self.first_bytes[..count]);
            self.first_bytes.advance(count);
        }
        let count = buf.filled().len() - before;
        if self.left != usize::MAX {
            self.left = self.left.saturating_sub(count);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Stranger {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    // TLS tries once to say what was wrong, behind what it has not sent yet.
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;
    use tokio::sync::oneshot;

    use super::*;
    use crate::secure::token::Token;

    fn protection(digit: &str) -> Arc<Protection> {
        Arc::new(Protection::by_token(Token::parse(&digit.repeat(64)).unwrap()).unwrap())
    }

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (one, other) =
            tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), async { listener.accept().await });
        (one.unwrap(), other.unwrap().0)
    }

    /// Both ends hold the token. Somebody between speaks TLS with each, with a key of his own, and passes everything on.
    #[tokio::test]
    async fn both_ends_refuse_whom_they_meet_if_somebody_stands_between() {
        let door = Door::new(protection("a")).unwrap();
        let ((node, before), (behind, coordinator)) = (pair().await, pair().await);
        let between = async {
            let mut before = tls::accept(tls::server_config().unwrap(), before).await.ok().unwrap();
            let mut behind = tls::connect(tls::client_config().unwrap(), tls::no_name(), behind).await.unwrap();
            let _ = tokio::io::copy_bidirectional(&mut before, &mut behind).await;
        };
        let node = async { protection("a").begin(node, "host", "run").await };
        let (node, coordinator, ()) = tokio::join!(node, door.admit(coordinator, BytesMut::new()), between);
        assert!(node.unwrap_err().contains("somebody may stand between"));
        assert!(coordinator.unwrap_err().why.contains("somebody may stand between"));
    }

    #[tokio::test]
    async fn a_stranger_with_tls_and_without_a_proof_is_closed() {
        let door = Door::new(protection("a")).unwrap();
        let long = [&[1][..], &[0; 8], &[0xff; 2], &[0; 5000]].concat();
        for (said, why) in
            [(vec![9; 43], "version 9"), (vec![1; 10], "ended before the proof"), (long, "must have at most 1024")]
        {
            let (stranger, coordinator) = pair().await;
            let speaking = async {
                let mut stranger = tls::connect(tls::client_config().unwrap(), tls::no_name(), stranger).await.unwrap();
                let _ = stranger.write_all(&said).await;
                let _ = stranger.shutdown().await;
                let _ = stranger.read_to_end(&mut Vec::new()).await;
            };
            let (admitted, ()) = tokio::join!(door.admit(coordinator, BytesMut::new()), speaking);
            let refusal = admitted.unwrap_err();
            assert!(refusal.kind == Kind::Unproven && refusal.why.contains(why), "{refusal:?}");
        }
    }

    #[tokio::test]
    async fn a_stranger_that_sends_much_is_closed_at_the_limit() {
        let door = Door::new(protection("a")).unwrap();
        let (mut stranger, coordinator) = pair().await;
        // Handshake messages of a type that does not exist would be judged at once: this one is a hello that never ends.
        let mut record = vec![0x16, 0x03, 0x01, 0x3f, 0xff, 0x01, 0x00, 0xff, 0xf0];
        record.resize(5 + 0x3fff, 0);
        let flooding = async {
            while stranger.write_all(&record).await.is_ok() {
                record.splice(5..9, [0; 4]);
            }
        };
        let (admitted, ()) = tokio::join!(door.admit(coordinator, BytesMut::new()), flooding);
        let refusal = admitted.unwrap_err();
        assert!(refusal.kind == Kind::NoTls && refusal.why.contains("more than 16384 bytes"), "{refusal:?}");
        assert_eq!(door.protection().refuse(&refusal), format!("{}; 1 refused so far", refusal.why));
        assert_eq!(door.protection().refuse(&late()), "no proof within 5s; 2 refused so far");
        let refused = door.protection().refusals();
        assert_eq!((refused.of(Kind::NoTls), refused.of(Kind::Late), refused.total()), (1, 1, 2));
    }

    /// The coordinator's thread is not needed while a stranger's handshake computes, and sessions do not need the helpers.
    #[tokio::test]
    async fn handshakes_run_on_the_helpers_and_what_follows_does_not() {
        let door = Door::new(protection("a")).unwrap();
        let (to, strangers) = mpsc::unbounded_channel();
        to.send(()).unwrap();
        let thread = || std::thread::current().name().unwrap_or_default().to_owned();
        let welcome = |()| async move { Some(thread()) };
        let (met_in, mut met) = mpsc::unbounded_channel();
        let proven = |inside| met_in.send((inside, thread())).unwrap();
        let (inside, after) = tokio::select! {
            () = hall((door.helpers(), 256), strangers, welcome, proven, |_| ()) => panic!("it has ended"),
            met = timeout(LIMIT * 12, met.recv()) => met.unwrap().unwrap(),
        };
        assert!(inside.starts_with("door-"), "{inside}");
        assert_eq!(after, thread());
        drop(to);
    }

    /// Strangers who are slow lose their places to others who wait, and whoever comes last is the next to get one.
    #[tokio::test]
    async fn places_go_to_those_who_wait() {
        let (to, strangers) = mpsc::unbounded_channel();
        let (places, slow, quick) = (64, 256, 10);
        for number in 0..slow + quick {
            to.send(number).unwrap();
        }
        let (met_in, mut met) = mpsc::unbounded_channel();
        let welcome = move |number| async move {
            if number < slow {
                std::future::pending::<()>().await;
            }
            Some(number)
        };
        let (done_in, done) = oneshot::channel::<()>();
        let hall = tokio::spawn(async move {
            let mut lost = 0;
            let helpers = Handle::current();
            let serving =
                hall((&helpers, places), strangers, welcome, |number| met_in.send(number).unwrap(), |_| lost += 1);
            tokio::select! {
                () = serving => {}
                _ = done => {}
            }
            lost
        });
        let mut served = Vec::new();
        while served.len() < quick {
            served.extend(timeout(LIMIT * 12, met.recv()).await.unwrap());
        }
        served.sort_unstable();
        assert!(served.into_iter().eq(slow..slow + quick));
        done_in.send(()).unwrap();
        let lost = hall.await.unwrap();
        assert!(lost >= slow + quick - 2 * places && lost < slow, "{lost}");
    }
}
