"""Save and restore of random generators, buffers and train/eval modes."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samplewise.core.memory import device_generators, seed_devices
from samplewise.core.validate import check_module


class RandomState:
    """State of the global random generators of torch (CPU and accelerator), Python and NumPy.

    NumPy is left out if it has not been imported, the accelerator if it is not initialized.
    """

    def __init__(self) -> None:
        numpy = _numpy_random()
        self._torch = torch.get_rng_state()
        self._python: Any = random.getstate()
        self._numpy: Any = None if numpy is None else numpy.get_state()
        self._devices: dict[str, list[Tensor]] = {}  # state of each device, by type of accelerator
        for generator in device_generators():
            self._devices.setdefault(generator.device.type, []).append(generator.get_state())

    def restore(self) -> None:
        """Set the global random generators to this state."""
        numpy = _numpy_random()
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if numpy is not None and self._numpy is not None:
            numpy.set_state(self._numpy)
        for generator in device_generators():
            states = self._devices.get(generator.device.type, [])
            if generator.device.index < len(states):  # there may be other devices than when it was saved
                generator.set_state(states[generator.device.index])

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors, numbers and tuples, for a checkpoint."""
        numpy = None
        if self._numpy is not None:
            name, keys, position, has_gauss, cached = self._numpy
            numpy = name, torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(cached)
        return {"torch": self._torch, "python": self._python, "numpy": numpy, "devices": self._devices}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> RandomState:
        """Return the state whose `state_dict` is given."""
        new = cls.__new__(cls)
        new._torch = state["torch"].cpu()
        new._python = state["python"]
        new._numpy = None
        if state["numpy"] is not None:
            name, keys, *rest = state["numpy"]
            new._numpy = (name, keys.numpy().astype("uint32"), *rest)
        new._devices = {kind: [generator.cpu() for generator in states] for kind, states in state["devices"].items()}
        return new


def _numpy_random() -> Any:
    """numpy.random, or None if NumPy has not been imported."""
    return getattr(sys.modules.get("numpy"), "random", None)


def seed_everything(seed: int) -> None:
    """Seed the global random generators of torch (all devices, also before their first use), Python and NumPy."""
    torch.manual_seed(seed)
    reseed(seed)


def reseed(seed: int) -> None:
    """Seed like `seed_everything`, but skip devices that are not initialized. Cheap enough for every sample."""
    numpy = _numpy_random()
    torch.default_generator.manual_seed(seed)  # torch.manual_seed asks every kind of accelerator: 0.2 ms
    seed_devices(seed)
    random.seed(seed)
    if numpy is not None:
        numpy.seed(seed)


@contextmanager
def random_state_restored() -> Iterator[None]:
    """Restore the state of the global random generators after the block."""
    state = RandomState()
    try:
        yield
    finally:
        state.restore()


@contextmanager
def fork_rng(seed: int) -> Iterator[None]:
    """Seed the global random generators inside the block, and restore their state afterwards."""
    with random_state_restored():
        reseed(seed)
        yield


class RngStream:
    """Separate random state for blocks `with stream:`. Each block continues where the last one ended."""

    def __init__(self, seed: int):
        with fork_rng(seed):
            self._inside = RandomState()

    def __enter__(self) -> None:
        self._outside = RandomState()
        self._inside.restore()

    def __exit__(self, *error: object) -> None:
        self._inside = RandomState()
        self._outside.restore()

    def state_dict(self) -> dict[str, Any]:
        return self._inside.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._inside = RandomState.from_state_dict(state)


def snapshot(*modules: nn.Module) -> Callable[[], None]:
    """Save the buffers of modules and the RNG state; return a function that restores both."""
    buffers = Buffers(modules)
    random_state = RandomState()
    buffers.remember()

    def restore() -> None:
        buffers.restore()
        random_state.restore()

    return restore


@contextmanager
def eval_mode(*modules: nn.Module) -> Iterator[None]:
    """Put modules and their submodules in eval mode; restore the mode of each submodule on exit."""
    for root in modules:
        check_module(root)
    modes = [(module, module.training) for root in modules for module in root.modules()]
    for module, _ in modes:
        module.training = False  # not eval(): some modules override it, and train(), with side effects
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def checksum(tensor: Tensor) -> Tensor:
    """Checksum of a tensor as a float64 scalar on the CPU: equal for equal tensors; collisions are unlikely."""
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    values = values.double().flatten()
    return (values * torch.arange(1, len(values) + 1, device=values.device).double().rsqrt()).sum().cpu()


