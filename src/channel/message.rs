//! The messages between an agent and its workers.
//!
//! A worker may have another release of this package than its agent, from an environment of its own. So `Hello` has a version, and
//! `Hello` and `Refused` have the same bytes in every version.

use bytes::BytesMut;
use serde::{Deserialize, Serialize};

use crate::rendezvous::messages::codec::{CodecError, decode_frame, try_encode_frame};
use crate::rendezvous::messages::message::Generation;
use crate::wire::text::tidy;

/// Version of these messages. An agent refuses workers of any other.
pub const VERSION: u16 = 5;

/// From the agent to a worker.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ToWorker {
    /// The agent does not speak with this process, for this reason. The connection ends.
    Refused {
        /// In words.
        reason: String,
    },
    /// The worker's next world.
    World(Box<World>),
    /// The world is about to change. The worker answers with [`ToAgent::Ack`], and each later check waits for `RaiseAt`.
    Change {
        /// Number of the change. A later one has a higher number.
        seq: u64,
        /// What changes: 1 removed, 2 added, 3 both.
        flags: u8,
        /// In words.
        reason: String,
    },
    /// The world changes at this check, on all workers.
    RaiseAt {
        /// Number of the change.
        seq: u64,
        /// Number of the check. The first one in a world is 1.
        check: u64,
    },
    /// A member of the world has failed. Blocked collectives are freed.
    PeerFailed {
        /// In words.
        reason: String,
        /// Global rank of the worker whose failure is the cause, if one is.
        rank: Option<u32>,
    },
}

/// From a worker to the agent.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ToAgent {
    /// The first message.
    Hello {
        /// [`VERSION`] of the worker.
        version: u16,
    },
    /// Answers `Change`.
    Ack {
        /// Number of the change.
        seq: u64,
        /// Number of the last check that did not wait for `RaiseAt`. 0: there was none in this world.
        count: u64,
    },
    /// The worker has left its process group, and waits for its next world. With the state that it has.
    Parked(HeldState),
    /// The worker has reached `elastic_rs.elastic.run` without a process group, which the library makes.
    NoProcessGroup,
    /// The worker's world is not formed: a step towards it has failed, or has taken longer than its limit.
    Stuck,
    /// The worker's program has raised one of the library's exceptions itself. It leaves its world, and lives.
    Raised {
        /// The name of the exception's type.
        error: String,
        /// The exception's message, in one line.
        message: String,
    },
    /// The worker's program cannot take the state that the others have: it is another program, or another version.
    Unfit {
        /// What does not match, in one line.
        message: String,
    },
    /// The worker's program does not live through a change: it saves at the check, and is started anew.
    Saves,
    /// A peer has failed, and the sockets of the worker's process groups were shut down: what waits for them fails at once.
    Freed,
}

/// The state that a worker has while it is in no world.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct HeldState {
    /// The last world in which it has had the job's state. `None`: it has never had it.
    pub generation: Option<Generation>,
    /// Number of the commit that it has. `None`: it was never synchronised or committed.
    pub commit: Option<u64>,
}

/// A world, as it is sent to one worker.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct World {
    /// Variables of the worker's environment, such as `RANK`.
    pub variables: Vec<(String, String)>,
    /// The world, as the generation of the state that its workers have.
    pub generation: Generation,
    /// Global rank of the worker whose state the others take.
    pub source: u32,
    /// Whether they do.
    pub sync: bool,
    /// All workers have the same state already: they go on without a sync, or all of them are new.
    pub equal: bool,
    /// Why the last world has ended, in words.
    pub reason: String,
}

/// Why bytes are not a message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// Not a frame, or not one of this protocol.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// A world has a variable that no environment can have.
    #[error(
        "the agent sent an environment that cannot be set: variable `{0}` has an empty name, `=` in its name, or a zero byte"
    )]
    Variable(String),
}

impl ToWorker {
    /// Append as one frame. Reasons become one line of bounded length.
    ///
    /// # Errors
    /// [`CodecError::TooLong`] for a world with too many or too long variables; nothing is appended.
    pub fn encode(self, out: &mut BytesMut) -> Result<(), CodecError> {
        try_encode_frame(&self.tidied(), out)
    }

    /// Take one message from `buffer`; `Ok(None)` until a whole one has arrived.
    ///
    /// # Errors
    /// The bytes are no message, or no variable of an environment. The connection is of no further use.
    pub fn decode(buffer: &mut BytesMut) -> Result<Option<ToWorker>, MessageError> {
        let message: Option<ToWorker> = decode_frame(buffer)?;
        if let Some(ToWorker::World(world)) = &message {
            world.validate()?;
        }
        Ok(message.map(ToWorker::tidied))
    }

    fn tidied(self) -> ToWorker {
        match self {
            ToWorker::Refused { reason } => ToWorker::Refused { reason: tidy(&reason) },
            ToWorker::World(world) => ToWorker::World(Box::new(World { reason: tidy(&world.reason), ..*world })),
            ToWorker::Change { seq, flags, reason } => ToWorker::Change { seq, flags, reason: tidy(&reason) },
            ToWorker::PeerFailed { reason, rank } => ToWorker::PeerFailed { reason: tidy(&reason), rank },
            ToWorker::RaiseAt { .. } => self,
        }
    }
}

impl World {
    fn validate(&self) -> Result<(), MessageError> {
        let cannot_be =
            |(name, value): &&(String, String)| name.is_empty() || name.contains(['=', '\0']) || value.contains('\0');
        match self.variables.iter().find(cannot_be) {
            Some((name, _)) => Err(MessageError::Variable(name.escape_default().to_string())),
            None => Ok(()),
        }
    }
}
