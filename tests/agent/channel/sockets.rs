//! Collectives that wait for a peer that has failed are freed. Each test has a process of its own, whose sockets it shuts down.

use std::io::{ErrorKind, Read};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread;

use elastic_rs::channel::agent::{Exchange, Heard};
use elastic_rs::channel::message::ToWorker;
use elastic_rs::channel::worker::{Channel, ChannelError};
use rustix::event::epoll;

use super::{change, connected, exchange, failure, silence, world};
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

fn watch(descriptors: &[&dyn AsFd]) -> OwnedFd {
    watch_for(&[], descriptors)
}

/// An epoll set that hands out this object's address.
fn watch_for(object: &'static [u64], descriptors: &[&dyn AsFd]) -> OwnedFd {
    let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let data = epoll::EventData::new_u64(if object.is_empty() { 0 } else { object.as_ptr().addr() as u64 });
    for fd in descriptors {
        epoll::add(&set, fd.as_fd(), data, epoll::EventFlags::IN).unwrap();
    }
    set
}

/// Waits for the end of the stream.
fn ends(mut stream: &TcpStream) {
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap(), 0, "the end of the stream");
}

fn is_open(mut stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    stream.read(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

/// Tells the worker of a failure, and waits until it has shut down what it knows.
async fn fail(exchange: &mut Exchange, channel: &Channel) {
    exchange.send(0, failure());
    within(channel.failed().unwrap()).await.unwrap();
    // Its thread answers the next message after that.
    exchange.send(0, change(1));
    assert!(matches!(within(exchange.next()).await, Heard::Ack { seq: 1, .. }));
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
        channel.mark_sockets().unwrap();
        let own = listener();
        let udp = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        udp.connect((Ipv4Addr::LOCALHOST, 9)).unwrap();
        let unix = UnixStream::pair().unwrap();
        let [mut here, there] = pair(&other);
        assert_eq!(channel.guard_sockets().unwrap(), 2, "both ends are in this process");
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
        channel.mark_sockets().unwrap();
        let guarded = pair(&listener);
        assert_eq!(channel.guard_sockets().unwrap(), 2);
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
        channel.mark_sockets().unwrap();
        let first = pair(&listener);
        fail(&mut exchange, &channel).await;
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
        assert!(matches!(channel.guard_sockets(), Err(ChannelError::Unmarked)));
    });
}

#[test]
fn a_group_that_was_made_too_late_is_freed_at_once() {
    run("a_group_that_was_made_too_late_is_freed_at_once", async |exchange, channel| {
        let listener = listener();
        exchange.send(0, failure());
        within(channel.failed().unwrap()).await.unwrap();
        let group = pair(&listener);
        let _loop = watch(&[&listener, &group[0], &group[1]]);
        assert_eq!(channel.guard_loops().unwrap(), 2);
        let [here, _there] = group;
        freed(here).await;
    });
}

#[test]
fn a_new_world_begins_with_nothing_guarded() {
    run("a_new_world_begins_with_nothing_guarded", async |mut exchange, channel| {
        let listener = listener();
        channel.mark_sockets().unwrap();
        let old = pair(&listener);
        assert_eq!(channel.guard_sockets().unwrap(), 2);
        let called = channel.park(None).unwrap();
        within(exchange.next()).await;
        exchange.send(0, ToWorker::World(Box::new(world(2))));
        within(called).await.unwrap();
        channel.mark_sockets().unwrap();
        let new = pair(&listener);
        assert_eq!(channel.guard_sockets().unwrap(), 2);
        fail(&mut exchange, &channel).await;
        assert!(old.iter().all(is_open));
        new.iter().for_each(ends);
    });
}

#[test]
fn sockets_that_are_watched_with_a_listener_are_a_groups_own() {
    run("sockets_that_are_watched_with_a_listener_are_a_groups_own", async |mut exchange, channel| {
        let listener = listener();
        let (group, store, client) = (pair(&listener), pair(&listener), pair(&listener));
        let _group = watch(&[&listener, &group[0], &group[1]]);
        let _client = watch(&[&client[0]]);
        assert_eq!(channel.guard_loops().unwrap(), 2);
        // A second group, which watches only some of the new sockets.
        channel.mark_sockets().unwrap();
        let (new, new_store) = (pair(&listener), pair(&listener));
        let _new = watch(&[&listener, &new[0]]);
        assert_eq!(channel.guard_sockets().unwrap(), 1);
        fail(&mut exchange, &channel).await;
        ends(&group[0]);
        assert!([store, client, new_store].iter().flatten().all(is_open));
    });
}

#[test]
fn groups_that_are_made_later_are_freed_and_servers_go_on() {
    run("groups_that_are_made_later_are_freed_and_servers_go_on", async |mut exchange, channel| {
        // The first word of an object says of which class it is.
        static GROUP: [&[u64]; 3] = [&[0x1234, 1], &[0x1234, 2], &[0x1234, 3]];
        let listener = listener();
        channel.mark_sockets().unwrap();
        let default = pair(&listener);
        let _default = watch_for(GROUP[0], &[&listener, &default[0], &default[1]]);
        assert_eq!(channel.guard_sockets().unwrap(), 2);
        let (group, server, client) = (pair(&listener), pair(&listener), pair(&listener));
        let _group = watch_for(GROUP[1], &[&listener, &group[0]]);
        let _server = watch_for(&[0x5678, 1], &[&listener, &server[0]]);
        fail(&mut exchange, &channel).await;
        [&default[0], &group[0]].into_iter().for_each(ends);
        assert!([&server, &client].into_iter().flatten().all(is_open));
        // The program does not know of the failure yet, and makes another group.
        let late = pair(&listener);
        let _late = watch_for(GROUP[2], &[&listener, &late[0]]);
        let [_here, there] = late;
        freed(there).await;
        channel.release_sockets().unwrap();
        let next = pair(&listener);
        let _next = watch_for(GROUP[0], &[&listener, &next[0]]);
        silence(&mut exchange).await;
        assert!(next.iter().all(is_open));
    });
}
