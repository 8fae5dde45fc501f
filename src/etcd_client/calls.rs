//! The calls: keys, transactions and leases.

use std::time::Duration;

use super::client::Client;
use super::error::EtcdError;
use super::messages::{
    COMPARE_EQUAL, COMPARE_MOD, Compare, CompareTarget, DeleteRangeRequest, KeyValueMessage, LeaseGrantRequest,
    LeaseKeepAliveRequest, LeaseRevokeRequest, PutRequest, RangeRequest, RequestOp, RequestOpKind, ResponseHeader,
    ResponseOpKind, TxnRequest,
};

/// A key with its value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyValue {
    /// The key.
    pub key: Vec<u8>,
    /// The value.
    pub value: Vec<u8>,
    /// The revision at which the key was created.
    pub created: u64,
    /// The revision of its last change.
    pub modified: u64,
    /// The lease that it is attached to. 0: none.
    pub lease: u64,
}

impl From<KeyValueMessage> for KeyValue {
    fn from(message: KeyValueMessage) -> Self {
        Self {
            key: message.key,
            value: message.value,
            created: unsigned(message.create_revision),
            modified: unsigned(message.mod_revision),
            lease: unsigned(message.lease),
        }
    }
}

/// A key to put.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Put {
    /// The key.
    pub key: Vec<u8>,
    /// Its new value.
    pub value: Vec<u8>,
    /// The lease to attach it to. 0: none.
    pub lease: u64,
}

/// What came of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TxnOutcome {
    /// Its keys were put, at this revision.
    Done(u64),
    /// The condition does not hold. What was read instead, and the revision at which it was.
    Refused(Vec<KeyValue>, u64),
}

/// What came of a renewal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Renewal {
    /// Whether the lease exists.
    pub held: bool,
    /// The member's revision, from before the renewal.
    pub revision: u64,
}

/// The first key after all that begin with `prefix`.
pub fn end_of(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    // All keys from `prefix` on.
    vec![0]
}

impl Client {
    /// All keys that begin with `prefix`, in order, and the revision at which they were read.
    ///
    /// # Errors
    /// [`EtcdError`].
    pub async fn range(&self, prefix: &[u8]) -> Result<(Vec<KeyValue>, u64), EtcdError> {
        let request = RangeRequest { key: prefix.to_vec(), range_end: end_of(prefix), limit: 0 };
        let response = self.call(request).await?;
        Ok((response.kvs.into_iter().map(KeyValue::from).collect(), revision(response.header.as_ref())))
    }

    /// One key, if it exists, and the revision at which it was read.
    ///
    /// # Errors
    /// [`EtcdError`].
    pub async fn get(&self, key: &[u8]) -> Result<(Option<KeyValue>, u64), EtcdError> {
        let request = RangeRequest { key: key.to_vec(), ..RangeRequest::default() };
        let response = self.call(request).await?;
        Ok((response.kvs.into_iter().next().map(KeyValue::from), revision(response.header.as_ref())))
    }

    /// Put a key, attached to `lease` (0: to none). Returns the revision.
    ///
    /// # Errors
    /// [`EtcdError::LeaseNotFound`], [`EtcdError::Unknown`] if it may have been done, and others.
    pub async fn put(&self, key: &[u8], value: &[u8], lease: u64) -> Result<u64, EtcdError> {
        let request = PutRequest { key: key.to_vec(), value: value.to_vec(), lease: signed(lease) };
        Ok(revision(self.call(request).await?.header.as_ref()))
    }

    /// Delete a key. Returns the number of keys deleted: 0 or 1.
    ///
    /// # Errors
    /// [`EtcdError::Unknown`] if it may have been done, and others.
    pub async fn delete(&self, key: &[u8]) -> Result<u64, EtcdError> {
        let request = DeleteRangeRequest { key: key.to_vec(), range_end: Vec::new() };
        Ok(unsigned(self.call(request).await?.deleted))
    }

    /// Delete all keys that begin with `prefix`. Returns their number.
    ///
    /// # Errors
    /// [`EtcdError::Unknown`] if it may have been done, and others.
    pub async fn delete_all(&self, prefix: &[u8]) -> Result<u64, EtcdError> {
        let request = DeleteRangeRequest { key: prefix.to_vec(), range_end: end_of(prefix) };
        Ok(unsigned(self.call(request).await?.deleted))
    }

