"""Protocol of loss functions: `loss_fn(model, batch)` returns losses (B,), or (losses, counts).

The last element of a tuple may be a dict of columns, name -> (B,): further values to record per sample. A criterion of
torch.nn, or its function in torch.nn.functional, becomes such a function. `sw.batch_constants` declares entries of the
batch that are not per sample.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Hashable, Iterable
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from samplewise.core.batches import Path, check_batch, is_text, keep_whole, leaves
from samplewise.errors import BatchError, LossesError

LossFn = Callable[[Any, Any], Any]  # (model, batch); Any: functions may be annotated with the user's own model class
F = TypeVar("F", bound=Callable[..., Any])
PREDICTION_COLUMNS = ("label", "prediction", "margin", "confidence", "el2n")
PROBABILITY = "probability"  # recorded on request only: it has a column for each class
IGNORE_INDEX = -100  # label that nn.CrossEntropyLoss leaves out by default
# Names of a first argument that is the output of a model, as in a criterion (prediction, target), or of Keras' (y_true,
# y_pred).
OUTPUT_NAMES = frozenset(
    "input inputs input1 out output outputs pred preds prediction predictions logits log_probs y_pred y_hat"
    " yhat y_true".split()
)


def as_loss_fn(loss_fn: Any) -> LossFn:
    """Return loss_fn unchanged, or a torch criterion as a function that returns losses or (losses, counts)."""
    criterion = as_criterion(loss_fn)
    if criterion is not None:
        return criterion
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        raise TypeError(f"loss_fn must be an object; found the class {loss_fn.__name__}. Write {loss_fn.__name__}().")
    first = _first_argument(loss_fn)
    module = isinstance(loss_fn, nn.Module)
    if not callable(loss_fn) or first in OUTPUT_NAMES or (module and first != "model"):
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        if first in OUTPUT_NAMES:
            name += f", whose first argument is {first!r}"
        raise TypeError(
            "loss_fn must be a function (model, batch) -> losses, one per sample, or a supported criterion of torch.nn "
            f"or torch.nn.functional; found {name}. Write for example lambda model, batch: "
            "F.cross_entropy(model(batch[0]), batch[1], reduction='none'); a loss module with its own weights takes "
            "(model, batch) in forward."
        )
    return loss_fn


def _first_argument(function: Any) -> str | None:
    """Name of the first of at least two arguments; None if there are fewer, or if the signature is not known."""
    try:
        names = list(inspect.signature(function.forward if isinstance(function, nn.Module) else function).parameters)
    except (TypeError, ValueError):
        return None
    return names[0] if len(names) >= 2 else None


def per_sample(result: Any) -> tuple[Tensor, Tensor | None]:
    """Split the result of a loss function into losses (B,) and counts (B,); counts are None if not returned."""
    if not isinstance(result, tuple):
        return result, None
    first = result[:-1] if _has_columns(result) else result
    if len(first) == 1 and first is not result:
        return first[0], None
    if len(first) != 2:
        raise LossesError(
            "loss_fn must return losses or (losses, counts), optionally followed by a dict of columns; found "
            f"a tuple of {len(result)}. Write, for example, return losses, counts, {{'margin': margin}}."
        )
    losses, counts = first
    if isinstance(losses, Tensor) and losses.dim() != 1:
        return losses, None  # the caller checks losses and raises for this shape
    if not isinstance(counts, Tensor) or not isinstance(losses, Tensor) or counts.shape != losses.shape:
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else "(B,)"
        raise LossesError(
            f"counts must be a tensor like the losses, {shape}, one per sample; found {_shape_or_type(counts)}."
        )
    if counts.requires_grad:
        raise LossesError(
            "counts, the second result of loss_fn, must be constants that losses are divided by, such as numbers of "
            "tokens; found a tensor attached to the autograd graph. For two losses of a sample, return their sum."
        )
    wide = losses.dtype if losses.dtype == torch.float64 else torch.float32  # integers would be divided in float32
    return losses, counts.to(wide)


def columns_of(result: Any, losses: Tensor) -> dict[str, Tensor] | None:
    """Return the columns of a loss function's result, detached; None if it has no columns."""
    if not _has_columns(result):
        return None
    for name, values in result[-1].items():
        if not isinstance(name, str) or not isinstance(values, Tensor) or values.shape != losses.shape:
            raise LossesError(
                f"a column must have a name and be a tensor like the losses, {tuple(losses.shape)}, one value per "
                f"sample; found {_shape_or_type(values)} for {name!r}. Return a tensor with one number per sample."
            )
    return {name: values.detach() for name, values in result[-1].items()}


