"""Weights of targets in a loss, from an output of a model and the gradient of the loss with respect to it.

If a loss is a weighted sum of cross entropies, sum_t w_t CE(z_t, y_t), its gradient with respect to the logits z_t is
w_t (softmax(z_t) - onehot(y_t)). The label is the entry with the other sign, and two entries give the weight: with any
other class j,

    g_j exp(z_y - z_j) - g_y  =  w p_y - w (p_y - 1)  =  w

so that neither labels nor the softmax are needed. A third entry tests whether the loss is a cross entropy at all. With
label smoothing e, each entry is w e / V less, and the same difference is w (1 - e + e / V).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.core.losses import CRITERIA, WITH_COUNTS

FULL_TOLERANCE = 1e-4  # relative distance of equal weights that were computed in float32
HALF_TOLERANCE = 2e-2  # gradients of outputs in half precision have 8 or 11 significant bits
ENTRIES = 1 << 24  # of an output in one piece: bounds the memory of intermediate results
SAMPLED = 64  # rows by which the kind of a loss is found out
CLEAR = 1e-3  # |p - 1| of a label below which the digits of its entry are too few
EXACT = 0.05  # |p - 1| of a label above which its entry has enough digits for a weight
ROUNDING = 4e-7  # absolute error of p - 1 in float32, for logits of size 1
UNLIKELY = 1e3  # ratio of a weight to the median: another label is the right one
SPREAD = 5e-3  # relative standard deviation of probabilities, below which label smoothing is not visible
FEW_CLASSES = 4096  # with more, rows without a gradient count as ignored
UNDERFLOW = -80.0  # logit of label 0 below which the gradient is 0
SATURATED = 7.0  # logit of label 1 above which p - 1 has less than 4 digits


class UnusableError(Exception):
    """An argument of the audit does not fit the loop."""


@dataclass
class Targets:
    """Weights of the targets of one output in one backward pass.

    weights: (B, T), 0 for positions that do not enter the loss, such as padding
    classes: (B, T) labels, or None if they are not known
    base: factor of each class in `weights`, from the criterion; None: equal factors, or not known
    error: largest relative difference between the gradient and that of a loss of this kind
    relative: the weights are only shares of the gradient's norm, because the loss is not known
    elements: number of elements of a sample whose losses may be added up instead of averaged
    """

    weights: Tensor
    classes: Tensor | None = None
    base: Tensor | None = None
    error: float = 0.0
    tolerance: float = FULL_TOLERANCE
    relative: bool = False
    elements: int = 1


def tolerance_of(z: Tensor) -> float:
    return HALF_TOLERANCE if z.dtype.itemsize < 4 else FULL_TOLERANCE


# --- from outputs alone -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """Kind of the loss that an output enters, found from the gradient of some rows."""

    name: str
    classes: int = -1  # dimension of the classes
    smoothing: float = 0.0

    def read(self, z: Tensor, g: Tensor) -> Targets:
        """Weights of the targets of a loss of this kind."""
        if self.name == BINARY:
            return _binary_cross_entropy(z, g)
        z = z.movedim(self.classes, -1)
        g = g.movedim(self.classes, -1)
        read = _log_likelihood if self.name == LIKELIHOOD else _cross_entropy
        return read(z, g, self.smoothing)


CROSS_ENTROPY = "cross entropy"
LIKELIHOOD = "negative log-likelihood"
BINARY = "binary cross entropy"


def kind_of(z: Tensor, g: Tensor) -> Kind | None:
    """Kind of the loss that an output enters; None if it is none that is known by its gradient."""
    if not z.is_floating_point() or not bool((g.isfinite().all() & z.isfinite().all()) & g.any()):
        return None
    if z.dim() > 1 and z.flatten(1).shape[1] > 1:
        dims = [-1] if z.dim() == 2 else [-1, 1]
        fits = [kind for dim in dims if (kind := _kind_of_rows(z, g, dim)) is not None]
        if fits:
            return fits[0] if len(fits) == 1 else None
    targets = _binary_cross_entropy(z, g)
    return Kind(BINARY) if targets.error <= targets.tolerance else None


def _kind_of_rows(z: Tensor, g: Tensor, dim: int) -> Kind | None:
    """Kind of a loss over the classes in dimension `dim`."""
    rows = g.movedim(dim, -1).flatten(0, -2)
    logits = z.movedim(dim, -1).flatten(0, -2)
    active = rows.any(1).nonzero()[:SAMPLED, 0]
    if not len(active):
        return None
    rows = rows[active].double()
    logits = logits[active].double()
    tolerance = tolerance_of(z)
    if bool(((rows != 0).sum(1) == 1).all()) and bool((logits.exp().sum(1) - 1).abs().max() <= tolerance):
        return Kind(LIKELIHOOD, dim)
    p = logits.softmax(1)
    if p.shape[1] > 2 and float((p.std(1) / p.mean(1)).median()) < SPREAD:
        return None  # equal logits, as of a head that begins with zeros: with smoothing, gradients are the same
    smoothing = 0.0
    weights, label, error = _best_labels(logits, rows, smoothing, tolerance)
    if error.max() > tolerance:
        smoothing = _smoothing_of(p, rows) or 0.0
        weights, label, error = _best_labels(logits, rows, smoothing, tolerance)
    # With two classes there is one number for each row, which any weight explains. Equal weights of rows with different
    # logits are evidence.
    if error.max() > tolerance or (p.shape[1] == 2 and _spread_of_classes(weights, label, p[:, 0]) > tolerance):
        return None
    return Kind(CROSS_ENTROPY, dim, smoothing)


def _smoothing_of(p: Tensor, g: Tensor) -> float | None:
    """Label smoothing of a cross entropy with softmax p and gradient g, each (N, V); None if there is none.

    With smoothing e, the entries of all classes but the label are w (p - e / V): a line in p.
    """
    classes = p.shape[1]
    label = (g / g.abs().amax(1, keepdim=True)).argmin(1)
    others = torch.ones_like(p, dtype=torch.bool).scatter_(1, label[:, None], False)
    count = classes - 1
    mean_p = (p * others).sum(1) / count
    mean_g = (g * others).sum(1) / count
    deviation = (p - mean_p[:, None]) * others
    variance = deviation.square().sum(1)
    clear = variance > 1e-10 * p.square().sum(1)
    if classes < 3 or not bool(clear.any()):
        return None
    slope = (deviation * g).sum(1)[clear] / variance[clear]
    floor = (slope * mean_p[clear] - mean_g[clear]) / slope
    estimate = float((floor * variance[clear]).sum() / variance[clear].sum()) * classes
    return estimate if 1e-4 < estimate < 1 else None


def _cross_entropy(z: Tensor, g: Tensor, smoothing: float) -> Targets:
    """Weights of a cross entropy over the classes in the last dimension."""
    classes = z.shape[-1]
    rows = max(ENTRIES // classes, 1)
    pieces = zip(z.reshape(-1, classes).split(rows), g.reshape(-1, classes).split(rows), strict=True)
    weights, labels, errors = zip(*(_softmax_weights(*piece, smoothing) for piece in pieces), strict=True)
    shape = (len(z), -1)
    error = float(torch.stack(errors).max())
    return Targets(torch.cat(weights).view(shape), torch.cat(labels).view(shape), None, error, tolerance_of(z))


def _softmax_weights(z: Tensor, g: Tensor, smoothing: float) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (N,), labels (N,) and the largest error of logits (N, V)."""
    classes = z.shape[1]
    low, label = g.min(1)
    high, other = g.max(1)
    active = (low != 0) | (high != 0)
    share = smoothing / classes
    third = (label + 1) % classes
    third = torch.where(third == other, (third + 1) % classes, third)
    chosen = torch.stack([label, other, third], 1)
    z_label, z_other, z_third = z.gather(1, chosen).double().unbind(1)
    g_label, g_other, g_third = g.gather(1, chosen).double().unbind(1)
    # Two entries give the weight. With smoothing e and s = e / V, both have w s less than the softmax.
    ratio = (z_label - z_other).exp()
    divisor = 1 - smoothing + share * (1 - ratio)
    weights = (g_other * ratio - g_label) / divisor
    expected = (g_other + weights * share) * (z_third - z_other).exp() - weights * share
    errors = (g_third - expected).abs() / g_other.abs().clamp(min=1e-300)
    if classes == 2:  # there is no third entry
        errors = torch.zeros_like(errors)
    # Rows in which the label is not certain, or its entry is lost in rounding: all entries are needed.
    clear = (low.double() < -1.02 * high.double()) & (-g_label > CLEAR * weights.abs()) & (divisor.abs() > 0.1)
    clear &= errors <= tolerance_of(z)
    unclear = (active & ~clear).nonzero()[:, 0]
    if len(unclear):
        weights[unclear], label[unclear], errors[unclear] = _best_labels(
            z[unclear].double(), g[unclear].double(), smoothing, tolerance_of(z)
        )
        # Two entries of opposite sign and equal size fit a positive and a negative weight. Positive ones are assumed,
        # unless other rows have negative ones.
        either = active & ((low + high).abs() <= 2 * tolerance_of(z) * high.abs())
        if bool(either.any()):
            has_negative = bool((weights[active & ~either] < 0).any())
            ratios = weights.abs() / weights[active].abs().median()
            unlikely = (ratios > UNLIKELY) | (ratios < 1 / UNLIKELY)
            errors = torch.where(either & (unlikely | has_negative), 1.0, errors)
    errors = torch.where(active, errors, 0.0)
    if classes <= FEW_CLASSES and not bool(active.all()):
        # A row without a gradient is ignored by the loss, or its label is so likely that the gradient is 0.
        first, second = z[~active].topk(2).values.unbind(1)
        if bool((first - second > -UNDERFLOW).any()):
            errors[0] = 1.0
    return torch.where(active, weights, 0.0), label, errors.max()


