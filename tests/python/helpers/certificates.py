"""The certificates of ``tests/data/tls``, for tests with real processes."""

from __future__ import annotations

import ssl
from pathlib import Path

DATA = Path(__file__).parents[2] / "data" / "tls"


def certificates(folder: Path, name: str, *authorities: str) -> dict[str, str]:
    """Write a node's files into a new folder, and return the variables that name them. The key is its owner's alone."""
    folder.mkdir()
    texts = {
        "CERT": (DATA / f"{name}.pem").read_text(),
        "KEY": (DATA / f"{name}.key").read_text(),
        "CA": "".join((DATA / f"{authority}.pem").read_text() for authority in authorities or ("ca",)),
    }
    variables = {}
    for what, text in texts.items():
        path = folder / what.lower()
        path.touch(mode=0o600)
        path.write_text(text)
        variables[f"ELASTIC_RS_TLS_{what}"] = str(path)
    return variables


def end(authority: Path) -> None:
    """Let the certificate of an authority be that of January 2020. Its own signature is looked at by nobody."""
    content = ssl.PEM_cert_to_DER_cert(authority.read_text())
    valid = content.index(b"\x18\x0f2") - 15  # before the first time with a year of four digits is another one
    times = b"\x17\r200101000000Z\x18\x0f20200201000000Z"
    authority.write_text(ssl.DER_cert_to_PEM_cert(content[:valid] + times + content[valid + len(times) :]))
