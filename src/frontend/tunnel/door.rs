//! The end of a tunnel at rank 0's node, where the other nodes' agents prove themselves.

use std::net::SocketAddr;
use std::sync::Arc;

use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::timeout;

use super::listener::{Listener, prepare};
use super::relay::relay;
use crate::bounded_log::BoundedLog;
use crate::secure::Halves;
use crate::secure::door::{Door, FIRST_BYTES, LIMIT, hall, late};
use crate::secure::refusals::{Kind, Refusal};

/// A connection whose peer has not proven itself.
struct Stranger {
    stream: TcpStream,
    peer: SocketAddr,
    /// Its place. Strangers without one wait in the kernel's queue.
    place: OwnedSemaphorePermit,
}

/// Connect all agents of the job to this node's store. Never ends.
pub(super) async fn serve(
    listener: Listener,
    store: SocketAddr,
    door: Arc<Door>,
    run_id: String,
    log: Arc<BoundedLog>,
) {
    let places = Arc::new(Semaphore::new(2 * door.places()));
    let (to_hall, strangers) = mpsc::unbounded_channel();
    let accepting = async {
        // The semaphore is never closed.
        while let Ok(place) = Arc::clone(&places).acquire_owned().await {
            let (stream, peer) = listener.accept(&log).await;
            // The hall ends with this future.
            let _ = to_hall.send(Stranger { stream, peer, place });
        }
    };
    let welcome = |stranger: Stranger| {
        let (door, run_id, log) = (Arc::clone(&door), run_id.clone(), Arc::clone(&log));
        async move {
            let peer = stranger.peer;
            let refused = |refusal: &Refusal| {
                let words = door.protection().refuse(refusal);
                if log.admits("unproven") {
                    tracing::warn!(
                        target: "elastic_rs::rendezvous", %peer,
                        "[{run_id}] a connection to the workers' store is refused: {words}"
                    );
                }
            };
            admit(stranger, &door, &run_id).await.inspect_err(refused).ok()
        }
    };
    let proven = |client| {
        tokio::spawn(carry(client, store, run_id.clone(), Arc::clone(&log)));
    };
    let lost = |refusal: Refusal| {
        let words = door.protection().refuse(&refusal);
        if log.admits("crowded") {
            tracing::warn!(target: "elastic_rs::rendezvous", "[{run_id}] a connection to the workers' store is refused: {words}");
        }
    };
    tokio::select! {
        () = accepting => {}
        () = hall((door.helpers(), door.places()), strangers, welcome, proven, lost) => {}
    }
}

/// Let an agent of this job prove itself.
async fn admit(stranger: Stranger, door: &Door, run_id: &str) -> Result<Halves, Refusal> {
    let Stranger { stream, place: _place, .. } = stranger;
    let mut first = [0; 1];
    let no_tls = |why: &str| Err(Refusal::new(Kind::NoTls, why));
    match timeout(LIMIT, stream.peek(&mut first)).await {
        Ok(Ok(1)) if first[0] == FIRST_BYTES[0] => {}
        Ok(Ok(1)) if first[0] == 0 => {
            return no_tls("a c10d client has come without its agent: give all nodes --rdzv-conf store_tunnel=1");
        }
        Ok(Ok(1)) => return no_tls(door.protection().lacking()),
        Ok(Ok(_)) => return no_tls("it closed the connection before its proof"),
        Ok(Err(error)) => return no_tls(&error.to_string()),
        Err(_) => return Err(late()),
    }
    let (client, pass) = door.admit_to_tunnel(stream).await?;
    match pass.admits_node_of(run_id) {
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
