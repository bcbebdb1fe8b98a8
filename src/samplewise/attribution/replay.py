"""Replay of a recorded run: the state before each update, and what the update was computed from.

The first pass writes a snapshot every `every` updates, a checkpoint of the trainer in a directory. `records(update)`
then repeats the segment of the run that ends with an update. Both are calls of `Trainer.fit`, so that order,
augmentation, dropout, learning rates and windows are those of the run, as after a resume.
"""

from __future__ import annotations

import math
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
from samplewise.loop.checkpoint.directory import FOLDER, newest_checkpoint, newest_first
from samplewise.loop.checkpoint.state import check_compatible, check_trainer_state
from samplewise.loop.data.resume_check import differences, join_words
from samplewise.loop.trainer import Trainer
from samplewise.step.accumulate import Accumulator, AccumulatorWrapper
from samplewise.step.compiled.optim import Formula
from samplewise.step.step import Step
from samplewise.step.update import Update
from samplewise.step.window_builder import WindowBuilder
from samplewise.transforms.stats import SampleStats

MEMORY = 2**28  # bytes of the records of a segment, by default
RANDOM_BYTES = 2**15  # of a random state, about


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
class Group:
    """Parameter group of the optimizer. steps: number of updates that each parameter has had, name -> number."""

    settings: dict[str, Any]
    steps: dict[str, float]


@dataclass(frozen=True)
class TrainingState:
    """State between two updates.

    parameters  name -> tensor
    optimizer   (name of the parameter, name of the state) -> tensor; those that the optimizer has not made yet are zero
    """

    parameters: dict[str, Tensor]
    optimizer: dict[tuple[str, str], Tensor]
    groups: list[Group]

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
                # SGD keeps no number of updates: its first one differs from the others, see `new_state`.
                steps[names[id(p)]] = float(state.get("step", state.get("momentum_buffer") is not None))
            groups.append(Group({name: value for name, value in group.items() if name != "params"}, steps))
        return cls({name: p.detach().clone() for name, p in named.items()}, optimizer, groups)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.parameters.values(), *self.optimizer.values()))


@dataclass(frozen=True)
class UpdateRecord:
    """Update number `number`, counted from 0: its microbatches, and the states before and after it."""

    number: int
    microbatches: list[Microbatch]
    before: TrainingState
    after: TrainingState


