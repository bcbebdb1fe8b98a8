"""Unit of a trainer's loss: a mean over labels or samples, a sum, or a sum over `num_items_in_batch`; and losses that
compare samples, which have none.

It is found out with a few samples of a batch, in eval mode and without a graph. If the samples' losses are known from
the outputs, the loss of the trainer is compared with their sum over each denominator. Otherwise it is compared with the
losses of single samples: their sum, or their mean with the shares of the samples. A loss with another denominator, such
as the sum of class weights, has none of these units.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.core.batches import leaves
from samplewise.core.state import eval_mode, snapshot
from samplewise.engine.ownership.independence import RULE
from samplewise.errors import BatchError, GraphError, SamplesInteractError
from samplewise.integrations.transformers_losses import auxiliary_loss
from samplewise.parallel import collectives

ITEMS = "items"
LABELS = "labels"
SAMPLES = "samples"
SUM = "sum"

ROWS = 8  # samples of a probe
# The probe multiplies the number of items, which is at least that of the labels in the batch. So it differs from the
# number of labels in the probe, also if the only sample of a batch is taken twice.
TIMES = 3
TOLERANCE = 1e-5  # relative distance of losses that are equal, unless they are computed in half precision
MISSING = 1e3  # residual of a unit that is not possible
METRICS = ("_metrics", "_total_train_tokens")  # attributes that compute_loss of TRL changes
MEAN = 1  # torch's number of reduction="mean"
DEPTH = 100  # nodes of the graph among which a cross-entropy is searched


class UnitProbe:
    """Loss of a trainer for some samples of a batch, together and alone.

    All ranks make the same calls, and get the same results.
    """

    def __init__(self, trainer: Any, model: nn.Module, inputs: Any, num_items: Any):
        self.trainer = trainer
        self.model = model
        self.num_items = num_items
        rows = self._chosen_rows(inputs)
        self.batch = _take(inputs, rows, number_of_samples(inputs))
        self.batch_first = True  # the first dimension of an output is the batch
        self.valid = False  # the loss is finite and not zero, so that it can be compared
        self._samples = len(rows)
        self._loss: float | None = None
        self._half = trainer.args.bf16 or trainer.args.fp16 or any(p.dtype.itemsize < 4 for p in model.parameters())

    def _chosen_rows(self, inputs: Any) -> list[int]:
        """Indices of at least two samples with labels, first those with different class indices."""
        counts = self.trainer._denominators.counts(inputs)
        numbers = [1] * number_of_samples(inputs) if counts is None else counts.tolist()
        usable = [i for i, number in enumerate(numbers) if number > 0] or [0]
        labels = inputs.get("labels")
        if isinstance(labels, Tensor) and labels.dim() == 1:
            values = labels.tolist()
            usable.sort(key=lambda i: values[:i].count(values[i]))
        wanted = ROWS if collectives.size() > 1 else max(2, min(len(usable), ROWS))  # the same number on all ranks
        return [usable[i % len(usable)] for i in range(wanted)]

    @property
    def _items(self) -> Any:
        return None if self.num_items is None else TIMES * self.num_items

    # --- losses known from the outputs -------------------------------------------------------------------------------

    def known_unit(self) -> tuple[bool | None, str | None]:
        """Whether labels are shifted, and the unit of the loss; None each if the samples' losses are not known, or do
        not add up to the loss.
        """
        guess = self.trainer._denominators.shifts
        residuals = {(shifted, unit): 0.0 for shifted in (guess, not guess) for unit in (LABELS, ITEMS, SUM)}
        # Two numbers of samples: a sum over a constant, such as the batch size, is a mean for one of them.
        shapes = []
        for batch in (_take(self.batch, [0], self._samples), self.batch):
            self._loss, outputs = self._forward(batch)
            shapes.append([z.shape for z in leaves(outputs) if isinstance(z, Tensor) and z.dim()])
            for shifted in (guess, not guess):
                for unit, residual in self._known_residuals(batch, outputs, shifted).items():
                    residuals[shifted, unit] += residual
        if len(shapes[0]) == len(shapes[1]) > 0:
            self.batch_first = any((a[0], b[0]) == (1, self._samples) for a, b in zip(*shapes, strict=True))
        finite = self._loss is None or (self._loss != 0 and abs(self._loss) < torch.inf)
        *totals, valid = collectives.all_reduce_scalars(*residuals.values(), float(finite))
        self.valid = valid == collectives.size()
        best = min(range(len(totals)), key=totals.__getitem__)
        if not self.valid or totals[best] > (0.05 if self._half else TOLERANCE) * collectives.size():
            return None, None
        return list(residuals)[best]

    def _forward(self, batch: Any) -> tuple[float | None, list[Any]]:
        """Loss of a batch, and the outputs of the forward passes of the model."""
        outputs: list[Any] = []
        inside = self.trainer.accelerator.unwrap_model(self.model)
        handle = inside.register_forward_hook(lambda module, inputs, output: outputs.append(output))
        try:
            return self._loss_of(batch, self._items), outputs
        finally:
            handle.remove()

    def _known_residuals(self, batch: Any, outputs: list[Any], shifted: bool) -> dict[str, float]:
        """Distance of the loss from the sum of the samples' losses over the denominator of each unit."""
        residuals = dict.fromkeys((LABELS, ITEMS, SUM), MISSING)
        denominators = self.trainer._denominators
        before = denominators.shifted
        denominators.shifted = shifted  # per_sample_losses reads it
        try:
            with torch.no_grad():
                samples = self.trainer.per_sample_losses(outputs[0], batch) if outputs else None
            counts = denominators.counts(batch)
        finally:
            denominators.shifted = before
        if self._loss is None or samples is None:
            return residuals
        total = float(samples.losses.sum(dtype=torch.float64))
        auxiliary = float(auxiliary_loss(outputs[0], self.trainer.model))
        labels = number_of_samples(batch) if counts is None else int(counts.sum())
        for unit, denominator in ((LABELS, labels), (ITEMS, self._items), (SUM, 1)):
            if denominator:
                loss = total / float(denominator)
                residuals[unit] = min(_distance(loss, self._loss), _distance(loss + auxiliary, self._loss))
        return residuals

    # --- losses of single samples ------------------------------------------------------------------------------------

    def unit_of_single_losses(self) -> tuple[str | None, bool | None]:
        """Unit of the loss, or None; and whether the loss depends on the number of items, None if that is not known."""
        together = self._loss
        scaled = together if self.num_items is None else self._loss_of(self.batch, self.num_items)
        alone = [self._loss_of(_take(self.batch, [i], self._samples), self._items) for i in range(self._samples)]
        counts = self.trainer._denominators.counts(self.batch)
        shares = [1] * self._samples if counts is None else counts.tolist()
        residuals = [MISSING] * 5
        if together is not None and scaled is not None:
            residuals[:2] = _distance(scaled, together), _distance(scaled, TIMES * together)
        if together is not None and None not in alone:
            losses = torch.tensor(alone, dtype=torch.float64)
            weights = torch.tensor(shares, dtype=torch.float64)
            sums = float(losses.sum()), float(losses.mean()), float(losses @ weights / weights.sum())
            residuals[2:] = [_distance(value, together) for value in sums]
        *totals, uniform = collectives.all_reduce_scalars(*residuals, float(len(set(shares)) == 1))
        tolerance = (0.01 if self._half else TOLERANCE) * collectives.size()
        proportional, is_sum, is_mean, is_label_mean = (total <= tolerance for total in totals[1:])
        if totals[0] > 1e-3 * collectives.size():
            return (ITEMS if proportional and is_sum else None), (True if totals[0] < MISSING else None)
        if is_sum:
            return SUM, False
        if is_mean and is_label_mean:  # equal shares; or equal losses, of which every mean is the same
            is_clear = uniform == collectives.size()
            return (LABELS if max(shares) == 1 else SAMPLES) if is_clear else None, False
        return (SAMPLES if is_mean else LABELS if is_label_mean else None), False

    def factor_of_ranks(self) -> int:
        """Factor by which the Trainer multiplies a loss that is divided by the number of items of all ranks."""
        multiplied = self._loss_of(self.batch, self._items, averaged=True)
        ratio = 1.0 if multiplied is None or not self._loss else multiplied / self._loss
        return max(round(collectives.all_reduce_scalars(ratio)[0] / collectives.size()), 1)

    # --- losses of the trainer ---------------------------------------------------------------------------------------

    def _loss_of(self, batch: Any, num_items: Any, averaged: bool = False) -> float | None:
        """Loss of the trainer, or None if it cannot be computed for such a batch.

        averaged: with the factor by which the Trainer multiplies it because the gradients of the ranks are averaged
        """
        trainer = self.trainer
        averages = trainer.args.average_tokens_across_devices
        trainer.args.average_tokens_across_devices = averages and averaged
        with (
            _restored(trainer, self.model),
            eval_mode(self.model),
            torch.no_grad(),
            trainer.compute_loss_context_manager(),
        ):
            try:
                prepared = trainer._prepare_inputs(copy.copy(batch))
                return float(trainer.compute_loss(self.model, prepared, num_items_in_batch=num_items))
            except torch.OutOfMemoryError:
                raise
            except Exception:
                return None
            finally:
                trainer.args.average_tokens_across_devices = averages


