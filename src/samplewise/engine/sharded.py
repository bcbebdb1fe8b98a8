"""Parameters of a model that `fully_shard` has spread over ranks.

`model.parameters()` are shards, `DTensor`s that no graph contains: a forward pass uses whole parameters, gathered from
all ranks. Those are the leaves of the graph, and are known here by the names that the parameters have in the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

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
    return any(isinstance(module, FSDPModule) for module in model.modules())


def parameter_groups(model: nn.Module) -> Iterator[Any]:
    """Torch's FSDPParamGroups, each of which is gathered at once."""
    for state in dict.fromkeys(m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)):
        yield from state._fsdp_param_groups


def sharded_parameters(model: nn.Module) -> list[Sharded]:
    """In the model's order. A module has the part or the whole of a parameter, as it was used last."""
    managers = [manager for group in parameter_groups(model) for manager in group.fsdp_params]
    known = {id(getattr(manager, form, None)): manager for manager in managers for form in FORMS}
    return [Sharded(name, known[id(p)]) for name, p in model.named_parameters() if id(p) in known]


FORMS = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The leaves of graphs by the names of the parameters, in their order; parameters that are not sharded are there as
    they are.
    """
    found: dict[str, Tensor | None] = {each.name: each.whole for each in sharded_parameters(model)}
    leaves = {name: found.get(name, p) for name, p in model.named_parameters()}
    missing = [name for name, leaf in leaves.items() if leaf is None or isinstance(leaf, DTensor)]
    if missing:
        raise GraphError(
            f"a sharded model must have computed the losses; found that it never gathered {missing[0]!r}. Call the "
            "model itself, not a part of it, before asking for gradients."
        )
    return {name: leaf for name, leaf in leaves.items() if leaf is not None}
