"""Resolve the strategy of a step, from the model or from the `strategy` argument.

SingleProcessStrategy   one process, nothing to exchange
DDPStrategy             every rank has the whole model (ddp.py)
FSDPStrategy            every rank has a shard of each parameter (fsdp.py)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from samplewise.core.losses import LossFn
from samplewise.core.snapshot import Buffers
from samplewise.errors import DistributedError
from samplewise.parallel.ddp import DDPStrategy
from samplewise.parallel.fsdp import FSDPConfig, FSDPStrategy, fsdp, shard
from samplewise.parallel.group import current_group
from samplewise.parallel.sharded_parameters import is_sharded
from samplewise.parallel.strategy_base import ParallelStrategy, SumFunction

Strategy = str | FSDPConfig | None  # the `strategy` argument of Step


class SingleProcessStrategy(ParallelStrategy):
    """One process: no collectives."""

    sharded = False
    leaves: Mapping[int, tuple[str, Tensor]] = {}

    def optimizer_parameters(self, parameters: Iterable[Tensor]) -> Iterable[Tensor]:
        return parameters

    def wrap_loss_fn(self, loss_fn: LossFn) -> LossFn:
        return loss_fn

    def reduce_gradients(self, named: Mapping[str, Tensor], owned: Mapping[str, Tensor], buffers: Buffers) -> None:
        """Do nothing: `.grad` holds the sum."""

    def transform_sum(self, transform: SumFunction, gradients: list[Tensor], owned: Iterable[Tensor]) -> None:
        transform.act(gradients)


def strategy_name(model: nn.Module, strategy: Strategy) -> str:
    """Name of the strategy, for comparison between ranks."""
    if is_sharded(model):
        return "sharded"
    if isinstance(model, DistributedDataParallel):
        return "DistributedDataParallel"
    return "fsdp" if isinstance(strategy, FSDPConfig) else str(strategy)


def resolve_strategy(
    model: nn.Module, strategy: Strategy, modules: Sequence[nn.Module], optimizer: Any
) -> ParallelStrategy:
    """Strategy object for this model. "fsdp" shards the model and replaces the optimizer's parameters by shards."""
    if not (strategy in (None, "ddp", "fsdp") or isinstance(strategy, FSDPConfig)):
        raise ValueError(f"strategy must be None, 'ddp', 'fsdp' or sw.fsdp(policy); found {strategy!r}.")
    name = strategy_name(model, strategy)
    if (name, strategy) == ("sharded", "ddp") or (name == "DistributedDataParallel" and strategy not in (None, "ddp")):
        found = "a model that fully_shard has sharded" if name == "sharded" else "a DistributedDataParallel"
        raise DistributedError(
            f"strategy must be None for a model that is already distributed; found strategy={strategy!r} and {found}. "
            "Leave out the strategy, or pass the plain model."
        )
    if is_sharded(model):
        return FSDPStrategy(model, modules)
    group = current_group()
    if not group.distributed:
        return SingleProcessStrategy()
    wrapped = model if isinstance(model, DistributedDataParallel) else None
    if wrapped is None and strategy is None:
        raise DistributedError(
            f"ranks that train together must share a model; found {group.size} ranks and no strategy. "
            "Use Step(..., strategy='ddp'), or pass a DistributedDataParallel."
        )
    if wrapped is not None or strategy == "ddp":
        return DDPStrategy(wrapped, modules)
    shard(model, modules, (strategy if isinstance(strategy, FSDPConfig) else fsdp()).policy, optimizer)
    return FSDPStrategy(model, modules)
