"""Frozen parameters that checkpoints leave out, with save="trained".

A parameter is left out while it is frozen (requires_grad=False) and has the values that it had when `fit` started. All
others are saved, for example those of a teacher that is a moving average of the student. A checkpoint contains the
checksums of the parameters that it leaves out, so that it is only resumed with the same base model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from samplewise.core.files import sha256
from samplewise.core.state import checksum
from samplewise.errors import CheckpointError
from samplewise.parallel import collectives
from samplewise.parallel.sharded_parameters import is_dtensor

SAVE = ("all", "trained")


class FrozenParams:
    """Frozen parameters of a model and their checksums. With save="all" none are recorded."""

    def __init__(self, model: nn.Module, save: str):
        if save not in SAVE:
            raise ValueError(f"save must be 'all' or 'trained'; found {save!r}.")
        self._model = model
        self._save = save
        self._recorded = False
        self._digests: dict[str, str] = {}
        self._sums: dict[str, Tensor] = {}  # to notice changes: faster than digests, but not equal on all devices

    def record(self) -> None:
        """Record the values of the frozen parameters at the first call, before a checkpoint is loaded. Collective."""
        if self._recorded or self._save == "all":
            return
        frozen = _frozen(self._model)
        self._digests = {name: _digest(p) for name, p in frozen.items()}
        self._sums = {name: _sum(p) for name, p in frozen.items()}
        self._recorded = True

    def unchanged(self) -> dict[str, str]:
        """Return the checksums of the frozen parameters that have the recorded values, by name. Collective."""
        if self._digests:
            frozen = _frozen(self._model)
            same = {name for name in self._sums if name in frozen and _sum(frozen[name]).equal(self._sums[name])}
            on_all_ranks = set.intersection(*collectives.all_gather_object(same))
            self._digests = {name: digest for name, digest in self._digests.items() if name in on_all_ranks}
            self._sums = {name: self._sums[name] for name in self._digests}
        return self._digests

    def model_state(self) -> dict[str, Any]:
        """Return {"model": state dict without the recorded parameters, "frozen": checksums of these}. Collective."""
        frozen = self.unchanged()
        state = self._model.state_dict()
        for name in frozen:
            del state[name]
        return {"model": state, "frozen": dict(frozen)}


def check_frozen(frozen: Mapping[str, str], model: nn.Module) -> None:
    """Raise CheckpointError unless the model has the parameters that a checkpoint leaves out. Collective."""
    state = model.state_dict()
    for name, digest in frozen.items():
        found = _digest(state[name]) if name in state else None
        if found != digest:
            values = "is not in this model" if found is None else "has other values in this model"
            raise CheckpointError(
                "a checkpoint without frozen parameters (save='trained') must be resumed with the base model that the "
                f"run was started with; found that {name!r} {values}. Load that base model before fit, or start a new "
                "run directory."
            )


def _frozen(model: nn.Module) -> dict[str, Tensor]:
    """Return the frozen parameters by name, including all names of tied ones."""
    saved = model.state_dict().keys()  # a model may rename or leave out some
    return {n: p for n, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad and n in saved}


def _digest(tensor: Tensor) -> str:
    """Return the SHA-256 of dtype, shape and values of a tensor. Collective for a sharded tensor."""
    whole: Any = tensor.detach()
    if is_dtensor(whole):
        whole = whole.full_tensor()
    return sha256([f"{whole.dtype} {tuple(whole.shape)}", whole])


def _sum(tensor: Tensor) -> Tensor:
    """Return a checksum of this rank's part of a tensor. NaN is equal to nothing, so it counts as changed."""
    local: Any = tensor.detach()
    return checksum(local.to_local() if is_dtensor(local) else local)


def with_frozen(state: Mapping[str, Any], frozen: Iterable[str], model: nn.Module) -> dict[str, Any]:
    """Return a state dict completed by the parameters of the model that it leaves out."""
    current = model.state_dict()
    return {**state, **{name: current[name] for name in frozen}}
