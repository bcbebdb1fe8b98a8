"""Verification of an exported update: the file in a new process against uncompiled updates of the same samples.

Rounding grows over many updates, with ReLU or Adam by much. A second sequence of uncompiled updates, whose parameters
start with a relative difference of 2^-24, shows by how much: this difference is allowed in addition.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samplewise.core.batches import map_leaves
from samplewise.core.losses import Criterion
from samplewise.core.state import random_state_restored
from samplewise.errors import ExportError, NonFiniteGradientError, SamplewiseError
from samplewise.export.graph import OUTPUTS, UpdateProgram, inputs_of, norms_of, weights_of
from samplewise.export.runtime import load_update
from samplewise.step.compiled.verify import DryRun
from samplewise.step.step import Step
from samplewise.step.window import Window

UPDATES = 200
LEAST = 10  # updates that must be finite
SEED = 20_240
ROUNDING = 2.0**-24
AMPLIFIED = 10  # allowed multiple of the difference that rounding the parameters once makes


@dataclass(frozen=True)
class Deviation:
    """Largest relative differences from uncompiled updates, after `updates` updates.

    outputs: of losses, norms and weights. parameters: of all parameters. rounding: of the parameters of two sequences
    of uncompiled updates that start one rounding apart.
    """

    updates: int
    outputs: float
    parameters: float
    rounding: float

    def __str__(self) -> str:
        return (
            f"relative difference after {self.updates} updates {self.outputs:.0e} (losses, norms, weights), "
            f"{self.parameters:.0e} (parameters); one rounding of the parameters makes {self.rounding:.0e}"
        )


@dataclass
class Trajectory:
    """Results of consecutive updates: outputs (updates, ...) by name, the state after them, and a prediction."""

    outputs: dict[str, Tensor]
    state: list[Tensor]
    prediction: list[Tensor]


def verify(step: Step, path: Path, program: UpdateProgram, example: Any, tolerance: float) -> Deviation:
    """Raise ExportError if the file does not make the updates of `step`; return the differences."""
    batches = _batches(step, example)
    expected = _uncompiled(step, program, batches, rounded=False)
    rounded = _uncompiled(step, program, batches, rounded=True)
    updates = len(expected.outputs["loss"])
    names = list(program.state)
    if updates < min(LEAST, len(batches)):
        raise ExportError(
            "the update cannot be verified: on random data near the example, uncompiled updates have a non-finite loss "
            f"or gradient after {updates}. Use another example, a smaller learning rate, or sw.clip."
        )
    found = _in_new_process(path, program, batches[:updates])
    outputs = [
        Comparison(name, found.outputs[name], b, rounded.outputs[name][:updates])
        for name, b in expected.outputs.items()
    ]
    states = [
        Comparison(*values)
        for values in zip(names, found.state, expected.state, rounded.state, program.state.values(), strict=True)
    ]
    predictions = zip(found.prediction, expected.prediction, rounded.prediction, strict=True)
    for comparison in (*outputs, *states, *(Comparison("the prediction", *values) for values in predictions)):
        comparison.check(tolerance, updates)
    parameters = [c for c in states if c.name in step._evaluator.trained.trainable()]
    a, b, c = (torch.cat([getattr(p, part).flatten() for p in parameters]) for part in ("found", "expected", "rounded"))
    return Deviation(updates, max(_relative(o.found, o.expected) for o in outputs), _relative(a, b), _relative(c, b))


@dataclass
class Comparison:
    """A tensor of the file, of uncompiled updates, and of those that start one rounding apart. start: its value before
    the updates.
    """

    name: str
    found: Tensor
    expected: Tensor
    rounded: Tensor
    start: Tensor | None = None

    def check(self, tolerance: float, updates: int) -> None:
        """Raise ExportError unless the difference is within the tolerance, or explained by rounding."""
        size = _norm(self.expected)
        change = size if self.start is None else _distance(self.expected, self.start)
        noise = AMPLIFIED * _distance(self.expected, self.rounded) + updates**0.5 * ROUNDING * size
        difference = _distance(self.found, self.expected)
        if not difference <= tolerance * change + noise:  # also if the file gives NaN
            raise ExportError(
                f"the exported update must equal uncompiled ones; found that {self.name} differs by {difference:.1e} "
                f"after {updates} updates, where {tolerance * change + noise:.1e} is allowed. No file was written. "
                "This is a mistake of samplewise or of a kernel of the runtime: please report it with the model."
            )


def _norm(t: Tensor) -> float:
    return t.double().norm().item()


def _distance(a: Tensor, b: Tensor) -> float:
    return _norm(a.double() - b.double())


def _relative(a: Tensor, b: Tensor) -> float:
    """Distance relative to the norm of b."""
    size = _norm(b)
    return _distance(a, b) / size if size else _distance(a, b)


# --- samples ----------------------------------------------------------------------------------------------------------


def _batches(step: Step, example: Any) -> list[Any]:
    """Random batches near the example: floats have its spread, labels of a criterion are any class, and other integers
    are between zero and those of the example.
    """
    generator = torch.Generator().manual_seed(SEED)
    classes = _classes(step, example)

    def near(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_floating_point():
            spread = leaf.std().item() if leaf.numel() > 1 else 0.0
            noise = torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)
            return leaf.detach() + noise * (spread or 1.0)
        if leaf.dtype not in (torch.int64, torch.int32):
            return leaf
        is_label = classes is not None and leaf is example[1]
        limit = classes if is_label else int(leaf.max()) + 1
        values = torch.randint(0, max(limit or 1, 1), leaf.shape, generator=generator, dtype=leaf.dtype)
        return torch.where(leaf < 0, leaf, values)  # negative labels are ignored by criteria

    return [map_leaves(example, near) for _ in range(UPDATES)]


def _classes(step: Step, example: Any) -> int | None:
    """Number of classes of a criterion with class indices; None for other loss functions."""
    criterion = step.loss_fn
    is_pair = isinstance(example, (tuple, list)) and len(example) == 2 and isinstance(example[1], Tensor)
    if not isinstance(criterion, Criterion) or not is_pair or example[1].is_floating_point():
        return None
    with torch.no_grad(), random_state_restored():
        logits = step.model(example[0])
    return logits.shape[1] if isinstance(logits, Tensor) and logits.dim() > 1 else None


# --- uncompiled updates -----------------------------------------------------------------------------------------------


def _uncompiled(step: Step, program: UpdateProgram, batches: Sequence[Any], rounded: bool) -> Trajectory:
    """Updates of the step, which are undone. rounded: from parameters of which half are rounded to their neighbors."""
    applier = step._applier
    evaluator = step._evaluator
    accumulator = step._windows.make_accumulator()
    dry_run = DryRun(accumulator, evaluator, applier, step.config, batches[0], whole_update=True, formula=True)
    named = evaluator.trained.trainable()
    outputs: dict[str, list[Tensor]] = {name: [] for name in OUTPUTS}
    with dry_run.without_grads(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if rounded:
                _round(list(named.values()))
            for batch in batches:
                try:
                    results = _update(dry_run, batch)
                except SamplewiseError:
                    break
                for name, values in zip(OUTPUTS, results, strict=True):
                    outputs[name].append(values)
            state = [_state(step, name, tensor, len(outputs["loss"])) for name, tensor in program.state.items()]
            prediction = _predict(program, state, batches[0])
        finally:
            dry_run.undo()
    rows = {name: torch.stack(values) if values else torch.zeros(0) for name, values in outputs.items()}
    return Trajectory(rows, state, prediction)


def _update(dry_run: DryRun, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Make one uncompiled update and return losses, norms and weights."""
    dry_run.microbatch = batch
    trained = dry_run.evaluator.trained
    trained.clear()
    dry_run.accumulator.begin()
    with torch.enable_grad():
        (stats,) = dry_run.accumulator.add([batch], 0)
    window = Window(dry_run.config, parts=[stats], samples=len(stats))
    dry_run.applier.divide(window)
    norm = norms_of(stats)
    if norm is None:
        norm = torch.stack([g.norm() for g in trained.gradients()]).norm().reshape(1)
    if not bool(stats.losses.isfinite().all() and norm.isfinite().all()):
        raise NonFiniteGradientError("this update is not finite")
    dry_run.applier.clip(window)
    dry_run.applier.optimizer.step()
    return stats.losses.clone(), norm.clone(), weights_of(stats).clone()


