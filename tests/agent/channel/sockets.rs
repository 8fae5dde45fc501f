//! Collectives that wait for a peer that has failed are freed. Each test has a process of its own, whose sockets it shuts down.

use std::io::{ErrorKind, Read};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread;

use elastic_rs::channel::agent::{Exchange, FromWorker};
use elastic_rs::channel::message::ToWorker;
use elastic_rs::channel::worker::Channel;
use rustix::event::epoll;

use super::{connected, exchange, failure, silence, world};
use crate::alone_process::alone;
use crate::workers::support::{LIMIT, within};

/// A worker in its world, in a process of this test's own.
fn run(test: &str, body: impl AsyncFnOnce(Exchange, Channel)) {
    if !alone(&format!("channel::sockets::{test}")) {
        return;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut exchange = exchange();
        let channel = connected(&mut exchange).await;
        body(exchange, channel).await;
    });
}

fn listener() -> TcpListener {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap()
}

/// Both ends of a connection.
fn pair(listener: &TcpListener) -> [TcpStream; 2] {
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    [one, listener.accept().unwrap().0]
}

/// An epoll set that hands out addresses of objects, as gloo's do.
fn watch(descriptors: &[&dyn AsFd]) -> OwnedFd {
    watch_for(descriptors, |_| 0x5621_d767_f410)
}

/// An epoll set that hands out this for a descriptor.
fn watch_for(descriptors: &[&dyn AsFd], data: impl Fn(u64) -> u64) -> OwnedFd {
    let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    for fd in descriptors.iter().map(|fd| fd.as_fd()) {
        let data = epoll::EventData::new_u64(data(u64::from(fd.as_raw_fd().unsigned_abs())));
        epoll::add(&set, fd, data, epoll::EventFlags::IN).unwrap();
    }
    set
}

/// A process group of this process alone: both ends of its connection, and its epoll set.
fn group(listener: &TcpListener) -> ([TcpStream; 2], OwnedFd) {
    let connection = pair(listener);
    let set = watch(&[listener, &connection[0], &connection[1]]);
    (connection, set)
}

/// Waits for the end of the stream.
fn ends(mut stream: &TcpStream) {
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap(), 0, "the end of the stream");
}

