"""``tools/check_imports.py``: which imports of the core's modules it refuses."""

from pathlib import Path

import pytest
from check_imports import faults

UP = "src/store imports agent, whose room is not below"
UPWARD = {"src/store/mod.rs": "use crate::agent::Policy;", "src/agent/mod.rs": "pub struct Policy;"}
CIRCLE = {
    "src/store/mod.rs": "mod table;\nmod server;",
    "src/store/table.rs": "use super::server::Server;",
    "src/store/server.rs": "use crate::store::{table::{Key, Table}, Other};",
}
SHOWN = {
    "src/store/mod.rs": "mod table;\nmod server;\npub use table::Table;\npub use self::server::Server;",
    "src/store/table.rs": "pub struct Table;",
    "src/store/server.rs": "use super::Table;",
}
THROUGH_SHOWN = SHOWN | {"src/store/table.rs": "use super::Server;"}
PARTS = {"src/store/table.rs": "mod waiters;\nuse waiters::Waiter;", "src/store/table/waiters.rs": "use super::Table;"}
IN_TESTS = {
    "src/store/mod.rs": "mod table;\n#[cfg(test)]\nmod tests;",
    "src/store/tests.rs": "use crate::agent::Policy;",
    "src/store/table.rs": "// use crate::agent::Policy;\n#[cfg(test)]\nmod tests {\n    use crate::agent::Policy;\n}\n",
    "src/agent/mod.rs": "use crate::store::table::Table;",
}
TEXTS = r"""
const WHY: &str = "it is off: \
    use crate::agent, or py-spy; \"there\"";
const MARK: char = '"';
const RAW: &str = r#"
use crate::agent::Policy;
"#;
use crate::clock::Now;
"""
IN_TEXTS = {
    "src/store/mod.rs": TEXTS,
    "src/agent/mod.rs": "pub struct Policy;",
    "src/clock/mod.rs": "pub struct Now;",
}
INLINE = {"src/store/mod.rs": "fn now() { crate::agent::now() }", "src/agent/mod.rs": "pub fn now() {}"}


@pytest.mark.parametrize(
    ("tree", "found"),
    [
        (UPWARD, [UP]),
        (INLINE, [UP]),
        (CIRCLE, ["a circle of imports: store/server <- store/table <- store/server"]),
        (SHOWN, []),
        (THROUGH_SHOWN, ["a circle of imports: store/server <- store/table <- store/server"]),
        (PARTS, []),
        (IN_TESTS, []),
        (IN_TEXTS, []),
        (IN_TEXTS | {"src/store/mod.rs": TEXTS + "use crate::agent::Policy;"}, [UP]),
        ({"src/cellar/mod.rs": ""}, ["src/cellar is on no floor: give it one in FLOORS"]),
    ],
)
def test_imports_that_go_up_or_round_are_faults(tree: dict[str, str], found: list[str], tmp_path: Path) -> None:
    for name, text in tree.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert faults(tmp_path) == found
