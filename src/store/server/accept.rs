//! Accepting connections, and the server's life as a whole.

use std::collections::HashSet;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use super::connection;
use super::control::{Command, Control, Ended};
use super::hub::{Hub, LOG_TARGET, Rejection};
use super::{Cause, ServerOptions};

/// Serves a store on these listeners until `control` ends it; then everything is closed.
///
/// Must run inside a [`LocalSet`](tokio::task::LocalSet) on a runtime with I/O and time. Several listeners serve one
/// table. Dropping the future closes everything too.
pub async fn serve(listeners: Vec<TcpListener>, options: ServerOptions, mut control: Control) -> Ended {
    let hub = Hub::new(options, control.counters.clone());
    let _closing = CloseAll(hub.clone());
    let mut accepting = JoinSet::new();
    let logging = hub.clone();
    accepting.spawn_local(async move { logging.log.summarise().await });
    for listener in listeners {
        accepting.spawn_local(accept_all(hub.clone(), listener));
    }

    // Whether owners decide about the end, and those that are left.
    let (mut owned, mut owners) = (false, HashSet::new());
    let mut drain_until = None;
    let mut steered = true;
    let ended = loop {
        tokio::select! {
            command = control.commands.recv(), if steered => match command {
                Some(Command::Stop) => break Ended::Stopped,
                Some(Command::StopWhenClosed(peer)) => {
                    owned = true;
                    owners.extend(hub.find(peer));
                    control.expected.told();
                }
                Some(Command::GiveUpOwner) => {
                    owned = true;
                    control.expected.told();
                }
                Some(Command::Drain(timeout)) => drain_until = Some(Instant::now() + timeout.min(FOREVER)),
                None if !owned && drain_until.is_none() => break Ended::Stopped,
                // Nobody is left to keep a promise.
                None => {
                    control.expected.end();
                    steered = false;
                }
            },
            () = hub.closed.notified() => {}
            () = sleep_until(drain_until.unwrap_or_else(Instant::now)), if drain_until.is_some() => {
                break Ended::DrainTimedOut;
            }
        }
        owners.retain(|&id| hub.is_open(id));
        // Draining was asked for in so many words, so the owners' going does not cut it short.
        match drain_until {
            Some(_) if hub.open_count() == 0 => break Ended::Drained,
            None if owned && owners.is_empty() && control.expected.end_if_none() => break Ended::OwnerGone,
            _ => {}
        }
    };

    control.expected.end();
    accepting.shutdown().await;
    let mut tasks = hub.tasks.take();
    tasks.shutdown().await;
    tracing::debug!(target: LOG_TARGET, ?ended, "server ended");
    ended
}

/// Ends the connections' tasks, which hold the hub that holds them, and says what the log has left out.
struct CloseAll(Rc<Hub>);

impl Drop for CloseAll {
    fn drop(&mut self) {
        self.0.tasks.borrow_mut().abort_all();
        self.0.log.end();
    }
}

async fn accept_all(hub: Rc<Hub>, listener: TcpListener) {
    let mut delay = FIRST_DELAY;
    let mut last_kind = None;
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                (delay, last_kind) = (FIRST_DELAY, None);
                // An IPv4 client of a listener for both is shown as one.
                let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
                accept(&hub, stream, peer);
                // A flood of connections must not keep the open ones from being served.
                tokio::task::yield_now().await;
            }
            // The client was faster in giving up.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            // Most likely no descriptor is free, and the next attempt would fail as fast.
            Err(error) => {
                hub.counters.accept_errors.fetch_add(1, Relaxed);
                if last_kind.replace(error.kind()) != Some(error.kind()) && hub.log.admits(ACCEPT_ERROR) {
                    tracing::warn!(target: LOG_TARGET, %error, "cannot accept connections, trying again");
                }
                sleep(delay).await;
                delay = (delay * 2).min(LONGEST_DELAY);
            }
        }
    }
}

fn accept(hub: &Rc<Hub>, stream: TcpStream, peer: SocketAddr) {
    hub.counters.connections_accepted.fetch_add(1, Relaxed);
    let mut tasks = hub.tasks.borrow_mut();
    while let Some(ended) = tasks.try_join_next() {
        if let Err(error) = ended {
            tracing::error!(target: LOG_TARGET, %error, "a connection's task failed: this is a bug");
        }
    }
    drop(tasks);
    if hub.taken_places() >= hub.options.max_connections {
        let detail = format!("limit max_connections = {}", hub.options.max_connections);
        return hub.reject(peer, &Rejection::new(Cause::TooManyConnections, detail));
    }
    let options = &hub.options;
    let keepalive = TcpKeepalive::new().with_time(options.keepalive_idle).with_interval(options.keepalive_interval);
    // Neither is vital, and on a connection that is already dead both fail.
    let _ = stream.set_nodelay(true);
    let _ = SockRef::from(&stream).set_tcp_keepalive(&keepalive);
    tracing::debug!(target: LOG_TARGET, %peer, "connection accepted");
    hub.tasks.borrow_mut().spawn_local(connection::run(hub.clone(), stream, peer));
}

/// The kind of record, beside those of [`Cause`].
const ACCEPT_ERROR: &str = "accept_error";

const FIRST_DELAY: Duration = Duration::from_millis(5);
const LONGEST_DELAY: Duration = Duration::from_secs(1);

/// Longer than any job, and short enough to add to any instant.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 86_400);
