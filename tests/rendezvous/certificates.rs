//! Sessions that certificates protect, over real sockets: who gets in, what everybody else gets, and certificates that change.
//!
//! What files may hold, and certificates that nobody would use knowingly, are tested beside the code (`src/secure/certificates.rs`).

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use elastic_rs::endpoint::EndpointServer;
use elastic_rs::secure::refusals::{Kind, Refusals};
use elastic_rs::secure::{CertificateFiles, Protection, ProtectionOptions, TokenSource};

use crate::protected::{MOMENT, PATIENCE, host, join, node_of, open, reported, token};

/// The files of one end, which are gone at the end.
struct End {
    folder: PathBuf,
    token: Option<char>,
}

impl End {
    /// With a certificate of `tests/data/tls`.
    fn new(name: &str, authorities: &[&str]) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("elastic_rs-certificates-{}-{number}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let end = Self { folder, token: None };
        end.put(name, authorities);
        end
    }

    /// Replace the files.
    fn put(&self, name: &str, authorities: &[&str]) {
        let all: String = authorities.iter().map(|name| data(&format!("{name}.pem"))).collect();
        for (file, text) in
            [("ca.pem", all), ("cert.pem", data(&format!("{name}.pem"))), ("key.pem", data(&format!("{name}.key")))]
        {
            let (new, path) = (self.folder.join("new"), self.folder.join(file));
            fs::write(&new, text).unwrap();
            fs::set_permissions(&new, Permissions::from_mode(0o600)).unwrap();
            fs::rename(new, path).unwrap();
        }
    }

    fn with(mut self, token: Option<char>) -> Self {
        self.token = token;
        self
    }

