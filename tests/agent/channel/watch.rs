//! What an agent asks a worker during a look, over a real socket. The worker is this process.

use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::process::{self, Command};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use elastic_rs::channel::watch::agent::{Asked, Limits, Watches};
use elastic_rs::channel::watch::{ANSWER_LIMIT_BYTES, Answer, worker};

use super::workers;
use crate::workers::support::{LIMIT, within};

/// A moment in which nothing happens.
const SHORT: Limits = Limits { gil: Duration::from_millis(20), answer: Duration::from_millis(40) };
const LONG: Limits = Limits { gil: LIMIT, answer: LIMIT };

/// The agent's end, for which this process is the worker with local rank 0.
fn watches() -> Watches {
    let watches = Watches::listen(1).unwrap();
    watches.expect(&workers(process::id()));
    watches
}

/// What came of a question, once somebody is connected.
async fn ask(watches: &Watches, limits: Limits) -> Asked {
    let asker = watches.asker();
    within(async {
        loop {
            match asker.ask(0, limits).await {
                Asked::Nobody => tokio::task::yield_now().await,
                asked => return asked,
            }
        }
    })
    .await
}

/// Wait until nobody is connected.
async fn gone(watches: &Watches) {
    let asker = watches.asker();
    within(async { while asker.ask(0, SHORT).await != Asked::Nobody {} }).await;
}

/// A worker's end of which each byte is written here.
fn raw(watches: &Watches, bytes: &[u8]) -> UnixStream {
    let address = SocketAddr::from_abstract_name(&watches.address()[1..]).unwrap();
    let mut stream = UnixStream::connect_addr(&address).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.write_all(bytes).unwrap();
    stream
}

/// Answer one question with these bytes.
async fn answer_raw(mut stream: UnixStream, bytes: Vec<u8>) -> UnixStream {
    let answered = tokio::task::spawn_blocking(move || {
        stream.read_exact(&mut [0]).unwrap();
        // The agent may have closed it by then.
        let _ = stream.write_all(&bytes);
        stream
    });
    within(answered).await.unwrap()
}

/// A worker whose interpreter is free.
fn answers(has_gil: &mut dyn FnMut()) -> Option<Vec<u8>> {
    has_gil();
    Some(answer())
}

fn answer() -> Vec<u8> {
    Answer { recorders: vec![b"{}"], ..Answer::default() }.encode()
}

#[tokio::test]
async fn a_worker_answers_as_often_as_it_is_asked() {
    let watches = watches();
    worker::start(watches.address().to_owned(), answers);
    for _ in 0..3 {
        assert_eq!(ask(&watches, LONG).await, Asked::Answer(answer()));
    }
    // A worker that is stopped is not asked any more.
    watches.expect(&workers(1));
    assert_eq!(watches.asker().ask(0, LONG).await, Asked::Nobody);
}

#[tokio::test]
async fn an_answer_may_be_as_long_as_a_dump() {
    let watches = watches();
    let dump = vec![b' '; 4 << 20];
    let whole = Answer { recorders: vec![&dump], ..Answer::default() }.encode();
    let sent = whole.clone();
    worker::start(watches.address().to_owned(), move |has_gil| {
        has_gil();
        Some(sent.clone())
    });
    assert!(ask(&watches, LONG).await == Asked::Answer(whole));
}

#[tokio::test]
async fn a_worker_that_does_not_answer_is_asked_once() {
    let watches = watches();
    let ((asked, was_asked), (go, may_go)) = (mpsc::channel(), mpsc::channel());
    worker::start(watches.address().to_owned(), move |has_gil| {
        asked.send(()).ok()?;
        may_go.recv().ok()?;
        has_gil();
        may_go.recv().ok()?;
        Some(answer())
    });
    let began = Instant::now();
    for _ in 0..20 {
        assert_eq!(ask(&watches, SHORT).await, Asked::Silent);
    }
    assert!(began.elapsed() >= 20 * SHORT.gil);
    assert_eq!(was_asked.try_iter().count(), 1);
    // It gets the GIL, and takes long for the answer.
    go.send(()).unwrap();
    within(async { while ask(&watches, SHORT).await != Asked::Late {} }).await;
    // What it answers late is for whoever waits then.
    let asker = watches.asker();
    let asking = tokio::spawn(async move { asker.ask(0, LONG).await });
    go.send(()).unwrap();
    assert_eq!(within(asking).await.unwrap(), Asked::Answer(answer()));
    for () in [(), ()] {
        go.send(()).unwrap();
    }
    assert_eq!(ask(&watches, LONG).await, Asked::Answer(answer()));
    assert_eq!(was_asked.try_iter().count(), 1, "it was asked again");
}

