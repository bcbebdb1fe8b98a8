"""Detection of `DistributedDataParallel` models, whose reducer sums gradients over ranks during an autograd backward.

The reducer does not see gradients that are written to `.grad` directly, so these would not be all-reduced.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from weakref import WeakSet

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from samplewise.distributed.group import current_group
from samplewise.errors import DistributedError

_wrappers: WeakSet[DistributedDataParallel] | None = None  # all wrappers in this process; None until first needed


def inner(model: nn.Module) -> nn.Module:
    """Return the module inside a DistributedDataParallel, with the model's own parameter names; others unchanged."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def refuse_replicas(parameters: Iterable[Tensor]) -> None:
    """Raise DistributedError if one of the parameters belongs to a DistributedDataParallel in a multi-rank process."""
    if not current_group().distributed:
        return
    ours = {id(p) for p in parameters}
    if any(id(p) in ours for wrapper in _all_wrappers() for p in wrapper.module.parameters()):
        raise DistributedError(
            "gradients of a DistributedDataParallel must be summed over ranks; found g.backward(), which bypasses its "
            "reducer. Use sw.Step, or p.grad = g.sum(reduce=True)[name] / number of samples."
        )


def _all_wrappers() -> WeakSet[DistributedDataParallel]:
    """All DistributedDataParallel objects: existing ones from the garbage collector, later ones from a hook."""
    global _wrappers
    if _wrappers is None:
        found = [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]
        _wrappers = WeakSet(found)
        register_module_module_registration_hook(_note)
    return _wrappers


def _note(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """Registration hook for submodules: record a DistributedDataParallel when it registers its inner module."""
    if isinstance(module, DistributedDataParallel) and _wrappers is not None:
        _wrappers.add(module)
