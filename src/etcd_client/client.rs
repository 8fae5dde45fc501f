//! The client: one connection to one member at a time, and the next member when that one fails.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rand::RngExt;
use rand::seq::SliceRandom;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use super::connection::{Connection, SharedToken, Token};
use super::endpoints::{Address, to_text};
use super::error::{EtcdError, Failure, Remedy};
use super::messages::{MemberListRequest, StatusRequest, StatusResponse};
use super::options::ClientOptions;
use super::rpc::{Kind, Request};
use super::survey::{Answer, Cluster};
use super::tls;
use crate::clock::until;

/// Time after which the next member is tried while one has not answered.
const STAGGER: Duration = Duration::from_millis(250);
/// Time that the others get to answer once all were called and one has said that it knows no leader.
const LAST_ANSWERS: Duration = Duration::from_millis(300);
/// Time between two rounds over the members while they elect a leader.
const ELECTION_PAUSE: Duration = Duration::from_millis(200);
/// A call waits this many times the patience for the members to elect a leader: one patience for a leader that has stopped, then
/// 1 to 2 s for the election.
const ELECTION: u32 = 3;
/// Time between renewals of one lease while none is answered.
const REPEAT_EVERY: Duration = Duration::from_millis(500);
/// How often one call may get a new token. Tokens may be set to live for a second, and a read may wait longer for an election.
const AUTHENTICATIONS: u32 = 3;
/// Longest random delay before a user whose token has ended authenticates again: checking passwords keeps etcd's processors busy.
const JITTER: Duration = Duration::from_millis(200);

/// A client of an etcd cluster. Clones share their connection.
///
/// Calls need a tokio runtime. Each tries the members in turn, each for the client's patience. Reads and leases are tried at every
/// member; a write that got no answer may have been done, and is not repeated: [`EtcdError::Unknown`].
#[derive(Clone, Debug)]
pub struct Client(pub(super) Arc<Inner>);

#[derive(Debug)]
pub(super) struct Inner {
    pub options: ClientOptions,
    /// Held while connecting.
    current: tokio::sync::Mutex<Current>,
    pub token: SharedToken,
    /// Held while authenticating.
    authenticating: tokio::sync::Mutex<()>,
    pub cluster: Mutex<Cluster>,
}

#[derive(Debug, Default)]
struct Current {
    /// The connection in use, or the last one.
    opened: Option<Opened>,
    /// When the last attempt to connect to any member began, if it failed, and why it did.
    failed: Option<(Instant, Failure)>,
}

#[derive(Debug)]
struct Opened {
    /// The place of the member among the endpoints.
    index: usize,
    connection: Arc<Connection>,
}

impl Client {
    /// Create a client. Reads the files for TLS to check them, and connects to nobody.
    ///
    /// # Errors
    /// [`EtcdError::Tls`]: the files cannot be used.
    pub fn new(options: ClientOptions) -> Result<Self, EtcdError> {
        if options.endpoints.tls {
            tls::read(&options.tls)?;
        } else if options.tls != super::TlsFiles::default() {
            let text =
                "`cacert`, `cert` and `key` need TLS: set `protocol=https`, or write `https://` before the endpoint";
            return Err(EtcdError::Tls(text.to_owned()));
        }
        Ok(Self(Arc::new(Inner {
            options,
            current: tokio::sync::Mutex::default(),
            token: SharedToken::default(),
            authenticating: tokio::sync::Mutex::default(),
            cluster: Mutex::default(),
        })))
    }

    /// How to reach the cluster.
    pub fn options(&self) -> &ClientOptions {
        &self.0.options
    }

