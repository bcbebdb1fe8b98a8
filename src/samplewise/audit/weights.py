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


@dataclass
class Targets:
    """Weights of the targets of one output in one backward pass.

    weights: (B, T), 0 for positions that do not enter the loss, such as padding
    classes: (B, T) labels, or None if they are not known
    base: factor of each class in `weights`, from the criterion; None: equal factors, or not known
    error: largest relative difference between the gradient and that of a loss of this kind
    relative: the weights are only shares of the gradient's norm, because the loss is not known
    """

    weights: Tensor
    classes: Tensor | None = None
    base: Tensor | None = None
    error: Tensor | float = 0.0
    tolerance: float = FULL_TOLERANCE
    relative: bool = False


def tolerance_of(z: Tensor) -> float:
    return HALF_TOLERANCE if z.dtype.itemsize < 4 else FULL_TOLERANCE


# --- from outputs alone -----------------------------------------------------------------------------------------------


def cross_entropy(z: Tensor, g: Tensor) -> Targets:
    """Weights of a cross entropy over the classes in the last dimension, or in dimension 1 of (B, V, ...)."""
    if z.dim() > 2 and _sums_to_zero(g, 1) and not _sums_to_zero(g, -1):
        z = z.movedim(1, -1)
        g = g.movedim(1, -1)
    classes = z.shape[-1]
    rows = max(ENTRIES // classes, 1)
    pieces = zip(z.reshape(-1, classes).split(rows), g.reshape(-1, classes).split(rows), strict=True)
    weights, labels, errors = zip(*(_softmax_weights(*piece) for piece in pieces), strict=True)
    shape = (len(z), -1)
    error = torch.stack(errors).max()
    return Targets(torch.cat(weights).view(shape), torch.cat(labels).view(shape), None, error, tolerance_of(z))


def _softmax_weights(z: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (N,), labels (N,) and the largest error of logits (N, V)."""
    classes = z.shape[1]
    low, label = g.min(1)
    high, other = g.max(1)
    negative = high > -low * 1.001  # the sign of the label's entry is opposite to that of the weight
    label, other = torch.where(negative, other, label), torch.where(negative, label, other)
    third = (label + 1) % classes
    third = torch.where(third == other, (third + 1) % classes, third)
    chosen = torch.stack([label, other, third], 1)
    z_label, z_other, z_third = z.gather(1, chosen).double().unbind(1)
    g_label, g_other, g_third = g.gather(1, chosen).double().unbind(1)
    active = (low != 0) | (high != 0)
    if classes == 2:  # two entries of opposite sign, which no third one can test
        weights = g_other * (z_label - z_other).exp() - g_label
        return torch.where(active, weights, 0.0), label, weights.new_zeros(())
    ratio = (z_third - z_other).exp()
    scale = torch.where(active, g_other.abs(), 1.0)
    errors = torch.where(active, (g_third - g_other * ratio).abs() / scale, 0.0)
    weights = g_other * (z_label - z_other).exp() - g_label
    error = errors.max()
    if error > HALF_TOLERANCE:
        smoothed = _smoothed_weights(z_label, z_other, ratio, g_label, g_other, g_third, active, classes)
        if smoothed is not None:
            weights, error = smoothed
    return torch.where(active, weights, 0.0), label, error


def _smoothed_weights(
    z_label: Tensor,
    z_other: Tensor,
    ratio: Tensor,
    g_label: Tensor,
    g_other: Tensor,
    g_third: Tensor,
    active: Tensor,
    classes: int,
) -> tuple[Tensor, Tensor] | None:
    """Weights and largest error with label smoothing; None if the rows do not have one smoothing in common."""
    clear = active & ((1 - ratio).abs() > 1e-3)  # equal logits say nothing
    if not clear.any():
        return None
    peak = (g_other - g_third) / (1 - ratio)  # w p_other
    floor = peak - g_other  # w e / V
    unscaled = peak * (z_label - z_other).exp() - floor - g_label  # w (1 - e)
    shares = (floor / unscaled)[clear]
    share = shares.median()
    if not ((shares - share).abs() <= 0.01 * share.abs()).float().mean() > 0.9 or share <= 0:
        return None
    smoothing = share * classes / (1 + share * classes)
    error = ((unscaled * share - floor).abs() / g_other.abs())[clear].max()
    # Rows with equal logits: the same from two entries, given the smoothing.
    ratio_label = (z_label - z_other).exp()
    two_entries = (g_other * ratio_label - g_label) / (1 - smoothing + (1 - ratio_label) * smoothing / classes)
    weights = torch.where(clear, unscaled / (1 - smoothing), two_entries)
    return weights, error


def negative_log_likelihood(z: Tensor, g: Tensor) -> Targets:
    """Weights of a loss that reads one log probability of each row."""
    if z.dim() > 2 and bool(((g != 0).sum(1) <= 1).all()):
        z = z.movedim(1, -1)
        g = g.movedim(1, -1)
    entries = (g != 0).sum(-1)
    normalized = z.detach().double().exp().sum(-1)
    error = torch.maximum((entries - 1).clamp(min=0).max().double(), (normalized - 1).abs().max())
    shape = (len(z), -1)
    return Targets((-g).sum(-1).double().view(shape), g.abs().argmax(-1).view(shape), None, error, tolerance_of(z))


def binary_cross_entropy(z: Tensor, g: Tensor) -> Targets:
    """Weights of a binary cross entropy of logits. A single number is explained by any weight: the error is the
    spread of the weights of each class.
    """
    rows = len(z)
    z = z.reshape(rows, -1).double()
    g = g.reshape(rows, -1).double()
    labels = (g < 0).long()
    weights = torch.where(g < 0, -g * (1 + z.exp()), g * (1 + (-z).exp()))
    return Targets(weights, labels, None, _spread_of_classes(weights, labels))


def _spread_of_classes(weights: Tensor, labels: Tensor) -> Tensor:
    """Largest relative spread of the weights of a class; infinite if no class has three of them."""
    spreads = []
    for label in (0, 1):
        values = weights[(labels == label) & (weights != 0)]
        if len(values) >= 3:
            spreads.append(values.max() / values.min() - 1)
    return torch.stack(spreads).max() if spreads else weights.new_full((), torch.inf)


def shares(z: Tensor, g: Tensor) -> Targets:
    """Norm of each row of the gradient, relative to their sum."""
    norms = g.detach().double().flatten(1).norm(dim=1) if g.dim() > 1 else g.detach().double().abs()
    return Targets((norms / norms.sum().clamp(min=1e-300))[:, None], relative=True)


def _sums_to_zero(g: Tensor, dim: int) -> bool:
    piece = g[:64].double()
    return bool(piece.sum(dim).abs().max() <= 1e-3 * piece.abs().max())


KINDS: dict[str, Callable[[Tensor, Tensor], Targets]] = {
    "cross entropy": cross_entropy,
    "negative log-likelihood": negative_log_likelihood,
    "binary cross entropy": binary_cross_entropy,
}


def kind_of(z: Tensor, g: Tensor) -> str | None:
    """Kind of the loss that an output enters; None if it is none that is known by its gradient."""
    if not z.is_floating_point() or not bool(g.isfinite().all()):
        return None
    scalar = z.dim() == 1 or z.flatten(1).shape[1] == 1
    candidates = ["binary cross entropy"] if scalar else list(KINDS)
    return next((kind for kind in candidates if _explains(kind, z, g)), None)


def _explains(kind: str, z: Tensor, g: Tensor) -> bool:
    if kind == "cross entropy" and not (_sums_to_zero(g, -1) or (z.dim() > 2 and _sums_to_zero(g, 1))):
        return False
    targets = KINDS[kind](z, g)
    tolerance = targets.tolerance * (5 if z.dtype.itemsize < 4 else 1)  # single entries, not their mean
    if kind == "cross entropy" and z.shape[-1] == 2:
        assert targets.classes is not None
        return float(_spread_of_classes(targets.weights, targets.classes)) <= tolerance
    return float(targets.error) <= tolerance


# --- from losses that are known ---------------------------------------------------------------------------------------


def is_criterion(module: nn.Module) -> bool:
    return isinstance(module, tuple(CRITERIA)) and hasattr(module, "reduction")


def criterion_targets(criterion: Any, prediction: Tensor, target: Tensor, g: Tensor) -> Targets:
    """Weights from the gradient `g` of the loss with respect to the value of a criterion of torch.nn: exact, because
    the weight of each element in the criterion is known.
    """
    counted, base = _element_factors(criterion, prediction, target)
    labels = target if counted.shape == target.shape and not target.is_floating_point() else None
    elements = counted * 1.0 if base is None else base
    if criterion.reduction == "mean":
        elements = elements / elements.sum()
    elif criterion.reduction == "batchmean":
        elements = elements / len(prediction)
    weights = (elements * g.double()).reshape(len(elements), -1)
    if not isinstance(criterion, WITH_COUNTS) and weights.shape[1] > 1:
        weights = weights.sum(1, keepdim=True)  # the loss of a sample is the mean of its elements
    return Targets(weights, None if labels is None else labels.reshape(len(labels), -1), _flat(base))


def _element_factors(criterion: Any, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
    """Elements of the loss that count, and their factors; None for equal factors."""
    if not isinstance(criterion, WITH_COUNTS) or target.is_floating_point():
        if isinstance(criterion, (*WITH_COUNTS, nn.MultiMarginLoss, nn.MultiLabelMarginLoss)):
            return torch.ones(len(prediction), 1, dtype=torch.float64, device=prediction.device), None
        return torch.ones(torch.broadcast_shapes(prediction.shape, target.shape), device=prediction.device), None
    counted = target != criterion.ignore_index
    if criterion.weight is None:
        return counted, None
    return counted, criterion.weight[torch.where(counted, target, 0)].double() * counted


def _flat(base: Tensor | None) -> Tensor | None:
    return None if base is None else base.reshape(len(base), -1)


def losses_targets(losses: Callable[[Tensor, Any], Tensor], z: Tensor, g: Tensor, labels: Any) -> Targets:
    """Weights from a function (outputs, labels) -> losses, one or more per row: g = sum_i w_i d losses_i / d z."""
    with torch.enable_grad():
        outputs = z.detach().requires_grad_()
        elements = losses(outputs, labels)
        per_row = elements.flatten(1).mean(1) if elements.dim() > 1 else elements
        (d,) = torch.autograd.grad(per_row.sum(), outputs)
    d = d.double().reshape(len(z), -1)
    flat = g.double().reshape(len(z), -1)
    squares = d.square().sum(1)
    weights = torch.where(squares > 0, (flat * d).sum(1) / squares.clamp(min=1e-300), 0.0)
    residual = (flat - weights[:, None] * d).norm(dim=1) / flat.norm(dim=1).clamp(min=1e-300)
    return Targets(weights[:, None], None, None, residual.max(), tolerance_of(z))


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
