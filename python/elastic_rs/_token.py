"""``elastic-rs token``: makes tokens, derives them, and shows their ids."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from elastic_rs import _elastic_rs
from elastic_rs._exit_codes import Token
from elastic_rs._terminal import error_line
from elastic_rs.rendezvous._protection import TOKEN_FILE

DESCRIPTION = f"""\
Tokens protect the sessions of a job: nodes and coordinator prove to each other that they hold the same one, and speak
TLS. Every node finds it in the file that {TOKEN_FILE} names. A token is 32 to 512 hexadecimal digits on a line of its
own. A file with two lines shows the first and accepts both: so a token is replaced while jobs run. Nobody but the owner
and the group may have access to the file."""


def add_parser(commands: Any) -> None:
    kinds = commands.add_parser("token", help="tokens that protect a job", description=DESCRIPTION).add_subparsers(
        title="commands", metavar="COMMAND", required=True
    )
    new = kinds.add_parser("new", help="make a new token", description="Make a new token of 256 bits.")
    _to(new)
    new.set_defaults(run=lambda args: _write(args, _elastic_rs.new_token))
    run = kinds.add_parser(
        "run",
        help="derive a run's token from a master token",
        description="Derive a run's token from the one of `elastic-rs store serve --master-token-file`.",
    )
    run.add_argument("run_id", metavar="RUN_ID", help="the job's --rdzv-id")
    _of(run)
    _to(run)
    run.set_defaults(run=lambda args: _write(args, lambda: _elastic_rs.derived_token(_first(args), run_id=args.run_id)))
    observer = kinds.add_parser(
        "observer",
        help="derive the token of observers",
        description="Derive a token with which nobody can join a job, or change it.",
    )
    _of(observer)
    _to(observer)
    observer.set_defaults(run=lambda args: _write(args, lambda: _elastic_rs.derived_token(_first(args), observer=True)))
    ids = kinds.add_parser("id", help="show the ids of a file's tokens, which logs show too")
    _of(ids)
    ids.set_defaults(run=_ids)


def _of(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--of",
        metavar="FILE",
        default=os.environ.get(TOKEN_FILE),
        help=f"the file with the token (default: {TOKEN_FILE})",
    )


def _to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="a new file, which only its owner may read (default: stdout)"
    )


def _ids(args: argparse.Namespace) -> int:
    try:
        print(_held(args).key_ids)
    except ValueError as error:
        return _said(error, Token.NOT_VALID)
    return Token.WRITTEN


def _held(args: argparse.Namespace) -> _elastic_rs.Protection:
    if not args.of:
        raise ValueError(f"no token file is given: name one by --of=FILE or in {TOKEN_FILE}")
    return _elastic_rs.Protection.by_file(args.of)


def _first(args: argparse.Namespace) -> str:
    return _held(args).reveal() or ""  # a file has one


def _write(args: argparse.Namespace, make: Any) -> int:
    try:
        token = make()
        if args.output is None:
            print(token)
            return Token.WRITTEN
        descriptor = os.open(args.output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(f"{token}\n")
        except OSError:
            Path(args.output).unlink()
            raise
    except FileExistsError:
        return _said(f"`{args.output}` exists: tokens are never overwritten", Token.CANNOT_WRITE)
    except OSError as error:
        return _said(f"cannot write `{args.output}`: {error.strerror}", Token.CANNOT_WRITE)
    except ValueError as error:
        return _said(error, Token.NOT_VALID)
    ids = _elastic_rs.Protection.by_file(Path(args.output)).key_ids
    print(f"elastic-rs: wrote the token with the id {ids} to {args.output}", file=sys.stderr)
    return Token.WRITTEN


def _said(what: object, code: int) -> int:
    print(error_line("elastic-rs", str(what)), file=sys.stderr)
    return code