@contextmanager
def _restored(trainer: Any, model: nn.Module) -> Iterator[None]:
    """Restore random state, buffers, and numbers and metrics that compute_loss may change in the trainer."""
    attributes = vars(trainer)
    before = set(attributes)
    numbers = {name: value for name, value in attributes.items() if isinstance(value, (int, float))}
    metrics = {name: copy.deepcopy(attributes[name]) for name in METRICS if name in attributes}
    restore = snapshot(model)
    try:
        yield
    finally:
        restore()
        for name in set(attributes) - before:
            if isinstance(attributes[name], (int, float)):
                del attributes[name]
        attributes.update(numbers | metrics)


def loss_without_graph(trainer: Any, model: nn.Module, inputs: Any, num_items: Any) -> float:
    """Loss of a whole batch in training mode, in which trainers of TRL compute other losses than in eval mode."""
    with _restored(trainer, model), torch.no_grad(), trainer.compute_loss_context_manager():
        model.train()
        prepared = trainer._prepare_inputs(copy.copy(inputs))
        return float(trainer.compute_loss(model, prepared, num_items_in_batch=num_items))


def depends_on_items(trainer: Any, model: nn.Module, inputs: Any, num_items: Any) -> bool | None:
    """True if the loss of a batch changes with `num_items_in_batch`; None if it is zero or not finite."""
    once, twice = collectives.all_reduce_scalars(
        loss_without_graph(trainer, model, inputs, num_items), loss_without_graph(trainer, model, inputs, 2 * num_items)
    )
    if not 0 < abs(once) < torch.inf:
        return None
    return abs(twice - once) > 1e-3 * abs(once)


