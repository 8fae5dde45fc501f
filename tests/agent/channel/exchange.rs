//! Both ends of the channel, over a real socket. The worker is this process.

use std::collections::BTreeMap;
use std::process;
use std::time::Duration;

use elastic_rs::channel::agent::{Exchange, FromWorker};
use elastic_rs::channel::checks::Verdict;
use elastic_rs::channel::message::{HeldState, ToWorker};
use elastic_rs::channel::worker::{Channel, ChannelError};

use super::{change, connect, connected, exchange, failure, silence, workers, world};
use crate::workers::support::{LIMIT, within};

async fn check(channel: &Channel) -> Verdict {
    match channel.check().unwrap() {
        Some(number) => within(channel.verdict(number)).await.unwrap(),
        None => Verdict::GoOn,
    }
}

/// The worker leaves its world, and is notified of the next one.
async fn park(exchange: &mut Exchange, channel: &Channel, commit: Option<u64>, generation: u64) {
    let called = channel.park(commit).unwrap();
    assert_eq!(
        within(exchange.next()).await,
        FromWorker::Parked { local_rank: 0, state: HeldState { generation: None, commit } }
    );
    exchange.send(0, ToWorker::World(Box::new(world(generation))));
    assert_eq!(*within(called).await.unwrap(), world(generation));
}

#[tokio::test]
async fn a_worker_changes_its_world_twice() {
    let mut exchange = exchange();
    let channel = connected(&mut exchange).await;
    exchange.send(0, ToWorker::World(Box::new(world(1))));
    assert_eq!(*within(channel.world().unwrap()).await.unwrap(), world(1));
    for seq in 1..=2 {
        for _ in 0..3 {
            assert_eq!(check(&channel).await, Verdict::GoOn);
        }
        exchange.send(0, change(seq));
        // Nobody calls the worker's end here: its thread answers.
        assert_eq!(within(exchange.next()).await, FromWorker::Ack { local_rank: 0, seq, count: 3 });
        assert_eq!(within(channel.change().unwrap()).await.unwrap(), (seq, 2));
        assert_eq!(channel.reason_and_flags().unwrap(), ("a node joins".to_owned(), 2));
        exchange.send(0, ToWorker::RaiseAt { seq, check: 5 });
        assert_eq!(check(&channel).await, Verdict::GoOn);
        assert_eq!(check(&channel).await, Verdict::WorldChanges);
        park(&mut exchange, &channel, Some(seq), seq + 1).await;
    }
}

#[tokio::test]
async fn a_failure_wakes_a_check_that_waits_and_one_who_asks() {
    let mut exchange = exchange();
    let channel = connected(&mut exchange).await;
    exchange.send(0, change(1));
    within(exchange.next()).await;
    let number = channel.check().unwrap().unwrap();
    let (verdict, failed) = tokio::join!(async { within(channel.verdict(number)).await.unwrap() }, async {
        exchange.send(0, failure());
        within(channel.failed().unwrap()).await
    });
    assert_eq!(verdict, Verdict::PeerFailed);
    failed.unwrap();
    park(&mut exchange, &channel, None, 2).await;
    assert_eq!(check(&channel).await, Verdict::GoOn, "the failure was the last world's");
}

#[tokio::test]
async fn parking_again_after_an_interruption_is_said_once() {
    let mut exchange = exchange();
    let channel = connected(&mut exchange).await;
    drop(channel.park(Some(7)).unwrap());
    let called = channel.park(Some(7)).unwrap();
    assert_eq!(
        within(exchange.next()).await,
        FromWorker::Parked { local_rank: 0, state: HeldState { generation: None, commit: Some(7) } }
    );
    silence(&mut exchange).await;
    exchange.send(0, ToWorker::World(Box::new(world(2))));
    assert_eq!(within(called).await.unwrap().generation, super::of(2));
}

/// The limit is above zero, and ends by itself: the main thread may hang.
#[tokio::test]
async fn a_world_that_is_not_formed_in_time_is_reported_once() {
    let mut exchange = exchange();
    let channel = connected(&mut exchange).await;
    channel.forms_within(Duration::from_millis(1)).unwrap();
    assert_eq!(within(exchange.next()).await, FromWorker::Stuck { local_rank: 0 });
    silence(&mut exchange).await;
    channel.stuck().unwrap();
    assert_eq!(within(exchange.next()).await, FromWorker::Stuck { local_rank: 0 });
}

#[tokio::test]
async fn an_exception_that_a_script_raises_itself_arrives_as_one_line() {
    let mut exchange = exchange();
    let channel = connected(&mut exchange).await;
    channel.raised("HorovodInternalError", &format!("nan\nat step 3{}", "x".repeat(1 << 20))).unwrap();
    let FromWorker::Raised { local_rank: 0, error, message } = within(exchange.next()).await else { panic!() };
    assert_eq!(error, "HorovodInternalError");
    assert!(message.starts_with("nan at step 3xxx") && message.len() <= 4096, "{} bytes", message.len());
}

