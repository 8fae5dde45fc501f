//! A client of etcd v3: keys, transactions, leases and watches on a cluster whose members may die. Knows nothing of rendezvous.
//!
//! gRPC is tonic's, the messages are checked in ([`messages`]). What is here is what those libraries leave to their users: one
//! connection to one member at a time, the next member when that one fails, a user's token and its renewal, and errors that say
//! what to do. `docs/etcd.md` has what users need to know.
//!
//! | file | what |
//! |---|---|
//! | `endpoints` | the members, as users write them (pure) |
//! | `version` | versions with bugs that matter (pure) |
//! | `options`, `tls` | the user, patience, and the files for TLS |
//! | `messages`, `rpc` | etcd's messages; which method each belongs to |
//! | `error` | what etcd's errors mean, and what helps |
//! | `connection`, `scheme` | one connection to one member; whether that speaks TLS |
//! | `client` | the connection in use, fail-over, authentication |
//! | `calls`, `watch` | what callers ask for |
//! | `survey` | whether the cluster is proven to have no leader |
//! | `look` | all members, for the doctor |

#[cfg(feature = "io")]
mod calls;
#[cfg(feature = "io")]
mod client;
#[cfg(feature = "io")]
mod connection;
mod endpoints;
#[cfg(feature = "io")]
mod error;
#[cfg(feature = "io")]
mod look;
#[cfg(feature = "io")]
mod messages;
#[cfg(feature = "io")]
mod options;
#[cfg(feature = "io")]
mod rpc;
#[cfg(feature = "io")]
mod scheme;
#[cfg(feature = "io")]
mod survey;
#[cfg(feature = "io")]
mod tls;
mod version;
#[cfg(feature = "io")]
mod watch;

pub use endpoints::{Address, Endpoints, parse_endpoints};
pub use version::known_problems;

#[cfg(feature = "io")]
pub use self::{
    calls::{KeyValue, Put, Renewal, TxnOutcome, end_of},
    client::Client,
    error::EtcdError,
    look::{ListedMember, Look, MemberLook},
    options::{ClientOptions, Credentials, PATIENCE, Password, TlsFiles},
    watch::{KeyChange, Report, Watch},
};
