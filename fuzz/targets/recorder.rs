//! Fuzzes dumps of torch's flight recorder, which workers write. Each becomes a view that may be sent, or an error.
#![no_main]

use std::collections::BTreeMap;

use elastic_rs::hang::fr::Recorded;
use elastic_rs::hang::view::View;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    match Recorded::parse(input) {
        Ok(recorded) => {
            let members = BTreeMap::from([("0".to_owned(), (0..4).collect())]);
            let mut view = View::new(0, 1);
            recorded.fill(&mut view, &members);
            view.fit();
            assert_eq!(View::decode(&view.encode()), Ok(view));
        }
        Err(error) => assert!(!error.is_empty()),
    }
});
