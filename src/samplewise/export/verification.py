"""Verification of an exported update: the file in a new process against uncompiled updates of the same samples.

The file makes 200 updates in a row. Uncompiled updates begin with each of its states, so that rounding cannot grow from
update to update, as it does with ReLU and Adam. Differences of single updates are added up: those of rounding cancel,
and a systematic error stands out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
LIMIT = 2**28  # bytes of recorded states: of large models, every n-th state is recorded
SEED = 20_240
ROUNDING = 2.0**-24
NEARBY = 16  # repetitions of a segment with parameters changed by a few roundings
AMPLIFIED = 10  # allowed multiple of the difference that these changes make
REPORT = (
    "No file was written. This is a mistake of samplewise or of a kernel of the runtime: please report it with the "
    "model."
)


@dataclass(frozen=True)
class Deviation:
    """Differences from uncompiled updates, added up over `updates` updates.

    outputs, parameters: relative to the sum of the losses, norms and weights, and of the changes of the parameters.
    rounding: number of updates in which a tensor was left out because roundings of the parameters change it as much: at
    the kink of a ReLU, or if its gradient is zero up to rounding.
    """

    updates: int
    outputs: float
    parameters: float
    rounding: int

    def __str__(self) -> str:
        text = (
            f"relative difference {self.outputs:.0e} (losses, norms, weights), {self.parameters:.0e} (parameters) in "
            f"{self.updates} updates"
        )
        return text + (f"; in {self.rounding} of them a tensor depends on rounding" if self.rounding else "")


def verify(step: Step, path: Path, program: UpdateProgram, example: Any, tolerance: float) -> Deviation:
    """Raise ExportError if the file does not make the updates of `step`; return the differences."""
    size = sum(t.nbytes for t in program.state.values())
    length = min(1 + UPDATES * size // LIMIT, UPDATES)  # updates of a segment
    batches = _batches(step, example)[: UPDATES // length * length]
    run = _in_new_process(path, program, batches, length)
    for name, value, start in zip(program.state, run.states[0], program.state.values(), strict=True):
        if not torch.equal(value, start):
            raise ExportError(
                f"the exported file must begin with the state of the step; found another {name}. {REPORT}"
            )

    uncompiled = UncompiledUpdates(step, program, batches)
    # One sum for each tensor of `segment`, in its order. A parameter may have the name of an output, such as "weight".
    sums = [DifferenceSum(name, tolerance, length) for name in (*OUTPUTS, *program.state)]
    updates = rounding = 0
    with uncompiled.running():
        for k, after in enumerate(run.states[1:]):
            before = run.states[k]
            rows = range(k * length, (k + 1) * length)
            expected = uncompiled.segment(rows, before)
            if expected is None:
                break
            outputs = [run.outputs[name][rows.start : rows.stop] for name in OUTPUTS]
            starts = [torch.zeros_like(values) for values in outputs] + before
            results = [*outputs, *after]
            unclear = [k for k, total in enumerate(sums) if not total.add(results[k], expected[k], starts[k])]
            if unclear:
                effects = uncompiled.rounding_effects(rows, before, expected)
                for k in unclear:
                    difference, allowed = _distance(results[k], expected[k]), AMPLIFIED * effects[k]
                    if not difference <= allowed:
                        raise _difference(sums[k].name, difference, allowed)
                rounding += length
            updates = rows.stop
    if updates < min(LEAST, len(batches)):
        raise ExportError(
            "the update cannot be verified: on random data near the example, uncompiled updates have a non-finite loss "
            f"or gradient after {updates}. Use another example, a smaller learning rate, or sw.clip."
        )
    for total in sums:
        total.check()
    prediction = _predict(program, run.states[1], batches[0])
    for a, b in zip(run.prediction, prediction, strict=True):
        if not _distance(a, b) <= (tolerance + 4 * ROUNDING) * _norm(b):
            raise _difference("the prediction", _distance(a, b), tolerance * _norm(b))
    output_sums, state_sums = sums[: len(OUTPUTS)], sums[len(OUTPUTS) :]
    trained = [total for total in state_sums if total.name in step._evaluator.trained.trainable()]
    return Deviation(
        updates,
        max(DifferenceSum.relative([total]) for total in output_sums),
        DifferenceSum.relative(trained),
        rounding,
    )


def _difference(name: str, difference: float, allowed: float) -> ExportError:
    return ExportError(
        f"the exported update must equal uncompiled ones; found that {name} differs by {difference:.1e}, where "
        f"{allowed:.1e} is allowed. {REPORT}"
    )


class DifferenceSum:
    """Differences of one tensor between the file and uncompiled updates, added up over segments of `length` updates."""

    def __init__(self, name: str, tolerance: float, length: int):
        self.name = name
        self._tolerance = tolerance
        self._rounding = 4 * length**0.5 * ROUNDING
        self._segments = 0
        self._size = 0.0
        self._difference: Tensor | float = 0.0
        self._change: Tensor | float = 0.0

    def add(self, a: Tensor, b: Tensor, start: Tensor) -> bool:
        """Add a - b, if it is within the tolerance, relative to b - start, or within the rounding of b."""
        a, b = a.double(), b.double()
        change = b - start.double()
        allowed = self._tolerance * _norm(change) + self._rounding * _norm(b)
        if not _norm(a - b) <= allowed:  # also if the file gives NaN
            return False
        self._segments += 1
        self._size = max(self._size, _norm(b))
        self._difference = self._difference + (a - b)
        self._change = self._change + change
        return True

    def check(self) -> None:
        """Raise ExportError if the sum is larger than the tolerance and independent roundings allow."""
        allowed = self._tolerance * _norm(self._change) + self._segments**0.5 * self._rounding * self._size
        if _norm(self._difference) > allowed:
            raise _difference(self.name, _norm(self._difference), allowed)

    @staticmethod
    def relative(sums: Sequence[DifferenceSum]) -> float:
        """Norm of all differences relative to that of all changes."""
        difference = sum(_norm(total._difference) ** 2 for total in sums) ** 0.5
        change = sum(_norm(total._change) ** 2 for total in sums) ** 0.5
        return difference / change if change else difference


def _norm(t: Tensor | float) -> float:
    return torch.as_tensor(t, dtype=torch.float64).norm().item()


def _distance(a: Tensor, b: Tensor) -> float:
    return _norm(a.double() - b.double())


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


class UncompiledUpdates:
    """Uncompiled updates of a step from any state of the program; `running` undoes them."""

    def __init__(self, step: Step, program: UpdateProgram, batches: Sequence[Any]):
        self._program = program
        self._batches = batches
        self._named = step._evaluator.trained.trainable()
        self._optimizer = step._applier.optimizer
        self._dry_run = DryRun(
            step._windows.make_accumulator(),
            step._evaluator,
            step._applier,
            step.config,
            batches[0],
            whole_update=True,
            formula=True,
        )
        states = getattr(self._optimizer, "state", {})
        self._steps = {p: float(states.get(p, {}).get("step", 0)) for p in self._named.values()}

    @contextmanager
    def running(self) -> Iterator[None]:
        with self._dry_run.without_grads(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                yield
            finally:
                self._dry_run.undo()

    def segment(self, rows: range, state: Sequence[Tensor], generator: Any = None) -> list[Tensor] | None:
        """Losses, norms and weights of the updates `rows`, and the state after them; None if one is not finite.
        generator: for a random change of the parameters by a few roundings.
        """
        self._write(rows.start, state, generator)
        outputs: list[tuple[Tensor, Tensor, Tensor]] = []
        for k in rows:
            try:
                outputs.append(_update(self._dry_run, self._batches[k]))
            except SamplewiseError:
                return None
        after = [self._value(name, t, rows.stop) for name, t in self._program.state.items()]
        return [torch.stack(values) for values in zip(*outputs, strict=True)] + after

    def rounding_effects(self, rows: range, state: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
        """Largest changes of the results of a segment if the parameters are changed by a few roundings."""
        generator = torch.Generator().manual_seed(SEED)
        effects = [0.0] * len(expected)
        for _ in range(NEARBY):
            nearby = self.segment(rows, state, generator) or expected
            effects = [max(effect, _distance(a, b)) for effect, a, b in zip(effects, nearby, expected, strict=True)]
        return effects

    @torch.no_grad()
    def _write(self, updates: int, state: Sequence[Tensor], generator: Any) -> None:
        """Set parameters and optimizer to a state of the program after `updates` updates."""
        if updates == 0:  # an optimizer may have no state yet
            self._dry_run.undo()
        for name, value in zip(self._program.state, state, strict=True):
            if name in self._named:
                p = self._named[name]
                p.copy_(value)
                if generator is not None:
                    p.mul_(1 + 4 * ROUNDING * (2 * torch.rand(p.shape, generator=generator) - 1))
            elif updates:
                _, key, owner = name.split(".", 2)
                if key != "step":
                    self._optimizer.state[self._named[owner]][key].copy_(value)
        for p, start in self._steps.items():
            if updates and "step" in getattr(self._optimizer, "state", {}).get(p, ()):
                self._optimizer.state[p]["step"].fill_(start + updates)

    def _value(self, name: str, start: Tensor, updates: int) -> Tensor:
        """Current value of an entry of the program's state."""
        if name in self._named:
            return self._named[name].detach().clone()
        _, key, owner = name.split(".", 2)
        if key == "step":
            return start + updates
        value: Tensor = self._optimizer.state[self._named[owner]][key]
        return value.clone()


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


