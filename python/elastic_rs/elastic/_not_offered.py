"""Names of Horovod's that this package does not have, each with what to use instead. Needs no torch."""

from __future__ import annotations

import sys
from types import FrameType

_BUILT = "torch.distributed.is_gloo_available(), is_nccl_available() and is_mpi_available() say what torch has"
_ASYNC = "torch.distributed.all_reduce(…, async_op=True) returns a handle with wait() and is_completed()"
_SETS = "use torch.distributed.new_group(ranks), inside the function that elastic.run calls"
_KERAS = "only PyTorch is supported"
_HANDLES = "use the handle that torch.distributed returns: handle.wait() and handle.is_completed()"
_PROFILER = "use torch.profiler"
_HANDLER = "derive from hvd.StateDictHandler, and use hvd.set_handler_registry"
_LISTENER = "use hvd.register_listener(obj)"

_INSTEAD: dict[str, str] = {
    "DistributedOptimizer": (
        "wrap `state.model` in DistributedDataParallel inside the function that elastic.run calls, and use the "
        "optimizer as it is"
    ),
    "Adasum": "use op=hvd.Average",
    "Compression": "leave it out, or register a hook of torch.distributed.algorithms.ddp_comm_hooks with the wrap",
    "SyncBatchNorm": "use torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)",
    "allgather": "use torch.distributed.all_gather",
    "allgather_object": "use torch.distributed.all_gather_object",
    "allgather_async": "use torch.distributed.all_gather(…, async_op=True)",
    "alltoall": "use torch.distributed.all_to_all_single",
    "alltoall_async": "use torch.distributed.all_to_all_single(…, async_op=True)",
    "barrier": "use torch.distributed.barrier()",
    "broadcast": "use torch.distributed.broadcast(tensor, src=root), which works in place",
    "broadcast_": "use torch.distributed.broadcast(tensor, src=root)",
    "broadcast_async": "use torch.distributed.broadcast(…, async_op=True)",
    "broadcast_async_": "use torch.distributed.broadcast(…, async_op=True)",
    "is_homogeneous": "compare hvd.size() with hvd.local_size() * hvd.cross_size()",
    "join": "use torch.distributed.algorithms.Join. With ElasticSampler all ranks have equally many batches",
    "reducescatter": "use torch.distributed.reduce_scatter_tensor",
    "reducescatter_async": "use torch.distributed.reduce_scatter_tensor(…, async_op=True)",
    "run_fn": "use elastic.run",
    "sparse_allreduce_async": "DistributedDataParallel averages sparse gradients",
    **dict.fromkeys(("allreduce_async", "allreduce_async_"), _ASYNC),
    **dict.fromkeys(
        ("grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_"),
        "call hvd.allreduce for each tensor: DistributedDataParallel groups gradients itself",
    ),
    **dict.fromkeys(
        ("grouped_allgather", "grouped_allgather_async"), "call torch.distributed.all_gather for each tensor"
    ),
    **dict.fromkeys(
        ("grouped_reducescatter", "grouped_reducescatter_async"),
        "call torch.distributed.reduce_scatter_tensor for each tensor",
    ),
    **dict.fromkeys(("ModelStateHandler", "OptimizerStateHandler", "SamplerStateHandler"), _HANDLER),
    **dict.fromkeys(("notification_manager", "WorkerNotificationManager"), _LISTENER),
    **dict.fromkeys(("poll", "synchronize"), _HANDLES),
    **dict.fromkeys(("ProcessSet", "add_process_set", "remove_process_set", "global_process_set"), _SETS),
    **dict.fromkeys(("start_timeline", "stop_timeline"), _PROFILER),
    **dict.fromkeys(
        (
            *("mpi_built", "mpi_enabled", "mpi_threads_supported", "gloo_built", "gloo_enabled", "nccl_built"),
            *("cuda_built", "rocm_built", "ccl_built", "ddl_built"),
        ),
        _BUILT,
    ),
    **dict.fromkeys(("KerasState", "TensorFlowState", "TensorFlowKerasState", "DistributedGradientTape"), _KERAS),
}


def refuse(name: str, importer: FrameType) -> None:
    """Raise if Horovod has this name and this package does not. The error says what to use.

    Raises:
        ImportError: ``from elastic_rs.elastic import NAME`` asks. Python replaces an ``AttributeError`` there by an
            error without the hint.
        AttributeError: anything else does.
    """
    hint = instead_of(name)
    if hint is None:
        return
    text = f"there is no {name}: {hint} (docs/horovod.md)"
    if importer.f_code.co_name == "_handle_fromlist":  # of importlib
        raise ImportError(text, name="elastic_rs.elastic")
    raise AttributeError(text, name=name, obj=sys.modules["elastic_rs.elastic"])


def instead_of(name: str) -> str | None:
    """Return what to use instead of a name of Horovod's, as the end of a sentence. None: it is not known."""
    return _INSTEAD.get(name)
