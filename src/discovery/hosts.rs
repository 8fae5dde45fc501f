//! Parses hosts: the list of `-H a:8,b:8`, host files, and the lines that a discovery script prints.
//!
//! A host is a name that `ssh` understands, an IPv4 address, or an IPv6 address in brackets, with or without `:SLOTS`. An error
//! names the entry or line, its text and what is allowed.

use std::collections::BTreeMap;

use crate::wire::text::is_steering;

/// Most workers of one host.
pub const MOST_SLOTS: u32 = 65_535;
/// Most hosts of one list.
pub const MOST_HOSTS: usize = 65_536;
/// Longest name, in bytes: a DNS name has 253, a user before `@` up to 32.
const LONGEST_NAME: usize = 320;
/// Longest text that an error repeats, in characters.
const SHOWN: usize = 80;

/// A host, and how many workers it takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// As `ssh` takes it; an IPv6 address without brackets. Checked by [`Host::new`].
    pub name: String,
    /// Number of workers. Above zero.
    pub slots: u32,
}

/// Why a list of hosts cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place} is `{text}`, {why}")]
pub struct HostsError {
    /// `line 3`, `entry 2` or `host`.
    pub place: String,
    /// What stands there, shortened if it is long.
    pub text: String,
    /// What is wrong, and what is allowed.
    pub why: String,
}

impl Host {
    /// A host of which name and slots were given apart from one another.
    ///
    /// # Errors
    /// The name could not be given to `ssh`, or the number of slots is not allowed.
    pub fn new(name: &str, slots: u32) -> Result<Self, HostsError> {
        let error = |why: String| HostsError { place: "host".to_owned(), text: shown(name), why };
        check_name(name).map_err(error)?;
        check_slots(u64::from(slots)).map_err(error)?;
        Ok(Self { name: name.to_owned(), slots })
    }
}

impl std::fmt::Display for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, slots } = self;
        let (user, bare) = split_user(name);
        if bare.contains(':') { write!(f, "{user}[{bare}]:{slots}") } else { write!(f, "{name}:{slots}") }
    }
}

/// Parse `-H`: `HOST[:SLOTS],…`. A host without slots has `default_slots`.
///
/// # Errors
/// [`HostsError`]; also if there is no host.
pub fn parse_list(text: &str, default_slots: u32) -> Result<Vec<Host>, HostsError> {
    let entries = text.split(',').enumerate().map(|(at, entry)| (format!("entry {}", at + 1), entry.trim()));
    collect(entries, |entry| parse_host(entry, default_slots), Repeated::Refused)
}

/// Parse what a discovery script printed: a host in each line. Empty lines are skipped, and no line at all is no host. If a host has
/// several lines, the last one says its slots, as for Horovod.
///
/// # Errors
/// [`HostsError`].
pub fn parse_lines(text: &str, default_slots: u32) -> Result<Vec<Host>, HostsError> {
    collect(lines(text), |line| parse_host(line, default_slots), Repeated::LastCounts)
}

/// What a host means that is named again.
#[derive(Clone, Copy)]
enum Repeated {
    /// A mistake.
    Refused,
    /// Its slots replace those given before.
    LastCounts,
}

/// Parse a host file as of `horovodrun` and `mpirun`: `HOST slots=N` or `HOST[:SLOTS]` in each line, comments after `#`.
///
/// # Errors
/// [`HostsError`].
pub fn parse_hostfile(text: &str, default_slots: u32) -> Result<Vec<Host>, HostsError> {
    let without_comments = lines(text).map(|(place, line)| (place, line.split('#').next().unwrap_or_default().trim()));
    let parse = |line: &str| {
        let Some((host, rest)) = line.split_once(char::is_whitespace) else { return parse_host(line, default_slots) };
        let slots = rest.trim().strip_prefix("slots").map(str::trim_start).and_then(|rest| rest.strip_prefix('='));
        let slots = slots.ok_or_else(|| "must be HOST slots=N or HOST:N".to_owned())?;
        Ok(Host { name: bare_name(host)?, slots: parse_slots(slots.trim())? })
    };
    collect(without_comments.filter(|(_, line)| !line.is_empty()), parse, Repeated::Refused)
}

