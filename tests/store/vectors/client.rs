//! Our client against recorded server bytes.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use elastic_rs::store::client::{ClientOptions, StoreClient, StoreError};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::file::{File, Message, Step, byte_value};

pub fn replay(file: &File) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let play = Play::default().all(file);
        timeout(Duration::from_secs(60), play).await.unwrap_or_else(|_| panic!("{}: stuck", file.name));
    });
}

/// The result of an operation.
#[derive(Debug)]
enum Outcome {
    Nothing,
    Int(i64),
    Bool(bool),
    Bytes(Bytes),
    List(Vec<Bytes>),
}

#[derive(Default)]
struct Play {
    clients: HashMap<String, Arc<StoreClient>>,
    streams: HashMap<String, TcpStream>,
    nonces: HashMap<String, Vec<u8>>,
    started: HashMap<String, JoinHandle<Result<Outcome, StoreError>>>,
}

impl Play {
    async fn all(mut self, file: &File) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        for step in &file.steps {
            let at = format!("{}, step {} ({})", file.name, step.number, step.op);
            match (step.op.as_str(), step.json["phase"].as_str()) {
                ("connect" | "clone_of", _) => self.connect(step, &listener, &at).await,
                (_, Some("start")) => {
                    let client = self.clients[&step.conn].clone();
                    let step_ = step.clone();
                    self.started.insert(step.conn.clone(), tokio::spawn(async move { perform(&client, &step_).await }));
                    self.exchange(step, &at).await;
                }
                (_, Some("finish")) => {
                    self.exchange(step, &at).await;
                    let outcome = self.started.remove(&step.conn).unwrap().await.unwrap();
                    check(outcome, &step.json["result"], &at);
                }
                _ => {
                    let client = self.clients[&step.conn].clone();
                    let (outcome, ()) = tokio::join!(perform(&client, step), self.exchange(step, &at));
                    check(outcome, &step.json["result"], &at);
                }
            }
        }
        // No connection carried more than the recorded bytes: the next event is its end.
        drop(self.clients);
        for (conn, mut stream) in self.streams {
            let mut rest = Vec::new();
            let _ = stream.read_to_end(&mut rest).await;
            assert!(rest.is_empty(), "{}, {conn} sent {rest:02x?} besides", file.name);
        }
    }

    async fn connect(&mut self, step: &Step, listener: &TcpListener, at: &str) {
        let port = listener.local_addr().unwrap().port();
        let parent = step.json["args"]["conn"].as_str().map(|parent| self.clients[parent].clone());
        let client = async {
            match parent {
                Some(parent) => parent.connect_again().await.unwrap(),
                None => construct(port, &step.json["options"]).await,
            }
        };
        let wire = async {
            let (stream, _) = listener.accept().await.unwrap();
            self.streams.insert(step.conn.clone(), stream);
            self.exchange(step, at).await;
        };
        let (client, ()) = tokio::join!(client, wire);
        self.clients.insert(step.conn.clone(), Arc::new(client));
    }

    /// Play the server's part of one step.
    async fn exchange(&mut self, step: &Step, at: &str) {
        for message in &step.exchange {
            let stream = self.streams.get_mut(&step.conn).unwrap();
            match message {
                Message::FromClient { data, nonce, .. } => {
                    let mut got = vec![0; data.len()];
                    stream.read_exact(&mut got).await.unwrap_or_else(|error| panic!("{at}: {error}"));
                    let compared = if *nonce { 1 } else { data.len() };
                    assert!(got[..compared] == data[..compared], "{at}: got {got:02x?}, expected {data:02x?}");
                    if *nonce {
                        self.nonces.insert(step.conn.clone(), got[1..].to_vec());
                    }
                }
                Message::FromServer { data, nonce, .. } => {
                    let data = if *nonce { &self.nonces[&step.conn] } else { data };
                    stream.write_all(data).await.unwrap();
                }
                Message::ServerCloses => stream.shutdown().await.unwrap(),
                other => panic!("{at}: {other:?} in a file of operations"),
            }
        }
    }
}

async fn construct(port: u16, options: &Value) -> StoreClient {
    let timeout = Duration::from_millis(options["timeout_ms"].as_u64().unwrap_or(3000));
    let client_options = ClientOptions { connect_timeout: timeout, timeout: Some(timeout) };
    let client = StoreClient::connect("127.0.0.1", port, client_options).await.unwrap();
    if let (Some(world_size), Some(true)) = (options["world_size"].as_i64(), options["wait_for_workers"].as_bool()) {
        client.join_workers().await.unwrap();
        if options["is_master"] == true {
            client.wait_for_workers(world_size, client.timeout()).await.unwrap();
        }
    }
    client
}

