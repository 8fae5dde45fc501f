//! Who may speak with a coordinator: those who hold the same token, those with a certificate of the same authority, or those with both.
//!
//! A coordinator that is protected serves nothing but TLS 1.3. Without certificates it has a key of its own, which proves nothing: it is made at its start,
//! and needs no certificate. After the handshake each end sends an HMAC, by the token, of the secret that TLS derives for this
//! connection alone ([`proof`]). So the token never travels, what was recorded is worthless, and whoever stands between two ends with
//! a key of his own has another secret with each of them: both refuse. With certificates, TLS itself proves both ends, and a token may
//! be asked for beside them.
//!
//! - [`claim`]: the bytes of the proof. Pure.
//! - [`token`]: tokens, their ids, and the tokens derived from them.
//! - [`watched`]: a value that is read from files, again when they have changed.
//! - [`token_file`]: tokens in a file.
//! - [`proof`]: what both ends say.
//! - [`tls`]: TLS, and the settings of ends without certificates.
//! - [`certificates`]: the settings of ends with certificates; [`x509`]: what one says; [`ending`]: the warning that one ends soon.
//! - [`objection`]: what went wrong in TLS, in words.
//! - [`acceptor`]: the coordinator's end. Unauthenticated peers are bounded in time and bytes, and counted ([`refusals`]).
//! - [`handshakes`]: the handshakes that are under way. They run on threads of their own ([`helpers`]).
//!
//! `docs/security.md` is for users. `docs/decisions/0083-a-token-proves-both-ends-of-a-connection.md` and
//! `docs/decisions/0087-certificates-are-read-from-three-files.md` have the reasons.

#[cfg(feature = "io")]
pub mod acceptor;
#[cfg(feature = "io")]
mod certificates;
pub mod claim;
#[cfg(feature = "io")]
mod ending;
#[cfg(feature = "io")]
mod error;
#[cfg(all(test, feature = "io"))]
pub(crate) mod fixtures;
#[cfg(feature = "io")]
pub mod handshakes;
#[cfg(feature = "io")]
mod helpers;
#[cfg(feature = "io")]
mod objection;
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
mod x509;

#[cfg(feature = "io")]
pub use certificates::CertificateFiles;
#[cfg(feature = "io")]
pub use error::ProtectionError;
#[cfg(feature = "io")]
pub use protection::{Protection, ProtectionOptions, TokenSource};
#[cfg(feature = "io")]
pub use stream::{Halves, Reader, Writer};
#[cfg(feature = "io")]
pub use x509::Shown as CertificateShown;

/// Names the file with the job's token.
pub const TOKEN_FILE: &str = "ELASTIC_RS_TOKEN_FILE";
/// Names the file with this end's certificate.
pub const TLS_CERT: &str = "ELASTIC_RS_TLS_CERT";
/// Names the file with its key.
pub const TLS_KEY: &str = "ELASTIC_RS_TLS_KEY";
/// Names the file with the authorities whose certificates are accepted.
pub const TLS_CA: &str = "ELASTIC_RS_TLS_CA";
