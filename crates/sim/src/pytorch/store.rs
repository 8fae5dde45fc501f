//! The store that holds the blob: `C10dRendezvousBackend` over a `TCPStore`. There the blob is its own token. Here its version is.

use super::state::State;

#[derive(Clone, Debug)]
pub enum Request {
    /// `get_state`.
    Get,
    /// `set_state`, if the state still has this token.
    Set(State, Option<u64>),
}

/// The state after the request, whichever node wrote it.
#[derive(Clone, Debug)]
pub struct Reply(pub Option<(State, u64)>);

#[derive(Debug)]
pub(super) struct Store {
    pub up: bool,
    held: Option<(State, u64)>,
}

impl Default for Store {
    fn default() -> Self {
        Self { up: true, held: None }
    }
}

impl Store {
    /// `None`: the store's process is gone, and so is the connection.
    pub fn answer(&mut self, request: Request) -> Option<Reply> {
        if !self.up {
            return None;
        }
        if let Request::Set(state, token) = request
            && token == self.held.as_ref().map(|(_, version)| *version)
        {
            self.held = Some((state, token.unwrap_or(0) + 1));
        }
        Some(Reply(self.held.clone()))
    }
}
