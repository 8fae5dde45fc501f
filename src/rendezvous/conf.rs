//! The keys of `--rdzv-conf`, each declared once: name, type, default, range, backends, other spelling and help.
//!
//! To add a key, add it to the table ([`KEYS`]) and use its field of [`Conf`]. All front ends parse by this table, and
//! `elastic-run --help` lists it, and `docs/reference/rdzv-conf.md` is made of it. The binding converts Python's values to
//! numbers, and suggests a key for an unknown one.

mod allowed;
mod judging;
mod scope;

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

pub use allowed::{Allowed, Given, Least, Value, codes_of};
pub use scope::{Backend, Scope};

use super::messages::settings::{self, HANG_TIMEOUTS, OnPartition, RESTART_WINDOWS, Settings};
use crate::hang::judge as hang;
use crate::secure::TOKEN_FILE;
use crate::signals::FirstSignal;

/// A key of `--rdzv-conf`.
#[derive(Debug)]
pub struct Key {
    /// The key, as users write it.
    pub name: &'static str,
    /// What it does, in a sentence.
    pub help: &'static str,
    /// The allowed values.
    pub allowed: Allowed,
    /// The backends that have it.
    pub scope: Scope,
    /// Another spelling, which means the same.
    pub or: Option<&'static str>,
    get: fn(&Conf) -> Value,
    put: fn(&mut Conf, Value) -> bool,
}

impl Key {
    /// The key with this name or other spelling.
    pub fn named(name: &str) -> Option<&'static Self> {
        KEYS.iter().find(|key| key.name == name || key.or == Some(name))
    }

    /// Its value in a configuration.
    pub fn get(&self, conf: &Conf) -> Value {
        (self.get)(conf)
    }
}

/// A type of [`Conf`]'s fields.
trait Setting: Sized {
    /// `None` for a value of another kind.
    fn from_value(value: Value) -> Option<Self>;
    fn to_value(&self) -> Value;
}

