//! What a client needs to know: the members, the files for TLS, the user, and how patient it is.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::endpoints::Endpoints;

/// The time that a member gets to answer. A member of a healthy cluster needs milliseconds; an election takes 1 to 2 s.
pub const PATIENCE: Duration = Duration::from_secs(2);

/// Files for TLS, in PEM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// The authorities that sign the members' certificates. Default: the system's.
    pub ca: Option<PathBuf>,
    /// This client's certificate, with those between it and its authority.
    pub cert: Option<PathBuf>,
    /// The private key of `cert`.
    pub key: Option<PathBuf>,
}

/// A password, which no formatting shows.
#[derive(Clone, PartialEq, Eq)]
pub struct Password(String);

impl Password {
    /// Take a password.
    pub fn new(password: impl Into<String>) -> Self {
        Self(password.into())
    }

    /// The password itself, for the one request that carries it.
    pub(super) fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

/// A user of etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// The name.
    pub username: String,
    /// The password.
    pub password: Password,
}

/// How to reach a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientOptions {
    /// The members. Give all of them: a node needs all of them to know whether the cluster has lost its quorum.
    pub endpoints: Endpoints,
    /// Files for TLS. They are read again for each connection, so that certificates can be renewed.
    pub tls: TlsFiles,
    /// The user, unless a certificate names it or etcd has no users.
    pub credentials: Option<Credentials>,
    /// The time after which a silent member is left for the next.
    pub patience: Duration,
}

impl ClientOptions {
    /// Options without TLS files and without a user, and with the default patience.
    pub fn new(endpoints: Endpoints) -> Self {
        Self { endpoints, tls: TlsFiles::default(), credentials: None, patience: PATIENCE }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_not_shown() {
        let credentials = Credentials { username: "ann".into(), password: Password::new("hunter2") };
        let shown = format!("{credentials:?}");
        assert!(shown.contains("ann") && !shown.contains("hunter2"), "{shown}");
    }
}
