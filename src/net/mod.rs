//! Sockets: listening, connecting, probing which server answers, and telling whose a connection is.
//!
//! Knows neither the store nor the rendezvous. Facts about PyTorch's sockets are in [`listen`].

#[cfg(test)]
pub(crate) mod black_hole;
pub mod connect;
#[cfg(test)]
pub(crate) mod hidden_peer;
pub mod listen;
pub mod local;
pub mod local_peers;
pub mod peer_user;
pub mod probe;
mod proc_net;
