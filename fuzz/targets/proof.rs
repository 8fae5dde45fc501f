//! What an unauthenticated peer may send before it has proven itself, and what a node believes of an unauthenticated peer's answer.

#![no_main]

use elastic_rs::secure::claim::{Answer, Claim, MAC_BYTES};
use elastic_rs::wire::text::{is_steering, validate_run_id};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(Some((claim, mac))) = Claim::decode(bytes) {
        assert_eq!(validate_run_id(&claim.run_id), Ok(()));
        let mac = mac.map_or(Vec::new(), |mac| mac.to_vec());
        let again = [claim.encode().expect("it was decoded"), mac].concat();
        assert_eq!(again, bytes);
    }
    match Answer::decode(bytes) {
        Ok(Some(Answer::Refused(reason))) => assert!(reason.len() <= 3 * 512 && !reason.contains(is_steering)),
        Ok(Some(Answer::Proven(mac))) => assert_eq!(mac.len(), MAC_BYTES),
        Ok(Some(Answer::Admitted)) => assert_eq!(bytes, [2]),
        Ok(None) | Err(_) => {}
    }
});
