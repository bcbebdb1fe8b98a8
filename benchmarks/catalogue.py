"""Workloads of the benchmark by name."""

import torch
from real_nets import REAL_NETS
from workloads import MEDIUM_NETS, Workload

WORKLOADS = MEDIUM_NETS | REAL_NETS


def build(name: str) -> Workload:
    torch.manual_seed(1)  # with 0, one ReLU of the MLP's half million flips between a batch and a loop of one
    return WORKLOADS[name]()
