//! The proof of both ends, once TLS stands and before anything else is said. Its bytes are in [`super::claim`].

use std::fmt;

use bytes::BytesMut;
use ring::hmac;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::TOKEN_FILE;
use super::claim::{Answer, Claim, MAC_BYTES, Mac};
use super::objection::to_text;
use super::tls::Secret;
use super::token::{KeyId, Token};

/// What a peer may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Everything.
    Node,
    /// To read. Sessions of nodes are refused.
    Observer,
}

/// By what a peer is proven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evidence {
    /// A token with this public name.
    Token(KeyId),
    /// A certificate. It may speak for any run.
    Certificate,
}

impl fmt::Display for Evidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Token(key) => write!(f, "the token with the id {key}"),
            Self::Certificate => f.write_str("the certificate"),
        }
    }
}

/// What a peer has proven.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The run for which it speaks.
    pub run_id: String,
    /// What it may do.
    pub role: Role,
    /// By what.
    pub evidence: Evidence,
}

impl Identity {
    /// Whether a node of this run may come in with it. One token, or a certificate, may serve several runs.
    ///
    /// # Errors
    /// Why not.
    pub fn admits_node_of(&self, run_id: &str) -> Result<(), String> {
        let evidence = self.evidence;
        match self.role {
            Role::Observer => Err(format!("{evidence} is an observer's: no node may join with it")),
            Role::Node if self.run_id != run_id => {
                Err(format!("{evidence} was proven for another run than `{run_id}`"))
            }
            Role::Node => Ok(()),
        }
    }

    /// Whether it is good for reading how this run does.
    ///
    /// # Errors
    /// Why not.
    pub fn admits_observer_of(&self, run_id: Option<&str>) -> Result<(), String> {
        match run_id == Some(&self.run_id) {
            true => Ok(()),
            false => Err(format!("{} was proven for the run `{}` alone", self.evidence, self.run_id)),
        }
    }
}

/// The node's end. Without a token, the certificates that TLS has shown are the proof of both ends.
pub(super) async fn prove(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    token: Option<&Token>,
    run_id: &str,
    secret: &Secret,
) -> Result<(), String> {
    let claim = Claim { key: token.map(|token| token.id().0), run_id: run_id.to_owned() }.encode()?;
    let mac = token.map(|token| token.mac(&[b"c", secret, &claim]));
    let mac = mac.as_ref().map_or(&[][..], |mac| mac.as_ref());
    send(stream, &[&claim[..], mac].concat()).await?;
    match (receive(stream, Answer::decode).await?, token) {
        (Answer::Refused(reason), Some(_)) => Err(format!("it refuses this node's token: {reason}")),
        (Answer::Refused(reason), None) => Err(format!("it refuses this node: {reason}")),
        (Answer::Admitted, None) => Ok(()),
        (Answer::Proven(theirs), Some(token)) => {
            let message = [&b"s"[..], secret, mac].concat();
            hmac::verify(&token.key(), &message, &theirs).map_err(|_| not_held(token))
        }
        (Answer::Admitted, Some(token)) => Err(not_held(token)),
        (Answer::Proven(_), None) => Err("it answers with a proof that it was not asked for".to_owned()),
    }
}

fn not_held(token: &Token) -> String {
    let id = token.id();
    format!(
        "it does not hold the token with the id {id} ({TOKEN_FILE}): give both ends the same token; if they have it, somebody intercepts the connection"
    )
}

/// The coordinator's end. `accepted` names the tokens that are good for a run. `None`: certificates alone are the proof, and TLS has
/// checked the peer's. The peer has got the error.
pub(super) async fn check(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    accepted: impl AsyncFnOnce(&str) -> Option<Vec<Token>>,
    secret: &Secret,
) -> Result<Identity, String> {
    let judged = match receive(stream, Claim::decode).await {
        Ok((claim, mac)) => {
            let accepted = accepted(&claim.run_id).await;
            judge(claim, mac, accepted, secret)
        }
        Err(error) => Err(error),
    };
    match judged {
        Ok((identity, answer)) => send(stream, &answer.encode()).await.map(|()| identity),
        Err(reason) => {
            refuse(stream, reason.clone()).await;
            Err(reason)
        }
    }
}

/// Tell a node why it is refused.
async fn refuse(stream: &mut (impl AsyncWrite + Unpin), reason: String) {
    let _ = send(stream, &Answer::Refused(reason).encode()).await;
    let _ = stream.shutdown().await;
}

/// What a node has proven, and the answer by which the coordinator is proven to it.
fn judge(
    claim: Claim,
    mac: Option<Mac>,
    accepted: Option<Vec<Token>>,
    secret: &Secret,
) -> Result<(Identity, Answer), String> {
    let (id, mac, accepted) = match (claim.key, mac, accepted) {
        (Some(id), Some(mac), Some(accepted)) => (id, mac, accepted),
        (None, _, None) => {
            let identity = Identity { run_id: claim.run_id, role: Role::Node, evidence: Evidence::Certificate };
            return Ok((identity, Answer::Admitted));
        }
        (_, _, Some(_)) => {
            return Err(format!(
                "the certificate alone is not enough: name the file with the job's token in {TOKEN_FILE}"
            ));
        }
        (_, _, None) => {
            return Err(format!(
                "the other end has certificates and no token: set {TOKEN_FILE} at both ends, or at none"
            ));
        }
    };
    let key = KeyId(id);
    let roles = |token: Token| [(token.for_observers(), Role::Observer), (token, Role::Node)];
    let held = accepted.into_iter().flat_map(roles).find(|(token, _)| token.id() == key);
    let Some((token, role)) = held else {
        return Err(format!("no token with the id {key} is accepted for this run"));
    };
    let message = [&b"c"[..], secret, &claim.encode()?].concat();
    hmac::verify(&token.key(), &message, &mac).map_err(|_| {
        format!("the proof for the token with the id {key} is wrong: somebody may intercept the connection")
    })?;
    let mut own = [0; MAC_BYTES];
    own.copy_from_slice(token.mac(&[b"s", secret, &mac]).as_ref());
    Ok((Identity { run_id: claim.run_id, role, evidence: Evidence::Token(key) }, Answer::Proven(own)))
}

