"""Snapshots of Python state for repeated calls of the model, the loss function and transforms."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import is_dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from samplewise.core.batches import leaves
from samplewise.core.reachable import Reachable, Variable, bits_of, bytes_of, items_of
from samplewise.core.state import SMALL, Buffers, RandomState, reseed
from samplewise.errors import LossesError

MUTABLE = (OrderedDict, dict, list, set, deque)  # an OrderedDict keeps its order beside that of the dict
MODULE_ATTRIBUTES = {*vars(nn.Module())} - {"training"}


class ContainerSnapshot:
    """Snapshot of the contents of a container; `restore` puts them back."""

    def __init__(self, container: Any):
        self._container = container
        self._then = list(items_of(container))

    def restore(self) -> None:
        c = self._container
        then = self._then
        if not isinstance(c, MUTABLE) or all_identical(list(items_of(c)), then):
            return
        kind: Any = next(kind for kind in MUTABLE if isinstance(c, kind))
        kind.clear(c)
        if isinstance(c, dict):
            kind.update(c, zip(then[::2], then[1::2], strict=True))
        elif isinstance(c, set):
            set.update(c, then)
        else:
            kind.extend(c, then)


def all_identical(now: Sequence[Any], then: Sequence[Any]) -> bool:
    """Test whether two sequences hold identical objects."""
    return len(now) == len(then) and all(map(is_, now, then))


class GeneratorSnapshot:
    """State of a random number generator of torch, Python or NumPy."""

    def __init__(self, generator: Any):
        self._generator = generator
        self._bits = bits_of(generator)
        self._then = self._read()

    def _read(self) -> Any:
        if isinstance(self._generator, torch.Generator):
            return self._generator.get_state()
        if hasattr(self._generator, "set_state"):  # NumPy's RandomState, which also keeps a number drawn in advance
            return self._generator.get_state(legacy=False)
        return self._generator.getstate() if self._bits is None else self._bits.state

    def changed(self) -> bool:
        """Test whether numbers were drawn."""
        now = self._read()
        return not torch.equal(now, self._then) if isinstance(now, Tensor) else str(now) != str(self._then)

    def restore(self) -> None:
        if hasattr(self._generator, "set_state"):
            self._generator.set_state(self._then)
        elif self._bits is None:
            self._generator.setstate(self._then)
        else:
            self._bits.state = self._then


class TensorSnapshot:
    """Values of a tensor, or only its version counter if `copied` is False."""

    def __init__(self, tensor: Tensor, copied: bool):
        self.tensor = tensor
        self._version = None if tensor.is_inference() else tensor._version
        self._copy = tensor.detach().clone() if copied or self._version is None else None

    @torch.no_grad()
    def restore(self) -> bool:
        """Restore the values, and return whether they had changed."""
        tensor = self.tensor.detach()
        if self._copy is None:
            if self.tensor._version == self._version:
                return False
            raise LossesError(
                "loss_fn is called twice for the samples of this window, and must get the same values both times; "
                f"found that the first call has changed a tensor of shape {tuple(tensor.shape)} in place. No call did "
                "so before, and it was not copied. Change a copy, for example x = x / 255 instead of x.div_(255)."
            )
        # On the CPU values are compared, because NumPy may change them; elsewhere that would be a host sync.
        on_cpu = tensor.device.type == "cpu"
        if torch.equal(tensor, self._copy) if on_cpu else self.tensor._version == self._version:
            return False
        tensor.copy_(self._copy)
        return True


class CallSnapshot:
    """Snapshot of all state that calls of functions and modules can change: buffers and attributes of the modules,
    variables, containers, arrays and tensors that the functions can read, the tensors of the batches, and random number
    generators. Parameters are not restored.

    copies_large=False: of tensors with more than SMALL elements only the version counter is kept.
    iterators: objects among this state that cannot be restored. caches: functions with a cache.
    """

    def __init__(
        self,
        functions: Iterable[Any],
        modules: Sequence[nn.Module] = (),
        batches: Iterable[Any] = (),
        copies_large: bool = True,
    ):
        self._buffers = Buffers(modules)
        self._buffers.remember()
        self._random_state = RandomState()
        submodules = submodules_of(modules)
        reachable = Reachable(roots_of(functions, submodules), excluded=submodules)
        batches = list(batches)
        self._variables = [(variable, variable.read()) for variable in reachable.variables]
        # Buffers that a call adds: those that were there before are in `self._buffers`.
        attributes = [d for m in submodules for d in (vars(m), m._buffers, m._non_persistent_buffers_set)]
        containers = (*attributes, *reachable.containers, *reachable.sized, *_containers_in(batches))
        self._containers = [ContainerSnapshot(container) for container in containers]

        def writable(values: Any) -> bool:
            return isinstance(values, (bytearray, array)) or getattr(getattr(values, "flags", None), "writeable", False)

        self._arrays = [(values, copy(values)) for values in reachable.arrays if writable(values)]
        self._generators = [GeneratorSnapshot(generator) for generator in reachable.generators]
        reached = [t for t in reachable.tensors if not isinstance(t, nn.Parameter)]
        in_batches = [leaf for batch in batches for leaf in leaves(batch) if isinstance(leaf, Tensor)]
        tensors = {id(t): t for t in (*reached, *in_batches)}.values()
        self._tensors = [TensorSnapshot(t, copies_large or t.numel() <= SMALL) for t in tensors]
        self.caches = reachable.caches
        self.iterators = [value for value in reachable.opaque if hasattr(type(value), "__next__")]

    def restore(self, seed: int = 0) -> bool:
        """Restore everything; returns whether a tensor had changed. `seed`: as in `restore_random`."""
        for container in self._containers:
            container.restore()
        for variable, value in self._variables:
            if not _holds(variable, value):
                variable.write(value)
        return self.restore_values(seed)

    def restore_values(self, seed: int = 0) -> bool:
        """As `restore`, but keep the contents of variables, attributes and containers, such as caches."""
        self._buffers.restore()
        self.restore_random(seed)
        for values, content in self._arrays:
            if bytes_of(values) != bytes_of(content):
                values[slice(None) if isinstance(values, (bytearray, array)) else ...] = content
        return sum(tensor.restore() for tensor in self._tensors) > 0  # restores all of them

    def restore_random(self, seed: int = 0) -> None:
        """Restore the random number generators only. If `seed` is not 0, seed the global ones with it instead."""
        if seed:
            reseed(seed)
        else:
            self._random_state.restore()
        for generator in self._generators:
            generator.restore()


def submodules_of(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Submodules whose attributes belong to the user; torch counts forward passes in those of a wrapper for ranks."""
    submodules = (module for root in modules for module in root.modules())
    return [module for module in submodules if not isinstance(module, DistributedDataParallel)]


