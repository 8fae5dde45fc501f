//! The worker's end: a thread that sleeps in `read` until the agent asks.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::sockopt::socket_peercred;
use rustix::process::Pid;

use super::{ASK, GOT, VERSION};
use crate::channel::address;
use crate::threads;

/// Time for the agent to accept others first.
const CONNECT_LIMIT: Duration = Duration::from_secs(30);

/// Start the thread `elastic_rs-watch`, which connects to the agent at this address and answers it with the bytes that `answer` returns:
/// those of an [`super::Answer`]. It calls what it is given once it has the GIL. `None` ends the thread. If there is no thread or no agent,
/// that is logged, and the training goes on.
pub fn start(address: String, mut answer: impl FnMut(&mut dyn FnMut()) -> Option<Vec<u8>> + Send + 'static) {
    let missed = |address: &str, error: &io::Error| {
        tracing::info!(
            "the agent at `{address}` cannot ask this process for its collectives: {error}; a hang of it is named less exactly"
        );
    };
    let run = {
        let address = address.clone();
        move || {
            if let Err(error) = run(&address, &mut answer) {
                missed(&address, &error);
            }
        }
    };
    if let Err(error) = threads::spawn("elastic_rs-watch".to_owned(), run) {
        missed(&address, &error);
    }
}

/// Answer until the agent closes the connection.
fn run(address: &str, answer: &mut impl FnMut(&mut dyn FnMut()) -> Option<Vec<u8>>) -> io::Result<()> {
    let stream = address::dial(address, CONNECT_LIMIT)?;
    let agent = socket_peercred(&stream)?.pid;
    let mut stream = UnixStream::from(stream);
    // An agent that is stopped takes an answer once it goes on.
    stream.set_write_timeout(None)?;
    may_be_traced_by(agent);
    stream.write_all(&[VERSION])?;
    let mut asked = [0];
    loop {
        match stream.read(&mut asked) {
            Ok(0) => return Ok(()),
            Ok(_) if asked == [ASK] => {}
            Ok(_) => return Err(io::Error::new(ErrorKind::InvalidData, "it has another release of elastic_rs")),
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(()),
            Err(error) => return Err(error),
        }
        // There is room for one byte, because the agent has read what was sent before. An error is also met by the answer.
        let mut has_gil = || drop((&stream).write_all(&[GOT]));
        let Some(answer) = answer(&mut has_gil) else { return Ok(()) };
        let sent = stream.write_all(&(answer.len() as u32).to_le_bytes()).and_then(|()| stream.write_all(&answer));
        match sent {
            Err(error) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => return Ok(()),
            sent => sent?,
        }
    }
}

/// Let debuggers that the agent starts look at this process where Yama forbids it otherwise. Elsewhere it is an error, which does not matter.
fn may_be_traced_by(agent: Pid) {
    // SAFETY: it takes a number, and no memory.
    let _ = unsafe { libc::prctl(libc::PR_SET_PTRACER, agent.as_raw_nonzero().get() as libc::c_ulong, 0, 0, 0) };
}
