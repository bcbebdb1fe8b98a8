"""`sw.metagradient`: derivative of query losses after training with respect to the weights of training samples.

The recorded run is repeated forward, with snapshots of its state, and then differentiated backward, update by update,
from the last to the first (REPLAY, Engstrom et al. 2025).
"""

from __future__ import annotations

import json
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from samplewise.attribution.evaluate.retrain import digest_of_data
from samplewise.attribution.replay import SAVE_EVERY, Replay, TrainingState, new_step, newest_state
from samplewise.attribution.update_derivative import Adjoint, Key, UpdateDerivative
from samplewise.core.batches import to_device
from samplewise.core.files import absolute, read_tensors, sha256, write_tensors
from samplewise.core.losses import per_sample
from samplewise.core.microbatch import Auto
from samplewise.core.modes import mixing_batch_norms
from samplewise.core.state import eval_mode, random_state_restored
from samplewise.core.text import listed, progress
from samplewise.dataset_pass import check_order, check_repeatable
from samplewise.engine.gradients import gradients_of
from samplewise.errors import BatchError, NonFiniteGradientError, NonFiniteLossError, TrainingWarning
from samplewise.ledger.sample_ids import Indexed
from samplewise.loop.checkpoint.resume_settings import step_settings
from samplewise.loop.checkpoint.trained import RunPath
from samplewise.loop.data.rng import nested_parts
from samplewise.parallel import collectives
from samplewise.step.compiled.optim import Formula, formula_of
from samplewise.step.step import Step

STEEP = 10.0  # growth of gradients; with a factor of 97, an MLP on digits had an LDS of 0 at 5 % left out
# Change of the weights in a repetition of the run: about as much as leaving out 1 % of the samples, and far above the
# rounding of float32. Smaller changes would say less. Gradients of ReLUs jump at kinks: a change of 1e-6 crosses none
# in a short training, and a few, with large effects, in long ones whose derivatives are useful.
CHANGE = 0.1
LARGEST_ERROR = 1.0  # of the predicted changes of the losses, relative to these. On digits: 0.5 with an LDS of 0.8, 1.1
# to 1.4 with one of 0.6; with smooth activations below 0.1.
FOLDER = "metagradient"  # in the run directory
FILE = "backward.safetensors"
NOT_SMOOTH = "the training is not smooth enough for its derivative to predict the effect of leaving samples out"
REMEDY = (
    "Use a smaller learning rate, a warmup, a wider model or smoother activations, or average the results of several "
    "runs with other seeds."
)


def metagradient(
    run: RunPath,
    make_step: Callable[[], Step],
    loader: Iterable[Any],
    queries: Iterable[Any],
    *,
    by: Literal["epoch"] | None = None,
    every: int | None = None,
    device: str | torch.device = "auto",
    to: RunPath | None = None,
) -> Tensor:
    """Derivative of each query's loss after training with respect to the weight of each training sample, (queries,
    training samples), by differentiating the recorded run backward (metagradient, MAGIC).

    The weight w of a sample, 1 in the run, multiplies its term in every update, Σ w c g / Σ counts; the denominator
    stays, as with `sw.weight`. The derivative is that of retraining with the same order, dropout and augmentation, so
    that the loss of a query without some samples is about the loss minus the sum of their derivatives. Negative for a
    sample that lowers the query's loss, in contrast to `sw.influence`.

    The run is repeated and compared with its newest checkpoint. It may use SGD, Adam, AdamW or RMSprop, a scheduler,
    max_grad_norm, `sw.weight`, `sw.clip` and `sw.normalize`; callbacks are not repeated. An interrupted call, even one
    that was killed, continues when it is repeated. There is a warning if the derivatives do not predict the effect of
    finite changes: if gradients grow tenfold on the way back, or if the losses of the queries change otherwise than
    predicted when the run is repeated with weights of 0.9 and 1.1 at random.

    run: directory of a run of `sw.Trainer` in one process
    make_step: function that returns a new `sw.Step` as it was before `fit`, with the same initial parameters and the
        same random state; called after the random generators are seeded with the seed of the run
    loader: that of the run, whose batches have the index of each sample, as those of `sw.Indexed`. The columns of the
        result are these indices
    queries: loader or list of batches for the loss function of the step, in evaluation mode; rows of the result. All
        are computed in one backward pass, with a state of the training for each in memory
    by: "epoch" returns (epochs, queries, training samples), the derivatives with respect to the weights in each epoch,
        which add up to the result without it
    every: number of updates between two snapshots on disk. The states and batches of as many updates are in memory, and
        with more than one snapshot the run is repeated twice. Default: as many as take 256 MB, at least √updates
    device: as in `sw.Trainer`
    to: directory of snapshots and progress, removed at the end; default: "metagradient" in the run directory
    """
    scores, problem = differentiate(run, make_step, loader, queries, by, every, device, to)
    if problem:
        warnings.warn(problem, TrainingWarning, stacklevel=2)
    return scores


