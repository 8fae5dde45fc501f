"""Asks a cloud's metadata server whether this machine is about to be taken away: ``--preempt-notice=aws|gcp|azure``.

The agent runs this program, which ends once there is a notice, and has written how many seconds are left. Until then it
asks again, whatever the server answers. It uses no proxy and follows no redirection: the server is the machine's own.

Facts: EC2's ``spot/instance-action`` with a token (IMDSv2), Google's ``instance/preempted`` with ``wait_for_change``,
Azure's ``scheduledevents`` of version 2020-07-01.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

ASK_EVERY_S = 5.0
"""How often EC2's and Azure's servers are asked. EC2's documentation says 5 s."""
ANSWER_WITHIN_S = 5.0
CHANGE_WITHIN_S = 60
"""How long Google's server holds a request until something changes."""
MOST_BYTES = 65_536
GOOGLE_S = 30.0
"""How much time Google leaves, which its server does not say."""
TOKEN_S = 21_600
AZURE_TYPES = ("Preempt", "Terminate", "Redeploy", "Reboot")
"""Events after which nothing of the machine's processes is left. ``Freeze`` is a pause."""


_JUNK = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)
"""What reading an answer of another shape raises."""


class NoAnswerError(Exception):
    """The server has not answered, or not as it should."""


class Server:
    """A metadata server.

    Args:
        address: ``http://HOST:PORT``, or ``HOST`` as Google's variable has it.
    """

    def __init__(self, address: str) -> None:
        try:
            parts = urllib.parse.urlsplit(address if "//" in address else f"//{address}")
            host, port = parts.hostname if parts.scheme in {"", "http"} else None, parts.port or 80
        except ValueError:
            host, port = None, 0
        if host is None:
            sys.exit(f"the metadata server is `{address}`, must be http://HOST or http://HOST:PORT")
        self._host, self._port = host, port

    def ask(
        self, path: str, headers: Mapping[str, str], *, method: str = "GET", within_s: float = ANSWER_WITHIN_S
    ) -> tuple[int, str, Mapping[str, str]]:
        """Return status, text and headers (in small letters) of an answer.

        Raises:
            NoAnswerError: there is none.
        """
        connection = http.client.HTTPConnection(self._host, self._port, timeout=within_s)
        try:
            connection.request(method, path, headers=dict(headers))
            answer = connection.getresponse()
            text = answer.read(MOST_BYTES).decode(errors="replace").strip()
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswerError(
                f"{self._host}:{self._port} does not answer: {str(error) or type(error).__name__}"
            ) from None
        finally:
            connection.close()
        if answer.status >= 300 and answer.status not in {401, 404}:
            raise NoAnswerError(f"{self._host}:{self._port} answers {answer.status} {answer.reason} for {path}")
        return answer.status, text, {header.lower(): value for header, value in answer.headers.items()}


def _left_until(at: datetime) -> float:
    return max(0.0, (at - datetime.now(UTC)).total_seconds())


def _junk(path: str, text: str) -> NoAnswerError:
    return NoAnswerError(f"the answer for {path} is `{text[:100]}`, which is none")


def aws() -> Iterator[float | None]:
    """Give how many seconds EC2 leaves, or None, at each look."""
    server = Server(os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or "http://169.254.169.254")
    path, token = "/latest/meta-data/spot/instance-action", ""
    while True:
        if not token:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
            status, token, _ = server.ask("/latest/api/token", ttl, method="PUT")
            if status != 200 or not (token.isascii() and token.isprintable()):
                token, text = "", token
                raise _junk("/latest/api/token", text)
        status, text, _ = server.ask(path, {"X-aws-ec2-metadata-token": token})
        if status == 401:
            token = ""
            continue
        if status == 404:
            yield None
            continue
        try:
            at = datetime.fromisoformat(json.loads(text)["time"])
            left = _left_until(at)
        except _JUNK:
            raise _junk(path, text) from None
        yield left


def gcp() -> Iterator[float | None]:
    """Give how many seconds Google leaves, or None, at each look. It lasts until something changes."""
    server = Server(os.environ.get("GCE_METADATA_HOST") or "metadata.google.internal")
    path, waits, within_s = "/computeMetadata/v1/instance/preempted", "", ANSWER_WITHIN_S
    while True:
        status, text, headers = server.ask(path + waits, {"Metadata-Flavor": "Google"}, within_s=within_s)
        if status != 200 or headers.get("metadata-flavor") != "Google" or text not in {"TRUE", "FALSE"}:
            raise _junk(path, text)
        etag = urllib.parse.quote(headers.get("etag", ""))
        waits = f"?wait_for_change=true&timeout_sec={CHANGE_WITHIN_S}&last_etag={etag}" if etag else ""
        within_s = CHANGE_WITHIN_S + ANSWER_WITHIN_S
        yield GOOGLE_S if text == "TRUE" else None


def azure() -> Iterator[float | None]:
    """Give how many seconds Azure leaves, or None, at each look."""
    server = Server(os.environ.get("ELASTIC_RS_AZURE_METADATA") or "http://169.254.169.254")
    of_us, name = "/metadata/instance/compute/name?api-version=2021-02-01&format=text", ""
    path, headers = "/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"}
    while True:
        if not name:
            status, text, _ = server.ask(of_us, headers)
            if status != 200 or not text:
                raise _junk(of_us, text)
            name = text
        _, text, _ = server.ask(path, headers)
        try:
            events = [
                event
                for event in json.loads(text)["Events"]
                if event["EventType"] in AZURE_TYPES and name in event["Resources"]
            ]
            # Empty: it has begun.
            left = [_left_until(parsedate_to_datetime(at)) if (at := event["NotBefore"]) else 0.0 for event in events]
        except _JUNK:
            raise _junk(path, text) from None
        yield min(left, default=None)


PROVIDERS: dict[str, Callable[[], Iterator[float | None]]] = {"aws": aws, "gcp": gcp, "azure": azure}


def main(provider: str) -> int:
    """Wait for a notice, and write how many seconds are left.

    Args:
        provider: ``aws``, ``gcp`` or ``azure``.
    """
    said, looks = "", PROVIDERS[provider]()
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            began = time.monotonic()
            try:
                left = next(looks)
            except NoAnswerError as error:
                if str(error) != said:
                    said = str(error)
                    name = f"--preempt-notice={provider}"
                    sys.stderr.write(f"elastic_rs: {name} tells nothing, and is asked again: {said}\n")
                left, looks = None, PROVIDERS[provider]()
            else:
                said = ""
            if left is not None:
                sys.stdout.write(f"{left:.1f}\n")
                return 0
            # Google's server has waited already, unless it answers at once.
            time.sleep(max(0.0, began + ASK_EVERY_S - time.monotonic()))
    return 1