class Replay:
    """Replay of the run in the directory `run`. directory: of the snapshots. every: updates between two snapshots."""

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
    ):
        """final: state in the newest checkpoint of the run. step: new, see `new_step`. samples: of the dataset."""
        self.step = step
        self.updates: int = final["step"]["counters"]["updates"]
        self._run = run
        self._final = final
        self._loader = loader
        self._directory = directory
        self._every = every
        self._random = RandomState()  # at the start of the run
        self._buffers = {name: buffer.clone() for name, buffer in step.model.named_buffers()}
        self._recorder = Recorder(step, formula)
        seed = final["trainer"]["seed"]
        self._trainer = Trainer(step, None, [self._recorder], device=device, seed=seed, progress=False)
        windows = step._windows
        windows._accumulator = RecordingAccumulator(windows._accumulator, self._recorder, windows, samples)

    @property
    def device(self) -> torch.device:
        return self._trainer.device

    def first_pass(self, on_update: Callable[[], None]) -> None:
        """Repeat the whole run, or its rest after the newest snapshot, and compare its end with that of the run."""
        snapshots = newest_first(self._directory)
        first = [path for update, path in newest_first(self._run / FOLDER) if update == 0]
        start = snapshots[0][1] if snapshots else next(iter(first), None)

        def snapshot() -> None:
            every = self._every or self._default_every()
            if self._done % every == 0 and self._done < self.updates:
                io.write(self._directory / f"update-{self._done:09d}.ckpt", *self._trainer._state(0))
                self._recorder.records.clear()

        def after_update() -> None:
            snapshot()
            on_update()

        self._fit(start, self.updates, after_update, on_start=snapshot)
        self._check_buffers()
        self._compare()

    def records(self, update: int) -> list[UpdateRecord]:
        """Records of the segment of the run that ends with this number of updates."""
        records = self._recorder.records
        start, path = next((n, path) for n, path in newest_first(self._directory) if n < update)
        if not records or (records[0].number, records[-1].number) != (start, update - 1):
            self._fit(path, update)
        segment = list(records)
        records.clear()
        return segment

    @property
    def _done(self) -> int:
        return self.step.counters.updates

    def _fit(
        self,
        start: Path | None,
        updates: int,
        on_update: Callable[[], None] = lambda: None,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        """Train from a checkpoint, or from the step as it is, up to a number of updates."""

        def begin() -> None:
            trainer = self._trainer
            trainer._run_state.start()
            check_compatible(self._final, trainer._run_state._parts(), trainer.seed)
            self._check_loader()
            if start is None:
                self._random.restore()
            else:
                state = io.read_for_rank(start)
                check_trainer_state(start, state)
                trainer._load(state)
            on_start()

        self._recorder.prepare(begin, on_update)
        result = self._trainer.fit(self._loader, updates=updates)
        if self._done != updates:
            if result.signal is not None:
                raise KeyboardInterrupt(f"sw.metagradient was {result.reason}; the same call continues")
            raise CheckpointError(
                f"the replay must make the {plural(updates, 'update')} of the run; found that it ended after "
                f"{self._done}: {result.reason}. Pass the loader of the run."
            )

    def _check_loader(self) -> None:
        assert self._trainer._loader is not None
        for saved in (self._final["trainer"].get("data") or [])[:1]:
            changes = differences(saved, self._trainer._loader.data)
            if changes:
                raise CheckpointError(f"loader must be that of the run; found {join_words(changes)}.")

    def _check_buffers(self) -> None:
        """Raise ValueError if updates change buffers: queries may depend on them, which is not differentiated."""
        buffers = dict(self.step.model.named_buffers())
        changed = [
            name for name, start in self._buffers.items() if not torch.equal(start, buffers[name].to(start.device))
        ]
        if changed:
            raise ValueError(
                f"sw.metagradient needs buffers that updates leave alone; found changed: {listed(changed)}."
            )

    def _default_every(self) -> int:
        """Updates whose records take MEMORY bytes, at least the root of all updates."""
        if not self._recorder.records:
            return self.updates  # before the first update
        record = self._recorder.records[0]
        batches = (leaf for part in record.microbatches for leaf in leaves(part.batch) if isinstance(leaf, Tensor))
        size = record.before.nbytes + sum(leaf.nbytes for leaf in batches) + RANDOM_BYTES * len(record.microbatches)
        self._every = max(math.isqrt(self.updates - 1) + 1, MEMORY // size)
        return self._every

    def _compare(self) -> None:
        """Raise CheckpointError if the parameters differ from those of the run by more than rounding."""
        off = size = 0.0
        for name, value in self._trainer.model.state_dict().items():
            saved = self._final["model"].get(name, value)  # save="trained" leaves frozen ones out
            off += (value.double() - saved.to(value.device)).square().sum().item()
            size += saved.double().square().sum().item()
        dtype = next(iter(self.step._evaluator.trained.named.values())).dtype
        if not off**0.5 <= math.sqrt(torch.finfo(dtype).eps) * size**0.5:
            raise CheckpointError(
                f"the replay differs from the recorded run: after {plural(self.updates, 'update')} its parameters must "
                f"be those of the newest checkpoint, up to rounding; found a difference of norm {off**0.5:.2g}, of "
                f"parameters of norm {size**0.5:.2g}. make_step() must return the step as it was before fit, with the "
                "same initial parameters: call torch.manual_seed inside make_step, as the script did. Callbacks that "
                "change settings are not repeated."
            )


class Recorder:
    """Callback that records each update; `records` is a list of consecutive updates."""

    def __init__(self, step: Step, formula: Formula):
        self.records: list[UpdateRecord] = []
        self.microbatches: list[Microbatch] = []
        self._step = step
        self._formula = formula

    def prepare(self, begin: Callable[[], None], done: Callable[[], None]) -> None:
        """begin: called at the start of the next fit, before its first update; done: after each update."""
        self._begin = begin
        self._done = done

    def on_fit_start(self) -> None:
        self.records.clear()
        self.microbatches = []
        self._begin()
        self._state = TrainingState.of(self._step, self._formula)

    def on_update(self, update: Update) -> None:
        if not update.skipped:
            before = self._state
            self._state = TrainingState.of(self._step, self._formula)
            self.records.append(UpdateRecord(update.index, self.microbatches, before, self._state))
            self._done()


class RecordingAccumulator(AccumulatorWrapper):
    """Accumulator that records its microbatches."""

    def __init__(self, inner: Accumulator, recorder: Recorder, windows: WindowBuilder, samples: int):
        super().__init__(inner)
        self._recorder = recorder
        self._windows = windows
        self._samples = samples

    @property
    def divided(self) -> bool:  # type: ignore[override]
        return self._inner.divided

    def add(self, microbatches: Any, start: int, divide: bool = False) -> list[SampleStats]:
        [batch] = microbatches
        if start == 0:  # tail="drop" may have left out samples of the last window
            self._recorder.microbatches = []
        ids = self._ids(batch)
        self._recorder.microbatches.append(Microbatch(batch, ids, start, self._windows.counters.epochs, RandomState()))
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
