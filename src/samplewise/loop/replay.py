"""Replay: recompute one update of a recorded run from the checkpoint before it, and list its samples."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any, NamedTuple

import torch

from samplewise.core.batches import copied, length, take
from samplewise.core.text import Table, Tabular
from samplewise.errors import CheckpointError, NonFiniteGradientError, NonFiniteLossError
from samplewise.ledger.files import list_parts, read_ledger
from samplewise.loop.checkpoint import io
from samplewise.loop.checkpoint.directory import FOLDER, newest_first
from samplewise.loop.checkpoint.state import check_trainer_state
from samplewise.loop.data.importance import ImportanceSampler
from samplewise.loop.trainer import Trainer
from samplewise.step.forward import LossEvaluator
from samplewise.step.step import Step
from samplewise.step.update import Update


class ReplayedSample(NamedTuple):
    """Results of one sample of the update. id: None without ids. layer: parameter with the largest part of the norm."""

    position: int
    id: Any
    loss: float
    norm: float
    weight: float
    layer: str | None


class ReplayedUpdate(Tabular):
    """Samples of a recomputed update, by decreasing norm; those that are not finite come first.

    start: the checkpoint, None for the beginning of the run. difference: largest difference between its losses and
    those in the ledger; None without a ledger. error: why the update was not made; None if it was.
    """

    def __init__(
        self, update: int, start: Path | None, samples: list[ReplayedSample], limit: int, error: Exception | None
    ):
        self.update = update
        self.start = start
        by_norm = sorted(samples, key=lambda sample: -sample.norm if isfinite(sample.norm) else -inf)
        self.samples = by_norm[:limit]
        self.error = error
        self.difference: float | None = None

    def _table(self) -> Table:
        rows = [
            [str(s.position), str(s.id), f"{s.loss:.4g}", f"{s.norm:.4g}", f"{s.weight:.4g}", s.layer or ""]
            for s in self.samples
        ]
        start = "the beginning of the run" if self.start is None else self.start.stem
        notes = [f"recomputed from {start}"]
        if self.difference is not None:
            notes.append(f"largest difference to the losses in the ledger: {self.difference:.3g}")
        notes += [] if self.error is None else [f"the update was not made: {self.error}"]
        header = ["position", "id", "loss", "norm", "weight", "largest gradient in"]
        return Table(header, rows, f"update {self.update}", notes)


def replay(
    step: Step, run: Path, update: int, loader: Iterable[Any], id: Any, seed: int, device: torch.device, limit: int
) -> ReplayedUpdate:
    """Recompute update number `update`, counted from 0 as in the ledger. The run directory is not changed.

    step, loader: new ones, made as for the training run. id: key of the batch with the ids; None without ids.
    limit: number of samples in the result.
    """
    start, state = _state_before(run, update)
    watch = _Watch(step, update, id)
    sampler = getattr(loader, "batch_sampler", None)
    samplers = [sampler] if isinstance(sampler, ImportanceSampler) else []  # a callback with a state of its own
    trainer = Trainer(step, None, [*samplers, watch], progress=False, device=device, seed=seed)
    if state is not None:
        trainer._resume_from(state, loader)
    error: Exception | None = None
    try:
        trainer.fit(loader, updates=update + 1)
    except (NonFiniteLossError, NonFiniteGradientError) as why:  # the update that ended the run
        if step.counters.updates != update:
            raise
        error = why
    result = ReplayedUpdate(update, start, watch.samples(limit), limit, error)
    if watch.update is not None and list_parts(run):
        result.difference = _difference(read_ledger(run), watch.update)
    return result


def _state_before(run: Path, update: int) -> tuple[Path | None, dict[str, Any] | None]:
    """Newest checkpoint from which the whole update can be recomputed, and its state; None for the beginning."""
    folder = run / FOLDER
    for updates, path in newest_first(folder) if folder.is_dir() else []:
        if updates > update:
            continue
        state = io.read_for_rank(path)
        check_trainer_state(path, state)
        if len(state["per_rank"]) > 1:
            raise CheckpointError(
                f"a replay needs the checkpoint of one process; found {path} of {len(state['per_rank'])} ranks."
            )
        if updates < update or not state["step"]["window"]["samples"]:  # not in the middle of the update
            return path, state
    return None, None


class _Watch:
    """Callback that records the samples of one update: its results, and its microbatches and parameters before it."""

    def __init__(self, step: Step, update: int, id: Any):
        self.update: Update | None = None
        self._step = step
        self._number = update
        self._columns = {} if id is None else {"id": id}
        self._microbatches: list[Any] = []
        self._parameters: dict[str, torch.Tensor] = {}

    def on_fit_start(self) -> None:
        self._prepare()

    def on_update(self, update: Update) -> None:
        if update.index == self._number and not self.update:
            self.update = update
        self._prepare()

    def _prepare(self) -> None:
        """Before the update: record norms, ids, microbatches and parameters."""
        windows = self._step._windows
        if self._step.counters.updates != self._number or self._parameters:
            return
        self._step.require(norms=True, columns=self._columns)
        self._parameters = {name: p.detach().clone() for name, p in windows.evaluator.trained.named.items()}
        add = windows._add

        def recorded(cursor: Any, microbatch: Any, *args: Any, **options: Any) -> None:
            self._microbatches.append(copied(microbatch))
            add(cursor, microbatch, *args, **options)

        windows._add = recorded  # type: ignore[method-assign]

    @torch.no_grad()
    def samples(self, limit: int) -> list[ReplayedSample]:
        """The samples with the largest norms; or all of them, each computed alone, if the update was not made."""
        evaluator = self._step._windows.evaluator
        for name, p in evaluator.trained.named.items():
            p.copy_(self._parameters[name])
        places = [(batch, row) for batch in self._microbatches for row in range(length(batch) or 0)]
        update = self.update
        if update is None or (update.skipped and not update.dropped.any()):
            alone = (_alone(evaluator, *place) for place in places)
            return [ReplayedSample(k, None, loss, norm, 0.0, layer) for k, (loss, norm, layer) in enumerate(alone)]
        norms = update.norms.double()
        rows = norms.nan_to_num(nan=inf).argsort(descending=True, stable=True).tolist()[:limit]
        ids = update.columns.get("id", [None] * len(norms))
        weights = update.weights if isinstance(update.weights, torch.Tensor) else torch.full_like(norms, nan)
        samples = []
        for row in rows:
            layer = _alone(evaluator, *places[row])[2] if row < len(places) else None
            sample_id: Any = ids[row]
            sample_id = sample_id.item() if hasattr(sample_id, "item") else sample_id
            values = float(update.losses[row]), float(norms[row]), float(weights[row])
            samples.append(ReplayedSample(row, sample_id, *values, layer))
        return samples


def _alone(evaluator: LossEvaluator, microbatch: Any, row: int) -> tuple[float, float, str | None]:
    """Loss and norm of one sample, and the parameter with the largest part of the norm; NaN and None if not finite."""
    with torch.enable_grad():
        losses, _ = evaluator.losses(take(microbatch, [row]))
        loss = float(losses.detach().sum())
        with suppress(NonFiniteLossError, NonFiniteGradientError):
            norms = evaluator.gradients_of(losses, interacting="allow").norms(by="parameter")
            parts = {name: float(norm) for name, norm in norms.items()}
            return loss, sum(part**2 for part in parts.values()) ** 0.5, max(parts, key=lambda name: parts[name])
    return loss, nan, None


def _difference(ledger: Any, update: Update) -> float | None:
    """Largest difference between the losses of an update and those in the ledger; None if it has others."""
    table = ledger.filter([number == update.index for number in ledger["update"].to_pylist()])
    recorded = table["loss"].to_pylist()
    losses = update.losses.tolist()
    if len(recorded) != len(losses):
        return None
    return max((abs(a - b) for a, b in zip(recorded, losses, strict=True) if isfinite(a) and isfinite(b)), default=0.0)