    /// Make a call, at the next members if one fails.
    pub(super) async fn call<Q: Request>(&self, question: Q) -> Result<Q::Response, EtcdError> {
        let patience = self.0.options.patience;
        let began = Instant::now();
        let elected_by = began + ELECTION * patience;
        let (mut failures, mut authentications) = (Vec::new(), 0);
        loop {
            let connection = match self.connection().await {
                Ok(connection) => connection,
                Err(failure) if failure.leaderless && Instant::now() < elected_by => {
                    sleep(ELECTION_PAUSE).await;
                    continue;
                }
                Err(failure) => return Err(failure.error),
            };
            let token = connection.token();
            let answered = match Q::KIND {
                Kind::Renewal => repeat(&connection, &question, patience).await,
                Kind::Read | Kind::Write => connection.call(question.clone(), patience).await,
            };
            let failure = match answered {
                Ok(answer) => return Ok(answer),
                Err(failure) => failure,
            };
            match failure.remedy {
                Remedy::Authenticate if authentications < AUTHENTICATIONS && self.0.options.credentials.is_some() => {
                    authentications += 1;
                    self.0.authenticate(&connection, token).await.map_err(|failure| failure.error)?;
                }
                // etcd's users were switched on or off, and this call came first.
                Remedy::None if authentications == 0 && token.is_none() && self.0.lacks_token(&failure) => {
                    authentications += 1;
                    self.0.authenticate(&connection, token).await.map_err(|failure| failure.error)?;
                }
                Remedy::WithoutToken if token.is_some() => *self.0.token.lock() = None,
                // The other members would say the same. A watch at this one lives through an election.
                Remedy::OtherMember { .. } if failure.leaderless && began.elapsed() < patience => {
                    sleep(ELECTION_PAUSE).await
                }
                Remedy::OtherMember { sent } => {
                    connection.give_up(&failure.error.to_string());
                    if Q::KIND == Kind::Write && sent {
                        return Err(EtcdError::Unknown(format!("{}: the write may have been done", failure.error)));
                    }
                    let waits = failure.leaderless && Instant::now() < elected_by;
                    failures.push(failure);
                    // Once more than there are members: the first failure may only have shown that an idle connection had ended.
                    if !waits && failures.len() > self.0.options.endpoints.members.len() {
                        return Err(self.0.sum_up(failures).error);
                    }
                }
                _ => return Err(failure.error),
            }
        }
    }

    /// The connection in use, or a new one to a member other than the last.
    pub(super) async fn connection(&self) -> Result<Arc<Connection>, Failure> {
        let asked = Instant::now();
        let mut current = self.0.current.lock().await;
        let last = current.opened.as_ref().map(|opened| (opened.index, opened.connection.given_up()));
        if let (Some(opened), Some((_, None))) = (&current.opened, &last) {
            return Ok(Arc::clone(&opened.connection));
        }
        // Another call has tried all members while this one waited.
        if let Some((_, failure)) = current.failed.as_ref().filter(|(began, _)| *began >= asked) {
            return Err(failure.clone());
        }
        let began = Instant::now();
        let opened = match self.0.open(last.as_ref().map(|(index, _)| *index)).await {
            Ok(opened) => opened,
            Err(failure) => {
                current.failed = Some((began, failure.clone()));
                return Err(failure);
            }
        };
        let connection = Arc::clone(&opened.connection);
        match last.and_then(|(_, why)| why) {
            Some(why) => tracing::warn!("{why}; connected to etcd at {} instead", connection.member),
            None => tracing::info!("connected to etcd at {}", connection.member),
        }
        *current = Current { opened: Some(opened), failed: None };
        Ok(connection)
    }

    /// Whether it is proven that no voting member knows a leader, as of some moment after this call began. False if one does, or if
    /// one did not answer.
    pub async fn survey(&self) -> bool {
        let answers = self.0.ask_all().await;
        self.0.cluster.lock().leaderless(&answers)
    }

    /// Keep what a survey needs: the list of members, who is at which address, and, for a user, the tokens at all members, which
    /// end if they are not used. Returns whether all that is known: without it a survey may prove nothing.
    pub async fn prepare_survey(&self) -> bool {
        let Ok(connection) = self.connection().await else { return false };
        if let Ok(list) = connection.call(MemberListRequest {}, self.0.options.patience).await {
            self.0.cluster.lock().learn_members(list.members);
        }
        if self.0.options.credentials.is_some() || !self.0.cluster.lock().has_met_all() {
            self.0.ask_all().await;
        }
        self.0.cluster.lock().has_met_all()
    }
}

