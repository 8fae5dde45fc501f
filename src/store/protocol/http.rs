//! Requests of HTTP/1.1, as far as the host answers them. They come from peers that have proven nothing.

use std::net::IpAddr;

/// Bytes of a request. A reader that has more of them, and no complete request, refuses it.
pub const REQUEST_BYTES: usize = 8 * 1024;
/// Headers of a request.
const HEADERS: usize = 64;

/// A request, as far as it concerns the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The path, without the query.
    pub path: String,
    /// What follows the path, after `?`.
    pub query: String,
    /// The `Host` header.
    pub host: Option<String>,
}

impl Request {
    /// The request at the beginning of these bytes, once it is complete. `None`: more have to come.
    ///
    /// # Errors
    /// They begin no request of HTTP/1.1, or there are more than 64 headers, or several `Host` headers.
    pub fn parse(bytes: &[u8]) -> Result<Option<Self>, String> {
        let mut headers = [httparse::EMPTY_HEADER; HEADERS];
        let mut request = httparse::Request::new(&mut headers);
        match request.parse(bytes) {
            Ok(httparse::Status::Partial) => Ok(None),
            Ok(httparse::Status::Complete(_)) => {
                let target = request.path.unwrap_or_default();
                let (path, query) = target.split_once('?').unwrap_or((target, ""));
                let (path, query) = (path.to_owned(), query.to_owned());
                // A proxy before this server may take another of several for the right one.
                let is_host = |header: &&httparse::Header<'_>| header.name.eq_ignore_ascii_case("host");
                let hosts = request.headers.iter().filter(is_host).count();
                if hosts > 1 {
                    return Err(format!("the request has {hosts} `Host` headers, must have one"));
                }
                let host = request.headers.iter().find(is_host);
                let host = host.map(|header| String::from_utf8_lossy(header.value).trim().to_owned());
                Ok(Some(Self { path, query, host }))
            }
            Err(error) => Err(format!("this is no request of HTTP/1.1: {error}")),
        }
    }

    /// The path with its query.
    pub fn target(&self) -> String {
        let mark = if self.query.is_empty() { "" } else { "?" };
        format!("{}{mark}{}", self.path, self.query)
    }

    /// The parameters of the query with their values. `None`: the value is not valid.
    pub fn parameters(&self) -> impl Iterator<Item = (&str, Option<String>)> {
        let pairs = self.query.split('&').filter_map(|pair| pair.split_once('='));
        pairs.map(|(name, value)| (name, unescaped(value)))
    }
}

/// A text of an address, where `%41` is `A`. `None`: it is not valid.
fn unescaped(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let digits = rest.get(..2).filter(|digits| digits.iter().all(u8::is_ascii_hexdigit))?;
        bytes.push(u8::from_str_radix(str::from_utf8(digits).ok()?, 16).ok()?);
        rest = &rest[2..];
    }
    String::from_utf8(bytes).ok()
}

/// The name or address in a `Host` header, without its port.
pub fn host_name(host: &str) -> &str {
    match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((name, _)) => name,
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    }
}

/// Whether a `Host` header names an address, or `localhost`.
pub fn is_address_or_localhost(host: &str) -> bool {
    let name = host_name(host);
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_once_they_are_complete() {
        let whole = b"GET /metrics?x=1 HTTP/1.1\r\nHost: n1:29400\r\n\r\n";
        for end in 4..whole.len() {
            assert_eq!(Request::parse(&whole[..end]), Ok(None), "{end}");
        }
        let request =
            Request { path: "/metrics".to_owned(), query: "x=1".to_owned(), host: Some("n1:29400".to_owned()) };
        assert_eq!(Request::parse(whole), Ok(Some(request)));
        assert!(Request::parse(b"GET / HTTP/9.9\r\n\r\n").unwrap_err().starts_with("this is no request"));
        for other in ["n1", "evil.example", ""] {
            let two = format!("GET / HTTP/1.1\r\nHost: n1\r\nA: b\r\nhOST: {other}\r\n\r\n");
            assert_eq!(Request::parse(two.as_bytes()).unwrap_err(), "the request has 2 `Host` headers, must have one");
        }
        let many = format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(HEADERS + 1));
        assert!(Request::parse(many.as_bytes()).is_err());
    }
}
