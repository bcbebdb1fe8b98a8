"""Replay of a recorded run: the state before each update, and what the update was computed from.

The first pass writes a snapshot every `every` updates, a checkpoint of the trainer in a directory. `segment(update)`
then repeats the segment of the run that ends with an update. Both are calls of `Trainer.fit`, so that order,
augmentation, dropout, learning rates and windows are those of the run, as after a resume.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samplewise.core.batches import leaves, pick
from samplewise.core.state import RandomState, seed_everything
from samplewise.core.text import listed, plural
from samplewise.errors import BatchError, CheckpointError
from samplewise.loop.checkpoint import io
from samplewise.loop.checkpoint.directory import FOLDER, Checkpoints, newest_checkpoint, newest_first
from samplewise.loop.checkpoint.state import check_compatible, check_trainer_state
from samplewise.loop.data.resume_check import differences, join_words
from samplewise.loop.trainer import Trainer
from samplewise.step.accumulate import Accumulator, AccumulatorWrapper
from samplewise.step.compiled.optim import Formula
from samplewise.step.step import Step
from samplewise.step.update import Update
from samplewise.step.window_builder import WindowBuilder
from samplewise.transforms.stats import SampleStats
from samplewise.transforms.weight import weight

MEMORY = 2**28  # bytes of the records of a segment, by default
RANDOM_BYTES = 2**15  # of a random state, about
SAVE_EVERY = 60.0  # seconds between two saves of a pass that only has to be continued


@dataclass(frozen=True)
class Microbatch:
    """Microbatch of an update.

    ids      indices of its samples in the dataset, (B,)
    start    position of its first sample in the window
    random   random state before the call of the loss function
    """

    batch: Any
    ids: Tensor
    start: int
    epoch: int
    random: RandomState


@dataclass(frozen=True)
class TrainingState:
    """State between two updates.

    parameters  name -> tensor
    optimizer   (name of the parameter, name of the state) -> tensor; those that the optimizer has not made yet are zero
    groups      settings of each parameter group, and number of updates that each of its parameters has had, by name
    """

    parameters: dict[str, Tensor]
    optimizer: dict[tuple[str, str], Tensor]
    groups: list[tuple[dict[str, Any], dict[str, float]]]

    @classmethod
    def of(cls, step: Step, formula: Formula) -> TrainingState:
        """Copy of the current state of a step."""
        named = step._evaluator.trained.named
        names = {id(p): name for name, p in named.items()}
        states = getattr(step.optimizer, "state", {})
        optimizer: dict[tuple[str, str], Tensor] = {}
        groups = []
        for group in step.optimizer.param_groups:
            steps = {}
            for p in group["params"]:
                state = states.get(p, {})
                for key in formula.states(group):
                    value = state.get(key)
                    value = torch.zeros_like(p) if value is None else value
                    optimizer[names[id(p)], key] = value.detach().clone()
                # SGD keeps no number of updates, but its first one differs from the others.
                steps[names[id(p)]] = float(state.get("step", state.get("momentum_buffer") is not None))
            groups.append(({name: value for name, value in group.items() if name != "params"}, steps))
        return cls({name: p.detach().clone() for name, p in named.items()}, optimizer, groups)


@dataclass(frozen=True)
class UpdateRecord:
    """Update number `number`, counted from 0: its microbatches, and the states before and after it."""

    number: int
    microbatches: list[Microbatch]
    before: TrainingState
    after: TrainingState

    @property
    def nbytes(self) -> int:
        """Memory of the record, without `after`, which the next one has as well."""
        batches = [leaf for part in self.microbatches for leaf in leaves(part.batch) if isinstance(leaf, Tensor)]
        tensors = [*self.before.parameters.values(), *self.before.optimizer.values(), *batches]
        return sum(tensor.nbytes for tensor in tensors) + RANDOM_BYTES * len(self.microbatches)


class Replay:
    """Replay of the run in the directory `run`, as a callback of its trainer. directory: of the snapshots. every:
    updates between two of them.

    records        of consecutive updates, since the last snapshot or the start of a segment
    microbatches   of the current window
    """

    def __init__(
        self,
        run: Path,
        final: dict[str, Any],
        step: Step,
        loader: Iterable[Any],
        samples: int,
        formula: Formula,
        directory: Path,
        every: int | None,
        device: str | torch.device,
        weights: Tensor | None = None,
    ):
        """final: state in the newest checkpoint of the run. step: new, see `new_step`. samples: of the dataset.
        weights: of these samples, for a run that differs from the recorded one by them; its updates are not recorded
        """
        self.step = step
        self.updates: int = final["step"]["counters"]["updates"]
        self.records: list[UpdateRecord] = []
        self.microbatches: list[Microbatch] = []
        self._run = run
        self._final = final
        self._loader = loader
        self._formula = formula
        self._weights = weights
        self._directory = directory
        self._every = every
        self._start: Path | None = None  # checkpoint from which the next fit starts; None: the step as it is
        self._saved = time.monotonic()
        self._progress: Callable[[], None] | None = None  # called after each update of the first pass; None in others
        self._random = RandomState()  # at the start of the run
        self._buffers = {name: buffer.clone() for name, buffer in step.model.named_buffers()}
        self._trainer = Trainer(step, None, [self], device=device, seed=final["trainer"]["seed"], progress=False)
        if weights is None:
            windows = step._windows
            windows._accumulator = RecordingAccumulator(windows._accumulator, self, windows, samples)

    @property
    def device(self) -> torch.device:
        return self._trainer.device

    def first_pass(self, progress: Callable[[], None]) -> None:
        """Repeat the whole run, or its rest after the newest snapshot, and compare its end with that of the run, unless
        it has other weights.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        checkpoints = newest_first(self._directory)
        checkpoints += [(update, path) for update, path in newest_first(self._run / FOLDER) if update == 0]
        self._progress = progress
        self._fit(checkpoints[0][1] if checkpoints else None, self.updates)
        self._progress = None
        if self._weights is None:
            self._check_end()

    def segment(self, update: int) -> list[UpdateRecord]:
        """Records of the segment of the run that ends with this number of updates."""
        start, path = next((n, path) for n, path in newest_first(self._directory) if n < update)
        if not self.records or (self.records[0].number, self.records[-1].number) != (start, update - 1):
            self._fit(path, update)
        records = self.records
        self.records = []
        return records

    def _fit(self, start: Path | None, updates: int) -> None:
        """Train from a checkpoint, or from the step as it is, up to a number of updates."""
        self._start = start
        result = self._trainer.fit(self._loader, updates=updates)
        if self.step.counters.updates != updates:
            if result.signal is not None:
                raise KeyboardInterrupt(f"sw.metagradient was {result.reason}; the same call continues")
            raise CheckpointError(
                f"the replay must make the {plural(updates, 'update')} of the run; found that it ended after "
                f"{self.step.counters.updates}: {result.reason}. Pass the loader of the run."
            )

    def on_fit_start(self) -> None:
        trainer = self._trainer
        trainer._run_state.start()
        check_compatible(self._final, trainer._run_state._parts(), trainer.seed)
        assert trainer._loader is not None
        for saved in (self._final["trainer"].get("data") or [])[:1]:
            if changes := differences(saved, trainer._loader.data):
                raise CheckpointError(f"loader must be that of the run; found {join_words(changes)}.")
        if self._start is None:
            self._random.restore()
        else:
            state = io.read_for_rank(self._start)
            check_trainer_state(self._start, state)
            trainer._load(state)
        if self._weights is not None:  # after the state, in which they are not a setting of the run
            weights = self._weights.to(next(iter(self.step._evaluator.trained.named.values())))
            self.step.transforms = [self.step.transforms, weight(weights, index="id")]
            return
        self.records = []
        self._state = TrainingState.of(self.step, self._formula)
        self._snapshot()

    def on_update(self, update: Update) -> None:
        if update.skipped:
            return
        if self._weights is None:
            before = self._state
            self._state = TrainingState.of(self.step, self._formula)
            self.records.append(UpdateRecord(update.index, self.microbatches, before, self._state))
            self._snapshot()
        elif time.monotonic() > self._saved + SAVE_EVERY:  # one snapshot, to continue after an interruption
            state, rank_state = self._trainer._state(0)
            Checkpoints(self._directory, keep=1).save(state, self.step.counters.updates, rank_state)
            self._saved = time.monotonic()
        if self._progress is not None:
            self._progress()

    def _snapshot(self) -> None:
        """In the first pass, write a snapshot at the start and every `every` updates."""
        done = self.step.counters.updates
        if self._every is None and self.records:  # after the first update, whose size is known
            self._every = max(math.isqrt(self.updates - 1) + 1, MEMORY // self.records[0].nbytes)
        if self._progress is not None and done < self.updates and done % (self._every or self.updates) == 0:
            io.write(self._directory / f"update-{done:09d}.ckpt", *self._trainer._state(0))
            self.records = []

    def _check_end(self) -> None:
        """Raise if updates change buffers, or if the parameters differ from those of the run by more than rounding."""
        buffers = dict(self.step.model.named_buffers())
        changed = [n for n, start in self._buffers.items() if not torch.equal(start, buffers[n].to(start.device))]
        if changed:  # queries may depend on them, which is not differentiated
            raise ValueError(
                f"sw.metagradient needs buffers that updates leave alone; found changed: {listed(changed)}."
            )
        off = size = 0.0
        for name, value in self._trainer.model.state_dict().items():
            saved = self._final["model"].get(name, value)  # save="trained" leaves frozen ones out
            off += (value.double() - saved.to(value.device)).square().sum().item()
            size += saved.double().square().sum().item()
        dtype = next(iter(self._state.parameters.values())).dtype
        if not off**0.5 <= math.sqrt(torch.finfo(dtype).eps) * size**0.5:
            raise CheckpointError(
                f"the replay differs from the recorded run: after {plural(self.updates, 'update')} its parameters must "
                f"be those of the newest checkpoint, up to rounding; found a difference of norm {off**0.5:.2g}, of "
                f"parameters of norm {size**0.5:.2g}. make_step() must return the step as it was before fit, with the "
                "same initial parameters: call torch.manual_seed inside make_step, as the script did. Callbacks that "
                "change settings are not repeated."
            )


class RecordingAccumulator(AccumulatorWrapper):
    """Accumulator that records its microbatches."""

    def __init__(self, inner: Accumulator, replay: Replay, windows: WindowBuilder, samples: int):
        super().__init__(inner)
        self._replay = replay
        self._windows = windows
        self._samples = samples

    @property
    def divided(self) -> bool:  # type: ignore[override]
        return self._inner.divided

    def add(self, microbatches: Any, start: int, divide: bool = False) -> list[SampleStats]:
        [batch] = microbatches
        if start == 0:  # tail="drop" may have left out samples of the last window
            self._replay.microbatches = []
        ids = self._ids(batch)
        self._replay.microbatches.append(Microbatch(batch, ids, start, self._windows.counters.epochs, RandomState()))
        return self._inner.add(microbatches, start, divide)

    def _ids(self, batch: Any) -> Tensor:
        ids = pick(batch, "id")
        integers = isinstance(ids, Tensor) and ids.dtype is torch.int64
        if not integers or not 0 <= int(ids.min()) <= int(ids.max()) < self._samples:
            kind = f"{int(ids.min())} to {int(ids.max())}" if integers else type(ids).__name__
            raise BatchError(
                f"'id' in the batch must be the index of each sample in the dataset, 0 to {self._samples - 1}; found "
                f"{kind}. Wrap the dataset: DataLoader(sw.Indexed(dataset), ...)."
            )
        return ids.cpu()


def newest_state(run: Path) -> dict[str, Any]:
    """State of the newest checkpoint of a run."""
    newest = newest_checkpoint(run / FOLDER, io.read_for_rank) if (run / FOLDER).is_dir() else None
    if newest is None:
        raise CheckpointError(
            f"run must be the directory of a run with checkpoints; found none in {run}. Train with "
            "sw.Trainer(step, run)."
        )
    state, path = newest
    check_trainer_state(path, state)
    return state


def new_step(make_step: Callable[[], Step], seed: int) -> Step:
    """Step of the beginning of a run. The caller restores the random state."""
    seed_everything(seed)
    step = make_step()
    if not isinstance(step, Step):
        raise TypeError(f"make_step() must return a sw.Step with a new model; found {type(step).__name__}.")
    return step
