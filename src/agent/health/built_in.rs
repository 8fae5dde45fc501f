//! What is checked without a command: GPUs, memory, places for files, and the links that the script names.

use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::Duration;
use std::{env, fs, io};

use parking_lot::Mutex;
use rustix::fs::statvfs;

use crate::devices::illness::Driver;
use crate::threads;

/// With less memory than this no worker starts.
const LEAST_MEMORY_BYTES: u64 = 256 << 20;
/// With less room than this no worker writes what it needs: a socket, a segment of shared memory, a log.
const LEAST_ROOM_BYTES: u64 = 8 << 20;
/// Variables that name the interfaces of a training.
const LINKS: [&str; 3] = ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"];
const INTERFACES: &str = "/sys/class/net";
/// An answer is waited for as long as this after a time that is over, in case it was this process that stood still.
const AFTER_STANDSTILL: Duration = Duration::from_secs(1);

/// The built-in checks, in a thread of their own: a driver that hangs, or a file server that is gone, never answers.
#[derive(Debug)]
pub(super) struct BuiltIn {
    questions: mpsc::Sender<mpsc::Sender<Option<String>>>,
    /// What the thread looks at now. If it never answers, the message names this.
    at: Arc<Mutex<&'static str>>,
}

impl BuiltIn {
    /// # Errors
    /// The system has no further thread.
    pub fn start() -> io::Result<Self> {
        let (questions, asked) = mpsc::channel();
        let at = Arc::<Mutex<&'static str>>::default();
        let here = at.clone();
        threads::spawn("health-builtin".to_owned(), move || answer(&asked, |what| *here.lock() = what))?;
        Ok(Self { questions, at })
    }

    /// What is wrong with this machine, if anything is. A check without an answer within `limit` is an illness, too.
    pub fn ill(&self, limit: Duration) -> Option<String> {
        let (answer, found) = mpsc::channel();
        // The thread has not ended: it does so after this.
        drop(self.questions.send(answer));
        // Once more: this process may have stood still.
        let found = found.recv_timeout(limit).or_else(|_| found.recv_timeout(AFTER_STANDSTILL));
        found.unwrap_or_else(|_| Some(format!("{} has not answered within {limit:.1?}", self.at.lock())))
    }
}

