"""Parameters of a `DistributedDataParallel`, which sums gradients over ranks when autograd brings them to a parameter.

What is written into `.grad` past autograd it does not see, and would never exchange.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from weakref import WeakSet

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from samplewise import ranks
from samplewise.errors import DistributedError

_wrappers: WeakSet[DistributedDataParallel] | None = None  # all there are, once somebody has asked


def inner(model: nn.Module) -> nn.Module:
    """What a wrapper is around: the names of its parameters are the model's."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def refuse_replicas(parameters: Iterable[Tensor]) -> None:
    """An error, if a wrapper waits for the gradients of some of them."""
    if not ranks.active():
        return
    ours = {id(p) for p in parameters}
    if any(id(p) in ours for wrapper in _all_wrappers() for p in wrapper.module.parameters()):
        raise DistributedError(
            "gradients of a DistributedDataParallel must be summed over the ranks; found g.backward(), which its "
            "reducer would not notice. Use sw.Step, or p.grad = g.sum(reduce=True)[name] / number of samples."
        )


def _all_wrappers() -> WeakSet[DistributedDataParallel]:
    """Those that were there before the first question are looked for; later ones tell of themselves."""
    global _wrappers
    if _wrappers is None:
        found = [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]
        _wrappers = WeakSet(found)
        register_module_module_registration_hook(_note)
    return _wrappers


def _note(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """Whenever a module gets a submodule, as a wrapper gets the module it is around."""
    if isinstance(module, DistributedDataParallel) and _wrappers is not None:
        _wrappers.add(module)
