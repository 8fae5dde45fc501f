"""What only PyTorch can do is left to its own launcher, with our rendezvous and our agent in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic_rs._run_flags import UsageError
from elastic_rs._run_options import is_alone, nodes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["hand_over"]


def hand_over(argv: Sequence[str], why: str) -> None:
    """Run torchrun's own code with this command line. Raises and exits as that does.

    Raises:
        UsageError: there is no torch.
    """
    try:
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing.errors import record
    except ImportError as error:
        raise UsageError(f"{why} needs PyTorch, which cannot be imported: {error}") from None
    parse_args: Any = run.parse_args  # untyped
    args = parse_args(argv)
    if is_alone(args, nodes_of(args.nnodes)):
        import uuid

        args.standalone = False
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = "rust-c10d", "localhost:0", str(uuid.uuid4())
    elif args.rdzv_backend == "c10d":
        args.rdzv_backend = "rust-c10d"
    elif args.rdzv_backend == "static":
        from elastic_rs import install

        install(store=False, rendezvous=False, agent=True)
    record(run.run)(args)
