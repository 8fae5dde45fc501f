//! The members of a cluster, as users write them: `h1:2379,h2:2379,[2001:db8::3]:2379`, with or without `https://`. Pure.

use std::fmt;

/// The port of etcd's clients.
const DEFAULT_PORT: u16 = 2379;

/// A member's host name or address, and the port for clients.
pub type Address = (String, u16);

/// Where the members of a cluster listen for clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoints {
    /// Whether they speak TLS.
    pub tls: bool,
    /// Each once, in the order given. Never empty.
    pub members: Vec<Address>,
}

impl fmt::Display for Endpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let members: Vec<_> = self.members.iter().map(to_text).collect();
        f.write_str(&members.join(","))
    }
}

/// `host:port`, with brackets around an IPv6 address.
pub(super) fn to_text((host, port): &Address) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// Parse the members of a cluster. `protocol` is `http` or `https` if the user named one; without it and without a scheme before a
/// member, it is `http`.
///
/// # Errors
/// A sentence that names the part at fault and what is allowed.
pub fn parse_endpoints(text: &str, protocol: Option<&str>) -> Result<Endpoints, String> {
    let mut tls = match protocol {
        None => None,
        Some("http") => Some(false),
        Some("https") => Some(true),
        Some(other) => return Err(format!("protocol=`{}` must be `http` or `https`", other.escape_default())),
    };
    let mut members = Vec::new();
    for part in text.split(',').map(str::trim) {
        let (scheme, member) = parse_member(part)?;
        match (scheme, tls) {
            (Some(scheme), Some(other)) if scheme != other => {
                let name = |tls| if tls { "https" } else { "http" };
                let (a, b) = (name(scheme), name(other));
                return Err(format!(
                    "the etcd endpoint {} has `{a}://`, but the others, or `protocol`, say `{b}`",
                    to_text(&member)
                ));
            }
            (Some(scheme), None) => {
                // Members before this one had no scheme, and count as `http`.
                if scheme && !members.is_empty() {
                    return Err(format!(
                        "the etcd endpoint {} has `https://`, but those before it do not: set `protocol=https` instead",
                        to_text(&member)
                    ));
                }
                tls = Some(scheme);
            }
            _ => {}
        }
        if !members.contains(&member) {
            members.push(member);
        }
    }
    Ok(Endpoints { tls: tls.unwrap_or(false), members })
}

