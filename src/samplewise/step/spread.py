"""How several ranks share a model: recognised from the model, or made as a strategy says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from samplewise import ranks
from samplewise.engine.sharded import is_sharded
from samplewise.errors import DistributedError
from samplewise.step.replicas import Replicas
from samplewise.step.shards import Fsdp, Shards, fsdp, shard

Strategy = str | Fsdp | None
Spread = Replicas | Shards


def kind_of(model: nn.Module, strategy: Strategy) -> str:
    """How it is shared, in a word that is the same on all ranks."""
    if is_sharded(model) or isinstance(model, DistributedDataParallel):
        return "sharded" if is_sharded(model) else "DistributedDataParallel"
    return "fsdp" if isinstance(strategy, Fsdp) else str(strategy)


def spread(model: nn.Module, strategy: Strategy, modules: Sequence[nn.Module], optimizer: Any) -> Spread | None:
    """None where there is one process."""
    if not (strategy in (None, "ddp", "fsdp") or isinstance(strategy, Fsdp)):
        raise ValueError(f"strategy must be None, 'ddp', 'fsdp' or sw.fsdp(policy); found {strategy!r}.")
    if is_sharded(model):
        return Shards(model, modules)
    if not ranks.active():
        return None
    wrapped = model if isinstance(model, DistributedDataParallel) else None
    if wrapped is None and strategy is None:
        raise DistributedError(
            f"a model must be shared by the ranks that train it; found {ranks.size()} ranks, each with a model of its "
            "own. Use Step(..., strategy='ddp'), or hand over a DistributedDataParallel."
        )
    if wrapped is not None or strategy == "ddp":
        return Replicas(wrapped, modules)
    shard(model, modules, (strategy if isinstance(strategy, Fsdp) else fsdp()).policy, optimizer)
    return Shards(model, modules)
