//! The tests and files that documents name exist.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

use std::collections::HashMap;
use std::fs;
use std::path::Path;

/// Text of all Rust and Python files below, by name; files of one name are joined. `tests/store/server.rs` is `store_server` and
/// `server`, and so are its `mod.rs` and `tests.rs`.
fn sources(directory: &Path, found: &mut HashMap<String, String>) {
    for entry in fs::read_dir(directory).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs" || extension == "py") {
            let text = fs::read_to_string(&path).unwrap();
            let parts = path.with_extension("");
            let parts: Vec<_> = parts.iter().map(|part| part.to_string_lossy()).collect();
            let own = ["mod", "tests"].into_iter().find_map(|last| parts.strip_suffix(&[last.into()]));
            for parts in [Some(&parts[..]), own].into_iter().flatten() {
                for name in [&parts[parts.len() - 1..], &parts[parts.len() - 2..]] {
                    found.entry(name.join("_")).or_default().push_str(&text);
                }
            }
        }
    }
}

#[test]
fn every_test_that_the_pages_of_store_and_security_name_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = HashMap::new();
    sources(&root.join("src"), &mut found);
    sources(&root.join("tests"), &mut found);
    sources(&root.join("crates/sim/tests"), &mut found);
    let documents = ["docs/store.md", "docs/security.md"].map(|name| fs::read_to_string(root.join(name)).unwrap());
    let is_name =
        |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    let code = documents.iter().flat_map(|document| document.split('`')).filter_map(|code| code.split_once("::"));
    let named: Vec<(&str, &str)> = code.filter(|(file, test)| is_name(file) && is_name(test)).collect();
    assert!(named.len() > 50, "{named:?}");
    for (file, test) in named.into_iter().filter(|named| *named != ("file", "name")) {
        let text = found.get(file).unwrap_or_else(|| panic!("no file `{file}`"));
        let exists = text.contains(&format!("fn {test}(")) || text.contains(&format!("def {test}("));
        assert!(exists, "no `{test}` in `{file}`");
    }
}

#[test]
fn every_test_that_the_table_of_scenarios_names_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = HashMap::new();
    sources(&root.join("src"), &mut found);
    sources(&root.join("tests"), &mut found);
    sources(&root.join("crates/sim/tests"), &mut found);
    let document = fs::read_to_string(root.join("docs/rendezvous.md")).unwrap();
    let table = document.split("\n## ").find_map(|section| section.strip_prefix("Scenarios\n")).unwrap();
    let rows = table.lines().filter(|line| line.starts_with("| "));
    let named: Vec<_> = rows.flat_map(|row| row.split('`').skip(1).step_by(2)).collect();
    assert!(named.len() > 25, "{named:?}");
    for test in named {
        assert!(found.values().any(|text| text.contains(&format!("fn {test}("))), "no `{test}`");
    }
}

#[test]
fn the_map_fits_on_130_lines_and_names_files_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let map = fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap();
    assert!(map.lines().count() <= 130, "{} lines", map.lines().count());
    let long: Vec<_> = map.lines().filter(|line| line.chars().count() > 120).collect();
    assert!(long.is_empty(), "{long:?}");
    let named = map.split('`').skip(1).step_by(2);
    let named: Vec<_> =
        named.filter(|name| ["src/", "crates/", "python/"].iter().any(|at| name.starts_with(at))).collect();
    assert!(named.len() > 60, "{named:?}");
    for name in named {
        assert!(root.join(name).exists() || root.join(format!("{name}.rs")).exists(), "no `{name}`");
    }
}
