"""Checks of model and parameters in every update of a private step."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from samplewise.core.text import listed
from samplewise.errors import PrivacyError
from samplewise.step.parameters import TrainedParameters

COPIED = 2**20  # elements; larger tensors that are not trained are compared by version and norm, to save memory
EXACT = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def check_private_parameters(trained: TrainedParameters) -> None:
    """Raise if a parameter may be trained outside of the step, without noise, or such that the noise is too small."""
    untracked = trained.untracked_parameters()
    if untracked:
        raise PrivacyError(
            "all parameters of a private model must be trained by the step, or frozen; found parameters that the "
            f"optimizer does not have: {listed(untracked)}. Add them to the optimizer, or freeze them with "
            "requires_grad_(False)."
        )
    wanted = trained.wanted()
    hooked = [name for name, p in wanted.items() if p._backward_hooks or _post_hooks(p)]
    if hooked:
        raise PrivacyError(
            "parameters of a private step must have no hooks, because a hook gets the sum before noise is added, and "
            f"may change it; found hooks on {listed(hooked)}. Remove them."
        )
    rounded = {name: p.dtype for name, p in wanted.items() if p.dtype not in EXACT}
    if rounded:
        name, dtype = next(iter(rounded.items()))
        raise PrivacyError(
            "parameters of a private step must be float32 or float64, because rounding a sum to half precision can "
            f"change it by more than the bound of a sample; found {dtype} for {name!r}. Use float32 parameters, with "
            "precision='bf16-mixed' for fast passes."
        )


def _post_hooks(p: Tensor) -> Any:
    return getattr(p, "_post_accumulate_grad_hooks", None)


def largest_terms(trained: TrainedParameters) -> float:
    """Norm that the terms of a sample may have in the sum, as a multiple of the bound of the sample: the rounding
    errors of larger ones would not be small relative to the bound.
    """
    return float(max(torch.finfo(p.dtype).eps for p in trained.wanted().values()) ** -0.5)


@dataclass(frozen=True)
class TensorCopy:
    """A parameter or buffer at the begin of a window. `copy`: its values, or None if only their norm is known."""

    tensor: Tensor | None
    version: int
    copy: Tensor | None
    norm: float

    @classmethod
    def of(cls, tensor: Tensor | None, copied: bool) -> TensorCopy:
        if tensor is None or tensor.layout is not torch.strided or tensor.is_meta:
            return cls(tensor, 0 if tensor is None else tensor._version, None, 0.0)
        if copied or tensor.numel() <= COPIED:
            return cls(tensor, tensor._version, tensor.detach().clone(), 0.0)
        return cls(tensor, tensor._version, None, _norm(tensor))

    def differs(self, now: Tensor | None) -> bool:
        """True if another tensor is in its place, or its values have changed."""
        if now is not self.tensor:
            return True
        if now is None:
            return False
        if self.copy is not None:  # not by version: writes to `.data` and some kernels do not change it
            return not _equal(now.detach(), self.copy)
        strided = now.layout is torch.strided and not now.is_meta
        return now._version != self.version or (strided and _norm(now) != self.norm)


class ModelState:
    """Parameters, buffers and extra states of a private model, which must not change while a window is computed: what a
    forward pass writes there is data of samples, without noise, and part of the model that is released.

    parameters: False if parameters are sharded. Forward passes then work on temporary tensors.
    """

    def __init__(self, modules: Sequence[nn.Module], parameters: bool):
        self._modules = modules
        self._parameters = parameters
        self._tensors: dict[tuple[int, str], TensorCopy] = {}
        self._extra: dict[int, bytes] = {}

    def remember(self) -> None:
        """Take a snapshot; it replaces the previous one."""
        lazy = [name for _, _, name, tensor, _ in self._places() if tensor is not None and is_lazy(tensor)]
        if lazy:
            raise PrivacyError(
                "parameters of a private model must have values before the first update, because they would be "
                f"created by a pass over private samples; found lazy ones: {listed(lazy)}. Call the model once with "
                "public data."
            )
        self._tensors = {
            (id(owner), key): TensorCopy.of(tensor, isinstance(tensor, nn.Parameter) and tensor.requires_grad)
            for owner, key, _, tensor, _ in self._places()
        }
        self._extra = {id(module): pickle.dumps(read()) for module, _, read in self._extra_states()}

    def check(self) -> None:
        """Raise PrivacyError if something has changed since the snapshot, which is then dropped."""
        none = TensorCopy(None, -1, None, 0.0)
        changed = [
            (name, is_buffer)
            for owner, key, name, tensor, is_buffer in self._places()
            if self._tensors.get((id(owner), key), none).differs(tensor)
        ]
        buffers = [name for name, is_buffer in changed if is_buffer]
        parameters = [name for name, is_buffer in changed if not is_buffer]
        extra = [
            name for module, name, read in self._extra_states() if pickle.dumps(read()) != self._extra.get(id(module))
        ]
        if buffers:
            raise PrivacyError(
                "the buffers of a private model must not change in training, because they would hold data of the "
                f"samples without noise; found that a forward pass has changed or added {listed(buffers)}. Call "
                "sw.freeze_batchnorm(model), or use GroupNorm; compute statistics of the data from public data, before "
                "the training."
            )
        if parameters:
            raise PrivacyError(
                "the parameters of a private model must change in updates only, because a forward pass would write "
                "data of the samples into them without noise; found that one has changed or added "
                f"{listed(parameters)}. Initialize them before the training, for example by a pass over public data."
            )
        if extra:
            raise PrivacyError(
                "the extra state of a private model must not change in training, because it would hold data of the "
                f"samples without noise; found another result of get_extra_state in {listed(extra)}. Keep values of "
                "samples out of it."
            )
        self._tensors = {}
        self._extra = {}

    def restore(self) -> None:
        """Restore tensors that have changed since the snapshot, and remove those that were added; then drop it."""
        if not self._tensors:
            return
        for owner, key, _, tensor, _ in list(self._places()):
            then = self._tensors.get((id(owner), key))
            if then is None:
                del owner[key]
            elif then.differs(tensor):
                owner[key] = then.tensor
                if then.tensor is not None and then.copy is not None:
                    then.tensor.detach().copy_(then.copy)
        self._tensors = {}

    def _places(self) -> Iterator[tuple[dict[str, Tensor | None], str, str, Tensor | None, bool]]:
        """Dict and key of each parameter and buffer, its name and value, and whether it is a buffer."""
        for root in self._modules:
            for path, module in root.named_modules():
                prefix = f"{path}." if path else ""
                for key, buffer in module._buffers.items():
                    yield module._buffers, key, prefix + key, buffer, True
                for key, parameter in module._parameters.items() if self._parameters else ():
                    yield module._parameters, key, prefix + key, parameter, False

    def _extra_states(self) -> Iterator[tuple[nn.Module, str, Callable[[], Any]]]:
        for root in self._modules:
            for path, module in root.named_modules():
                if type(module).get_extra_state is not nn.Module.get_extra_state:
                    yield module, path or type(module).__name__, module.get_extra_state


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64))


def _equal(now: Tensor, then: Tensor) -> bool:
    """True if shapes and values are equal; NaN equals NaN."""
    if torch.equal(now, then):
        return True
    floating = now.is_floating_point() and now.shape == then.shape and now.dtype is then.dtype
    return floating and bool(((now == then) | (now.isnan() & then.isnan())).all())
