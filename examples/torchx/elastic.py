"""A component of TorchX that starts elastic-run on each replica, where ``dist.ddp`` starts torchrun.

    torchx run --scheduler local_cwd examples/torchx/elastic.py:ddp -j 1:2x2 --script train.py -- --lr 0.1
    torchx run --scheduler kubernetes -cfg queue=default examples/torchx/elastic.py:ddp -j 3:4x8 --gpu 8 \\
        --script train.py

A replica that is lost is replaced alone, where the scheduler can do that, and joins the job that has gone on meanwhile.
docs/clusters.md says which schedulers can, and what to change in the script that TorchX makes for Slurm.
"""

import shlex
from pathlib import Path

import torchx
from torchx import specs
from torchx.components.dist import parse_nnodes
from torchx.specs import macros
from torchx.util.types import to_dict


def ddp(
    *script_args: str,
    script: str,
    j: str = "1x2",
    image: str = torchx.IMAGE,
    name: str = "elastic",
    h: str = "",
    cpu: int = 2,
    gpu: int = 0,
    memory_mb: int = 1024,
    max_restarts: int = 3,
    rdzv_port: int = 29400,
    rdzv_conf: str = "",
    log_dir: str = "elastic-logs",
    max_retries: int = 10,
    env: str = "",
    mounts: str = "",
) -> specs.AppDef:
    """Train on one agent per replica.

    Args:
        script_args: arguments of the script
        script: the training script
        j: [MIN:]NODESxWORKERS; with a minimum, the job trains with fewer nodes than it has asked for
        image: image of the replicas, with elastic_rs in it
        name: name of the job
        h: a named resource, instead of cpu, gpu and memory_mb
        cpu: CPUs of a replica
        gpu: GPUs of a replica
        memory_mb: memory of a replica
        max_restarts: restarts after failures of workers, of the whole job
        rdzv_port: port of the first replica at which the agents meet
        rdzv_conf: settings of the rendezvous, KEY=VALUE,...
        log_dir: folder of logs and events on each replica; elastic-rs why --events reads them
        max_retries: how often the scheduler replaces replicas that were lost
        env: variables of the workers, KEY=VALUE,...
        mounts: mounts, as those of dist.ddp
    """
    least, most, workers, nnodes = parse_nnodes(j)
    command = [
        "exec",
        "elastic-run",
        f"--nnodes={nnodes}",
        f"--nproc-per-node={workers}",
        f"--max-restarts={max_restarts}",
        "--rdzv-backend=c10d",
        f"--rdzv-id={macros.app_id}",
        "--tee=3",
        f"--log-dir={log_dir}",
        *([f"--rdzv-conf={rdzv_conf}"] if rdzv_conf else []),
        script,
        *script_args,
    ]
    # The shell on the replica expands it: the scheduler has set a variable to the first replica's address. `$$` is the
    # `$` of TorchX's templates. With AWS Batch, the first replica itself has no such variable.
    endpoint = f'--rdzv-endpoint="$${{{macros.rank0_env}:-localhost}}:{rdzv_port}"'
    role = specs.Role(
        name=Path(script).stem,
        image=image,
        entrypoint="bash",
        args=["-c", f"{shlex.join(command[:6])} {endpoint} {shlex.join(command[6:])}"],
        num_replicas=most,
        min_replicas=least,
        max_retries=max_retries,
        retry_policy=specs.RetryPolicy.REPLICA,
        resource=specs.resource(cpu=cpu, gpu=gpu, memMB=memory_mb, h=h or None),
        env=to_dict(env),
        port_map={"rdzv": rdzv_port},
        mounts=specs.parse_mounts(mounts.split(",")) if mounts else [],
    )
    return specs.AppDef(name=name, roles=[role])
