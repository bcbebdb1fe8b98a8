"""Records of an audit: forward calls, backward passes, updates, and the weights of the rows of a pass."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn


class Site(NamedTuple):
    """Line of the user's code that made a call. instruction: tells calls in one line apart."""

    file: str
    line: int
    instruction: int = 0

    def __str__(self) -> str:
        path = Path(self.file)
        here = Path.cwd()
        return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{self.line}"


UNKNOWN_SITE = Site("?", 0)


class Slot(NamedTuple):
    """One output of the forward calls that a line of code makes: microbatches of a loop have it in common."""

    site: Site
    name: str  # path in the output, or class of a criterion
    model: int = -1  # number of the model, in the order of the first calls


@dataclass(slots=True)
class Call:
    """Forward call that records a graph.

    ranks: number of ranks whose gradients are averaged
    samples: ids or fingerprints of the samples, equal for equal content; None if they are not known, or not yet
    inputs: tensor (B, ...) for fingerprints, and its version
    in_eval_mode: modules in eval mode
    reads_input_gradients: an argument requires a gradient, as for adversarial examples
    """

    site: Site
    module: nn.Module
    ranks: int
    samples: list[int] | None = None
    inputs: tuple[Tensor, int] | None = None
    labels: Any = None
    in_eval_mode: tuple[str, ...] = ()
    reads_input_gradients: bool = False


@dataclass(slots=True)
class Output:
    """Tensor whose gradient is read. `value`, `prediction` and `target`: result and arguments of a criterion."""

    call: Call
    slot: Slot
    z: Tensor
    version: int
    criterion: nn.Module | None = None
    prediction: Tensor | None = None
    target: Tensor | None = None
    is_inner: bool = False  # of the last module of the model, in place of what the model returns
    is_log_prob: bool = False  # the gradient belongs to log probabilities inside of the loss `z`

    @property
    def intact(self) -> bool:
        """True if the tensor has rows, and was not changed in place after the call."""
        return self.z.dim() > 0 and self.z._version == self.version


@dataclass(slots=True)
class RowWeights:
    """Weights of the targets of one output in one backward pass, added up for each row.

    low, high: of the weights of single targets, each divided by the factor of its class
    size: number of targets, each times the factor of its class
    classes: weight and number of targets of each class, if the weights depend on nothing else; otherwise None
    """

    slot: Slot
    kind: str
    samples: list[int]  # fingerprints, or an empty list
    sums: list[float]
    counts: list[int]
    low: float
    high: float
    size: float
    tolerance: float
    classes: dict[int, tuple[float, int]] | None = None
    elements: int = 1  # of a sample; its loss may be their sum, and its weight that many times larger
    calls: int = 1  # of the model in this pass
    microbatch: int = 0  # number of the pass
    rank: int = 0

    @property
    def total(self) -> float:
        return sum(self.sums)

    def joined(self, other: RowWeights) -> RowWeights:
        """The rows of two calls together."""
        return replace(
            self,
            samples=self.samples + other.samples if self.samples and other.samples else [],
            sums=self.sums + other.sums,
            counts=self.counts + other.counts,
            low=min(self.low, other.low) if self.targets and other.targets else self.low or other.low,
            high=max(self.high, other.high) if self.targets and other.targets else self.high or other.high,
            size=self.size + other.size,
            classes=None,
            calls=self.calls + other.calls,
        )

    def scaled(self, factor: float) -> RowWeights:
        """The same rows with all weights multiplied."""
        classes = self.classes and {label: (weight * factor, n) for label, (weight, n) in self.classes.items()}
        sums = [weight * factor for weight in self.sums]
        return replace(self, sums=sums, low=self.low * factor, high=self.high * factor, classes=classes)

    @property
    def targets(self) -> int:
        return sum(self.counts)

    @property
    def relative(self) -> bool:
        return self.kind == SHARES

    @property
    def uniform(self) -> bool:
        return close(self.low, self.high, self.tolerance)


SHARES = "shares"


def close(first: float, second: float, tolerance: float) -> bool:
    return abs(first - second) <= tolerance * max(abs(first), abs(second))


def own_weights(slot: Slot, counts: Tensor, divisor: float, microbatch: int) -> RowWeights:
    """Weights of samples in an update of `sw.Step`, by their terms of the denominator."""
    sums = (counts.double() / divisor).tolist()
    weight = 1 / divisor
    targets = [int(n > 0) for n in sums]
    size = float(counts.sum())
    return RowWeights(slot, "sw.Step", [], sums, targets, weight, weight, size, 1e-4, microbatch=microbatch)


