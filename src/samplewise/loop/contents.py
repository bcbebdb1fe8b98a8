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
    """Whether what the step has begun can be saved, on all ranks."""
    return not ranks.meet(step.waiting)[0]


def check_savable(step: Step) -> None:
    if not savable(step):
        raise CheckpointError(
            "an open window must be saved as sums; found samples that wait for more, because a transform has to see "
            "all at once. Use tail='update' or 'drop', or save in the middle of epochs: every='100up'."
        )


def state_of(part: Any) -> Any:
    """Of several ranks, what each has of an open window stands apart."""
    return part.state_dict(window=not ranks.active()) if isinstance(part, Step) else part.state_dict()


def own_window(step: Step) -> dict[str, Any]:
    """What this rank has of one that several have begun."""
    begun = ranks.active() and ranks.meet(step.open)[0]
    return {"own": step.window_state()} if begun else {}


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
    owners = state.get("owners", ranks.size())
    if owners != ranks.size():
        raise CheckpointError(
            f"a window that {owners} ranks have begun must be ended by as many; found {ranks.size()}, and a checkpoint "
            f"in the middle of one. Resume with {owners} ranks, and save in the middle of epochs: every='100up'."
        )
    if ranks.active() and state["step"]["window"]["parts"]:
        raise CheckpointError(
            f"a window that one process has begun must be ended by it; found {ranks.size()} ranks, and a checkpoint in "
            "the middle of one. Resume with one process until the next checkpoint."
        )