#[tokio::test]
async fn each_step_towards_a_world_has_its_own_limit_and_a_formed_world_has_none() {
    let mut exchange = exchange();
    let channel = connected(&mut exchange).await;
    channel.forms_within(10 * LIMIT).unwrap();
    channel.forms_within(Duration::from_millis(1)).unwrap();
    channel.forms_within(10 * LIMIT).unwrap();
    channel.formed().unwrap();
    silence(&mut exchange).await;
}

#[tokio::test]
async fn a_worker_that_connects_before_it_is_expected_is_held() {
    let mut exchange = Exchange::listen(1).unwrap();
    let channel = connect(&exchange);
    silence(&mut exchange).await;
    exchange.send(0, failure()); // nobody is connected: it is lost
    exchange.expect(&workers(process::id()));
    assert_eq!(within(exchange.next()).await, FromWorker::Hello { local_rank: 0 });
    assert_eq!(check(&channel).await, Verdict::GoOn);
}

#[tokio::test]
async fn a_second_connection_of_a_worker_replaces_the_first() {
    let mut exchange = exchange();
    let first = connected(&mut exchange).await;
    let second = connected(&mut exchange).await;
    let ended = within(first.world().unwrap()).await.unwrap_err().to_string();
    assert!(ended.contains("was closed") && ended.contains(exchange.address()), "{ended}");
    exchange.send(0, ToWorker::World(Box::new(world(1))));
    assert_eq!(within(second.world().unwrap()).await.unwrap().generation, super::of(1));
    silence(&mut exchange).await;
    drop(second);
    assert_eq!(within(exchange.next()).await, FromWorker::Gone { local_rank: 0 });
}

#[tokio::test]
async fn what_a_replaced_connection_has_said_is_not_heard() {
    let mut exchange = exchange();
    let first = connected(&mut exchange).await;
    drop(first.park(Some(1)).unwrap());
    // What was heard is asked for only when the first has been replaced.
    let second = connect(&exchange);
    within(first.world().unwrap()).await.unwrap_err();
    assert_eq!(within(exchange.next()).await, FromWorker::Hello { local_rank: 0 });
    silence(&mut exchange).await;
    drop(second);
}

#[tokio::test]
async fn a_worker_that_is_not_expected_any_more_is_disconnected_without_a_word() {
    let mut exchange = exchange();
    let channel = connected(&mut exchange).await;
    exchange.expect(&workers(process::id()));
    exchange.send(0, ToWorker::World(Box::new(world(1))));
    within(channel.world().unwrap()).await.unwrap();
    exchange.expect(&BTreeMap::new());
    assert!(matches!(within(channel.failed().unwrap()).await, Err(ChannelError::Ended(_))));
    silence(&mut exchange).await;
}

#[tokio::test]
async fn the_end_of_the_agent_ends_every_wait_with_a_reason() {
    let mut exchange = exchange();
    let address = exchange.address().to_owned();
    let channel = connected(&mut exchange).await;
    exchange.send(0, change(1));
    within(exchange.next()).await;
    within(channel.change().unwrap()).await.unwrap();
    let number = channel.check().unwrap().unwrap();
    let ends = async {
        tokio::join!(
            async { channel.verdict(number).await.map(drop) },
            async { channel.failed().unwrap().await },
            async { channel.change().unwrap().await.map(drop) },
            async { channel.world().unwrap().await.map(drop) },
            async { channel.park(None).unwrap().await.map(drop) },
        )
    };
    let (ends, ()) = tokio::join!(within(ends), async { drop(exchange) });
    for end in [ends.0, ends.1, ends.2, ends.3, ends.4] {
        let text = end.unwrap_err().to_string();
        assert!(text.contains("the agent has ended") && text.contains(&address), "{text}");
    }
    let error = Channel::connect(&address, LIMIT).unwrap_err().to_string();
    assert!(error.contains("cannot connect to the agent at") && error.contains("ELASTIC_RS_AGENT"), "{error}");
}

#[tokio::test]
async fn a_full_queue_of_connections_is_waited_for_up_to_the_limit() {
    let name = format!("elastic_rs-test-queue-{}", process::id());
    // One connection is queued beside the one that the backlog of 0 allows, and nobody accepts any.
    let socket = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None).unwrap();
    socket.bind(&socket2::SockAddr::unix(format!("\0{name}")).unwrap()).unwrap();
    socket.listen(0).unwrap();
    let limit = Duration::from_millis(50);
    let attempts: Vec<_> = (0..3).map(|_| Channel::connect(&format!("@{name}"), limit)).collect();
    let error = attempts.into_iter().find_map(Result::err).expect("a full queue");
    assert!(matches!(error, ChannelError::Connect { elapsed, .. } if elapsed >= limit && elapsed < LIMIT), "{error}");
}
