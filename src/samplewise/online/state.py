"""State of an `Online`: collecting it, loading it, and writing it to a checkpoint.

It consists of tensors, numbers, texts, bytes and None in dicts, lists and tuples, so that a file cannot run code.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samplewise.core.state import RandomState
from samplewise.core.text import listed
from samplewise.errors import CheckpointError
from samplewise.loop.checkpoint import io

if TYPE_CHECKING:
    from samplewise.online.online import Online

FORMAT = "samplewise online 1"
LOAD_ERRORS = (ValueError, TypeError, LookupError, AttributeError, RuntimeError)


def state_of(online: Online) -> dict[str, Any]:
    """Copy of the state; see `Online.state_dict`."""
    step = online.step
    model, *loss = step._evaluator.modules
    state = {
        "format": FORMAT,
        "task": online.task,
        "samples": online.samples,
        "features": online._features.state_dict(),
        "target": online._target.state_dict(),
        "layers": online._layers.sizes,
        "row": 0 if online._updates is None else online._updates.row,  # kernels may round by the alignment of a row
        "draws": online._draws,
        "random": RandomState().state_dict() if online._draws else None,
        "delay": online._delay.state_dict(),
        "losses": online._losses.state_dict(),
        "norms": online._norms.state_dict(),
        "drift": online.drift,
        "detector": state_of_detector(online.drift_detector),
        "model": model.state_dict(),
        "loss": [module.state_dict() for module in loss],
        "optimizer": step.optimizer.state_dict(),
        "scheduler": None if step.scheduler is None else step.scheduler.state_dict(),
        "step": step.state_dict(),
    }
    return copy.deepcopy(state)


def load_state(online: Online, state: Mapping[str, Any]) -> None:
    """Restore what `state_of` has returned. If it raises, nothing has changed."""
    if state.get("format") != FORMAT or state.get("task") != online.task:
        raise ValueError(
            f"the state must be one that Online.state_dict returned, for {online.task}; found format "
            f"{state.get('format')!r} and task {state.get('task')!r}. Create Online for the task of the state."
        )
    before = state_of(online)
    try:
        _load(online, copy.deepcopy(dict(state)))
    except BaseException:
        _load(online, before)
        raise


def _load(online: Online, state: dict[str, Any]) -> None:
    step = online.step
    online._layers.load_sizes(state["layers"])
    for module, values in zip(step._evaluator.modules, [state["model"], *state["loss"]], strict=True):
        module.load_state_dict(values)
    step.optimizer.load_state_dict(state["optimizer"])
    if step.scheduler is not None:
        step.scheduler.load_state_dict(state["scheduler"])
    online._delay.load_state_dict(state["delay"])
    step.load_state_dict(state["step"])
    online._features.load_state_dict(state["features"])
    online._target.load_state_dict(state["target"])
    online._losses.load_state_dict(state["losses"])
    online._norms.load_state_dict(state["norms"])
    load_detector(online.drift_detector, state["detector"])
    online.drift = state["drift"]
    online.samples = state["samples"]
    online._draws = state["draws"]
    online._load_rows(state["row"])
    if state["random"] is not None:
        RandomState.from_state_dict(state["random"]).restore()


def read_state(online: Online, path: Path) -> None:
    """Restore the state in a checkpoint directory. If it raises, nothing has changed."""
    state = io.read(path)
    try:
        load_state(online, state)
    except LOAD_ERRORS as why:
        raise CheckpointError(
            f"{path} must be a state of this Online, with its model and optimizer; found {type(why).__name__}: "
            f"{str(why).strip().splitlines()[0]} Create Online as for `save`, or pass another path."
        ) from why


# --- drift detectors -------------------------------------------------------------------------------------------------

PLAIN = (bool, int, float, str, bytes, type(None))
DEPTH = 5  # of objects inside of objects


def state_of_detector(detector: Any) -> Any:
    """State of a detector. Raises TypeError if an attribute is of another kind."""
    if hasattr(detector, "state_dict"):
        return {"state_dict": detector.state_dict()}
    return _encode(detector, type(detector).__name__, 0)


def load_detector(detector: Any, state: Any) -> None:
    """Restore what `state_of` has returned, in a detector of the same class and settings."""
    if "state_dict" in state:
        detector.load_state_dict(state["state_dict"])
    else:
        _restored(detector, state)


def _encode(value: Any, name: str, depth: int) -> Any:
    if type(value).__module__ == "numpy" and not getattr(value, "shape", ()):
        value = value.item()
    if isinstance(value, PLAIN):
        return {"value": value}
    if isinstance(value, (list, tuple, deque)) and all(isinstance(item, PLAIN) for item in value):
        return {"value": list(value), "type": type(value).__name__}
    if isinstance(value, random.Random):
        return {"random": value.getstate()}
    if depth < DEPTH and not callable(value):
        inner = value.__reduce_ex__(2)[2] if hasattr(value, "__reduce_ex__") else None
        if isinstance(inner, bytes) and hasattr(value, "__setstate__"):  # an object of an extension module
            return {"bytes": inner}
        if isinstance(inner, dict):
            items = {key: item for key, item in inner.items() if not callable(item)}  # methods are no state
            return {"attributes": {key: _encode(item, f"{name}.{key}", depth + 1) for key, item in items.items()}}
    raise TypeError(
        f"a drift detector must have state_dict and load_state_dict, or attributes that are numbers, texts, lists or "
        f"objects of these, if its state is saved; found {name}, {type(value).__name__}. Add both methods."
    )


def _restored(value: Any, state: Mapping[str, Any]) -> Any:
    """Value with this state: a new one if it is plain, otherwise the existing object."""
    if "value" in state:
        kind = state.get("type")
        if kind == "deque":
            return deque(state["value"], maxlen=value.maxlen)
        return tuple(state["value"]) if kind == "tuple" else state["value"]
    if "random" in state:
        value.setstate(state["random"])
    elif "bytes" in state:
        value.__setstate__(state["bytes"])
    else:
        attributes = vars(value)
        unknown = [key for key in state["attributes"] if key not in attributes]
        if unknown:
            raise ValueError(
                f"a drift detector must be of the class that was saved; found {type(value).__name__} without "
                f"{listed(unknown)}. Create Online with the same drift=."
            )
        attributes.update({key: _restored(attributes[key], item) for key, item in state["attributes"].items()})
    return value
