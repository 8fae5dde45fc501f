"""Flags of ``horovodrun``, ``mpirun``, ``deepspeed`` and ``accelerate``, and what to use here instead.

They are looked up before any flag is taken for an abbreviation, or for a short flag with its value: ``-hostfile`` would
be ``-h`` with an argument.
"""

from __future__ import annotations

_TOTAL = (
    "it is the number of all workers. Here hosts say it, `-H HOST:SLOTS,...`, or `--nproc-per-node` on one node; "
    "`--min-np` and `--max-np` are the bounds if hosts change"
)
_WORKERS = "use `--nproc-per-node` for the workers of a node"
_TUNING = (
    "it tunes Horovod's own collectives, so leave it out. DistributedDataParallel has `bucket_cap_mb`, and NCCL its "
    "variables"
)
_STALLS = "leave it out: a worker that is lost or hangs is found without it"
_TIMELINE = "use `torch.profiler`"
_MPI = "leave it out: there is no MPI here"
_INTERFACE = "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, which workers inherit; `--local-addr` is for agents"
_LOG = "set ELASTIC_RS_LOG=info (or debug)"
_OUTPUT = "use `--log-dir=FOLDER --redirects=3`, or `--tee=3`"
_ENVIRONMENT = "leave it out: workers inherit all variables"
_LOCAL_RANK = "leave it out: LOCAL_RANK is always in the environment"

_INSTEAD: dict[str, str] = {
    # horovodrun
    **dict.fromkeys(("-np", "--num-proc", "-n"), _TOTAL),
    "--min-num-proc": "use `--min-np`",
    "--max-num-proc": "use `--max-np`",
    "--slots": "use `--slots-per-host`",
    **dict.fromkeys(("--network-interface", "--network-interfaces", "--nics"), _INTERFACE),
    **dict.fromkeys(("-p", "--ssh-port"), 'use `--ssh="ssh -p PORT"`'),
    **dict.fromkeys(("-i", "--ssh-identity-file"), 'use `--ssh="ssh -i FILE"`'),
    "--output-filename": _OUTPUT,
    **dict.fromkeys(("--verbose", "-v", "--log-level"), _LOG),
    **dict.fromkeys(
        ("--log-hide-timestamp", "--no-log-hide-timestamp", "--log-with-timestamp", "--log-without-timestamp"), _LOG
    ),
    **dict.fromkeys(
        ("--prefix-output-with-timestamp", "-prefix-timestamp"), "use `--log-line-prefix-template`, which has no times"
    ),
    **dict.fromkeys(
        (
            *("--mpi-args", "--mpi", "--mpi-threads-disable", "--no-mpi-threads-disable"),
            *("--js", "--jsrun", "--tcp", "--binding-args"),
        ),
        _MPI,
    ),
    "--gloo": "leave it out: `elastic.run(backend=...)` or `init_process_group` chooses",
    "--gloo-timeout-seconds": "use `elastic.run(timeout=...)`",
    "-hostfile": "use `--hostfile`",
    "--config-file": "each flag has a variable, `PET_` and its name",
    **dict.fromkeys(("--check-build", "-cb"), "use `elastic-run doctor`"),
    "--blacklist-cooldown": "use `--blacklist-cooldown-range LOW HIGH`",
    **dict.fromkeys(
        (
            *("--fusion-threshold-mb", "--cycle-time-ms", "--cache-capacity", "--disable-cache"),
            *("--hierarchical-allreduce", "--no-hierarchical-allreduce"),
            *("--hierarchical-allgather", "--no-hierarchical-allgather"),
            *("--torus-allreduce", "--no-torus-allreduce"),
            *("--tune", "--autotune", "--no-autotune", "--autotune-log-file", "--autotune-warmup-samples"),
            *("--autotune-steps-per-sample", "--autotune-bayes-opt-max-samples", "--autotune-gaussian-process-noise"),
            *("--num-nccl-streams", "--thread-affinity"),
        ),
        _TUNING,
    ),
    **dict.fromkeys(
        (
            *("--no-stall-check", "--stall-check", "--stall-check-warning-time-seconds"),
            "--stall-check-shutdown-time-seconds",
        ),
        _STALLS,
    ),
    **dict.fromkeys(("--timeline-filename", "--timeline-mark-cycles", "--no-timeline-mark-cycles"), _TIMELINE),
    # mpirun
    **dict.fromkeys(("-host", "--host"), "use `-H HOST:SLOTS,...`"),
    "-x": _ENVIRONMENT,
    **dict.fromkeys(("-npernode", "--npernode", "-N", "-ppn"), _WORKERS),
    **dict.fromkeys(("-machinefile", "--machinefile"), "use `--hostfile`"),
    **dict.fromkeys(
        (
            *("-mca", "--mca", "-bind-to", "--bind-to", "-map-by", "--map-by", "--allow-run-as-root"),
            *("--oversubscribe", "-oversubscribe", "--tag-output", "-tag-output"),
        ),
        _MPI,
    ),
    # deepspeed, accelerate, torch.distributed.launch
    **dict.fromkeys(("--gpus", "--num-gpus", "--gpus-per-node", "--nprocs"), _WORKERS),
    "--num-processes": f"{_WORKERS}: accelerate's number is that of all nodes together",
    **dict.fromkeys(("--num-nodes", "--num-machines"), "use `--nnodes`"),
    "--machine-rank": "use `--node-rank`",
    "--main-process-ip": "use `--master-addr`",
    "--main-process-port": "use `--master-port`",
    "--world-size": _TOTAL,
    **dict.fromkeys(("--include", "--exclude"), "use `-H HOST:SLOTS,...`"),
    "--launcher": "leave it out: `elastic-run` starts agents by ssh, or on each node a scheduler does",
    "--gpu-ids": "set CUDA_VISIBLE_DEVICES",
    "--num-cpu-threads-per-process": "use `--omp-threads`",
    **dict.fromkeys(("--use-env", "--no-use-env"), _LOCAL_RANK),
    **dict.fromkeys(
        ("--multi-gpu", "--mixed-precision", "--dynamo-backend", "--cpu", "--deepspeed-config"),
        "leave it out: that is the script's affair",
    ),
}
"""By flag, with `-` for `_`: what to do here, as the end of a sentence."""


def instead_of(flag: str) -> str | None:
    """Return what to use instead of another launcher's flag, given without its value. None: it is not known."""
    return _INSTEAD.get(flag.replace("_", "-"))
