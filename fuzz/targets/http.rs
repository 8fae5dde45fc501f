//! Fuzzes requests of HTTP to the host's port, which come from peers that have proven nothing.
//!
//! What a request says must not depend on what follows it, and texts of its parameters must not be longer than they came.

#![no_main]

use std::net::IpAddr;

use elastic_rs::store::protocol::http::{Request, host_name, is_address_or_localhost};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(Some(request)) = Request::parse(bytes) else { return };
    assert_eq!(Request::parse(&[bytes, b"GET / HTTP/1.1"].concat()), Ok(Some(request.clone())));
    assert!(request.path.len() + request.query.len() <= bytes.len() && !request.path.contains('?'));
    for (name, value) in request.parameters() {
        assert!(name.len() + value.map_or(0, |value| value.len()) < request.query.len());
    }
    let Some(host) = request.host else { return };
    let name = host_name(&host);
    if is_address_or_localhost(&host) {
        assert!(name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok(), "{host:?}");
    }
});
