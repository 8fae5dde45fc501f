//! The Python binding: `elastic_rs._elastic_rs`. Each function converts its arguments, calls the core, converts back.

use pyo3::prelude::*;

mod agent;
mod aio;
mod awaitable;
mod cell;
mod channel;
mod conf;
mod devices;
mod driver;
mod endpoint;
mod errors;
mod etcd;
mod etcd_client;
mod launch;
mod logging;
mod observe;
mod options;
mod probe;
mod rendezvous;
mod runtime;
mod secure;
mod signals;
mod steps;
mod store;
mod store_client;
mod warm;
mod watch;

/// The compiled part of the package ``elastic_rs``.
#[pymodule]
mod _elastic_rs {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::agent::{Agent, Failure, Step, WorkerCommand, WorkerExit, follow_parent, log_folder_name};
    #[pymodule_export]
    use crate::aio::AsyncStoreClient;
    #[pymodule_export]
    use crate::cell::CellSession;
    #[pymodule_export]
    use crate::channel::{WorkerChannel, World};
    #[pymodule_export]
    use crate::conf::{ConfKey, RendezvousConfig};
    #[pymodule_export]
    use crate::devices::{cpus_of_workers, gpu_addresses, visible_gpus};
    #[pymodule_export]
    use crate::driver::{Driver, DriverOptions, HostTable, parse_hosts, start_program};
    #[pymodule_export]
    use crate::endpoint::{EndpointServer, PageRequest, PageRequests, StoreLimits, only_on_loopback};
    #[pymodule_export]
    use crate::etcd::EtcdOptions;
    #[pymodule_export]
    use crate::etcd_client::{EtcdClient, EtcdMember};
    #[pymodule_export]
    use crate::launch::{Launched, check_health, launch, rehearse, signal_number, why_users_are_unknown};
    #[pymodule_export]
    use crate::observe::{Observer, metric_families};
    #[pymodule_export]
    use crate::options::{
        AgentOptions, LaunchOptions, LogOptions, NodeOptions, PreemptOptions, ProgressPattern, Streams, WorkerOptions,
    };
    #[pymodule_export]
    use crate::probe::{
        coordinator_is_protected, coordinator_question, coordinator_version, store_question, why_stacks_are_unknown,
    };
    #[pymodule_export]
    use crate::rendezvous::{Placement, Session, View, validate_run_id};
    #[pymodule_export]
    use crate::secure::{Certificates, Protection, derived_token, new_token};
    #[pymodule_export]
    use crate::signals::{Signals, watch_signals};
    #[pymodule_export]
    use crate::steps::{StepCounter, enter_section};
    #[pymodule_export]
    use crate::store::StoreServer;
    #[pymodule_export]
    use crate::store_client::StoreClient;
    #[pymodule_export]
    use crate::warm::{ForkServer, SpawnRequest, Template};
    #[pymodule_export]
    use crate::watch::start_watch;

    /// Version of the compiled part.
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");

    /// The commit that the compiled part was built from. ``unknown`` in development builds, and without git.
    #[pymodule_export]
    const COMMIT: &str = env!("ELASTIC_RS_COMMIT");

    /// Version of the rendezvous protocol. Both ends of a session must have the same.
    #[pymodule_export]
    const PROTOCOL_VERSION: u16 = elastic_rs::rendezvous::messages::message::PROTOCOL_VERSION;

    /// A signal within this time of the one before, in seconds, is the same.
    #[pymodule_export]
    const SAME_SIGNAL_S: f64 = elastic_rs::signals::SAME_SIGNAL.as_millis() as f64 / 1000.0;

    /// Most workers that a node may have.
    #[pymodule_export]
    const LOCAL_WORLD_SIZE_LIMIT: u32 = elastic_rs::wire::text::LOCAL_WORLD_SIZE_LIMIT;

    /// Read the level of Python's logger ``elastic_rs`` again. Call it after changing the level.
    #[pyfunction]
    fn reset_log_levels(py: Python<'_>) -> PyResult<()> {
        crate::logging::reset_levels(py)
    }

    /// Make this call, which starts a thread, while the calling thread blocks all signals. So the new thread takes none.
    #[pyfunction]
    fn without_signals(start: &Bound<'_, PyAny>) -> PyResult<()> {
        elastic_rs::threads::without_signals(|| start.call0()).map(drop)
    }

    /// Stop all background threads. Registered with ``atexit``.
    #[pyfunction]
    fn _shutdown(py: Python<'_>) {
        crate::watch::shutdown(py);
        crate::runtime::shutdown(py);
        crate::logging::shutdown(py);
    }

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        let py = module.py();
        elastic_rs::workers::fill_standard_streams()?;
        crate::logging::install(py)?;
        py.import("atexit")?.call_method1("register", (module.getattr("_shutdown")?,))?;
        Ok(())
    }
}
