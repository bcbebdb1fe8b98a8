"""Sharding with `fully_shard` (FSDP2): each rank keeps a shard of every parameter and of the optimizer's state.

Whole parameters are all-gathered once per update, after it, and stay until the next update: forward and backward passes
then need no collectives, so that ranks may have different numbers of microbatches. The gradients of a window are
accumulated in the whole parameters, the leaves of the graph, and reduce-scattered once per window.

`model.parameters()` are shards, `DTensor`s that do not occur in the graph. `torch.distributed.fsdp` takes half as long
to import as torch, so it is used only if the program has imported it or asks for sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.core.losses import LossFn
from samplewise.core.snapshot import Buffers
from samplewise.distributed import collectives
from samplewise.distributed.ddp import make_equal, reached, refuse_collectives
from samplewise.distributed.group import current_group
from samplewise.distributed.sharded_parameters import (
    local_gradient,
    parameter_groups,
    sharded_modules,
    sharded_parameters,
)
from samplewise.distributed.strategy_base import ParallelStrategy, SumFunction
from samplewise.errors import DistributedError, ParameterError

Policy = Callable[[nn.Module], bool] | Iterable[type[nn.Module]] | None


@dataclass(frozen=True)
class FSDPConfig:
    """Value of `strategy` for FSDP."""

    policy: Policy  # which modules become separate FSDP groups


def fsdp(policy: Policy = None) -> FSDPConfig:
    """FSDP strategy, for `Step(strategy=...)`: every rank keeps a shard of each parameter.

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

    current_group().barrier()
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
        found = [m for m in inner if id(m) in chosen]
    elif callable(policy):
        found = [m for m in inner if policy(m)]
    else:
        found = [m for m in inner if isinstance(m, tuple(policy))]
    return found[::-1]  # fully_shard needs inner modules before outer ones


class FSDPStrategy(ParallelStrategy):
    """Strategy in which every rank has a shard of each parameter."""

    sharded = True

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module]):
        self.model = model
        self.modules = modules
        self._groups = list(parameter_groups(model))
        self._states: list[Any] = [module._get_fsdp_state() for module in sharded_modules(model)]
        self._parameters = sharded_parameters(model)
        refuse_collectives(modules)
        self._refuse_options()
        current_group().barrier()
        root: Any = model
        root.set_requires_gradient_sync(False)
        root.set_reshard_after_forward(False)
        root.set_reshard_after_backward(False)
        self.gather_parameters()

    def _refuse_options(self) -> None:
        known = {id(each.shard) for each in self._parameters} | {id(each.whole) for each in self._parameters}
        whole = [name for m in self.modules for name, p in m.named_parameters() if id(p) not in known]
        odd = [each.name for each in self._parameters if each.manager.fsdp_placement.dim != 0]
        policies = [group.mp_policy for group in self._groups]
        if whole:
            found = f"that {whole[0]!r} is not sharded. Call fully_shard on the model itself, too"
        elif odd:
            found = f"{odd[0]!r} sharded along another dimension. Leave out shard_placement_fn"
        elif any(policy.param_dtype or policy.reduce_dtype or policy.output_dtype for policy in policies):
            found = "a MixedPrecisionPolicy. Use precision= of the step"
        elif any(group.mesh_info.mesh.size() != current_group().size for group in self._groups):
            found = "a mesh without some of the ranks. Use a one-dimensional mesh of all ranks"
        elif any(group.offload_policy.__class__.__name__ != "OffloadPolicy" for group in self._groups):
            found = "an offload policy. Leave it out"
        else:
            return
        raise DistributedError(
            "every parameter must be sharded along its first dimension, in its own dtype, over all ranks; found "
            f"{found}."
        )

    @property
    def leaves(self) -> dict[int, tuple[str, Tensor]]:
        """id of a shard -> name of the parameter, and the whole parameter that graphs contain."""
        return {id(each.shard): (each.name, each.whole) for each in self._parameters if each.whole is not None}

    def optimizer_parameters(self, parameters: Iterable[Tensor]) -> Iterable[Tensor]:
        shards = {id(each.whole): each.shard for each in self._parameters}
        return dict.fromkeys(shards.get(id(p), p) for p in parameters)

    # --- whole parameters ------------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Unshard the parameters before a window, if other code such as state_dict() has resharded them."""
        if not all(group.is_unsharded for group in self._groups):
            self._unshard()

    def gather_parameters(self) -> None:
        """All-gather the parameters after the shards have changed."""
        for group in self._groups:
            group.reshard()
        self._unshard()

    def _unshard(self) -> None:
        for group in self._groups if current_group().distributed else ():
            collectives.note("all_gather", sum(p._sharded_param_data.nbytes for p in group.fsdp_params))
        with collectives.explained("all_gather"):
            for module in sharded_modules(self.model):
                module.unshard()

    def wrap_loss_fn(self, loss_fn: LossFn) -> LossFn:
        """Loss function whose forward passes neither gather nor reshard parameters. It sets the FSDP state of a
        recomputed forward pass in activation checkpointing.
        """
        from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

        def losses(model: nn.Module, batch: Any) -> Any:
            for state in self._states:
                state._training_state = TrainingState.PRE_BACKWARD
            try:
                return loss_fn(model, batch)
            finally:
                for state in self._states:
                    state._training_state = TrainingState.IDLE

        return losses

    # --- the end of a window ---------------------------------------------------------------------------------------

    def reduce_gradients(self, named: Mapping[str, Tensor], owned: Mapping[str, Tensor], buffers: Buffers) -> None:
        """Reduce-scatter the gradients: `.grad` of each shard becomes its part of the sum over all ranks. Buffers are
        broadcast from rank 0.
        """
        kinds, changed = reached(list(named.values()), buffers.moving())
        wanted = [name for name, kind in zip(named, kinds, strict=True) if kind]
        managers = {each.name: each.manager for each in self._parameters}
        sums = [_whole_gradient(named[name]) for name in wanted]
        for name, part in zip(wanted, current_group().reduce_scatter_rows(sums), strict=True):
            owned[name].grad = managers[name].to_sharded_dtensor(part)
        for p in named.values():
            p.grad = None
        current_group().broadcast_bucketed_(changed)

    def transform_sum(self, transform: SumFunction, gradients: list[Tensor], owned: Iterable[Tensor]) -> None:
        """Apply an additive transform of the sum: draw it for the whole parameter and add this rank's rows."""
        if not transform.additive:
            raise DistributedError(
                "a transform of the sum must be additive, independent of the sum, if gradients are sharded; found "
                f"{transform}. Use strategy='ddp'."
            )
        for p in owned:
            if p.grad is not None:
                drawn = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
                transform.act([drawn])
                local_gradient(p).add_(drawn[current_group().own_rows(len(drawn))])


def _whole_gradient(p: Tensor) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
