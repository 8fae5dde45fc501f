//! The proof of both ends, once TLS stands and before anything else is said. Its bytes are in [`super::claim`].

use bytes::BytesMut;
use ring::hmac;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::TOKEN_FILE;
use super::claim::{Answer, Claim, MAC_BYTES};
use super::tls::Secret;
use super::token::{KeyId, Token};

/// What a token is good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Everything.
    Node,
    /// To read. Sessions of nodes are refused.
    Observer,
}

/// What a peer has proven.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pass {
    /// The run for which it speaks.
    pub run_id: String,
    /// What it may do.
    pub role: Role,
    /// The token's public name.
    pub key: KeyId,
}

impl Pass {
    /// Whether a node of this run may come in with it. One token may serve several runs.
    ///
    /// # Errors
    /// Why not.
    pub fn admits_node_of(&self, run_id: &str) -> Result<(), String> {
        let key = self.key;
        match self.role {
            Role::Observer => Err(format!("the token with the id {key} is an observer's: no node may join with it")),
            Role::Node if self.run_id != run_id => {
                Err(format!("the token with the id {key} was proven for another run than `{run_id}`"))
            }
            Role::Node => Ok(()),
        }
    }
}

/// The node's end.
pub(super) async fn prove(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    token: &Token,
    run_id: &str,
    secret: &Secret,
) -> Result<(), String> {
    let claim = Claim { key: token.id().0, run_id: run_id.to_owned() }.encode()?;
    let mac = token.mac(&[b"c", secret, &claim]);
    send(stream, &[&claim, mac.as_ref()].concat()).await?;
    match receive(stream, Answer::decode).await? {
        Answer::Refused(reason) => Err(format!("it refuses this node's token: {reason}")),
        Answer::Proven(theirs) => {
            let said = [&b"s"[..], secret, mac.as_ref()].concat();
            hmac::verify(&token.key(), &said, &theirs).map_err(|_| {
                let id = token.id();
                format!(
                    "it does not hold the token with the id {id} ({TOKEN_FILE}): it, or somebody between, is a stranger"
                )
            })
        }
    }
}

/// The coordinator's end. `accepted` names the tokens that are good for a run. The peer has been told the error.
pub(super) async fn check(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    accepted: impl AsyncFnOnce(&str) -> Vec<Token>,
    secret: &Secret,
) -> Result<Pass, String> {
    let judged = match receive(stream, Claim::decode).await {
        Ok((claim, mac)) => {
            let accepted = accepted(&claim.run_id).await;
            judge(claim, mac, accepted, secret)
        }
        Err(error) => Err(error),
    };
    match judged {
        Ok((pass, mac)) => send(stream, &Answer::Proven(mac).encode()).await.map(|()| pass),
        Err(reason) => {
            let _ = send(stream, &Answer::Refused(reason.clone()).encode()).await;
            let _ = stream.shutdown().await;
            Err(reason)
        }
    }
}

/// What a node has proven, and the HMAC by which the coordinator is proven to it.
fn judge(
    claim: Claim,
    mac: [u8; MAC_BYTES],
    accepted: Vec<Token>,
    secret: &Secret,
) -> Result<(Pass, [u8; MAC_BYTES]), String> {
    let key = KeyId(claim.key);
    let roles = |token: Token| [(token.for_observers(), Role::Observer), (token, Role::Node)];
    let held = accepted.into_iter().flat_map(roles).find(|(token, _)| token.id() == key);
    let Some((token, role)) = held else {
        return Err(format!("no token with the id {key} is accepted for this run"));
    };
    let said = [&b"c"[..], secret, &claim.encode()?].concat();
    hmac::verify(&token.key(), &said, &mac)
        .map_err(|_| format!("the proof for the token with the id {key} is wrong: somebody may stand between"))?;
    let mut own = [0; MAC_BYTES];
    own.copy_from_slice(token.mac(&[b"s", secret, &mac]).as_ref());
    Ok((Pass { run_id: claim.run_id, role, key }, own))
}

async fn send(stream: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> Result<(), String> {
    let sent = async {
        stream.write_all(bytes).await?;
        stream.flush().await
    };
    sent.await.map_err(|error: std::io::Error| format!("the connection ended before the proof: {error}"))
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
            Ok(0) => return Err("the connection ended before the proof".to_owned()),
            Err(error) => return Err(format!("the connection ended before the proof: {error}")),
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
        node: Token,
        held: &[Token],
        secrets: (Secret, Secret),
    ) -> (Result<(), String>, Result<Pass, String>) {
        let (mut left, mut right) = duplex(4096);
        tokio::join!(async { prove(&mut left, &node, "run", &secrets.0).await }, async {
            check(&mut right, async |_| held.to_vec(), &secrets.1).await
        },)
    }

    #[tokio::test]
    async fn both_ends_are_proven_by_any_token_that_is_accepted() {
        for held in [vec![token("a")], vec![token("b"), token("a")]] {
            let (node, coordinator) = meet(token("a"), &held, (OURS, OURS)).await;
            assert_eq!(node, Ok(()));
            let key = token("a").id();
            assert_eq!(coordinator, Ok(Pass { run_id: "run".into(), role: Role::Node, key }));
        }
        let (node, coordinator) = meet(token("a").for_observers(), &[token("a")], (OURS, OURS)).await;
        assert_eq!((node, coordinator.map(|pass| pass.role)), (Ok(()), Ok(Role::Observer)));
    }

    #[tokio::test]
    async fn another_token_is_refused_by_its_id() {
        let (node, coordinator) = meet(token("a"), &[token("b")], (OURS, OURS)).await;
        let why = format!("no token with the id {} is accepted for this run", token("a").id());
        assert_eq!(node, Err(format!("it refuses this node's token: {why}")));
        assert_eq!(coordinator, Err(why));
    }

    #[tokio::test]
    async fn whoever_stands_between_has_two_secrets_and_is_refused() {
        let (node, coordinator) = meet(token("a"), &[token("a")], (OURS, [8; 32])).await;
        assert!(node.unwrap_err().contains("somebody may stand between"));
        assert!(coordinator.unwrap_err().contains("somebody may stand between"));
    }

    #[tokio::test]
    async fn a_node_does_not_believe_a_coordinator_without_the_token() {
        let (mut left, mut right) = duplex(4096);
        right.write_all(&Answer::Proven([0; MAC_BYTES]).encode()).await.unwrap();
        let error = prove(&mut left, &token("a"), "run", &OURS).await.unwrap_err();
        assert!(error.contains("does not hold the token"), "{error}");
    }
}
