//! The open connections, by their [`ConnId`].
//!
//! A slot is reused once its connection has gone, under another id, so that a message for the old connection reaches nobody.
//! Ids rise with time: the upper half counts connections, the lower half is the slot.

use crate::store::table::ConnId;

use super::connection::Connection;

/// A slab of connections.
#[derive(Default)]
pub(super) struct Connections {
    slots: Vec<Option<Connection>>,
    free: Vec<u32>,
    added: u32,
}

impl Connections {
    /// Number of open connections, validated or not.
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Adds the connection that `make` returns for its id.
    pub(super) fn add(&mut self, make: impl FnOnce(ConnId) -> Connection) -> ConnId {
        let at = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            (self.slots.len() - 1) as u32
        });
        self.added = self.added.wrapping_add(1);
        let id = ConnId(u64::from(self.added) << 32 | u64::from(at));
        self.slots[at as usize] = Some(make(id));
        id
    }

    pub(super) fn get_mut(&mut self, id: ConnId) -> Option<&mut Connection> {
        self.at_mut(slot_of(id)).filter(|connection| connection.id == id)
    }

    /// The connection in a slot. Events name slots.
    pub(super) fn at_mut(&mut self, at: usize) -> Option<&mut Connection> {
        self.slots.get_mut(at)?.as_mut()
    }

    pub(super) fn remove(&mut self, id: ConnId) -> Option<Connection> {
        let connection = self.slots.get_mut(slot_of(id))?.take_if(|connection| connection.id == id)?;
        self.free.push(slot_of(id) as u32);
        if self.free.len() == self.slots.len() {
            // Frees the memory that a storm of connections has taken.
            (self.slots, self.free) = (Vec::new(), Vec::new());
        }
        Some(connection)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Connection> {
        self.slots.iter().flatten()
    }
}

/// The slot of a connection.
pub(super) fn slot_of(id: ConnId) -> usize {
    id.0 as u32 as usize
}
