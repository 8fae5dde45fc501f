//! The store's client: the operations of `torch.distributed.TCPStore`.
//!
//! Owns the sequence of queries behind each operation, the client's key prefix, and its time limits. Works with this
//! project's server and with PyTorch's two. Facts: `TCPStore.cpp`, `TCPStoreBackend.cpp` and `TCPStoreLibUvBackend.cpp` of PyTorch.
//!
//! Dropping the future of an operation is allowed at any point. The operation may then have been carried out or not; the
//! next one first finishes the exchange (a wait is cancelled), and the connection stays in step.

mod connect;
mod error;
mod link;

use std::borrow::Cow;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep};

pub use error::{Keys, LostCause, StoreError};
use link::{Failure, Link, Outgoing};

use crate::store::protocol::{INIT_KEY, Request};

/// How a client connects and waits.
#[derive(Debug, Clone)]
pub struct ClientOptions {
    /// How long connecting may take altogether. Default 300 s. With zero there is one attempt.
    pub connect_timeout: Duration,
    /// How long operations wait for keys by default; `None` is for ever. Default 300 s.
    pub timeout: Option<Duration>,
}

impl Default for ClientOptions {
    /// Mirrors `TCPStore`'s default `timeout`.
    fn default() -> Self {
        let timeout = Duration::from_secs(300);
        ClientOptions { connect_timeout: timeout, timeout: Some(timeout) }
    }
}

/// One connection to a store. Its operations are carried out one after the other, in the order they were begun.
#[derive(Debug)]
pub struct StoreClient {
    link: tokio::sync::Mutex<Link>,
    host: String,
    port: u16,
    connect_timeout: Duration,
    timeout: Mutex<Option<Duration>>,
    local: SocketAddr,
    peer: SocketAddr,
}

impl StoreClient {
    /// Connects to a store, which need not listen yet.
    pub async fn connect(host: &str, port: u16, options: ClientOptions) -> Result<StoreClient, StoreError> {
        let start = Instant::now();
        let ClientOptions { connect_timeout, timeout } = options;
        let link = connect::connect(host, port, connect_timeout).await?;
        let (local, peer) = link.addresses().map_err(|error| StoreError::ConnectTimeout {
            host: host.to_owned(),
            port,
            timeout: connect_timeout,
            elapsed: start.elapsed(),
            attempts: 1,
            last: error.to_string(),
        })?;
        let (link, timeout) = (tokio::sync::Mutex::new(link), Mutex::new(timeout));
        Ok(StoreClient { link, host: host.to_owned(), port, connect_timeout, timeout, local, peer })
    }

    /// A new connection to the same store, with the same timeout. What `Store.clone()` does.
    pub async fn connect_again(&self) -> Result<StoreClient, StoreError> {
        let options = ClientOptions { connect_timeout: self.connect_timeout, timeout: self.timeout() };
        StoreClient::connect(&self.host, self.port, options).await
    }

    /// The host that it was given.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port that it was given.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// This end of the connection: what the server calls its peer.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// The store's end of the connection.
    pub fn peer_addr(&self) -> SocketAddr {
        self.peer
    }

    /// How long operations wait for keys by default; `None` is for ever.
    pub fn timeout(&self) -> Option<Duration> {
        *self.timeout.lock()
    }

    /// Changes [`timeout`](Self::timeout) for operations that begin later.
    pub fn set_timeout(&self, timeout: Option<Duration>) {
        *self.timeout.lock() = timeout;
    }

    /// Stores a value. Returns when the request has been sent: the protocol has no acknowledgement.
    pub async fn set(&self, key: &[u8], value: &[u8]) -> Result<(), StoreError> {
        let keys = [key];
        let op = self.begin("set", &keys);
        let request = Request::Set { key: sent(key), value: Cow::Borrowed(value) };
        op.end(self.link.lock().await.send(&request).await)
    }

    /// Returns the value of a key, waiting for it to appear.
    pub async fn get(&self, key: &[u8]) -> Result<Bytes, StoreError> {
        let keys = [key];
        let op = self.begin("get", &keys);
        let mut link = self.link.lock().await;
        op.end(link.wait(&wait_for(&keys), self.timeout()).await)?;
        op.end(link.value(&Request::Get { key: sent(key) }).await)
    }

    /// Adds to a number, which is 0 if the key is missing, and returns the sum.
    pub async fn add(&self, key: &[u8], amount: i64) -> Result<i64, StoreError> {
        let keys = [key];
        let op = self.begin("add", &keys);
        let request = Request::Add { key: sent(key), amount };
        op.end(self.link.lock().await.integer(&request).await)
    }