fn lines(text: &str) -> impl Iterator<Item = (String, &str)> {
    // Editors of other systems begin a file with a byte order mark.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let numbered = text.lines().enumerate().map(|(at, line)| (format!("line {}", at + 1), line.trim()));
    numbered.filter(|(_, line)| !line.is_empty())
}

fn collect<'a>(
    entries: impl Iterator<Item = (String, &'a str)>,
    parse: impl Fn(&str) -> Result<Host, String>,
    repeated: Repeated,
) -> Result<Vec<Host>, HostsError> {
    let mut seen: BTreeMap<String, (usize, String)> = BTreeMap::new();
    let mut hosts: Vec<Host> = Vec::new();
    for (place, text) in entries {
        let error = |why| HostsError { place: place.clone(), text: shown(text), why };
        let host = parse(text).map_err(error)?;
        match (seen.get(&host.name), repeated) {
            (Some((at, _)), Repeated::LastCounts) => {
                hosts[*at].slots = host.slots;
                continue;
            }
            (Some((_, before)), Repeated::Refused) => {
                return Err(error(format!(
                    "but {before} is that host already: name each host once, with all its slots"
                )));
            }
            (None, _) => {}
        }
        if hosts.len() == MOST_HOSTS {
            return Err(error(format!("and there may be {MOST_HOSTS} hosts at most")));
        }
        seen.insert(host.name.clone(), (hosts.len(), place));
        hosts.push(host);
    }
    Ok(hosts)
}

/// `HOST`, `HOST:SLOTS`, `[IPV6]`, or `[IPV6]:SLOTS`, each with or without `USER@`.
fn parse_host(text: &str, default_slots: u32) -> Result<Host, String> {
    let (_, bare) = split_user(text);
    let (name, slots) = match bare.strip_prefix('[').map(|rest| rest.split_once(']')) {
        Some(Some((_, ""))) => (text, None),
        Some(Some((_, rest))) => {
            let slots = rest.strip_prefix(':').ok_or("must be [IPV6] or [IPV6]:SLOTS")?;
            (&text[..text.len() - rest.len()], Some(slots))
        }
        Some(None) => return Err("must have a `]` after the address: [IPV6]:SLOTS".to_owned()),
        None => match text.split_once(':') {
            Some((_, rest)) if rest.contains(':') => {
                return Err("must have brackets around an IPv6 address: [IPV6] or [IPV6]:SLOTS".to_owned());
            }
            Some((name, slots)) => (name, Some(slots)),
            None => (text, None),
        },
    };
    let slots = slots.map_or(Ok(default_slots), |slots| parse_slots(slots.trim()))?;
    Ok(Host { name: bare_name(name.trim_end())?, slots })
}

/// The user with its `@`, and the host.
fn split_user(text: &str) -> (&str, &str) {
    text.split_at(text.rfind('@').map_or(0, |at| at + 1))
}

fn bare_name(text: &str) -> Result<String, String> {
    let (user, text) = split_user(text);
    let name = match text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        Some(address) if address.split('%').next().is_some_and(|it| it.parse::<std::net::Ipv6Addr>().is_ok()) => {
            address
        }
        Some(_) => return Err("must have an IPv6 address in the brackets".to_owned()),
        None if text.contains(':') => {
            return Err("must have brackets around an IPv6 address: [IPV6]".to_owned());
        }
        // Names of hosts are the same in capitals, and this one means something here.
        None if text.eq_ignore_ascii_case("localhost") => "localhost",
        None => text,
    };
    let name = format!("{user}{name}");
    check_name(&name)?;
    Ok(name)
}