async fn perform(client: &StoreClient, step: &Step) -> Result<Outcome, StoreError> {
    let args = &step.json["args"];
    let through = prefix(&step.json["via"]);
    let joined = |json: &Value| [&through[..], &byte_value(json)].concat();
    let key = || joined(&args["key"]);
    let keys = || args["keys"].as_array().unwrap().iter().map(joined).collect::<Vec<_>>();
    let bytes = |name: &str| byte_value(&args[name]);
    let limit = args["timeout_ms"].as_u64().map(Duration::from_millis);
    Ok(match step.op.as_str() {
        "set" => nothing(client.set(&key(), &bytes("value")).await?),
        "get" => Outcome::Bytes(client.get(&key()).await?),
        "add" => Outcome::Int(client.add(&key(), args["amount"].as_i64().unwrap()).await?),
        "compare_set" => Outcome::Bytes(client.compare_set(&key(), &bytes("expected"), &bytes("desired")).await?),
        "delete_key" => Outcome::Bool(client.delete_key(&key()).await?),
        "num_keys" => Outcome::Int(client.num_keys().await?),
        "check" => Outcome::Bool(client.check(&keys()).await?),
        "wait" => {
            assert!(limit.is_some(), "every captured wait names its timeout");
            nothing(client.wait_within(&keys(), limit).await?)
        }
        "append" => nothing(client.append(&key(), &bytes("value")).await?),
        "multi_get" => Outcome::List(client.multi_get(&keys()).await?),
        "multi_set" => {
            let values: Vec<_> = args["values"].as_array().unwrap().iter().map(byte_value).collect();
            nothing(client.multi_set(&keys(), &values).await?)
        }
        "queue_push" => nothing(client.queue_push(&key(), &bytes("value")).await?),
        "queue_pop" => Outcome::Bytes(client.queue_pop(&key(), args["block"].as_bool().unwrap()).await?),
        "queue_len" => Outcome::Int(client.queue_len(&key()).await?),
        "list_keys" => {
            let all = client.list_keys().await?;
            Outcome::List(
                all.iter().filter(|key| key.starts_with(&through)).map(|key| key.slice(through.len()..)).collect(),
            )
        }
        "barrier" => {
            let world_size = args["world_size"].as_i64().unwrap();
            if through.is_empty() {
                nothing(client.barrier_within(&key(), world_size, limit).await?)
            } else {
                nothing(generic_barrier(client, &key(), world_size, limit).await?)
            }
        }
        other => panic!("operation {other}"),
    })
}

fn nothing(_: ()) -> Outcome {
    Outcome::Nothing
}

/// The prefix that nested PrefixStores put before a key. Each adds its prefix and a slash; the outermost adds first.
fn prefix(via: &Value) -> Vec<u8> {
    let empty = Vec::new();
    let prefixes = via.as_array().unwrap_or(&empty);
    prefixes.iter().fold(Vec::new(), |joined, prefix| [prefix.as_str().unwrap().as_bytes(), b"/", &joined].concat())
}

/// The barrier of a PrefixStore, which has no BARRIER query and uses `Store::barrier`.
async fn generic_barrier(client: &StoreClient, key: &[u8], n: i64, limit: Option<Duration>) -> Result<(), StoreError> {
    let last = [key, b"/last_member"].concat();
    if client.add(&[key, b"/num_members"].concat(), 1).await? == n {
        client.set(&last, b"1").await?;
    }
    client.wait_within(&[last], limit).await
}

fn check(outcome: Result<Outcome, StoreError>, expected: &Value, at: &str) {
    let value = &expected["value"];
    let list = || value.as_array().unwrap().iter();
    match (expected["type"].as_str().unwrap(), outcome) {
        ("none", Ok(Outcome::Nothing)) => {}
        ("int", Ok(Outcome::Int(got))) => assert_eq!(Some(got), value.as_i64(), "{at}"),
        ("bool", Ok(Outcome::Bool(got))) => assert_eq!(Some(got), value.as_bool(), "{at}"),
        ("bytes", Ok(Outcome::Bytes(got))) => assert!(got == byte_value(value), "{at}"),
        ("bytes_list", Ok(Outcome::List(got))) => {
            assert_eq!(got, list().map(byte_value).collect::<Vec<_>>(), "{at}");
        }
        ("list", Ok(Outcome::List(got))) => {
            let got: BTreeSet<&[u8]> = got.iter().map(|key| &key[..]).collect();
            assert_eq!(got, list().map(|key| key.as_str().unwrap().as_bytes()).collect(), "{at}");
        }
        ("error", Err(error)) => {
            let class = expected["class"].as_str().unwrap();
            let (got_class, got_message) = as_torch(&error);
            assert_eq!(got_class, class, "{at}: {error}");
            // The message of a network error depends on timing.
            if class != "DistNetworkError" {
                assert_eq!(got_message, expected["message"].as_str().unwrap(), "{at}: {error}");
            }
        }
        (expected, got) => panic!("{at}: expected {expected}, got {got:?}"),
    }
}

/// Torch's class and message for an error.
fn as_torch(error: &StoreError) -> (&'static str, String) {
    match error {
        StoreError::WaitTimeout { operation: "barrier", keys, timeout, .. } => {
            let key = String::from_utf8_lossy(&keys.0[0]);
            ("DistStoreError", format!("barrier timeout after {}ms, key: {key}", timeout.as_millis()))
        }
        StoreError::WaitTimeout { keys, timeout, .. } => {
            let keys: Vec<_> = keys.0.iter().map(|key| format!("/{}", String::from_utf8_lossy(key))).collect();
            ("DistStoreError", format!("wait timeout after {}ms, keys: {}", timeout.as_millis(), keys.join(", ")))
        }
        StoreError::QueueEmpty { .. } => ("QueueEmptyError", "queue is empty".to_owned()),
        StoreError::ConnectionLost { .. } => ("DistNetworkError", error.to_string()),
        other => ("?", other.to_string()),
    }
}
