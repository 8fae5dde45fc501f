//! A [`Session`] over etcd, and its driver: one task that performs the machine's requests and reports what came of them.
//!
//! Everything goes over the client's one connection to one member. A node that renewed its lease at one member while its watch hung
//! on another would be alive and deaf, and the job would wait for it. So each renewal asks the watch for a sign of life too. A
//! watch that gives none in time ends, and its member is left for the next.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::content::{change, snapshot};
use super::interface::{EtcdEvent, EtcdRequest, LeaseId, Revision};
use super::keys::Keys;
use super::machine::EtcdNode;
use crate::clock::until;
use crate::etcd_client::{Client, EtcdError, KeyValue, Put, Renewal, Report, TxnOutcome, Watch};
use crate::rendezvous::messages::message::{Hello, NodeId};
use crate::rendezvous::node::NodeMachine;
use crate::rendezvous::node::session::Session;
use crate::rendezvous::node::shared::{MachineSlot, Shared};
use crate::rendezvous::node::status_log::StatusLog;

/// Interval at which the list of members is read again, and, for a user, its token is used at every member: etcd forgets a token
/// that a member has not seen for 300 s.
const PREPARE_EVERY: Duration = Duration::from_secs(600);
/// When a member has not been met, because it is down or silent.
const PREPARE_AGAIN_AFTER: Duration = Duration::from_secs(5);
const PREPARE_EVERY_WITH_TOKENS: Duration = Duration::from_secs(100);

/// Start a session of a node over etcd. `hello` must have the node's address, since no other process sees it. The run's keys are below
/// `key_prefix`. The node fails if etcd is out of reach for `timeout` while it is needed.
pub fn open(runtime: &Handle, hello: Hello, client: Client, key_prefix: &str, timeout: Duration) -> Session {
    let name = format!("etcd at {}", client.options().endpoints);
    let (keys, id) = (Arc::new(Keys::new(key_prefix, &hello.run_id)), hello.node);
    let node = Arc::new(Mutex::new(EtcdNode::new(hello, name, timeout, Instant::now())));
    let mut session = Session::of(Arc::clone(&node) as Arc<Mutex<dyn MachineSlot>>);
    let driver = Driver {
        node,
        shared: Arc::clone(session.shared()),
        id,
        keys,
        errands: JoinSet::new(),
        revocations: JoinSet::new(),
        watch: None,
        watch_number: 0,
        sign: None,
        served: false,
        logged_foreign: None,
        prepare_at: None,
        client,
    };
    session.driven_by(runtime.spawn(driver.drive()));
    session
}

impl MachineSlot for EtcdNode {
    fn machine(&mut self) -> &mut NodeMachine {
        MachineSlot::machine(self.node_mut())
    }

    fn on_request(&mut self, now: Instant) {
        MachineSlot::on_request(self.node_mut(), now);
    }
}

struct Driver {
    node: Arc<Mutex<EtcdNode>>,
    shared: Arc<Shared>,
    id: NodeId,
    keys: Arc<Keys>,
    client: Client,
    errands: JoinSet<Done>,
    /// Leases that are being revoked. The node waits for them before it leaves.
    revocations: JoinSet<()>,
    watch: Option<Watch>,
    /// Counts the watches that were requested. One that opens after the next was requested is dropped.
    watch_number: u64,
    /// The sign of life that the watch owes: a report of at least this revision, until then.
    sign: Option<(u64, Instant)>,
    /// This node has read the run's keys. From then on, another program's key among them is no reason to end.
    served: bool,
    /// The last message about another program's key.
    logged_foreign: Option<String>,
    /// When to prepare surveys again.
    prepare_at: Option<Instant>,
}

/// What came of an errand.
enum Done {
    /// A request that the machine waits for was done, or failed.
    Answer(Result<Answer, EtcdError>),
    Renewal {
        lease: LeaseId,
        asked: Instant,
        outcome: Result<Renewal, EtcdError>,
    },
    Watch {
        number: u64,
        opened: Result<Box<Watch>, EtcdError>,
    },
    Surveyed {
        asked: Instant,
        leaderless: bool,
    },
    /// `all`: every voting member has been met.
    Prepared {
        all: bool,
    },
}

/// etcd's answer to a request.
enum Answer {
    Event(EtcdEvent),
    Range(Vec<KeyValue>, u64),
    Txn(TxnOutcome),
}

impl Driver {
    async fn drive(mut self) {
        let mut status_log = StatusLog::default();
        loop {
            let (requests, left, deadline) = self.step(&mut status_log);
            for request in requests {
                self.perform(request);
            }
            if left {
                return self.leave().await;
            }
            let events = tokio::select! {
                () = self.shared.requested.notified() => continue,
                Some(done) = self.errands.join_next() => self.on_done(done.expect("an errand does not panic")),
                report = next_report(&mut self.watch) => self.on_report(report),
                () = until(earliest(deadline, self.sign.map(|(_, until)| until))) => self.on_silence(),
                () = until(self.prepare_at) => self.prepare(),
            };
            let mut node = self.node.lock();
            for event in events {
                node.on_event(event, Instant::now());
            }
        }
    }