/// Whether this can be an argument of `ssh`. A name that begins with `-` would be an option.
fn check_name(name: &str) -> Result<(), String> {
    let known = |byte: u8| byte.is_ascii_alphanumeric() || b".-_@:%".contains(&byte);
    let parts_begin_well = name.split('@').all(|part| !part.is_empty() && !part.starts_with('-'));
    let (user, bare) = split_user(name);
    let is_address = bare.split('%').next().is_some_and(|it| it.parse::<std::net::Ipv6Addr>().is_ok());
    if name.is_empty() {
        return Err("must name a host".to_owned());
    }
    if name.len() > LONGEST_NAME {
        return Err(format!("must have {LONGEST_NAME} bytes at most"));
    }
    if !name.bytes().all(known) || !parts_begin_well || user.contains(':') || bare.contains(':') && !is_address {
        return Err("must be HOST or HOST:SLOTS, where a host is a name, USER@NAME, or an address".to_owned());
    }
    Ok(())
}

fn parse_slots(text: &str) -> Result<u32, String> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let slots = if digits { text.parse().unwrap_or(u64::MAX) } else { 0 };
    check_slots(slots)?;
    u32::try_from(slots).map_err(|error| error.to_string())
}

fn check_slots(slots: u64) -> Result<(), String> {
    match slots {
        1..=65_535 => Ok(()),
        _ => Err(format!("its slots must be a number from 1 to {MOST_SLOTS}")),
    }
}

