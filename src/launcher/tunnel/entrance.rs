//! The end of a tunnel where workers connect to their own agent.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use socket2::SockRef;
use tokio::net::TcpStream;

use super::Trust;
use super::connections::{Listener, prepare, relay};
use crate::bounded_log::BoundedLog;
use crate::net::local_peers::{LocalPeerCheck, Verdict};
use crate::secure::Halves;

/// How long opening a connection to rank 0's node may take. PyTorch's client tries again until its own time limit.
const CONNECT_LIMIT: Duration = Duration::from_secs(15);

/// Where this node's connections lead.
struct Way {
    host: String,
    port: u16,
    trust: Trust,
    log: Arc<BoundedLog>,
}

/// Carry all connections of this node's workers. `check`: of the users that connect. Never ends.
pub(super) async fn serve(
    listener: Listener,
    (host, port): (String, u16),
    trust: Trust,
    mut check: Option<LocalPeerCheck>,
    log: Arc<BoundedLog>,
) {
    let way = Arc::new(Way { host, port, trust, log });
    loop {
        let (stream, peer) = listener.accept(&way.log).await;
        if is_admitted(check.as_mut(), &stream, peer, &way.log) {
            tokio::spawn(carry(stream, Arc::clone(&way)));
        }
    }
}

/// Whether this user may have its connection proven by this agent.
fn is_admitted(check: Option<&mut LocalPeerCheck>, stream: &TcpStream, peer: SocketAddr, log: &BoundedLog) -> bool {
    let Some(check) = check else { return true };
    match check.judge(stream, peer) {
        Verdict::Admit => true,
        Verdict::Refuse(user) => {
            if log.admits("other_user") {
                let detail = check.refusal(user);
                tracing::warn!(target: "elastic_rs::rendezvous", %peer, "a connection to the store's tunnel is refused: {detail}");
            }
            false
        }
        Verdict::Gone => false,
    }
}

async fn carry(stream: TcpStream, way: Arc<Way>) {
    let Way { host, port, trust: Trust { protection, run_id }, log } = &*way;
    let to = (host.as_str(), *port);
    match protection.connect(to, run_id, CONNECT_LIMIT, |stream| prepare(SockRef::from(stream))).await {
        Ok(server) => {
            if let Err(error) = relay(Halves::plain(stream), server).await
                && log.admits("broken")
            {
                tracing::info!(
                    target: "elastic_rs::rendezvous",
                    "[{run_id}] a worker's connection through the tunnel to the store at {host}:{port} has ended: {error}"
                );
            }
        }
        Err(why) => {
            if log.admits("not_opened") {
                tracing::warn!(
                    target: "elastic_rs::rendezvous",
                    "[{run_id}] a worker's connection is closed, because the tunnel to rank 0's store at {host}:{port} cannot be \
                     opened: {why}. All nodes of a job need the same token, or certificates of one CA, and the same --rdzv-conf store_tunnel"
                );
            }
        }
    }
}
