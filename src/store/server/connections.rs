//! The open connections, by their [`ConnId`].
//!
//! A place is used again once its connection has gone, under another id: what was meant for the old one finds nobody.
//! Ids rise with time: the upper half counts connections, the lower one is the place.

use crate::store::table::ConnId;

use super::connection::Connection;

/// A list with holes.
#[derive(Default)]
pub(super) struct Connections {
    places: Vec<Option<Connection>>,
    free: Vec<u32>,
    added: u32,
}

impl Connections {
    /// Connections there are, validated or not.
    pub(super) fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Adds the connection that `make` returns for its id.
    pub(super) fn add(&mut self, make: impl FnOnce(ConnId) -> Connection) -> ConnId {
        let at = self.free.pop().unwrap_or_else(|| {
            self.places.push(None);
            (self.places.len() - 1) as u32
        });
        self.added = self.added.wrapping_add(1);
        let id = ConnId(u64::from(self.added) << 32 | u64::from(at));
        self.places[at as usize] = Some(make(id));
        id
    }

    pub(super) fn get_mut(&mut self, id: ConnId) -> Option<&mut Connection> {
        self.at_mut(place_of(id)).filter(|connection| connection.id == id)
    }

    /// The connection at a place, which is what an event names.
    pub(super) fn at_mut(&mut self, at: usize) -> Option<&mut Connection> {
        self.places.get_mut(at)?.as_mut()
    }

    pub(super) fn remove(&mut self, id: ConnId) -> Option<Connection> {
        let connection = self.places.get_mut(place_of(id))?.take_if(|connection| connection.id == id)?;
        self.free.push(place_of(id) as u32);
        if self.free.len() == self.places.len() {
            // Gives back the room that a storm of connections has taken.
            (self.places, self.free) = (Vec::new(), Vec::new());
        }
        Some(connection)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Connection> {
        self.places.iter().flatten()
    }
}

/// Where a connection is, as long as it is.
pub(super) fn place_of(id: ConnId) -> usize {
    id.0 as u32 as usize
}
