//! The server under attack: its memory is bounded, and other clients are served meanwhile.

mod client;
mod process;

use std::time::{Duration, Instant};

use client::{Client, MESSAGES, VALIDATE, up_to_each_length, whole};
use elastic_rs::store::client::{ClientOptions, StoreClient};
use elastic_rs::store::server::Cause;
use process::{Friend, Server, raise_descriptor_limit};
use socket2::SockRef;

/// Time limit of every wait. A test that reaches it fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// Longest wait of a well-behaved client for an answer during an attack.
///
/// A connection's turn is short (128 requests or half a mebibyte), so a round of thousands of busy connections takes milliseconds.
/// The rest allows for two cores that attackers, server and other tests share. A server that waits for one client would take far
/// longer, or for ever with half a request.
const LATENCY_LIMIT: Duration = Duration::from_secs(3);

/// How far the server's memory after further rounds of an attack may be above its peak in the first round.
///
/// The allocator keeps its pages, but a server that frees everything needs no more of them. Each round passes several times this much
/// through the server (each test says how much), so that a partial leak shows.
const GROWTH_LIMIT_KIB: u64 = 4 * 1024;

/// Repeat an attack while another client is served, and compare the server's memory after the first and the last round.
fn siege(what: &str, server: &Server, rounds: u32, attack: impl FnMut()) {
    siege_within(GROWTH_LIMIT_KIB, what, server, rounds, attack);
}

fn siege_within(growth_limit_kib: u64, what: &str, server: &Server, rounds: u32, mut attack: impl FnMut()) {
    let friend = Friend::of(server);
    attack();
    server.until("open", 1);
    let (peak, first) = (server.peak_kib(), server.resident_kib());
    for _ in 0..rounds {
        attack();
    }
    server.until("open", 1);
    let last = server.resident_kib();
    let longest = friend.finish();
    println!(
        "{what}: {peak} KiB at most and {first} KiB after the first round, {last} KiB after the last; another waited {longest:?}"
    );
    assert!(last <= peak + growth_limit_kib, "{what}: {last} KiB, {peak} KiB at most in the first round");
    assert!(longest <= LATENCY_LIMIT, "{what}: another client waited {longest:?}");
    let stats = server.stats();
    assert_eq!(
        (stats["keys"], stats["waiting"], stats["stored_bytes"]),
        (0, 0, 0),
        "{what}: something was left behind"
    );
}

/// Pseudo-random bytes, the same in each run. The first byte is neither a query code nor the first byte of an upgrade's magic.
fn noise(seed: u64, count: usize) -> Vec<u8> {
    let mut state = seed * 2 + 1;
    let mut next = || {
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (state >> 56) as u8
    };
    let mut bytes: Vec<u8> = (0..count).map(|_| next()).collect();
    bytes[0] |= 0x80;
    bytes
}

/// Each unauthenticated peer sends 64 KiB, 40 MiB a round. The server need only read the beginning.
#[test]
fn unknown_clients_leave_no_trace() {
    const KINDS: usize = 4;
    const EACH: usize = 160;
    let server = Server::start("");
    let tls = [&[0x16, 3, 1, 0, 0xc4, 1, 0, 0, 0xc0, 3, 3][..], &[7; 185]].concat();
    let mut rounds = 0;
    siege("strangers", &server, 3, || {
        rounds += 1;
        for number in 0..EACH {
            let noise = noise(number as u64, 64 * 1024);
            let first: [&[u8]; KINDS] =
                [b"GET / HTTP/1.1\r\nHost: store\r\n\r\n", &tls, b"SSH-2.0-OpenSSH_9.9\r\n", b""];
            for first in first {
                let mut client = Client::silent(server.address());
                client.send(&[first, &noise].concat());
                assert_eq!(client.read_to_close(), b"");
            }
        }
        assert_eq!(server.stat("foreign_protocol"), (rounds * KINDS * EACH) as u64);
    });
}

/// Random bytes after a proper VALIDATE close their connection, and disturb no other client.
#[test]
fn noise_after_validate_disturbs_nobody() {
    let server = Server::start("");
    siege("noise after VALIDATE", &server, 3, || {
        for number in 0..500 {
            // The first byte is no query code. Otherwise random bytes might set a key.
            let mut client = Client::connect(server.address());
            client.send(&noise(number, 4096));
            assert_eq!(client.read_to_close(), b"");
        }
    });
    assert_eq!(server.stat("protocol_violation"), 4 * 500);
}

