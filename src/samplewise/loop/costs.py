"""What training costs: where the time went, how much memory it took, how large the gradients of each layer are."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from time import perf_counter
from typing import Any

import torch

from samplewise.step.update import Update

MOST_LAYERS = 64  # in a line of the log


class Clock:
    """Where the time since the last line of the log went: waiting for data, the phases of updates, and the rest, which
    is callbacks, checkpoints and validation. A resumed run has times of its own.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._began, self._phases = perf_counter(), defaultdict[str, float](float)

    def waiting(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches, and how long each took to come."""
        began = perf_counter()
        for batch in batches:
            self._phases["data"] += perf_counter() - began
            yield batch
            began = perf_counter()

    def add(self, update: Update) -> None:
        for phase, seconds in update.phases.items():
            self._phases[phase] += seconds

    def read(self) -> dict[str, float]:
        """Since the last time."""
        phases = dict(self._phases)
        phases["rest"] = max(0.0, perf_counter() - self._began - sum(phases.values()))
        self.start()
        return phases


def peak_memory(device: torch.device) -> int | None:
    """The most bytes so far: of an accelerator's allocator, or of this process. None where nobody tells."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


class LayerNorms:
    """Writes the norm of each layer's gradient to the log, as often as there is a line: kind "layers". A trainer with a
    run has one.
    """

    def on_update(self, trainer: Any, update: Update) -> None:
        if update.skipped or trainer.step.counters.updates % trainer.log_every:
            return
        norms = {n: _norm(p.grad) for n, p in trainer.model.named_parameters() if p.grad is not None}
        if norms:  # compiled updates leave none
            values = torch.stack([norm.float().to(trainer.device) for norm in norms.values()]).tolist()
            found = by_layer(dict(zip(norms, values, strict=True)))
            trainer.write("layers", update=trainer.step.counters.updates, norms=found)


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    norm = torch.linalg.vector_norm(gradient.coalesce().values() if gradient.is_sparse else gradient)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of what is spread over ranks


def by_layer(norms: dict[str, float], most: int = MOST_LAYERS) -> dict[str, float]:
    """Of parameters that belong to one module together; where that leaves too many, of those that contain them."""
    modules = {name: name.split(".")[:-1] for name in norms}
    depth = max(len(path) for path in modules.values())
    while depth > 1 and len({tuple(path[:depth]) for path in modules.values()}) > most:
        depth -= 1
    squares: dict[str, float] = defaultdict(float)
    for name, path in modules.items():
        squares[".".join(path[:depth]) or name] += norms[name] ** 2
    return {layer: total**0.5 for layer, total in squares.items()}