/// Make a call to a member several times, until one is answered.
async fn repeat<Q: Request>(
    connection: &Arc<Connection>,
    question: &Q,
    patience: Duration,
) -> Result<Q::Response, Failure> {
    let deadline = Instant::now() + patience;
    let mut asking = JoinSet::new();
    loop {
        let (connection, question) = (Arc::clone(connection), question.clone());
        let left = deadline.saturating_duration_since(Instant::now());
        asking.spawn(async move { connection.call(question, left).await });
        tokio::select! {
            Some(answered) = asking.join_next() => return answered.expect("a call does not panic"),
            () = sleep(REPEAT_EVERY), if left > REPEAT_EVERY => {}
        }
    }
}

impl Inner {
    async fn ask_all(self: &Arc<Self>) -> Vec<(Address, Answer)> {
        let addresses = self.cluster.lock().addresses(&self.options.endpoints.members);
        let mut asking = JoinSet::new();
        for address in addresses {
            let inner = Arc::clone(self);
            asking.spawn(async move {
                let opened = Connection::open(&address, &inner.options, Arc::clone(&inner.token)).await;
                let answer = match opened {
                    Ok((_, Ok(status))) => Answer::from(&status),
                    Err(failure) if failure.refused => Answer::Refused,
                    _ => Answer::Nothing,
                };
                (address, answer)
            });
        }
        let answers = asking.join_all().await;
        let mut cluster = self.cluster.lock();
        for (address, answer) in &answers {
            if let Answer::Status { id, .. } = answer {
                cluster.meet(address.clone(), *id);
            }
        }
        drop(cluster);
        answers
    }

    /// Connect to the first member that answers and knows a leader. The one at `last` is tried last.
    async fn open(self: &Arc<Self>, last: Option<usize>) -> Result<Opened, Failure> {
        let mut order: Vec<usize> = (0..self.options.endpoints.members.len()).collect();
        order.shuffle(&mut rand::rng());
        order.sort_by_key(|index| Some(*index) == last);
        let mut waiting = order.into_iter();
        let (mut racing, mut next_at) = (JoinSet::new(), Instant::now());
        let (mut failures, mut give_up_at) = (Vec::new(), None);
        loop {
            if Instant::now() >= next_at
                && let Some(index) = waiting.next()
            {
                let inner = Arc::clone(self);
                racing.spawn(async move { (index, inner.try_member(index).await) });
                next_at = Instant::now() + STAGGER;
            }
            let (index, tried) = tokio::select! {
                biased;
                Some(tried) = racing.join_next() => tried.expect("connecting does not panic"),
                () = sleep_until(next_at), if waiting.len() > 0 => continue,
                () = until(give_up_at), if give_up_at.is_some() => return Err(self.sum_up(failures)),
                else => return Err(self.sum_up(failures)),
            };
            let admitted = match tried {
                Ok((connection, status)) => self.admit(connection, status).await,
                Err(failure) => Err(failure),
            };
            match admitted {
                Ok(connection) => return Ok(Opened { index, connection: Arc::new(connection) }),
                // Another member would say the same.
                Err(failure) if failure.remedy == Remedy::None && failure.error.is_final() => return Err(failure),
                Err(failure) => failures.push(failure),
            }
            next_at = Instant::now();
            // A leader that has stopped is silent. The others are about to elect another.
            if waiting.len() == 0 && failures.iter().any(|failure: &Failure| failure.leaderless) {
                give_up_at = give_up_at.or(Some((next_at + LAST_ANSWERS).into_std()));
            }
        }
    }