macro_rules! keys {
    (@scope) => { Scope::All };
    (@scope $scope:expr) => { $scope };
    (@or) => { None };
    (@or $or:literal) => { Some($or) };
    ($($(#[doc = $help:literal])+ $name:ident $(or $or:literal)?: $type:ty = $default:expr, $allowed:expr $(, $scope:expr)?;)+) => {
        /// The values of all keys.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct Conf { $($(#[doc = $help])+ pub $name: $type,)+ }

        impl Default for Conf {
            fn default() -> Self {
                Self { $($name: $default,)+ }
            }
        }

        /// All keys that have an effect.
        pub static KEYS: &[Key] = &[$(Key {
            name: stringify!($name),
            help: concat!($($help,)+),
            allowed: $allowed,
            scope: keys!(@scope $($scope)?),
            or: keys!(@or $($or)?),
            get: |conf| conf.$name.to_value(),
            put: |conf, value| Setting::from_value(value).map(|value| conf.$name = value).is_some(),
        },)+];
    };
}

// The keys from `join_timeout` to `is_host` have the names and defaults of PyTorch's `c10d` backend.
keys! {
    /// How long a node waits for a round to complete before it fails. The error names the nodes that were in. A spare waits for as
    /// long as the job runs.
    join_timeout: Duration = Duration::from_secs(600), Allowed::ABOVE_ZERO;
    /// How long a growing round waits for further nodes once the minimum is in. At the maximum it closes at once.
    last_call_timeout: Duration = Duration::from_secs(30), Allowed::seconds(Least::AboveZero, settings::LONGEST_WAIT);
    /// How long it may take to notify the other nodes that the job is over. 1 s at most in a process that a signal ends.
    close_timeout: Duration = Duration::from_secs(30), Allowed::ABOVE_ZERO;
    /// How often a node sends a keep-alive.
    keep_alive_interval: Duration = Duration::from_secs(5),
        Allowed::seconds(Least::Is(settings::SHORTEST_KEEP_ALIVE), settings::LONGEST_LEASE);
    /// After how many missed keep-alives a silent node is lost. The product with `keep_alive_interval` is the lease, 3600 s at most.
    keep_alive_max_attempt: u32 = 3, Allowed::Whole(1, settings::MOST_KEEP_ALIVES);
    /// Time limit of each operation of the store that the agents share, and of each request to etcd.
    read_timeout: Duration = Duration::from_secs(60), Allowed::ABOVE_ZERO;
    /// 1: this process must host the coordinator. 0: it never does. Not given: the process that can bind the endpoint's address does.
    is_host: Option<bool> = None, Allowed::Truth,
        Scope::c10d("no node hosts the rendezvous, etcd does");
    /// How long a round that lost members waits for a replacement once all survivors are back.
    settle_timeout: Duration = Duration::from_secs(1), Allowed::seconds(Least::ZERO, settings::LONGEST_WAIT);
    /// How long a node whose connection ended without a goodbye may take to come back and keep its rank.
    reconnect_grace: Duration = Duration::from_millis(500), Allowed::seconds(Least::ZERO, settings::LONGEST_GRACE),
        Scope::c10d("no connection stands for a node there. A node is lost when its lease at etcd ends, which is keep_alive_interval * \
            keep_alive_max_attempt");
    /// 0: this process opens no port by which the coordinator knows that it has ended. Then that is known after `reconnect_grace`.
    proof: Option<bool> = None, Allowed::Truth,
        Scope::c10d("no connection stands for a node there. A node is lost when its lease at etcd ends");
    /// How long nodes carry on without the coordinator, or without etcd, before they fail.
    coordinator_timeout: Duration = Duration::from_secs(300), Allowed::ABOVE_ZERO;
    /// How long the process that hosts the coordinator, or the workers' store, stays at the end so that the other
    /// nodes can say goodbye.
    drain_timeout: Duration = Duration::from_secs(5), Allowed::ZERO_OR_MORE;
    /// Rank that this node asks for in the first round.
    node_rank: Option<u32> = None, Allowed::Whole(0, i32::MAX as u32);
    /// What a node does that has received nothing for its whole lease: kill its workers before the other nodes go on without it (stop),
    /// or let them run (continue).
    on_partition: OnPartition = OnPartition::Stop, Allowed::OneOf(&["stop", "continue"]);
    /// How often nodes that connect from one address may leave the running job within `rejoin_window`. After that they are not
    /// let in again. 0: no limit.
    rejoin_limit: u32 = 20, Allowed::Whole(0, settings::LARGEST_REJOIN_LIMIT);
    /// See `rejoin_limit`.
    rejoin_window: Duration = Duration::from_secs(3600), Allowed::seconds(Least::AboveZero, settings::LONGEST_WAIT);
    /// Which agent runs the workers under `torchrun`: ours, or PyTorch's own.
    agent: Agent = Agent::Rust, Allowed::OneOf(&["rust", "torch"]);
    /// How long a node whose workers have all succeeded waits for the workers of the other nodes. Without it: for as long as
    /// their agents live.
    exit_barrier_timeout: Option<Duration> = None, Allowed::ZERO_OR_MORE;
    /// What `--max-restarts` counts with our agent: the job's restarts, or each node's own (PyTorch's way).
    restart_budget: RestartBudget = RestartBudget::Job, Allowed::OneOf(&["job", "node"]);
    /// With which exit code this node ends when the job has failed: the first failed worker's (worker), or one that says what to do
    /// next (class). Not given: 1.
    exit_code: Option<ExitCode> = None, Allowed::OneOf(&["worker", "class"]);
    /// Who gets the first signal when workers are stopped: the process that was started as the worker (leader), or its whole process group.
    /// Not given: leader where that is the Python that runs the script, else group.
    first_signal: Option<FirstSignal> = None, Allowed::OneOf(&["leader", "group"]);
    /// Which workers survive a change of the world, if their program uses `elastic_rs.elastic`: those whose process groups are
    /// gloo's, also those with NCCL's, or none (off).
    in_place: InPlace = InPlace::Gloo, Allowed::OneOf(&["off", "gloo", "nccl"]),
        Scope::c10d("workers are restarted there");
    /// How many standbys this node keeps, at most as many as it has workers: processes that have run the script up to
    /// `elastic_rs.elastic.run`, and take the place of a worker that fails.
    standby: u32 = 0, Allowed::Whole(0, settings::MOST_WORKERS), Scope::c10d("workers are restarted there");
    /// Which users of this machine may connect to the worker stores of this node: its own and root, or any.
    store_peers: StorePeers = StorePeers::SameUser, Allowed::OneOf(&["same-user", "any"]);
    /// What a worker store does with a connection from a machine that no member of its round is on: serve it (off), serve and log it
    /// (warn), or close it (strict).
    store_members: StoreMembers = StoreMembers::Warn, Allowed::OneOf(&["off", "warn", "strict"]),
        Scope::c10d("a coordinator knows the members' addresses, and there is none");
    /// 1: workers reach the store of rank 0's node through their agents, which encrypt that traffic. Needs a token or certificates,
    /// and the same value on all nodes. Not given: 1 if the user has named a token or certificates.
    store_tunnel: Option<bool> = None, Allowed::Truth;
    /// Fewest workers of a world, on however many nodes. Needs `max_workers`.
    min_workers: Option<u32> = None, Allowed::Whole(1, settings::MOST_WORKERS), Scope::c10d(COUNTED_BY_A_COORDINATOR);
    /// Most workers of a world. A round closes at once when as many wait. The node that would pass it starts fewer.
    max_workers: Option<u32> = None, Allowed::Whole(1, settings::MOST_WORKERS), Scope::c10d(COUNTED_BY_A_COORDINATOR);
    /// How often a round may have its first failure on one host within `host_failures_window`. After that the host is out of the job.
    /// 0: as often as it has to. Not given: 0, or 1 with a cool-down.
    host_failures: Option<u32> = None, Allowed::Whole(0, settings::LARGEST_HOST_FAILURES),
        Scope::c10d(COUNTED_BY_A_COORDINATOR);
    /// See `host_failures`.
    host_failures_window: Duration = settings::HOST_FAILURES_WINDOW, Allowed::seconds(Least::AboveZero, settings::LONGEST_WAIT),
        Scope::c10d(COUNTED_BY_A_COORDINATOR);
    /// How long a host is out the first time. Each further time it is twice as long. Not given: for the job.
    blacklist_cooldown_min: Option<Duration> = None, Allowed::seconds(Least::AboveZero, settings::LONGEST_WAIT),
        Scope::c10d(COUNTED_BY_A_COORDINATOR);
    /// How long a host is out at most.
    blacklist_cooldown_max: Option<Duration> = None, Allowed::seconds(Least::AboveZero, settings::LONGEST_WAIT),
        Scope::c10d(COUNTED_BY_A_COORDINATOR);
    /// The name of this node's host. It distinguishes hosts behind one address.
    host_name: Option<String> = None, Allowed::Text, Scope::c10d(COUNTED_BY_A_COORDINATOR);
    /// Within which time a job has `--max-restarts` restarts, which are then judged by what they bring. Not given: it has as many in all.
    restart_window: Option<Duration> = None, Allowed::seconds(Least::Is(*RESTART_WINDOWS.start()), *RESTART_WINDOWS.end()),
        Scope::c10d(COUNTED_BY_A_COORDINATOR);
    /// The exit codes of workers after which nothing is restarted, such as 3+4: the job ends with the first failure that has one. The
    /// same on all nodes.
    no_restart_on: BTreeSet<u8> = BTreeSet::new(), Allowed::Codes, Scope::c10d(COUNTED_BY_A_COORDINATOR);
    /// How often the world may change after its first round, by restarts and changes of membership together. After that the job
    /// ends with an error. Not given: as often as it has to. A job that may not change any
    /// more takes no newcomers: they wait as spares.
    reset_limit: Option<u32> = None, Allowed::Whole(0, i32::MAX as u32), Scope::c10d(COUNTED_BY_A_COORDINATOR);
    /// What happens when the training hangs: it is reported with the rank that is waited for (report), its workers are restarted as well
    /// (restart), or nobody looks (off).
    hang: hang::Mode = hang::Mode::Report, Allowed::OneOf(&["off", "report", "restart"]);
    /// After how long without progress a training hangs, instead of the limits that are learnt from its steps.
    hang_timeout: Option<Duration> = None, Allowed::seconds(Least::Is(*HANG_TIMEOUTS.start()), *HANG_TIMEOUTS.end());
    /// How to speak to etcd, if the endpoint does not begin with `http://` or `https://`. Not given: `http`.
    protocol: Option<Protocol> = None, Allowed::OneOf(&["http", "https"]), Scope::ETCD;
    /// File with the certificates of the authorities that may vouch for etcd's members. Not given: the system's.
    cacert or "ca_cert": Option<String> = None, Allowed::Text, Scope::ETCD;
    /// File with this client's certificate, for an etcd that asks for one.
    cert or "ssl_cert": Option<String> = None, Allowed::Text, Scope::ETCD;
    /// File with the private key of `cert`. Not given: it is in that file too.
    key or "ssl_cert_key": Option<String> = None, Allowed::Text, Scope::ETCD;
    /// User of etcd.
    username: Option<String> = None, Allowed::Text, Scope::ETCD;
    /// File with the user's password. Not given: the variable `ELASTIC_RS_ETCD_PASSWORD` has it. `password` itself is refused: everybody
    /// on a machine can read its command lines.
    password_file: Option<String> = None, Allowed::Text, Scope::ETCD;
    /// Beginning of all keys at etcd. A role needs rights to read and write on it.
    key_prefix or "etcd_prefix": String = DEFAULT_KEY_PREFIX.to_owned(), Allowed::Text, Scope::ETCD;
}

/// Why `rust-etcd` has no such key.
const COUNTED_BY_A_COORDINATOR: &str = "a coordinator counts, and there is none";

/// The default of `key_prefix`, as in PyTorch's `etcd-v2`.
pub const DEFAULT_KEY_PREFIX: &str = "/torch/elastic/rendezvous";

/// PyTorch's keys without an effect here: they are checked and then dropped.
pub static WITHOUT_EFFECT: &[(&str, Allowed, Scope)] = &[
    ("heartbeat", Allowed::ABOVE_ZERO, Scope::All), // what PyTorch's documentation calls the next one
    ("heartbeat_timeout", Allowed::ABOVE_ZERO, Scope::All),
    ("cas_backoff_max_seconds", Allowed::ZERO_OR_MORE, Scope::All),
    (
        "store_type",
        Allowed::Only("tcp", "this backend has its own store"),
        Scope::c10d("it chooses a store, and etcd is one"),
    ),
];

/// The variable of the environment with the password of etcd's user, for those who have it in a secret of their scheduler.
pub const PASSWORD_VARIABLE: &str = "ELASTIC_RS_ETCD_PASSWORD";

/// A key that is refused whatever its value, which is not shown.
const PASSWORD: &str = "password";

fn why_no_password() -> String {
    format!(
        "--rdzv-conf {PASSWORD} is refused: everybody on this machine can read a command line. Put the password into a file that \
         only you can read and give password_file=FILE, or set the variable {PASSWORD_VARIABLE}"
    )
}

/// PyTorch's general time limit. It is taken for `join_timeout` unless that is given too.
pub const ALIAS: &str = "timeout";

/// The agent that runs the workers under `torchrun`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Agent {
    /// Ours.
    Rust,
    /// PyTorch's.
    Torch,
}

/// What `--max-restarts` counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestartBudget {
    /// The job's restarts.
    Job,
    /// Those of each node.
    Node,
}

