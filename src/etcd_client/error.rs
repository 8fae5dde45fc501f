//! Errors of calls to etcd: what they mean to a caller, and what the client does about them.

use std::error::Error;
use std::time::Duration;

use tonic::{Code, Status};

/// Why a call to etcd failed. The text names the member or the cluster, the cause, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EtcdError {
    /// The lease does not exist: it has ended, or was revoked.
    #[error("{0}")]
    LeaseNotFound(String),
    /// The user may not do this, or etcd asks for a user and none was given.
    #[error("{0}")]
    Denied(String),
    /// etcd does not know this user with this password.
    #[error("{0}")]
    WrongPassword(String),
    /// The cluster takes no writes, because its space is used up.
    #[error("{0}")]
    NoSpace(String),
    /// No member could serve the call. It was not done.
    #[error("{0}")]
    Unavailable(String),
    /// A write got no answer. It may have been done.
    #[error("{0}")]
    Unknown(String),
    /// The members speak TLS and this client does not, or the other way round.
    #[error("{0}")]
    WrongScheme(String),
    /// The files for TLS cannot be used, or the members' certificates are not trusted, or the members reject this client's.
    #[error("{0}")]
    Tls(String),
    /// etcd answered with another error.
    #[error("{0}")]
    Other(String),
}

impl EtcdError {
    /// Whether the same call will fail for ever: only a change of the configuration, here or at etcd, can help.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Denied(_) | Self::WrongPassword(_) | Self::WrongScheme(_) | Self::Tls(_))
    }
}

/// A member, and the one who calls it.
#[derive(Clone, Copy, Debug)]
pub(super) struct To<'a> {
    /// The member's address.
    pub member: &'a str,
    /// The user's name, if there is one.
    pub user: Option<&'a str>,
}

/// What to do after a failed call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Remedy {
    /// Nothing: this is etcd's answer.
    None,
    /// Get a new token, and call again.
    Authenticate,
    /// etcd has no users: call without a token.
    WithoutToken,
    /// Ask another member. `sent`: this one may have done it all the same.
    OtherMember { sent: bool },
}

/// A failed call to one member.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub error: EtcdError,
    pub remedy: Remedy,
    /// The member lives and knows no leader, which an election may change soon.
    pub leaderless: bool,
    /// It came from the connection: the member has answered nothing.
    pub transport: bool,
    /// The member's host answered that no process listens there.
    pub refused: bool,
}

impl Failure {
    pub fn answer(error: EtcdError) -> Self {
        Self { error, remedy: Remedy::None, leaderless: false, transport: false, refused: false }
    }

    /// The member is no good at the moment.
    pub fn member(text: String, sent: bool) -> Self {
        Self { remedy: Remedy::OtherMember { sent }, ..Self::answer(EtcdError::Unavailable(text)) }
    }

    /// The member did not answer.
    pub fn silent(to: To<'_>, limit: Duration) -> Self {
        let text = format!("etcd at {} did not answer within {limit:.0?}", to.member);
        Self { transport: true, ..Self::member(text, true) }
    }

    pub fn no_leader(to: To<'_>) -> Self {
        let text = format!("etcd at {} knows no leader: more than half of the members must be up", to.member);
        Self { leaderless: true, ..Self::member(text, false) }
    }
}

/// The error of a call on a connection that had ended before.
pub(super) const CONNECTION_OVER: &str = "the connection has ended";

/// Why etcd does not accept a token that it gave out.
const TOKEN_ENDED: [&str; 2] = ["invalid auth token", "revision of auth store is old"];

/// Sort a failed call. The texts are those of `api/v3rpc/rpctypes/error.go` in etcd's repository.
pub(super) fn classify(status: &Status, to: To<'_>) -> Failure {
    if let Some(source) = status.source() {
        return transport(&to_text(source), to);
    }
    let To { member, .. } = to;
    let message = status.message();
    let cause = message.strip_prefix("etcdserver: ").unwrap_or(message);
    if let Some(denied) = denial(cause, to) {
        return denied;
    }
    let text = |mend: &str| format!("etcd at {member}: {cause}{mend}");
    match (status.code(), cause) {
        (_, "requested lease not found") => Failure::answer(EtcdError::LeaseNotFound(text(""))),
        (_, "mvcc: database space exceeded") => Failure::answer(EtcdError::NoSpace(text(
            ": it takes no writes until space is freed (`etcdctl compact`, `defrag`, `alarm disarm`)",
        ))),
        (_, "no leader") => Failure::no_leader(to),
        (_, "too many requests" | "rpc not supported for learner" | "server stopped" | "raft proposal dropped") => {
            Failure::member(text(""), false)
        }
        (Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::Aborted | Code::Unknown, _) => {
            Failure::member(text(""), true)
        }
        (Code::Unimplemented, _) => Failure::answer(EtcdError::Other(format!(
            "{member} speaks gRPC, but is no etcd with the v3 API ({cause}): check the endpoint"
        ))),
        (code, _) => Failure::answer(EtcdError::Other(format!("etcd at {member}: {cause} ({code:?})"))),
    }
}

