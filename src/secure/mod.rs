//! Who may speak with a coordinator: a token that both ends hold, TLS between them, and a proof that is bound to the connection.
//!
//! A coordinator that is protected serves nothing but TLS 1.3. It has a key of its own, which proves nothing: it is made at its start,
//! and needs no certificate. After the handshake each end sends an HMAC, by the token, of the secret that TLS derives for this
//! connection alone ([`proof`]). So the token never travels, what was recorded is worthless, and whoever stands between two ends with
//! a key of his own has another secret with each of them: both refuse.
//!
//! - [`claim`]: the bytes of the proof. Pure.
//! - [`token`]: tokens, their ids, and the tokens derived from them.
//! - [`watched`]: a value that is read from files, again when they have changed.
//! - [`token_file`]: tokens in a file.
//! - [`proof`]: what both ends say.
//! - [`tls`]: both ends' settings of TLS.
//! - [`door`]: the coordinator's end. Strangers are bounded in number, time and bytes, and counted ([`refusals`]). Their handshakes
//!   run on threads of their own ([`helpers`]).
//!
//! `docs/security.md` is for users, `docs/decisions/0083-a-token-proves-both-ends-of-a-connection.md` has the reasons.

pub mod claim;
#[cfg(feature = "io")]
pub mod door;
#[cfg(feature = "io")]
mod helpers;
#[cfg(feature = "io")]
pub mod proof;
#[cfg(feature = "io")]
mod protection;
#[cfg(feature = "io")]
pub mod refusals;
#[cfg(feature = "io")]
mod stream;
#[cfg(feature = "io")]
mod tls;
#[cfg(feature = "io")]
pub mod token;
#[cfg(feature = "io")]
pub mod token_file;
#[cfg(feature = "io")]
mod watched;

#[cfg(feature = "io")]
pub use protection::{Protection, ProtectionError};
#[cfg(feature = "io")]
pub use stream::{Halves, Reader, Writer};

/// Names the file with the job's token.
pub const TOKEN_FILE: &str = "ELASTIC_RS_TOKEN_FILE";
