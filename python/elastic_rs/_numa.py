"""``--numa-binding``: the CPUs to which the workers of a node are bound."""

from __future__ import annotations

import functools
import logging
import os

from elastic_rs import _elastic_rs

logger = logging.getLogger("elastic_rs.agent")


@functools.cache
def cpus_of(binding: str, workers: int) -> list[list[int]]:
    """Return the CPUs of each worker by local rank, near its GPU; an empty list is a worker that is not bound.

    A worker's GPU is the one that PyTorch takes: that of its local rank, among those that ``CUDA_VISIBLE_DEVICES``
    leaves. Says once who is bound to what.

    Raises:
        ValueError: there is no such binding.
    """
    spread = "workers are spread over the NUMA nodes in order"
    try:
        gpus = _elastic_rs.gpu_addresses(os.environ.get("CUDA_VISIBLE_DEVICES"))
    except RuntimeError as error:
        gpus, why = [], str(error)
    else:
        why = "no GPU is visible here"
    cpus, notes, words = _elastic_rs.cpus_of_workers(binding, workers, gpus)
    for note in notes:
        logger.warning("--numa-binding=%s: %s", binding, note)
    if gpus:
        logger.info("--numa-binding=%s binds workers near their GPUs: %s", binding, words)
    else:
        logger.warning("--numa-binding=%s: %s, so %s: %s", binding, why, spread, words)
    return cpus
