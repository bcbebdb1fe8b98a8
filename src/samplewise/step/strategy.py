"""Resolve the distributed strategy of a step, from the model or from the `strategy` argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from samplewise.distributed.fsdp import is_sharded
from samplewise.distributed.group import current_group
from samplewise.errors import DistributedError
from samplewise.step.ddp import DDPStrategy
from samplewise.step.fsdp import Fsdp, FSDPStrategy, fsdp, shard

Strategy = str | Fsdp | None
Spread = DDPStrategy | FSDPStrategy


def kind_of(model: nn.Module, strategy: Strategy) -> str:
    """Name of the strategy, for comparison between ranks."""
    if is_sharded(model) or isinstance(model, DistributedDataParallel):
        return "sharded" if is_sharded(model) else "DistributedDataParallel"
    return "fsdp" if isinstance(strategy, Fsdp) else str(strategy)


def spread(model: nn.Module, strategy: Strategy, modules: Sequence[nn.Module], optimizer: Any) -> Spread | None:
    """Strategy object for this model; shards the model if needed. None for one process and an unsharded model."""
    if not (strategy in (None, "ddp", "fsdp") or isinstance(strategy, Fsdp)):
        raise ValueError(f"strategy must be None, 'ddp', 'fsdp' or sw.fsdp(policy); found {strategy!r}.")
    if is_sharded(model):
        return FSDPStrategy(model, modules)
    if not current_group().distributed:
        return None
    wrapped = model if isinstance(model, DistributedDataParallel) else None
    if wrapped is None and strategy is None:
        raise DistributedError(
            f"ranks that train together must share a model; found {current_group().size} ranks and no strategy. "
            "Use Step(..., strategy='ddp'), or pass a DistributedDataParallel."
        )
    if wrapped is not None or strategy == "ddp":
        return DDPStrategy(wrapped, modules)
    shard(model, modules, (strategy if isinstance(strategy, Fsdp) else fsdp()).policy, optimizer)
    return FSDPStrategy(model, modules)