def differentiate(
    run: RunPath,
    make_step: Callable[[], Step],
    loader: Iterable[Any],
    queries: Iterable[Any],
    by: Literal["epoch"] | None = None,
    every: int | None = None,
    device: str | torch.device = "auto",
    to: RunPath | None = None,
) -> tuple[Tensor, str]:
    """Result of `metagradient`, and why it does not predict the effect of finite changes; "" if it does."""
    if by not in (None, "epoch"):
        raise ValueError(f"by must be None or 'epoch'; found {by!r}.")
    if every is not None and (type(every) is not int or every < 1):
        raise ValueError(f"every must be a number of updates, 1 or more, or None; found {every!r}.")
    check_order(queries, "Use shuffle=False: the rows of the result are in the order of the queries.")
    check_repeatable(queries, "queries")
    samples = _number_of_samples(loader)
    run = absolute(run)
    with random_state_restored():
        digest = digest_of_data(queries)
    with random_state_restored():
        final = newest_state(run)
        step = new_step(make_step, final["trainer"]["seed"])
        formula = check_step(step)
        groups = [{**group, "params": len(group["params"])} for group in step.optimizer.param_groups]
        settings = [digest, str(by), repr(step), repr(step_settings(step)), repr(groups)]
        tensors = [torch.get_rng_state(), *step.model.state_dict().values(), *final["model"].values()]
        name = sha256([*settings, *(value for value in tensors if isinstance(value, Tensor))])[:16]
        directory = (run / FOLDER if to is None else absolute(to)) / name
        replay = Replay(run, final, step, loader, samples, formula, directory, every, device)
        derivative = UpdateDerivative(step, formula)
        with torch.no_grad():  # finds errors of the queries before the run is repeated
            if not list(_query_losses(islice(queries, 1), step, replay.device)):
                raise BatchError("queries must yield at least one batch; found none. Pass a loader or a list.")
        with progress(3 * replay.updates, "sw.metagradient, updates") as advance:
            # Repeat the run, with snapshots of its states, up to the losses of the queries.
            state = BackwardState.load(directory / FILE, replay.device)
            if state is None:
                try:
                    replay.first_pass(lambda: advance(1))
                    state = BackwardState.of_queries(queries, step, replay, formula)
                except Exception:  # the snapshots may be those of another run
                    shutil.rmtree(directory, ignore_errors=True)
                    raise
                state.save(directory / FILE)
            else:
                advance(2 * replay.updates - state.update)
            # Differentiate its updates, from the last to the first.
            saved = time.monotonic()
            while state.update:
                for record in reversed(replay.segment(state.update)):
                    adjoint, derivatives = derivative(record, state.adjoint)
                    state.update = record.number
                    state.set_adjoint(adjoint)
                    for microbatch, columns in zip(record.microbatches, derivatives, strict=True):
                        epoch = microbatch.epoch if by == "epoch" else 0
                        state.add(epoch, microbatch.ids, columns, samples)
                    advance(1)
                    if time.monotonic() > saved + SAVE_EVERY:
                        state.save(directory / FILE)
                        saved = time.monotonic()
            # Repeat it with other weights, and compare the losses with those that the derivatives predict.
            problem = state.growth_problem()
            if not problem:
                state.save(directory / FILE)
                signs = 2.0 * torch.randint(2, (samples,), generator=torch.Generator().manual_seed(0)) - 1
                step = new_step(make_step, final["trainer"]["seed"])
                weights = 1 + CHANGE * signs
                changed = Replay(
                    run, final, step, loader, samples, formula, directory / "changed", every, device, weights
                )
                try:
                    changed.first_pass(lambda: advance(1))
                    with torch.no_grad():
                        losses = torch.cat(list(_query_losses(queries, step, replay.device)))
                except (NonFiniteLossError, NonFiniteGradientError):  # diverges with these weights
                    losses = torch.full_like(state.losses, torch.nan)
                problem = state.prediction_problem(losses, signs)
    shutil.rmtree(directory)
    with suppress(OSError):  # not empty: another call was interrupted
        directory.parent.rmdir()
    zeros = torch.zeros_like(next(iter(state.scores.values())))  # of an epoch whose samples are in no update
    epochs = torch.stack([state.scores.get(epoch, zeros) for epoch in range(max(state.scores) + 1)])
    return epochs if by == "epoch" else epochs[0], problem


