"""Kinds of batches: which rows or tokens of the outputs belong to a sample, and what the loss divides by.

Rows         row i is sample i: the Trainer of transformers, SFTTrainer
Sentences    a sample has several texts: trainers of sentence-transformers
Documents    a row has tokens of several documents: SFTTrainer with packing, padding-free batches
Pairs        rows i and i + B are the completions of pair i: DPOTrainer, RewardTrainer, ORPOTrainer, CPOTrainer
Judged       row i is a completion with a label: KTOTrainer
Completions  row i is a completion that the trainer has generated: GRPOTrainer, RLOOTrainer
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from samplewise.core.losses import IGNORE_INDEX
from samplewise.core.text import plural
from samplewise.errors import BatchError, DistributedError, GraphError, SamplesInteractError, SamplewiseError
from samplewise.integrations.huggingface.outputs import TrainerLoss, attached, per_sample_outputs, reduced_losses
from samplewise.integrations.huggingface.recording import with_columns
from samplewise.integrations.huggingface.units import check_sentence_loss, loss_without_graph, number_of_samples
from samplewise.integrations.transformers_losses import KnownLosses
from samplewise.ledger.sample_ids import IdCollator, as_column, split_entries
from samplewise.parallel import collectives

SampleLosses = Callable[[Any, Any], KnownLosses | None]  # of the outputs of a model and a batch
OwnedOutputs = tuple[list[Tensor], list[Tensor] | None]  # samples of the rows or tokens; None: row i is sample i


class BatchKind(ABC):
    """Samples of the batches of a trainer."""

    rows_are_samples: ClassVar[bool] = False  # row i of a batch is sample i
    reads_operands: ClassVar[bool] = True  # losses of the samples come from the means and sums in compute_loss

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def collator(self, collate: Callable[[list[Any]], Any], columns: Collection[Hashable]) -> Any:
        """The trainer's collator, whose batches also get columns of the dataset that it does not know."""
        return IdCollator(collate, partial(split_entries, keys=columns), with_columns)

    def prepare(self, model: Any, inputs: Any) -> None:
        """Find out whether samples are independent, before a step that computes per-sample gradients."""
        return

    def check(self, loaded: Any) -> None:
        """Raise BatchError for a batch of the data loader whose samples are not known."""
        if not isinstance(loaded, Mapping):
            raise BatchError(
                f"a batch must be a dict of tensors; found {type(loaded).__name__}. Use a trainer whose data collator "
                "returns dicts."
            )

    def batch(self, loaded: Any, prepared: Any) -> Any:
        """The batch, whose columns for the ledger have one value per sample.

        loaded: from the data loader; prepared: inputs of compute_loss
        """
        return loaded

    @abstractmethod
    def samples(self, batch: Any) -> int:
        """Number of samples of a batch."""

    def outputs(self, loss: Tensor, model: nn.Module, forward: Sequence[Any], batch: Any) -> OwnedOutputs:
        """Tensors among the outputs of the forward passes that are attached to the graph, with their samples. Default:
        row i of an output is sample i.
        """
        return per_sample_outputs(forward, self.samples(batch)), None

    def losses(self, trainer_loss: TrainerLoss, sample_losses: SampleLosses, batch: Any) -> KnownLosses | None:
        """Losses of the samples; None if they are not known."""
        losses = reduced_losses(trainer_loss, self.samples(batch))
        return None if losses is None else KnownLosses(losses, self.counts(batch))

    def counts(self, batch: Any) -> Tensor | None:
        """(B,) numbers of tokens in the loss of each sample; None if it is not a sum over tokens."""
        return None

    def items(self, batch: Any) -> int | None:
        """Number of samples that the loss of a batch is a mean over; None: it is a mean over labels."""
        return self.samples(batch)

    def denominator(self, batch: Any) -> float | None:
        """What the loss divides the sum over tokens by, if that is not known from `items` and labels; else None."""
        return None


class Rows(BatchKind):
    """Row i is sample i."""

    rows_are_samples = True
    reads_operands = False

    def samples(self, batch: Any) -> int:
        return number_of_samples(batch, self.trainer._adapter.id_key)

    def outputs(self, loss: Tensor, model: nn.Module, forward: Sequence[Any], batch: Any) -> OwnedOutputs:
        return per_sample_outputs(forward, self.samples(batch), self.trainer._denominators.batch_first), None

    def losses(self, trainer_loss: TrainerLoss, sample_losses: SampleLosses, batch: Any) -> KnownLosses | None:
        return sample_losses(trainer_loss.forward[0], batch)

    def counts(self, batch: Any) -> Tensor | None:
        counts: Tensor | None = self.trainer._denominators.counts(batch)
        return counts

    def items(self, batch: Any) -> int | None:
        return None


