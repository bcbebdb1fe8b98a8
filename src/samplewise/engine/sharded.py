"""Parameters of a model that `fully_shard` has spread over ranks.

`model.parameters()` are shards, `DTensor`s that no graph contains: a forward pass uses whole parameters, gathered from
all ranks. Those are the leaves of the graph, and are known here by the names that the parameters have in the model.

Torch's module for that takes as long to import as half of torch: it is asked where somebody has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from samplewise.errors import GraphError


class Sharded(NamedTuple):
    name: str  # in the model
    manager: Any  # torch's FSDPParam

    @property
    def shard(self) -> nn.Parameter:
        return self.manager.sharded_param

    @property
    def whole(self) -> nn.Parameter | None:
        """The same tensor each time; None before the first forward pass."""
        return getattr(self.manager, "_unsharded_param", None)


def is_sharded(model: nn.Module) -> bool:
    return bool(sharded_modules(model))


def sharded_modules(model: nn.Module) -> list[Any]:
    """Those that `fully_shard` was called on."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def parameter_groups(model: nn.Module) -> Iterator[Any]:
    """Torch's FSDPParamGroups, each of which is gathered at once."""
    for state in dict.fromkeys(module._get_fsdp_state() for module in sharded_modules(model)):
        yield from state._fsdp_param_groups


def sharded_parameters(model: nn.Module) -> list[Sharded]:
    """In the model's order. A module has the part or the whole of a parameter, as it was used last."""
    managers = [manager for group in parameter_groups(model) for manager in group.fsdp_params]
    known = {id(getattr(manager, form, None)): manager for manager in managers for form in FORMS}
    return [Sharded(name, known[id(p)]) for name, p in model.named_parameters() if id(p) in known]


FORMS = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")


def in_parts(value: Any) -> bool:
    """Whether it is a `DTensor`, which ranks share."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The leaves of graphs by the names of the parameters, in their order; parameters that are not sharded are there as
    they are.
    """
    found: dict[str, Tensor | None] = {each.name: each.whole for each in sharded_parameters(model)}
    leaves = {name: found.get(name, p) for name, p in model.named_parameters()}
    missing = [name for name, leaf in leaves.items() if leaf is None or in_parts(leaf)]
    if missing:
        raise GraphError(
            f"a sharded model must have computed the losses; found that it never gathered {missing[0]!r}. Call the "
            "model itself, not a part of it, before asking for gradients."
        )
    return {name: leaf for name, leaf in leaves.items() if leaf is not None}