fn shown(text: &str) -> String {
    let mut shown: String = text.chars().take(SHOWN).map(|char| if is_steering(char) { '?' } else { char }).collect();
    if text.chars().nth(SHOWN).is_some() {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn host(name: &str, slots: u32) -> Host {
        Host { name: name.to_owned(), slots }
    }

    fn why(parsed: Result<Vec<Host>, HostsError>) -> String {
        parsed.unwrap_err().to_string()
    }

    // horovod test/single/test_elastic_discovery.py: default and given slots, blank lines, no lines.
    #[test]
    fn lines_have_given_or_default_slots() {
        assert_eq!(
            parse_lines("host-1:2\n\n  host-2  \r\nme@host-3:4\n", 8).unwrap(),
            [host("host-1", 2), host("host-2", 8), host("me@host-3", 4)]
        );
        assert_eq!(parse_lines("\n \n", 8).unwrap(), []);
        assert_eq!(parse_lines("", 8).unwrap(), []);
    }

    // Horovod's discovery puts lines into a dict, and reads numbers by `int`.
    #[test]
    fn a_script_may_repeat_a_host_and_put_spaces_before_its_slots() {
        assert_eq!(parse_lines("a:2\nb: 3\na\nb : 4\na:5", 8).unwrap(), [host("a", 5), host("b", 4)]);
        assert_eq!(parse_list("a: 2, b", 1).unwrap(), [host("a", 2), host("b", 1)]);
    }

    #[test]
    fn ipv6_addresses_have_brackets() {
        assert_eq!(parse_list("[::1]:4,[fe80::2%eth0]", 1).unwrap(), [host("::1", 4), host("fe80::2%eth0", 1)]);
        assert_eq!(
            why(parse_list("::1:4", 1)),
            "entry 1 is `::1:4`, must have brackets around an IPv6 address: [IPV6] or [IPV6]:SLOTS"
        );
        assert!(why(parse_lines("[::1", 1)).contains("must have a `]`"));
        assert!(why(parse_lines("[node]:1", 1)).contains("must have an IPv6 address in the brackets"));
        assert!(why(parse_lines("[::1]4", 1)).contains("must be [IPV6] or [IPV6]:SLOTS"));
        assert_eq!(host("::1", 4).to_string(), "[::1]:4");
    }

    #[test]
    fn a_user_may_stand_before_an_ipv6_address() {
        let parsed = parse_list("root@[::1],me@[fe80::2%eth0]:4", 2).unwrap();
        assert_eq!(parsed, [host("root@::1", 2), host("me@fe80::2%eth0", 4)]);
        assert_eq!(parsed[1].to_string(), "me@[fe80::2%eth0]:4");
        assert_eq!(parse_hostfile("root@[::1] slots=3", 1).unwrap(), [host("root@::1", 3)]);
        assert_eq!(parse_list(&parsed[1].to_string(), 1).unwrap(), parsed[1..]);
        assert!(why(parse_list("root@::1", 1)).contains("must have brackets around an IPv6 address"));
        assert!(parse_list("a@b:c@[::1]", 1).is_err());
    }

    #[test]
    fn localhost_is_the_same_in_capitals() {
        assert_eq!(parse_list("LOCALHOST:2,Node1", 1).unwrap(), [host("localhost", 2), host("Node1", 1)]);
        assert!(why(parse_list("localhost,LocalHost", 1)).contains("is that host already"));
    }

    #[test]
    fn a_byte_order_mark_is_no_part_of_the_first_host() {
        assert_eq!(
            parse_hostfile("\u{feff}node1 slots=2\r\nnode2\r\n", 1).unwrap(),
            [host("node1", 2), host("node2", 1)]
        );
        assert_eq!(parse_lines("\u{feff}node1:2\n", 1).unwrap(), [host("node1", 2)]);
    }

    #[test]
    fn a_host_file_has_both_forms_and_comments() {
        let text = "# the cluster\nnode1 slots=8   # eight GPUs\nnode2 slots = 4\n\nnode3:2\nnode4\n[::1] slots=3\n";
        let expected = [host("node1", 8), host("node2", 4), host("node3", 2), host("node4", 1), host("::1", 3)];
        assert_eq!(parse_hostfile(text, 1).unwrap(), expected);
        assert_eq!(
            why(parse_hostfile("node1\nnode2 cpus=4", 1)),
            "line 2 is `node2 cpus=4`, must be HOST slots=N or HOST:N"
        );
    }

    #[test]
    fn errors_name_the_place_the_text_and_what_is_allowed() {
        let slots = "its slots must be a number from 1 to 65535";
        for bad in ["a:0", "a:", "a:x", "a:-1", "a:+1", "a:65536", "a:99999999999999999999999"] {
            assert_eq!(why(parse_lines(&format!("ok\n{bad}"), 1)), format!("line 2 is `{bad}`, {slots}"));
        }
        let name = "must be HOST or HOST:SLOTS, where a host is a name, USER@NAME, or an address";
        for bad in ["two words", "-oProxyCommand=x", "me@-x", "a;b", "$(id)", "ä", "a\u{1b}[2J"] {
            assert!(why(parse_lines(bad, 1)).ends_with(name), "{bad}");
        }
        assert_eq!(why(parse_list("a,,b", 1)), "entry 2 is ``, must name a host");
        assert_eq!(
            why(parse_list("a:1,b,a:2", 1)),
            "entry 3 is `a:2`, but entry 1 is that host already: name each host once, with all its slots"
        );
        let long = "x".repeat(400);
        assert_eq!(why(parse_lines(&long, 1)), format!("line 1 is `{}…`, must have 320 bytes at most", "x".repeat(80)));
        assert!(!why(parse_lines("a\u{1b}[2J", 1)).contains('\u{1b}'));
    }

    #[test]
    fn what_is_given_apart_is_checked_as_well() {
        assert_eq!(Host::new("node", 2), Ok(host("node", 2)));
        assert_eq!(Host::new("::1", 1), Ok(host("::1", 1)));
        assert!(Host::new("node", 0).unwrap_err().to_string().contains("its slots must be"));
        assert!(Host::new("-v", 1).is_err());
    }

    proptest! {
        #[test]
        fn no_text_panics_and_what_is_accepted_is_no_option(text in "\\PC{0,40}|[-a:\\[\\]@,\n 0-9]{0,30}") {
            for parsed in [parse_list(&text, 1), parse_lines(&text, 1), parse_hostfile(&text, 1)].into_iter().flatten() {
                for host in parsed {
                    prop_assert!(!host.name.starts_with('-') && !host.name.is_empty() && host.slots > 0);
                    prop_assert!(!host.name.contains(|char: char| char.is_whitespace() || char.is_control()));
                }
            }
        }

        #[test]
        fn what_is_shown_is_read_again(name in "[a-z][a-z0-9.-]{0,20}", slots in 1_u32..65_535) {
            let host = Host::new(&name, slots).unwrap();
            prop_assert_eq!(parse_list(&host.to_string(), 1).unwrap(), [host]);
        }
    }
}
