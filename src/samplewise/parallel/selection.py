"""Choice of the mode of a step, from its model and its `parallel` argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from samplewise.errors import DistributedError
from samplewise.parallel import collectives
from samplewise.parallel.ddp import DDP
from samplewise.parallel.fsdp import FSDP, FSDPConfig, fsdp, shard
from samplewise.parallel.launch import join
from samplewise.parallel.mode import Parallel
from samplewise.parallel.sharded_parameters import is_sharded
from samplewise.parallel.single import Single

ParallelArgument = Literal["ddp", "fsdp"] | FSDPConfig | None  # of Step


def join_ranks(model: nn.Module, parallel: ParallelArgument) -> None:
    """Check the `parallel` argument of a step. If it is given, join the process group of torchrun."""
    if not (parallel in (None, "ddp", "fsdp") or isinstance(parallel, FSDPConfig)):
        raise ValueError(f"parallel must be None, 'ddp', 'fsdp' or sw.parallel.fsdp(policy); found {parallel!r}.")
    if parallel is not None and not dist.is_initialized():
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        join("auto" if device.type == "cpu" else device)  # a model on the CPU may be moved to an accelerator later


def select_mode(
    model: nn.Module,
    parallel: ParallelArgument,
    modules: Sequence[nn.Module],
    optimizer: Any,
    settings: Mapping[str, Any],
    before_sums: Callable[[], None],
    empty_updates: bool,
) -> Parallel:
    """Mode of a step with this model. "fsdp" shards the model and replaces the optimizer's parameters by shards.
    Collective; raises if the ranks have different settings. `before_sums`, `empty_updates`: see `FSDP` and `Parallel`.
    """
    collectives.barrier()
    name = _name(model, parallel)
    settings = {**settings, "parallel": name}
    if not collectives.all_equal({name: repr(value) for name, value in settings.items()}):
        raise DistributedError(
            f"all ranks must create the same step; found other settings than on this rank, {settings}. Pass the same "
            "arguments to Step(...) on every rank."
        )
    if (name, parallel) == ("sharded", "ddp") or (name == "DistributedDataParallel" and parallel not in (None, "ddp")):
        found = "a model that fully_shard has sharded" if name == "sharded" else "a DistributedDataParallel"
        raise DistributedError(
            f"parallel must be None for a model that is already distributed; found parallel={parallel!r} and {found}. "
            "Leave out `parallel`, or pass the plain model."
        )
    if name == "sharded":
        return FSDP(model, modules, before_sums, empty_updates)
    ranks = collectives.size()
    if ranks == 1:
        return Single(empty_updates)
    wrapped = model if isinstance(model, DistributedDataParallel) else None
    if wrapped is None and parallel is None:
        raise DistributedError(
            f"ranks that train together must share a model; found {ranks} ranks and parallel=None. "
            "Use Step(..., parallel='ddp'), or pass a DistributedDataParallel."
        )
    if wrapped is not None or parallel == "ddp":
        return DDP(wrapped, modules, empty_updates)
    shard(model, modules, (parallel if isinstance(parallel, FSDPConfig) else fsdp()).policy, optimizer)
    return FSDP(model, modules, before_sums, empty_updates)


def _name(model: nn.Module, parallel: ParallelArgument) -> str:
    """Name of the mode, for comparison between ranks."""
    if is_sharded(model):
        return "sharded"
    if isinstance(model, DistributedDataParallel):
        return "DistributedDataParallel"
    return "fsdp" if isinstance(parallel, FSDPConfig) else str(parallel)
