//! Sockets: listening, connecting, and probing which server answers.
//!
//! Knows neither the store nor the rendezvous. Facts about PyTorch's sockets are in [`listen`].

#[cfg(test)]
pub(crate) mod black_hole;
pub mod connect;
pub mod listen;
pub mod local;
pub mod probe;