/// Looks at this machine each time somebody asks.
fn answer(asked: &mpsc::Receiver<mpsc::Sender<Option<String>>>, at: impl Fn(&'static str)) {
    let mut most = 0;
    while let Ok(mut question) = asked.recv() {
        at("NVIDIA's driver");
        let driver = Driver::open();
        let gpus = driver.as_ref().and_then(Driver::gpus);
        // As long as the GPUs are well it stays open, since it forgets the faults of before. Nobody can reset a GPU before it is closed.
        loop {
            at("NVIDIA's driver");
            let gpu = gpus.as_ref().and_then(|gpus| gpus.ill(&mut most));
            let closes = gpus.is_none() || gpu.is_some();
            drop(question.send(gpu.or_else(|| without_gpus(&at)))); // the agent may have ended
            if closes {
                break;
            }
            let Ok(next) = asked.recv() else { return };
            question = next;
        }
    }
}

/// Looks at one thing, and says what is wrong with it, if anything is.
type Check = fn() -> Option<String>;

fn without_gpus(at: impl Fn(&'static str)) -> Option<String> {
    let checks: [(_, Check); 4] = [
        ("/proc/meminfo", || memory(&fs::read_to_string("/proc/meminfo").ok()?)),
        ("/dev/shm", || room(Path::new("/dev/shm"))),
        ("the folder for temporary files", || room(&env::temp_dir())),
        (INTERFACES, || LINKS.into_iter().find_map(|name| links(Path::new(INTERFACES), name, &env::var(name).ok()?))),
    ];
    checks.into_iter().find_map(|(what, check)| {
        at(what);
        check()
    })
}

fn memory(meminfo: &str) -> Option<String> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let available = line.split_whitespace().next()?.parse::<u64>().ok()? << 10;
    (available < LEAST_MEMORY_BYTES).then(|| format!("{} MiB of memory are available", available >> 20))
}

fn room(folder: &Path) -> Option<String> {
    let file_system = statvfs(folder).ok()?;
    let left = file_system.f_bavail.saturating_mul(file_system.f_frsize);
    if left < LEAST_ROOM_BYTES {
        return Some(format!("{} has {} MiB left", folder.display(), left >> 20));
    }
    // Some file systems do not count files.
    let full = file_system.f_files > 0 && file_system.f_favail == 0;
    full.then(|| format!("{} has no room for another file", folder.display()))
}

/// Whether a variable names interfaces of which none is up. `^eth`: all others. `=eth0`: this one. `eth`: those that begin so.
fn links(interfaces: &Path, name: &str, value: &str) -> Option<String> {
    if value.starts_with('^') || value.is_empty() {
        return None;
    }
    let (exact, list) = value.strip_prefix('=').map_or((false, value), |list| (true, list));
    // `eth0:1234` names a port of RDMA, or an alias.
    let wanted: Vec<_> = list.split(',').filter_map(|part| part.trim().split(':').next()).collect();
    let is_wanted = |found: &str| wanted.iter().any(|it| if exact { found == *it } else { found.starts_with(it) });
    let found = fs::read_dir(interfaces).ok()?.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let found: Vec<_> = found.filter(|found| is_wanted(found)).collect();
    if found.is_empty() {
        return Some(format!("there is no interface `{value}`, which {name} names"));
    }
    // `unknown` is what loopback and tunnels say.
    let is_down = |found: &String| {
        let state = fs::read_to_string(interfaces.join(found).join("operstate")).unwrap_or_default();
        ["down", "lowerlayerdown", "notpresent"].contains(&state.trim())
    };
    found.iter().all(is_down).then(|| format!("{} is down, which {name} names", found.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_well() {
        assert_eq!(BuiltIn::start().unwrap().ill(Duration::from_secs(60)), None);
    }

    #[test]
    fn what_never_answers_is_an_illness_that_is_named() {
        let (questions, _asked) = mpsc::channel();
        let hangs = BuiltIn { questions, at: Arc::new(Mutex::new("the folder for temporary files")) };
        let ill = hangs.ill(Duration::from_millis(20)).unwrap();
        assert_eq!(ill, "the folder for temporary files has not answered within 20.0ms");
    }

    #[test]
    fn too_little_memory_is_an_illness() {
        assert_eq!(memory("MemTotal: 1 kB\nMemAvailable:     262144 kB\n"), None);
        assert_eq!(memory("MemAvailable:     262143 kB\n").unwrap(), "255 MiB of memory are available");
        assert_eq!(memory("junk"), None);
    }

    #[test]
    fn a_full_file_system_is_an_illness() {
        assert_eq!(room(Path::new("/proc")).unwrap(), "/proc has 0 MiB left");
        assert_eq!(room(Path::new("/nowhere")), None);
    }

    #[test]
    fn links_that_a_variable_names_are_up() {
        let folder = env::temp_dir().join(format!("elastic_rs-links-{}", std::process::id()));
        for (name, state) in
            [("eth0", "up"), ("eth1", "down"), ("ib0", "down"), ("ib1", "lowerlayerdown"), ("lo", "unknown")]
        {
            fs::create_dir_all(folder.join(name)).unwrap();
            fs::write(folder.join(name).join("operstate"), format!("{state}\n")).unwrap();
        }
        for (value, ill) in [
            ("eth", None),
            ("eth0", None),
            ("=eth1", Some("eth1 is down, which X names")),
            ("eth1,eth0", None),
            ("ib0:1", Some("ib0 is down, which X names")),
            ("lo", None),
            ("^eth0", None),
            ("", None),
            ("=eth", Some("there is no interface `=eth`, which X names")),
            ("bond0", Some("there is no interface `bond0`, which X names")),
        ] {
            assert_eq!(links(&folder, "X", value).as_deref(), ill, "{value}");
        }
        let both = links(&folder, "X", "ib").unwrap();
        assert!(both.ends_with(" is down, which X names") && both.contains("ib0") && both.contains("ib1"), "{both}");
        fs::remove_dir_all(&folder).unwrap();
    }
}
