//! Reads the files of recorded bytes. `tests/data/tcpstore/README.md` describes the format.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::Value;

pub struct File {
    pub name: String,
    pub steps: Vec<Step>,
}

#[derive(Debug, Clone)]
pub struct Step {
    pub number: u64,
    pub conn: String,
    pub op: String,
    pub json: Value,
    pub exchange: Vec<Message>,
}

#[derive(Debug, Clone)]
pub enum Message {
    FromClient { data: Vec<u8>, nonce: bool, alone: bool },
    FromServer { data: Vec<u8>, nonce: bool, unordered: bool },
    ServerCloses,
    ClientCloses,
    ClientHalfCloses,
    Silence,
}

impl File {
    /// All files, by name.
    pub fn all() -> Vec<File> {
        let folder = data().join("tcpstore");
        let mut files: Vec<File> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
            .map(|path| File::read(&path))
            .collect();
        files.sort_by(|a, b| a.name.cmp(&b.name));
        assert_eq!(files.len(), 42, "files in tests/data/tcpstore");
        files
    }

    fn read(path: &Path) -> File {
        let json: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
        assert_eq!(json["format"], "tcpstore-wire-vectors/1");
        let steps = json["steps"].as_array().unwrap().iter().map(step).collect();
        File { name: path.file_stem().unwrap().to_str().unwrap().to_owned(), steps }
    }

    pub fn is_raw(&self) -> bool {
        self.steps.iter().all(|step| step.op == "raw")
    }
}

/// Steps in which our server differs on purpose: (file, step) → its exchange.
pub fn differences() -> BTreeMap<(String, u64), Vec<Message>> {
    let text = fs::read_to_string(data().join("tcpstore_differences.json")).unwrap();
    let json: Value = serde_json::from_str(&text).unwrap();
    let mut differences = BTreeMap::new();
    for one in json.as_array().unwrap() {
        assert!(one["reason"].as_str().unwrap().len() > 20, "a difference needs a reason: {one}");
        let key = (one["file"].as_str().unwrap().to_owned(), one["step"].as_u64().unwrap());
        assert!(differences.insert(key, messages(&one["exchange"])).is_none(), "twice: {one}");
    }
    differences
}

fn data() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data"))
}

fn step(json: &Value) -> Step {
    Step {
        number: json["step"].as_u64().unwrap(),
        conn: json["conn"].as_str().unwrap().to_owned(),
        op: json["op"].as_str().unwrap().to_owned(),
        exchange: messages(&json["exchange"]),
        json: json.clone(),
    }
}

fn messages(json: &Value) -> Vec<Message> {
    json.as_array().unwrap().iter().map(message).collect()
}

fn message(json: &Value) -> Message {
    let from_client = match json["dir"].as_str().unwrap() {
        "c2s" => true,
        "s2c" => false,
        other => panic!("direction {other}"),
    };
    let nonce = json.get("variable").is_some_and(|variable| {
        assert_eq!((&variable["what"], &variable["length"]), (&"nonce".into(), &4.into()));
        true
    });
    if json.get("half_close").is_some() {
        Message::ClientHalfCloses
    } else if json.get("close").is_some() {
        if from_client { Message::ClientCloses } else { Message::ServerCloses }
    } else if json.get("silence_ms").is_some() {
        Message::Silence
    } else if from_client {
        let alone = json.get("pause_after_ms").is_some();
        Message::FromClient { data: pieces(&json["data"]), nonce, alone }
    } else {
        Message::FromServer { data: pieces(&json["data"]), nonce, unordered: json.get("unordered").is_some() }
    }
}

/// A list of hex strings and repetitions.
fn pieces(json: &Value) -> Vec<u8> {
    json.as_array().unwrap().iter().flat_map(piece).collect()
}

fn piece(json: &Value) -> Vec<u8> {
    match json {
        Value::String(hex) => unhex(hex),
        _ => unhex(json["repeat"].as_str().unwrap()).repeat(json["count"].as_u64().unwrap() as usize),
    }
}

/// A key or value in `args` or `result`.
pub fn byte_value(json: &Value) -> Vec<u8> {
    if let Some(text) = json.get("text") {
        text.as_str().unwrap().as_bytes().to_vec()
    } else if let Some(hex) = json.get("hex") {
        unhex(hex.as_str().unwrap())
    } else if let Some(segments) = json.get("segments") {
        pieces(segments)
    } else {
        piece(json)
    }
}

fn unhex(text: &str) -> Vec<u8> {
    assert!(text.len().is_multiple_of(2), "{text}");
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}
