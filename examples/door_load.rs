//! Strangers at a protected endpoint: how many of the job's connections get in beside them, and what they cost the coordinator's thread.
//!
//! `door_load [RATE]` has 1,000 connections prove themselves within 5 s, each from an address of its own, while another process at nice
//! 10 opens RATE connections a second (10,000) from one address and says: a ClientHello and no more; a ClientHello, and closes; nothing;
//! all of these by turns. Then a client asks for health without a pause. The part of the coordinator's thread that this takes is shown.

use std::error::Error;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use elastic_rs::endpoint::Host;
use elastic_rs::net::listen::bind;
use elastic_rs::secure::token::Token;
use elastic_rs::secure::{Halves, Protection};
use elastic_rs::store::server::ServerOptions;
use rustix::process::setpriority_process;
use socket2::{Domain, SockRef, Socket, Type};
use tokio::net::{TcpListener, TcpSocket};
use tokio::task::JoinSet;
use tokio::time::{sleep_until, timeout_at};

const RIGHTFUL: u32 = 1000;
const LIMIT: Duration = Duration::from_secs(5);
/// Connections that a stranger keeps open.
const HELD: usize = 4000;
const KINDS: [&str; 4] = ["hello", "close", "silent", "mixed"];

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = env::args().skip(1).collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["attack", port, rate, kind] => attack(port.parse()?, rate.parse()?, kind),
        ["ask", port] => ask(port.parse()?),
        [] => measure(10_000),
        [rate] => measure(rate.parse()?),
        _ => Err("door_load [RATE]".into()),
    }
}

fn measure(rate: u32) -> Result<(), Box<dyn Error>> {
    let token = Token::random()?;
    let protection = Arc::new(Protection::by_token(token)?);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    for kind in [None].into_iter().chain(KINDS.map(Some)) {
        let listener = bind((Ipv4Addr::LOCALHOST, 0).into())?;
        let host = Host::start(vec![listener], ServerOptions::default(), Some(Arc::clone(&protection)))?;
        let mut attacker = match kind {
            Some(kind) => Some(child(&["attack", &host.port().to_string(), &rate.to_string(), kind])?),
            None => None,
        };
        if let Some(attacker) = &mut attacker {
            attacker.wait_until_it_runs()?;
        }
        let (cpu, began) = (cpu_of(&format!("host-{}", host.port()))?, Instant::now());
        let mut took = runtime.block_on(rightful(host.port(), &protection));
        took.sort();
        let share = part(cpu, &format!("host-{}", host.port()), began)?;
        let offered = attacker.map(|attacker| attacker.end()).transpose()?.unwrap_or_default();
        let (median, last) = (took.get(took.len() / 2), took.last());
        println!(
            "{:7} {:>10}: {:4} of {RIGHTFUL} proven within {LIMIT:?}, median {median:.1?}, longest {last:.1?}; coordinator's thread {share:.0} %",
            kind.unwrap_or("nobody"),
            offered.trim(),
            took.len()
        );
    }
    let listener = bind((Ipv4Addr::LOCALHOST, 0).into())?;
    let host = Host::start(vec![listener], ServerOptions::default(), Some(protection))?;
    let mut client = child(&["ask", &host.port().to_string()])?;
    client.wait_until_it_runs()?;
    let thread = format!("host-{}", host.port());
    let (cpu, began) = (cpu_of(&thread)?, Instant::now());
    thread::sleep(Duration::from_secs(3));
    let share = part(cpu, &thread, began)?;
    println!("health asked for without a pause ({}): coordinator's thread {share:.0} %", client.end()?.trim());
    Ok(())
}

/// The handshakes of those that were proven in time.
async fn rightful(port: u16, protection: &Arc<Protection>) -> Vec<Duration> {
    let began = tokio::time::Instant::now();
    let mut connecting = JoinSet::new();
    for number in 0..RIGHTFUL {
        let protection = Arc::clone(protection);
        connecting.spawn(async move {
            sleep_until(began + (LIMIT * 4 / 5) * number / RIGHTFUL).await;
            let from = tokio::time::Instant::now();
            let own = Ipv4Addr::from_bits(0x7f01_0000 + number);
            let proving = async {
                let socket = TcpSocket::new_v4().ok()?;
                socket.bind(SocketAddrV4::new(own, 0).into()).ok()?;
                let stream = socket.connect((Ipv4Addr::LOCALHOST, port).into()).await.ok()?;
                Halves::begin(stream, "127.0.0.1", Some((&protection, "job"))).await.ok()
            };
            timeout_at(began + LIMIT, proving).await.ok().flatten().map(|halves| (halves, from.elapsed()))
        });
    }
    connecting.join_all().await.into_iter().flatten().map(|(_, took)| took).collect()
}

/// Another process of this program.
struct Other(Child);