@torch.no_grad()
def _round(parameters: Sequence[Tensor]) -> None:
    generator = torch.Generator().manual_seed(SEED)
    for p in parameters:
        neighbor = torch.nextafter(p, torch.full_like(p, torch.inf))
        p.copy_(torch.where(torch.rand(p.shape, generator=generator) < 0.5, neighbor, p))


def _state(step: Step, name: str, start: Tensor, updates: int) -> Tensor:
    """Value of an entry of the program's state after uncompiled updates."""
    named = step._evaluator.trained.trainable()
    if name in named:
        return named[name].detach().clone()
    _, key, owner = name.split(".", 2)
    if key == "step":
        return start + updates
    state = step._applier.optimizer.state
    value: Tensor = state[named[owner]][key]
    return value.clone()


def _predict(program: UpdateProgram, state: Sequence[Tensor], batch: Any) -> list[Tensor]:
    if program.predict is None:
        return []
    inputs = inputs_of(batch)
    return program.predict(state, list(program.constants.values()), *(inputs[name] for name in program.predict.inputs))


# --- a new process ----------------------------------------------------------------------------------------------------

RUN = "import sys; from samplewise.export.verification import replay; replay(*sys.argv[1:])"


def _in_new_process(path: Path, program: UpdateProgram, batches: Sequence[Any]) -> Trajectory:
    """Updates and a prediction of the file."""
    rows = [list(inputs_of(batch).values()) for batch in batches]
    first = inputs_of(batches[0])
    inputs = None if program.predict is None else [first[name] for name in program.predict.inputs]
    job = path.parent / "job.pt"
    answer = path.parent / "answer.pt"
    torch.save({"rows": rows, "predict": inputs, "threads": torch.get_num_threads()}, job)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", RUN, str(path), str(job), str(answer)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    if process.returncode or not answer.exists():
        lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
        raise ExportError(f"the exported file must run in a new process; found: {lines[-1]}. No file was written.")
    results = torch.load(answer)
    return Trajectory(**results)


def replay(path: str, job: str, answer: str) -> None:
    """Run the updates of a job with a file and save their results; called in the new process."""
    work = torch.load(job)
    torch.set_num_threads(work["threads"])
    loaded = load_update(path)
    results = [loaded.update(*row) for row in work["rows"]]
    prediction: Any = [] if work["predict"] is None else loaded.predict(*work["predict"])
    torch.save(
        {
            "outputs": {name: torch.stack([getattr(result, name) for result in results]) for name in OUTPUTS},
            "state": list(loaded.get_state().values()),
            "prediction": [prediction] if isinstance(prediction, Tensor) else list(prediction),
        },
        answer,
    )
