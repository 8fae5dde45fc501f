//! Watches: the changes of keys, in order and without gaps, until the watch ends.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use super::calls::{KeyValue, end_of, revision, signed, unsigned};
use super::client::Client;
use super::connection::Connection;
use super::error::{EtcdError, Failure, Remedy, classify, denial};
use super::messages::{
    EVENT_DELETE, EventMessage, WatchCreateRequest, WatchProgressRequest, WatchRequest, WatchRequestKind, WatchResponse,
};

/// A change of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyChange {
    /// The key.
    pub key: Vec<u8>,
    /// What it holds now. `None`: it was deleted, or its lease has ended.
    pub now: Option<KeyValue>,
}

/// What a watch has reported.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The changes, by revision, revisions in order. Empty if etcd only reported its progress.
    pub changes: Vec<(u64, Vec<KeyChange>)>,
    /// The revision that the member had when it reported.
    pub revision: u64,
}

/// Largest total of the parts of one report, in changes and in bytes of their values. etcd joins at most 1,000 revisions.
const REPORT_LIMIT: usize = 1 << 20;
const REPORT_LIMIT_BYTES: usize = 256 << 20;

/// An open watch. Dropping it ends it.
#[derive(Debug)]
pub struct Watch {
    connection: Arc<Connection>,
    requests: mpsc::Sender<WatchRequest>,
    responses: Streaming<WatchResponse>,
    /// The parts of a report that is not complete.
    parts: Vec<EventMessage>,
    patience: Duration,
}

impl Client {
    /// Watch the keys that begin with `prefix`, from revision `from` on.
    ///
    /// # Errors
    /// [`EtcdError`]. `Other` if `from` was compacted.
    pub async fn watch(&self, prefix: &[u8], from: u64) -> Result<Watch, EtcdError> {
        self.watch_range(prefix.to_vec(), end_of(prefix), from).await
    }

    /// Wait until a key changes after revision `after`. It may also return when nothing has changed: look again then.
    ///
    /// # Errors
    /// [`EtcdError`].
    pub async fn changed(&self, key: &[u8], after: u64) -> Result<(), EtcdError> {
        let patience = self.options().patience;
        let mut watch = self.watch_range(key.to_vec(), Vec::new(), after + 1).await?;
        loop {
            // A member that has stopped must be noticed, also where nothing changes.
            let report = match timeout(2 * patience, watch.next()).await {
                Ok(report) => report,
                Err(_) => {
                    watch.ask_progress();
                    match timeout(patience, watch.next()).await {
                        Ok(report) => report,
                        Err(_) => {
                            watch.give_up(&format!("the watch at etcd at {} is silent", watch.connection.member));
                            return Ok(());
                        }
                    }
                }
            };
            match report {
                Ok(report) if report.changes.is_empty() => {}
                // Whoever looks again connects to another member, or learns why there is none.
                Ok(_) | Err(_) => return Ok(()),
            }
        }
    }

    async fn watch_range(&self, key: Vec<u8>, range_end: Vec<u8>, from: u64) -> Result<Watch, EtcdError> {
        let patience = self.options().patience;
        let mut authenticated = false;
        loop {
            let connection = self.connection().await.map_err(|failure| failure.error)?;
            let token = connection.token();
            let create = WatchCreateRequest {
                key: key.clone(),
                range_end: range_end.clone(),
                start_revision: signed(from),
                fragment: true,
            };
            let failure = match Watch::open(connection.clone(), create, patience).await {
                Ok(watch) => return Ok(watch),
                Err(failure) => failure,
            };
            // Some versions say "permission denied" when a token has ended.
            let denied = failure.remedy == Remedy::Authenticate || matches!(failure.error, EtcdError::Denied(_));
            if denied && !authenticated && self.options().credentials.is_some() {
                authenticated = true;
                self.0.authenticate(&connection, token).await.map_err(|failure| failure.error)?;
                continue;
            }
            if let Remedy::OtherMember { .. } = failure.remedy {
                connection.give_up(&failure.error.to_string());
            }
            return Err(failure.error);
        }
    }
}

impl Watch {
    async fn open(
        connection: Arc<Connection>,
        create: WatchCreateRequest,
        patience: Duration,
    ) -> Result<Self, Failure> {
        let (requests, receiver) = mpsc::channel(4);
        let request = WatchRequest { request: Some(WatchRequestKind::Create(create)) };
        // The channel is empty and its receiver is here.
        let _ = requests.try_send(request);
        let responses = connection.watch(ReceiverStream::new(receiver), patience).await?;
        let mut watch = Self { connection, requests, responses, parts: Vec::new(), patience };
        match timeout(patience, watch.response()).await {
            Ok(Ok(_)) => Ok(watch),
            Ok(Err(failure)) => Err(failure),
            Err(_) => Err(Failure::silent(watch.connection.to(), watch.patience)),
        }
    }

