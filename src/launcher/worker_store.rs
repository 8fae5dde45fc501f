//! The empty worker store that a node opens for each round.
//!
//! Owns the choice of the address on which it listens. The node that gets rank 0 serves the workers of the round with its
//! store. A store listens where workers look for it and nowhere else, as far as that is known
//! (`docs/decisions/0017-every-node-opens-a-worker-store-before-it-joins.md`). With a tunnel ([`super::tunnel`]) that is loopback, and
//! the tunnel's acceptor listens where other nodes look.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use super::tunnel::{Trust, Tunnel};
use crate::net::listen::{bind, bind_wildcard};
use crate::rendezvous::conf::{StoreMembers, StorePeers};
use crate::rendezvous::messages::message::{JoinWorkers, Placement};
use crate::rendezvous::node::JoinError;
use crate::rendezvous::node::session::Session;
use crate::secure::acceptor::Acceptor;
use crate::store::server::{LocalPeers, Members, ServerOptions, StoreServer};

/// The store at `MASTER_ADDR:MASTER_PORT`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WorkersStore {
    /// The node with rank 0 serves an empty one for each round. Default.
    #[default]
    Node,
    /// The worker with rank 0 opens it, at the address and port of its node's (`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`).
    Worker,
    /// It is the endpoint's, which the coordinator empties for each round (`--rdzv-backend=static`).
    Elsewhere,
}

/// From where the worker stores of a node must be reachable, and by whom.
#[derive(Clone, Debug, Default)]
pub struct Reach {
    /// The address at which other nodes find this one, if the user has given it (`--local-addr`).
    pub local_addr: Option<String>,
    /// The job never has another node (`max_nodes=1`), so all workers are on this machine.
    pub alone: bool,
    /// The coordinator listens on loopback alone, so that all nodes are on this machine.
    pub on_one_machine: bool,
    /// Which store the workers of a round share.
    pub workers_store: WorkersStore,
    /// Which users of this machine may connect to them (`--rdzv-conf store_peers`).
    pub peers: StorePeers,
    /// What they do with connections from machines without members (`--rdzv-conf store_members`).
    pub members: StoreMembers,
}

const WAY_OUT: &str =
    "give --rdzv-conf store_peers=any to the agents if the job's workers, or a proxy before them, have other users";

const WAY_OUT_OF_MEMBERS: &str =
    "if it belongs to the job, its address was translated on the way: give --rdzv-conf store_members=off to the agents";

/// What a node keeps open for the workers of a round. Dropping it closes all of it.
#[derive(Debug, Default)]
pub struct RoundStore {
    /// An end of the round's tunnels.
    pub(super) tunnel: Option<Tunnel>,
    /// The round's store, if this node serves it.
    pub(super) server: Option<StoreServer>,
}

/// A store that has been opened before it is known whether this node serves it.
struct Opened {
    server: StoreServer,
    /// The listener of the tunnel's acceptor, if workers of other nodes come through a tunnel.
    acceptor: Option<TcpListener>,
}

impl Opened {
    /// The port that other nodes get.
    fn port(&self) -> io::Result<u16> {
        let address = self.acceptor.as_ref().map_or(Ok(self.server.local_addr()), TcpListener::local_addr);
        address.map(|address| address.port())
    }
}

/// Opens the worker stores of a node.
#[derive(Clone, Debug)]
pub struct Opener {
    reach: Reach,
    /// Workers reach the store through tunnels.
    trust: Option<Trust>,
    /// Where other nodes' agents prove themselves, from the first round on.
    acceptor: Option<Arc<Acceptor>>,
    /// It has been logged that the stores listen on all addresses.
    logged: bool,
}

impl Opener {
    /// With `trust`, workers reach the store through tunnels.
    pub fn new(reach: Reach, trust: Option<Trust>) -> Self {
        let trust = trust.filter(|_| reach.workers_store == WorkersStore::Node);
        Self { reach, trust, acceptor: None, logged: false }
    }

