//! The backends of `--rdzv-backend`, and which keys exist for which of them.

use std::fmt;

/// A backend of `--rdzv-backend`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backend {
    /// `rust-c10d`: a coordinator in a node's process, or in one of its own.
    #[default]
    RustC10d,
    /// `rust-etcd`: an etcd cluster.
    RustEtcd,
}

impl Backend {
    /// All backends.
    pub const ALL: [Self; 2] = [Self::RustC10d, Self::RustEtcd];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::RustC10d => "rust-c10d",
            Self::RustEtcd => "rust-etcd",
        }
    }

    /// The backend of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|backend| backend.name() == name)
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Where a key exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// For all backends.
    All,
    /// For one backend. The text says why the other has no use for it.
    Only(Backend, &'static str),
}

/// Why `rust-c10d` has no keys of a connection to etcd.
const NO_ETCD: &str = "this backend does not connect to etcd";

impl Scope {
    /// The key is about the connection to etcd.
    pub const ETCD: Self = Self::Only(Backend::RustEtcd, NO_ETCD);

    /// A key for `rust-c10d` alone.
    pub const fn c10d(why_not_etcd: &'static str) -> Self {
        Self::Only(Backend::RustC10d, why_not_etcd)
    }

    /// Whether the key exists for `backend`.
    pub fn has(self, backend: Backend) -> bool {
        matches!(self, Self::All) || matches!(self, Self::Only(only, _) if only == backend)
    }

    /// Check that the key `name` exists for `backend`.
    ///
    /// # Errors
    /// A sentence with the key, the backend that has it, and why this one has not.
    pub fn check(self, name: &str, backend: Backend) -> Result<(), String> {
        match self {
            Self::Only(only, why) if only != backend => {
                Err(format!("--rdzv-conf {name} has no meaning with --rdzv-backend={backend}, only with {only}: {why}"))
            }
            _ => Ok(()),
        }
    }
}