#[tokio::test]
async fn a_worker_that_answers_unasked_or_too_much_is_cut_off() {
    let watches = watches();
    // It has to be known before it lies, else it is refused earlier.
    let stream = answer_while_asked(&watches, [b"!".as_slice(), &3_u32.to_le_bytes(), b"abc"].concat()).await;
    assert_eq!(stream.1, Asked::Answer(b"abc".to_vec()), "its meaning is looked at later");
    (&stream.0).write_all(b"more").unwrap();
    gone(&watches).await;

    let too_long = [b"!".as_slice(), &(ANSWER_LIMIT_BYTES as u32 + 1).to_le_bytes()].concat();
    for answer in [too_long, b"?".to_vec()] {
        assert_eq!(answer_while_asked(&watches, answer).await.1, Asked::Nobody);
        gone(&watches).await;
    }
}

#[tokio::test]
async fn an_answer_that_ends_early_is_none() {
    let watches = watches();
    let asker = watches.asker();
    let stream = raw(&watches, &[1]);
    let asking = tokio::spawn(async move {
        loop {
            match asker.ask(0, LONG).await {
                Asked::Nobody => tokio::task::yield_now().await,
                asked => return asked,
            }
        }
    });
    drop(answer_raw(stream, [b"!".as_slice(), &9_u32.to_le_bytes()].concat()).await);
    // It asks again until somebody answers, who is another process's end by then.
    worker::start(watches.address().to_owned(), answers);
    assert_eq!(within(asking).await.unwrap(), Asked::Answer(answer()));
}

/// Connect, and answer the first question with these bytes. Returns the connection, and what came of the question.
async fn answer_while_asked(watches: &Watches, bytes: Vec<u8>) -> (UnixStream, Asked) {
    let answering = tokio::spawn(answer_raw(raw(watches, &[1]), bytes));
    let asker = watches.asker();
    let asked = within(async {
        loop {
            match asker.ask(0, LONG).await {
                Asked::Nobody if !answering.is_finished() => tokio::task::yield_now().await,
                asked => return asked,
            }
        }
    })
    .await;
    (within(answering).await.unwrap(), asked)
}

#[tokio::test]
async fn another_release_is_refused() {
    let watches = watches();
    let mut stream = raw(&watches, &[99]);
    let read = tokio::task::spawn_blocking(move || stream.read(&mut [0]).unwrap());
    assert_eq!(within(read).await.unwrap(), 0);
    assert_eq!(watches.asker().ask(0, LONG).await, Asked::Nobody);
}

#[tokio::test]
async fn a_process_that_connects_before_it_is_a_worker_is_held() {
    let watches = Watches::listen(1).unwrap();
    worker::start(watches.address().to_owned(), answers);
    assert_eq!(watches.asker().ask(0, SHORT).await, Asked::Nobody);
    watches.expect(&workers(process::id()));
    assert_eq!(ask(&watches, LONG).await, Asked::Answer(answer()));
}

#[tokio::test]
async fn a_parent_of_a_worker_is_not_asked_for_it() {
    let mut other = Command::new("sleep").arg("600").spawn().unwrap();
    let watches = Watches::listen(1).unwrap();
    watches.expect(&workers(other.id()));
    worker::start(watches.address().to_owned(), answers);
    let asked = watches.asker().ask(0, SHORT).await;
    other.kill().unwrap();
    other.wait().unwrap();
    assert_eq!(asked, Asked::Nobody);
}