    fn protection(&self) -> Arc<Protection> {
        let [cert, key, ca] = ["cert.pem", "key.pem", "ca.pem"].map(|name| self.folder.join(name));
        let options = ProtectionOptions {
            token: self.token.map(|digit| TokenSource::Memory(token(digit))),
            certificates: Some(CertificateFiles { cert, key, ca }),
            good_for: Duration::ZERO,
        };
        Arc::new(Protection::new(options).unwrap())
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn data(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tls").join(name)).unwrap()
}

#[test]
fn nodes_with_certificates_form_a_world() {
    for (name, token) in [("node", None), ("chained", None), ("node", Some('a'))] {
        let end = End::new(name, &["ca"]).with(token);
        let (host, runtime) = host(Some(end.protection()));
        runtime.block_on(async {
            let sessions = [1, 2].map(|number| open(host.port(), node_of("job", number, 2), Some(end.protection())));
            let (one, other) = tokio::join!(join(&sessions[0]), join(&sessions[1]));
            assert_eq!((one.unwrap().world_size, other.unwrap().world_size), (2, 2));
        });
        assert_eq!(host.refusals().unwrap().total(), 0);
    }
}

/// Of each pair, the second end is the coordinator's. What the node gets, and as what the coordinator counts it.
#[test]
fn an_end_that_cannot_be_trusted_is_logged_and_counted() {
    let end = |name: &str, authorities: &[&str], token| End::new(name, authorities).with(token);
    let ca = &["ca"][..];
    let table = [
        (
            end("stranger", &["other-ca"], None),
            end("node", ca, None),
            "its certificate does not chain to a CA of this end (ELASTIC_RS_TLS_CA)",
            [0, 0],
        ),
        (
            end("stranger", &["ca", "other-ca"], None),
            end("node", ca, None),
            "does not accept this end's certificate (ELASTIC_RS_TLS_CERT): no CA of that end",
            [1, 0],
        ),
        (
            end("node", ca, None),
            end("elsewhere", ca, None),
            "is not for `127.0.0.1`, which this end has connected to, but for elsewhere.example, 192.0.2.1",
            [0, 0],
        ),
        (
            end("node", ca, None),
            end("client", ca, None),
            "is not for server authentication: its extendedKeyUsage",
            [0, 0],
        ),
        (
            end("node", ca, None),
            end("node", ca, Some('a')),
            "the certificate alone is not enough: name the file with the job's token in ELASTIC_RS_TOKEN_FILE",
            [0, 1],
        ),
        (
            end("node", ca, Some('a')),
            end("node", ca, None),
            "has certificates and no token: set ELASTIC_RS_TOKEN_FILE at both ends, or at none",
            [0, 1],
        ),
        (end("node", ca, Some('b')), end("node", ca, Some('a')), "no token with the id", [0, 1]),
    ];
    for (node, coordinator, why, counts) in table {
        let (host, runtime) = host(Some(coordinator.protection()));
        let tried = runtime.block_on(node.protection().try_at("127.0.0.1", host.port(), "127.0.0.1", "job", PATIENCE));
        let error = tried.unwrap_err();
        assert!(error.contains(why), "{error}");
        counted(&host, |refused| [Kind::Certificate, Kind::Unproven].map(|kind| refused.of(kind)) == counts);
    }
}

/// Wait until the coordinator has counted these refusals. The node may hear first.
fn counted(host: &EndpointServer, expected: impl Fn(Refusals) -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !expected(host.refusals().unwrap()) {
        assert!(Instant::now() < deadline, "{:?}", host.refusals());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn certificates_at_one_end_only_are_reported() {
    let end = End::new("node", &["ca"]);
    let (certified, runtime) = host(Some(end.protection()));
    let by_token = Arc::new(Protection::by_token(token('a')).unwrap());
    let held = host(Some(Arc::clone(&by_token))).0;
    let plain = host(None).0;
    let at_one_end = "ELASTIC_RS_TLS_CERT seems to be set at one of the two ends only";
    runtime.block_on(async {
        for (own, port) in [(&by_token, certified.port()), (&end.protection(), held.port())] {
            let error = own.try_at("127.0.0.1", port, "127.0.0.1", "job", PATIENCE).await.unwrap_err();
            assert!(error.contains(at_one_end), "{error}");
        }
        let session = open(certified.port(), node_of("job", 1, 1), None);
        let error = join(&session).await.unwrap_err().to_string();
        let why = "it is protected by certificates: name their files in ELASTIC_RS_TLS_CERT, ELASTIC_RS_TLS_KEY and ELASTIC_RS_TLS_CA";
        assert!(error.contains(why), "{error}");
        let session = open(plain.port(), node_of("job", 2, 1), Some(end.protection()));
        reported(&session, "this node has certificates (ELASTIC_RS_TLS_CERT), and it seems to have none").await;
    });
    counted(&certified, |refused| refused.of(Kind::NoTls) == 2);
}

/// The coordinator gets a certificate of another CA, as when a CA is replaced by another. Sessions that stand do not notice.
#[test]
fn certificates_are_replaced_while_a_job_runs() {
    let [hosts, first, second] = [(); 3].map(|()| End::new("node", &["ca"]));
    let (host, runtime) = host(Some(hosts.protection()));
    runtime.block_on(async {
        let member = open(host.port(), node_of("job", 1, 1), Some(first.protection()));
        assert_eq!(join(&member).await.unwrap().world_size, 1);
        let newcomer = second.protection();
        let tried = async |port| newcomer.try_at("127.0.0.1", port, "127.0.0.1", "job", PATIENCE).await;
        // A key that does not fit changes nothing.
        fs::write(hosts.folder.join("key.pem"), data("renewed.key")).unwrap();
        tried(host.port()).await.unwrap();
        hosts.put("stranger", &["ca", "other-ca"]);
        let error = tried(host.port()).await.unwrap_err();
        assert!(error.contains("does not chain to a CA of this end"), "{error}");
        second.put("node", &["ca", "other-ca"]);
        tried(host.port()).await.unwrap();
        second.put("stranger", &["other-ca"]);
        tried(host.port()).await.unwrap();
        tokio::time::sleep(MOMENT).await;
        let view = member.view();
        assert_eq!((view.waiting, view.restart, view.failed, view.out_of_reach_since), (0, 0, None, None));
        assert_eq!(host.users().count().0, 1);
    });
}
