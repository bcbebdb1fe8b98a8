"""Parameters of a model that `fully_shard` has spread over ranks.

`model.parameters()` are shards, `DTensor`s that no graph contains: a forward pass uses whole parameters, gathered from
all ranks. Those are the leaves of the graph, and are known here by the names that the parameters have in the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

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
    paths = {id(module): path for path, module in reversed(list(model.named_modules()))}
    managers = [manager for group in parameter_groups(model) for manager in group.fsdp_params]
    places = [(manager, manager._module_info) for manager in managers]
    return [Sharded(f"{paths[id(at.module)]}.{at.param_name}".lstrip("."), manager) for manager, at in places]


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The leaves of graphs by the names of the parameters, in their order; parameters that are not sharded are there as
    they are.
    """
    found = {each.name: each for each in sharded_parameters(model)}
    missing = [name for name, each in found.items() if each.whole is None]
    if missing:
        raise GraphError(
            f"a sharded model must have computed the losses; found that it never gathered {missing[0]!r}. Call the "
            "model itself, not a part of it, before asking for gradients."
        )
    in_order = [name for name, _ in model.named_parameters()]
    others = dict(model.named_parameters())
    return {name: _leaf(found[name].whole) if name in found else others[name] for name in in_order}


def _leaf(whole: nn.Parameter | None) -> Tensor:
    assert whole is not None
    return whole