class Sentences(Rows):
    """Row i has the texts of sample i. They are embedded in one forward pass each, or in a common one, whose rows i,
    i + B, i + 2B, ... are those of sample i.
    """

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self._verified: set[Any] = set()  # names of datasets whose loss was found to be a sum over samples

    def outputs(self, loss: Tensor, model: nn.Module, forward: Sequence[Any], batch: Any) -> OwnedOutputs:
        """Raises an error for losses that compare samples: each loss is checked with the first batch in which it is
        not zero.
        """
        samples = self.samples(batch)
        rows = f"rows for each of {plural(samples, 'sample')}"
        outputs = outputs_with(forward, lambda z: len(z) % samples == 0, rows)
        owners = [torch.arange(len(z), device=z.device) % samples for z in outputs]
        name = batch.get("dataset_name")
        if name not in self._verified:
            criterion = self.trainer.loss[name] if isinstance(self.trainer.loss, dict) else self.trainer.loss
            check_sentence_loss(criterion, loss, model, outputs, owners)
            if samples > 1 and bool(loss != 0):
                self._verified.add(name)
        return outputs, None if all(len(z) == samples for z in outputs) else owners


class Documents(BatchKind):
    """A row has tokens of several documents, and each document is a sample: its position ids start at 0."""

    reads_operands = False

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self._independent = False  # set when it was found out

    def prepare(self, model: Any, inputs: Any) -> None:
        """Raise SamplesInteractError if documents attend to each other: the loss of one changes with another's tokens.

        It is computed twice without a graph, in the first step that has two documents. All ranks agree.
        """
        if self._independent:
            return
        documents = self._documents(inputs)
        labels = inputs["labels"]
        counts = add_counts(labels.ne(IGNORE_INDEX), documents, self.samples(inputs))
        last = int(counts[1:].argmax()) + 1 if len(counts) > 1 else 0
        ids = inputs["input_ids"]
        inputs = {**inputs, "labels": labels.where(documents == last, IGNORE_INDEX)}
        other = {**inputs, "input_ids": torch.where(documents < last, ids.max() + ids.min() - ids, ids)}
        one, two = (loss_without_graph(self.trainer, model, batch, None) for batch in (inputs, other))
        compared = bool((other["input_ids"] != ids).any()) and abs(one) > 0
        differs = abs(one - two) > (1e-5 if next(model.parameters()).dtype.itemsize > 2 else 1e-2) * abs(one)
        comparisons, differences = collectives.all_reduce_scalars(float(compared), float(compared and differs))
        self._independent = comparisons > 0
        if differences:
            raise SamplesInteractError(
                "documents in one row must not attend to each other to be samples; found that the loss of one changes "
                "with the tokens of another. Use a model and an attn_implementation that separate them by position_ids "
                "('sdpa' or 'flash_attention_2'), or set packing=False and padding_free=False."
            )

    def batch(self, loaded: Any, prepared: Any) -> Any:
        """The batch, in which columns with a list for each packed row have one value per document."""
        nested = {key: loaded[key] for key in self.trainer._extra_columns() if _is_nested(loaded.get(key))}
        return {**loaded, **{key: as_column([v for values in lists for v in values]) for key, lists in nested.items()}}

    def samples(self, batch: Any) -> int:
        return int(self._documents(batch).max()) + 1

    def outputs(self, loss: Tensor, model: nn.Module, forward: Sequence[Any], batch: Any) -> OwnedOutputs:
        documents = self._documents(batch)
        rows, length = documents.shape
        # Position t predicts the token at t + 1: heads that are fused with the loss have no value for the last one.
        shapes = ((rows, length), (rows, length - 1))
        rows_of_tokens = f"one value for each of {plural(documents.numel(), 'token')}"
        outputs = outputs_with(forward, lambda z: z.shape[:2] in shapes, rows_of_tokens)
        return outputs, [documents[:, : z.shape[1]] for z in outputs]

    def losses(self, trainer_loss: TrainerLoss, sample_losses: SampleLosses, batch: Any) -> KnownLosses | None:
        """Losses of the documents, each from its part of the outputs and the labels."""
        forward = trainer_loss.forward[0]
        outputs = forward if isinstance(forward, Mapping) else {}
        documents = self._documents(batch)
        losses_of_documents = []
        for number in range(int(documents.max()) + 1):
            row, first = (int(k[0]) for k in (documents == number).nonzero(as_tuple=True))
            part = (slice(row, row + 1), slice(first, first + int((documents == number).sum())))
            tokens = {key: z[part] for key, z in outputs.items() if isinstance(z, Tensor) and z.dim() > 1}
            samples = sample_losses(tokens, {"labels": batch["labels"][part]})
            if samples is None:
                return None
            losses_of_documents.append(samples.losses)
        losses = torch.cat(losses_of_documents)
        return KnownLosses(losses, self.counts(batch).to(losses.dtype))

    def counts(self, batch: Any) -> Tensor:
        documents = self._documents(batch)
        labels = batch.get("shift_labels", batch["labels"])
        if "shift_labels" not in batch and self.trainer._denominators.shifts:
            labels = labels[:, 1:]
            documents = documents[:, 1:]
        return add_counts(labels.ne(IGNORE_INDEX), documents, self.samples(batch))

    def items(self, batch: Any) -> int | None:
        return None

    def _documents(self, batch: Any) -> Tensor:
        """(rows, length) number of each token's document in the batch. Padding at the end counts for the last one."""
        positions = batch.get("position_ids")
        bounds = batch.get("cu_seq_lens_q")
        starts = torch.ones(batch["input_ids"].shape, dtype=torch.bool)
        if isinstance(positions, Tensor):
            starts[:, 1:] = positions.cpu().diff() != 1
        elif isinstance(bounds, Tensor):
            starts[:] = False
            starts.view(-1)[bounds[:-1].long().cpu()] = True
        elif isinstance(batch.get("seq_idx"), Tensor):
            starts[:, 1:] = batch["seq_idx"].cpu().diff() != 0
        else:
            raise BatchError(
                "a padding-free batch must have position_ids, cu_seq_lens_q or seq_idx, which show where documents "
                "begin; found none. Use a collator that returns position_ids."
            )
        numbers = (starts.flatten().cumsum(0) - 1).view(starts.shape)
        documents = int(numbers.max()) + 1
        ids = batch.get(self.trainer._adapter.id_key)
        if ids is not None:
            count = sum(map(len, ids)) if _is_nested(ids) else len(ids)
        else:  # the position ids of padding are zeros; a document of one token has no label either
            lengths = numbers.flatten().bincount()
            count = int((lengths > 1).nonzero().max()) + 1 if bool((lengths > 1).any()) else documents
        if count > documents:
            raise BatchError(
                f"a batch must have one id for each document; found {plural(count, 'id')} for "
                f"{plural(documents, 'document')}. Remove empty texts from the dataset."
            )
        return numbers.clamp(max=count - 1)


