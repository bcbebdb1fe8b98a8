"""Checks of the state of a trainer that was read from a checkpoint, before and during loading.

An intact file may still contain something else than the state of a trainer, or numbers that no trainer saves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from samplewise.errors import CheckpointError, SamplewiseError
from samplewise.loop.checkpoint.encoding import Malformed
from samplewise.loop.checkpoint.schema import (
    COUNT,
    DICT,
    LIST,
    NUMBER,
    POSITIVE,
    TENSOR,
    TEXT,
    WHOLE,
    Schema,
    check,
    maybe,
)
from samplewise.step.window import Counters

COUNTERS: Schema = {field.name: COUNT for field in fields(Counters)}
WINDOW: Schema = {"parts": DICT, "sums": DICT, "failure": LIST, "noted": LIST}
POSITION: Schema = {"batches": COUNT, "inside": COUNT, "start": COUNT, "samples": COUNT, "kind": maybe(TEXT)}
SUMS: Schema = {"loss": TENSOR, "count": TENSOR, "samples": COUNT, "skipped": COUNT, "seconds": NUMBER}
RANDOM: Schema = {"torch": TENSOR, "cuda": LIST}
TRAINER: Schema = {
    "trainer": {"epoch": COUNT, "log": COUNT, "seed": WHOLE, "used": maybe(COUNT)},
    "kinds": {"optimizer": TEXT, "scheduler": TEXT},
    "model": DICT,
    "optimizer": DICT,
    "step": {
        "counters": COUNTERS,
        "precision": {"scale": POSITIVE, "since_change": COUNT},
        "compiling": DICT,
        "dealt": [WHOLE],
        "window": WINDOW,
    },
    "running": {"lines": SUMS, "epoch": SUMS},
    "callbacks": DICT,
}
# Errors that load_state_dict of torch, of a loader or of a callback raises for a state that does not fit.
UNFIT = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError, AssertionError)


def check_resumable(path: Path, state: dict[Any, Any]) -> None:
    """Raise CheckpointError if the state was not saved by a trainer, in one process or on several ranks."""
    try:
        check(state, TRAINER)
        several = "places" in state["trainer"]
        check(state["trainer"], {"places": [POSITION]} if several else {"place": POSITION}, "trainer")
        check(state, {"randoms": [RANDOM]} if "randoms" in state else {"random": RANDOM})
        if "own" in state:
            check(state["own"], {"counters": COUNTERS, "window": WINDOW}, "own")
    except Malformed as why:
        raise CheckpointError(
            f"{path} must contain the state of a trainer; found {why}. It was written for another purpose: use an "
            "earlier checkpoint."
        ) from why


@contextmanager
def fitting(what: str) -> Iterator[None]:
    """Convert errors of loading a state into a CheckpointError that names what was being loaded."""
    try:
        yield
    except SamplewiseError:
        raise
    except UNFIT as why:
        said = str(why).strip().replace("\n\t", " ").partition("\n")[0].rstrip(".")
        raise CheckpointError(
            f"a checkpoint must fit the {what} of the run that it is loaded into; found {type(why).__name__}: {said}. "
            f"Use the {what} that the run was saved with, or start a new run directory."
        ) from why