def _best_labels(z: Tensor, g: Tensor, smoothing: float, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (N,), labels (N,) and errors (N,) from all entries of the logits z and the gradient g, each (N, V)."""
    p = z.softmax(1)
    error_of_p = ROUNDING * (1 + z.abs().amax(1, keepdim=True))  # the loss computes log p in float32
    share = smoothing / p.shape[1]
    best: tuple[Tensor, Tensor, Tensor] | None = None
    # The first label that explains the gradient: that of a positive weight; one with p near 1, whose entry is lost in
    # rounding; that of a negative weight.
    for label in (g.argmin(1), p.argmax(1), g.argmax(1)):
        at_label = torch.zeros_like(p, dtype=torch.bool).scatter_(1, label[:, None], True)
        q = torch.where(at_label, p - share - (1 - smoothing), p - share)
        # Entries of other classes are exact; that of the label has the rounding error of p - 1.
        exact = torch.where(at_label & (q.abs() < EXACT), 0.0, q)
        weights = (g * exact).sum(1) / exact.square().sum(1).clamp(min=1e-300)
        rounding = error_of_p * weights.abs()[:, None] * at_label
        residual = ((g - weights[:, None] * q).abs() - rounding).clamp(min=0)
        # Relative to the largest entry, and for the other classes to their sum: smoothing changes these alone.
        others = residual.masked_fill(at_label, 0).sum(1) / g.masked_fill(at_label, 0).abs().sum(1).clamp(min=1e-300)
        errors = torch.maximum(residual.amax(1) / g.abs().amax(1).clamp(min=1e-300), others)
        if best is None:
            best = weights, label, errors
        else:
            better = (best[2] > tolerance) & (errors < best[2])
            best = (
                torch.where(better, weights, best[0]),
                torch.where(better, label, best[1]),
                torch.where(better, errors, best[2]),
            )
    assert best is not None
    return best


def _log_likelihood(z: Tensor, g: Tensor, smoothing: float) -> Targets:
    """Weights of a loss that reads one log probability of each row."""
    entries = (g != 0).sum(-1)
    shape = (len(z), -1)
    error = float((entries - 1).clamp(min=0).max())
    return Targets((-g).double().sum(-1).view(shape), g.abs().argmax(-1).view(shape), None, error, tolerance_of(z))


def _binary_cross_entropy(z: Tensor, g: Tensor) -> Targets:
    """Weights of a binary cross entropy of logits. A single number is explained by any weight: the error is the
    spread of the weights of a label over different logits, and infinite without such.
    """
    rows = len(z)
    z = z.reshape(rows, -1).double()
    g = g.reshape(rows, -1).double()
    labels = ((g < 0) | ((g == 0) & (z > SATURATED))).long()
    weights = torch.where(labels == 1, -g * (1 + z.exp()), g * (1 + (-z).exp()))
    p = z.sigmoid()
    # For label 1, the digits of p - 1 are lost if p is near 1: such targets get the weight of the others.
    certain = torch.where(labels == 0, z > UNDERFLOW, z < SATURATED)
    error = _spread_of_classes(weights[certain], labels[certain], p[certain])
    for label in (0, 1):
        typical = weights[certain & (labels == label) & (weights != 0)]
        if len(typical):
            weights = torch.where(~certain & (labels == label), typical.median(), weights)
    if not bool((certain | (weights != 0)).all()):
        error = torch.inf
    return Targets(weights, labels, None, error, FULL_TOLERANCE, elements=weights.shape[1])


def _spread_of_classes(weights: Tensor, labels: Tensor, p: Tensor) -> float:
    """Largest relative spread of the weights of a label; infinite if no label has three of different probability."""
    spreads = []
    for label in (0, 1):
        chosen = (labels == label) & (weights != 0)
        values = weights[chosen]
        if len(values) >= 3:
            spread = float(values.max() / values.min() - 1)
            varied = float(p[chosen].max() - p[chosen].min()) > 1e-3
            spreads.append(spread if varied or spread > FULL_TOLERANCE else torch.inf)
    finite = [spread for spread in spreads if spread < torch.inf]
    return max(finite) if finite else torch.inf


def shares(z: Tensor, g: Tensor) -> Targets:
    """Norm of each row of the gradient, relative to their sum."""
    norms = g.detach().double().flatten(1).norm(dim=1) if g.dim() > 1 else g.detach().double().abs()
    return Targets((norms / norms.sum().clamp(min=1e-300))[:, None], relative=True)


# --- from losses that are known ---------------------------------------------------------------------------------------


def is_criterion(module: nn.Module) -> bool:
    """True for a criterion of torch.nn. Subclasses with a forward of their own compute other losses."""
    base: Any = next((cls for cls in type(module).__mro__ if cls in CRITERIA), None)
    return base is not None and type(module).forward is base.forward


def criterion_targets(criterion: Any, prediction: torch.Size, target: Tensor, g: Tensor) -> Targets:
    """Weights from the gradients `g` of the loss with respect to the value of a criterion of torch.nn: exact, because
    the weight of each element in the criterion is known.

    prediction: shape of the predictions of one call
    target, g: (P, ...), of P calls
    """
    factors = _element_factors(criterion, prediction, target).double()  # (P, B, ...)
    flat = factors.reshape(len(target), -1)
    if criterion.reduction == "mean":
        flat = flat / flat.sum(1, keepdim=True)
    elif criterion.reduction == "batchmean":
        flat = flat / prediction[0]
    rows = prediction[0] if prediction and factors.dim() > 1 else 1
    weights = (flat * g.double().reshape(len(target), -1)).reshape(len(target) * rows, -1)
    if not isinstance(criterion, WITH_COUNTS):
        # A sample is one target. Its loss is the mean of its elements, or their sum.
        return Targets(weights.sum(1, keepdim=True), elements=weights.shape[1])
    labels = None if target.is_floating_point() else target.reshape(weights.shape)
    has_base = getattr(criterion, "weight", None) is not None and labels is not None
    return Targets(weights, labels, factors.reshape(weights.shape) if has_base else None)


def _element_factors(criterion: Any, prediction: torch.Size, target: Tensor) -> Tensor:
    """Factors (P, ...) of the elements of a criterion before they are reduced: 0 if ignored, otherwise that of the
    class. target: (P, ...)
    """
    if isinstance(criterion, WITH_COUNTS) and not target.is_floating_point():
        counted = target != criterion.ignore_index
        if criterion.weight is None:
            return counted * 1.0
        factors: Tensor = criterion.weight[torch.where(counted, target, 0)] * counted
        return factors
    shape = torch.broadcast_shapes(prediction, target.shape[1:])
    if isinstance(criterion, WITH_COUNTS):  # class probabilities
        shape = shape[:1] + shape[2:] if len(shape) > 1 else shape[:0]
    elif isinstance(criterion, (nn.MultiMarginLoss, nn.MultiLabelMarginLoss, nn.MultiLabelSoftMarginLoss)):
        shape = prediction[:-1]
    return torch.ones(len(target), *shape, device=target.device)


def losses_targets(losses: Callable[[Tensor, Any], Tensor], z: Tensor, g: Tensor, labels: Any) -> Targets:
    """Weights from a function (outputs, labels) -> losses: g = sum_i w_i d losses_i / d z. Losses (B,), or one for each
    element of the first dimensions of the outputs, such as (B, T) for logits (B, T, V).
    """
    with torch.enable_grad():
        outputs = z.detach().requires_grad_()
        elements = losses(outputs, labels)
        if elements.dim() == 0:
            raise UnusableError("losses= must return one loss per sample or target; found one number")
        if elements.shape != z.shape[: elements.dim()]:
            elements = elements.flatten(1).mean(1) if elements.dim() > 1 else elements
        (d,) = torch.autograd.grad(elements.sum(), outputs)
    shape = (*elements.shape, -1)
    d = d.double().reshape(shape)
    flat = g.double().reshape(shape)
    squares = d.square().sum(-1)
    weights = torch.where(squares > 0, (flat * d).sum(-1) / squares.clamp(min=1e-300), 0.0)
    residual = (flat - weights.unsqueeze(-1) * d).norm(dim=-1) / flat.norm(dim=-1).clamp(min=1e-300)
    residual = torch.where(flat.norm(dim=-1) > 0, residual, 0.0)
    return Targets(weights.reshape(len(z), -1), None, None, float(residual.max()), tolerance_of(z))


def compared_with_mean(z: Tensor, g: Tensor) -> float | None:
    """The value that all predictions of a squared error are compared with, if it is the same for all rows, as for a
    prediction (B, 1) with a target (B,); None otherwise.
    """
    rows = len(z)
    if rows < 3 or z.numel() != rows:
        return None
    x = z.detach().double().flatten()
    y = g.detach().double().flatten()
    deviation = x - x.mean()
    variance = deviation.square().sum()
    if not variance > 1e-12 * x.square().sum():
        return None
    slope = (deviation * (y - y.mean())).sum() / variance
    residual = (y - y.mean() - slope * deviation).abs().max()
    if not (slope > 0 and residual <= 1e-5 * y.abs().max()):
        return None
    return float(x.mean() - y.mean() / slope)
