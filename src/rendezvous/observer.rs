//! An observer's end of a connection to a coordinator: asks for a run's events and state, and changes nothing.

use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use super::coordinator::looks::DEEP_LOOK_LIMIT;
use super::messages::codec;
use super::messages::frames::read_message;
use super::messages::message::{
    AskLook, CoordinatorMessage, LookAnswer, NodeMessage, OBSERVER_WAIT, Observe, Observed,
};
use super::messages::peer::host_and_port;
use crate::net::connect::{race, resolve, to_text};
use crate::secure::{Halves, Protection};
use crate::wire::text::plain;

const OTHER_ANSWER: &str = "the coordinator sent an answer that is not for an observer";

/// A connection to a coordinator.
#[derive(Debug)]
pub struct Observer {
    halves: Halves,
    buffer: BytesMut,
    limit: Duration,
    /// The same for an answer that waits for an event.
    waiting_limit: Duration,
    /// What both ends prove, and the run for which they do.
    secured: Option<(Arc<Protection>, String)>,
}

/// How often an observer is sent to another endpoint in a row.
const MOST_REDIRECTS: usize = 3;

impl Observer {
    /// Connect to the coordinator at `host:port`. With a `protection`, the run must be named. `limit`: for connecting, and for each
    /// answer that waits for no event.
    ///
    /// # Errors
    /// A sentence: nobody is reached there, or one of the ends is not proven.
    pub async fn connect(
        host: &str,
        port: u16,
        secured: Option<(Arc<Protection>, &str)>,
        limit: Duration,
    ) -> Result<Self, String> {
        let deadline = Instant::now() + limit;
        let addresses = resolve(host, port, deadline).await.map_err(|error| error.to_string())?;
        let open = async |stream: TcpStream| {
            let secured = secured.as_ref().map(|(protection, run_id)| (protection.as_ref(), *run_id));
            let mut halves = Halves::begin(stream, host, secured).await?;
            let mut preamble = BytesMut::new();
            codec::encode_preamble(&mut preamble);
            halves.writer.write_all(&preamble).await.map_err(|error| error.to_string())?;
            Ok(halves)
        };
        let halves = race(&addresses, deadline, TcpStream::connect, open).await.map_err(|met| to_text(host, &met))?;
        let secured = secured.map(|(protection, run_id)| (protection, run_id.to_owned()));
        Ok(Self { halves, buffer: BytesMut::new(), limit, waiting_limit: limit + OBSERVER_WAIT, secured })
    }

    /// Ask, and wait for the answer. To a question that waits for an event it is empty after [`OBSERVER_WAIT`]: a coordinator that says
    /// nothing for longer is not there any more, or its host is not.
    ///
    /// # Errors
    /// A sentence: the coordinator refuses, has gone, or does not answer.
    pub async fn ask(&mut self, ask: Observe) -> Result<Observed, String> {
        let limit = if ask.waits { self.waiting_limit } else { self.limit };
        match self.answer_to(NodeMessage::Observe(ask), limit).await? {
            CoordinatorMessage::Observed(observed) => Ok(observed),
            _ => Err(OTHER_ANSWER.to_owned()),
        }
    }

    /// Ask where the ranks of a run stand, and wait until all agents have looked.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub async fn look(&mut self, ask: AskLook) -> Result<LookAnswer, String> {
        match self.answer_to(NodeMessage::AskLook(ask), self.limit + DEEP_LOOK_LIMIT).await? {
            CoordinatorMessage::Looked(answer) => Ok(answer),
            _ => Err(OTHER_ANSWER.to_owned()),
        }
    }

    /// The answer of the process that leads the run. Another one than before counts its events anew, and is asked for all.
    async fn answer_to(&mut self, mut question: NodeMessage, limit: Duration) -> Result<CoordinatorMessage, String> {
        for _ in 0..=MOST_REDIRECTS {
            let endpoint = match self.answer_here(&question, limit).await? {
                CoordinatorMessage::Redirect { endpoint: Some(endpoint), .. } => endpoint,
                CoordinatorMessage::Redirect { endpoint: None, why } => return Err(plain(why)),
                message => return Ok(message),
            };
            let (host, port) = host_and_port(&endpoint).ok_or(OTHER_ANSWER)?;
            let secured = self.secured.clone();
            let secured = secured.as_ref().map(|(protection, run_id)| (Arc::clone(protection), run_id.as_str()));
            *self = Self::connect(host, port, secured, self.limit).await?;
            if let NodeMessage::Observe(ask) = &mut question {
                ask.after = 0;
            }
        }
        Err(format!("the job is said to be led at another endpoint {MOST_REDIRECTS} times in a row: ask again later"))
    }

    async fn answer_here(&mut self, question: &NodeMessage, limit: Duration) -> Result<CoordinatorMessage, String> {
        let mut frame = BytesMut::new();
        codec::try_encode_frame(question, &mut frame).map_err(|error| error.to_string())?;
        let lost = |error: std::io::Error| format!("the connection to the coordinator ended: {error}");
        self.halves.writer.write_all(&frame).await.map_err(lost)?;
        self.halves.writer.flush().await.map_err(lost)?;
        let reading = read_message::<CoordinatorMessage>(&mut self.halves.reader, &mut self.buffer);
        let Ok(message) = timeout(limit, reading).await else {
            return Err(format!("the coordinator does not answer within {limit:?}"));
        };
        match message {
            Ok(Some(CoordinatorMessage::Rejected { reason } | CoordinatorMessage::Ended { reason })) => {
                Err(plain(reason))
            }
            Ok(Some(message)) => Ok(message),
            Ok(None) => Err("the coordinator closed the connection without an answer".to_owned()),
            Err(error) => Err(format!("the server there is not an elastic_rs coordinator: {error}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_coordinator_that_is_gone_without_a_word_is_not_waited_for_for_ever() {
        let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = silent.local_addr().unwrap().port();
        let mut observer = Observer::connect("127.0.0.1", port, None, Duration::from_secs(60)).await.unwrap();
        assert_eq!(observer.waiting_limit, Duration::from_secs(120));
        observer.waiting_limit = Duration::from_millis(20);
        let error = observer.ask(Observe { run_id: None, after: 0, waits: true, state: false }).await.unwrap_err();
        assert_eq!(error, "the coordinator does not answer within 20ms");
    }
}
