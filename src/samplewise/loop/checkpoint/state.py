"""State of a trainer in a checkpoint: collecting it, checking it and loading it.

    model, optimizer, step, meters, callbacks      state dicts; also scheduler and loss if there are any
    trainer                                        epoch, position in the data, seed, length of the log
    classes                                        class names of optimizer and scheduler
    settings                                       settings of the step, the optimizer and the scheduler
    frozen                                         checksums of frozen parameters that are not saved
    per_rank                                       one item of each rank: its random state, and its part of an open
                                                   window of several ranks

An intact checkpoint may still contain something else than the state of a trainer, or numbers that no trainer saves, so
it is checked before it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.core.state import RandomState, reseed
from samplewise.errors import CheckpointError, SamplewiseError
from samplewise.loop.checkpoint.encoding import (
    COUNT,
    DICT,
    LIST,
    NUMBER,
    POSITIVE,
    TENSOR,
    TEXT,
    WHOLE,
    Malformed,
    Schema,
    check,
    maybe,
)
from samplewise.loop.checkpoint.resume_settings import FrozenParams, RunSettings, check_frozen, with_frozen
from samplewise.loop.data.loader import ResumableLoader
from samplewise.loop.data.rng import derive_seed
from samplewise.parallel import collectives
from samplewise.parallel.collectives import on_every_rank
from samplewise.parallel.sharded_parameters import is_dtensor
from samplewise.step.step import Step
from samplewise.step.window import Counters

COUNTERS: Schema = {field.name: COUNT for field in fields(Counters)}
WINDOW: Schema = {"samples": DICT, "gradient_sums": DICT, "failure": LIST, "columns": LIST}
POSITION: Schema = {"batches": COUNT, "batch_offset": COUNT, "start": COUNT, "samples": COUNT, "kind": maybe(TEXT)}
SUMS: Schema = {"loss": TENSOR, "count": TENSOR, "samples": COUNT, "skipped": COUNT, "seconds": NUMBER}
TRAINER: Schema = {
    "trainer": {"epoch": COUNT, "log_bytes": COUNT, "seed": WHOLE, "samples_used": maybe(COUNT)},
    "classes": {"optimizer": TEXT, "scheduler": TEXT},
    "settings": {"step": DICT, "script": DICT, "created": DICT},
    "frozen": DICT,
    "model": DICT,
    "optimizer": DICT,
    "step": {
        "counters": COUNTERS,
        "precision": {"scale": POSITIVE, "since_change": COUNT},
        "compiling": DICT,
        "samples_in_windows": [WHOLE],
        "window": WINDOW,
    },
    "meters": {"lines": SUMS, "epoch": SUMS},
    "callbacks": DICT,
    "per_rank": [maybe(DICT)],
}
RANK: Schema = {"random": {"torch": TENSOR, "devices": DICT}}
RANK_WINDOW: Schema = {"window": {"counters": COUNTERS, "window": WINDOW}}
# Errors that load_state_dict of torch, of a loader or of a callback raises for a state that does not fit.
LOAD_ERRORS = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError, AssertionError)


class RunState:
    """State of a training run: collected for a checkpoint, and loaded from one.

    save: "all", or "trained" to leave out frozen parameters
    """

    def __init__(self, step: Step, model: nn.Module, meters: Any, callbacks: Any, seed: int, save: str):
        self.settings = RunSettings(step)
        self._step = step
        self._model = model
        self._meters = meters
        self._callbacks = callbacks
        self._seed = seed
        self._frozen = FrozenParams(model, save)

    def start(self) -> None:
        """Record settings and frozen parameters of the script, before a checkpoint is loaded. Collective."""
        for name, part in self._parts().items():  # such as a scheduler of the user's
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise CheckpointError(
                    f"the {name} must have state_dict and load_state_dict to be saved in a checkpoint; found "
                    f"{type(part).__name__} without them. Add both methods, or use a Trainer without a run directory."
                )
        self.settings.start()
        self._frozen.record()

    def collect(self, loader: ResumableLoader, epoch: int, log_bytes: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state for a checkpoint, and that of this rank. Collective."""
        step = self._step
        if not savable(step):
            raise CheckpointError(
                "an open window can be saved only as accumulated sums; found samples that are kept until the window is "
                "full, because a transform needs all samples at once. Use tail='update' or tail='drop', or save inside "
                "epochs: ModelCheckpoint(every='100up')."
            )
        parts = self._parts()
        # With several ranks, the state of the step omits the open window: each rank has its part of it.
        window = collectives.size() == 1
        states = on_every_rank(
            lambda: {
                name: step._state_dict(window=window) if part is step else part.state_dict()
                for name, part in parts.items()
            }
        )
        states |= self.model_state()
        rank_state = {"random": RandomState().state_dict()}
        if compiling := step._rank_state():
            rank_state["compiling"] = compiling
        if collectives.size() > 1 and collectives.all_reduce_scalars(step._has_pending_samples)[0]:
            rank_state["window"] = step._window_state()
        position = loader.state(step._consumed)
        states["trainer"] = {"epoch": epoch, **position, "log_bytes": log_bytes, "seed": self._seed}
        states["classes"] = _class_names(parts)
        states["settings"] = self.settings.state_dict()
        return states, rank_state

    def model_state(self) -> dict[str, Any]:
        """Return {"model": state dict, "frozen": checksums of the parameters that it leaves out}. Collective."""
        return self._frozen.model_state()

    def load(self, state: dict[str, Any], loader: ResumableLoader) -> None:
        """Load the state of a checkpoint, and go to its position in the data."""
        saved = state["trainer"]
        parts = self._parts()
        check_compatible(state, parts, self._seed)
        with _load_errors("loader"):
            loader.check_data(saved, saved["epoch"])
        states = {**state, "model": with_frozen(state["model"], state["frozen"], self._model)}
        for name, part in parts.items():
            with _load_errors(name):
                _load_part(part, states[name])
        self.settings.load(state)
        rank = collectives.rank()
        per_rank = state["per_rank"]
        rank_state = per_rank[rank] if rank < len(per_rank) else {}
        with _load_errors("open window"):
            self._step._load_rank_state(rank_state.get("compiling", {}))
            if "window" in rank_state:
                self._step._load_window_state(rank_state["window"])
        with _load_errors("loader"):
            loader.load(saved, saved["epoch"])
        self._step.counters.epochs = saved["epoch"]  # higher by 1 if the loader was exhausted, which will happen again
        with _load_errors("random state"):
            if rank < len(per_rank):
                RandomState.from_state_dict(rank_state["random"]).restore()
            else:  # a rank that did not exist when the checkpoint was saved gets a seed derived from its number
                reseed(derive_seed(self._seed, rank, per_rank[0]["random"]["torch"].tolist()))

    def _parts(self) -> dict[str, Any]:
        """Return the objects with a state dict, by their names in a checkpoint."""
        parts: dict[str, Any] = {
            "model": self._model,
            "optimizer": self._step.optimizer,
            "step": self._step,
            "meters": self._meters,
            "callbacks": self._callbacks,
        }
        if self._step.scheduler is not None:
            parts["scheduler"] = self._step.scheduler
        if isinstance(self._step.loss_fn, nn.Module):
            parts["loss"] = self._step.loss_fn
        return parts