def _distance(first: float, second: float) -> float:
    """Relative distance, at most MISSING."""
    distance = abs(first - second) / max(abs(first), abs(second), torch.finfo(torch.float64).tiny)
    return min(distance, MISSING) if distance == distance else MISSING


def number_of_samples(batch: Any, id_key: Hashable = "id") -> int:
    """Number of samples of a batch: of its ids, or of its first tensor."""
    for key in (id_key, "labels", "input_ids", "pixel_values"):
        if key in batch:
            return len(batch[key])
    tensors = [value for value in batch.values() if isinstance(value, Tensor) and value.dim()]
    if not tensors:
        raise BatchError("a batch must hold tensors with one row per sample; found none.")
    return len(tensors[0])


def _take(value: Any, rows: list[int], samples: int) -> Any:
    """The samples at these indices of a batch, or of one of its entries."""
    if isinstance(value, Mapping):
        taken = copy.copy(value) if isinstance(value, MutableMapping) else dict(value)  # keeps a BatchEncoding
        taken.update({key: _take(entry, rows, samples) for key, entry in value.items()})
        return taken
    if isinstance(value, Tensor):
        return value[rows] if value.dim() and len(value) == samples else value
    if isinstance(value, (list, tuple)) and len(value) == samples:
        return [value[i] for i in rows]
    return value