    /// Stores `desired` if the value is `expected`, where empty means missing. Returns the value that is then valid.
    ///
    /// For a missing key and an `expected` that is not empty it returns `expected`, as PyTorch does.
    pub async fn compare_set(&self, key: &[u8], expected: &[u8], desired: &[u8]) -> Result<Bytes, StoreError> {
        let keys = [key];
        let op = self.begin("compare_set", &keys);
        let (expected, desired) = (Cow::Borrowed(expected), Cow::Borrowed(desired));
        let request = Request::CompareSet { key: sent(key), expected, desired };
        op.end(self.link.lock().await.value(&request).await)
    }

    /// Removes a key. True if it existed.
    pub async fn delete_key(&self, key: &[u8]) -> Result<bool, StoreError> {
        let keys = [key];
        let op = self.begin("delete_key", &keys);
        let removed = op.end(self.link.lock().await.integer(&Request::DeleteKey { key: sent(key) }).await)?;
        Ok(removed == 1)
    }

    /// The number of stored keys, [`INIT_KEY`] included.
    pub async fn num_keys(&self) -> Result<i64, StoreError> {
        let op = self.begin::<&[u8]>("num_keys", &[]);
        op.end(self.link.lock().await.integer(&Request::GetNumKeys).await)
    }

    /// Whether all keys exist.
    pub async fn check<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<bool, StoreError> {
        let op = self.begin("check", keys);
        let request = Request::Check { keys: all_sent(keys) };
        op.end(self.link.lock().await.check(&request).await)
    }

    /// Waits until all keys exist.
    pub async fn wait<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<(), StoreError> {
        self.wait_within(keys, self.timeout()).await
    }

    /// Waits until all keys exist, with an explicit timeout; `None` is for ever.
    pub async fn wait_within<K: AsRef<[u8]>>(&self, keys: &[K], timeout: Option<Duration>) -> Result<(), StoreError> {
        let op = self.begin("wait", keys);
        op.end(self.link.lock().await.wait(&wait_for(keys), timeout).await)
    }

    /// Appends to a value. Returns when the request has been sent.
    pub async fn append(&self, key: &[u8], value: &[u8]) -> Result<(), StoreError> {
        let keys = [key];
        let op = self.begin("append", &keys);
        let request = Request::Append { key: sent(key), value: Cow::Borrowed(value) };
        op.end(self.link.lock().await.send(&request).await)
    }

    /// Returns the values of several keys, waiting for all of them.
    pub async fn multi_get<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<Bytes>, StoreError> {
        let op = self.begin("multi_get", keys);
        let mut link = self.link.lock().await;
        op.end(link.wait(&wait_for(keys), self.timeout()).await)?;
        op.end(link.values(&Request::MultiGet { keys: all_sent(keys) }).await)
    }

    /// Stores several values. Returns when the request has been sent.
    pub async fn multi_set<K: AsRef<[u8]>, V: AsRef<[u8]>>(&self, keys: &[K], values: &[V]) -> Result<(), StoreError> {
        if keys.len() != values.len() {
            return Err(StoreError::LengthMismatch { keys: keys.len(), values: values.len() });
        }
        let op = self.begin("multi_set", keys);
        let values = values.iter().map(|value| Cow::Borrowed(value.as_ref()));
        let pairs = keys.iter().map(|key| sent(key.as_ref())).zip(values).collect();
        op.end(self.link.lock().await.send(&Request::MultiSet { pairs }).await)
    }

    /// Adds an item to a queue. Returns when the request has been sent.
    pub async fn queue_push(&self, key: &[u8], value: &[u8]) -> Result<(), StoreError> {
        let keys = [key];
        let op = self.begin("queue_push", &keys);
        let request = Request::QueuePush { key: sent(key), value: Cow::Borrowed(value) };
        op.end(self.link.lock().await.send(&request).await)
    }

    /// Takes the oldest item of a queue. With `block`, waits for one.
    ///
    /// With `block` too, the error is [`StoreError::QueueEmpty`] if another client took the item first.
    pub async fn queue_pop(&self, key: &[u8], block: bool) -> Result<Bytes, StoreError> {
        let keys = [key];
        let op = self.begin("queue_pop", &keys);
        let mut link = self.link.lock().await;
        if block {
            op.end(link.wait(&wait_for(&keys), self.timeout()).await)?;
        }
        let item = op.end(link.popped(&Request::QueuePop { key: sent(key) }).await)?;
        item.ok_or_else(|| StoreError::QueueEmpty { peer: self.peer, keys: op.keys() })
    }

    /// The length of a queue; 0 if there is none.
    pub async fn queue_len(&self, key: &[u8]) -> Result<i64, StoreError> {
        let keys = [key];
        let op = self.begin("queue_len", &keys);
        op.end(self.link.lock().await.integer(&Request::QueueLen { key: sent(key) }).await)
    }

