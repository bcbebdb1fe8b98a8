"""Sharding with `fully_shard` (FSDP2): each rank keeps a shard of every parameter and of the optimizer's state.

Parameters are gathered and released module by module, in every forward and backward pass, and gradients are summed over
ranks when a backward pass has left a module. Each of these collectives is requested (`shard_group`, `requests`), so
that ranks may have different numbers of microbatches.

`model.parameters()` are shards, `DTensor`s that do not occur in the graph. `torch.distributed.fsdp` takes half as long
to import as torch, so it is used only if the program has imported it or asks for sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.core.state import Buffers
from samplewise.errors import DistributedError, ParameterError
from samplewise.parallel import collectives
from samplewise.parallel.ddp import make_equal, reached, refuse_collectives
from samplewise.parallel.mode import SumFunction
from samplewise.parallel.ranks import Ranks
from samplewise.parallel.requests import PASS
from samplewise.parallel.shard_group import ShardGroup, summing, watch_hooks
from samplewise.parallel.sharded_parameters import (
    local_gradient,
    parameter_groups,
    sharded_modules,
    sharded_parameters,
)

Policy = Callable[[nn.Module], bool] | Iterable[type[nn.Module]] | None


@dataclass(frozen=True)
class FSDPConfig:
    """Value of `Step(parallel=...)`, made by `sw.parallel.fsdp`."""

    policy: Policy  # which modules become separate FSDP groups


def fsdp(policy: Policy = None) -> FSDPConfig:
    """FSDP with a choice of modules, for `Step(parallel=...)`: every rank keeps a shard of each parameter.

    Parameters are gathered and released module by module in each pass, as torch's `fully_shard` does.

    policy: which modules, besides the model itself, are sharded and gathered as separate groups: classes of modules, or
    a function module -> bool. None: the entries of every nn.ModuleList, such as the blocks of a transformer.
    """
    return FSDPConfig(policy)


def shard(model: nn.Module, modules: Sequence[nn.Module], policy: Policy, optimizer: Any) -> None:
    """Shard a model over the ranks with the parameters of rank 0, and replace the optimizer's parameters by shards."""
    if getattr(optimizer, "state", None):
        raise ParameterError(
            "the optimizer must be new when its model is sharded; found one that already has a state. Create it right "
            "before the step."
        )
    from torch.distributed.fsdp import fully_shard

    collectives.barrier()
    make_equal(modules)
    before = dict(model.named_parameters())
    for module in _chosen(model, policy):
        fully_shard(module)
    fully_shard(model)
    after = {id(before[name]): p for name, p in model.named_parameters()}
    for group in getattr(optimizer, "param_groups", ()):
        group["params"] = [after.get(id(p), p) for p in group["params"]]


def _chosen(model: nn.Module, policy: Policy) -> list[nn.Module]:
    inner = [module for module in model.modules() if module is not model and any(True for _ in module.parameters())]
    if policy is None:
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
        chosen = {id(m) for each in lists for m in each}
        modules_to_shard = [m for m in inner if id(m) in chosen]
    elif callable(policy):
        modules_to_shard = [m for m in inner if policy(m)]
    else:
        modules_to_shard = [m for m in inner if isinstance(m, tuple(policy))]
    return modules_to_shard[::-1]  # fully_shard needs inner modules before outer ones


