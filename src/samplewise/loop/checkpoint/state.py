"""State of a trainer in a checkpoint: collecting, loading, and checks on resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.distributed.group import current_group
from samplewise.distributed.sharded_parameters import is_dtensor
from samplewise.errors import CheckpointError
from samplewise.step.step import Step

KINDS = ("optimizer", "scheduler")


def savable(step: Step) -> bool:
    """Return True if no rank holds samples that cannot be saved. Collective."""
    return not current_group().all_reduce_scalars(step.has_deferred_samples)[0]


def check_savable(step: Step) -> None:
    if not savable(step):
        raise CheckpointError(
            "an open window can be saved only as accumulated sums; found samples that are kept until the window is "
            "full, because a transform needs all samples at once. Use tail='update' or tail='drop', or save inside "
            "epochs: ModelCheckpoint(every='100up')."
        )


def state_of(part: Any) -> Any:
    """Return the state dict of a part. With several ranks that of a Step omits the open window: see `own_window`."""
    if isinstance(part, Step):
        return part.state_dict(window=not current_group().distributed)
    return part.state_dict()


def own_window(step: Step) -> dict[str, Any]:
    """Return {"own": this rank's part of the open window}, or {} for one process or no open window. Collective."""
    begun = current_group().distributed and current_group().all_reduce_scalars(step.has_pending_samples)[0]
    return {"own": step.window_state()} if begun else {}


def load(part: Any, state: Any) -> None:
    """Load a state into a part. Tensors that are sharded over ranks receive this rank's shard."""
    if current_group().distributed and isinstance(part, nn.Module):
        now = part.state_dict()
        state = {name: _as_shared(value, now.get(name)) for name, value in state.items()}
    elif current_group().distributed and isinstance(part, torch.optim.Optimizer):
        owners = [p for group in part.param_groups for p in group["params"]]
        each = {}
        for k, values in state["state"].items():
            each[k] = {name: _as_shared(value, owners[k]) for name, value in values.items()}
        state = {**state, "state": each}
    part.load_state_dict(state)


def _as_shared(value: Any, like: Any) -> Any:
    if is_dtensor(like) and isinstance(value, Tensor) and value.shape == like.shape:
        from torch.distributed.tensor import distribute_tensor  # slow to import; a sharded tensor has imported it

        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return value


def whole(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a model with sharded tensors gathered, on every rank."""
    return {name: value.full_tensor() if is_dtensor(value) else value for name, value in state.items()}


def kinds(parts: Mapping[str, Any]) -> dict[str, str]:
    """Return the class names of optimizer and scheduler; "none" if there is none.

    A state dict does not contain its class: torch would load that of another class, and be wrong or fail later.
    """
    return {name: type(parts[name]).__name__ if name in parts else "none" for name in KINDS}


def check_resumed(state: Mapping[str, Any], parts: Mapping[str, Any], seed: int) -> None:
    """Raise CheckpointError if seed, classes or number of ranks do not match the checkpoint."""
    if state["trainer"]["seed"] != seed:
        raise CheckpointError(
            f"a run must be resumed with the seed it was saved with, {state['trainer']['seed']}; found {seed}."
        )
    for name, kind in kinds(parts).items():
        if kind != state["kinds"][name]:
            raise CheckpointError(
                f"a run must be resumed with the {name} it was saved with, {state['kinds'][name]}; found {kind}. "
                "Use the saved class, or start a new run directory."
            )
    _check_shapes(state, parts)
    owners = state.get("owners", current_group().size)
    if owners != current_group().size:
        raise CheckpointError(
            f"a checkpoint with an open window of {owners} ranks must be resumed with the same number of ranks; "
            f"found {current_group().size}. Resume with {owners} ranks. To change the number of ranks, save inside "
            "epochs: ModelCheckpoint(every='100up')."
        )
    if current_group().distributed and state["step"]["window"]["parts"]:
        raise CheckpointError(
            "a checkpoint with an open window of one process must be resumed with one process; found "
            f"{current_group().size} ranks. Resume with one process until the next checkpoint."
        )


def _check_shapes(state: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Raise CheckpointError if names or shapes of the model differ: loading would overwrite a part of it first."""
    if not isinstance(parts.get("model"), nn.Module) or not isinstance(state["model"], Mapping):
        return
    now = {name: tuple(value.shape) for name, value in parts["model"].state_dict().items() if isinstance(value, Tensor)}
    saved = {name: tuple(value.shape) for name, value in state["model"].items() if isinstance(value, Tensor)}
    for name in (*now, *saved):
        if now.get(name) != saved.get(name):
            raise CheckpointError(
                f"a checkpoint must fit the model of the run that it is loaded into; found {name!r} with "
                f"{_shape(saved.get(name))} in the checkpoint and {_shape(now.get(name))} in the model. "
                "Use the model that the run was saved with, or start a new run directory."
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "no entry" if shape is None else f"shape {shape}"