    /// Let the machine act, log its lines, and return its requests, whether it has left, and when it is to act again.
    fn step(&self, status_log: &mut StatusLog) -> (Vec<EtcdRequest>, bool, Option<Instant>) {
        let (requests, left, deadline, notes, news) = {
            let mut node = self.node.lock();
            let now = Instant::now();
            node.on_tick(now);
            let mut news = status_log.look(node.machine(), now);
            news.extend(node.node_mut().take_warnings());
            let deadline = earliest(node.next_deadline(), status_log.next_deadline(node.machine()));
            (node.take_requests(), node.has_left(), deadline, node.take_notes(), news)
        };
        for text in news {
            tracing::warn!("{text}");
        }
        for text in notes {
            tracing::info!("{text}");
        }
        self.shared.on_step();
        (requests, left, deadline)
    }

    fn perform(&mut self, request: EtcdRequest) {
        let (client, keys) = (self.client.clone(), Arc::clone(&self.keys));
        match request {
            EtcdRequest::Grant { of, ttl, asked } => self.answer(async move {
                let lease = LeaseId(client.lease_grant(ttl).await?);
                Ok(Answer::Event(EtcdEvent::Granted { of, lease, asked }))
            }),
            EtcdRequest::Range => self.answer(async move {
                let (found, revision) = client.range(keys.prefix()).await?;
                Ok(Answer::Range(found, revision))
            }),
            EtcdRequest::PutWish { lease, wish } => {
                let key = keys.node(self.id);
                self.answer(async move {
                    let revision = client.put(&key, &wish, lease.0).await?;
                    Ok(Answer::Event(EtcdEvent::WishPut(Revision(revision))))
                });
            }
            EtcdRequest::Txn { expect, state, run_lease, own } => {
                let mut puts = vec![Put { key: keys.state(), value: state, lease: run_lease.0 }];
                let own = own.map(|(lease, wish)| Put { key: keys.node(self.id), value: wish, lease: lease.0 });
                puts.extend(own);
                self.answer(async move {
                    let outcome = client.txn(&keys.state(), expect.0, puts, keys.prefix()).await?;
                    Ok(Answer::Txn(outcome))
                });
            }
            EtcdRequest::KeepAlive { lease, asked, .. } => {
                self.errands.spawn(async move {
                    let outcome = client.renew(lease.0).await;
                    Done::Renewal { lease, asked, outcome }
                });
            }
            EtcdRequest::Revoke { lease } => {
                while self.revocations.try_join_next().is_some() {}
                self.revocations.spawn(async move {
                    if let Err(error) = client.lease_revoke(lease.0).await {
                        tracing::info!(
                            "this node's lease could not be revoked, and the other nodes wait until it expires: {error}"
                        );
                    }
                });
            }
            EtcdRequest::Watch { from } => {
                (self.watch, self.sign) = (None, None);
                self.watch_number += 1;
                let number = self.watch_number;
                self.errands.spawn(async move {
                    let opened = client.watch(keys.prefix(), from.0).await.map(Box::new);
                    Done::Watch { number, opened }
                });
            }
            EtcdRequest::Survey { asked } => {
                self.errands.spawn(async move { Done::Surveyed { asked, leaderless: client.survey().await } });
            }
        }
    }

    fn answer(&mut self, errand: impl Future<Output = Result<Answer, EtcdError>> + Send + 'static) {
        self.errands.spawn(async move { Done::Answer(errand.await) });
    }

    fn on_done(&mut self, done: Done) -> Vec<EtcdEvent> {
        match done {
            Done::Answer(Ok(Answer::Event(event))) => vec![event],
            Done::Answer(Ok(Answer::Range(found, revision))) => self.on_range(found, revision),
            Done::Answer(Ok(Answer::Txn(TxnOutcome::Done(revision)))) => vec![EtcdEvent::Written(Revision(revision))],
            Done::Answer(Ok(Answer::Txn(TxnOutcome::Refused(found, revision)))) => {
                let (snapshot, foreign) = snapshot(&self.keys, found, revision);
                self.log_foreign(foreign);
                vec![EtcdEvent::Refused(snapshot)]
            }
            Done::Answer(Err(error)) if error.is_final() => {
                let prefix = String::from_utf8_lossy(self.keys.prefix());
                let which = if matches!(error, EtcdError::Denied(_)) {
                    format!(". They begin with `{prefix}`")
                } else {
                    String::new()
                };
                vec![EtcdEvent::Broken(format!("{error}{which}"))]
            }
            Done::Answer(Err(error)) => {
                let lease_gone = matches!(error, EtcdError::LeaseNotFound(_));
                vec![EtcdEvent::Failed { error: error.to_string(), lease_gone }]
            }
            Done::Renewal { lease, asked, outcome: Ok(renewal) } => {
                self.ask_for_sign(renewal.revision);
                vec![EtcdEvent::Renewed { lease, asked, held: renewal.held }]
            }
            Done::Renewal { outcome: Err(error), .. } => {
                tracing::info!("this node's lease was not renewed, and the node tries again: {error}");
                Vec::new()
            }
            Done::Watch { number, .. } if number != self.watch_number => Vec::new(),
            Done::Watch { opened: Ok(watch), .. } => {
                self.watch = Some(*watch);
                Vec::new()
            }
            Done::Watch { opened: Err(error), .. } => self.on_report(Err(error)),
            Done::Surveyed { asked, leaderless } => vec![EtcdEvent::Surveyed { asked, leaderless }],
            Done::Prepared { all } => {
                if !all {
                    self.prepare_at = Some(Instant::now() + PREPARE_AGAIN_AFTER);
                }
                Vec::new()
            }
        }
    }

