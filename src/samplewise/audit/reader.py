"""Weights of the rows of backward passes, from outputs and gradients that hooks have kept.

Small passes are read together: operations on tensors take longer than the numbers in them, so that passes of one shape
are concatenated. A large one is read at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samplewise.audit import weights as reading
from samplewise.audit.records import (
    SHARES,
    Call,
    Output,
    Pass,
    RowWeights,
    Slot,
    close,
    fingerprints,
)

DEFERRED_PASSES = 64
DEFERRED_BYTES = 1 << 20
CLASSES = 64  # classes whose mean weights are compared

# Outputs of models of transformers from which others are computed.
INNER_OUTPUTS = {
    "hidden_states",
    "last_hidden_state",
    "encoder_last_hidden_state",
    "encoder_hidden_states",
    "decoder_hidden_states",
    "pooler_output",
    "past_key_values",
    "attentions",
}

Losses = Callable[[Tensor, Any], Tensor]


class Entry(NamedTuple):
    """Output of a pass, and the gradient of the loss with respect to it."""

    current: Pass
    output: Output
    g: Tensor


class Reader:
    """Reads passes: `add` each one when it is over, and `read` what is left at the end.

    losses: function (outputs, labels) -> losses; None: only losses that are known by their gradient, and criteria
    """

    def __init__(self, losses: Losses | None):
        self._losses = losses
        self._kinds: dict[Slot, reading.Kind] = {}
        self._has_class_weights: set[Slot] = set()
        self._factors: dict[int, Tensor] = {}  # of fingerprints
        self._unread: list[Pass] = []
        self._bytes = 0

    def add(self, current: Pass) -> None:
        self._unread.append(current)
        for output, g in current.outputs:
            self._bytes += g.nbytes + output.z.nbytes
        if self._bytes > DEFERRED_BYTES or len(self._unread) >= DEFERRED_PASSES:
            self.read()

    def discard(self) -> None:
        self._unread = []

    def read(self) -> None:
        """Read all passes since the last time, and release what was kept of them."""
        passes = self._unread
        self._unread = []
        self._bytes = 0
        for current in passes:
            self._choose_outputs(current)
        entries = [Entry(current, output, g) for current in passes for output, g in current.outputs]
        self._read_samples([entry.output.call for entry in entries])
        self._choose_kinds(entries)
        groups: dict[Hashable, list[Entry]] = {}
        for entry in entries:
            groups.setdefault(self._group(entry), []).append(entry)
        for group in groups.values():
            self._read_group(group)
        for current in passes:
            self._finish(current)

    def _choose_outputs(self, current: Pass) -> None:
        """Leave out outputs of models if a criterion of torch.nn, which is closer to the loss, has got them; and those
        of inner modules if others have rows.
        """
        inner = [output.is_inner for output, _ in current.outputs if output.z.dim()]
        if True in inner and False in inner:
            current.outputs = [(output, g) for output, g in current.outputs if not output.is_inner]
        if not any(output.criterion is not None for output, _ in current.outputs):
            return
        calls = [output.call for output, _ in current.outputs if output.criterion is None]
        current.outputs = [(output, g) for output, g in current.outputs if output.criterion is not None]
        for output, _ in current.outputs:
            output.call.ranks = max((call.ranks for call in calls), default=1)
            output.call.inputs = next((call.inputs for call in calls if call.inputs is not None), None)

    # --- samples -----------------------------------------------------------------------------------------------------

    def _read_samples(self, calls: Iterable[Call]) -> None:
        """Fingerprints of the samples of calls."""
        groups: dict[Hashable, dict[int, Call]] = {}
        for call in calls:
            if call.inputs is not None and call.samples is None:
                value, version = call.inputs
                if value._version == version:  # otherwise the loop has changed it meanwhile
                    groups.setdefault((value.shape[1:], value.dtype, value.device), {})[id(call)] = call
        for group in groups.values():
            values = [call.inputs[0] for call in group.values() if call.inputs is not None]
            numbers = fingerprints(torch.cat(values) if len(values) > 1 else values[0], self._factors)
            for call, part in zip(group.values(), numbers.split([len(v) for v in values]), strict=True):
                call.samples = part.tolist()
        for call in calls:
            call.inputs = None

    # --- kinds of losses ---------------------------------------------------------------------------------------------

    def _choose_kinds(self, entries: Iterable[Entry]) -> None:
        """Find out the kind of the loss of each new slot, from all passes together: one row alone may not tell."""
        together: dict[Slot, list[Entry]] = {}
        for entry in entries:
            output = entry.output
            if output.slot not in self._kinds and output.criterion is None and self._losses is None and output.intact:
                together.setdefault(output.slot, []).append(entry)
        for slot, same in together.items():
            shape = same[0].output.z.shape[1:]
            alike = [entry for entry in same if entry.output.z.shape[1:] == shape]
            kind = reading.kind_of(*_together(alike))
            kind = kind or next((kind for entry in same if (kind := reading.kind_of(*_together([entry])))), None)
            if kind is not None:
                self._kinds[slot] = kind

    # --- weights -----------------------------------------------------------------------------------------------------

    def _group(self, entry: Entry) -> Hashable:
        """Entries with equal keys are read together."""
        output = entry.output
        prediction = output.prediction if output.prediction is not None else output.z
        target = output.target
        samples = len(output.call.samples or ())
        shapes = prediction.shape, target if target is None else target.shape, samples
        if self._losses is not None or output.is_log_prob:
            return id(output)
        return output.slot, id(output.criterion), prediction.dtype, shapes, output.call.ranks

    def _read_group(self, group: Sequence[Entry]) -> None:
        """Read the weights of entries of one shape, and add them to their passes."""
        output = group[0].output
        if output.criterion is None and not output.z.dim() and not output.is_log_prob:
            return  # a loss that the model computes
        z, g = _together(group)
        values = z if output.criterion is not None else g
        wide = torch.promote_types(g.dtype, torch.float32)  # a sum of float16 may overflow
        sums = g.reshape(len(group), -1).sum(1, dtype=wide)
        finite = sums.reshape(-1).isfinite() & values.reshape(len(group), -1)[:, :1].isfinite().all(1)
        for entry, is_finite in zip(group, finite.tolist(), strict=True):
            entry.current.finite = entry.current.finite and is_finite
        if not finite.all():
            if len(group) > 1:
                for entry in group:
                    self._read_group([entry])
            return
        kind, targets = self._targets(group, z, g)
        if targets is None:
            return
        if targets.tolerance < targets.error < torch.inf:  # an infinite error: too few numbers for a test
            if len(group) > 1:
                for entry in group:
                    self._read_group([entry])
            return
        for entry, rows in zip(group, self._row_weights(group, kind, targets), strict=True):
            entry.current.weights.append(rows)

    def _targets(self, group: Sequence[Entry], z: Tensor, g: Tensor) -> tuple[str, reading.Targets | None]:
        """Kind of the loss, and weights of all entries of a group; None if they cannot be read."""
        output = group[0].output
        if output.criterion is not None:
            predictions = [entry.output.prediction for entry in group if entry.output.prediction is not None]
            targets = [entry.output.target for entry in group if entry.output.target is not None]
            result = reading.criterion_targets(output.criterion, predictions[0].shape, torch.stack(targets), g)
            return type(output.criterion).__name__, result
        if output.is_log_prob:
            if bool((g > 0).any() & (g < 0).any()):  # preferences or rewards, and no likelihood
                return "", None
            rows = len(g) if g.dim() > 1 else 1
            samples = len(output.call.samples or ())
            rows = samples if samples and g.numel() % samples == 0 else rows
            weights = -g.double().reshape(rows, -1)
            return "log probabilities", reading.Targets(weights, tolerance=reading.tolerance_of(g))
        if not all(entry.output.intact for entry in group):
            return "", None
        if self._losses is not None:
            if output.call.labels is None:
                raise reading.UnusableError(
                    "losses= needs labels, and the model has no argument 'labels' and no second positional one. Pass "
                    "labels=, the name of another argument or a function (args, kwargs) -> labels"
                )
            return "losses=", reading.losses_targets(self._losses, z, g, output.call.labels)
        kind = self._kinds.get(output.slot)
        return ("", None) if kind is None else (kind.name, kind.read(z, g))

    def _row_weights(self, group: Sequence[Entry], kind: str, targets: reading.Targets) -> list[RowWeights]:
        """Weights of each entry, added up for its samples, which have several rows in a flattened output (B * T, V)."""
        call = group[0].output.call
        slot = group[0].output.slot
        passes = len(group)
        rows = len(targets.weights) // passes
        samples = len(call.samples or ())
        if samples and rows % samples == 0:
            rows = samples
        weights = targets.weights.reshape(passes, rows, -1) / call.ranks
        enters = weights != 0
        base = weights
        if targets.base is not None:
            factors = targets.base.reshape(weights.shape)
            base = torch.where(enters, weights / factors, 0.0)
            sizes = (factors * enters).sum((1, 2))
        else:
            sizes = enters.sum((1, 2)).double()
        low = torch.where(enters, base, torch.inf).amin((1, 2)).tolist()
        high = torch.where(enters, base, -torch.inf).amax((1, 2)).tolist()
        tolerance = targets.tolerance
        uneven = any(a < b and not close(a, b, tolerance) for a, b in zip(low, high, strict=True))
        classes: list[Any] = [None] * passes
        if targets.base is None and targets.classes is not None and (uneven or slot in self._has_class_weights):
            labels = targets.classes.reshape(weights.shape)
            classes = [_class_weights(*tensors, tolerance) for tensors in zip(weights, labels, enters, strict=True)]
            if any(class_weights and len(class_weights) > 1 for class_weights in classes):
                self._has_class_weights.add(slot)
        return [
            RowWeights(
                slot=slot,
                kind=SHARES if targets.relative else kind,
                samples=(entry.output.call.samples or []) if samples == rows else [],
                sums=row_sums,
                counts=row_counts,
                low=first if first < torch.inf else 0.0,
                high=last if last > -torch.inf else 0.0,
                size=size,
                tolerance=tolerance,
                classes=class_weights,
                elements=targets.elements,
                microbatch=entry.current.number,
            )
            for entry, row_sums, row_counts, first, last, size, class_weights in zip(
                group,
                weights.sum(2).tolist(),
                enters.sum(2).tolist(),
                low,
                high,
                sizes.tolist(),
                classes,
                strict=True,
            )
        ]

    def _finish(self, current: Pass) -> None:
        """Complete a pass whose outputs were read."""
        if not current.finite:
            current.weights = []
        calls = [output.call for output, _ in current.outputs if output.call.samples]
        current.samples = calls[-1].samples or [] if calls else []
        slots = {weights.slot for weights in current.weights}
        current.has_other_losses = _has_other_losses(current, slots)
        with_rows = [entry for entry in current.outputs if entry[0].z.dim() and entry[0].criterion is None]
        if not slots and with_rows and current.finite:  # the last output is the one closest to the loss
            output, g = with_rows[-1]
            current.comparison = reading.compared_with_mean(output.z, g)
            entry = Entry(current, output, g)
            current.weights = self._row_weights([entry], SHARES, reading.shares(output.z, g))
        current.outputs = []


def _together(entries: Sequence[Entry]) -> tuple[Tensor, Tensor]:
    """Outputs and gradients of entries, with all rows; scalars of several entries are stacked."""
    z = [entry.output.z for entry in entries]
    g = [entry.g for entry in entries]
    if len(entries) == 1:
        return z[0], g[0]
    join = torch.cat if z[0].dim() and entries[0].output.criterion is None else torch.stack
    return join(z), join(g)


def _class_weights(
    weights: Tensor, labels: Tensor, enters: Tensor, tolerance: float
) -> dict[int, tuple[float, int]] | None:
    """Weight and number of targets of each class, if all targets of a class have the same weight, and some class has
    several targets or is the only one; otherwise None.
    """
    values: dict[int, tuple[float, int]] = {}
    for label in labels[enters].unique().tolist()[: CLASSES + 1]:
        chosen = weights[enters & (labels == label)]
        if not close(float(chosen.min()), float(chosen.max()), tolerance):
            return None
        values[label] = (float(chosen.mean()), len(chosen))
    repeated = len(values) == 1 or any(count > 1 for _, count in values.values())
    return values if repeated and len(values) <= CLASSES else None


def _has_other_losses(current: Pass, slots: set[Slot]) -> bool:
    """True if an output that is no input of those with known weights got a gradient. Autograd comes to outputs in the
    reverse order of their computation: the inputs of an output come after it.
    """
    calls = {id(output.call) for output, _ in current.outputs if output.slot in slots}
    fused = {id(output.call) for output, _ in current.outputs if output.slot in slots and output.is_log_prob}
    first = True
    for output, _ in current.outputs:
        if not output.z.dim() or id(output.call) in fused:
            continue  # the loss of the model, or what it is computed from
        if output.slot in slots:
            first = False
        elif first or (id(output.call) in calls and output.slot.name.partition(".")[0] not in INNER_OUTPUTS):
            return True
    return False
