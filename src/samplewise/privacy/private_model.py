"""Checks of model and parameters in every update of a private step."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from samplewise.core.files import tensor_bytes
from samplewise.core.state import put_back
from samplewise.core.text import listed
from samplewise.errors import PrivacyError

COPIED = 2**20  # elements; larger tensors that are not trained are compared by version and norm, to save memory
EXACT = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def check_private_parameters(trained: Mapping[str, Tensor], untracked: Mapping[str, Tensor]) -> None:
    """Raise if a parameter may be trained outside of the step, without noise, or such that the noise is too small.
    `trained`: parameters that the step trains. `untracked`: other parameters that require gradients.
    """
    if untracked:
        raise PrivacyError(
            "all parameters of a private model must be trained by the step, or frozen; found parameters that the "
            f"optimizer does not have: {listed(untracked)}. Add them to the optimizer, or freeze them with "
            "requires_grad_(False)."
        )
    hooked = [
        name for name, p in trained.items() if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)
    ]
    if hooked:
        raise PrivacyError(
            "parameters of a private step must have no hooks, because a hook gets the sum before noise is added, and "
            f"may change it; found hooks on {listed(hooked)}. Remove them."
        )
    rounded = {name: p.dtype for name, p in trained.items() if p.dtype not in EXACT}
    if rounded:
        name, dtype = next(iter(rounded.items()))
        raise PrivacyError(
            "parameters of a private step must be float32 or float64, because rounding a sum to half precision can "
            f"change it by more than the bound of a sample; found {dtype} for {name!r}. Use float32 parameters, with "
            "precision='bf16-mixed' for fast passes."
        )


def largest_terms(trained: Mapping[str, Tensor]) -> float:
    """Norm that the terms of a sample may have in the sum, as a multiple of the bound of the sample: the rounding
    errors of larger ones would not be small relative to the bound.
    """
    return float(max(torch.finfo(p.dtype).eps for p in trained.values()) ** -0.5)


@dataclass(frozen=True)
class TensorCopy:
    """A parameter or buffer at the begin of a window. `copy`: its values, or None if only their norm is known."""

    tensor: Tensor | None
    version: int
    copy: Tensor | None
    norm: float
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor | None, copied: bool) -> TensorCopy:
        if tensor is None:
            return cls(None, 0, None, 0.0, False)
        if tensor.layout is not torch.strided or tensor.is_meta:
            return cls(tensor, tensor._version, None, 0.0, tensor.requires_grad)
        if copied or tensor.numel() <= COPIED:
            return cls(tensor, tensor._version, tensor.detach().clone(), 0.0, tensor.requires_grad)
        return cls(tensor, tensor._version, None, _norm(tensor), tensor.requires_grad)

    def differs(self, now: Tensor | None) -> bool:
        """True if another tensor is in its place, its values have changed, or it was frozen or unfrozen."""
        if now is not self.tensor:
            return True
        if now is None:
            return False
        if now.requires_grad != self.requires_grad:
            return True
        if self.copy is not None:  # not by version: writes to `.data` and some kernels do not change it
            return not _equal(now.detach(), self.copy)
        strided = now.layout is torch.strided and not now.is_meta
        return now._version != self.version or (strided and _norm(now) != self.norm)

    def restore(self) -> None:
        """Restore the values, if they were copied."""
        if self.tensor is None or self.copy is None:
            return
        if self.tensor.requires_grad != self.requires_grad:
            self.tensor.requires_grad_(self.requires_grad)
        put_back(self.tensor, self.copy)


class Place(NamedTuple):
    """Dict and key of a parameter or buffer, with its name in the model."""

    owner: dict[str, Tensor | None]
    key: str
    name: str
    is_buffer: bool


class ModelState:
    """Parameters, buffers and extra states of a private model, and the state of its optimizer, which must not change
    while a window is computed: what a forward pass writes there is data of samples, without noise, and part of the
    model that is released.

    parameters: False if parameters are sharded. Forward passes then work on temporary tensors.
    """

    def __init__(self, modules: Sequence[nn.Module], parameters: bool, optimizer: Any):
        self._modules = modules
        self._parameters = parameters
        self._optimizer = optimizer
        self._tensors: dict[tuple[int, str], tuple[Place, TensorCopy]] = {}
        self._extra: dict[int, bytes] = {}
        self._numbers: list[tuple[str, Any]] = []  # settings and versions of the optimizer

    def remember(self) -> None:
        """Take a snapshot; it replaces the previous one."""
        lazy = [place.name for place, tensor in self._places() if tensor is not None and is_lazy(tensor)]
        if lazy:
            raise PrivacyError(
                "parameters of a private model must have values before the first update, because they would be "
                f"created by a pass over private samples; found lazy ones: {listed(lazy)}. Call the model once with "
                "public data."
            )
        self._tensors = {
            (id(place.owner), place.key): (
                place,
                TensorCopy.of(tensor, isinstance(tensor, nn.Parameter) and tensor.requires_grad),
            )
            for place, tensor in self._places()
        }
        self._extra = {id(module): _pickled(name, read) for module, name, read in self._extra_states()}
        self._numbers = _numbers(self._optimizer)

    def check(self) -> None:
        """Raise PrivacyError if something has changed since the snapshot, which is then dropped."""
        changed = self._changed()
        buffers = [place.name for place in changed if place.is_buffer]
        parameters = [place.name for place in changed if not place.is_buffer]
        extra = [
            name for module, name, read in self._extra_states() if _pickled(name, read) != self._extra.get(id(module))
        ]
        if buffers:
            raise PrivacyError(
                "the buffers of a private model must not change in training, because they would hold data of the "
                f"samples without noise; found that a forward pass has changed, added or removed {listed(buffers)}. "
                "Call sw.freeze_batchnorm(model), or use GroupNorm; compute statistics of the data from public data, "
                "before the training."
            )
        if parameters:
            raise PrivacyError(
                "the parameters of a private model must change in updates only, because a forward pass would write "
                "data of the samples into them without noise; found that one has changed, added, frozen or removed "
                f"{listed(parameters)}. Initialize them before the training, for example by a pass over public data."
            )
        if extra:
            raise PrivacyError(
                "the extra state of a private model must not change in training, because it would hold data of the "
                f"samples without noise; found another result of get_extra_state in {listed(extra)}. Keep values of "
                "samples out of it."
            )
        numbers = _numbers(self._optimizer)
        if numbers != self._numbers:
            pairs = [pair for pair in zip_longest(self._numbers, numbers) if pair[0] != pair[1]]
            names = {entry[0] for pair in pairs for entry in pair if entry is not None}
            raise PrivacyError(
                "the optimizer of a private step must not change while an update is computed, because its settings and "
                f"state would hold data of the samples without noise; found other values of {listed(sorted(names))}. "
                "Set them between updates."
            )
        self._tensors = {}
        self._extra = {}

    def restore(self) -> None:
        """Restore tensors that have changed since the snapshot, and remove those that were added; then drop it."""
        if not self._tensors:
            return
        for place in self._changed():
            entry = self._tensors.get((id(place.owner), place.key))
            if entry is None:
                del place.owner[place.key]
            else:
                _, copy = entry
                place.owner[place.key] = copy.tensor
                copy.restore()
        self._tensors = {}

    def _changed(self) -> list[Place]:
        """Parameters and buffers that were changed, added or removed since the snapshot."""
        changed: list[Place] = []
        removed = dict(self._tensors)
        for place, tensor in self._places():
            entry = removed.pop((id(place.owner), place.key), None)
            if entry is None or entry[1].differs(tensor):
                changed.append(place)
        return [*changed, *(place for place, _ in removed.values())]

    def _places(self) -> Iterator[tuple[Place, Tensor | None]]:
        """Each parameter and buffer, with its place."""
        for root in self._modules:
            for path, module in root.named_modules():
                prefix = f"{path}." if path else ""
                for key, buffer in module._buffers.items():
                    yield Place(module._buffers, key, prefix + key, True), buffer
                for key, parameter in module._parameters.items() if self._parameters else ():
                    yield Place(module._parameters, key, prefix + key, False), parameter

    def _extra_states(self) -> Iterator[tuple[nn.Module, str, Callable[[], Any]]]:
        for root in self._modules:
            for path, module in root.named_modules():
                if type(module).get_extra_state is not nn.Module.get_extra_state:
                    yield module, path or type(module).__name__, module.get_extra_state


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64))


def _equal(now: Tensor, then: Tensor) -> bool:
    """True if shapes, dtypes and values are equal; NaN equals NaN."""
    if now.shape != then.shape or now.dtype is not then.dtype:
        return False
    if torch.equal(now, then):
        return True
    inexact = now.is_floating_point() or now.is_complex()
    return inexact and bool(((now == then) | (now.isnan() & then.isnan())).all())


class _TensorPickler(pickle.Pickler):
    """Pickler whose result is the same for equal tensors; torch's has numbers of storages in it."""

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        return str(value.dtype), tuple(value.shape), bytes(tensor_bytes(value.to_dense()))


def _pickled(name: str, read: Callable[[], Any]) -> bytes:
    """Extra state as bytes, to be compared."""
    buffer = BytesIO()
    state = read()
    try:
        _TensorPickler(buffer).dump(state)
    except Exception as why:
        raise PrivacyError(
            "the extra state of a private model must be picklable, because it is compared before and after each pass; "
            f"found in get_extra_state of {name}: {why} Return plain values and tensors."
        ) from why
    return buffer.getvalue()


def _numbers(optimizer: Any) -> list[tuple[str, Any]]:
    """Settings of an optimizer, and identity and version of each tensor of its state, by name."""
    groups = getattr(optimizer, "param_groups", ())
    states = getattr(optimizer, "state", None) or {}
    entries = [(name, value) for group in groups for name, value in group.items() if name != "params"]
    entries += [entry for state in states.values() if isinstance(state, dict) for entry in state.items()]
    return [(k, (id(v), v._version) if isinstance(v, Tensor) else v) for k, v in entries]
