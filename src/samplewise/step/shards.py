"""A model that `fully_shard` has spread over the ranks: each keeps a part of every parameter and its optimizer's state.

The whole parameters are gathered once per update, after it, and stay until the next one: forward and backward passes
then exchange nothing, so that ranks may have any number of pieces. A window's gradients are summed where the graph has
its leaves, in the whole parameters, and each rank gets the sum of its part, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samplewise import ranks
from samplewise.engine.sharded import parameter_groups, sharded_modules, sharded_parameters
from samplewise.errors import DistributedError, ParameterError
from samplewise.losses import LossFn
from samplewise.replay import Buffers
from samplewise.step.parameters import Trained
from samplewise.step.replicas import make_equal, reached, refuse_exchanges
from samplewise.transforms.transform import SumTransform

Policy = Callable[[nn.Module], bool] | Iterable[type[nn.Module]] | None


@dataclass(frozen=True)
class Fsdp:
    policy: Policy  # which modules are gathered by themselves


def fsdp(policy: Policy = None) -> Fsdp:
    """As `strategy`: every rank keeps a part of each parameter.

    policy: which modules are gathered by themselves, the model excepted: classes of modules, or a function of a module.
    None: those in lists of modules, as the blocks of a transformer are.
    """
    return Fsdp(policy)


def shard(model: nn.Module, modules: Sequence[nn.Module], policy: Policy, optimizer: Any) -> None:
    """Spreads a model over the ranks, as rank 0 has it, and hands the parts to the optimizer."""
    if getattr(optimizer, "state", None):
        raise ParameterError(
            "the optimizer must be new when its model is sharded; found one with a state. Make it just before the step."
        )
    from torch.distributed.fsdp import fully_shard

    ranks.together()
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
    return found[::-1]  # what is inside comes first


class Shards:
    """Every rank has a part of each parameter."""

    sharded = True

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module]):
        self.model, self.modules = model, modules
        self._groups = list(parameter_groups(model))
        self._states: list[Any] = [module._get_fsdp_state() for module in sharded_modules(model)]
        self._parameters = sharded_parameters(model)
        refuse_exchanges(modules)
        self._refuse_options()
        ranks.together()
        root: Any = model
        root.set_requires_gradient_sync(False)
        root.set_reshard_after_forward(False)
        root.set_reshard_after_backward(False)
        self.gather()

    def _refuse_options(self) -> None:
        known = {id(each.shard) for each in self._parameters} | {id(each.whole) for each in self._parameters}
        whole = [name for m in self.modules for name, p in m.named_parameters() if id(p) not in known]
        odd = [each.name for each in self._parameters if each.manager.fsdp_placement.dim != 0]
        policies = [group.mp_policy for group in self._groups]
        if whole:
            found = f"that {whole[0]!r} is whole. Call fully_shard on the model itself, too"
        elif odd:
            found = f"{odd[0]!r} cut along another one. Leave out shard_placement_fn"
        elif any(policy.param_dtype or policy.reduce_dtype or policy.output_dtype for policy in policies):
            found = "a MixedPrecisionPolicy. Use precision= of the step"
        elif any(group.mesh_info.mesh.size() != ranks.size() for group in self._groups):
            found = "a mesh that has not all ranks. Use one of all, with one dimension"
        elif any(group.offload_policy.__class__.__name__ != "OffloadPolicy" for group in self._groups):
            found = "an offload policy. Leave it out"
        else:
            return
        raise DistributedError(
            f"every parameter must be cut along its first dimension, in one type, over all ranks; found {found}."
        )

    @property
    def leaves(self) -> dict[int, tuple[str, Tensor]]:
        """By the id of a parameter's part: its name, and what graphs contain instead."""
        return {id(each.shard): (each.name, each.whole) for each in self._parameters if each.whole is not None}

    def owned(self, parameters: Iterable[Tensor]) -> Iterable[Tensor]:
        """What an optimizer has of them."""
        parts = {id(each.whole): each.shard for each in self._parameters}
        return dict.fromkeys(parts.get(id(p), p) for p in parameters)

    # --- whole parameters ------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Before a window: somebody may have let the whole parameters go, as state_dict() does."""
        if not all(group.is_unsharded for group in self._groups):
            self._unshard()

    def gather(self) -> None:
        """After the parts have changed."""
        for group in self._groups:
            group.reshard()
        self._unshard()

    def _unshard(self) -> None:
        for group in self._groups if ranks.active() else ():
            ranks.note("all_gather", sum(p._sharded_param_data.nbytes for p in group.fsdp_params))
        with ranks.explained("all_gather"):
            for module in sharded_modules(self.model):
                module.unshard()

    def around(self, loss_fn: LossFn) -> LossFn:
        """The loss function, called so that forward passes leave the parameters where they are: as if they were done
        again on the way back, for activation checkpointing.
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

    def reduce(self, trained: Trained, buffers: Buffers) -> None:
        """The sums of all ranks, each rank those of its parts, in their `.grad`."""
        found, moved = reached(list(trained.named.values()), buffers.moving())
        wanted = [name for name, kind in zip(trained.named, found, strict=True) if kind]
        managers = {each.name: each.manager for each in self._parameters}
        sums = [_whole_gradient(trained.named[name]) for name in wanted]
        for name, part in zip(wanted, ranks.parts(sums), strict=True):
            trained.owned[name].grad = managers[name].to_sharded_dtensor(part)
        for p in trained.named.values():
            p.grad = None
        ranks.copies(moved)

    def act(self, transform: SumTransform, trained: Trained) -> None:
        """Adds the part of what is drawn for whole parameters."""
        if not transform.additive:
            raise DistributedError(
                f"what acts on the sum of sharded gradients must add something that does not depend on them; found "
                f"{transform}. Use strategy='ddp'."
            )
        for p in trained.owned.values():
            if p.grad is not None:
                drawn = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
                transform.act([drawn])
                trained.part(p).add_(drawn[ranks.own_rows(len(drawn))])


def _whole_gradient(p: Tensor) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
