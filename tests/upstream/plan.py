"""``plan.toml``: which of PyTorch's own tests run, and which do not count."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

PLAN: dict[str, Any] = tomllib.loads((Path(__file__).parent / "plan.toml").read_text())


def excuse(test: str) -> str | None:
    """Return why a test does not count, or None if it does."""
    for kind, patterns in PLAN["not_counted"].items():
        for pattern, why in patterns.items():
            if re.search(pattern, test):
                return f"{kind}: {why}"
    return None