/// Whether the stream has not ended so far. It blocks afterwards as before, for `ends`.
fn is_open(mut stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    let read = stream.read(&mut [0]);
    stream.set_nonblocking(false).unwrap();
    read.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

/// Tells the worker of a failure, and waits until it has shut down what it guards.
async fn fail(exchange: &mut Exchange, channel: &Channel) {
    learn(exchange, channel).await;
    assert_eq!(within(exchange.next()).await, FromWorker::Freed { local_rank: 0 });
}

/// Tells the worker of a failure.
async fn learn(exchange: &mut Exchange, channel: &Channel) {
    exchange.send(0, failure());
    within(channel.failed().unwrap()).await.unwrap();
}

/// Waits for the end of the stream, beside the runtime.
async fn freed(stream: TcpStream) {
    within(tokio::task::spawn_blocking(move || ends(&stream))).await.unwrap();
}

#[test]
fn a_receive_that_blocks_is_freed_and_listeners_go_on() {
    run("a_receive_that_blocks_is_freed_and_listeners_go_on", async |mut exchange, channel| {
        let other = listener();
        let old = pair(&other);
        let mark = channel.mark_sockets().unwrap();
        let own = listener();
        let udp = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        udp.connect((Ipv4Addr::LOCALHOST, 9)).unwrap();
        let unix = UnixStream::pair().unwrap();
        let ([mut here, there], _set) = group(&own);
        assert_eq!(channel.guard_sockets(mark, None).unwrap(), 2, "both ends are in this process");
        let blocked = thread::spawn(move || here.read(&mut [0]));
        fail(&mut exchange, &channel).await;
        let freed = tokio::task::spawn_blocking(move || blocked.join().unwrap());
        assert_eq!(within(freed).await.unwrap().unwrap(), 0, "it returns the end of the stream");
        ends(&there);
        assert!(old.iter().all(is_open), "it was connected before");
        for listener in [&own, &other] {
            assert!(pair(listener).iter().all(is_open));
        }
        unix.0.set_nonblocking(true).unwrap();
        assert_eq!((&unix.0).read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
    });
}

#[test]
fn a_descriptor_that_has_become_another_is_spared() {
    run("a_descriptor_that_has_become_another_is_spared", async |mut exchange, channel| {
        let listener = listener();
        let mark = channel.mark_sockets().unwrap();
        let (guarded, _set) = group(&listener);
        assert_eq!(channel.guard_sockets(mark, None).unwrap(), 2);
        // The numbers now belong to a user's connection.
        let users = pair(&listener);
        for (old, user) in guarded.iter().zip(&users) {
            // SAFETY: the number is one of `guarded`, which owns it again after the loop.
            let mut old = unsafe { OwnedFd::from_raw_fd(old.as_raw_fd()) };
            rustix::io::dup2(user, &mut old).unwrap();
            let _ = old.into_raw_fd();
        }
        fail(&mut exchange, &channel).await;
        assert!(users.iter().all(is_open));
    });
}

#[test]
fn a_group_that_is_being_made_is_freed_until_it_is_released() {
    run("a_group_that_is_being_made_is_freed_until_it_is_released", async |mut exchange, channel| {
        let listener = listener();
        let mark = channel.mark_sockets().unwrap();
        let first = pair(&listener);
        learn(&mut exchange, &channel).await;
        first.iter().for_each(ends);
        // Those that are connected later are found too.
        for _ in 0..3 {
            let [later, _other] = pair(&listener);
            freed(later).await;
        }
        channel.release_sockets().unwrap();
        let free = pair(&listener);
        // The next group is being made in the same world: the failure is known already.
        channel.mark_sockets().unwrap();
        let [next, _other] = pair(&listener);
        freed(next).await;
        assert!(free.iter().all(is_open));
        channel.release_sockets().unwrap();
        let (late, _set) = group(&listener);
        assert_eq!(channel.guard_sockets(mark, None).unwrap(), 0, "it belongs to a world that was left");
        silence(&mut exchange).await;
        assert!(late.iter().all(is_open));
    });
}

#[test]
fn a_group_that_was_made_too_late_is_freed_at_once() {
    run("a_group_that_was_made_too_late_is_freed_at_once", async |mut exchange, channel| {
        let listener = listener();
        learn(&mut exchange, &channel).await;
        let ([here, _there], _set) = group(&listener);
        assert_eq!(channel.guard_loops(None).unwrap(), 2);
        freed(here).await;
        assert_eq!(within(exchange.next()).await, FromWorker::Freed { local_rank: 0 });
    });
}

#[test]
fn a_new_world_begins_with_nothing_guarded() {
    run("a_new_world_begins_with_nothing_guarded", async |mut exchange, channel| {
        let listener = listener();
        let mark = channel.mark_sockets().unwrap();
        let (old, _old) = group(&listener);
        assert_eq!(channel.guard_sockets(mark, None).unwrap(), 2);
        let called = channel.park(None).unwrap();
        within(exchange.next()).await;
        exchange.send(0, ToWorker::World(Box::new(world(2))));
        within(called).await.unwrap();
        let mark = channel.mark_sockets().unwrap();
        let (new, _new) = group(&listener);
        assert_eq!(channel.guard_sockets(mark, None).unwrap(), 2);
        fail(&mut exchange, &channel).await;
        assert!(old.iter().all(is_open));
        new.iter().for_each(ends);
    });
}

#[test]
fn sockets_that_are_watched_with_a_listener_are_a_groups_own() {
    run("sockets_that_are_watched_with_a_listener_are_a_groups_own", async |mut exchange, channel| {
        let listener = listener();
        let (first, store, client, server) = (pair(&listener), pair(&listener), pair(&listener), pair(&listener));
        let _first = watch(&[&listener, &first[0], &first[1]]);
        let _client = watch(&[&client[0]]);
        // Above the descriptor, a program may leave anything in the word.
        let _server = watch_for(&[&listener, &server[0]], |fd| fd | 0x7ffc_0000_0000);
        assert_eq!(channel.guard_loops(None).unwrap(), 2);
        // A second group, which watches only some of the new sockets.
        let mark = channel.mark_sockets().unwrap();
        let (new, new_store) = (pair(&listener), pair(&listener));
        let _new = watch(&[&listener, &new[0]]);
        assert_eq!(channel.guard_sockets(mark, None).unwrap(), 1);
        fail(&mut exchange, &channel).await;
        [&first[0], &new[0]].into_iter().for_each(ends);
        assert!([store, client, server, new_store].iter().flatten().all(is_open));
    });
}

#[test]
fn groups_may_be_made_at_once_and_destroyed_alone() {
    run("groups_may_be_made_at_once_and_destroyed_alone", async |mut exchange, channel| {
        let listener = listener();
        let marks = [channel.mark_sockets().unwrap(), channel.mark_sockets().unwrap()];
        let (first, first_set) = group(&listener);
        let mark = channel.mark_sockets().unwrap();
        let (second, _second) = group(&listener);
        assert_eq!(channel.guard_sockets(marks[1], None).unwrap(), 4, "any that are new");
        assert_eq!(channel.guard_sockets(mark, None).unwrap(), 2);
        drop((first, first_set));
        let (third, _third) = group(&listener);
        assert_eq!(channel.guard_sockets(marks[0], None).unwrap(), 4);
        fail(&mut exchange, &channel).await;
        second.iter().chain(&third).for_each(ends);
        // The program does not know of the failure yet, and makes another group, which is freed although it was made.
        let mark = channel.mark_sockets().unwrap();
        let ([late, _other], _late) = group(&listener);
        channel.guard_sockets(mark, None).unwrap();
        freed(late).await;
        assert_eq!(within(exchange.next()).await, FromWorker::Freed { local_rank: 0 });
        // None is being made now.
        let after = group(&listener).0;
        silence(&mut exchange).await;
        assert!(after.iter().all(is_open));
    });
}

#[test]
fn the_connection_to_the_store_is_shut_down_with_the_groups() {
    run("the_connection_to_the_store_is_shut_down_with_the_groups", async |mut exchange, channel| {
        let [store, other] = [listener(), listener()];
        let port = store.local_addr().unwrap().port();
        let [early, _early] = pair(&store);
        let mark = channel.mark_sockets().unwrap();
        let [client, _client] = pair(&store);
        let users = pair(&other);
        assert_eq!(channel.guard_sockets(mark, Some(port)).unwrap(), 0, "it is no group's");
        fail(&mut exchange, &channel).await;
        ends(&client);
        assert!(is_open(&early));
        assert_eq!(channel.guard_loops(Some(port)).unwrap(), 0);
        freed(early).await;
        assert!(users.iter().all(is_open));
    });
}
