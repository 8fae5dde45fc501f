//! Which process listens on a port, as far as `/proc` shows it.
//!
//! Owns reading `/proc/<pid>/fd`. Runs only when a port turned out to be taken. Facts: `proc_pid_fd(5)`.

use std::fmt;
use std::fs;
use std::net::{IpAddr, SocketAddr};

use crate::net::proc_net::{LISTEN, Row, TABLES};

/// Which process has a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PortOwner {
    /// This process.
    Process {
        /// Its process id.
        pid: u32,
        /// Its short name, as in `/proc/<pid>/comm`.
        name: String,
    },
    /// A socket listens, but `/proc` does not show its process: it is another user's, or in another pid namespace.
    Hidden,
    /// No socket listens there: one may be bound without listening, or have closed meanwhile.
    NotListening,
}

impl fmt::Display for PortOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PortOwner::Process { pid, name } => write!(f, "pid {pid} ({name})"),
            PortOwner::Hidden => write!(f, "a process that /proc does not show to this user"),
            PortOwner::NotListening => write!(f, "a socket that does not listen (its owner is not in /proc)"),
        }
    }
}

/// Looks for the process whose listening socket keeps `address` from being bound.
pub fn find_owner(address: SocketAddr) -> PortOwner {
    let tables = TABLES.map(|path| fs::read_to_string(path).unwrap_or_default());
    let inodes: Vec<u64> = tables.iter().flat_map(|table| listening_inodes(table, address)).collect();
    if inodes.is_empty() {
        return PortOwner::NotListening;
    }
    process_with_socket(&inodes).unwrap_or(PortOwner::Hidden)
}

/// Inodes of the listening sockets in one table that keep `wanted` from being bound.
fn listening_inodes(table: &str, wanted: SocketAddr) -> Vec<u64> {
    let conflicts = |ip: IpAddr| {
        let (ip, wanted) = (ip.to_canonical(), wanted.ip().to_canonical());
        ip == wanted || ip.is_unspecified() || wanted.is_unspecified()
    };
    let stands_in_the_way =
        |row: &Row| row.state == LISTEN && row.local.port() == wanted.port() && conflicts(row.local.ip());
    table.lines().filter_map(Row::parse).filter(stands_in_the_way).map(|row| row.inode).collect()
}

fn process_with_socket(inodes: &[u64]) -> Option<PortOwner> {
    let links: Vec<String> = inodes.iter().map(|inode| format!("socket:[{inode}]")).collect();
    let is_one = |entry: fs::DirEntry| {
        fs::read_link(entry.path()).is_ok_and(|to| links.iter().any(|link| to.as_os_str() == link.as_str()))
    };
    for process in fs::read_dir("/proc").ok()?.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        // Processes of other users cannot be read, and are skipped.
        let Ok(descriptors) = fs::read_dir(process.path().join("fd")) else {
            continue;
        };
        if descriptors.flatten().any(is_one) {
            let name = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            return Some(PortOwner::Process { pid, name: name.trim_end().to_owned() });
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const TCP: &str = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 111 1 0 100 0 0 10 0
   1: 0100007F:1F90 0100007F:C001 01 00000000:00000000 00:00000000 00000000     0        0 222 1 0 20 4 30 10 -1
   2: 00000000:1F91 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 333 1 0 100 0 0 10 0
";
    const TCP6: &str = "  sl  local_address                         remote_address st tx_queue rx_queue tr tm->when retrnsmt uid timeout inode
   0: 00000000000000000000000001000000:1F90 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 444 1 0 100 0 0 10 0
";

    #[test]
    #[cfg(target_endian = "little")]
    fn only_listening_sockets_that_stand_in_the_way_count() {
        let inodes = |table, address: &str| listening_inodes(table, address.parse().unwrap());
        assert_eq!(inodes(TCP, "127.0.0.1:8080"), [111]);
        assert_eq!(inodes(TCP, "0.0.0.0:8080"), [111]);
        assert_eq!(inodes(TCP, "[::]:8080"), [111]);
        assert!(inodes(TCP, "127.0.0.2:8080").is_empty());
        assert_eq!(inodes(TCP, "127.0.0.2:8081"), [333]);
        assert_eq!(inodes(TCP6, "[::1]:8080"), [444]);
        assert!(inodes("", "[::1]:8080").is_empty());
        assert!(inodes("head\n nonsense\n 0: 1:2 3 0A\n", "[::1]:8080").is_empty());
    }

    #[test]
    fn what_cannot_be_read_is_said() {
        assert_eq!(PortOwner::Hidden.to_string(), "a process that /proc does not show to this user");
        let nobody = SocketAddr::from(([127, 0, 0, 1], 1));
        assert_eq!(find_owner(nobody), PortOwner::NotListening);
    }
}