    /// Put a key if its `mod_revision` is `expect` (0: it does not exist), and return the new revision. Otherwise return what the
    /// key holds.
    ///
    /// # Errors
    /// [`EtcdError::LeaseNotFound`], [`EtcdError::Unknown`] if it may have been done, and others.
    pub async fn compare_and_put(
        &self,
        key: &[u8],
        expect: u64,
        value: &[u8],
        lease: u64,
    ) -> Result<Result<u64, Option<KeyValue>>, EtcdError> {
        let put = Put { key: key.to_vec(), value: value.to_vec(), lease };
        let otherwise = RangeRequest { key: key.to_vec(), ..RangeRequest::default() };
        match self.txn_with(key, expect, vec![put], otherwise).await? {
            TxnOutcome::Done(revision) => Ok(Ok(revision)),
            TxnOutcome::Refused(found, _) => Ok(Err(found.into_iter().next())),
        }
    }

    /// Put some keys if the `mod_revision` of `key` is `expect` (0: it does not exist). Otherwise read all keys that begin with
    /// `prefix`.
    ///
    /// # Errors
    /// [`EtcdError::LeaseNotFound`], [`EtcdError::Unknown`] if it may have been done, and others.
    pub async fn txn(&self, key: &[u8], expect: u64, puts: Vec<Put>, prefix: &[u8]) -> Result<TxnOutcome, EtcdError> {
        let otherwise = RangeRequest { key: prefix.to_vec(), range_end: end_of(prefix), limit: 0 };
        self.txn_with(key, expect, puts, otherwise).await
    }

    async fn txn_with(
        &self,
        key: &[u8],
        expect: u64,
        puts: Vec<Put>,
        otherwise: RangeRequest,
    ) -> Result<TxnOutcome, EtcdError> {
        let compare = Compare {
            result: COMPARE_EQUAL,
            target: COMPARE_MOD,
            key: key.to_vec(),
            target_union: Some(CompareTarget::ModRevision(signed(expect))),
        };
        let put = |Put { key, value, lease }| RequestOp {
            request: Some(RequestOpKind::Put(PutRequest { key, value, lease: signed(lease) })),
        };
        let request = TxnRequest {
            compare: vec![compare],
            success: puts.into_iter().map(put).collect(),
            failure: vec![RequestOp { request: Some(RequestOpKind::Range(otherwise)) }],
        };
        let response = self.call(request).await?;
        let revision = revision(response.header.as_ref());
        if response.succeeded {
            return Ok(TxnOutcome::Done(revision));
        }
        match response.responses.into_iter().next().and_then(|response| response.response) {
            Some(ResponseOpKind::Range(range)) => {
                Ok(TxnOutcome::Refused(range.kvs.into_iter().map(KeyValue::from).collect(), revision))
            }
            _ => Err(EtcdError::Other(format!(
                "etcd at {} answered a refused transaction without what it was to read",
                self.options().endpoints
            ))),
        }
    }

    /// Grant a lease of `ttl`, in whole seconds, rounded up. Returns its id.
    ///
    /// # Errors
    /// [`EtcdError`].
    pub async fn lease_grant(&self, ttl: Duration) -> Result<u64, EtcdError> {
        let seconds = ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0);
        let response = self.call(LeaseGrantRequest { ttl: signed(seconds), id: 0 }).await?;
        match response.error.as_str() {
            "" => Ok(unsigned(response.id)),
            error => Err(EtcdError::Other(format!("etcd at {} grants no lease: {error}", self.options().endpoints))),
        }
    }

    /// Renew a lease. Returns whether it exists.
    ///
    /// # Errors
    /// [`EtcdError`].
    pub async fn lease_renew(&self, lease: u64) -> Result<bool, EtcdError> {
        Ok(self.renew(lease).await?.held)
    }

    /// Like [`Client::lease_renew`], with the member's revision.
    pub(crate) async fn renew(&self, lease: u64) -> Result<Renewal, EtcdError> {
        let response = self.call(LeaseKeepAliveRequest { id: signed(lease) }).await?;
        Ok(Renewal { held: response.ttl > 0, revision: revision(response.header.as_ref()) })
    }

    /// End a lease, and delete its keys. One that does not exist is no error.
    ///
    /// # Errors
    /// [`EtcdError`].
    pub async fn lease_revoke(&self, lease: u64) -> Result<(), EtcdError> {
        match self.call(LeaseRevokeRequest { id: signed(lease) }).await {
            Ok(_) | Err(EtcdError::LeaseNotFound(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

pub(super) fn revision(header: Option<&ResponseHeader>) -> u64 {
    header.map_or(0, |header| unsigned(header.revision))
}

/// etcd's numbers are signed and not negative. Ids of leases may have any bits: both casts keep them.
pub(super) fn unsigned(number: i64) -> u64 {
    number as u64
}

pub(super) fn signed(number: u64) -> i64 {
    number as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_ends_after_the_last_key_with_its_prefix() {
        assert_eq!(end_of(b"/a/"), b"/a0");
        assert_eq!(end_of(b"a\xff\xff"), b"b");
        assert_eq!(end_of(b"\xff"), [0]);
        assert_eq!(end_of(b""), [0]);
    }
}
