//! The calls: which request goes to which method of etcd's, and what may be done when no answer comes.

use prost::Message;

use super::messages::{
    AuthenticateRequest, AuthenticateResponse, DeleteRangeRequest, DeleteRangeResponse, LeaseGrantRequest,
    LeaseGrantResponse, LeaseKeepAliveRequest, LeaseKeepAliveResponse, LeaseRevokeRequest, LeaseRevokeResponse,
    MemberListRequest, MemberListResponse, PutRequest, PutResponse, RangeRequest, RangeResponse, StatusRequest,
    StatusResponse, TxnRequest, TxnResponse,
};

/// A request, with the call that it belongs to.
pub(super) trait Request: Message + Clone + 'static {
    /// The answer.
    type Response: Message + Default + 'static;
    /// The path of the gRPC method.
    const PATH: &'static str;
    /// What may be done when no answer comes.
    const KIND: Kind;
}

/// What may be done when no answer to a call comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Ask another member.
    Read,
    /// Nothing: it changes keys, and doing it twice may do something else than doing it once.
    Write,
    /// Ask the same member again meanwhile. A member that has passed the question on to a leader that stopped waits for 7 s, and the
    /// same question to the next leader takes milliseconds.
    Renewal,
}

/// Declare the calls: request, answer, path and kind.
macro_rules! calls {
    ($($request:ty => $response:ty, $path:literal, $kind:ident;)+) => {
        $(impl Request for $request {
            type Response = $response;
            const PATH: &'static str = $path;
            const KIND: Kind = Kind::$kind;
        })+
    };
}

calls! {
    RangeRequest => RangeResponse, "/etcdserverpb.KV/Range", Read;
    PutRequest => PutResponse, "/etcdserverpb.KV/Put", Write;
    DeleteRangeRequest => DeleteRangeResponse, "/etcdserverpb.KV/DeleteRange", Write;
    TxnRequest => TxnResponse, "/etcdserverpb.KV/Txn", Write;
    // A second lease that nobody knows of ends by itself.
    LeaseGrantRequest => LeaseGrantResponse, "/etcdserverpb.Lease/LeaseGrant", Read;
    LeaseRevokeRequest => LeaseRevokeResponse, "/etcdserverpb.Lease/LeaseRevoke", Read;
    // A stream of both. With one message each it has the form of a single call.
    LeaseKeepAliveRequest => LeaseKeepAliveResponse, "/etcdserverpb.Lease/LeaseKeepAlive", Renewal;
    MemberListRequest => MemberListResponse, "/etcdserverpb.Cluster/MemberList", Read;
    StatusRequest => StatusResponse, "/etcdserverpb.Maintenance/Status", Read;
    AuthenticateRequest => AuthenticateResponse, "/etcdserverpb.Auth/Authenticate", Read;
}

/// The path of the stream of watches.
pub(super) const WATCH_PATH: &str = "/etcdserverpb.Watch/Watch";
