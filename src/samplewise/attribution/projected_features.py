"""Features of samples: projected gradients of a model, and weights if they are gradients of an output function."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samplewise.attribution.store_files import RowsFile
from samplewise.core.batches import cut, length
from samplewise.core.directory_lock import DirectoryLock
from samplewise.core.files import sha256
from samplewise.core.losses import LossFn, same_constants
from samplewise.core.microbatch import Microbatch
from samplewise.engine.gradients import project
from samplewise.engine.projection import Projection
from samplewise.errors import LossesError, StoreError
from samplewise.parallel import collectives
from samplewise.parallel.collectives import errors_on_all_ranks
from samplewise.scan import Scanner

# (model, batch) -> outputs (B,), or (outputs, weights); see `outputs_and_weights`
OutputFn = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor]]
# Rows are written when they have this many elements, or when this time has passed since the last write.
ELEMENTS_PER_WRITE = 2**24
SECONDS_PER_WRITE = 5.0


def margin(model: nn.Module, batch: Any) -> Tensor:
    """Log-odds (B,) of the correct class: its logit minus the log-sum-exp of the other logits. Larger is better.

    `batch` is (x, labels) with `model(x)` returning logits (B, classes), or a dict with "labels" for a model of
    transformers.
    """
    logits, labels = _logits_and_labels(model, batch)
    correct = labels[:, None]
    incorrect_logits = logits.scatter(1, correct, -torch.inf)
    return logits.gather(1, correct)[:, 0] - incorrect_logits.logsumexp(1)


def outputs_and_weights(result: Any) -> tuple[Tensor, Tensor]:
    """Split the result of an output function into outputs (B,) and weights (B,).

    The weight of a sample is minus the derivative of its loss with respect to its output. If only outputs are
    returned, they are taken as log-odds, whose loss is log(1 + exp(-output)): the weight is 1 - probability.
    """
    outputs, weights = result if isinstance(result, tuple) else (result, None)
    if not isinstance(outputs, Tensor) or outputs.dim() != 1:
        description = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise LossesError(f"output_fn must return outputs (B,), or (outputs, weights); found {description}.")
    if weights is None:
        return outputs, torch.sigmoid(-outputs.detach())
    if not isinstance(weights, Tensor) or weights.shape != outputs.shape:
        description = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise LossesError(
            f"weights of output_fn must be a tensor like its outputs, {tuple(outputs.shape)}; found {description}."
        )
    return outputs, weights.detach()


def _logits_and_labels(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Logits (B, classes) and labels (B,) of a batch."""
    if isinstance(batch, Mapping) and "labels" in batch:
        labels = batch["labels"]
        logits = model(**{name: value for name, value in batch.items() if name != "labels"})
    elif isinstance(batch, (tuple, list)) and len(batch) >= 2:
        labels = batch[1]
        logits = model(batch[0])
    else:
        raise LossesError(
            f"margin needs batches (x, labels), or dicts with labels; found {type(batch).__name__}. Write your own "
            "output_fn(model, batch) that returns one number per sample."
        )
    logits = getattr(logits, "logits", logits)
    if logits.dim() != 2 or not isinstance(labels, Tensor) or labels.dim() != 1 or labels.is_floating_point():
        description = f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} of {labels.dtype}"
        raise LossesError(
            f"margin needs logits (B, classes) and labels (B,) that are class numbers; found {description}. Write your "
            "own output_fn(model, batch) that returns one number per sample."
        )
    return logits, labels


class Features(NamedTuple):
    """Projected rows (B, dim) of a batch, and weights (B,), both float32 on the CPU."""

    rows: Tensor
    weights: Tensor | None


def features_of(
    model: nn.Module,
    fn: LossFn | OutputFn,
    projection: Projection,
    weighted: bool,
    microbatch: Microbatch,
) -> Callable[[Any], Features]:
    """Function batch -> Features. weighted: `fn` is an output function."""
    last_weights: list[Tensor] = []  # of the last call

    def outputs(model: nn.Module, batch: Any) -> Tensor:
        outputs, weights = outputs_and_weights(fn(model, batch))
        last_weights[:] = [weights]
        return outputs

    scanner = Scanner(model, same_constants(outputs, fn) if weighted else fn, microbatch)

    def of_batch(batch: Any) -> Features:
        rows = []
        weights: list[Tensor] = []
        for _, g in scanner.of(batch):
            rows.append(checked_rows(project(g, projection, release=True), projection.dim, "rows"))
            weights.extend(checked_weights(part, len(g)) for part in last_weights)
        return Features(torch.cat(rows), torch.cat(weights) if weighted else None)

    return of_batch


