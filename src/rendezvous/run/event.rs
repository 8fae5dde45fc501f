//! Events, the input of a run, and effects, its output.

use std::net::IpAddr;
use std::time::Duration;

use crate::events::record::{Kind, Record};
use crate::events::tally::Tally;
use crate::rendezvous::messages::message::{CoordinatorMessage, Hello, NodeId, NodeMessage};

/// One connection of a node, numbered by the driver. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

/// The two ends of a session's connection, as the coordinator's host sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ends {
    /// The node's address.
    pub peer: IpAddr,
    /// The coordinator's address, as the node dialled it.
    pub local: IpAddr,
}

/// The coordinator's own process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CoordinatorInstance {
    /// The number in the [`Hello::process`] of the node in this process.
    pub process: u64,
    /// Digest of the machine's boot id, its network namespace, and the addresses and port it listens on. The kernel gives them to
    /// one listener at a time. `None` if the system does not show it.
    pub instance_id: Option<u64>,
    /// A second number of the process. Unlike `process`, all members may know it.
    pub incarnation: u64,
}

/// The transport by which a node is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// A connection to a coordinator, with these ends.
    Connection(Ends),
    /// A shared cell. The node states its own address ([`Hello::local_addr`]), which cannot be checked.
    Cell,
}

/// An input of [`Run::apply`](super::Run::apply).
#[derive(Clone, Debug)]
pub enum Event {
    /// A node introduced itself.
    Hello {
        /// Its introduction, already [validated](Hello::validate).
        hello: Box<Hello>,
        /// The new connection.
        session: SessionId,
        /// The node's transport.
        reach: Reach,
        /// The coordinator's process, if it is known.
        instance: Option<CoordinatorInstance>,
    },
    /// A node sent a message.
    Message {
        /// The node.
        node: NodeId,
        /// Its connection.
        session: SessionId,
        /// The message.
        message: NodeMessage,
    },
    /// The node's connection has ended, for any reason.
    Disconnected {
        /// The node.
        node: NodeId,
    },
    /// The process of a node has ended, and with it the workers. Its connection has ended before.
    Dead {
        /// The node.
        node: NodeId,
    },
    /// The leases of these nodes have ended, as etcd reports. They are lost together, so that no round closes with one of them.
    LeasesEnded {
        /// The nodes.
        nodes: Vec<NodeId>,
    },
    /// Time has passed.
    Tick,
    /// Time has passed for the nodes that wait. Those that are lost by now are removed, and nothing else is decided.
    TickWaiting,
    /// Somebody watches, and wants to know how far the training is.
    Watched,
    /// The coordinator has seen how the training stands: to be recorded.
    Seen {
        /// What was seen.
        kind: Kind,
        /// The name of the node that it is about, if it is about one.
        node: Option<String>,
        /// Its sentence.
        text: String,
    },
    /// The training hangs, and its workers are to be restarted. [`Kind::HangFound`] was recorded.
    Hung {
        /// Who is waited for, in words.
        why: String,
        /// The last step that a node has told.
        step: Option<u64>,
    },
    /// The process that decides was stalled, so silence of the nodes proves nothing.
    Stalled {
        /// Delay of its timer.
        late: Duration,
    },
    /// Give up the disconnected nodes of this run before their grace is over. No node is connected.
    GiveUp {
        /// The reason, in words.
        why: String,
    },
    /// The coordinator's process ends.
    CoordinatorEnds {
        /// The cause, in words.
        why: String,
        /// Whether the world of this run must re-form because of it.
        interrupts: bool,
    },
}

/// An output of [`Run::apply`](super::Run::apply): what the driver must do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Send a message.
    Send {
        /// The connection.
        session: SessionId,
        /// The message.
        message: CoordinatorMessage,
    },
    /// Close the connection once everything sent to it has left.
    End {
        /// The connection.
        session: SessionId,
    },
    /// Keep an event, and log its sentence.
    Record(Record),
    /// Log this as a warning, which is no event.
    Warn(String),
    /// Count something that is no event.
    Tally(Tally),
    /// The hosts that are kept out have changed: [`Run::exclusions`](super::Run::exclusions).
    Exclusions,
    /// The workers of the next round use the endpoint's store, and must find it empty: replace its table before what follows is sent.
    EmptyStore,
    /// The node in the coordinator's own process has left. That process ends, and every run with it.
    HostLeft {
        /// The node and its reason, in words.
        why: String,
        /// Whether the world of this run must re-form: not if the node was a spare, or had finished.
        interrupts: bool,
    },
}