@dataclass
class BackwardState:
    """State of the backward pass before update `update`.

    adjoint   gradients of the queries with respect to the state of the training there
    scores    epoch -> (queries, training samples), from the updates from there on; one entry unless by="epoch"
    losses    of the queries at the end of training, (queries,)
    first, largest   norms of the gradients with respect to the parameters, (queries,): at the end of training, and
                     the largest of all updates
    """

    update: int
    adjoint: Adjoint
    scores: dict[int, Tensor]
    losses: Tensor
    first: Tensor
    largest: Tensor

    @classmethod
    def of_queries(cls, queries: Iterable[Any], step: Step, replay: Replay, formula: Formula) -> BackwardState:
        """State at the end of training, where the parameters are now."""
        evaluator = step._evaluator
        trained = evaluator.trained.trainable()
        rows: dict[Key, list[Tensor]] = {name: [] for name in trained}
        all_losses = []
        for losses in _query_losses(queries, step, replay.device):
            full = gradients_of(losses, trained, evaluator.modules).full()
            all_losses.append(losses.detach())
            for name, p in trained.items():
                rows[name].append(full[name] if name in full else p.new_zeros(len(losses), *p.shape))
        adjoint: Adjoint = {name: torch.cat(parts).detach() for name, parts in rows.items()}
        norms = _norms(adjoint)
        for key, value in TrainingState.of(step, formula).optimizer.items():
            adjoint[key] = value.new_zeros(len(norms), *value.shape)
        return cls(replay.updates, adjoint, {}, torch.cat(all_losses), norms, norms)

    def set_adjoint(self, adjoint: Adjoint) -> None:
        self.adjoint = adjoint
        norms = _norms(adjoint)
        self.largest = self.largest.maximum(norms)
        if not norms.isfinite().all():
            raise NonFiniteGradientError(
                f"gradients must stay finite on the way back through the training; found {norms.max().item()} before "
                f"update {self.update}, from {self.first.max().item():.3g} at its end. {REMEDY}"
            )

    def add(self, epoch: int, ids: Tensor, columns: Tensor, samples: int) -> None:
        """Add derivatives (queries, B) with respect to the weights of samples in one update."""
        if epoch not in self.scores:
            self.scores[epoch] = columns.new_zeros(len(columns), samples, device="cpu")
        self.scores[epoch].index_add_(1, ids, columns.cpu())

    def growth_problem(self) -> str:
        """Sentence that gradients have grown so much that finite changes of weights have other effects, or ""."""
        moving = self.first > 0
        growth = (self.largest / self.first)[moving].median().item() if moving.any() else 1.0
        if growth <= STEEP:
            return ""
        return f"{NOT_SMOOTH}: gradients grow by a factor of {growth:.2g} on the way back through the updates. {REMEDY}"

    def prediction_problem(self, losses: Tensor, signs: Tensor) -> str:
        """Sentence that the derivatives do not predict the losses of the queries after training with weights
        1 + CHANGE * signs, or "".
        """
        total = torch.stack(list(self.scores.values())).sum(0).double()
        before = self.losses.cpu().double()
        error = losses.cpu().double() - before - CHANGE * total @ signs.double()
        # Root mean square over all signs: that of these signs may be small by chance, if there are few queries.
        predicted = CHANGE * total.norm()
        rounding = torch.finfo(losses.dtype).eps ** 0.5 * (1 + before.abs()).norm()
        if error.norm() <= LARGEST_ERROR * max(predicted, rounding):
            return ""
        root = len(losses) ** 0.5
        return (
            f"{NOT_SMOOTH}: it was repeated with weights of {1 - CHANGE:g} and {1 + CHANGE:g} at random, for which the "
            f"derivatives predict changes of the losses of the queries by {predicted / root:.2g}, root mean square; "
            f"found changes that differ from these by {error.norm() / root:.2g}. {REMEDY}"
        )

    def save(self, path: Path) -> None:
        tensors = {json.dumps(["adjoint", key]): value for key, value in self.adjoint.items()}
        tensors |= {json.dumps(["scores", epoch]): value for epoch, value in self.scores.items()}
        tensors |= {json.dumps(["queries", name]): getattr(self, name) for name in ("losses", "first", "largest")}
        write_tensors(path, tensors, {"update": self.update})

    @classmethod
    def load(cls, path: Path, device: torch.device) -> BackwardState | None:
        """State that was saved; None if there is none."""
        if not path.exists():
            return None
        tensors, description = read_tensors(path)
        parts: dict[str, dict[Any, Tensor]] = {"adjoint": {}, "scores": {}, "queries": {}}
        for name, value in tensors.items():
            part, key = json.loads(name)
            parts[part][tuple(key) if isinstance(key, list) else key] = value if part == "scores" else value.to(device)
        return cls(description["update"], parts["adjoint"], parts["scores"], **parts["queries"])