def add_counts(marked: Tensor, documents: Tensor, count: int) -> Tensor:
    """Number of marked tokens of each document."""
    return documents[marked.cpu()].bincount(minlength=count)


def _is_nested(column: Any) -> bool:
    return isinstance(column, list) and any(isinstance(value, (list, tuple)) for value in column)


class Judged(BatchKind):
    """Row i is a completion with a label, desirable or not: KTOTrainer."""

    def samples(self, batch: Any) -> int:
        return len(batch["label"])

    def losses(self, trainer_loss: TrainerLoss, sample_losses: SampleLosses, batch: Any) -> KnownLosses | None:
        """The losses, which the trainer computes for the desirable completions first, in the order of the rows."""
        sample_values = super().losses(trainer_loss, sample_losses, batch)
        if sample_values is None:
            return None
        undesirable = ~torch.as_tensor(batch["label"], dtype=torch.bool, device=sample_values.losses.device)
        order = undesirable.to(torch.int8).argsort(stable=True)
        return KnownLosses(torch.empty_like(sample_values.losses).index_copy(0, order, sample_values.losses))


class Pairs(BatchKind):
    """Rows i and i + B of a batch are the chosen and the rejected completion of pair i."""

    def samples(self, batch: Any) -> int:
        chosen = batch.get("chosen_input_ids")
        return len(batch["input_ids"]) // 2 if chosen is None else len(chosen)

    def outputs(self, loss: Tensor, model: nn.Module, forward: Sequence[Any], batch: Any) -> OwnedOutputs:
        pairs = self.samples(batch)
        rows = f"two rows for each of {plural(pairs, 'pair')}"
        outputs = outputs_with(forward, lambda z: len(z) in (pairs, 2 * pairs), rows)
        return outputs, [torch.arange(len(z)) % pairs for z in outputs]

    def losses(self, trainer_loss: TrainerLoss, sample_losses: SampleLosses, batch: Any) -> KnownLosses | None:
        if any(kind.startswith("aot") for kind in getattr(self.trainer, "loss_types", ())):
            return None  # these losses compare sorted log ratios: they are not in the order of the pairs
        return super().losses(trainer_loss, sample_losses, batch)


