"""Damping of a curvature from the length of a training run, which need not be tuned.

After t updates of gradient descent with learning rate r, the parameters have moved along an eigenvector of eigenvalue h
by (1 - (1 - r h)^t) of the way to the minimum, which is about h / (h + 1 / (r t)): training for a limited time acts
like damping of 1 / (r t). Momentum m multiplies the learning rate by 1 / (1 - m), and weight decay adds to h.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from samplewise.core.files import absolute
from samplewise.errors import CheckpointError
from samplewise.loop.checkpoint.directory import FOLDER, load_checkpoint
from samplewise.report.run_log import read_run

REMEDY = "Pass damping= in place of run=."


@dataclass(frozen=True)
class RunDamping:
    """Damping (1 - momentum) / (learning rate * updates) + weight decay of a training with SGD.

    learning_rate: mean over the updates, from the log of the run
    """

    learning_rate: float
    updates: int
    momentum: float = 0.0
    weight_decay: float = 0.0

    @property
    def value(self) -> float:
        return (1 - self.momentum) / (self.learning_rate * self.updates) + self.weight_decay

    @classmethod
    def of(cls, run: str | os.PathLike[str]) -> RunDamping:
        """Damping for a run directory, at its newest checkpoint, or for one of its checkpoints."""
        path = absolute(run)
        state = load_checkpoint(path)
        optimizer = state.get("classes", {}).get("optimizer")
        groups = state.get("optimizer", {}).get("param_groups", [])
        settings = {tuple(group.get(name, 0) for name in ("lr", "momentum", "weight_decay")) for group in groups}
        if optimizer != "SGD" or len(settings) != 1 or any(group.get("dampening") for group in groups):
            found = f"{len(settings)} groups of parameters with different settings" if len(settings) > 1 else optimizer
            raise CheckpointError(
                "run= needs a training with SGD, one learning rate and no dampening, for which damping is 1 / "
                f"(learning rate * updates); found {found} in {path}. {REMEDY}"
            )
        updates = state.get("step", {}).get("counters", {}).get("updates", 0)
        ((last_rate, momentum, weight_decay),) = settings
        rate = _mean_rate(path.parent.parent if path.parent.name == FOLDER else path, updates, last_rate)
        if not (updates and rate > 0 and 0 <= momentum < 1):
            raise CheckpointError(
                f"run= needs a training with updates and a learning rate above 0; found {updates} updates with a mean "
                f"learning rate of {rate} and momentum {momentum} in {path}. {REMEDY}"
            )
        return cls(rate, updates, momentum, weight_decay)

    def __str__(self) -> str:
        momentum = f"(1 - momentum {self.momentum:g})" if self.momentum else "1"
        decay = f" + weight decay {self.weight_decay:g}" if self.weight_decay else ""
        return f"{momentum} / (learning rate {self.learning_rate:.3g} * {self.updates:,} updates){decay}"


def _mean_rate(directory: Path, updates: int, last_rate: float) -> float:
    """Mean learning rate of the updates, by linear interpolation of the logged ones; the last one without a log."""
    if not (directory / "log.jsonl").is_file():
        return last_rate
    curves = read_run(directory).learning_rates()
    points = [(x, rate) for x, rate in (curves[0].points if curves else []) if 0 < x <= updates]
    if not points:
        return last_rate
    points = [(0.0, points[0][1]), *points, (float(updates), points[-1][1])]
    return sum((x - before) * (rate + other) / 2 for (before, other), (x, rate) in pairwise(points)) / updates