def roots_of(functions: Iterable[Any], submodules: Iterable[nn.Module]) -> list[Any]:
    """Objects from which all state of functions and modules is reachable: functions, attributes and classes of the
    modules, and attributes of their parameters.
    """
    values = [value for module in submodules for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES]
    values += [vars(p) for module in submodules for p in module._parameters.values() if p is not None and vars(p)]
    kinds = dict.fromkeys(type(module) for module in submodules)
    return [*functions, *values, *kinds]


def _holds(variable: Variable, value: Any) -> bool:
    try:
        return variable.read() is value
    except (LookupError, AttributeError, ValueError):  # deleted
        return False


def _containers_in(batch: Any) -> Iterator[Any]:
    """Lists and dicts in a batch, and dicts of the attributes of its records, whose entries a call can replace."""
    if isinstance(batch, (list, dict)):
        yield batch
    elif isinstance(batch, Mapping) or is_dataclass(batch):
        attributes = getattr(batch, "__dict__", {})
        yield attributes
        yield from (value for value in attributes.values() if isinstance(value, dict))  # as in a UserDict
    if isinstance(batch, Mapping):
        inside = list(batch.values())
    elif isinstance(batch, (list, tuple)):
        inside = list(batch)
    else:
        inside = [*getattr(batch, "__dict__", {}).values()] if is_dataclass(batch) else []
    for item in inside:
        yield from _containers_in(item)


@contextmanager
def state_restored(functions: Iterable[Any]) -> Iterator[None]:
    """Context manager for additional calls of these functions: restores the state that they can change."""
    state = CallSnapshot(functions)
    try:
        yield
    finally:
        state.restore()