fn truncations() -> Vec<Vec<u8>> {
    let messages = MESSAGES.iter().map(|(code, fields)| whole(*code, fields));
    messages.flat_map(|bytes| (0..bytes.len()).map(move |end| bytes[..end].to_vec())).collect()
}

#[test]
fn every_truncation_of_every_message_is_dropped_when_its_client_leaves() {
    let server = Server::start("");
    siege("truncated, then closed", &server, 2, || {
        for part in truncations() {
            let mut client = Client::connect(server.address());
            client.send(&part);
            client.end();
            assert_eq!(client.read_to_close(), b"", "{}", part.escape_ascii());
        }
        for end in 0..VALIDATE.len() {
            let mut client = Client::silent(server.address());
            client.send(&VALIDATE[..end]);
            client.end();
            assert_eq!(client.read_to_close(), b"");
        }
    });
    let stats = server.stats();
    assert!(stats.iter().all(|(name, count)| *count == 0 || ["open", "accepted"].contains(&&name[..])), "{stats:?}");
}

#[test]
fn every_truncation_of_every_message_may_stay_open_for_ever() {
    raise_descriptor_limit();
    // Long enough for a client on a busy machine to say its hello.
    let server = Server::start("hello_timeout_ms=1000");
    siege("truncated, then silent", &server, 2, || {
        let count = truncations().len() as u64;
        let mut open: Vec<Client> = truncations()
            .iter()
            .map(|part| {
                let mut client = Client::connect(server.address());
                client.send(part);
                client
            })
            .collect();
        server.until("open", 1 + count);
        // Connections without a complete VALIDATE are closed after the hello timeout.
        let halves = (0..VALIDATE.len()).map(|end| {
            let mut client = Client::silent(server.address());
            client.send(&VALIDATE[..end]);
            client
        });
        halves.collect::<Vec<_>>().iter_mut().for_each(|half| assert_eq!(half.read_to_close(), b""));
        assert_eq!(server.stat("open"), 1 + count, "the other connections are still open");
        // Half a request is neither answered nor closed.
        open.iter_mut().for_each(|client| client.0.set_nonblocking(true).unwrap());
        assert!(open.iter().all(|client| client.0.peek(&mut [0]).is_err()), "a half request was answered or closed");
    });
    assert_eq!(server.stat("hello_timeout"), 3 * VALIDATE.len() as u64);
}

/// A length above its limit is refused at once: the server reserves no memory for it and waits for no body.
#[test]
fn impossible_lengths_and_counts_are_refused_at_once() {
    let server = Server::start("");
    let mut expected = 0;
    siege("impossible lengths", &server, 3, || {
        for (code, fields) in MESSAGES {
            for (before, limit) in up_to_each_length(code, fields) {
                for length in [limit + 1, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, u64::MAX] {
                    let mut client = Client::connect(server.address());
                    client.send(&[&before[..], &length.to_le_bytes()].concat());
                    assert_eq!(client.read_to_close(), b"");
                    expected += 1;
                }
            }
        }
        assert_eq!(server.stat("too_long"), expected);
    });
}

/// A length exactly at the limit is allowed, and the server waits for the body without reserving memory for it. 2,000 values of 8 MiB
/// would be 16 GiB. Each connection has room for its next 64 KiB. The allocator may back that with memory in later rounds only, so
/// the growth limit includes it.
#[test]
fn lengths_at_the_limit_cost_nothing_until_their_bytes_come() {
    const COUNT: u64 = 2000;
    raise_descriptor_limit();
    let server = Server::start("");
    let before = server.resident_kib();
    siege_within(COUNT * 64, "announced values", &server, 8, || {
        let set = [&[1][..], &3u64.to_le_bytes(), b"/ke", &(8u64 << 20).to_le_bytes()].concat();
        let announce = |_| {
            let mut client = Client::connect(server.address());
            client.send(&set);
            client
        };
        let open: Vec<Client> = (0..COUNT).map(announce).collect();
        server.until("open", 1 + COUNT);
        let each = (server.resident_kib() - before) / COUNT;
        assert!(each < 128, "{each} KiB for each announcement");
        drop(open);
    });
}