class Completions(BatchKind):
    """Row i is a completion that the trainer has generated, for a prompt of the dataset."""

    def collator(self, collate: Callable[[list[Any]], Any], columns: Collection[Hashable]) -> Any:
        return collate  # it returns the prompts as they are

    def check(self, loaded: Any) -> None:
        return

    def batch(self, loaded: Any, prepared: Any) -> Any:
        return prepared

    def samples(self, batch: Any) -> int:
        return len(batch["completion_ids"])

    def items(self, batch: Any) -> int:
        """Number of completions in a step. The data loader repeats the prompts of several steps."""
        steps: int = self.trainer.args.steps_per_generation
        return self.samples(batch) if isinstance(batch, Mapping) else len(batch) // steps


class GroupCompletions(Completions):
    """Completions of GRPOTrainer, whose loss is a mean over completions or over tokens."""

    def counts(self, batch: Any) -> Tensor | None:
        mask: Tensor = batch["completion_mask"]
        if "tool_mask" in batch:
            mask = mask * batch["tool_mask"]
        return mask.sum(1) if self.trainer.loss_type in TOKEN_MEANS else None

    def losses(self, trainer_loss: TrainerLoss, sample_losses: SampleLosses, batch: Any) -> KnownLosses | None:
        if self.trainer.loss_type == "dr_grpo":  # divides the sums over tokens by the largest number of tokens
            trainer_loss = trainer_loss._replace(unit=1 / self.trainer.max_completion_length)
        return super().losses(trainer_loss, sample_losses, batch)

    def denominator(self, batch: Any) -> float | None:
        """What the sum over all tokens is divided by; the loss of a completion is then that over its own."""
        counts = self.counts(batch)
        if counts is None:
            return None
        trainer = self.trainer
        steps = trainer.current_gradient_accumulation_steps
        if trainer.loss_type == "bnpo":
            return max(float(counts.sum()), 1.0) * steps
        tokens = max(float(batch["num_items_in_batch"]), 1.0) / trainer.accelerator.num_processes
        return tokens * steps / float(trainer.args.steps_per_generation)


TOKEN_MEANS = ("bnpo", "cispo", "dapo", "vespo")  # loss types of GRPOTrainer that divide by a number of tokens


def with_prompt_columns(completions: Any, prompts: Any, keys: Sequence[Hashable]) -> Any:
    """Completions that the trainer has generated, with columns of their prompts, such as the ids."""
    columns = {key: as_column([prompt[key] for prompt in prompts]) for key in keys if key in prompts[0]}
    return {**completions, **columns}


def outputs_with(forward: Sequence[Any], fits: Callable[[Tensor], bool], rows: str) -> list[Tensor]:
    """Tensors among outputs that are attached to the graph and fit. `rows`: description of these."""
    tensors = attached(forward)
    outputs = [z for z in tensors if fits(z)]
    if not outputs:
        shapes = ", ".join(str(tuple(z.shape)) for z in tensors[:3])
        raise GraphError(
            f"the model must return an output with {rows}, such as logits; found "
            f"{f'only shapes {shapes}' if shapes else 'none'}. Return the logits from the model, without a kernel that "
            "fuses logits and loss."
        )
    return outputs


# --- kind of a trainer ------------------------------------------------------------------------------------------------

TRL_KINDS: dict[str, type[BatchKind]] = {
    "SFTTrainer": Rows,
    "DPOTrainer": Pairs,
    "RewardTrainer": Pairs,
    "KTOTrainer": Judged,
    "GRPOTrainer": GroupCompletions,
    "RLOOTrainer": Completions,
    "ORPOTrainer": Pairs,
    "CPOTrainer": Pairs,
    "GMPOTrainer": Completions,
}


def kind_of(trainer: Any) -> BatchKind:
    """Kind of the batches of a trainer. Raises an error if the samples in its loss are not known."""
    flattened = getattr(trainer, "padding_free", False) or type(trainer.data_collator).__name__.endswith("Flattening")
    if flattened:
        return Documents(trainer)
    if getattr(trainer.args, "packing", False):
        raise unsupported(
            "packing that cuts documents at the ends of rows, so that they attend to each other",
            "Set packing_strategy='bfd' or 'bfd_split'",
            GraphError,
        )
    for cls in type(trainer).__mro__:
        if cls.__module__.startswith("sentence_transformers."):
            return Sentences(trainer)
        if cls.__module__.startswith("trl.") and cls.__name__ not in ("_BaseTrainer", "BaseTrainer"):
            if cls.__name__ not in TRL_KINDS:
                raise unsupported(
                    f"{cls.__name__}, whose samples in the loss are not known", f"Use {', '.join(TRL_KINDS)}"
                )
            return TRL_KINDS[cls.__name__](trainer)
    return Rows(trainer)


def unsupported(setting: str, remedy: str, error: type[SamplewiseError] = DistributedError) -> SamplewiseError:
    return error(f"PerSample must get the gradient of each sample; found {setting}. {remedy}.")
