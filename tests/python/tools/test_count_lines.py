"""``tools/count_lines.py``: what counts as the product, and what as its tests."""

from __future__ import annotations

from pathlib import PurePosixPath

import count_lines

SOURCE = """\
//! A room.

mod part;
#[cfg(test)]
mod checks;
#[cfg(all(test, feature = "io"))]
pub(crate) mod fixtures;

#[cfg(test)]
impl Part {
    fn shown(&self) -> u32 {
        1
    }
}

fn kept() {}

#[cfg(test)]
mod tests {
    #[test]
    fn it_works() {
        assert!(true);
    }
}
"""


def test_what_is_compiled_for_tests_alone_is_left_out() -> None:
    kept = count_lines.without_tests(SOURCE)
    assert [line for line in kept.splitlines() if line.strip()] == ["//! A room.", "mod part;", "fn kept() {}"]


def test_modules_that_are_declared_for_tests_are_left_out_with_all_below_them() -> None:
    names = ["src/room.rs", "src/room/part.rs", "src/room/checks.rs", "src/room/checks/more.rs", "src/room/fixtures.rs"]
    there = {PurePosixPath(name): "" for name in names}
    found = count_lines.only_for_tests(PurePosixPath("src/room.rs"), SOURCE, there)
    assert sorted(map(str, found)) == ["src/room/checks.rs", "src/room/checks/more.rs", "src/room/fixtures.rs"]