/// Ten clients a round set and get values of 256 KiB, and read none. Each is closed when 1 MiB waits for it: 20 MiB a round.
#[test]
fn clients_that_never_read_are_closed_and_their_memory_comes_back() {
    let server = Server::start("reply_buffer_bytes=1048576");
    siege("never reading", &server, 3, || {
        for _ in 0..10 {
            let mut deaf = Client::connect(server.address());
            let value = vec![7; 256 * 1024];
            let set = [&[1][..], &3u64.to_le_bytes(), b"/ke", &(value.len() as u64).to_le_bytes(), &value].concat();
            let get = whole(3, "k");
            // The sockets' buffers take some replies, so the close comes later than after four.
            let asked =
                (0..1000).take_while(|_| std::io::Write::write_all(&mut deaf.0, &[&set[..], &get].concat()).is_ok());
            assert!(asked.count() < 1000, "it was never closed");
        }
        let mut cleaner = Client::connect(server.address());
        cleaner.send(&whole(8, "k"));
        cleaner.expect(&1i64.to_le_bytes());
    });
    assert_eq!(server.stat("not_reading"), 40);
}

#[test]
fn clients_that_are_killed_while_waiting_leave_no_waiter() {
    const COUNT: u64 = 500;
    raise_descriptor_limit();
    let server = Server::start("");
    siege("killed while waiting", &server, 3, || {
        let mut waiting: Vec<Client> = (0..COUNT).map(|_| Client::connect(server.address())).collect();
        // 100 keys of a kilobyte each: 50 MiB in all.
        let keys =
            (0..100u64).flat_map(|number| [&1008u64.to_le_bytes()[..], &number.to_le_bytes(), &[b'k'; 1000]].concat());
        let wait: Vec<u8> = [6].into_iter().chain(100u64.to_le_bytes()).chain(keys).collect();
        waiting.iter_mut().for_each(|client| client.send(&wait));
        server.until("waiting", COUNT);
        for (number, client) in waiting.into_iter().enumerate() {
            // Half of them end with a reset, like a killed process with unread data.
            if number % 2 == 0 {
                SockRef::from(&client.0).set_linger(Some(Duration::ZERO)).unwrap();
            }
        }
        server.until("waiting", 0);
    });
}

/// Three clients a round wait for 131,072 keys each: 8 MB sent.
#[test]
fn keys_that_are_waited_for_cost_little_and_are_given_back() {
    const CLIENTS: u64 = 3;
    const KEYS: u64 = 131_072;
    // Includes memory of the requests themselves that the allocator keeps.
    const LIMIT_BYTES: u64 = 100;
    let server = Server::start("");
    siege("waits for many keys", &server, 2, || {
        let before = server.resident_kib();
        let waiting: Vec<Client> = (0..CLIENTS)
            .map(|number| {
                let keys = (0..KEYS)
                    .flat_map(|key| [&12u64.to_le_bytes()[..], format!("{number:02}/{key:09}").as_bytes()].concat());
                let mut client = Client::connect(server.address());
                client.send(&[6].into_iter().chain(KEYS.to_le_bytes()).chain(keys).collect::<Vec<u8>>());
                client
            })
            .collect();
        server.until("waiting", CLIENTS);
        let each = server.resident_kib().saturating_sub(before) * 1024 / (CLIENTS * KEYS);
        drop(waiting);
        server.until("waiting", 0);
        let kept = server.resident_kib().saturating_sub(before);
        println!("{each} bytes for each awaited key; {kept} KiB are kept afterwards");
        assert!(each <= LIMIT_BYTES, "{each} bytes for each key");
        assert!(kept <= 8 * 1024, "{kept} KiB were not given back");
    });
}

/// The client lists 300,000 keys in a loop, with several requests in each segment.
#[test]
fn a_client_that_lists_many_keys_in_a_loop_holds_up_nobody() {
    const KEYS: u64 = 300_000;
    const AT_ONCE: usize = 8;
    let server = Server::start("");
    let mut lister = Client::connect(server.address());
    for first in (0..KEYS).step_by(100_000) {
        let pairs = (first..first + 100_000).flat_map(|key| {
            [&12u64.to_le_bytes()[..], format!("key{key:09}").as_bytes(), &1u64.to_le_bytes(), b"v"].concat()
        });
        lister.send(&[11].into_iter().chain(100_000u64.to_le_bytes()).chain(pairs).collect::<Vec<u8>>());
    }
    lister.assert_served();
    assert_eq!(server.stat("keys"), KEYS);
    let friend = Friend::of(&server);
    let start = Instant::now();
    for _ in 0..3 {
        lister.send(&[17; AT_ONCE]);
        let mut reply = vec![0; 8 + KEYS as usize * (8 + 12)];
        for _ in 0..AT_ONCE {
            std::io::Read::read_exact(&mut lister.0, &mut reply).unwrap();
            assert_eq!(reply[..8], KEYS.to_le_bytes());
            assert!(reply[8..].chunks_exact(20).is_sorted(), "the keys are in order");
        }
    }
    let (took, longest) = (start.elapsed(), friend.finish());
    println!("{} lists of {KEYS} keys in {took:?}, longest wait of another {longest:?}", 3 * AT_ONCE);
    assert!(longest <= LATENCY_LIMIT, "another client waited {longest:?}");
}

