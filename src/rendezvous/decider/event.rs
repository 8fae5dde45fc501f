//! What goes into a run, and what comes out of it.

use std::net::IpAddr;
use std::time::Duration;

use crate::rendezvous::protocol::message::{CoordinatorMessage, Hello, NodeId, NodeMessage};

/// One connection of a node, numbered by the driver. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

/// The two ends of a session's connection, as the coordinator's host sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ends {
    /// The node's address.
    pub peer: IpAddr,
    /// The address by which the node reached the coordinator.
    pub local: IpAddr,
}

/// The process that a coordinator runs in, as the coordinator itself knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Home {
    /// Number of the process, as in [`Hello::process`]: tells which node is in it.
    pub process: u64,
    /// Where it listens: a digest of the machine's boot, its network namespace, and the addresses with their port. The kernel
    /// gives them to one listener at a time. `None` if the system does not tell.
    pub place: Option<u64>,
    /// Another number of the process, which all members may know.
    pub life: u64,
}

/// How a node is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Over a connection with these ends, in a coordinator.
    Connection(Ends),
    /// Over a shared cell: the node gives its own address ([`Hello::local_addr`]), which nobody can check.
    Cell,
}

/// Something has happened to a run.
#[derive(Clone, Debug)]
pub enum Event {
    /// A node introduced itself.
    Hello {
        /// Its words, which are [valid](Hello::validate).
        hello: Box<Hello>,
        /// The new connection.
        session: SessionId,
        /// Its ends.
        reach: Reach,
        /// The process that the coordinator is in, if it is known.
        home: Option<Home>,
    },
    /// A node said something.
    Message {
        /// The node.
        node: NodeId,
        /// Its connection.
        session: SessionId,
        /// What it said.
        message: NodeMessage,
    },
    /// The node's connection has ended, for whatever reason.
    Disconnected {
        /// The node.
        node: NodeId,
    },
    /// The keeper of the nodes' leases (etcd) says that this node's has ended.
    LeaseEnded {
        /// The node.
        node: NodeId,
    },
    /// Time has passed.
    Tick,
    /// The decider itself stood still for this long: no node is silent because of that.
    Stalled {
        /// How late it is.
        late: Duration,
    },
    /// The nodes of this run, all of which have lost their connections, are given up before their grace is over.
    GiveUp {
        /// Why, in words.
        why: String,
    },
    /// The coordinator's process ends.
    CoordinatorEnds {
        /// What ends it, in words.
        why: String,
        /// Whether the world of this run must re-form because of it.
        interrupts: bool,
    },
}

/// What is to be done about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Send a message.
    Send {
        /// To which connection.
        session: SessionId,
        /// The message.
        message: CoordinatorMessage,
    },
    /// Close the connection once everything sent to it has left.
    End {
        /// Which.
        session: SessionId,
    },
    /// Tell the operator what was decided, and why.
    Note(String),
    /// The node in the coordinator's own process has left, so that process ends, and every run with it.
    HostLeft {
        /// Which node left, and why, in words.
        why: String,
        /// Whether the world of this run must re-form: not if the node was a spare, or had finished.
        interrupts: bool,
    },
}