def _predict(program: UpdateProgram, state: Sequence[Tensor], batch: Any) -> list[Tensor]:
    if program.predict is None:
        return []
    inputs = inputs_of(batch)
    return program.predict(state, list(program.constants.values()), *(inputs[name] for name in program.predict.inputs))


# --- a new process ----------------------------------------------------------------------------------------------------

RUN = "import sys; from samplewise.export.verification import replay; replay(*sys.argv[1:])"


@dataclass
class FileRun:
    """Results of consecutive updates of a file: outputs (updates, ...) by name, the states before the first one and
    after each segment, and a prediction after the first segment.
    """

    outputs: dict[str, Tensor]
    states: list[list[Tensor]]
    prediction: list[Tensor]


def _in_new_process(path: Path, program: UpdateProgram, batches: Sequence[Any], length: int) -> FileRun:
    """Updates and a prediction of the file."""
    rows = [list(inputs_of(batch).values()) for batch in batches]
    first = inputs_of(batches[0])
    inputs = None if program.predict is None else [first[name] for name in program.predict.inputs]
    job = path.parent / "job.pt"
    answer = path.parent / "answer.pt"
    torch.save({"rows": rows, "length": length, "predict": inputs, "threads": torch.get_num_threads()}, job)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", RUN, str(path), str(job), str(answer)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    if process.returncode or not answer.exists():
        lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
        raise ExportError(f"the exported file must run in a new process; found: {lines[-1]}. No file was written.")
    return FileRun(**torch.load(answer, weights_only=True))


def replay(path: str, job: str, answer: str) -> None:
    """Run the updates of a job with a file and save their results; called in the new process."""
    work = torch.load(job, weights_only=True)
    torch.set_num_threads(work["threads"])
    loaded = load_update(path)
    states = [list(loaded.get_state().values())]
    results = []
    prediction: Any = []
    for k, row in enumerate(work["rows"], 1):
        results.append(loaded.update(*row))
        if k % work["length"] == 0:
            states.append(list(loaded.get_state().values()))
        if k == work["length"] and work["predict"] is not None:
            prediction = loaded.predict(*work["predict"])
    torch.save(
        {
            "outputs": {name: torch.stack([getattr(result, name) for result in results]) for name in OUTPUTS},
            "states": states,
            "prediction": [prediction] if isinstance(prediction, Tensor) else list(prediction),
        },
        answer,
    )