@dataclass(slots=True, eq=False)
class Pass:
    """Backward pass that has reached parameters: the gradient of a microbatch.

    reached: parameters whose gradients it has changed; empty for a pass that only computes gradients of tensors
    updates: numbers of the updates that it was applied in
    inside: it ran inside of optimizer.step(closure)
    shown: a pass of `observation.show_gradients`
    erased: its gradient was set to zero or None, at least in part, before it was applied
    skipped: erased after a loss scaler has skipped the update, because gradients were not finite
    intended: its gradient was used otherwise, as for adversarial examples
    has_other_losses: outputs beside or after those in `weights` got a gradient: the loss has terms that are not known
    outputs: what is read when the pass is over
    """

    number: int
    rates: tuple[float, ...]
    inside: bool
    shown: bool = False
    outputs: list[tuple[Output, Tensor]] = field(default_factory=list)
    weights: list[RowWeights] = field(default_factory=list)
    sites: set[Site] = field(default_factory=set)
    samples: list[int] = field(default_factory=list)
    reached: set[int] = field(default_factory=set)
    updates: list[int] = field(default_factory=list)
    erased: bool = False
    skipped: bool = False
    finite: bool = True
    intended: bool = False
    has_other_losses: bool = False
    comparison: float | None = None  # see `weights.compared_with_mean`


@dataclass(slots=True, eq=False)
class OptimizerStep:
    """Update of parameters.

    passes: backward passes whose gradients were in `.grad`; those among `stale` had been applied before
    optimizer: its number, in the order of the first steps
    written: gradients were not written by a backward pass that was observed
    is_unknown: gradients were changed by hand, so that weights in the passes are not those in the update
    replaced: the loop has put other tensors in the place of gradients
    factor: by which all gradients were multiplied after the last pass, as by clipping; None if they have no common one
    norm: of the gradient; None if it is not recorded
    scale: loss scale
    scaled_norms: with a loss scale, the norms of the unscaled gradient after the last pass and at the step
    """

    number: int
    optimizer: int
    site: Site = UNKNOWN_SITE
    passes: list[int] = field(default_factory=list)
    stale: list[int] = field(default_factory=list)
    rates: tuple[float, ...] = ()
    written: bool = False
    is_unknown: bool = False
    replaced: bool = False
    factor: float | None = 1.0
    scale: float = 1.0
    norm: float | None = None
    scaled_norms: tuple[float, float] | None = None


def living_objects(*bases: type) -> dict[type, list[Any]]:
    """Objects of these classes in the process."""
    objects: dict[type, list[Any]] = {base: [] for base in bases}
    base_of: dict[type, type | None] = {}  # of each class, because there are many objects and few classes
    for thing in gc.get_objects():
        kind = type(thing)
        if kind not in base_of:
            base_of[kind] = next((base for base in bases if issubclass(kind, base)), None)
        base = base_of[kind]
        if base is not None:
            objects[base].append(thing)
    return objects


def fingerprints(value: Tensor, factors: dict[int, Tensor]) -> Tensor:
    """Numbers (B,) that are equal for rows of equal content, also with more zeros at the end. Integer arithmetic: they
    do not depend on the number of rows.
    """
    flat = value.reshape(len(value), -1)
    if flat.shape[1] > SAMPLED:
        flat = flat[:, :: flat.shape[1] // SAMPLED]
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten(1)
    if flat.is_floating_point():
        flat = flat.contiguous().view(INTEGERS[flat.dtype.itemsize])
    size = flat.shape[1]
    if size not in factors:
        generator = torch.Generator().manual_seed(0)
        limits = (-(1 << 62), 1 << 62)
        factors[size] = torch.randint(*limits, (size,), generator=generator).to(flat.device)
    return (flat * factors[size]).sum(1)


def number_ids(ids: Any) -> list[int]:
    """Ids (B,) as numbers; texts become checksums."""
    if isinstance(ids, Tensor):
        numbers: list[int] = ids.flatten().tolist()
        return numbers
    return [crc32(str(i).encode()) if isinstance(i, (str, bytes)) else int(i) for i in ids]


SAMPLED = 1 << 14  # values of a row that enter a fingerprint
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
