//! Drives a [`NodeMachine`] over its connection to the coordinator, in one task.

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;
use tokio::time::timeout;

use super::dial::{CONNECT_TIMEOUT, Dialled, dial};
use super::shared::Shared;
use super::status_log::StatusLog;
use super::{NodeCommand, NodeMachine};
use crate::clock::until;
use crate::rendezvous::messages::codec;
use crate::rendezvous::messages::frames::read_message;
use crate::rendezvous::messages::message::CoordinatorMessage;
use crate::secure::{Halves, Protection, Reader, Writer};
use crate::store::probe::speaks_c10d;

/// How often it is logged that authentication with the coordinator failed.
const UNPROVEN_EVERY: Duration = Duration::from_secs(30);
/// Time for the last bytes of a connection.
const FAREWELL: Duration = Duration::from_secs(5);

/// The coordinator's endpoints, the address of this machine to connect from, if one was requested, and how the session is protected.
#[derive(Debug)]
pub(super) struct Endpoint {
    /// Where the coordinator may be; at least one.
    pub hosts: Vec<(String, u16)>,
    pub source: Option<IpAddr>,
    /// Which of these is this process's own, and where that is, if it may not reach it at the endpoint's address.
    pub own: Option<(usize, SocketAddr)>,
    pub protection: Option<Arc<Protection>>,
}

/// The open connection.
struct Connection {
    reader: Reader,
    writer: Writer,
    incoming: BytesMut,
    outgoing: BytesMut,
    /// Something was written since the last flush.
    unflushed: bool,
}

/// Drive the machine until the node has left.
pub(super) async fn drive(machine: Arc<Mutex<NodeMachine>>, shared: Arc<Shared>, endpoint: Endpoint) {
    let Endpoint { hosts, mut source, own, protection } = endpoint;
    let mut connection: Option<Connection> = None;
    let mut connecting = None;
    let mut probing = None;
    let mut status_log = StatusLog::default();
    let mut unproven = None;
    loop {
        let (commands, deadline, left, news, run_id, place) = {
            let mut machine = machine.lock();
            let now = Instant::now();
            machine.on_tick(now);
            let news = status_log.look(&machine, now);
            let deadline = [machine.next_deadline(), status_log.next_deadline(&machine)].into_iter().flatten().min();
            (machine.take_commands(), deadline, machine.has_left(), news, machine.run_id().to_owned(), machine.place())
        };
        for text in news {
            tracing::warn!("[{run_id}] {text}");
        }
        let Some((host, port)) = hosts.get(place).or(hosts.first()) else { return };
        let mut unsent = None;
        for command in commands {
            match command {
                NodeCommand::Connect => {
                    let secured = protection.clone().map(|protection| (protection, run_id.clone()));
                    let at = own.filter(|own| own.0 == place).map(|own| own.1);
                    connecting = Some(Box::pin(dial(host.clone(), *port, at, source, secured, None)));
                }
                NodeCommand::Disconnect => (connection, connecting) = (None, None),
                NodeCommand::Probe => probing = Some(Box::pin(speaks_c10d(host, *port, CONNECT_TIMEOUT))),
                NodeCommand::Send(message) => {
                    if let Some(open) = &mut connection {
                        unsent = codec::try_encode_frame(&message, &mut open.outgoing).err().or(unsent);
                    }
                }
            }
        }
        if let Some(error) = unsent {
            tracing::error!("[{run_id}] a message to the coordinator cannot be sent, which is a bug: {error}");
            connection = None;
            machine.lock().on_disconnected(error.to_string(), false, Instant::now());
            continue;
        }
        shared.on_step();
        if left {
            if let Some(mut connection) = connection {
                let last = async {
                    connection.writer.write_all(&connection.outgoing).await?;
                    connection.writer.flush().await?;
                    connection.writer.shutdown().await
                };
                let _ = timeout(FAREWELL, last).await;
            }
            shared.gone.send_replace(true);
            return;
        }

        tokio::select! {
            biased;
            () = shared.requested.notified() => {}
            happened = step(&mut connection) => {
                let mut machine = machine.lock();
                match happened {
                    Happened::Sent => {}
                    Happened::Received(message) => machine.on_message(*message, Instant::now()),
                    Happened::Ended { cause, foreign } => {
                        connection = None;
                        machine.on_disconnected(cause, foreign, Instant::now());
                    }
                }
            }
            opened = wait_for(&mut connecting) => {
                connecting = None;
                let mut machine = machine.lock();
                match opened {
                    Ok(Dialled { link: Halves { reader, writer }, from_source, local, .. }) => {
                        if machine.wants_life() {
                            machine.lives_at(local.and_then(|local| shared.live_at(local)));
                        }
                        // If the requested address does not work, later connections do not wait for it.
                        source = source.filter(|_| from_source);
                        let mut outgoing = BytesMut::new();
                        codec::encode_preamble(&mut outgoing);
                        connection = Some(Connection { reader, writer, incoming: BytesMut::new(), outgoing, unflushed: false });
                        unproven = None;
                        machine.on_connected(Instant::now());
                    }
                    Err(error) if error.out_of_descriptors => machine.on_out_of_descriptors(error.text, Instant::now()),
                    Err(error) => {
                        // The operator has to mend it. It is no verdict, since an unauthenticated peer may have caused it.
                        if error.unproven && unproven.is_none_or(|logged: Instant| logged.elapsed() >= UNPROVEN_EVERY) {
                            tracing::warn!("[{run_id}] authentication with the coordinator failed: {}", error.text);
                            unproven = Some(Instant::now());
                        }
                        machine.on_connect_failed(error.text, error.refused, Instant::now());
                    }
                }
            }
            speaks_c10d = wait_for(&mut probing) => {
                probing = None;
                machine.lock().on_probed(speaks_c10d);
            }
            () = until(deadline) => {}
        }
    }
}

enum Happened {
    Sent,
    Received(Box<CoordinatorMessage>),
    Ended { cause: String, foreign: bool },
}

/// The next thing that happens on the connection. Dropping the future loses nothing.
async fn step(connection: &mut Option<Connection>) -> Happened {
    let Some(Connection { reader, writer, incoming, outgoing, unflushed }) = connection else {
        return std::future::pending().await;
    };
    let ended = |cause: String| Happened::Ended { cause, foreign: false };
    tokio::select! {
        message = read_message::<CoordinatorMessage>(reader, incoming) => match message {
            Ok(Some(message)) => match message.validate() {
                Ok(()) => Happened::Received(Box::new(message)),
                Err(cause) => Happened::Ended { cause, foreign: true },
            },
            Ok(None) => ended("the coordinator closed the connection".to_owned()),
            Err(error) => Happened::Ended { cause: error.to_string(), foreign: true },
        },
        written = write(writer, outgoing, unflushed), if !outgoing.is_empty() || *unflushed => match written {
            Ok(()) => Happened::Sent,
            Err(error) => ended(error.to_string()),
        },
    }
}

/// Write as much as the connection takes, and flush what was written once all of it is. Dropping the future loses nothing.
async fn write(writer: &mut Writer, outgoing: &mut BytesMut, unflushed: &mut bool) -> io::Result<()> {
    if outgoing.is_empty() {
        writer.flush().await?;
        *unflushed = false;
    } else {
        writer.write_buf(outgoing).await?;
        *unflushed = true;
    }
    Ok(())
}

async fn wait_for<F: Future + Unpin>(pending: &mut Option<F>) -> F::Output {
    match pending {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}