    /// Take part in the next round with a new store. Returns the placement as this node's workers see it, and what is kept open for
    /// them.
    ///
    /// # Errors
    /// As [`Session::join`]. `Connection` also if the store, or a tunnel, cannot listen.
    pub async fn join(
        &mut self,
        session: &Session,
        node_rank: Option<u32>,
        workers: Option<JoinWorkers>,
        timeout: Duration,
    ) -> Result<(Placement, RoundStore), JoinError> {
        let mut opened: Option<Opened> = None;
        let open = |addr: &str| {
            // The address has changed since, but other nodes have got the port.
            let port = match opened.take() {
                Some(before) => before.port()?,
                None => 0,
            };
            let new = self.open(addr, port).or_else(|error| if port == 0 { Err(error) } else { self.open(addr, 0) })?;
            opened.insert(new).port()
        };
        let mut placement = session.join_opening(open, node_rank, workers, timeout).await?;
        let opened = opened.ok_or_else(|| JoinError::connection("no store was opened for workers"))?;
        if placement.rank == 0 {
            // Whoever comes through a tunnel is proven.
            let members = if self.trust.is_some() { None } else { self.reach.members_of(&placement)? };
            opened.server.controller().open_to(members);
        }
        if self.reach.alone && opened.server.local_addr().ip().is_loopback() {
            placement.master_addr = opened.server.local_addr().ip().to_string();
        }
        let kept = self.keep(opened, &mut placement);
        let kept = kept.map_err(|error| JoinError::connection(format!("cannot open the workers' tunnel: {error}")))?;
        Ok((placement, kept))
    }

    /// Keep open what this node's part in the round needs, and give its workers the address.
    fn keep(&self, Opened { server, acceptor: listener }: Opened, placement: &mut Placement) -> io::Result<RoundStore> {
        let serves = placement.rank == 0 && self.reach.workers_store == WorkersStore::Node;
        let (Some(listener), Some(trust), Some(acceptor)) = (listener, &self.trust, &self.acceptor) else {
            return Ok(RoundStore { tunnel: None, server: serves.then_some(server) });
        };
        let store = server.local_addr();
        let (kept, near) = if serves {
            let tunnel = Tunnel::to_own_store(listener, store, Arc::clone(acceptor), trust.run_id.clone())?;
            (RoundStore { tunnel: Some(tunnel), server: Some(server) }, store)
        } else {
            let to = (placement.master_addr.clone(), placement.master_port);
            let tunnel = Tunnel::to_rank_0(bind_loopback(0)?, to, trust.clone(), self.reach.local_peers())?;
            let near = tunnel.local_addr();
            (RoundStore { tunnel: Some(tunnel), server: None }, near)
        };
        (placement.master_addr, placement.master_port) = (near.ip().to_string(), near.port());
        Ok(kept)
    }

    /// Opens a store for workers that look for this node at `addr`.
    fn open(&mut self, addr: &str, port: u16) -> io::Result<Opened> {
        let (listener, acceptor) = match (&self.trust, self.reach.alone) {
            (None, _) => (self.listen(addr, port)?, None),
            (Some(_), true) => (bind_loopback(port)?, None),
            (Some(trust), false) => {
                if self.acceptor.is_none() {
                    let acceptor = Acceptor::new(Arc::clone(&trust.protection)).map_err(io::Error::other)?;
                    self.acceptor = Some(Arc::new(acceptor));
                }
                (bind_loopback(0)?, Some(self.listen(addr, port)?))
            }
        };
        // Nobody needs the store of a node that may not get rank 0.
        let local_peers = self.reach.local_peers();
        let options = ServerOptions { local_peers, opens_on_request: true, ..ServerOptions::default() };
        Ok(Opened { server: StoreServer::start(vec![listener], options)?, acceptor })
    }

    /// Listens where others look that find this node at `addr`.
    fn listen(&mut self, addr: &str, port: u16) -> io::Result<TcpListener> {
        let own = match self.reach.own_address(addr) {
            Ok(ip) => bind(SocketAddr::new(ip, port)).map_err(|error| error.source),
            Err(why) => Err(io::Error::other(why)),
        };
        match own {
            Ok(listener) => Ok(listener),
            Err(_) if self.reach.is_local() => bind_loopback(port),
            Err(why) => {
                if !std::mem::replace(&mut self.logged, true) {
                    tracing::info!(
                        target: "elastic_rs::rendezvous",
                        "the stores of this node's workers listen on all addresses, since others find it at `{addr}`: {why}"
                    );
                }
                bind_wildcard(port).map_err(|error| io::Error::other(error.to_string()))
            }
        }
    }
}

