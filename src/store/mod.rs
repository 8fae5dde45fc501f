//! The TCP store: what `torch.distributed.TCPStore` is made of, as a table, a server and a client.
//!
//! [`Table`] decides and is pure. With the feature `io`, [`server`] puts it behind sockets, [`client`] is the other end, and [`probe`]
//! finds out whether a store answers. [`crate::net`] makes the sockets, and [`crate::store::protocol`] encodes and decodes the bytes.

pub mod protocol;
pub mod table;

#[cfg(feature = "io")]
pub mod client;
#[cfg(feature = "io")]
pub mod probe;
#[cfg(feature = "io")]
pub mod server;

pub use table::{Applied, ConnId, ENTRY_BYTES, Listing, Table, TableLimits, Violation};
