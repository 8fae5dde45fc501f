"""What a checker of types has to find: each line with ``# wrong`` has an error, and no other line has."""

from __future__ import annotations

import elastic_rs
import elastic_rs.elastic as hvd
from elastic_rs import elastic
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs


@elastic.run
def train(state: elastic.TorchState, epochs: int) -> float:
    return float(state.epoch * epochs)


@elastic.run  # wrong
def no_state(epochs: int) -> None:
    print(epochs)


def uses(spec: WorkerSpec, backend: elastic_rs.C10dRendezvousBackend, store: elastic_rs.TCPStore) -> None:
    train(7, 3)  # wrong
    train(elastic.TorchState(), "3")  # wrong
    train()  # wrong
    print(hvd.elastic.no_such_name)  # wrong
    elastic_rs.step("7")  # wrong
    elastic_rs.LocalElasticAgent(spec, DefaultLogsSpecs(), start_method="thread")  # wrong
    elastic_rs.DynamicRendezvousHandler.from_backend("job", store, backend, 1, 2, store_peers="all")  # wrong