def _has_columns(result: Any) -> bool:
    return isinstance(result, tuple) and len(result) > 1 and isinstance(result[-1], dict)


def _shape_or_type(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def note_causes(error: Exception, model: Any, batch: Any) -> None:
    """Add a note to an error of a loss function for each common mistake in the batch that may have caused it. Raises
    BatchError from errors that single samples in place of batches lead to.
    """
    check_batch(batch, error)
    entries = leaves(batch)
    arrays = {type(leaf).__name__ for leaf in entries if type(leaf).__module__.partition(".")[0] in ("numpy", "pandas")}
    if arrays:
        error.add_note(
            f"samplewise: the batch holds {' and '.join(sorted(arrays))} in place of tensors. Use a DataLoader, which "
            "converts arrays, or torch.as_tensor(array)."
        )
    tensors = [leaf for leaf in entries if isinstance(leaf, Tensor)]
    dtypes = {p.dtype for p in model.parameters()}
    others = {t.dtype for t in tensors if t.is_floating_point()} - dtypes
    if len(dtypes) == 1 and others and "type" in str(error):
        (dtype,) = dtypes
        error.add_note(
            f"samplewise: the batch holds {others.pop()}, the parameters are {dtype}. Convert the batch: "
            f"x.to({dtype}). Floats of NumPy and pandas are torch.float64."
        )


# --- entries that are not per sample ---------------------------------------------------------------------------------


def batch_constants(*keys: Hashable | Path) -> Callable[[F], F]:
    """Decorator of a loss function: declare entries of the batch that are not per sample, such as a mask (T, T), class
    weights or position ids.

        @sw.batch_constants("mask")
        def loss_fn(model, batch):
            ...

    Whatever slices batches (`Step`, `Trainer`, `scan`, `check` and attribution) then keeps these entries whole, also if
    their first size is the number of samples. keys: keys of a dict, positions in a tuple, or names of fields; a tuple
    of keys leads to a nested entry, such as ("inputs", "mask"). It is an error if a batch does not have them.

    Without the decorator, entries with as many rows as there are samples are sliced, and a batch whose tensors have
    different numbers of rows is used whole.
    """
    paths = tuple(key if isinstance(key, tuple) else (key,) for key in keys)

    def declare(loss_fn: F) -> F:
        declared: Any = loss_fn
        if not isinstance(loss_fn, nn.Module):  # a module stays one, because its parameters are trained

            @wraps(loss_fn)
            def declared(model: Any, batch: Any) -> Any:
                return loss_fn(model, batch)

        declared.batch_constants = (*constants_of(loss_fn), *paths)
        return declared

    return declare


def constants_of(loss_fn: Any) -> tuple[Path, ...]:
    """Paths that `batch_constants` has declared for a loss function."""
    return getattr(loss_fn, "batch_constants", ())


def same_constants(wrapper: F, loss_fn: Any) -> F:
    """A function that wraps a loss function, with the constants of that."""
    paths = constants_of(loss_fn)
    return batch_constants(*paths)(wrapper) if paths else wrapper


def with_constants(loader: Iterable[Any], loss_fn: Any) -> Iterable[Any]:
    """Batches of a loader, with the constants of a loss function marked; the loader itself if there are none."""
    paths = constants_of(loss_fn)
    return (keep_whole(batch, paths) for batch in loader) if paths else loader


# --- criteria of torch.nn --------------------------------------------------------------------------------------------

# `nn.MSELoss()` returns one number for a batch. That number is sum(losses) / sum(counts) over the samples, so that a
# window computed in any microbatches gives the same value as the criterion on the whole window. If all samples have the
# same number of elements, the loss of a sample is the mean of its elements, and each sample counts 1. If class indices
# are the targets, the denominator depends on them (ignore_index, class weights): the loss of a sample is then the sum
# over its elements, and its count is the sum of their weights (without class weights: the number of valid elements).

WITH_COUNTS = (nn.CrossEntropyLoss, nn.NLLLoss)

CRITERIA: dict[type, Callable[..., Tensor]] = {  # class -> its function
    nn.CrossEntropyLoss: functional.cross_entropy,
    nn.NLLLoss: functional.nll_loss,
    nn.MSELoss: functional.mse_loss,
    nn.L1Loss: functional.l1_loss,
    nn.SmoothL1Loss: functional.smooth_l1_loss,
    nn.HuberLoss: functional.huber_loss,
    nn.BCELoss: functional.binary_cross_entropy,
    nn.BCEWithLogitsLoss: functional.binary_cross_entropy_with_logits,
    nn.KLDivLoss: functional.kl_div,
    nn.PoissonNLLLoss: functional.poisson_nll_loss,
    nn.SoftMarginLoss: functional.soft_margin_loss,
    nn.HingeEmbeddingLoss: functional.hinge_embedding_loss,
    nn.MultiLabelSoftMarginLoss: functional.multilabel_soft_margin_loss,
    nn.MultiLabelMarginLoss: functional.multilabel_margin_loss,
    nn.MultiMarginLoss: functional.multi_margin_loss,
}
CLASS_OF_FUNCTION: dict[Any, type] = {function: kind for kind, function in CRITERIA.items()}


class Criterion:
    """Loss function (model, (x, y)) -> losses, or (losses, counts) if the criterion's denominator depends on the
    targets. Their quotient Σ losses / Σ counts is `criterion(model(x), y)`.

    `predictions`: names of the columns that are returned after these, in a dict; see `prediction_columns`.
    """

    def __init__(self, criterion: Any):
        if criterion.reduction not in ("mean", "batchmean", "none"):
            raise LossesError(
                f"{type(criterion).__name__} as loss_fn must have reduction='mean', because an update is a mean over "
                f"samples; found {criterion.reduction!r}. Leave reduction out and scale the learning rate instead."
            )
        self.criterion = criterion
        self.elementwise = copy.copy(criterion)  # shares the buffers, so that .to(device) reaches them
        self.elementwise.reduction = "none"
        self.predictions: frozenset[str] = frozenset()
        self._extra: set[Hashable] = set()  # keys of further columns of the batch that something else reads
        self._any_extra = False

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        inputs, target = self._pair(batch)
        prediction = model(inputs)
        self._check_shapes(prediction, target)
        result = self._losses(prediction, target)
        if not self.predictions or not isinstance(self.criterion, WITH_COUNTS):
            return result
        columns = prediction_columns(prediction, target, self.criterion.ignore_index, self.predictions)
        if columns is None:
            return result
        return (*result, columns) if isinstance(result, tuple) else (result, columns)

    def _losses(self, prediction: Tensor, target: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        try:
            elements = self.elementwise(prediction, target)
        except (RuntimeError, IndexError) as error:
            self._explain(error, prediction, target)
            raise
        reduction = self.criterion.reduction
        if reduction == "none":
            return elements
        if reduction == "batchmean":
            return _sums(elements)
        if not isinstance(self.criterion, WITH_COUNTS) or target.is_floating_point():
            return elements.flatten(1).mean(1) if elements.dim() > 1 else elements
        # The weight of a target is that of its class, 1 without class weights, and 0 if it is ignored.
        counted = target != self.criterion.ignore_index
        weights = counted.to(elements.dtype)
        if self.criterion.weight is not None:
            weights = self.criterion.weight[torch.where(counted, target, 0)].to(elements.dtype) * counted
        return _sums(elements), _sums(weights)

    def _explain(self, error: Exception, prediction: Tensor, target: Tensor) -> None:
        """Raise LossesError if a wrong dtype or class index of the target explains the error of the criterion."""
        name = type(self.criterion).__name__
        classes = isinstance(self.criterion, (*WITH_COUNTS, nn.MultiMarginLoss)) and not target.is_floating_point()
        if isinstance(error, IndexError) and classes:
            labels = target[target != getattr(self.criterion, "ignore_index", IGNORE_INDEX)]
            raise LossesError(
                f"{name} needs class indices from 0 to {prediction.shape[1] - 1} for predictions of shape "
                f"{tuple(prediction.shape)}; found {int(labels.min())} to {int(labels.max())}. Number the classes from "
                "0, or give the model more outputs."
            ) from error
        dtype = torch.int64 if classes else prediction.dtype
        if isinstance(error, RuntimeError) and target.dtype != dtype and not (classes and target.dtype is torch.uint8):
            raise LossesError(
                f"{name} needs a target of {dtype}; found {target.dtype}. Use target."
                f"{'long()' if classes else 'to(' + str(dtype) + ')'}."
            ) from error

    def to(self, device: torch.device) -> None:
        """Move the buffers of the criterion, such as class weights, to `device`."""
        self.criterion.to(device)

    def allow_columns(self, keys: Iterable[Hashable], any_key: bool = False) -> None:
        """Accept batches (x, y, ...) whose further columns have these keys (positions, or names of a named tuple);
        `any_key`: accept any further columns.
        """
        self._extra.update(keys)
        self._any_extra = self._any_extra or any_key

    def __repr__(self) -> str:
        return repr(self.criterion)

    def _pair(self, batch: Any) -> tuple[Any, Tensor]:
        """x and y of a batch (x, y), or of a batch with further columns of strings, or ones that were allowed."""
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            raise BatchError(
                f"a criterion needs batches (x, y); found {_kind(batch)}. "
                "Write a loss function (model, batch) -> losses for batches of another structure."
            )
        fields = getattr(batch, "_fields", ())
        for position in range(2, len(batch)):
            names = {position, position - len(batch), *fields[position : position + 1]}
            is_id = fields[position:] == ("id",)  # the id added by sw.Indexed, or a named tuple's: not data
            if not (self._any_extra or is_id or names & self._extra or is_text(batch[position])):
                raise BatchError(
                    "a criterion needs batches (x, y), or further columns that are strings, or that a transform or the "
                    f"ledger reads by key; found {_kind(batch)}, whose column {position} nothing reads. Name it, for "
                    f"example with sw.weight({position}), or write a loss function (model, batch) -> losses."
                )
        return batch[0], batch[1]

    def _check_shapes(self, prediction: Tensor, target: Tensor) -> None:
        kind = type(self.criterion)
        if kind in (nn.CrossEntropyLoss, nn.MultiMarginLoss) and prediction.shape[1:2] == (1,):
            raise LossesError(
                f"{kind.__name__} needs predictions for at least two classes; found shape {tuple(prediction.shape)}, "
                "one class, for which the loss is always zero. Use nn.BCEWithLogitsLoss() for two classes and one "
                "output, or nn.MSELoss() for regression."
            )
        classes = kind is nn.MultiMarginLoss or (kind in WITH_COUNTS and not target.is_floating_point())
        expected = (*prediction.shape[:1], *prediction.shape[2:]) if classes else tuple(prediction.shape)
        if target.shape == expected:
            return
        if kind is nn.CrossEntropyLoss and target.is_floating_point():
            raise LossesError(
                f"CrossEntropyLoss needs class indices, or class probabilities of shape {expected}; found a target of "
                f"{target.dtype} and shape {tuple(target.shape)}. Use target.long() for class indices, or nn.MSELoss() "
                "for regression."
            )
        raise LossesError(
            f"{kind.__name__} needs a target of shape {expected} for predictions of shape "
            f"{tuple(prediction.shape)}; found {tuple(target.shape)}. Use squeeze, unsqueeze or view."
        )


def as_criterion(loss_fn: Any) -> Criterion | None:
    """Loss function of a supported criterion: an object of a class in CRITERIA (not of a subclass), one of their
    functions, or a functools.partial of one. None if loss_fn is something else.
    """
    if type(loss_fn) in CRITERIA:
        return Criterion(loss_fn)
    call = loss_fn if isinstance(loss_fn, partial) else partial(loss_fn) if callable(loss_fn) else None
    try:
        kind = None if call is None else CLASS_OF_FUNCTION.get(call.func)
    except TypeError:  # not hashable
        return None
    if kind is None or call is None:
        return None
    options = list(inspect.signature(kind).parameters)
    unknown = [*map(repr, call.args), *(name for name in call.keywords if name not in options)]
    if unknown:
        raise TypeError(
            f"options of {call.func.__name__} must be keywords among {', '.join(options)}; found "
            f"{', '.join(unknown)}. Write a loss function (model, batch) -> losses for other options."
        )
    return Criterion(kind(**call.keywords))


def _sums(elements: Tensor) -> Tensor:
    """Sum over the elements of each sample: (B, ...) -> (B,)."""
    return elements.flatten(1).sum(1) if elements.dim() > 1 else elements


def _kind(batch: Any) -> str:
    return f"a {type(batch).__name__} of {len(batch)}" if isinstance(batch, (tuple, list)) else type(batch).__name__


# --- predicted class and scores of each sample, from logits (B, classes) and labels (B,) ------------------------------


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """Margins (B,): the label's logit minus the largest other logit."""
    label_column = labels.unsqueeze(1)
    other_logits = logits.scatter(1, label_column, -torch.inf)
    return logits.gather(1, label_column).squeeze(1) - other_logits.amax(1)


def confidences(logits: Tensor, labels: Tensor) -> Tensor:
    """Probabilities (B,) of the labels."""
    return probabilities(logits).gather(1, labels.unsqueeze(1)).squeeze(1)


def el2n(logits: Tensor, labels: Tensor) -> Tensor:
    """EL2N scores (B,): |softmax(logits) - one-hot label|."""
    shares = probabilities(logits)
    ones = torch.ones_like(labels[:, None], dtype=shares.dtype)
    return shares.scatter_add(1, labels[:, None], -ones).norm(dim=1)


def probabilities(logits: Tensor) -> Tensor:
    """Probabilities (B, classes), at least in float32: those of bf16 would have two digits."""
    return logits.softmax(1, dtype=torch.promote_types(logits.dtype, torch.float32))


def prediction_columns(
    logits: Tensor, labels: Tensor, ignore_index: int, names: Collection[str]
) -> dict[str, Tensor] | None:
    """Columns of these names, name -> (B,), detached; None unless each sample has one class index and one prediction.

    label       class index of the target
    prediction  class with the largest logit
    margin      see `margins`
    confidence  probability of the label, by the softmax of the logits
    el2n        see `el2n`
    probability probabilities of all classes, as columns probability/0, probability/1, ...

    Margin, confidence and EL2N are NaN if the label is `ignore_index`.
    """
    if not names or logits.dim() != 2 or labels.dim() != 1 or labels.is_floating_point():
        return None
    logits = logits.detach()
    labels = labels.long()  # the criterion accepts uint8, an index must be int64
    columns = {}
    if "label" in names:
        columns["label"] = labels
    if "prediction" in names:
        columns["prediction"] = logits.argmax(1)
    counted = labels != ignore_index
    class_indices = torch.where(counted, labels, 0)
    for name, of_visits in (("margin", margins), ("confidence", confidences), ("el2n", el2n)):
        if name in names:
            columns[name] = torch.where(counted, of_visits(logits, class_indices), torch.nan)
    if any(name.startswith(PROBABILITY) for name in names):  # its columns, if the names are those of a resumed window
        shares = probabilities(logits)
        columns |= {f"{PROBABILITY}/{k}": shares[:, k] for k in range(shares.shape[1])}
    return columns
