"""What a checkpoint of a trainer may hold, and what must be the same when it is taken up again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from samplewise import ranks
from samplewise.engine.sharded import in_parts
from samplewise.errors import CheckpointError
from samplewise.step.step import Step

KINDS = ("optimizer", "scheduler")


def savable(step: Step) -> bool:
    """Whether what the step has begun can be saved. Several ranks meet for it: what each has of a window is in none of
    their states.
    """
    return not (ranks.meet(step.open)[0] if ranks.active() else step.waiting)


def check_savable(step: Step) -> None:
    if not savable(step):
        waiting = "samples that wait for more, because a transform has to see all at once"
        found = f"one that {ranks.size()} ranks have begun" if ranks.active() else waiting
        raise CheckpointError(
            f"an open window must be saved as sums; found {found}. Use tail='update' or 'drop', or save in the middle "
            "of epochs: every='100up'."
        )


def load(part: Any, state: Any) -> None:
    """Where ranks share a model, each takes its own part of what was saved."""
    if ranks.active() and isinstance(part, nn.Module):
        now = part.state_dict()
        state = {name: _as_shared(value, now.get(name)) for name, value in state.items()}
    elif ranks.active() and isinstance(part, torch.optim.Optimizer):
        owners = [p for group in part.param_groups for p in group["params"]]
        each = {
            k: {name: _as_shared(value, owners[k]) for name, value in values.items()}
            for k, values in state["state"].items()
        }
        state = {**state, "state": each}
    part.load_state_dict(state)


def _as_shared(value: Any, like: Any) -> Any:
    if in_parts(like) and isinstance(value, Tensor) and value.shape == like.shape:
        from torch.distributed.tensor import distribute_tensor  # slow to import, and there already

        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return value


def whole(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a model, on every rank, with what ranks share put together."""
    return {name: value.full_tensor() if in_parts(value) else value for name, value in state.items()}


def kinds(parts: Mapping[str, Any]) -> dict[str, str]:
    """What their states alone do not tell: torch would take those of another kind, and be wrong or fail later."""
    return {name: type(parts[name]).__name__ if name in parts else "none" for name in KINDS}


def check_resumed(state: Mapping[str, Any], parts: Mapping[str, Any], seed: int) -> None:
    """That the run which goes on is the one that was saved."""
    if state["trainer"]["seed"] != seed:
        raise CheckpointError(f"a run must be resumed with its own seed {state['trainer']['seed']}; found {seed}.")
    for name, kind in kinds(parts).items():
        if kind != state["kinds"][name]:
            raise CheckpointError(
                f"a run must be resumed with the {name} it was saved with, {state['kinds'][name]}; found {kind}. "
                "Take that one, or begin a run of another name."
            )
    if ranks.active() and state["step"]["window"]["parts"]:
        raise CheckpointError(
            f"a window that one process has begun must be ended by it; found {ranks.size()} ranks, and a checkpoint in "
            "the middle of one. Resume with one process until the next checkpoint."
        )