/// What etcd says about users and rights, in an error or as the reason why a watch ends.
pub(super) fn denial(cause: &str, to: To<'_>) -> Option<Failure> {
    let cause = cause.rsplit_once("etcdserver: ").map_or(cause, |(_, cause)| cause);
    let To { member, user } = to;
    let who = user.map_or("this client".to_owned(), |user| format!("user `{user}`"));
    let error = match cause {
        "permission denied" => EtcdError::Denied(format!(
            "etcd at {member} denies {who} access to these keys (permission denied): grant its role `readwrite` on the prefix"
        )),
        "user name is empty" => EtcdError::Denied(format!(
            "etcd at {member} requires a user: give `username` and `password_file`, or a client certificate (`cert`, `key`)"
        )),
        "user name not found" => EtcdError::Denied(format!("etcd at {member} does not know {who}: add the user there")),
        "authentication failed, invalid user ID or password" => EtcdError::WrongPassword(format!(
            "etcd at {member} rejects the password of {who}: check `username` and `password_file`"
        )),
        ended if TOKEN_ENDED.contains(&ended) => {
            let text = format!("etcd at {member} does not accept the token that it gave to {who} ({ended})");
            return Some(Failure { remedy: Remedy::Authenticate, ..Failure::answer(EtcdError::Denied(text)) });
        }
        "authentication is not enabled" => {
            let text = format!("etcd at {member} has no users (authentication is not enabled)");
            return Some(Failure { remedy: Remedy::WithoutToken, ..Failure::answer(EtcdError::Other(text)) });
        }
        _ => return None,
    };
    Some(Failure::answer(error))
}

/// The connection failed.
pub(super) fn transport(cause: &str, to: To<'_>) -> Failure {
    let To { member, .. } = to;
    let failure = match tls_mend(cause) {
        // The member has refused this client's certificate, or this client the member's.
        Some(mend) => {
            let error = EtcdError::Tls(format!("TLS with etcd at {member} failed: {cause}: {mend}"));
            Failure { error, ..Failure::member(String::new(), false) }
        }
        None => {
            let sent = !cause.contains(CONNECTION_OVER);
            Failure::member(format!("the connection to etcd at {member} failed: {cause}"), sent)
        }
    };
    Failure { transport: true, ..failure }
}

/// If the cause is one of TLS that stays: what to do about it. The texts are those of rustls.
fn tls_mend(cause: &str) -> Option<&'static str> {
    let table = [
        ("UnknownIssuer", "give the certificate of its authority as `cacert`"),
        (
            "not valid for name",
            "name it in the endpoint as its certificate does, or give it a certificate with this name",
        ),
        ("NotValidForName", "name it in the endpoint as its certificate does, or give it a certificate with this name"),
        ("Expired", "its certificate has to be renewed"),
        ("expired", "a certificate has to be renewed"),
        ("NotValidYet", "check the clocks, and the certificate's dates"),
        (
            "received fatal alert",
            "it does not accept this client: give a certificate that it trusts as `cert` and `key`",
        ),
        ("HTTP/2 was not negotiated", "it speaks TLS, but is no etcd: check the port"),
        ("invalid peer certificate", "check its certificate and `cacert`"),
    ];
    table.iter().find(|(text, _)| cause.contains(text)).map(|(_, mend)| *mend)
}

/// An error with its sources, each text once.
pub(super) fn to_text(error: &dyn Error) -> String {
    let mut texts: Vec<String> = Vec::new();
    let mut next = Some(error);
    while let Some(error) = next {
        let text = error.to_string();
        match texts.last() {
            // Some errors repeat their source.
            Some(last) if last.ends_with(&text) => {}
            _ => texts.push(text),
        }
        next = error.source();
    }
    // tonic's own error says no more than this.
    texts.retain(|text| text != "transport error" && text != "tcp connect error");
    texts.join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const TO: To<'static> = To { member: "h1:2379", user: Some("ann") };

    fn sorted(code: Code, message: &str) -> (EtcdError, Remedy) {
        let failure = classify(&Status::new(code, message), TO);
        (failure.error, failure.remedy)
    }

    #[test]
    fn etcds_errors_are_distinguished_by_what_helps() {
        let (error, remedy) = sorted(Code::NotFound, "etcdserver: requested lease not found");
        assert!(matches!(error, EtcdError::LeaseNotFound(_)) && remedy == Remedy::None && !error.is_final());
        let (error, _) = sorted(Code::ResourceExhausted, "etcdserver: mvcc: database space exceeded");
        assert!(matches!(error, EtcdError::NoSpace(_)) && !error.is_final());
        let (error, remedy) = sorted(Code::PermissionDenied, "etcdserver: permission denied");
        assert!(matches!(error, EtcdError::Denied(_)) && error.is_final() && remedy == Remedy::None);
        assert!(error.to_string().contains("user `ann`"), "{error}");
        for ended in ["etcdserver: invalid auth token", "etcdserver: revision of auth store is old"] {
            assert_eq!(sorted(Code::Unauthenticated, ended).1, Remedy::Authenticate);
        }
        let wrong = "etcdserver: authentication failed, invalid user ID or password";
        assert!(matches!(sorted(Code::InvalidArgument, wrong).0, EtcdError::WrongPassword(_)));
        assert_eq!(sorted(Code::Unavailable, "etcdserver: no leader").1, Remedy::OtherMember { sent: false });
        assert_eq!(sorted(Code::Unavailable, "etcdserver: leader changed").1, Remedy::OtherMember { sent: true });
        assert_eq!(sorted(Code::InvalidArgument, "etcdserver: request is too large").1, Remedy::None);
        assert!(matches!(sorted(Code::Unimplemented, "unknown service").0, EtcdError::Other(_)));
    }

    #[test]
    fn failures_of_tls_that_stay_say_what_helps() {
        let failure = transport("invalid peer certificate: UnknownIssuer", TO);
        assert!(failure.error.is_final() && failure.error.to_string().ends_with("as `cacert`"), "{failure:?}");
        let failure = transport("received fatal alert: CertificateRequired", TO);
        assert!(failure.error.to_string().ends_with("as `cert` and `key`"), "{failure:?}");
        assert!(!transport("tls handshake eof", TO).error.is_final());
    }
}