class FSDP(Ranks):
    """Mode in which every rank has a shard of each parameter."""

    sharded = True
    passes_alone = False

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[nn.Module],
        before_sums: Callable[[], None],
        empty_updates: bool = False,
    ):
        """before_sums: called before gradients of other ranks are added to `.grad`."""
        super().__init__(empty_updates)
        self.model = model
        self._before_sums = before_sums
        self.modules = modules
        self._parameters = sharded_parameters(model)
        groups = list(parameter_groups(model))
        refuse_collectives(modules)
        self._refuse_options(groups)
        collectives.barrier()
        root: Any = model
        root._get_fsdp_state()._lazy_init()
        watch_hooks([module._get_fsdp_state() for module in sharded_modules(model)])
        self._number = collectives.requests.add(self)
        self._groups = [ShardGroup.of(group) for group in groups]
        for group in self._groups:
            group.visit()
        self._parameters = sharded_parameters(model)  # now with whole parameters
        self._managers = {each.name: each.manager for each in self._parameters}
        self.copies = max((group.copies for group in self._groups), default=1)
        self._reached_before: set[str] = set()  # in the open window, before its state was loaded

    def _refuse_options(self, groups: Sequence[Any]) -> None:
        tensors = {id(entry.shard) for entry in self._parameters} | {id(entry.whole) for entry in self._parameters}
        whole = [name for m in self.modules for name, p in m.named_parameters() if id(p) not in tensors]
        parallel = [entry.name for entry in self._parameters if entry.manager.is_dtensor]
        wrapped = [entry.name for entry in self._parameters if _is_extended(entry.manager)]
        ranks = collectives.size()
        if whole:
            cause = f"that {whole[0]!r} is not sharded. Call fully_shard on the model itself, too"
        elif parallel:
            cause = f"tensor parallelism of {parallel[0]!r}. Leave out parallelize_module"
        elif wrapped:
            cause = f"{wrapped[0]!r} with its own all-gather. Use a parameter of an ordinary dtype"
        elif any(group.offload_policy.__class__.__name__ != "OffloadPolicy" for group in groups):
            cause = "an offload policy. Leave it out"
        elif any(not hasattr(g.mesh_info, "shard_mesh_size") or g.mesh_info.mesh.size() != ranks for g in groups):
            cause = "a mesh without some of the ranks. Use a mesh of all ranks"
        elif any(group._use_post_forward_mesh for group in groups):
            cause = "reshard_after_forward with a number of ranks. Use True or False"
        elif any(group._all_reduce_hook is not None for group in groups):
            cause = "an all-reduce hook. Use a two-dimensional mesh for hybrid sharding"
        else:
            return
        raise DistributedError(f"every parameter must be sharded by fully_shard alone, over all ranks; found {cause}.")

    @property
    def leaves(self) -> dict[int, tuple[str, Tensor]]:
        """id of a shard -> name of the parameter, and the whole parameter that graphs contain."""
        return {id(entry.shard): (entry.name, entry.whole) for entry in self._parameters if entry.whole is not None}

    def optimizer_parameters(self, parameters: Iterable[Tensor]) -> Iterable[Tensor]:
        shards = {id(each.whole): each.shard for each in self._parameters}
        return dict.fromkeys(shards.get(id(p), p) for p in parameters)

    def not_compiled(self, compile: bool | str) -> str | None:
        return super().not_compiled(compile) or "updates of sharded models are not compiled"

    def over_shards(self, numbers: Tensor) -> Tensor:
        return collectives.all_reduce_(numbers) / self.copies

    def any_shard(self, flag: bool) -> bool:
        return collectives.all_reduce_scalars(flag)[0] > 0

    def reshard(self) -> None:
        """Release the whole parameters: the optimizer has changed the shards, or a pass was interrupted."""
        for group in self._groups:
            group.reshard()

    def announce(self, error: Exception) -> None:
        """Make the model usable after an exception in a forward or backward pass, then send the error and raise it."""
        reset = getattr(self.model, "reset_iter_state", None)
        if reset is not None:
            reset()
        self.reshard()
        super().announce(error)

    def serve(self, kind: int) -> None:
        """Prepare `.grad` for gradients of another rank, which begins a pass."""
        self._before_sums()

    # --- gradients -------------------------------------------------------------------------------------------------

    @contextmanager
    def summing(self) -> Iterator[None]:
        """Context manager: the gradients of backward passes inside are summed over ranks. Begins when each rank begins
        such a pass or has finished its passes.
        """
        if self.size > 1:
            collectives.requests.ask(self._number, PASS)
        with summing(self._groups):
            yield

    def begin_window(self, reached: Iterable[str] = ()) -> None:
        self._reached_before = set(reached)
        for group in self._groups:
            group.reached.clear()

    def reached(self) -> list[str]:
        managers = {manager for group in self._groups for manager in group.reached}  # identities
        here = [entry.name for entry in self._parameters if id(entry.manager) in managers]
        return sorted({*here, *self._reached_before})

    def reduce_gradients(self, named: Mapping[str, Tensor], owned: Mapping[str, Tensor], buffers: Buffers) -> None:
        """Set `.grad` to None for parameters that no rank has reached; the others have their sums. Buffers are
        broadcast from rank 0.
        """
        here = self.reached()
        reached_flags, changed = reached([int(name in here) for name in named], buffers.moving())
        for p, is_reached in zip(owned.values(), reached_flags, strict=True):
            if not is_reached:
                p.grad = None
        collectives.broadcast_bucketed_(changed)

    def _transform(self, transform: SumFunction, gradients: list[Tensor], owned: Iterable[Tensor]) -> None:
        """Apply an additive transform of the sum: draw it for the whole parameter and add this rank's shard of it."""
        if not transform.additive:
            raise DistributedError(
                "a transform of the sum must be additive, independent of the sum, if gradients are sharded; found "
                f"{transform}. Use parallel='ddp'."
            )
        names = {id(entry.shard): entry.name for entry in self._parameters}
        for p in owned:
            if p.grad is not None:
                drawn = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
                transform.apply_([drawn])
                local_gradient(p).add_(self.own_part(names[id(p)], drawn))

    def own_part(self, name: str, whole: Tensor) -> Tensor:
        manager = self._managers[name]
        dim = manager.fsdp_placement.dim
        rows = manager.padded_sharded_param_size[dim]
        start = min(manager.mesh_info.shard_mesh_rank * rows, whole.shape[dim])
        return whole.narrow(dim, start, manager.sharded_size[dim])


def _is_extended(manager: Any) -> bool:
    return hasattr(manager._sharded_local_tensor, "fsdp_pre_all_gather")