/// What the exit code of a job that has failed says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitCode {
    /// How the first failed worker ended.
    Worker,
    /// Whose fault it was: an [`EndClass`](super::messages::message::EndClass).
    Class,
}

/// Which of the workers that use `elastic_rs.elastic` survive a change of the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InPlace {
    /// None.
    Off,
    /// Those with process groups of gloo.
    Gloo,
    /// Those with process groups of gloo or NCCL.
    Nccl,
}

impl InPlace {
    /// The word that users write for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Gloo => "gloo",
            Self::Nccl => "nccl",
        }
    }
}

/// Which users of a node's machine may connect to its worker stores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StorePeers {
    /// The agent's, and root.
    #[default]
    SameUser,
    /// All.
    Any,
}

/// What a worker store does with connections from machines without members.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StoreMembers {
    /// Serve them.
    Off,
    /// Serve and log them.
    #[default]
    Warn,
    /// Close them.
    Strict,
}

/// How to speak to etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Without TLS.
    Http,
    /// With TLS.
    Https,
}

/// Why a configuration is invalid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConfError {
    /// The key is unknown.
    Unknown(String),
    /// A value is not allowed, or a key is not with this backend. With a sentence that names the key, and what is allowed.
    Refused(String),
}

impl fmt::Display for ConfError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(key) => write!(f, "--rdzv-conf has the unknown key `{key}`"),
            Self::Refused(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for ConfError {}

impl Conf {
    /// Check the user's entries for `backend`, in their order.
    ///
    /// # Errors
    /// [`ConfError`] of the first invalid entry, or of entries that do not go together.
    pub fn read<'a>(
        backend: Backend,
        entries: impl IntoIterator<Item = (&'a str, Given<'a>)>,
    ) -> Result<Self, ConfError> {
        let (mut conf, mut join_timeout, mut alias) = (Self::default(), None, None);
        let mut given_as: Vec<(&str, &str)> = Vec::new();
        for (name, given) in entries {
            let check = |allowed: &Allowed| allowed.check(name, &given).map_err(ConfError::Refused);
            if let Some(key) = Key::named(name) {
                key.scope.check(name, backend).map_err(ConfError::Refused)?;
                if let Some((_, before)) = given_as.iter().find(|(known, _)| *known == key.name) {
                    let text =
                        format!("--rdzv-conf has `{before}` and `{name}`, which are the same key: give one of them");
                    return Err(ConfError::Refused(text));
                }
                given_as.push((key.name, name));
                let value = check(&key.allowed)?;
                (key.put)(&mut conf, value);
                if name == "join_timeout" {
                    join_timeout = Some(conf.join_timeout);
                }
            } else if let Some((_, allowed, scope)) = WITHOUT_EFFECT.iter().find(|(known, ..)| *known == name) {
                scope.check(name, backend).map_err(ConfError::Refused)?;
                check(allowed)?;
            } else if name == ALIAS {
                alias = Duration::from_value(check(&Allowed::ABOVE_ZERO)?);
            } else if name == PASSWORD && backend == Backend::RustEtcd {
                return Err(ConfError::Refused(why_no_password()));
            } else {
                return Err(ConfError::Unknown(name.to_owned()));
            }
        }
        conf.join_timeout = join_timeout.or(alias).unwrap_or(conf.join_timeout);
        conf.check_together().map_err(ConfError::Refused)?;
        Ok(conf)
    }

    /// Check values that depend on one another.
    fn check_together(&self) -> Result<(), String> {
        let lease = self.keep_alive_interval.as_secs_f64() * f64::from(self.keep_alive_max_attempt);
        if lease > settings::LONGEST_LEASE.as_secs_f64() {
            return Err(format!(
                "--rdzv-conf keep_alive_interval * keep_alive_max_attempt is `{lease}` seconds, must be at most {}",
                settings::LONGEST_LEASE.as_secs()
            ));
        }
        for (needs, given, needed, there) in [
            ("key", self.key.is_some(), "cert", self.cert.is_some()),
            ("password_file", self.password_file.is_some(), "username", self.username.is_some()),
        ] {
            if given && !there {
                return Err(format!("--rdzv-conf has `{needs}` without `{needed}`: give both"));
            }
        }
        self.check_rules()
    }

    /// Check whether the protection of the workers' store that is wanted, `store_tunnel` or `store_members=strict`, is possible.
    /// `is_protected`: the job has a token or certificates. `own_store`: each round has a store, which the agent of rank 0's node serves.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn check_workers_store(&self, is_protected: bool, own_store: bool) -> Result<(), String> {
        if self.store_members == StoreMembers::Strict && !own_store {
            return Err(
                "--rdzv-conf store_members=strict needs a store that the agents serve: it cannot be used with --rdzv-backend=static, \
                 nor with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
                    .to_owned(),
            );
        }
        match (self.has_tunnel(), is_protected, own_store) {
            (false, ..) | (true, true, true) => Ok(()),
            (true, false, _) => Err(format!(
                "--rdzv-conf store_tunnel=1 needs a token or certificates, by which the agents know each other: name the token's file in \
                 {TOKEN_FILE}; `elastic-rs token new` writes one"
            )),
            (true, true, false) => Err(
                "--rdzv-conf store_tunnel=1 needs a store that the agents serve: it cannot be used with --rdzv-backend=static, nor with \
                 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
                    .to_owned(),
            ),
        }
    }

    /// Whether workers reach the store through their agents. Who makes the configuration decides, if the user has not.
    pub fn has_tunnel(&self) -> bool {
        self.store_tunnel == Some(true)
    }

    /// Replace one value. Its range is not checked.
    ///
    /// # Errors
    /// The key is unknown, or the value has another type.
    pub fn set(&mut self, name: &str, value: Value) -> Result<(), String> {
        let key = Key::named(name).ok_or_else(|| format!("there is no setting `{name}`"))?;
        let shown = format!("{value:?}");
        if (key.put)(self, value) { Ok(()) } else { Err(format!("`{name}` is of another kind than {shown}")) }
    }

    /// The settings of a rendezvous of `min_nodes` to `max_nodes` nodes.
    pub fn settings(&self, min_nodes: u32, max_nodes: u32) -> Settings {
        Settings {
            min_nodes,
            max_nodes,
            last_call_timeout: self.last_call_timeout,
            settle_timeout: self.settle_timeout,
            keep_alive_interval: self.keep_alive_interval,
            keep_alive_max_attempt: self.keep_alive_max_attempt,
            reconnect_grace: self.reconnect_grace,
            max_restarts: None,
            rejoin_limit: self.rejoin_limit,
            rejoin_window: self.rejoin_window,
            on_partition: self.on_partition,
            ranks_as_asked: false,
            rules: self.rules(),
        }
    }
}

impl Settings {
    /// Settings for `min_nodes` to `max_nodes` nodes, all else at its default.
    pub fn new(min_nodes: u32, max_nodes: u32) -> Self {
        Conf::default().settings(min_nodes, max_nodes)
    }
}

/// The names of all keys that `backend` accepts, in all spellings, sorted.
pub fn known(backend: Backend) -> Vec<&'static str> {
    let here = KEYS.iter().filter(|key| key.scope.has(backend));
    let mut names: Vec<_> = here.flat_map(|key| [Some(key.name), key.or]).flatten().collect();
    names.extend(WITHOUT_EFFECT.iter().filter(|(.., scope)| scope.has(backend)).map(|(name, ..)| *name));
    names.push(ALIAS);
    names.sort_unstable();
    names
}

#[cfg(test)]
mod tests;