#[test]
fn five_thousand_idle_connections_cost_little_and_hinder_nobody() {
    // The test needs some descriptors for itself. The server needs as many as the clients, and inherits the limit.
    let count = 5000.min(raise_descriptor_limit() - 200) as u64;
    let server = Server::start("");
    let fresh = server.resident_kib();
    siege("idle connections", &server, 2, || {
        let start = Instant::now();
        let mut idle: Vec<Client> = (0..count).map(|_| Client::connect(server.address())).collect();
        server.until("open", 1 + count);
        let each = (server.resident_kib() - fresh) * 1024 / count;
        println!("{count} idle connections after {:?}, {each} bytes each", start.elapsed());
        // An entry in a list that may just have doubled, and no buffer.
        assert!(each < 1024, "{each} bytes for each of {count} connections");
        idle.iter_mut().step_by(97).for_each(Client::assert_served);
    });
}

#[test]
fn a_server_out_of_descriptors_serves_those_it_has_and_recovers() {
    raise_descriptor_limit();
    let server = Server::start("descriptors=64");
    let mut rounds = 0;
    siege("out of descriptors", &server, 3, || {
        let errors = server.stat("accept_errors");
        // The kernel completes connections that the server has no descriptor for. They wait in the backlog.
        let mut crowd: Vec<Client> = (0..200).map(|_| Client::silent(server.address())).collect();
        let deadline = Instant::now() + PATIENCE;
        while server.stat("accept_errors") == errors {
            assert!(Instant::now() < deadline, "accepting never failed");
        }
        crowd[0].send(&VALIDATE);
        crowd[0].assert_served();
        drop(crowd);
        Client::connect(server.address()).assert_served();
        rounds += 1;
    });
    assert_eq!(server.stat("foreign_protocol"), 0);
    assert!(server.stat("accept_errors") >= rounds);
}

/// 4,000 clients connect at once, like the workers of a big job, and each is served exactly once.
#[test]
fn a_connect_storm_of_four_thousand_is_served() {
    let count = 4000.min(raise_descriptor_limit() - 200);
    let server = Server::start("");
    let port = server.address().port();
    let friend = Friend::of(&server);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let start = Instant::now();
    let local = tokio::task::LocalSet::new();
    let clients = local.block_on(&runtime, async {
        let joining = |_| {
            tokio::task::spawn_local(async move {
                let options = ClientOptions { connect_timeout: PATIENCE, ..ClientOptions::default() };
                let client = StoreClient::connect("127.0.0.1", port, options).await.unwrap();
                client.add(b"joined", 1).await.unwrap();
                client
            })
        };
        let mut clients = Vec::new();
        for client in (0..count).map(joining).collect::<Vec<_>>() {
            clients.push(client.await.unwrap());
        }
        assert_eq!(clients[0].add(b"joined", 0).await.unwrap(), count as i64);
        clients
    });
    let (took, longest) = (start.elapsed(), friend.finish());
    println!("{count} clients connected and counted in {took:?}, longest wait of another {longest:?}");
    let stats = server.stats();
    assert!(Cause::ALL.iter().all(|cause| stats[cause.name()] == 0), "{stats:?}");
    assert!(longest <= LATENCY_LIMIT, "another client waited {longest:?}");
    drop(clients);
}

/// `/proc/net/tcp` shows the socket's keep-alive timer as `02:` with the time that is left.
#[test]
fn a_silent_client_is_asked_by_the_kernel_whether_it_is_there() {
    let server = Server::start("");
    let client = Client::connect(server.address());
    let hex = |port: u16| format!("0100007F:{port:04X}");
    let ends = format!("{} {}", hex(server.address().port()), hex(client.0.local_addr().unwrap().port()));
    let deadline = Instant::now() + PATIENCE;
    loop {
        // While data is being sent, another timer is shown.
        let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
        let line = table.lines().find(|line| line.contains(&ends)).expect("the server's end");
        let timer = line.split_whitespace().nth(5).unwrap();
        if let Some(left) = timer.strip_prefix("02:") {
            // Hundredths of a second: at most the default of a minute.
            let left = u32::from_str_radix(left, 16).unwrap();
            assert!((1..=6100).contains(&left), "{left}");
            return;
        }
        assert!(Instant::now() < deadline, "no keep-alive: {line}");
    }
}
