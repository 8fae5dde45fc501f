//! The end of a tunnel at rank 0's node, where the other nodes' agents prove themselves.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::connections::{Listener, prepare, relay};
use crate::bounded_log::BoundedLog;
use crate::net::admission::tasks::Task;
use crate::secure::Halves;
use crate::secure::acceptor::{Acceptor, FIRST_BYTES, LIMIT, late};
use crate::secure::handshakes::Handshakes;
use crate::secure::refusals::{Kind, Refusal};

/// A connection whose peer has not proven itself.
struct UnauthenticatedPeer {
    stream: TcpStream,
    peer: SocketAddr,
}

/// Connect all agents of the job to this node's store. Never ends.
pub(super) async fn serve(
    listener: Listener,
    store: SocketAddr,
    acceptor: Arc<Acceptor>,
    run_id: String,
    log: Arc<BoundedLog>,
) {
    let (to, mut proven) = mpsc::unbounded_channel();
    let handshakes = handshakes(acceptor, to, run_id.clone(), Arc::clone(&log));
    loop {
        tokio::select! {
            // The sender lives as long as the handshakes do.
            Some(client) = proven.recv() => {
                tokio::spawn(carry(client, store, run_id.clone(), Arc::clone(&log)));
            }
            (stream, peer) = listener.accept(&log) => handshakes.arrived(UnauthenticatedPeer { stream, peer }, peer.ip()),
        }
    }
}

/// Where the job's agents prove themselves.
fn handshakes(
    acceptor: Arc<Acceptor>,
    to: mpsc::UnboundedSender<Halves>,
    run_id: String,
    log: Arc<BoundedLog>,
) -> Handshakes<UnauthenticatedPeer> {
    let (helpers, protection) = (acceptor.helpers().clone(), Arc::clone(acceptor.protection()));
    let lost = {
        let (protection, run_id, log) = (Arc::clone(&protection), run_id.clone(), Arc::clone(&log));
        move |peer: IpAddr, refusal: &Refusal| {
            let why = protection.refuse(refusal);
            if log.admits_once(refusal.kind.name(), peer) {
                tracing::warn!(
                    target: "elastic_rs::rendezvous", %peer,
                    "[{run_id}] a connection to the workers' store is refused: {why}"
                );
            }
        }
    };
    let begin = move |client: UnauthenticatedPeer| -> Task {
        let (acceptor, to, run_id, log) = (Arc::clone(&acceptor), to.clone(), run_id.clone(), Arc::clone(&log));
        Box::pin(async move {
            let peer = client.peer;
            match admit(client, &acceptor, &run_id).await {
                // The tunnel may have ended.
                Ok(client) => to.send(client).is_ok(),
                Err(refusal) => {
                    let why = acceptor.protection().refuse(&refusal);
                    if log.admits_once(refusal.kind.name(), peer.ip()) {
                        tracing::warn!(
                            target: "elastic_rs::rendezvous", %peer,
                            "[{run_id}] a connection to the workers' store is refused: {why}"
                        );
                    }
                    false
                }
            }
        })
    };
    Handshakes::new(helpers, protection, begin, lost)
}

/// Let an agent of this job prove itself.
async fn admit(client: UnauthenticatedPeer, acceptor: &Acceptor, run_id: &str) -> Result<Halves, Refusal> {
    let UnauthenticatedPeer { stream, .. } = client;
    let mut first = [0; 1];
    let no_tls = |why: &str| Err(Refusal::new(Kind::NoTls, why));
    match timeout(LIMIT, stream.peek(&mut first)).await {
        Ok(Ok(1)) if first[0] == FIRST_BYTES[0] => {}
        Ok(Ok(1)) if first[0] == 0 => {
            return no_tls(
                "a c10d client has connected without its agent's tunnel: give all nodes --rdzv-conf store_tunnel=1",
            );
        }
        Ok(Ok(1)) => return no_tls(acceptor.protection().lacking()),
        Ok(Ok(_)) => return no_tls("it closed the connection before it authenticated"),
        Ok(Err(error)) => return no_tls(&error.to_string()),
        Err(_) => return Err(late()),
    }
    let (client, identity) = acceptor.admit_to_tunnel(stream).await?;
    match identity.admits_node_of(run_id) {
        Ok(()) => Ok(client),
        Err(why) => Err(Refusal { kind: Kind::Forbidden, why }),
    }
}

async fn carry(client: Halves, store: SocketAddr, run_id: String, log: Arc<BoundedLog>) {
    let carried = async {
        let stream = TcpStream::connect(store).await?;
        prepare(SockRef::from(&stream))?;
        relay(client, Halves::plain(stream)).await
    };
    if let Err(error) = carried.await
        && log.admits("broken")
    {
        tracing::info!(
            target: "elastic_rs::rendezvous",
            "[{run_id}] a connection through the tunnel to this node's store has ended: {error}"
        );
    }
}
