//! Fuzzes views of ranks, which peers send. Whatever they say, somebody or nobody is named, in any order of views, and in words.
#![no_main]

use std::time::Duration;

use elastic_rs::hang::blame::blame;
use elastic_rs::hang::finding::Finding;
use elastic_rs::hang::text::{Facts, LINES_LIMIT, lines, status};
use elastic_rs::hang::view::{VIEW_LIMIT_BYTES, View};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    // Chunks: a length, and that many bytes of a view.
    let (mut rest, mut views) = (input, Vec::new());
    while let Some((&[low, high], behind)) = rest.split_first_chunk() {
        let (bytes, behind) = behind.split_at(behind.len().min(usize::from(u16::from_le_bytes([low, high]))));
        rest = behind;
        if let Ok(finding) = Finding::decode(bytes) {
            let all = lines(&finding, &Facts::default());
            assert!((1..=LINES_LIMIT).contains(&all.len()));
        }
        if let Ok(view) = View::decode(bytes) {
            let again = view.encode();
            assert!(again.len() <= VIEW_LIMIT_BYTES, "it encodes to more than it came from");
            assert_eq!(View::decode(&again), Ok(view.clone()));
            let mut fitted = view.clone();
            fitted.fit();
            assert_eq!(View::decode(&fitted.encode()), Ok(fitted));
            views.push(view);
        }
    }
    let finding = blame(&views);
    views.reverse();
    assert_eq!(blame(&views), finding, "the order of views matters");
    assert_eq!(Finding::decode(&finding.encode()), Ok(finding.clone()));
    for view in &views {
        assert!(view.stands_as(view));
    }
    let facts = Facts { still: Duration::from_secs(9), ranks: views.len(), ..Facts::default() };
    let all = lines(&finding, &facts);
    assert!((1..=LINES_LIMIT).contains(&all.len()) && !status(&finding, &facts).is_empty());
});