SMALL = 2**14  # elements; smaller buffers are copied in every snapshot


class BufferCopy(NamedTuple):
    """Saved buffer: the tensor object, its version counter, and a copy of its values or None."""

    buffer: Tensor | None
    version: int
    copy: Tensor | None

    def unchanged(self, now: Tensor | None) -> bool:
        return now is self.buffer and (now is None or now._version == self.version)

    def differs(self, now: Tensor | None) -> bool:
        """True if values were copied and the present ones differ. Host sync on accelerators."""
        return now is not None and self.copy is not None and not torch.equal(now, self.copy)


class Buffers:
    """Repeated, cheap snapshots of the buffers of modules.

    Most large buffers never change (masks, position ids). The first snapshot copies all buffers; later ones copy
    buffers of at most SMALL elements and those that have changed before. If a large buffer changes for the first time
    after a later snapshot, its values cannot be restored that one time. Version counters are used for large buffers
    only, because BatchNorm's kernel changes its statistics without incrementing them.

    owners: buffers of each module that has any, name -> tensor.
    """

    def __init__(self, modules: Iterable[nn.Module]):
        buffers = {id(m): m._buffers for root in modules for m in root.modules() if m._buffers}
        self.owners = list(buffers.values())
        self._copies: list[dict[str, BufferCopy]] = []
        self._moving: set[tuple[int, str]] = set()

    def remember(self) -> None:
        """Take a snapshot; it replaces the previous one."""
        first = not self._copies
        self._note_changes()
        self._copies = [
            {name: self._keep(b, first or (k, name) in self._moving) for name, b in owner.items()}
            for k, owner in enumerate(self.owners)
        ]

    def restore(self) -> None:
        """Restore the last snapshot."""
        self._note_changes()
        for owner, copies in zip(self.owners, self._copies, strict=False):
            for name, then in copies.items():
                owner[name] = then.buffer
                if then.buffer is None or then.copy is None:
                    continue
                # A copy increments the version counter, which breaks graphs of the caller that have saved the buffer.
                # So equal values stay; on accelerators they are not compared, because that is a host sync.
                comparable = then.buffer.device.type == "cpu" and then.buffer.layout == torch.strided
                if not (comparable and torch.equal(then.buffer, then.copy)):
                    put_back(then.buffer, then.copy)
                    copies[name] = then._replace(version=then.buffer._version)

    def restore_unless(self, well: Tensor) -> None:
        """Restore the last snapshot if the device scalar `well` is zero; needs no host sync."""
        for owner, copies in zip(self.owners, self._copies, strict=False):
            for name, then in copies.items():
                now = owner.get(name)
                if now is not None and then.copy is not None:
                    with torch.no_grad():
                        now.copy_(torch.where(well.to(now.device), now, then.copy))

    def moving(self) -> list[tuple[Tensor, bool]]:
        """Pairs (buffer, changed): changed is True if this buffer or another one of its module has changed before."""
        self._note_changes()
        pairs = []
        for k, (owner, copies) in enumerate(zip(self.owners, self._copies, strict=True)):
            moves = any((k, name) in self._moving or then.differs(owner.get(name)) for name, then in copies.items())
            pairs += [(buffer, moves) for buffer in owner.values() if buffer is not None]
        return pairs

    def _keep(self, buffer: Tensor | None, moves: bool) -> BufferCopy:
        if buffer is None:
            return BufferCopy(None, 0, None)
        copied = moves or buffer.numel() <= SMALL
        return BufferCopy(buffer, buffer._version, buffer.detach().clone() if copied else None)

    def _note_changes(self) -> None:
        for k, (owner, copies) in enumerate(zip(self.owners, self._copies, strict=False)):
            self._moving |= {(k, name) for name, then in copies.items() if not then.unchanged(owner.get(name))}


def put_back(tensor: Tensor, values: Tensor) -> None:
    """Restore the values of a tensor: in place, because others may share its memory, unless shape or dtype differ."""
    if tensor.shape == values.shape and tensor.dtype is values.dtype:
        tensor.detach().copy_(values)
    else:
        tensor.data = values.clone()
