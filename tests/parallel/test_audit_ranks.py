"""`sw.audit` on two ranks: weights of both together, in every way of averaging gradients."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import samplewise as sw


def train(how, same_samples=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    x, y = torch.randn(24, 6), torch.randint(0, 5, (24,))
    rank = 0 if same_samples else dist.get_rank()
    x, y = x[rank::2], y[rank::2]
    wrapped = fully_shard(model) if how == "fully_shard" else DistributedDataParallel(model)
    audited = {"DDP": wrapped, "module of DDP": model, "all models": None, "fully_shard": wrapped}[how]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with sw.audit(audited, per="sample") as audit:
        for k in range(0, 12, 6):
            for first in (k, k + 3):
                is_last = first > k
                wait = contextlib.nullcontext() if is_last or how == "fully_shard" else wrapped.no_sync()
                if how == "fully_shard":
                    wrapped.set_requires_gradient_sync(is_last)
                with wait:
                    rows = slice(first, first + 3)
                    (F.cross_entropy(wrapped(x[rows]), y[rows]) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    weights = [row["weight"] for row in audit.updates]
    return audit.ok, audit.sums, len(weights), max(weights), [f.code for f in audit.findings], str(audit)


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("how", ["DDP", "module of DDP", "all models", "fully_shard"])
def test_weights_of_all_ranks(two, how):
    for ok, sums, rows, largest, _, text in two.run(train, how):
        assert ok, text
        assert sums == pytest.approx([1, 1], abs=1e-6)
        assert rows == 24 and largest == pytest.approx(1 / 12, rel=1e-5)


def test_the_same_samples_on_both_ranks(two):
    for ok, _, _, _, codes, _ in two.run(train, "DDP", True):
        assert not ok and codes == ["samples-on-several-ranks"]
