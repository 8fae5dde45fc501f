//! A change in place over real sockets: one node is a session, the other one's messages are written by hand.

use bytes::BytesMut;
use elastic_rs::rendezvous::messages::codec::{decode_frame, encode_frame, encode_preamble};
use elastic_rs::rendezvous::messages::message::{
    CoordinatorMessage, JoinWorkers, NodeMessage, Placement, REMOVED, Resume, Round,
};
use elastic_rs::rendezvous::messages::settings::Settings;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::ROUND;
use crate::bench::{back, hello, join, of_worlds};
use crate::session::{Coordinator, PATIENCE, until_view};

/// A node's connection.
struct Line {
    stream: TcpStream,
    incoming: BytesMut,
}

impl Line {
    async fn send(&mut self, messages: &[NodeMessage]) {
        let mut bytes = BytesMut::new();
        messages.iter().for_each(|message| encode_frame(message, &mut bytes));
        self.stream.write_all(&bytes).await.unwrap();
    }

    /// Read messages up to the first one that is wanted.
    async fn receive(&mut self, wanted: impl Fn(&CoordinatorMessage) -> bool) -> CoordinatorMessage {
        let receiving = async {
            loop {
                match decode_frame(&mut self.incoming).unwrap() {
                    Some(message) if wanted(&message) => return message,
                    Some(_) => {}
                    None => assert_ne!(self.stream.read_buf(&mut self.incoming).await.unwrap(), 0, "it is closed"),
                }
            }
        };
        tokio::time::timeout(PATIENCE, receiving).await.unwrap()
    }
}

#[tokio::test]
async fn a_node_leaves_and_the_workers_of_the_other_one_go_on() {
    let settings = Settings::new(1, 2);
    let coordinator = Coordinator::start().await;
    let stream = TcpStream::connect(coordinator.address).await.unwrap();
    let mut other = Line { stream, incoming: BytesMut::new() };
    let mut preamble = BytesMut::new();
    encode_preamble(&mut preamble);
    other.stream.write_all(&preamble).await.unwrap();
    other.send(&[NodeMessage::Hello(Box::new(hello(1, &settings))), join(0)]).await;
    other.receive(|message| matches!(message, CoordinatorMessage::Welcome { .. })).await;
    let session = coordinator.session(2, settings);
    let placement = session.join(1000, None, Some(JoinWorkers::new("trainer", 1)), PATIENCE).await.unwrap();
    let generation = placement.generation();
    assert_eq!(placement.resume, Some(Resume::Continue { source: 0, sync: true, survivors: 0, generation }));
    // The answer to the heartbeat says that the coordinator has read what came before it.
    other.send(&[NodeMessage::Attending { round: ROUND }, NodeMessage::Heartbeat { rtt_us: None }]).await;
    other.receive(|message| matches!(message, CoordinatorMessage::Heartbeat { .. })).await;

    assert!(session.view().in_place);
    assert!(!session.will_leave(ROUND, "SIGTERM", Some(15)), "its workers do not attend yet");
    session.attending(ROUND);
    assert!(session.will_leave(ROUND, "SIGTERM", Some(15)));
    let change = until_view(&session, |view| view.change.is_some()).await.change.unwrap();
    assert_eq!((change.round, change.flags), (ROUND, REMOVED));
    assert!(change.reason.ends_with("is about to leave: SIGTERM"), "{}", change.reason);
    session.counted(ROUND, 7);
    other.receive(|message| matches!(message, CoordinatorMessage::Change(_))).await;
    other.send(&[NodeMessage::Counted { round: ROUND, count: 9 }]).await;
    let view = until_view(&session, |view| view.raise_at.is_some()).await;
    assert_eq!((view.raise_at, view.waiting), (Some((ROUND, 10)), 0));
    session.parked(ROUND);
    session.leave("SIGTERM".into(), Some(15), PATIENCE).await;

    let expected = CoordinatorMessage::RaiseAt { round: ROUND, check: 10 };
    other.receive(|message| *message == expected).await;
    let back = back(1, &[(0, Some(3)), (1, Some(3))], Some(10));
    other.send(&[of_worlds(back, &[(ROUND, generation.world)].into())]).await;
    let message =
        other.receive(|message| message.placement().is_some_and(|placement| placement.round == Round(2))).await;
    let CoordinatorMessage::Complete(Placement { world_size, restart, resume, .. }) = message else {
        panic!("{message:?}")
    };
    assert_eq!((world_size, restart), (1, 0));
    assert!(matches!(resume, Some(Resume::Continue { source: 0, sync: false, survivors: 2, .. })), "{resume:?}");
}