fn bind_loopback(port: u16) -> io::Result<TcpListener> {
    let loopback = |ip: IpAddr| bind(SocketAddr::new(ip, port));
    let listener = loopback(Ipv4Addr::LOCALHOST.into()).or_else(|_| loopback(Ipv6Addr::LOCALHOST.into()));
    listener.map_err(|error| io::Error::other(error.to_string()))
}

impl Reach {
    /// From where workers connect to the store of the round with this place. `None`: from everywhere.
    fn members_of(&self, placement: &Placement) -> Result<Option<Members>, JoinError> {
        let strict = self.members == StoreMembers::Strict;
        match &placement.members {
            _ if self.members == StoreMembers::Off || self.is_local() => Ok(None),
            Some(addresses) => Ok(Some(Members::new(addresses, strict, WAY_OUT_OF_MEMBERS))),
            None if strict => Err(JoinError::connection(
                "--rdzv-conf store_members=strict needs the addresses of the round's members, and the coordinator sent none, \
                 because there are too many; give store_members=warn",
            )),
            None => Ok(None),
        }
    }

    /// Which users of this machine may connect.
    fn local_peers(&self) -> LocalPeers {
        match self.peers {
            StorePeers::SameUser => LocalPeers::SameUser { way_out: WAY_OUT },
            StorePeers::Any => LocalPeers::Any,
        }
    }

    /// Whether all nodes of the job are on this machine.
    fn is_local(&self) -> bool {
        self.alone || self.workers_store == WorkersStore::Elsewhere
    }

    /// The one address to listen on. The error says why it is not known.
    fn own_address(&self, addr: &str) -> Result<IpAddr, &'static str> {
        let given = self.local_addr.as_deref();
        if given.is_none() && self.is_local() {
            return Ok(Ipv4Addr::LOCALHOST.into());
        }
        let ip: IpAddr = given.unwrap_or(addr).parse().map_err(|_| "a name may mean another address to them")?;
        if given.is_none() && ip.is_loopback() && !self.on_one_machine {
            // The coordinator runs here. Nodes elsewhere get the address by which they reached it.
            return Err("nodes on other machines would not find it there");
        }
        Ok(ip)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The address on which the store of a node listens that is announced under `addr`.
    fn listens(reach: &Reach, addr: &str) -> IpAddr {
        Opener::new(reach.clone(), None).open(addr, 0).unwrap().server.local_addr().ip()
    }

    #[test]
    fn a_store_listens_where_workers_look_for_it() {
        let localhost: IpAddr = Ipv4Addr::LOCALHOST.into();
        let alone = Reach { alone: true, ..Reach::default() };
        for addr in ["127.0.0.1", "198.51.100.1", "node1"] {
            assert_eq!(listens(&alone, addr), localhost, "alone, seen as {addr}");
        }
        let given = |addr: &str| Reach { local_addr: Some(addr.to_owned()), ..Reach::default() };
        assert_eq!(listens(&given("127.0.0.3"), "127.0.0.3").to_string(), "127.0.0.3");
        assert_eq!(listens(&Reach { alone: true, ..given("127.0.0.3") }, "127.0.0.3").to_string(), "127.0.0.3");
        assert_eq!(listens(&Reach { alone: true, ..given("node1") }, "node1"), localhost);
        assert_eq!(listens(&Reach { on_one_machine: true, ..Reach::default() }, "127.0.0.1"), localhost);
        // The address at which other nodes find this one is not known here, or is not this machine's.
        for addr in ["127.0.0.1", "198.51.100.1"] {
            assert!(listens(&Reach::default(), addr).is_unspecified(), "seen as {addr}");
        }
        for addr in ["node1", "198.51.100.1"] {
            assert!(listens(&given(addr), addr).is_unspecified(), "given as {addr}");
        }
    }
}