    /// All keys that clients have stored, in no particular order.
    pub async fn list_keys(&self) -> Result<Vec<Bytes>, StoreError> {
        let op = self.begin::<&[u8]>("list_keys", &[]);
        let keys = op.end(self.link.lock().await.values(&Request::ListKeys).await)?;
        Ok(keys.into_iter().filter(|key| key.starts_with(PREFIX)).map(|key| key.slice(PREFIX.len()..)).collect())
    }

    /// Waits until `world_size` callers have reached the barrier at this key. The key must not have been used before.
    pub async fn barrier(&self, key: &[u8], world_size: i64) -> Result<(), StoreError> {
        self.barrier_within(key, world_size, self.timeout()).await
    }

    /// The same with an explicit timeout; `None` is for ever.
    pub async fn barrier_within(&self, key: &[u8], world_size: i64, limit: Option<Duration>) -> Result<(), StoreError> {
        let keys = [key];
        let op = self.begin("barrier", &keys);
        let request = Request::Barrier { key: sent(key), world_size };
        op.end(self.link.lock().await.wait(&request, limit).await)
    }

    /// Counts this client as a worker and returns how many there are now.
    ///
    /// What `TCPStore` does when it is constructed with a world size and `wait_for_workers=True`.
    pub async fn join_workers(&self) -> Result<i64, StoreError> {
        let keys = [INIT_KEY];
        let op = self.begin("join_workers", &keys);
        let request = Request::Add { key: Cow::Borrowed(INIT_KEY), amount: 1 };
        op.end(self.link.lock().await.integer(&request).await)
    }

    /// Waits until `world_size` workers have joined; `None` is for ever. The client that owns the server does this.
    pub async fn wait_for_workers(&self, world_size: i64, limit: Option<Duration>) -> Result<(), StoreError> {
        let keys = [INIT_KEY];
        let op = self.begin("wait_for_workers", &keys);
        let mut link = self.link.lock().await;
        loop {
            let init = || Cow::Borrowed(INIT_KEY);
            op.end(link.wait(&Request::Wait { keys: vec![init()] }, limit).await)?;
            let count = op.end(link.value(&Request::Get { key: init() }).await)?;
            let joined = std::str::from_utf8(&count).ok().and_then(|count| count.parse().ok()).unwrap_or(0);
            if joined >= world_size {
                return Ok(());
            }
            let elapsed = op.start.elapsed();
            if let Some(timeout) = limit.filter(|&limit| elapsed >= limit) {
                return Err(StoreError::WorkersTimeout { peer: self.peer, joined, world_size, timeout, elapsed });
            }
            sleep(WORKERS_INTERVAL).await;
        }
    }

    fn begin<'a, K: AsRef<[u8]>>(&self, name: &'static str, named: &'a [K]) -> Operation<'a, K> {
        Operation { name, named, peer: self.peer, start: Instant::now() }
    }
}

/// The facts of an operation that its error reports.
struct Operation<'a, K> {
    name: &'static str,
    named: &'a [K],
    peer: SocketAddr,
    start: Instant,
}

impl<K: AsRef<[u8]>> Operation<'_, K> {
    fn keys(&self) -> Keys {
        Keys(self.named.iter().map(|key| Bytes::copy_from_slice(key.as_ref())).collect())
    }

    fn end<T>(&self, result: Result<T, Failure>) -> Result<T, StoreError> {
        result.map_err(|failure| {
            let (operation, peer, keys, elapsed) = (self.name, self.peer, self.keys(), self.start.elapsed());
            match failure {
                Failure::Timeout(timeout) => StoreError::WaitTimeout { operation, peer, keys, timeout, elapsed },
                Failure::Lost(LostCause::Protocol(what)) => {
                    StoreError::Protocol { operation, peer, keys, elapsed, what }
                }
                Failure::Lost(cause) => StoreError::ConnectionLost { operation, peer, keys, elapsed, cause },
            }
        })
    }
}

/// The key as sent, with its prefix. Mirrors `TCPStore::keyPrefix_`.
fn sent(key: &[u8]) -> Cow<'static, [u8]> {
    Cow::Owned([PREFIX, key].concat())
}

fn all_sent<K: AsRef<[u8]>>(keys: &[K]) -> Vec<Cow<'static, [u8]>> {
    keys.iter().map(|key| sent(key.as_ref())).collect()
}

fn wait_for<K: AsRef<[u8]>>(keys: &[K]) -> Outgoing<'static> {
    Request::Wait { keys: all_sent(keys) }
}

const PREFIX: &[u8] = b"/";

/// How often the owner of a server asks whether all workers have joined. Mirrors `waitForWorkers` in `TCPStore.cpp`.
const WORKERS_INTERVAL: Duration = Duration::from_millis(10);