    /// Connect to a member. `None`: it does not report its status without a token.
    async fn try_member(&self, index: usize) -> Result<(Connection, Option<StatusResponse>), Failure> {
        let address = &self.options.endpoints.members[index];
        let (connection, status) = Connection::open(address, &self.options, Arc::clone(&self.token)).await?;
        match status {
            Ok(status) => {
                self.judge(&connection, &status)?;
                Ok((connection, Some(status)))
            }
            Err(_) => Ok((connection, None)),
        }
    }

    /// Whether the member can serve.
    fn judge(&self, connection: &Connection, status: &StatusResponse) -> Result<(), Failure> {
        let member = &connection.member;
        if status.is_learner {
            return Err(Failure::member(format!("etcd at {member} is a learner, which serves nobody yet"), false));
        }
        if status.leader == 0 {
            return Err(Failure::no_leader(connection.to()));
        }
        self.cluster.lock().check_cluster(connection.ids.0).map_err(|other| {
            Failure::member(
                format!("etcd at {member} belongs to another cluster than {other}: name members of one"),
                false,
            )
        })
    }

    /// Authenticate if there is need, and learn who the members are.
    async fn admit(&self, mut connection: Connection, status: Option<StatusResponse>) -> Result<Connection, Failure> {
        let token = connection.token();
        if self.options.credentials.is_some() && (token.is_none() || status.is_none()) {
            self.authenticate(&connection, token).await?;
        }
        let status = match status {
            Some(status) => status,
            None => {
                let status = connection.call(StatusRequest {}, self.options.patience).await?;
                connection.note_ids(&status);
                self.judge(&connection, &status)?;
                status
            }
        };
        // An etcd with users reports this only to them, and the token may have ended at this member.
        let members = match connection.call(MemberListRequest {}, self.options.patience).await {
            Err(failure) if failure.remedy == Remedy::Authenticate => {
                self.authenticate(&connection, connection.token()).await?;
                connection.call(MemberListRequest {}, self.options.patience).await?
            }
            answered => answered?,
        };
        self.cluster.lock().learn(&connection, &status.version, members.members);
        Ok(connection)
    }

    /// Get a new token, unless another call has done so since this one saw `stale`.
    pub async fn authenticate(&self, connection: &Connection, stale: Option<Token>) -> Result<(), Failure> {
        let _alone = self.authenticating.lock().await;
        if *self.token.lock() != stale {
            return Ok(());
        }
        if stale.is_some() {
            let pause = rand::rng().random_range(Duration::ZERO..JITTER);
            sleep(pause).await;
        }
        let token = connection.authenticate(&self.options).await?;
        *self.token.lock() = token;
        Ok(())
    }

    /// Whether a call failed because it had no token, although there is a user.
    fn lacks_token(&self, failure: &Failure) -> bool {
        self.options.credentials.is_some() && matches!(failure.error, EtcdError::Denied(_))
    }

    /// What all members said, as one failure.
    fn sum_up(&self, failures: Vec<Failure>) -> Failure {
        let leaderless = failures.iter().any(|failure| failure.leaderless);
        let sent = failures.iter().any(|failure| failure.remedy == (Remedy::OtherMember { sent: true }));
        let all = |is: fn(&EtcdError) -> bool| failures.iter().all(|failure| is(&failure.error));
        let mut texts: Vec<String> = Vec::new();
        for failure in &failures {
            let text = failure.error.to_string();
            if !texts.contains(&text) {
                texts.push(text);
            }
        }
        let text = texts.join("; ");
        let error = if all(|error| matches!(error, EtcdError::WrongScheme(_))) {
            EtcdError::WrongScheme(text)
        } else if all(|error| matches!(error, EtcdError::Tls(_))) {
            EtcdError::Tls(text)
        } else {
            let untried: Vec<_> = self.options.endpoints.members.iter().map(to_text).collect();
            EtcdError::Unavailable(match text.is_empty() {
                true => format!("no member of etcd could be asked ({})", untried.join(", ")),
                false => text,
            })
        };
        Failure { leaderless, ..Failure { error, ..Failure::member(String::new(), sent) } }
    }
}