def checked_rows(rows: Any, dim: int, name: str) -> Tensor:
    """Rows (B, dim) in float32 on the CPU."""
    if not isinstance(rows, Tensor) or rows.is_complex():
        description = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
        raise TypeError(f"{name} must be Gradients or a real tensor (B, {dim}); found {description}.")
    if rows.dim() != 2 or rows.shape[1] != dim:
        raise ValueError(f"{name} must have the store's shape (B, {dim}); found {tuple(rows.shape)}.")
    rows = rows.detach().float().cpu()
    if not rows.sum().isfinite() and not rows.isfinite().all():  # a finite sum proves it in a fraction of the time
        raise ValueError(f"{name} must be finite in float32; found NaN or infinity.")
    return rows


def checked_weights(weights: Tensor, count: int) -> Tensor:
    """Weights (count,) in float32 on the CPU."""
    if not isinstance(weights, Tensor) or weights.shape != (count,):
        description = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(f"weights must be a tensor ({count},), one per sample; found {description}.")
    weights = weights.detach().float().cpu()
    if not weights.isfinite().all():
        raise ValueError("weights must be finite in float32; found NaN or infinity.")
    return weights


def layer_widths(names: Iterable[str], dim: int) -> tuple[tuple[str, int], ...]:
    """Layers of parameters, in order, and the numbers of dimensions of their blocks, which differ by at most one."""
    layers = list(dict.fromkeys(map(layer_of, names)))
    if dim < len(layers):
        raise ValueError(f"dim must be at least the number of layers, {len(layers)}, with blocks='layer'; found {dim}.")
    return tuple((layer, dim // len(layers) + (k < dim % len(layers))) for k, layer in enumerate(layers))


def layer_of(name: str) -> str:
    """Module path of a parameter's name; the name itself for a parameter of the whole model."""
    return name.rpartition(".")[0] or name


def block_slices(widths: Iterable[tuple[str, int]]) -> dict[str, slice]:
    """Columns of each layer."""
    slices = {}
    start = 0
    for layer, width in widths:
        slices[layer] = slice(start, start + width)
        start += width
    return slices


def adam_scale(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Scale of Adam's steps, name -> 1 / (sqrt(v / (1 - beta2**step)) + eps), from the second moments v."""
    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    scale = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            if p in names and "exp_avg_sq" in state:
                second = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"]
                corrected = second / (1 - group["betas"][1] ** float(state["step"]))
                scale[names[p]] = (corrected.sqrt() + group["eps"]).reciprocal()
    missing = set(names.values()) - set(scale)
    if missing:
        raise ValueError(
            "second_moments must be an optimizer with second moments (exp_avg_sq) of all trained parameters, such as "
            f"torch.optim.AdamW after a step; found none for {sorted(missing)[0]!r}. Train first, or leave it out."
        )
    return scale


def checksum_of_model(model: nn.Module) -> str:
    """SHA-256 of names, dtypes, shapes and values of parameters and buffers."""
    return sha256(
        content
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        for content in (f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}", tensor)
    )


def checksum_of_scale(scale: Mapping[str, Tensor] | None) -> str:
    """SHA-256 of names and values; empty for None."""
    if scale is None:
        return ""
    return sha256(content for name in sorted(scale) for content in (name, scale[name]))


def skip_samples(loader: Iterable[Any], samples: int, check: Callable[[Any], None]) -> Iterator[Any]:
    """Batches of a loader without its first `samples` samples. `check` is called with the first sample that is skipped,
    as a batch.
    """
    unchecked = samples > 0
    for batch in loader:
        size = length(batch) if samples else 0
        if size is None:
            raise StoreError(
                "continuing to fill a store needs batches that can be sliced, to skip the samples it has; found a "
                f"batch of type {type(batch).__name__}. Start a new store, or call add for the missing samples."
            )
        if unchecked:
            check(cut(batch, 0, 1))
            unchecked = False
        if not samples:
            yield batch
        elif samples < size:
            yield cut(batch, samples, size)
        samples = max(samples - size, 0)


class Writer:
    """Collects features and appends them to a file, on rank 0, which holds the lock of the store."""

    def __init__(self, file: RowsFile, lock: DirectoryLock):
        self._file = file
        self._lock = lock
        self._parts: list[Features] = []
        self._elements = 0
        self._written = time.monotonic()

    def add(self, features: Features) -> None:
        self._parts.append(features)
        self._elements += features.rows.numel()
        if self._elements >= ELEMENTS_PER_WRITE or time.monotonic() - self._written > SECONDS_PER_WRITE:
            self._write()

    def finish(self) -> None:
        """Write the remaining rows. Collective."""
        self._write()
        collectives.barrier()
        self._file.reload()

    def _write(self) -> None:
        if self._parts and collectives.rank() == 0:
            rows = torch.cat([part.rows for part in self._parts])
            weights = [part.weights for part in self._parts if part.weights is not None]
            with errors_on_all_ranks():
                self._lock.verify()
                self._file.append(rows, torch.cat(weights) if weights else None)
        self._parts.clear()
        self._elements = 0
        self._written = time.monotonic()
