"""Resolve how the ranks of a step share its model, from the model or from the `parallel` argument.

SingleProcessStrategy   one process, nothing to exchange
DDPStrategy             every rank has the whole model (ddp.py)
FSDPStrategy            every rank has a shard of each parameter (fsdp.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from samplewise.core.losses import LossFn
from samplewise.core.state import Buffers
from samplewise.errors import DistributedError
from samplewise.parallel.ddp import DDPStrategy
from samplewise.parallel.fsdp import FSDPConfig, FSDPStrategy, fsdp, shard
from samplewise.parallel.group import current_group
from samplewise.parallel.launch import join
from samplewise.parallel.sharded_parameters import is_sharded
from samplewise.parallel.strategy_base import ParallelStrategy, SumFunction

Parallel = Literal["ddp", "fsdp"] | FSDPConfig | None  # the `parallel` argument of Step


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


def join_ranks(model: nn.Module, parallel: Parallel) -> None:
    """Check the `parallel` argument of a step. If it is given, join the process group of torchrun."""
    if not (parallel in (None, "ddp", "fsdp") or isinstance(parallel, FSDPConfig)):
        raise ValueError(f"parallel must be None, 'ddp', 'fsdp' or sw.parallel.fsdp(policy); found {parallel!r}.")
    if parallel is not None and not dist.is_initialized():
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        join("auto" if device.type == "cpu" else device)  # a model on the CPU may be moved to an accelerator later


def strategy_name(model: nn.Module, parallel: Parallel) -> str:
    """Name of the strategy, for comparison between ranks."""
    if is_sharded(model):
        return "sharded"
    if isinstance(model, DistributedDataParallel):
        return "DistributedDataParallel"
    return "fsdp" if isinstance(parallel, FSDPConfig) else str(parallel)


def resolve_strategy(
    model: nn.Module,
    parallel: Parallel,
    modules: Sequence[nn.Module],
    optimizer: Any,
    before_sums: Callable[[], None],
) -> ParallelStrategy:
    """Strategy object for this model. "fsdp" shards the model and replaces the optimizer's parameters by shards.
    `before_sums`: called before gradients of other ranks are added to `.grad`.
    """
    name = strategy_name(model, parallel)
    if (name, parallel) == ("sharded", "ddp") or (name == "DistributedDataParallel" and parallel not in (None, "ddp")):
        found = "a model that fully_shard has sharded" if name == "sharded" else "a DistributedDataParallel"
        raise DistributedError(
            f"parallel must be None for a model that is already distributed; found parallel={parallel!r} and {found}. "
            "Leave out `parallel`, or pass the plain model."
        )
    if is_sharded(model):
        return FSDPStrategy(model, modules, before_sums)
    group = current_group()
    if not group.distributed:
        return SingleProcessStrategy()
    wrapped = model if isinstance(model, DistributedDataParallel) else None
    if wrapped is None and parallel is None:
        raise DistributedError(
            f"ranks that train together must share a model; found {group.size} ranks and parallel=None. "
            "Use Step(..., parallel='ddp'), or pass a DistributedDataParallel."
        )
    if wrapped is not None or parallel == "ddp":
        return DDPStrategy(wrapped, modules)
    shard(model, modules, (parallel if isinstance(parallel, FSDPConfig) else fsdp()).policy, optimizer)
    return FSDPStrategy(model, modules, before_sums)