def savable(step: Step) -> bool:
    """Return True if no rank holds samples that cannot be saved. Collective."""
    return not collectives.all_reduce_scalars(step._has_deferred_samples)[0]


def _class_names(parts: Mapping[str, Any]) -> dict[str, str]:
    """Return the class names of optimizer and scheduler; "none" if there is none.

    A state dict does not contain its class: torch would load that of another class, and be wrong or fail later.
    """
    return {name: type(parts[name]).__name__ if name in parts else "none" for name in ("optimizer", "scheduler")}


# --- checking --------------------------------------------------------------------------------------------------------


def check_trainer_state(path: Path, state: dict[Any, Any]) -> None:
    """Raise CheckpointError if the state was not saved by a trainer, in one process or on several ranks."""
    try:
        check(state, TRAINER)
        several = "positions" in state["trainer"]
        check(state["trainer"], {"positions": [POSITION]} if several else {"position": POSITION}, "trainer")
        if not any(state["per_rank"]):
            raise Malformed("no state of a rank")
        for rank, rank_state in enumerate(state["per_rank"]):
            if rank_state is not None:
                check(rank_state, RANK, f"per_rank.{rank}")
                check(rank_state, RANK_WINDOW if "window" in rank_state else {}, f"per_rank.{rank}")
    except Malformed as why:
        raise CheckpointError(
            f"{path} must contain the state of a trainer; found {why}. It was written for another purpose: use an "
            "earlier checkpoint."
        ) from why