def weighs_classes(loss: Tensor) -> bool:
    """True if the loss has a cross-entropy with class weights, which divides by the sum of the labels' weights."""
    if loss.grad_fn is None:
        return False
    queue: deque[Any] = deque([loss.grad_fn])
    visited = set(queue)
    while queue and len(visited) < DEPTH:
        node = queue.popleft()
        weight = getattr(node, "_saved_weight", None) if node.name().startswith("NllLoss") else None
        if isinstance(weight, Tensor) and node._saved_reduction == MEAN and bool(weight.min() != weight.max()):
            return True
        children = [child for child, _ in node.next_functions if child is not None and child not in visited]
        queue.extend(children)
        visited.update(children)
    return False


# --- x ----------------------------------------------------------------------------------------------------------------


def check_sentence_loss(
    criterion: nn.Module, loss: Tensor, model: nn.Module, outputs: Sequence[Tensor], owners: Sequence[Tensor]
) -> None:
    """Raise an error if the gradients of single samples are not known. `owners`: samples of the rows of each output."""
    of_model = set(map(id, model.parameters()))
    for name, p in criterion.named_parameters():
        if p.requires_grad and id(p) not in of_model:
            raise GraphError(
                "PerSample needs a loss whose trained parameters are those of the model; found the parameter "
                f"{name!r} of {type(criterion).__name__}. Use a loss without parameters."
            )
    if compares_samples(loss, outputs, owners):
        raise SamplesInteractError(
            f"{RULE}; found {type(criterion).__name__}, which compares samples of a batch with each other, as in-batch "
            "negatives do.",
            (
                "use a loss of single samples, such as CosineSimilarityLoss, ContrastiveLoss, TripletLoss or "
                "MarginMSELoss",
                "record which samples were used with sw.Ledger(norms=False), without transforms",
            ),
        )


def compares_samples(loss: Tensor, outputs: Sequence[Tensor], owners: Sequence[Tensor]) -> bool:
    """True if the gradient with respect to rows of one sample depends on rows of another one.

    Two samples differ in a bit of their numbers: for each bit, the gradient at the samples that have it set is
    differentiated with respect to the others.
    """
    gradients = torch.autograd.grad(loss, outputs, create_graph=True, allow_unused=True)
    used = [(c, z, owner) for c, z, owner in zip(gradients, outputs, owners, strict=True) if c is not None]
    generator = torch.Generator().manual_seed(0)  # a generator of its own: does not change the user's random state
    directions = [torch.rand(c.shape, generator=generator).to(c) for c, _, _ in used]
    for bit in range((max(int(owner.max()) for owner in owners)).bit_length()):
        total = sum(
            ((c * direction).flatten(1).sum(1) * ((owner >> bit) & 1)).sum()
            for (c, _, owner), direction in zip(used, directions, strict=True)
        )
        if not isinstance(total, Tensor) or not total.requires_grad:  # the loss is linear
            return False
        seconds = torch.autograd.grad(total, [z for _, z, _ in used], retain_graph=True, allow_unused=True)
        for second, (_, _, owner) in zip(seconds, used, strict=True):
            if second is not None and bool(second[(owner >> bit) & 1 == 0].any()):
                return True
    return False
