"""The support matrix: it is made of reports of pytest, and the page has the table of the recorded results."""

from __future__ import annotations

import json

import support_matrix

REPORT = """<testsuites><testsuite>
<testcase classname="a" name="test_one"/>
<testcase classname="b.c" name="test_two"><skipped message="no etcd"/></testcase>
<testcase classname="a" name="test_three"><failure message="x"/></testcase>
<testcase classname="a" name="test_three"><error message="at teardown"/></testcase>
</testsuite></testsuites>"""


def test_reports_are_counted() -> None:
    once = {"passed": 1, "failed": ["test_three"], "skipped": 1, "again": 0, "files": 2}
    assert support_matrix.counts(REPORT) == once
    again = '<testsuites><testcase classname="a" name="test_three"/></testsuites>'
    assert support_matrix.counts(REPORT, again) == once | {"passed": 2, "failed": [], "again": 1}


def test_the_page_has_the_recorded_results() -> None:
    text = support_matrix.PAGE.read_text()
    assert support_matrix.page(text, support_matrix.results()) == text, "run `python tools/support_matrix.py write`"


def test_a_row_says_what_failed() -> None:
    one = {
        "torch": "2.9.1", "python": "3.12", "machine": "x86_64", "elastic_rs": "0.2.0", "commit": "0123456789ab",
        "passed": 7, "failed": ["test_three"], "skipped": 2, "again": 1, "files": 3,
    }  # fmt: skip
    made = support_matrix.page(
        f"a\n{support_matrix.BEGIN}\nold\n{support_matrix.END}\nz\n", json.loads(json.dumps([one]))
    )
    assert "old" not in made
    outcome = "7 passed, 1 failed (`test_three`), 1 ran twice, 2 skipped, from 3 files"
    row = f"| 2.9.1 | 3.12 | x86_64 | {outcome} | 0.2.0 (0123456789ab) |"
    assert made.splitlines()[3:7] == [
        "| torch | Python | processor | tests | of elastic_rs |", "|---|---|---|---|---|", row, "",
    ]  # fmt: skip
    assert made.endswith(f"{support_matrix.END}\nz\n")
