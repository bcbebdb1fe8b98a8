"""Profiling of a training: time per phase, peak memory and gradient norms per layer."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from time import perf_counter
from typing import Any

import torch

from samplewise.step.update import Update

MOST_LAYERS = 64  # maximum number of layers in a log line


class PhaseTimer:
    """Seconds per phase since the last log line: "data" (waiting for the loader), the phases of updates, and "rest"
    (callbacks, checkpoints and validation). The times are not saved in checkpoints.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._began = perf_counter()
        self._phases = defaultdict[str, float](float)

    def waiting(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches and add the time that the loader takes for each to "data"."""
        began = perf_counter()
        for batch in batches:
            self._phases["data"] += perf_counter() - began
            yield batch
            began = perf_counter()

    def add(self, update: Update) -> None:
        for phase, seconds in update.phases.items():
            self._phases[phase] += seconds

    def read(self) -> dict[str, float]:
        """Return seconds per phase since the last call of `start` or `read`, and restart the timer."""
        phases = dict(self._phases)
        phases["rest"] = max(0.0, perf_counter() - self._began - sum(phases.values()))
        self.start()
        return phases


def peak_memory(device: torch.device) -> int | None:
    """Return the peak memory in bytes: of the CUDA allocator, or of this process for other devices.

    None on Windows without CUDA.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


class LayerGradNorms:
    """Write the gradient norm of each layer to the log every `log_every` updates, in lines of kind "layers".

    A Trainer with a run directory adds this callback.
    """

    def on_update(self, trainer: Any, update: Update) -> None:
        if update.skipped or trainer.step.counters.updates % trainer.log_every:
            return
        norms = {n: _norm(p.grad) for n, p in trainer.model.named_parameters() if p.grad is not None}
        if norms:  # empty after a compiled update
            values = torch.stack([norm.float().to(trainer.device) for norm in norms.values()]).tolist()
            found = by_layer(dict(zip(norms, values, strict=True)))
            trainer.write("layers", update=trainer.step.counters.updates, norms=found)


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    norm = torch.linalg.vector_norm(values)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # a DTensor, if the parameter is sharded


def by_layer(norms: dict[str, float], most: int = MOST_LAYERS) -> dict[str, float]:
    """Return the joint norm of the parameters of each module.

    If there are more than `most` modules, they are merged into the modules that contain them.
    """
    modules = {name: name.split(".")[:-1] for name in norms}
    depth = max(len(path) for path in modules.values())
    while depth > 1 and len({tuple(path[:depth]) for path in modules.values()}) > most:
        depth -= 1
    squares: dict[str, float] = defaultdict(float)
    for name, path in modules.items():
        squares[".".join(path[:depth]) or name] += norms[name] ** 2
    return {layer: total**0.5 for layer, total in squares.items()}
