//! Sockets: listening, connecting, telling whose a connection is, and which connections are admitted.
//!
//! Knows neither the store nor the rendezvous. Facts about PyTorch's sockets are in [`listen`].

pub mod admission;
#[cfg(test)]
#[cfg(feature = "io")]
pub(crate) mod black_hole;
#[cfg(feature = "io")]
pub mod connect;
#[cfg(test)]
#[cfg(feature = "io")]
pub(crate) mod hidden_peer;
#[cfg(feature = "io")]
pub mod life;
#[cfg(feature = "io")]
pub mod listen;
#[cfg(feature = "io")]
pub mod local;
#[cfg(feature = "io")]
pub mod local_peers;
#[cfg(feature = "io")]
pub mod peer_user;
#[cfg(feature = "io")]
mod proc_net;
#[cfg(feature = "io")]
pub mod same_user;