/// Parse one member: its scheme (`https` or not) if it has one, and its address.
fn parse_member(text: &str) -> Result<(Option<bool>, Address), String> {
    const ALLOWED: &str = "write `host:2379`, `[v6 address]:2379` or `https://host:2379`, separated by commas";
    if text.is_empty() {
        return Err(format!("an etcd endpoint is empty: {ALLOWED}"));
    }
    if text.contains('@') {
        // What is before it may be a password: it is not repeated.
        return Err("an etcd endpoint has an `@`: give the user as `username` and `password_file`".to_owned());
    }
    let wrong = |why: &str| format!("the etcd endpoint `{}` {why}: {ALLOWED}", text.escape_default());
    let (scheme, rest) = match text.split_once("://") {
        None => (None, text),
        Some(("http", rest)) => (Some(false), rest),
        Some(("https", rest)) => (Some(true), rest),
        Some(_) => return Err(wrong("must begin with `http://` or `https://`, or with neither")),
    };
    let rest = rest.strip_suffix('/').unwrap_or(rest);
    let (host, port) = if let Some(rest) = rest.strip_prefix('[') {
        let (host, port) = rest.split_once(']').ok_or_else(|| wrong("has no `]`"))?;
        if host.parse::<std::net::Ipv6Addr>().is_err() {
            return Err(wrong("has no IPv6 address between its brackets"));
        }
        let port = match port {
            "" => None,
            port => Some(port.strip_prefix(':').ok_or_else(|| wrong("has something else than a port after `]`"))?),
        };
        (host, port)
    } else {
        match rest.split_once(':') {
            Some((_, port)) if port.contains(':') => {
                return Err(wrong("has several colons: put an IPv6 address in brackets"));
            }
            Some((host, port)) => (host, Some(port)),
            None => (rest, None),
        }
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':');
    if host.is_empty() || !host.chars().all(plain) || host.len() > 255 {
        return Err(wrong("has no valid host name"));
    }
    let port = match port {
        None => DEFAULT_PORT,
        // `parse` would take a sign.
        Some(port) => match port.parse() {
            Ok(number) if number > 0 && port.bytes().all(|c| c.is_ascii_digit()) => number,
            _ => return Err(wrong("has no valid port (1 to 65535)")),
        },
    };
    Ok((scheme, (host.to_owned(), port)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str, protocol: Option<&str>) -> (bool, String) {
        let endpoints = parse_endpoints(text, protocol).unwrap();
        (endpoints.tls, endpoints.to_string())
    }

    #[test]
    fn endpoints_are_read_as_users_write_them() {
        let table = [
            ("h1", None, false, "h1:2379"),
            ("h1:1", None, false, "h1:1"),
            ("h1:1, h2:2 ,h3", None, false, "h1:1,h2:2,h3:2379"),
            ("h1,h1:2379,h2", None, false, "h1:2379,h2:2379"),
            ("10.0.0.1:4001", Some("http"), false, "10.0.0.1:4001"),
            ("h1", Some("https"), true, "h1:2379"),
            ("https://h1:1/,https://h2", None, true, "h1:1,h2:2379"),
            ("https://h1:1,h2", None, true, "h1:1,h2:2379"),
            ("http://h1", None, false, "h1:2379"),
            ("h1,http://h2", None, false, "h1:2379,h2:2379"),
            ("https://h1", Some("https"), true, "h1:2379"),
            ("[::1]", None, false, "[::1]:2379"),
            ("[2001:db8::3]:7,h", None, false, "[2001:db8::3]:7,h:2379"),
            ("https://[::1]:7", None, true, "[::1]:7"),
        ];
        for (text, protocol, tls, shown) in table {
            assert_eq!(parsed(text, protocol), (tls, shown.to_owned()), "{text}");
        }
    }

    #[test]
    fn what_is_no_endpoint_is_an_error_that_names_it() {
        let table = [
            ("", None, "is empty"),
            ("h1,,h2", None, "is empty"),
            ("h1:0", None, "`h1:0` has no valid port"),
            ("h1:65536", None, "`h1:65536` has no valid port"),
            ("h1:", None, "`h1:` has no valid port"),
            ("h1:+5", None, "`h1:+5` has no valid port"),
            ("::1", None, "`::1` has several colons: put an IPv6 address in brackets"),
            ("[::1", None, "`[::1` has no `]`"),
            ("[h1]:2379", None, "has no IPv6 address between its brackets"),
            ("[::1]2379", None, "something else than a port"),
            (":2379", None, "has no valid host name"),
            ("h 1", None, "has no valid host name"),
            ("h1/v2", None, "has no valid host name"),
            ("ftp://h1", None, "must begin with `http://`"),
            ("h1", Some("tls"), "protocol=`tls` must be `http` or `https`"),
            ("http://h1", Some("https"), "h1:2379 has `http://`, but the others, or `protocol`, say `https`"),
            ("http://h1,https://h2", None, "h2:2379 has `https://`, but the others, or `protocol`, say `http`"),
            ("h1,https://h2", None, "those before it do not"),
            ("h1\u{1b}[2J", None, "\\u{1b}"),
        ];
        for (text, protocol, expected) in table {
            let error = parse_endpoints(text, protocol).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
        let error = parse_endpoints("https://root:secret@h1", None).unwrap_err();
        assert!(error.contains("username") && !error.contains("secret"), "{error}");
    }
}
