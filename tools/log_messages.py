"""The messages at warning and error of this package's log, as Rust's macros and Python's loggers have them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

TOKEN = re.compile(
    r"//[^\n]*|/\*.*?\*/"  # comments
    r'|r(?P<hashes>#*)"(?P<raw>.*?)"(?P=hashes)'
    r'|b?"(?P<text>(?:[^"\\]|\\.)*)"'
    r"|'(?:[^'\\]|\\.[^']*)'"  # a character; a lifetime falls to the next ones
    r"|(?P<word>\w+!?)|(?P<other>\S)",
    re.DOTALL,
)
"""A token of Rust. It is read as a compiler reads it: what stands in comments and strings is no code."""

OPEN, CLOSE = "([{", ")]}"

MACROS = {"warn!": "warning", "error!": "error"}
CALLS = ("warn", "warn_once", "log", "log_if_slow")
"""Methods of state machines, and a helper: a macro logs their texts elsewhere. ``log`` warns if it says so."""
BODIES = {
    "src/agent/runner/signals.rs": ("end_by",),
    "src/hang/text.rs": ("suspended", "over"),
    "src/rendezvous/node/status_log.rs": ("report_reach", "report_join"),
    "src/rendezvous/run/ranks.rs": ("warning_of_shared_hosts",),
    "src/secure/ending.rs": ("text",),
}
"""Functions that make texts which a macro logs elsewhere."""
PASS_ON = {
    "src/agent/hang_command.rs",
    "src/agent/runner/signals.rs",
    "src/agent/notices/watch.rs",
    "src/agent/runner/hang.rs",
    "src/agent/runner/perform.rs",
    "src/clock.rs",
    "src/discovery/driver.rs",
    "src/launcher/launch/run.rs",
    "src/rendezvous/cell/driver.rs",
    "src/rendezvous/coordinator/driver.rs",
    "src/rendezvous/etcd/driver.rs",
    "src/rendezvous/node/connection.rs",
    "src/secure/watched.rs",
    "src/secure/ending.rs",
}
"""Files whose macros log such texts, and have no words of their own there."""


@dataclass(frozen=True, order=True)
class Message:
    """A message of the log. ``text`` has ``…`` for what it names; ``file`` is where it is logged."""

    file: str
    text: str
    level: str


def messages() -> list[Message]:
    """Return all messages, in the order of their files."""
    found: set[Message] = set()
    for folder in ("src", "crates/py/src"):
        for path in sorted((ROOT / folder).rglob("*.rs")):
            if path.stem not in ("tests", "bench") and "tests" not in path.parts:
                found.update(of_rust(path))
    for path in sorted((ROOT / "python").rglob("*.py")):
        found.update(of_python(path))
    return sorted(found)


def of_rust(path: Path) -> Iterator[Message]:
    name = str(path.relative_to(ROOT))
    source = re.split(r"#\[cfg\(test\)\]\nmod \w+ \{", path.read_text())[0]
    tokens = [match for match in TOKEN.finditer(source) if match["word"] or match["other"] or has_text(match)]
    words = [match["word"] for match in tokens]
    for at, word in enumerate(words[:-2]):
        level = "warning"
        if word == "fn":
            if words[at + 1] not in BODIES.get(name, ()):
                continue
            begin = next(later for later in range(at, len(tokens)) if tokens[later]["other"] == "{")
        elif word in MACROS:
            level, begin = MACROS[word], at + 1
        elif word in CALLS and words[at - 1] != "fn" and (word != "log" or words[at + 2] == "true"):
            begin = at + 1
        else:
            continue
        texts = list(sentences(tokens, begin))
        if word in MACROS and not texts and name not in PASS_ON:
            line = source.count("\n", 0, tokens[at].start()) + 1
            raise ValueError(f"{name}:{line} logs a text that is made elsewhere: tools/log_messages.py has to find it")
        yield from (Message(name, text, level) for text in texts)


def has_text(match: re.Match[str]) -> bool:
    return match["text"] is not None or match["raw"] is not None


def sentences(tokens: list[re.Match[str]], at: int) -> Iterator[str]:
    """Yield the texts between the bracket at ``at`` and its end."""
    depth = 0
    for before, token in zip(tokens[at - 1 :], tokens[at:], strict=False):
        if token["other"] and token["other"] in OPEN:
            depth += 1
        elif token["other"] and token["other"] in CLOSE:
            depth -= 1
            if depth == 0:
                return
        elif depth == 0:
            return
        elif has_text(token) and before["other"] not in (":", "=") and (text := shown(token)):
            yield text


def shown(token: re.Match[str]) -> str:
    """Return a literal as the page shows it, or nothing for what is no sentence, such as a format without words."""
    text = token["raw"] if token["text"] is None else re.sub(r"\\\n\s*", "", token["text"]).replace('\\"', '"')
    return tidy(re.sub(r"\{[^{}]*\}", "…", text))


def tidy(text: str) -> str:
    text = re.sub(r"^(\[…\] )+", "", re.sub("…+", "…", text))
    if text.startswith((",", ";")):  # a part of a sentence
        return ""
    return text if len(re.findall(r"[A-Za-z]{2,}", text)) >= 2 else ""


def of_python(path: Path) -> Iterator[Message]:
    name = str(path.relative_to(ROOT))
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            continue
        logger = node.func.value
        if not (isinstance(logger, ast.Name) and logger.id in ("logger", "_log")):
            continue
        if node.func.attr in ("warning", "error", "exception") and (text := literal(node.args[0])):
            yield Message(name, text, "warning" if node.func.attr == "warning" else "error")


def literal(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return tidy(re.sub(r"%[-\d.]*[a-z]", "…", node.value))
    return ""
