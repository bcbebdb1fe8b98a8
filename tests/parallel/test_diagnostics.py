"""Diagnostics of several ranks are those of one process."""

import pytest
import torch
from torch import nn

import samplewise as sw

X = torch.randn(23, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(23) % 3


def noise(rank, size, transforms=()):
    torch.manual_seed(0)
    options = {} if size == 1 else {"parallel": "ddp"}
    step = sw.Step(
        nn.Linear(4, 3).double(), sw.sgd(0.1), nn.CrossEntropyLoss(), samples=8, transforms=transforms, **options
    )
    watched = sw.NoiseScale()
    watched.on_fit_start(step)
    for update in step.over([(X[rank::size], Y[rank::size])]):
        watched.on_update(update)
    return watched.value


def of_rank(transforms=()):
    import torch.distributed as dist

    found = noise(dist.get_rank(), dist.get_world_size(), transforms)
    return found.trace, found.signal


def clipped():
    return of_rank([sw.clip(1.0)])


def test_the_noise_scale_is_that_of_all_samples(two):
    alone = noise(0, 1)
    for found in two.run(of_rank):
        assert found == pytest.approx((alone.trace, alone.signal), rel=1e-9)


def test_clipped_updates_of_several_ranks(two):
    alone = noise(0, 1, [sw.clip(1.0)])
    for found in two.run(clipped):
        assert found == pytest.approx((alone.trace, alone.signal), rel=1e-9)
