//! Names the commit that a release build is made from.

use std::process::Command;
use std::{env, fs};

/// Set `ELASTIC_RS_COMMIT` for the crate: what the environment gives, else the file `commit` of a source distribution, else
/// what git finds, else `unknown`.
///
/// Development builds do not ask git: each commit would compile the binding again.
fn main() {
    println!("cargo::rerun-if-env-changed=ELASTIC_RS_COMMIT");
    println!("cargo::rerun-if-changed=build.rs");
    let given = env::var("ELASTIC_RS_COMMIT").ok().filter(|commit| !commit.is_empty());
    let given = given.or_else(|| fs::read_to_string("commit").ok().map(|commit| commit.trim().to_owned()));
    let is_release = env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let commit = given.or_else(|| if is_release { of_git() } else { None });
    println!("cargo::rustc-env=ELASTIC_RS_COMMIT={}", commit.as_deref().unwrap_or("unknown"));
}

fn of_git() -> Option<String> {
    let head = git(&["rev-parse", "--git-path", "logs/HEAD"])?;
    println!("cargo::rerun-if-changed={head}");
    // A source distribution may be unpacked in another project's checkout.
    git(&["ls-files", "--error-unmatch", "build.rs"])?;
    git(&["rev-parse", "--short=12", "HEAD"])
}

fn git(words: &[&str]) -> Option<String> {
    let done = Command::new("git").args(words).output().ok().filter(|done| done.status.success())?;
    let said = String::from_utf8(done.stdout).ok()?;
    Some(said.trim().to_owned())
}