    /// Wait for the next report. Dropping the future loses nothing.
    ///
    /// # Errors
    /// Why the watch has ended.
    pub async fn next(&mut self) -> Result<Report, EtcdError> {
        loop {
            let response = self.response().await.map_err(|failure| {
                if let Remedy::OtherMember { .. } = failure.remedy {
                    self.connection.give_up(&failure.error.to_string());
                }
                failure.error
            })?;
            self.parts.extend(response.events);
            let bytes =
                || self.parts.iter().filter_map(|part| part.kv.as_ref()).map(|kv| kv.value.len()).sum::<usize>();
            if self.parts.len() > REPORT_LIMIT || bytes() > REPORT_LIMIT_BYTES {
                let text = format!("etcd at {} reports more changes at once than can be held", self.connection.member);
                return Err(EtcdError::Other(text));
            }
            if !response.fragment {
                let changes = by_revision(std::mem::take(&mut self.parts));
                return Ok(Report { changes, revision: revision(response.header.as_ref()) });
            }
        }
    }

    /// Ask the member how far it is. It answers with a report, with or without changes. Dropped if it has not taken the last ones.
    pub fn ask_progress(&self) {
        let request = WatchRequest { request: Some(WatchRequestKind::Progress(WatchProgressRequest {})) };
        let _ = self.requests.try_send(request);
    }

    /// Leave the member: the next call goes to another.
    pub fn give_up(&self, why: &str) {
        self.connection.give_up(why);
    }

    /// The member's address.
    pub fn member(&self) -> &str {
        &self.connection.member
    }

    async fn response(&mut self) -> Result<WatchResponse, Failure> {
        let to = self.connection.to();
        let next = tokio::select! {
            next = self.responses.next() => next,
            why = self.connection.until_over() => return Err(Failure::member(why, false)),
        };
        let response = match next {
            Some(Ok(response)) => response,
            Some(Err(status)) => return Err(classify(&status, to)),
            None => return Err(Failure::member(format!("etcd at {} ended a watch", to.member), false)),
        };
        if !response.canceled {
            return Ok(response);
        }
        let reason = &response.cancel_reason;
        Err(match denial(reason, to) {
            Some(denied) => denied,
            None if response.compact_revision > 0 => {
                let text =
                    format!("etcd at {} has compacted the revisions before {}", to.member, response.compact_revision);
                Failure::answer(EtcdError::Other(text))
            }
            None => Failure::answer(EtcdError::Other(format!("etcd at {} ended a watch: {reason}", to.member))),
        })
    }
}

/// Group changes by their revision. etcd reports revisions in order, and each whole.
fn by_revision(events: Vec<EventMessage>) -> Vec<(u64, Vec<KeyChange>)> {
    let mut grouped: Vec<(u64, Vec<KeyChange>)> = Vec::new();
    for event in events {
        let Some(kv) = event.kv else { continue };
        let revision = unsigned(kv.mod_revision);
        let now = (event.kind != EVENT_DELETE).then(|| KeyValue::from(kv.clone()));
        let change = KeyChange { key: kv.key, now };
        match grouped.last_mut() {
            Some((last, changes)) if *last == revision => changes.push(change),
            _ => grouped.push((revision, vec![change])),
        }
    }
    grouped
}

#[cfg(test)]
mod tests {
    use super::super::messages::KeyValueMessage;
    use super::*;

    #[test]
    fn changes_are_grouped_by_revision() {
        let event = |kind, key: &[u8], mod_revision| EventMessage {
            kind,
            kv: Some(KeyValueMessage { key: key.to_vec(), mod_revision, ..KeyValueMessage::default() }),
        };
        let grouped = by_revision(vec![event(0, b"a", 5), event(1, b"b", 5), event(0, b"a", 6)]);
        let shape: Vec<_> = grouped.iter().map(|(revision, changes)| (*revision, changes.len())).collect();
        assert_eq!(shape, [(5, 2), (6, 1)]);
        assert_eq!((grouped[0].1[1].key.as_slice(), &grouped[0].1[1].now), (&b"b"[..], &None));
    }
}