    fn on_range(&mut self, found: Vec<KeyValue>, revision: u64) -> Vec<EtcdEvent> {
        let (snapshot, foreign) = snapshot(&self.keys, found, revision);
        if let Some(why) = foreign.as_ref().filter(|_| !self.served) {
            return vec![EtcdEvent::Broken(format!("etcd at {}: {why}", self.client.options().endpoints))];
        }
        self.log_foreign(foreign);
        if !self.served {
            self.served = true;
            self.prepare_at = Some(Instant::now());
        }
        vec![EtcdEvent::Snapshot(snapshot)]
    }

    fn on_report(&mut self, report: Result<Report, EtcdError>) -> Vec<EtcdEvent> {
        let report = match report {
            Ok(report) => report,
            Err(error) => {
                tracing::info!("etcd ended the watch of this job's keys, and the node watches again: {error}");
                (self.watch, self.sign) = (None, None);
                return vec![EtcdEvent::WatchEnded];
            }
        };
        self.sign = self.sign.filter(|(revision, _)| report.revision < *revision);
        let mut events = Vec::with_capacity(report.changes.len());
        for (revision, changes) in report.changes {
            let mut ours = Vec::with_capacity(changes.len());
            for changed in changes {
                match change(&self.keys, changed) {
                    Ok(change) => ours.push(change),
                    Err(foreign) => self.log_foreign(Some(foreign)),
                }
            }
            events.push(EtcdEvent::Changed(Revision(revision), ours));
        }
        events
    }

    /// The member that has just renewed a lease was at this revision: the watch must soon report at least that.
    fn ask_for_sign(&mut self, revision: u64) {
        let Some(watch) = &self.watch else { return };
        watch.ask_progress();
        self.sign.get_or_insert_with(|| (revision, Instant::now() + self.client.options().patience));
    }

    /// End a watch that owes a sign of life.
    fn on_silence(&mut self) -> Vec<EtcdEvent> {
        if self.sign.is_none_or(|(_, until)| Instant::now() < until) {
            return Vec::new();
        }
        let Some(watch) = self.watch.take() else { return Vec::new() };
        let why = format!(
            "the watch at etcd at {} has been silent for {:?} after a renewal there",
            watch.member(),
            self.client.options().patience
        );
        watch.give_up(&why);
        self.on_report(Err(EtcdError::Unavailable(why)))
    }

    fn prepare(&mut self) -> Vec<EtcdEvent> {
        let tokens = self.client.options().credentials.is_some();
        let every = if tokens { PREPARE_EVERY_WITH_TOKENS } else { PREPARE_EVERY };
        self.prepare_at = Some(Instant::now() + every);
        let client = self.client.clone();
        self.errands.spawn(async move { Done::Prepared { all: client.prepare_survey().await } });
        Vec::new()
    }

    /// Log that another program's key was found, once for each.
    fn log_foreign(&mut self, foreign: Option<String>) {
        if let Some(why) = foreign.filter(|why| self.logged_foreign.as_ref() != Some(why)) {
            tracing::warn!("etcd at {}: {why}", self.client.options().endpoints);
            self.logged_foreign = Some(why);
        }
    }

    /// Wait until the leases are revoked, or two members had their time for it.
    async fn leave(mut self) {
        let revoked = async { while self.revocations.join_next().await.is_some() {} };
        let _ = timeout(2 * self.client.options().patience, revoked).await;
        self.shared.gone.send_replace(true);
    }
}

async fn next_report(watch: &mut Option<Watch>) -> Result<Report, EtcdError> {
    match watch {
        Some(watch) => watch.next().await,
        None => std::future::pending().await,
    }
}

fn earliest(one: Option<Instant>, other: Option<Instant>) -> Option<Instant> {
    [one, other].into_iter().flatten().min()
}