async fn send(stream: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> Result<(), String> {
    let sent = async {
        stream.write_all(bytes).await?;
        stream.flush().await
    };
    sent.await.map_err(|error: std::io::Error| ended(&error))
}

fn ended(error: &std::io::Error) -> String {
    to_text(error).unwrap_or_else(|| format!("the connection ended before authentication: {error}"))
}

/// Read until all bytes have come.
async fn receive<T>(
    stream: &mut (impl AsyncRead + Unpin),
    decode: impl Fn(&[u8]) -> Result<Option<T>, String>,
) -> Result<T, String> {
    let mut bytes = BytesMut::new();
    loop {
        if let Some(complete) = decode(&bytes)? {
            return Ok(complete);
        }
        match stream.read_buf(&mut bytes).await {
            Ok(1..) => {}
            Ok(0) => return Err("the connection ended before authentication".to_owned()),
            Err(error) => return Err(ended(&error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::duplex;

    use super::*;

    const OURS: Secret = [7; 32];

    fn token(digit: &str) -> Token {
        Token::parse(&digit.repeat(64)).unwrap()
    }

    /// Both ends' results, if each believes in its own secret of the connection.
    async fn meet(
        node: Option<Token>,
        held: Option<&[Token]>,
        secrets: (Secret, Secret),
    ) -> (Result<(), String>, Result<Identity, String>) {
        let (mut left, mut right) = duplex(4096);
        tokio::join!(async { prove(&mut left, node.as_ref(), "run", &secrets.0).await }, async {
            check(&mut right, async |_| held.map(<[Token]>::to_vec), &secrets.1).await
        },)
    }

    #[tokio::test]
    async fn both_ends_are_proven_by_any_token_that_is_accepted() {
        for held in [vec![token("a")], vec![token("b"), token("a")]] {
            let (node, coordinator) = meet(Some(token("a")), Some(&held), (OURS, OURS)).await;
            assert_eq!(node, Ok(()));
            let evidence = Evidence::Token(token("a").id());
            assert_eq!(coordinator, Ok(Identity { run_id: "run".into(), role: Role::Node, evidence }));
        }
        let (node, coordinator) = meet(Some(token("a").for_observers()), Some(&[token("a")]), (OURS, OURS)).await;
        assert_eq!((node, coordinator.map(|identity| identity.role)), (Ok(()), Ok(Role::Observer)));
    }

    #[tokio::test]
    async fn another_token_is_refused_by_its_id() {
        let (node, coordinator) = meet(Some(token("a")), Some(&[token("b")]), (OURS, OURS)).await;
        let why = format!("no token with the id {} is accepted for this run", token("a").id());
        assert_eq!(node, Err(format!("it refuses this node's token: {why}")));
        assert_eq!(coordinator, Err(why));
    }

    #[tokio::test]
    async fn whoever_stands_between_has_two_secrets_and_is_refused() {
        let (node, coordinator) = meet(Some(token("a")), Some(&[token("a")]), (OURS, [8; 32])).await;
        assert!(node.unwrap_err().contains("somebody may intercept the connection"));
        assert!(coordinator.unwrap_err().contains("somebody may intercept the connection"));
    }

    #[tokio::test]
    async fn without_tokens_certificates_are_the_proof_and_both_ends_have_to_say_so() {
        let (node, coordinator) = meet(None, None, (OURS, OURS)).await;
        assert_eq!(node, Ok(()));
        let identity = coordinator.unwrap();
        assert_eq!(identity, Identity { run_id: "run".into(), role: Role::Node, evidence: Evidence::Certificate });
        assert_eq!((identity.admits_node_of("run"), identity.admits_observer_of(Some("run"))), (Ok(()), Ok(())));
        assert!(identity.admits_observer_of(None).unwrap_err().contains("was proven for the run `run` alone"));
        assert!(identity.admits_node_of("other").unwrap_err().contains("the certificate was proven for another run"));
        let (node, coordinator) = meet(None, Some(&[token("a")]), (OURS, OURS)).await;
        assert!(node.unwrap_err().contains("the certificate alone is not enough"));
        assert!(coordinator.unwrap_err().contains("name the file with the job's token"));
        let (node, coordinator) = meet(Some(token("a")), None, (OURS, OURS)).await;
        assert!(node.unwrap_err().contains("certificates and no token"));
        assert!(coordinator.unwrap_err().contains("certificates and no token"));
    }

    #[tokio::test]
    async fn a_node_does_not_believe_a_coordinator_without_the_token() {
        for answer in [Answer::Proven([0; MAC_BYTES]), Answer::Admitted] {
            let (mut left, mut right) = duplex(4096);
            right.write_all(&answer.encode()).await.unwrap();
            let error = prove(&mut left, Some(&token("a")), "run", &OURS).await.unwrap_err();
            assert!(error.contains("does not hold the token"), "{error}");
        }
    }
}
