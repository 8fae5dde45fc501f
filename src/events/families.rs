//! The families of series at `/metrics`, each declared once: name, type, labels and help. Pure.
//!
//! To add one, add it to the table and write its values by its name. `docs/reference/metrics.md` is made of the table.

/// A family of series.
#[derive(Debug)]
pub struct Family {
    /// Its name without `elastic_rs_`, and without the `_total` of a counter.
    pub name: &'static str,
    /// OpenMetrics' type: `counter`, `gauge` or `histogram`.
    pub kind: &'static str,
    /// Names of its labels.
    pub labels: &'static [&'static str],
    /// What it counts or measures, and what the values of its labels mean.
    pub help: &'static str,
}

impl Family {
    /// The name of its series, as a query has it. A histogram has three, which add to this.
    pub fn series(&self) -> String {
        format!("elastic_rs_{}{}", self.name, if self.kind == "counter" { "_total" } else { "" })
    }
}

macro_rules! families {
    ($($family:ident = $kind:literal $name:literal $labels:tt $help:literal;)+) => {
        $(#[doc = $help] pub static $family: Family = Family { name: $name, kind: $kind, labels: &$labels, help: $help };)+

        /// All of them.
        pub static FAMILIES: &[&Family] = &[$(&$family),+];
    };
}

families! {
    BUILD_INFO = "gauge" "build_info" ["version"]
        "1, labelled with the release of elastic_rs that serves these metrics";
    ROUNDS = "counter" "rounds" ["run", "why"]
        "Completed rounds, labelled with the reason the previous round ended: the `why` of the event `round.broken`, or changes (its \
         workers may have survived), or first";
    RESTARTS = "counter" "restarts" ["run", "cause"]
        "Restarts used of the job's budget, by how the worker ended: by itself (exit) or by a signal (signal). Workers that fail together \
         count once";
    NODES_LOST = "counter" "nodes_lost" ["run", "how"]
        "Nodes lost: their connection, their heartbeats (silence) or their lease at etcd ended, and they did not come back, or their machine was \
         taken away (notice), and they had not left";
    NODES_LEFT = "counter" "nodes_left" ["run"]
        "Nodes that left after sending a goodbye";
    NODE_REFUSALS = "counter" "node_refusals" ["run", "why"]
        "Times that a node was rejected: it asks for other settings, was replaced by a newer agent, its host is kept out for flapping \
         (rejoin_limit) or failures (host_failures), or its request is invalid. A node that tries again counts again";
    FENCES = "counter" "fences" ["run"]
        "Times a node stopped its workers because it was cut off for its whole lease, or its machine was to be taken away. A node reports it when it is back";
    WORKER_EXITS = "counter" "worker_exits" ["run", "kind"]
        "Worker failures: the first of a round, or a consequence of it";
    HOSTS_PUT_OUT = "counter" "hosts_put_out" ["run"]
        "Times a host was excluded from the job because of failures";
    HANGS = "counter" "hangs" ["run", "kind"]
        "Hangs that were found, by what holds the training up: the `kind` of the event `hang.found`";
    LOST_SECONDS = "counter" "lost_seconds" ["run", "phase"]
        "Time lost to recoveries: the slowest node's duration of each phase, summed over recoveries";
    RECOVERY_SECONDS = "histogram" "recovery_seconds" ["run"]
        "Time from the end of a round until the next one was complete";
    PHASE_SECONDS = "histogram" "phase_seconds" ["run", "phase"]
        "Duration of each recovery phase, as each node measured it";
    SLOWEST_PHASE_SECONDS = "gauge" "slowest_phase_seconds" ["run", "phase"]
        "Slowest node's duration of each phase when the current round was formed";
    REDONE_STEPS = "counter" "redone_steps" ["run"]
        "Training steps that were repeated after a recovery";
    GOODPUT_RATIO = "gauge" "goodput_ratio" ["run"]
        "Goodput: share of the time since the first step spent in steps that were not repeated, weighted by workers. Only if the training \
         reports its steps";
    HEARTBEAT_RTT_SECONDS = "histogram" "heartbeat_rtt_seconds" []
        "Round-trip time of heartbeats, as nodes measure it. Each reports one of twelve";
    EVENTS_DROPPED = "counter" "events_dropped" []
        "Oldest events removed from the coordinator's memory to make room; files of events are not affected";
    SESSIONS = "gauge" "sessions" []
        "Connected sessions of nodes";
    RUN_STATE = "gauge" "run_state" ["run", "state"]
        "1 for what the run does now, 0 for the others: empty (no nodes), waiting (for nodes), running, reforming (some workers still run), \
         closed (ended)";
    ROUND = "gauge" "round" ["run"]
        "Number of the round that formed the current world; 0 before the first";
    RESTARTS_LEFT = "gauge" "restarts_left" ["run"]
        "Restarts left in the job's budget";
    NODES = "gauge" "nodes" ["run", "state"]
        "Nodes by state: running, waiting, finished";
    STEP = "gauge" "step" ["run"]
        "Last training step known at the previous scrape";
    STILL_SECONDS = "gauge" "still_seconds" ["run"]
        "Time without a step while all nodes stand still; 0 otherwise";
    WORKERS = "gauge" "workers" ["run"]
        "Workers of the current world; absent unless all members report their number";
    STORE_CONNECTIONS = "gauge" "store_connections" []
        "c10d clients connected to the endpoint's store";
    STORE_KEYS = "gauge" "store_keys" []
        "Keys in the endpoint's store";
    STORE_BYTES = "gauge" "store_bytes" []
        "Bytes of keys and values in the endpoint's store";
    STORE_REQUESTS = "counter" "store_requests" []
        "Requests that the endpoint's store has served";
    STORE_REJECTS = "counter" "store_rejects" ["cause"]
        "Connections that the endpoint's store has closed, labelled with the cause, such as foreign_protocol or too_many_connections";
    AUTH_FAILURES = "counter" "auth_failures" ["why"]
        "Connections refused because authentication failed: they speak no TLS (no_tls), show no certificate that is accepted (certificate), \
         do not hold the token (unproven), took too long (late), or too many others were there (crowded); forbidden: authenticated, but not \
         for what they ask, such as a node with an observer's token. 0 without a token and certificates";
}
