"""`sw.ImportanceSampler`: a batch sampler that draws samples with large gradients more often, without bias.

An epoch is divided into blocks of batches; by default it is one block. All draws of a block have the same probabilities
and depend only on these, the seed of the epoch and the block. The probabilities of a block are computed one block
before it begins, since a DataLoader fetches batches ahead of the updates. So draws do not depend on the number of
workers, and a checkpoint needs no queue of fetched batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from samplewise.core.losses import PREDICTION_COLUMNS
from samplewise.core.text import plural
from samplewise.errors import BatchError, PrivacyError, TransformError
from samplewise.ledger.sample_ids import WeightedIndex
from samplewise.loop.checkpoint.encoding import COUNT, NUMBER, TENSOR, TEXT, WHOLE, check
from samplewise.loop.data.rng import derive_seed
from samplewise.loop.stopping import interval
from samplewise.parallel import collectives
from samplewise.privacy.sampling import check_count, check_dataset
from samplewise.step.step import Step
from samplewise.step.update import Update, has_counts, has_dropped

if TYPE_CHECKING:
    from samplewise.loop.trainer import Trainer

KEY = "importance"  # of the weights in a batch
CONVERT_EVERY = 512  # updates whose values are read from the device at a time


class ImportanceSampler(Sampler[list[Any]]):
    """Batch sampler for importance sampling: draws samples in proportion to their last gradient norms or losses.

        sampler = sw.ImportanceSampler(dataset, batch_size=64)
        loader = DataLoader(sw.Indexed(dataset), batch_sampler=sampler, num_workers=4)
        step = sw.Step(model, optimizer, nn.CrossEntropyLoss(), transforms=[sw.weight("importance")])
        sw.Trainer(step, run, [sampler]).fit(loader, epochs=10)

        sampler.listen(step)                 # or in a custom loop
        for update in step.over(loader):
            sampler.add(update)

    Sample i of n is drawn with probability p_i, with replacement. `sw.Indexed` adds the weight 1/(n p_i) to the batch,
    and `sw.weight("importance")` multiplies the gradient by it, so that an update is an unbiased estimate of the mean
    gradient of the dataset. Draws are stratified: while all scores are equal, an epoch is a shuffled epoch.

    dataset: its length is the number of samples
    batch_size: samples per batch, of all ranks together
    score: "norms" of the gradients (default), "losses", or a column of `update.columns`, such as one that the loss
    function returns; 0 or more. Samples without visits have the mean score
    floor: share of uniform sampling: p = (1 - floor) score / Σ scores + floor / n. No weight exceeds 1 / floor
    decay: a refresh changes a score to decay * score + (1 - decay) * value, where the value is the mean over the
    sample's visits since the last refresh; 0: the last value
    every: interval of the refresh, "1ep" (default) or for example "50up", 50 updates of batch_size samples. A refresh
    inside an epoch takes effect one interval later, since batches are fetched ahead
    seed: of the draws in a custom loop; a trainer has its own seed

    `scores` and `probabilities` are those of the last refresh. `variance_ratio` is E‖w g‖² of these draws divided by
    E‖g‖² of uniform sampling, measured between the last two refreshes; by scores if norms are not recorded. A trainer
    writes it to the log. The ratio of the variances is farther from 1, since both lack the same ‖mean gradient‖².
    """

    _chunk = 1  # batches that a trainer draws at a time

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        score: str = "norms",
        floor: float = 0.1,
        decay: float = 0.5,
        every: str | int = "1ep",
        seed: int = 0,
    ):
        check_dataset(dataset, "ImportanceSampler")
        check_count("batch_size", batch_size)
        if not isinstance(score, str):
            raise TypeError(f"score must be 'norms', 'losses' or the name of a column; found {score!r}.")
        if not (isinstance(floor, (int, float)) and 0 < floor <= 1):
            raise ValueError(
                f"floor must be above 0, to draw every sample, and at most 1; found {floor!r}. Pass for example 0.1."
            )
        if not (isinstance(decay, (int, float)) and 0 <= decay < 1):
            raise ValueError(f"decay must be at least 0 and below 1; found {decay!r}. Pass 0 for the last value.")
        self.samples = len(dataset)
        self.batch_size = batch_size
        self.score = score
        self.floor = floor
        self.decay = decay
        self.every = interval("every", every, ("ep", "up"))
        self.generator = torch.Generator().manual_seed(seed)
        self.scores = torch.full((self.samples,), math.nan, dtype=torch.float64)
        self.variance_ratio = math.nan
        self._block = min(self.every.number, len(self)) if self.every.unit == "up" else len(self)  # batches
        self._tables: dict[int, Tensor] = {}  # block -> n p (n,), without blocks that have been used
        self._updates: list[Update] = []  # whose visits have not been read
        self._visits: list[Tensor] = []  # (visits, 4) since the last refresh: id, value, weight and norm; of this rank
        self._added = 0  # updates since the last refresh
        self._step: Step | None = None
        self._used = 0  # samples of the epoch that are in updates, over all ranks; negative: carried from the last one
        self._epoch = -1
        self._seed = 0  # of the epoch
        self._iteration = 0
        self._trainer_skips = False  # used batches, and the rows of other ranks
        self._continues = False  # the next iteration starts at the position of a loaded state
        self._constant_divisor = False

    def __len__(self) -> int:
        return -(-self.samples // self.batch_size)

    def __repr__(self) -> str:
        ratio = "unknown" if math.isnan(self.variance_ratio) else f"{self.variance_ratio:.3f}"
        settings = f"batch_size={self.batch_size}, score={self.score!r}, floor={self.floor:g}, every='{self.every}'"
        return f"ImportanceSampler({plural(self.samples, 'sample')}, {settings}, variance ratio {ratio})"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_step": None}  # copies, also in other processes, have no step

    @property
    def probabilities(self) -> Tensor:
        """(n,) probabilities of the samples."""
        return self._relative() / self.samples

    # --- draws -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[list[Any]]:
        self._iteration += 1
        iteration = self._iteration
        first = max(0, self._used + self._open_samples()) if self._continues else 0  # sample of the epoch
        rank, ranks = (0, 1) if self._trainer_skips else (collectives.rank(), collectives.size())
        if self.batch_size < ranks:
            raise ValueError(f"batch_size must be at least the number of ranks, {ranks}; found {self.batch_size}.")
        if not self._continues or first >= len(self) * self.batch_size:
            first = 0
            if not self._trainer_skips:
                self._begin_epoch(self._epoch + 1)
            self._seed = int(torch.randint(2**62, (), generator=self.generator))
        self._trainer_skips = False
        self._continues = False
        block = -1
        for batch in range(first // self.batch_size, len(self)):
            if self._iteration != iteration:
                raise RuntimeError(
                    "an ImportanceSampler must be iterated by one loader at a time; found a second iteration. Use a "
                    "DataLoader without it for evaluation."
                )
            if batch // self._block != block:
                block = batch // self._block
                draws = self._draw(block)
            start = max(first, batch * self.batch_size)
            places = range(start + (rank - start) % ranks, (batch + 1) * self.batch_size, ranks)
            if draws is None:  # used before a resume: skipped by the trainer, and no valid index
                yield [None] * len(places)
                continue
            before = block * self._block * self.batch_size
            drawn = slice(places.start - before, places.stop - before, ranks)
            indices, weights = (values[drawn].tolist() for values in draws)
            yield list(map(WeightedIndex, indices, weights, places))

    def _draw(self, block: int) -> tuple[Tensor, Tensor] | None:
        """Indices and weights of the samples of a block; None for a used block whose probabilities are unknown."""
        if block not in self._tables:
            used = self._used // self.batch_size
            if block <= used // self._block:
                return None
            raise BatchError(
                f"a refresh every {plural(self._block, 'batch', 'batches')} needs {(block - 1) * self._block} batches "
                f"in updates before batch {block * self._block} is drawn; found {used}. Use a larger every=: an "
                "interval must hold the batches of an update (samples=) and those fetched ahead (num_workers * "
                "prefetch_factor); in a custom loop, call sampler.add(update) after each update."
            )
        relative = self._tables[block]
        count = min(self._block, len(self) - block * self._block) * self.batch_size
        generator = torch.Generator().manual_seed(derive_seed(self._seed, block))
        # Stratified: one point in each of `count` equal intervals, in random order. A point alone is uniform, so that
        # each draw is unbiased; together they cover the samples evenly. With equal scores this is a permutation.
        strata = torch.randperm(count, generator=generator)
        points = (strata + torch.rand(count, generator=generator, dtype=torch.float64)) / count
        bounds = relative.cumsum(0)
        indices = torch.searchsorted(bounds, points * bounds[-1], right=True).clamp_(max=self.samples - 1)
        return indices, 1 / relative[indices]

    def _relative(self) -> Tensor:
        """n p of each sample: its probability relative to uniform sampling."""
        visited = ~self.scores.isnan()
        largest = self.scores[visited].max() if visited.any() else torch.zeros(())
        if not largest > 0:
            return torch.ones(self.samples, dtype=torch.float64)
        scaled = self.scores / largest  # so that the mean does not overflow
        shares = torch.where(visited, scaled / scaled[visited].mean(), 1.0)
        relative = (1 - self.floor) * shares + self.floor
        return relative / relative.mean()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. Called by the trainer, which skips used batches and gives each rank its part of a batch."""
        self._trainer_skips = True
        self._continues = False
        if epoch != self._epoch:
            self._begin_epoch(epoch)

    # --- scores ----------------------------------------------------------------------------------------------------

    def listen(self, step: Step) -> None:
        """Register the columns and norms that the sampler needs with the step. Call it before the first update."""
        if not hasattr(step, "require"):
            raise TypeError(f"listen needs the sw.Step of the training; found {type(step).__name__}. Pass the step.")
        if step.privacy is not None:
            raise PrivacyError(
                "ImportanceSampler must not be used with privacy=, whose guarantee needs draws that do not depend on "
                "the samples; found both. Use privacy.loader(dataset)."
            )
        weights = [transform for transform in step.transforms.samples.transforms if KEY in transform.batch_keys]
        if any(weight.renormalizes for weight in weights) or not (weights or step.transforms.reads_whole_batch):
            raise TransformError(
                "gradients of an ImportanceSampler's batches must be multiplied by the weights of the draws, without "
                f"renormalizing, or updates would be biased; found {step.transforms!r}. Use Step(transforms=["
                f"sw.weight({KEY!r})])."
            )
        predictions = [self.score] if self.score in PREDICTION_COLUMNS else []
        step.require(norms=self.score == "norms", columns={"id": "id", KEY: KEY}, predictions=predictions)
        self._step = step
        self._constant_divisor = step.config.constant_divisor is not None

    def add(self, update: Update) -> None:
        """Record the norms or losses of an update. Every rank must call it, after each update."""
        if not isinstance(update, Update):
            raise TypeError(
                f"add needs an update; found {type(update).__name__}. Pass what the step yields: for update in "
                "step.over(loader): sampler.add(update)."
            )
        self._updates.append(update)
        self._added += 1
        self._used += update.samples
        if self._added == 1 or len(self._updates) == CONVERT_EVERY:  # the first at once, to raise its errors early
            self._convert()
        block = max(self._tables, default=0) + 1
        while block * self._block < len(self) and self._used >= (block - 1) * self._block * self.batch_size:
            self._refresh()
            self._tables = {number: table for number, table in self._tables.items() if number >= block - 1}
            self._tables[block] = self._relative()
            block += 1

    def _begin_epoch(self, epoch: int) -> None:
        """Refresh the probabilities, and use them from the beginning of the epoch on. Collective."""
        if self.every.unit == "up" or epoch % self.every.number == 0 or not self._tables:
            self._refresh()
            self._tables = dict.fromkeys(range(min(2, -(-len(self) // self._block))), self._relative())
        self._epoch = epoch
        self._used = -self._open_samples()

    def _open_samples(self) -> int:
        """Samples in the open window of the step, as with tail="carry", of all ranks. Collective."""
        samples = 0 if self._step is None else self._step._windows.window.samples
        return int(collectives.all_reduce_scalars(samples)[0])

    def _refresh(self) -> None:
        """Update the scores by the visits of all ranks since the last refresh. Collective."""
        if not self._added:
            return
        self._convert()
        visits = collectives.all_gather_rows(_joined(self._visits))
        self._visits = []
        self._added = 0
        ids, values, weights, norms = visits[visits[:, 1].isfinite()].unbind(1)
        if (values < 0).any():
            raise ValueError(
                f"scores must not be negative; found {float(values.min()):.6g} for score={self.score!r}. Use "
                "score='norms', or another column."
            )
        counts = ids.long().bincount(minlength=self.samples)
        means = ids.long().bincount(values, minlength=self.samples) / counts
        means = torch.where(self.scores.isnan(), means, self.decay * self.scores + (1 - self.decay) * means)
        self.scores = torch.where(counts > 0, means, self.scores)
        uniform = (weights * norms.square()).nansum()  # E‖g‖² of uniform sampling, estimated from these draws
        self.variance_ratio = float((weights * norms).square().nansum() / uniform) if uniform > 0 else math.nan

    def _convert(self) -> None:
        """Read the visits of the updates added so far."""
        updates = self._updates
        self._updates = []
        for update in updates:
            if update.skipped or not update.local_samples:  # some values of a skipped update are unknown
                continue
            columns = update.columns
            ids = columns.get("id") if update._has_columns("id", KEY) else None
            if not isinstance(ids, Tensor) or ids.is_floating_point() or not 0 <= ids.min() <= ids.max() < self.samples:
                raise BatchError(
                    f"an update must have the weights and ids of its draws, from 0 to {self.samples - 1}; found "
                    f"{'none' if ids is None else ids[:3]}. Call sampler.listen(step) before the first update, and use "
                    "DataLoader(sw.Indexed(dataset), batch_sampler=sampler) with the dataset of the sampler."
                )
            if has_counts(update) and not self._constant_divisor and (update.counts != 1).any():
                raise BatchError(
                    "updates of an ImportanceSampler's batches must be divided by a constant or by the number of "
                    "samples, or they would be biased; found counts other than 1. Use Step(aggregate=sw.per('sample')) "
                    f"for means of samples, or sw.per({self.batch_size}) for sums."
                )
            values = getattr(update, self.score) if self.score in ("norms", "losses") else columns.get(self.score)
            if not isinstance(values, Tensor):
                raise BatchError(
                    f"score must be 'norms', 'losses' or a numeric column, one of {', '.join(columns)}; found "
                    f"{self.score!r}. Return other columns from the loss function, after the losses: {{name: values}}."
                )
            norms = update.norms if all(part.raw_norms is not None for part in update._parts) else values
            if has_dropped(update):  # not in the update: their scores must not draw them more often
                values = values.where(~update.dropped, math.nan)
            rows = [ids, values, torch.as_tensor(columns[KEY]), norms]
            self._visits.append(torch.stack([row.double().cpu() for row in rows], 1))

    # --- trainer and state -----------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, step: Step) -> None:
        self.listen(step)
        loader: Any = trainer.loader
        if getattr(loader, "batch_sampler", None) is not self or hasattr(loader, "state_dict"):
            raise TypeError(
                "an ImportanceSampler among the callbacks must be the batch_sampler of a DataLoader of torch; found "
                f"{type(loader).__name__} without it. Use DataLoader(sw.Indexed(dataset), batch_sampler=sampler)."
            )
        if len(loader.dataset) != self.samples:
            raise ValueError(
                f"an ImportanceSampler must be made for the dataset of its loader, which has {len(loader.dataset)} "
                f"samples; found {self.samples}. Pass this dataset to ImportanceSampler."
            )

    def on_update(self, trainer: Trainer, update: Update) -> None:
        if not trainer.fast_dev_run:
            self.add(update)

    def on_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        self._begin_epoch(epoch + 1)
        if not math.isnan(self.variance_ratio):
            updates = trainer.step.counters.updates
            trainer.write("importance", epoch=epoch + 1, update=updates, variance_ratio=self.variance_ratio)

    @property
    def _settings(self) -> dict[str, Any]:
        """Settings that determine the draws of an epoch."""
        return {"samples": self.samples, "batch_size": self.batch_size, "every": str(self.every)}

    def state_dict(self) -> dict[str, Any]:
        """Scores, probabilities in use and position in the epoch. Every rank must call it."""
        self._convert()
        return {
            **self._settings,
            "epoch": self._epoch,
            "used": self._used,
            "added": self._added,
            "seed": self._seed,
            "generator": self.generator.get_state(),
            "variance_ratio": self.variance_ratio,
            "scores": self.scores,
            "blocks": list(self._tables),
            "tables": list(self._tables.values()),
            "visits": collectives.all_gather_tensors(_joined(self._visits)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of the state."""
        check(state, STATE)
        settings = {name: state[name] for name in self._settings}
        shapes = {(state["samples"],), *(values.shape for values in (state["scores"], *state["tables"]))}
        if shapes != {(self.samples,)} or (settings != self._settings and state["used"]):
            raise ValueError(
                "an ImportanceSampler must have the dataset length of its state and, inside an epoch, batch_size and "
                f"every; found {self._settings} instead of {settings}. Pass those of the state."
            )
        self._epoch = state["epoch"]
        self._used = state["used"]
        self._added = state["added"]
        self._seed = state["seed"]
        self.generator.set_state(state["generator"])
        self.variance_ratio = state["variance_ratio"]
        self.scores = state["scores"]
        self._tables = dict(zip(state["blocks"], state["tables"], strict=True))
        visits = state["visits"]
        if len(visits) != collectives.size():  # of another number of ranks: rank 0 gets all of them
            visits = [torch.cat(visits)]
        self._visits = visits[collectives.rank() :][:1]
        self._updates = []
        self._continues = self._epoch >= 0


STATE: Any = {
    **dict.fromkeys(("samples", "batch_size", "added"), COUNT),
    **dict.fromkeys(("epoch", "seed", "used"), WHOLE),
    **dict.fromkeys(("generator", "scores"), TENSOR),
    "every": TEXT,
    "variance_ratio": NUMBER,
    "blocks": [COUNT],
    "tables": [TENSOR],
    "visits": [TENSOR],
}


def _joined(visits: list[Tensor]) -> Tensor:
    return torch.cat(visits) if visits else torch.zeros(0, 4, dtype=torch.float64)
