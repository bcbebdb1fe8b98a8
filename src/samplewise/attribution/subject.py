"""Subject of `attribute`: a model with its loss and data, at the parameters of trained models.

Trained models are checkpoints of runs. Queries are samples of the validation loader. Their losses and predictions, the
outcomes, are those of the last model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.attribution.methods import Method, Rerun, Scores, Task
from samplewise.attribution.ordered_samples import OrderedBatches, OrderedSamples, unknown_sampler
from samplewise.core.losses import IGNORE_INDEX, as_loss_fn, per_sample, prediction_columns
from samplewise.core.state import eval_mode
from samplewise.core.text import plural, progress
from samplewise.errors import BatchError, CheckpointError, NonFiniteGradientError
from samplewise.ledger.previews import preview
from samplewise.loop.checkpoint.trained import TrainedModel, run_settings, weights_of
from samplewise.loop.evaluation import OutputRecorder, Target, check_one_per_sample

QUERY_NUMBERS = 2**28  # of gradients of a batch of queries, which EK-FAC holds as rows
COPIES = 8  # of these rows during conjugate gradients
RULES = ("wrong", "worst")
INDICES = re.compile(r"([0-9]+)(?:-([0-9]+))?")  # a part of "0,5,10-20"


@dataclass(frozen=True)
class Outcomes:
    """Results of a model for some samples.

    losses       (N,), divided by the counts if the loss function returns them
    labels       (N,) class indices, or None if the task is not a classification with logits (B, classes)
    predictions  (N,) classes with the largest logit, or None
    """

    losses: Tensor
    labels: Tensor | None = None
    predictions: Tensor | None = None

    def of(self, rows: Tensor) -> Outcomes:
        """Outcomes of some of the samples."""
        labels, predictions = (None if column is None else column[rows] for column in (self.labels, self.predictions))
        return Outcomes(self.losses[rows], labels, predictions)


class Subject:
    """Model, loss and data. The parameters of the last trained model are loaded into model and loss.

    models: trained models; the last one is used for losses and predictions
    """

    def __init__(self, model: nn.Module, loss: Any, train: Any, validation: Any, models: Sequence[TrainedModel]):
        self.model = model
        self.loss = loss
        self.models = list(models)
        self.notes: list[str] = []
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        if isinstance(loss, nn.Module):
            loss.to(device)
            saved = models[-1].state.get("loss")
            if saved is not None:
                loss.load_state_dict(saved)
                self.models = self.models[-1:]
                self.notes.append("The loss has weights of its own: only the newest checkpoint is used.")
        self.states = [trained.parameters(model) for trained in self.models]
        model.load_state_dict(self.states[-1])
        if validation is None:
            raise BatchError(
                "the queries are samples of the validation loader; found none. Pass one: a recipe returns (loader, "
                "validation loader) from data()."
            )
        seed = models[-1].seed
        self.train = OrderedSamples(train, "training", seed, device)
        self.validation = OrderedSamples(validation, "validation", seed, device)
        length = len(train.dataset)
        for samples in (trained.samples for trained in self.models):
            if samples not in (None, length):
                raise CheckpointError(
                    f"the training dataset must be the one of the run, with {plural(samples, 'sample')}; found "
                    f"{plural(length, 'sample')}. Restore the data, or pass another run."
                )
        sampler = unknown_sampler(train)
        if sampler is not None:
            self.notes.append(
                f"All {plural(length, 'sample')} of the dataset count as training samples: it is not known which of "
                f"them {sampler} draws."
            )
        privacy = (run_settings(self.run).get("privacy") or "").replace("\n", " ")
        if privacy:
            self.notes.append(
                f"Private run: {privacy}. Its guarantee does not cover the scores and samples that are written."
            )

    @property
    def run(self) -> Path:
        """Directory of the run of the last model."""
        return self.models[-1].run

    @property
    def weights(self) -> list[float]:
        """Weight of each trained model: see `weights_of`."""
        return weights_of(self.models)

    @property
    def class_names(self) -> list[str]:
        """Names of the classes in the configuration of a model of transformers; empty if it has none of its own."""
        labels = getattr(getattr(self.model, "config", None), "id2label", None)
        if not isinstance(labels, Mapping) or all(str(name).startswith("LABEL_") for name in labels.values()):
            return []
        return [str(labels[k]) for k in sorted(labels)]

    def preview(self, samples: OrderedSamples, index: int, features: Sequence[str] | None) -> dict[str, Any]:
        """Preview of a sample; tokens as text if the collate_fn has a tokenizer, as those of transformers do."""
        item = samples.item(index)
        tokenizer = getattr(samples.loader.collate_fn, "tokenizer", None)
        if tokenizer is not None and isinstance(item, Mapping) and "input_ids" in item:
            item = {**item, "text": item.get("text", tokenizer.decode(item["input_ids"], skip_special_tokens=True))}
        return preview(item, features)

    def outcomes(self, batches: OrderedBatches) -> Outcomes:
        """Losses and predicted classes of the samples of some batches, in evaluation mode."""
        loss_fn = as_loss_fn(self.loss)
        recorder = OutputRecorder(self.model)
        losses: list[Tensor] = []
        classes: list[dict[str, Tensor] | None] = []
        with progress(len(batches), "losses, batches") as advance, eval_mode(self.model), torch.no_grad(), recorder:
            for batch in batches:
                recorder.clear()
                values, counts = per_sample(loss_fn(self.model, batch))
                check_one_per_sample(values)
                losses.append((values if counts is None else values / counts.where(counts > 0, 1)).double().cpu())
                outputs = recorder.last("the page shows its predictions", "write a loss function that does")
                classes.append(_classes(outputs, batch))
                advance(1)
        columns = [batch_columns for batch_columns in classes if batch_columns is not None]
        if len(columns) < len(classes):
            return Outcomes(torch.cat(losses))
        labels, predictions = (torch.cat([part[name].cpu() for part in columns]) for name in ("label", "prediction"))
        return Outcomes(torch.cat(losses), labels, predictions)

    def queries(self, rule: str, limit: int) -> tuple[list[int], Outcomes]:
        """Indices of the queries, and their outcomes; arguments as in `attribute`."""
        samples = self.validation
        if rule not in RULES:
            indices = _parse_indices(rule, samples.indices)
            return indices, self.outcomes(samples.batches(indices))
        outcomes = self.outcomes(samples.batches())
        order = outcomes.losses.argsort(descending=True, stable=True)
        if rule == "wrong":
            if outcomes.labels is None or outcomes.predictions is None:
                raise ValueError(
                    "queries='wrong' needs a classification: logits (B, classes) and labels (B,) that are class "
                    "indices; found another task. Use 'worst', or indices."
                )
            wrong = (outcomes.labels != outcomes.predictions) & (outcomes.labels != IGNORE_INDEX)
            order = order[wrong[order]]
            if not len(order):
                raise ValueError(
                    "queries='wrong' needs a misclassified validation sample; found none among "
                    f"{plural(len(samples), 'sample')}. Use 'worst'."
                )
        positions = order[:limit]
        return [samples.indices[k] for k in positions.tolist()], outcomes.of(positions)

    def scores(self, method: Method, queries: Sequence[int], rerun: Rerun | None) -> Scores:
        """Scores of a method; raises NonFiniteGradientError if they are not finite."""
        checkpoints = list(zip(self.states, self.weights, strict=True))
        train = self.train.batches()
        numbers = QUERY_NUMBERS // (COPIES if "refine" in method.options else 1)
        batches = self.validation.batches(queries, self._query_batch_size(numbers))
        task = Task(self.model, self.loss, checkpoints, train, batches, self.models[-1], rerun)
        passes = method.passes(task, **method.options)
        shown = (
            progress(len(train) * passes, "scores, batches of training samples")
            if passes
            else nullcontext(lambda parts: None)
        )
        with shown as advance:
            train.on_batch = lambda: advance(1)
            scores = method.compute(task, **method.options)
        self.notes += scores.notes
        if method.repeats:  # columns for all samples of the dataset
            scores = scores._replace(values=scores.values[:, list(self.train.indices)])
        finite = scores.values.isfinite()
        if not finite.all():
            query, sample = (~finite).nonzero()[0].tolist()
            raise NonFiniteGradientError(
                f"scores must be finite; found {scores.values[query, sample].item()} for query {queries[query]} and "
                f"training sample {self.train.indices[sample]}. Check that the model has not diverged and that the "
                "data are finite."
            )
        return scores

    def _query_batch_size(self, numbers: int) -> int:
        """That of training batches, for which the memory of a backward pass suffices; fewer for large models."""
        parameters = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        return min(self.train.batch_size, max(1, numbers // max(1, parameters)))


def _classes(outputs: Any, batch: Any) -> dict[str, Tensor] | None:
    """Label and prediction of each sample; None if outputs and batch are not those of a classification."""
    logits = getattr(outputs, "logits", outputs)
    try:
        labels = Target("prediction", "labels").of(batch)
    except BatchError:
        return None
    if not isinstance(logits, Tensor) or not isinstance(labels, Tensor):
        return None
    return prediction_columns(logits, labels, IGNORE_INDEX, ("label", "prediction"))


# --- indices in a text ------------------------------------------------------------------------------------------------


def check_queries(queries: str | Sequence[int]) -> str:
    """Queries as text; raises ValueError unless they have the form of a rule or of indices."""
    text = queries if isinstance(queries, str) else ",".join(map(str, queries))
    if text in RULES or all(INDICES.fullmatch(part.strip()) for part in text.split(",")):
        return text
    raise ValueError(
        f"queries must be indices of validation samples such as 0,5,10-20, or wrong, or worst; found {queries!r}."
    )


def _parse_indices(text: str, indices: Sequence[int]) -> list[int]:
    """Indices in a text such as "0,5,10-20", without duplicates, in the order of the text."""
    queries: dict[int, None] = {}  # an ordered set
    existing = indices if isinstance(indices, range) else set(indices)
    for part in text.split(","):
        match = INDICES.fullmatch(part.strip())
        assert match is not None  # see `check_queries`
        first = int(match[1])
        last = int(match[2] or first)
        if first not in existing or last not in existing or last < first:
            raise ValueError(
                f"queries must be indices of validation samples, {indices[0]} to {indices[-1]}; found {part.strip()}."
            )
        queries.update(dict.fromkeys(index for index in range(first, last + 1) if index in existing))
    return list(queries)