def check_compatible(state: Mapping[str, Any], parts: Mapping[str, Any], seed: int) -> None:
    """Raise CheckpointError if seed, classes or number of ranks do not match the checkpoint."""
    if state["trainer"]["seed"] != seed:
        raise CheckpointError(
            f"a run must be resumed with the seed it was saved with, {state['trainer']['seed']}; found {seed}. "
            "Use the saved seed, or start a new run directory."
        )
    for name, kind in _class_names(parts).items():
        if kind != state["classes"][name]:
            raise CheckpointError(
                f"a run must be resumed with the {name} it was saved with, {state['classes'][name]}; found {kind}. "
                "Use the saved class, or start a new run directory."
            )
    _check_shapes(state, parts)
    check_frozen(state["frozen"], parts["model"])
    # An open window is that of the ranks that have opened it.
    ranks = len(state["per_rank"])
    has_window = any(rank_state is not None and "window" in rank_state for rank_state in state["per_rank"])
    if has_window and ranks != collectives.size():
        raise CheckpointError(
            f"a checkpoint with an open window of {ranks} ranks must be resumed with the same number of ranks; "
            f"found {collectives.size()}. Resume with {ranks} ranks. To change the number of ranks, save inside "
            "epochs: ModelCheckpoint(every='100up')."
        )
    if collectives.size() > 1 and state["step"]["window"]["samples"]:
        raise CheckpointError(
            "a checkpoint with an open window of one process must be resumed with one process; found "
            f"{collectives.size()} ranks. Resume with one process until the next checkpoint."
        )


def _check_shapes(state: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Raise CheckpointError if names or shapes of the model differ: loading would overwrite a part of it first."""
    if not isinstance(parts.get("model"), nn.Module) or not isinstance(state["model"], Mapping):
        return
    now = {name: tuple(value.shape) for name, value in parts["model"].state_dict().items() if isinstance(value, Tensor)}
    saved = {name: tuple(value.shape) for name, value in state["model"].items() if isinstance(value, Tensor)}
    for name in [name for name in (*now, *saved) if name not in state["frozen"]]:
        if now.get(name) != saved.get(name):
            raise CheckpointError(
                f"a checkpoint must fit the model of the run that it is loaded into; found {name!r} with "
                f"{_shape(saved.get(name))} in the checkpoint and {_shape(now.get(name))} in the model. "
                "Use the model that the run was saved with, or start a new run directory."
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "no entry" if shape is None else f"shape {shape}"


# --- loading ---------------------------------------------------------------------------------------------------------


def _load_part(part: Any, state: Any) -> None:
    """Load a state into a part. Tensors that are sharded over ranks receive this rank's shard."""
    if isinstance(part, nn.Module) and any(map(is_dtensor, part.parameters())):
        current = part.state_dict()
        state = {name: _shard_like(value, current.get(name)) for name, value in state.items()}
    elif isinstance(part, torch.optim.Optimizer) and any(map(is_dtensor, optimized := _parameters(part))):
        sharded = {}
        for k, values in state["state"].items():
            sharded[k] = {name: _shard_like(value, optimized[k]) for name, value in values.items()}
        state = {**state, "state": sharded}
    part.load_state_dict(state)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _shard_like(value: Any, like: Any) -> Any:
    if is_dtensor(like) and isinstance(value, Tensor) and value.shape == like.shape:
        from torch.distributed.tensor import distribute_tensor  # slow to import; a sharded tensor has imported it

        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return value


@contextmanager
def _load_errors(name: str) -> Iterator[None]:
    """Convert errors of loading a state into a CheckpointError that names the part being loaded."""
    try:
        yield
    except SamplewiseError:
        raise
    except LOAD_ERRORS as why:
        message = str(why).strip().replace("\n\t", " ").partition("\n")[0].rstrip(".")
        raise CheckpointError(
            f"a checkpoint must fit the {name} of the run that it is loaded into; found {type(why).__name__}: "
            f"{message}. Use the {name} that the run was saved with, or start a new run directory."
        ) from why
