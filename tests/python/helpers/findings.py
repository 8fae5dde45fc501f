"""What every finding of the doctor keeps to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic_rs._doctor._findings import Finding


def assert_finding(finding: Finding, verdict: str, text: str) -> None:
    """Check a finding's verdict, a part of its text, and that a fault alone has a remedy."""
    assert finding.verdict == verdict, finding
    assert text in str(finding)
    assert bool(finding.remedy) == (verdict == "mend"), "a fault has a remedy"
    assert str(finding).startswith(f"{verdict:<5} {finding.check}")
