"""Scores that need no gradients: nearest neighbors of the same class, and the loss of the training sample.

Scores of a method say little if these predict as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samplewise.core.losses import LossFn, as_loss_fn, per_sample
from samplewise.core.state import eval_mode
from samplewise.dataset_pass import check_train_and_queries


def baselines(model: nn.Module, loss_fn: LossFn, train: Iterable[Any], queries: Iterable[Any]) -> dict[str, Tensor]:
    """Scores (queries, training samples) of simple methods, for `lds(..., baselines=)`.

    "neighbors, pixels": cosine similarity of the inputs of samples of the same class, 0 for other classes; only for
        inputs of floating-point numbers of one shape
    "neighbors, features": the same for the input of the last layer
    "loss": the loss of the training sample, equal for all queries

    Batches are (x, labels), or dicts with labels. If a label is not one integer, all samples are of the same class. The
    features of a model with tokens are means over the tokens.
    """
    check_train_and_queries(train, queries)
    loss = as_loss_fn(loss_fn)
    with eval_mode(model), torch.no_grad():
        of_queries = _describe(model, loss, queries)
        of_train = _describe(model, loss, train)
    same_class: Tensor | float = 1.0
    if of_queries.labels is not None and of_train.labels is not None:
        same_class = (of_queries.labels[:, None] == of_train.labels).double()
    scores = {}
    if of_queries.pixels is not None and of_train.pixels is not None:
        scores["neighbors, pixels"] = _cosine(of_queries.pixels, of_train.pixels) * same_class
    scores["neighbors, features"] = _cosine(of_queries.features, of_train.features) * same_class
    scores["loss"] = of_train.losses.expand(len(of_queries.losses), -1).clone()
    return scores


class _Descriptions(NamedTuple):
    """What the baselines need to know about samples."""

    pixels: Tensor | None  # (b, inputs)
    features: Tensor  # (b, features)
    labels: Tensor | None  # (b,)
    losses: Tensor  # (b,)


def _describe(model: nn.Module, loss_fn: LossFn, loader: Iterable[Any]) -> _Descriptions:
    parts = []
    for batch in loader:
        x, labels = _inputs_and_labels(batch)
        with _last_input(model) as last:
            losses = per_sample(loss_fn(model, batch))[0]
        pictures = x.flatten(1).double().cpu() if isinstance(x, Tensor) and x.is_floating_point() else None
        parts.append(_Descriptions(pictures, _pooled(last[0], len(losses)), labels, losses.double().cpu()))
    if not parts:
        raise ValueError("train and queries must yield at least one batch; found none. Pass a loader or a list.")
    return _Descriptions(
        _join([part.pixels for part in parts]),
        torch.cat([part.features for part in parts]),
        _join([part.labels for part in parts]),
        torch.cat([part.losses for part in parts]),
    )


def _join(parts: list[Tensor | None]) -> Tensor | None:
    """Rows of all batches; None if a batch has none, or another width."""
    tensors = [part for part in parts if part is not None]
    fits = len(tensors) == len(parts) and len({part.shape[1:] for part in tensors}) == 1
    return torch.cat(tensors) if fits else None


def _inputs_and_labels(batch: Any) -> tuple[Any, Tensor | None]:
    """Inputs and classes (b,) of a batch; None if a label is not one integer."""
    if isinstance(batch, Mapping) and "labels" in batch:
        x, labels = None, batch["labels"]
    elif isinstance(batch, (tuple, list)) and len(batch) >= 2:
        x, labels = batch[0], batch[1]
    else:
        raise ValueError(f"batches must be (x, labels), or dicts with labels; found {type(batch).__name__}.")
    classes = isinstance(labels, Tensor) and labels.dim() == 1 and not labels.is_floating_point()
    return x, labels.cpu() if classes else None


@contextmanager
def _last_input(model: nn.Module) -> Iterator[list[Tensor]]:
    """List whose only element, after a forward pass, is the input of the last layer with parameters that ran."""
    last: list[Tensor] = []

    def note(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        if arguments and isinstance(arguments[0], Tensor):
            last[:] = [arguments[0]]

    layers = [m for m in model.modules() if not list(m.children()) and list(m.parameters())]
    handles = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        yield last
    finally:
        for handle in handles:
            handle.remove()


def _pooled(features: Tensor, samples: int) -> Tensor:
    """Features (b, width): the mean over tokens of (b, tokens, width)."""
    if features.shape[0] != samples:
        raise ValueError(
            f"the input of the last layer must have a row for each of the {samples} samples; found "
            f"{tuple(features.shape)}."
        )
    features = features.double().cpu()
    return features.mean(1) if features.dim() == 3 else features.flatten(1)


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    return nn.functional.normalize(a, dim=1) @ nn.functional.normalize(b, dim=1).T
