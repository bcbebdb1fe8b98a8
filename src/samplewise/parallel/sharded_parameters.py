"""Unsharded parameters of a model sharded with `fully_shard` (FSDP2).

`model.parameters()` are shards, `DTensor`s that do not occur in the graph: the forward pass uses unsharded parameters,
gathered from all ranks. These are the leaves of the graph; here they are mapped to the parameter names of the model.

`torch.distributed.fsdp` takes half as long to import as torch, so it is used only if the program has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from samplewise.errors import GraphError


class Sharded(NamedTuple):
    """One sharded parameter."""

    name: str  # name in the model
    manager: Any  # torch's FSDPParam

    @property
    def shard(self) -> nn.Parameter:
        return self.manager.sharded_param

    @property
    def whole(self) -> nn.Parameter | None:
        """Unsharded parameter, always the same tensor object; None before the first forward pass."""
        return getattr(self.manager, "_unsharded_param", None)


def is_sharded(model: nn.Module) -> bool:
    return bool(sharded_modules(model))


def sharded_modules(model: nn.Module) -> list[Any]:
    """Modules that `fully_shard` was called on."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None or not kind.__subclasses__():  # `fully_shard` gives each module a subclass
        return []
    return [module for module in model.modules() if isinstance(module, kind)]


def parameter_groups(model: nn.Module) -> Iterator[Any]:
    """Torch's FSDPParamGroups; the parameters of a group are gathered together."""
    for state in dict.fromkeys(module._get_fsdp_state() for module in sharded_modules(model)):
        yield from _groups(state)


def _groups(state: Any) -> list[Any]:
    """Groups of an FSDPState. Older torch versions have one, None if the module has no parameters."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [group for group in [state._fsdp_param_group] if group is not None]


def sharded_parameters(model: nn.Module) -> list[Sharded]:
    """Sharded parameters in the order of the model.

    A module holds a parameter sharded or unsharded, depending on its last use, so all variants are looked up.
    """
    parameters: dict[int, Any] = {}
    for group in parameter_groups(model):
        for manager in group.fsdp_params:
            parameters.update((id(getattr(manager, form, None)), manager) for form in FORMS)
            if hasattr(manager, "_unsharded_param"):
                manager._unsharded_param._home = ref(group)
    return [Sharded(name, parameters[id(p)]) for name, p in model.named_parameters() if id(p) in parameters]


FORMS = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")


def is_dtensor(value: Any) -> bool:
    """True for a `DTensor`, which is distributed over ranks."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def graph_parameters(model: nn.Module) -> tuple[dict[str, Tensor], bool]:
    """Parameters that graphs contain (leaves), by name, in the order of the model; and whether the model is sharded.

    Of a sharded model these are whole parameters. Raises GraphError if one was never gathered.
    """
    if not sharded_modules(model):
        return dict(model.named_parameters()), False
    tensors: dict[str, Tensor | None] = {each.name: each.whole for each in sharded_parameters(model)}
    leaves = {name: tensors.get(name, p) for name, p in model.named_parameters()}
    missing = [name for name, leaf in leaves.items() if leaf is None or is_dtensor(leaf)]
    if missing:
        raise GraphError(
            f"the losses must be computed with the sharded model; found that it never gathered {missing[0]!r}. Call "
            "the model, not one of its submodules, before computing gradients."
        )
    return {name: leaf for name, leaf in leaves.items() if leaf is not None}, True


@contextmanager
def unsharded(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Context manager: these whole parameters hold their values inside, also outside of a pass. Those that did not are
    gathered, and released on exit.
    """
    homes = dict.fromkeys(group for leaf in leaves if (group := getattr(leaf, "_home", _nowhere)()) is not None)
    absent = [group for group in homes if not group.is_unsharded]
    for group in absent:
        group.unshard()
        group.wait_for_unshard()
    try:
        yield
    finally:
        for group in absent:
            group._to_sharded()


def _nowhere() -> None:
    """Group of a parameter that is not sharded."""


class HarmlessHooks:
    """Number of hooks registered by `fully_shard` in forward passes, which gather parameters and change no gradient."""

    registered = 0


harmless_hooks = HarmlessHooks()


def local_gradient(shard: Any) -> Tensor:
    """This rank's rows of the gradient of a sharded parameter."""
    with torch.no_grad():
        return shard.grad.to_local()


def sharded_gradient(shard: Any, local: Tensor) -> Tensor:
    """Gradient of a sharded parameter from this rank's rows of it."""
    kind = type(shard.data)
    layout = {"shape": shard.shape, "stride": shard.stride()}
    made: Tensor = kind.from_local(local, shard.device_mesh, shard.placements, run_check=False, **layout)
    return made
