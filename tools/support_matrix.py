"""Record what `make test-compat` found, and write the support matrix into ``docs/install.md``.

    python tools/support_matrix.py record JUNIT.xml…   # with the Python and the torch that the tests ran with
    python tools/support_matrix.py write               # the table alone

The results are in ``docs/support.json``, one for each combination of torch and Python: the last run counts.
A second report has those tests that failed in the first one and ran again, alone. Their second result counts, and the
table has how many there were.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "support.json"
PAGE = ROOT / "docs" / "install.md"
BEGIN, END = "<!-- support matrix: begin -->", "<!-- support matrix: end -->"


def main(words: list[str]) -> int:
    match words:
        case ["record", *files] if files:
            record([Path(file).read_text() for file in files if Path(file).exists()])
        case ["write"]:
            pass
        case _:
            sys.exit("usage: python tools/support_matrix.py record JUNIT.xml… | write")
    PAGE.write_text(page(PAGE.read_text(), results()))
    return 0


def results() -> list[dict[str, Any]]:
    return list(json.loads(RESULTS.read_text())) if RESULTS.exists() else []


def record(reports: list[str]) -> None:
    new = {
        "torch": metadata.version("torch").partition("+")[0],
        "python": ".".join(platform.python_version_tuple()[:2]),
        "elastic_rs": metadata.version("elastic_rs"),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.strip(),
        "machine": platform.machine(),
        **counts(*reports),
    }
    same = ("torch", "python", "machine")
    others = [one for one in results() if any(one[name] != new[name] for name in same)]
    found = sorted([*others, new], key=lambda one: (numbers(one["torch"]), numbers(one["python"]), one["machine"]))
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")


def numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def counts(*reports: str) -> dict[str, Any]:
    """Count the tests of pytest's reports (JUnit's XML), and name those that failed. A later report's results count."""
    # A test that fails, and again when it is torn down, is there twice.
    cases: dict[tuple[str, str], ET.Element] = {}
    again = 0
    for report in reports:
        these = {
            (case.attrib["classname"], case.attrib["name"]): case for case in ET.fromstring(report).iter("testcase")
        }
        again = len(cases.keys() & these.keys())
        cases |= these
    bad = {"failure", "error"}
    failed = sorted({name for (_, name), case in cases.items() if bad & {part.tag for part in case}})
    skipped = sum(case.find("skipped") is not None for case in cases.values())
    files = len({place.partition(".Test")[0] for place, _ in cases})
    passed = len(cases) - skipped - len(failed)
    return {"passed": passed, "failed": failed, "skipped": skipped, "again": again, "files": files}


def page(text: str, found: list[dict[str, Any]]) -> str:
    """Return the page with the table of these results between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(found)}{END}{after}"


def table(found: list[dict[str, Any]]) -> str:
    if not found:
        return ""
    rows = [f"| {one['torch']} | {one['python']} | {one['machine']} | {outcome(one)} | {built(one)} |" for one in found]
    return "\n".join(
        ["", "| torch | Python | processor | tests | of elastic_rs |", "|---|---|---|---|---|", *rows, "", ""]
    )


def built(one: dict[str, Any]) -> str:
    return f"{one['elastic_rs']} ({one['commit']})"


def outcome(one: dict[str, Any]) -> str:
    parts = [f"{one['passed']} passed"]
    if one["failed"]:
        parts.append(f"{len(one['failed'])} failed (`{'`, `'.join(one['failed'][:5])}`)")
    if one.get("again"):
        parts.append(f"{one['again']} ran twice")
    if one["skipped"]:
        parts.append(f"{one['skipped']} skipped")
    return f"{', '.join(parts)}, from {one['files']} files"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
