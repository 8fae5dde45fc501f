//! What happens in a job, and what is sent in it.

use std::fmt::{self, Write as _};

use super::plan::Action;
use crate::engine::paths::{End, HostId};
use crate::engine::queue::Time;
use elastic_rs::rendezvous::coordinator::ensemble::PeerMessage;
use elastic_rs::rendezvous::messages::message::{CoordinatorMessage, NodeId, NodeMessage, PeerHello};
use elastic_rs::rendezvous::run::SessionId;

/// Number of a process, never reused.
pub(super) type Pid = u64;

/// An event.
#[derive(Clone, Debug)]
pub enum Event {
    /// A fault, a start, or something that an agent does by itself.
    Act(Action),
    /// A process that stood still goes on.
    Resume(HostId),
    /// An attempt to connect arrives at the host that it is meant for.
    Arrives(SessionId),
    /// The connection is open, as the end that has connected learns.
    Opened(SessionId),
    /// Nobody listens there.
    Refused(SessionId),
    /// The attempt has got no answer.
    TimedOut(SessionId),
    /// A message arrives at an end.
    Deliver(SessionId, End, Payload),
    /// The connection has ended, as this end learns. True: it was reset.
    Ended(SessionId, End, bool),
    /// A process connects to the process at another endpoint. The number says which attempt this is.
    Dial(HostId, Pid, usize, u64),
    /// The deadline of a machine of this process.
    Tick(HostId, Pid),
    /// The guards of these workers look at their deadline.
    Guards(HostId, u64),
    /// The last of these workers has ended. Its process may stand still.
    WorkersEnd(HostId, u64),
    /// Its process notices that.
    WorkersEnded(HostId, Pid),
    /// A process that has left ends.
    Exit(HostId, Pid),
    /// The port by which it is known whether a process lives is tried.
    Knock(Knock),
    /// It was refused: the process has ended.
    ProcessEnded(HostId, Pid, NodeId),
    /// Somebody must lead by now, if no fault has happened since the number of faults has been this.
    MustLead(u64),
}

/// An attempt to connect to the port of a node's process, whose session has ended.
#[derive(Clone, Copy, Debug)]
pub struct Knock {
    /// Who tries.
    pub(super) by: (HostId, Pid),
    /// The process.
    pub(super) at: (HostId, Pid),
    pub(super) node: NodeId,
    /// When it was tried first, and how long the next pause is.
    pub(super) since: Time,
    pub(super) pause: Time,
}

/// What is sent over a connection.
#[derive(Clone)]
pub enum Payload {
    /// From a node.
    FromNode(Box<NodeMessage>),
    /// To a node.
    ToNode(Box<CoordinatorMessage>),
    /// The introduction of a process to another one of the list.
    Introduction(Box<PeerHello>),
    /// The answer: this process is here.
    Here(NodeId),
    /// From one process to another.
    Peer(Box<PeerMessage>),
}

/// Most characters of a message in a history.
const SHOWN: usize = 200;

impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = Beginning(String::new());
        // It ends with an error once it is long enough, which saves making the rest.
        let _ = match self {
            Self::FromNode(message) => write!(text, "{message:?}"),
            Self::ToNode(message) => write!(text, "{message:?}"),
            Self::Introduction(hello) => {
                write!(text, "Introduction of {:x} at {}", hello.process.0 as u32, hello.place)
            }
            Self::Here(process) => write!(text, "Here is {:x}", process.0 as u32),
            Self::Peer(message) => write!(text, "{message:?}"),
        };
        f.write_str(&text.0)
    }
}

/// The beginning of a long text.
struct Beginning(String);

impl fmt::Write for Beginning {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.push_str(text);
        if self.0.len() < SHOWN { Ok(()) } else { Err(fmt::Error) }
    }
}