fn child(words: &[&str]) -> Result<Other, Box<dyn Error>> {
    let mut command = Command::new(env::current_exe()?);
    Ok(Other(command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?))
}

impl Other {
    fn wait_until_it_runs(&mut self) -> Result<(), Box<dyn Error>> {
        let mut byte = [0];
        Ok(self.0.stdout.as_mut().ok_or("no pipe")?.read_exact(&mut byte)?)
    }

    /// What it says at its end.
    fn end(mut self) -> Result<String, Box<dyn Error>> {
        drop(self.0.stdin.take());
        let mut said = String::new();
        self.0.stdout.as_mut().ok_or("no pipe")?.read_to_string(&mut said)?;
        self.0.wait()?;
        Ok(said)
    }
}

/// Becomes true when the parent has closed the pipe, or has ended.
fn ends() -> Arc<std::sync::atomic::AtomicBool> {
    let ends = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let set = Arc::clone(&ends);
    thread::spawn(move || {
        let _ = std::io::stdin().read(&mut [0]);
        set.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    ends
}

fn attack(port: u16, rate: u32, kind: &str) -> Result<(), Box<dyn Error>> {
    setpriority_process(None, 10)?;
    let hello = client_hello()?;
    let (to, from) = (SocketAddr::from((Ipv4Addr::LOCALHOST, port)), SocketAddr::from(([127, 6, 6, 6], 0)));
    let mut held: Vec<Option<Socket>> = (0..HELD).map(|_| None).collect();
    let (ends, began, mut opened) = (ends(), Instant::now(), 0_u32);
    while !ends.load(std::sync::atomic::Ordering::Relaxed) {
        if f64::from(opened) > began.elapsed().as_secs_f64() * f64::from(rate) {
            thread::sleep(Duration::from_micros(200));
            continue;
        }
        opened += 1;
        if opened == HELD as u32 {
            print!("*");
            std::io::stdout().flush()?;
        }
        let slot = &mut held[opened as usize % HELD];
        *slot = None;
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        // No connection of it is left in TIME_WAIT, so it never runs out of ports.
        SockRef::from(&socket).set_linger(Some(Duration::ZERO))?;
        if socket.bind(&from.into()).is_err() || socket.connect(&to.into()).is_err() {
            continue;
        }
        let kind = if kind == "mixed" { KINDS[opened as usize % 3] } else { kind };
        if kind != "silent" {
            let _ = (&socket).write(&hello);
        }
        *slot = (kind != "close").then_some(socket);
    }
    print!("{:.0}/s", f64::from(opened) / began.elapsed().as_secs_f64());
    Ok(())
}

/// The first bytes of a node that begins a handshake.
fn client_hello() -> Result<Vec<u8>, Box<dyn Error>> {
    let protection = Protection::by_token(Token::random()?)?;
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let stream = tokio::net::TcpStream::connect(listener.local_addr()?).await?;
        let (mut accepted, _) = listener.accept().await?;
        let mut hello = vec![0; 4096];
        tokio::select! {
            _ = Halves::begin(stream, "127.0.0.1", Some((&protection, "job"))) => Err("nobody answers".into()),
            count = tokio::io::AsyncReadExt::read(&mut accepted, &mut hello) => {
                hello.truncate(count?);
                Ok(hello)
            }
        }
    })
}

fn ask(port: u16) -> Result<(), Box<dyn Error>> {
    let (ends, began, mut asked) = (ends(), Instant::now(), 0_u32);
    while !ends.load(std::sync::atomic::Ordering::Relaxed) {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        SockRef::from(&socket).set_linger(Some(Duration::ZERO))?;
        if socket.connect(&SocketAddr::from((Ipv4Addr::LOCALHOST, port)).into()).is_err() {
            continue;
        }
        let mut stream = std::net::TcpStream::from(socket);
        let _ = stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n");
        let _ = stream.read(&mut [0; 1024]);
        asked += 1;
        if asked == 100 {
            print!("*");
            std::io::stdout().flush()?;
        }
    }
    print!("{:.0}/s", f64::from(asked) / began.elapsed().as_secs_f64());
    Ok(())
}

/// The CPU time of a thread of this process, in ticks of 10 ms. It may not have begun yet.
fn cpu_of(name: &str) -> Result<u64, Box<dyn Error>> {
    for task in fs::read_dir("/proc/self/task")? {
        let stat = fs::read_to_string(task?.path().join("stat"))?;
        let (before, fields) = stat.rsplit_once(')').ok_or("no name")?;
        if before.ends_with(&format!("({name}")) {
            let fields: Vec<&str> = fields.split_whitespace().collect();
            return Ok(fields[11].parse::<u64>()? + fields[12].parse::<u64>()?);
        }
    }
    Ok(0)
}

fn part(before: u64, name: &str, began: Instant) -> Result<f64, Box<dyn Error>> {
    Ok((cpu_of(name)? - before) as f64 / began.elapsed().as_secs_f64())
}