def _query_losses(queries: Iterable[Any], step: Step, device: torch.device) -> Iterator[Tensor]:
    """Losses of each batch of queries, in evaluation mode."""
    with eval_mode(*step._evaluator.modules):
        for batch in queries:
            yield per_sample(step.loss_fn(step.model, to_device(batch, device)))[0]


def _norms(adjoint: Adjoint) -> Tensor:
    """Norms (queries,) of the gradients with respect to the parameters."""
    squares = [rows.reshape(len(rows), -1).square().sum(1) for key, rows in adjoint.items() if isinstance(key, str)]
    return torch.stack(squares).sum(0).sqrt()


# --- arguments --------------------------------------------------------------------------------------------------------


def check_step(step: Step) -> Formula:
    """Formula of the optimizer; raises ValueError for settings through which updates cannot be differentiated."""
    config = step.config
    chain = config.transforms
    modules = step._evaluator.modules
    formula = formula_of(step.optimizer)
    dtypes = {str(p.dtype) for p in step._evaluator.trained.named.values()}
    norms = mixing_batch_norms(modules)
    precise = config.precision in (None, "32") and dtypes <= {"torch.float32", "torch.float64"}
    grouped = config.aggregate is not None and config.aggregate.unit == "group"
    sparse = any(getattr(module, "sparse", False) is True for root in modules for module in root.modules())
    # (whether it is refused, what is needed, what was found)
    rules = [
        (collectives.size() > 1, "one process", f"{collectives.size()} ranks"),
        (step.privacy is not None, "updates without noise", "privacy="),
        (bool(chain.on_sum), "updates without noise", f"{chain!r}"),
        (not precise, "float32 or float64 without autocast", f"precision={config.precision!r} and {listed(dtypes)}"),
        (bool(config.compile), "updates that are not compiled", f"compile={config.compile!r}"),
        (isinstance(config.microbatch, Auto), "a fixed microbatch size", f"microbatch={config.microbatch!r}"),
        (chain.window or bool(chain.references), "transforms of single samples, such as sw.clip", f"{chain!r}"),
        (bool(chain.states), "transforms that do not depend on earlier updates", f"{chain!r}"),
        (grouped, "sw.per('token'), sw.per('sample') or sw.per(number)", f"{config.aggregate!r}"),
        (bool(norms), "layers without statistics of the batch", f"BatchNorm in training mode: {listed(norms)}"),
        (sparse, "dense gradients", "an embedding with sparse=True"),
        (
            formula is None,
            "SGD, Adam, AdamW, RMSprop or sw.sgd, without hooks and with numbers as settings",
            f"{type(step.optimizer).__name__}",
        ),
    ]
    for refused, needed, description in rules:
        if refused:
            raise ValueError(f"sw.metagradient needs {needed}; found {description}. Train a run without it.")
    assert formula is not None
    return formula


def _number_of_samples(loader: Any) -> int:
    """Length of the dataset inside sw.Indexed, or of the dataset whose samples have ids of their own."""
    check_repeatable(loader, "loader")
    indexed = [part for part in nested_parts(loader) if isinstance(part, Indexed)]
    dataset: Any = indexed[0].dataset if indexed else getattr(loader, "dataset", None)
    if not hasattr(dataset, "__len__"):
        raise BatchError(
            "loader must be a DataLoader of a dataset with a length, whose samples have their index as 'id'; found "
            f"{type(loader).__name__}. Use DataLoader(sw.Indexed(dataset), ...), in the run as well."
        )
    return len(dataset)
