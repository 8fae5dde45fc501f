"""The model of benches/in_place_worker.py. A template that imports this module has made it before workers need it."""

import torch
from torch import nn

WIDTH = 2500  # four layers of it are 25 million parameters, 100 MB


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


MODEL = make()
