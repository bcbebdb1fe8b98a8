"""Subject of an attribution: model, loss and data of a recipe, with the parameters of trained models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from torch import nn

from samplewise.cli.attribution_methods import COMPUTATIONS, Scores, Task
from samplewise.cli.attribution_options import Method
from samplewise.cli.dataset_order import OrderedBatches, OrderedSamples, unknown_sampler
from samplewise.cli.queries import Outcomes, outcomes
from samplewise.cli.recipe import Recipe
from samplewise.cli.recipe_file import RecipeError
from samplewise.cli.trained_models import TrainedModel, run_settings
from samplewise.core.progress import progress
from samplewise.core.text import plural
from samplewise.errors import BatchError, CheckpointError
from samplewise.ledger.previews import preview

QUERY_NUMBERS = 2**28  # of gradients of a batch of queries, which EK-FAC holds as rows


class Subject:
    """Model, loss and data of a recipe. The model has the parameters of the last trained model.

    models: trained models; the last one is used for losses and predictions
    seed: of the run
    """

    def __init__(self, recipe: Recipe, models: Sequence[TrainedModel], seed: int, device: torch.device):
        self._recipe = recipe
        self._device = device
        self.models = list(models)
        self.notes: list[str] = []
        self.model = recipe.model()
        train, validation = recipe.data()
        with recipe.errors():
            self.model.to(device)
            self.loss = self._loaded_loss()
            self.states = [each.parameters(self.model) for each in self.models]
            self.model.load_state_dict(self.states[-1])
            self.train = OrderedSamples(train, "training", seed, device)
            self.validation = OrderedSamples(_given(validation), "validation", seed, device)
            self._check_data()
        self._check_privacy()

    @property
    def run(self) -> Path:
        """Directory of the run of the last model."""
        return self.models[-1].run

    @property
    def path(self) -> str:
        """Path of the recipe."""
        return str(self._recipe.path)

    @property
    def weights(self) -> list[float]:
        """Weight of each trained model: the learning rate of its last update; 1 each if one is unknown, if all are 0,
        or if there is one model only.
        """
        rates = [each.learning_rate for each in self.models]
        known = [rate for rate in rates if rate is not None]
        usable = len(known) == len(rates) > 1 and any(known)
        return known if usable else [1.0] * len(rates)

    @property
    def class_names(self) -> list[str]:
        """Names of the classes in the configuration of a model of transformers; empty if it has none of its own."""
        labels = getattr(getattr(self.model, "config", None), "id2label", None)
        if not isinstance(labels, Mapping) or all(str(name).startswith("LABEL_") for name in labels.values()):
            return []
        return [str(labels[k]) for k in sorted(labels)]

    def preview(self, samples: OrderedSamples, index: int, features: Sequence[str] | None) -> dict[str, Any]:
        """Preview of a sample; tokens as text if the collate_fn has a tokenizer, as those of transformers do."""
        with self._recipe.errors():
            item = samples.item(index)
            tokenizer = getattr(samples.loader.collate_fn, "tokenizer", None)
            if tokenizer is not None and isinstance(item, Mapping) and "input_ids" in item:
                item = {**item, "text": item.get("text", tokenizer.decode(item["input_ids"], skip_special_tokens=True))}
            return preview(item, features)

    def outcomes(self, batches: OrderedBatches) -> Outcomes:
        """Losses and predictions of the last model."""
        with self._recipe.errors(), progress(len(batches), "losses, batches") as advance:
            batches.on_batch = lambda: advance(1)
            return outcomes(self.model, self.loss, batches)

    def scores(self, method: Method, queries: Sequence[int]) -> Scores:
        """Scores of a method; raises RecipeError if they are not finite."""
        checkpoints = list(zip(self.states, self.weights, strict=True))
        train = self.train.batches()
        task = Task(self.model, self.loss, checkpoints, train, self.validation.batches(queries, self._query_batch_size))
        computation = COMPUTATIONS[method.name]
        total = len(train) * computation.passes(task)
        with self._recipe.errors(), progress(total, "scores, batches of training samples") as advance:
            train.on_batch = lambda: advance(1)
            scores = computation.scores(task, **method.options)
        known = scores.values.isfinite()
        if not known.all():
            query, sample = (~known).nonzero()[0].tolist()
            raise RecipeError(
                f"scores must be finite; found {scores.values[query, sample].item()} for query {queries[query]} and "
                f"training sample {self.train.indices[sample]}. Check that the model has not diverged and that the "
                "data are finite."
            )
        return scores

    @property
    def _query_batch_size(self) -> int:
        """That of training batches, for which the memory of a backward pass suffices; fewer for large models."""
        parameters = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        return min(self.train.batch_size, max(1, QUERY_NUMBERS // max(1, parameters)))

    def _loaded_loss(self) -> Any:
        """The loss of the recipe on the device, with its saved weights if it has some, in evaluation mode."""
        loss = self._recipe.loss(self.model)
        if not isinstance(loss, nn.Module):
            return loss
        loss.to(self._device).eval()
        saved = self.models[-1].state.get("loss")
        if saved is not None:
            loss.load_state_dict(saved)
            self.models = self.models[-1:]
            self._note("The loss has weights of its own: only the newest checkpoint is used.")
        return loss

    def _check_data(self) -> None:
        """Raise CheckpointError if the training data has another length than that of the run."""
        length = len(self.train.loader.dataset)
        for trained in (each.samples for each in self.models):
            if trained not in (None, length):
                raise CheckpointError(
                    f"the training dataset of the recipe must be the one of the run, with {plural(trained, 'sample')}; "
                    f"found {plural(length, 'sample')}. Restore the data, or pass another run with --run."
                )
        sampler = unknown_sampler(self.train.loader)
        if sampler is not None:
            self._note(
                f"All {plural(length, 'sample')} of the dataset count as training samples: it is not known which of "
                f"them {sampler} draws."
            )

    def _check_privacy(self) -> None:
        plan = run_settings(self.run).get("privacy")
        if plan:
            plan = plan.replace("\n", " ")
            self._note(f"Private run: {plan}. Its guarantee does not cover the scores and samples that are written.")

    def _note(self, text: str) -> None:
        self.notes.append(text)
        typer.echo(text, err=True)


def _given(validation: Any) -> Any:
    if validation is None:
        raise BatchError(
            "queries are samples of the validation loader; found none. Return (loader, validation loader) from data()."
        )
    return validation
