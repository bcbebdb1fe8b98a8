"""`PerSample`: mixin for the Trainer of transformers and for those of TRL, and the settings that it refuses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from samplewise.engine.gradients import gradients
from samplewise.errors import GraphError, LossesError
from samplewise.integrations.adapter import Adapter, BatchLoss, check_comes_first
from samplewise.integrations.huggingface.batch_kinds import kind_of, unsupported, with_prompt_columns
from samplewise.integrations.huggingface.denominators import Aggregates, Denominator, Denominators, check_aggregate
from samplewise.integrations.huggingface.outputs import OutputsHook, Reductions, TrainerLoss
from samplewise.integrations.huggingface.private import PrivacyCallback, PrivateTraining, check_not_private
from samplewise.integrations.huggingface.recording import LedgerCallback, TrainerLedger, with_id_column, with_packed_ids
from samplewise.integrations.transformers_losses import KnownLosses, auxiliary_loss, known_losses
from samplewise.ledger.ledger import Ledger
from samplewise.ledger.sample_ids import Indexed, split_entries
from samplewise.privacy.privacy import Privacy, PrivacyMeter
from samplewise.step.backward import Rest, checked_chain
from samplewise.transforms.chain import Transforms, as_chain
from samplewise.transforms.sums import Per

if TYPE_CHECKING:
    Base = Any  # a Trainer; known only in the class that uses the mixin
else:
    Base = object

logger = logging.getLogger("samplewise")


class PerSample(Base):
    """Mixin that adds transforms of per-sample gradients and a ledger to a Hugging Face Trainer.

        class MyTrainer(PerSample, Trainer): ...      # or Seq2SeqTrainer, or SFTTrainer, DPOTrainer ... of TRL

        trainer = MyTrainer(
            model, args, train_dataset=sw.Indexed(data), transforms=[sw.clip(1.0)], ledger=sw.Ledger()
        )
        trainer.train()
        sw.suspects(sw.read_ledger(args.output_dir)).top(20)

    transforms: as in `sw.backward`. Bounds such as that of `sw.clip` refer to the gradient of a sample's own loss: the
    sum over its tokens if the loss is a mean over tokens, otherwise the loss of a batch of one sample.
    aggregate: what an update is divided by: see `sw.per`. None (default): sw.per("token"), the labels of the
    accumulated batches, as the Trainer does. The logged loss is that of the Trainer with every aggregate.
    ledger: `sw.Ledger`, which records each sample at each visit. Its default directory is args.output_dir. The ids are
    those of `sw.Indexed`, or the column of the dataset named by Ledger(id=...). Checkpoints of the trainer contain its
    state, so that a resumed training continues it. A training from the start removes the rows of an earlier one in
    args.output_dir; in a directory given to the ledger, it is refused.
    denominator: what the loss of a batch divides the sum of its samples' losses by: "samples", "labels", a number (1
    for a sum) or a function of the batch. Default: found out in the first step, in which the loss of a few samples is
    compared with those of the single samples. For another loss, such as a mean with class weights, bounds on norms are
    refused and the norms in the ledger are NaN, unless it is given.
    rest: as in `sw.backward`: "plain" gives an auxiliary loss, such as that of the routers of a mixture of experts, its
    ordinary gradient, without transforms; "refuse" (default) raises GraphError.

    A sample is a row of the batch; a pair in the trainers of TRL for preferences (DPO, Reward, ORPO, CPO); a completion
    in those that generate or judge them (GRPO, RLOO, KTO); a document with packing or padding-free batches.

    privacy: `sw.Privacy`, for differential privacy. An update is then one of its draws, in microbatches of
    per_device_train_batch_size; the loss of a sample is the mean over its own labels; max_steps is `updates` of the
    plan. The release log is in args.output_dir, and `trainer.privacy.spent()` is the privacy spent so far. Training
    losses are not logged, and a ledger is refused.

    Without transforms, training is bit-identical to that of the Trainer, with one exception: with gradient accumulation
    or several ranks, the update is always the mean over all samples (or tokens) of the accumulated batches, if the loss
    is a mean. Losses that ignore `num_items_in_batch` are found in the first step and scaled accordingly.

    The ledger shows which samples were trained on: with several ranks, Accelerate repeats some samples if the last
    batches of the ranks would differ in size. Not supported: DeepSpeed, DataParallel, FSDP version 1, context, sequence
    and tensor parallelism, torch_compile, LOMO, packing that cuts documents at the ends of rows, and other trainers of
    TRL.
    """

    data_collator: Any  # of the Trainer
    _signature_columns: Any
    _norms_unknown = False  # announced in the log

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        check_comes_first(cls, PerSample, Trainer)

    def __init__(
        self,
        *args: Any,
        transforms: Transforms = (),
        ledger: Ledger | None = None,
        privacy: Privacy | None = None,
        aggregate: Per | None = None,
        denominator: Denominator | None = None,
        rest: Rest = "refuse",
        **kwargs: Any,
    ):
        if not (ledger is None or isinstance(ledger, Ledger)):
            raise TypeError(f"ledger must be a sw.Ledger; found {type(ledger).__name__}. Pass ledger=sw.Ledger(...).")
        check_aggregate(self, aggregate)
        chain = checked_chain(transforms) if privacy is None else as_chain(transforms)
        self._private = None if privacy is None else PrivateTraining(privacy, chain, ledger, aggregate)
        self._adapter = Adapter(chain, ledger, aggregate, rest)
        self._outputs_hook = OutputsHook()
        self._denominators = Denominators(self, denominator)
        self._aggregates = Aggregates(aggregate, self._label_counts)
        self._prepared: Any = None  # inputs of compute_loss in a training step
        self._operands: list[Tensor] = []  # of means and sums in compute_loss
        indexed = next((value for value in (*args, *kwargs.values()) if isinstance(value, Indexed)), None)
        self._ledger = TrainerLedger(self._adapter, indexed)
        super().__init__(*map(with_id_column, args), **{name: with_id_column(v) for name, v in kwargs.items()})
        if self._private is not None:
            self._private.attach(self)
        check_supported(self)
        self._kind = kind_of(self)
        self.add_callback(LedgerCallback(self._ledger))

    def per_sample_losses(self, outputs: Any, batch: Any) -> KnownLosses | None:
        """Losses of the samples of a batch, from the outputs of the model, for the ledger and for transforms.

        Default: cross-entropy from logits and labels, for tokens summed per sample, with label smoothing; and the
        losses of regression and multi-label heads. None if they are not known. Override it for another criterion.
        Values that do not add up to the loss of the trainer are replaced by NaN.
        """
        return known_losses(
            outputs,
            batch,
            shifted=self._denominators.shifts,
            smoothing=self.args.label_smoothing_factor if self.label_smoother is not None else 0.0,
            config=getattr(self.model, "config", None),
        )

    # --- methods of the Trainer --------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        check_supported(self)
        clips = next((t for t in self._adapter.chain.samples.transforms if t.name.startswith("clip(")), None)
        if clips is not None and self.args.max_grad_norm > 0:
            logger.warning(
                "max_grad_norm=%g of the TrainingArguments (default 1.0) also clips the sum of the gradients, after "
                "%s of each sample. Set max_grad_norm=0 to leave that out.",
                self.args.max_grad_norm,
                clips,
            )
        self._adapter.logs &= self.args.logging_strategy != "no"
        self._ledger.begin(self)
        with self._adapter.training():
            try:
                if self._private is None:
                    return super().train(*args, **kwargs)
                with self._private.training():
                    return self._private.public_output(super().train(*args, **kwargs))
            finally:
                self._outputs_hook.remove()

    @property
    def privacy(self) -> PrivacyMeter | None:
        """Privacy of the training: `spent()`, `left` and `zeroed`; None without privacy=."""
        return None if self._private is None else self._private.meter

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log of the Trainer; lines with the loss of training also get the norms since the last one."""
        if self._private is not None:
            logs = self._private.public(logs)
        values = self._adapter.take_log() if "loss" in logs else {}
        super().log({**logs, **values}, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """The data loader of the Trainer, whose batches also hold the ids and the columns that the model does not read:
        those of ledger, transforms and aggregate.
        """
        collator = self.data_collator
        extra = self._extra_columns()
        columns = self._signature_columns
        self.data_collator = self._kind.collator(collator, extra)
        self._signature_columns = [*columns, *extra]
        try:
            return super().get_train_dataloader() if self._private is None else self._private.loader()
        finally:
            self.data_collator = collator
            self._signature_columns = columns

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        if self._private is not None:
            return list(islice(args[0], 1)), None  # a draw is an update, and its number of labels is private
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        extra = self._extra_columns()
        self._denominators.start_window([split_entries(batch, extra)[0] for batch in batches])
        self._aggregates.start_window([self._kind.batch(batch, None) for batch in batches])
        return batches, num_items

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """The training step of the Trainer, with per-sample gradients in place of its call of accelerator.backward."""
        if self._private is not None:
            return self._private.update(model, inputs)
        batch = inputs
        self._kind.check(batch)
        inputs, _ = split_entries(batch, self._extra_columns())
        self._ledger.start_step(self.state.global_step)
        num_items = self._denominators.prepare(
            model,
            inputs,
            num_items_in_batch,
            losses=self._adapter.per_sample or self._adapter.reads_losses,
            norms=self._adapter.reads_norms,
        )
        if self._adapter.per_sample:
            self._kind.prepare(model, inputs)
        self._operands = []
        self._outputs_hook.watch(model, self.accelerator.unwrap_model)
        factors: list[float] = []

        def backward(loss: Tensor) -> None:
            self._denominators.read_graph(loss)
            samples = self._kind.batch(batch, self._prepared)
            factor, denominator = self._denominators.of_batch(samples, num_items)
            factors.append(factor)
            loss = loss if factor == 1 else loss * factor
            self._backward(loss, model, samples, self._kind.denominator(samples) or denominator)

        with _replace_backward(self.accelerator, backward):
            loss = super().training_step(model, inputs, num_items)
        self._outputs_hook.discard()
        self._prepared = None
        self._operands = []
        if len(factors) != 1:
            raise GraphError(
                "training_step must call accelerator.backward once; found "
                f"{len(factors)} calls. Leave training_step as it is, and override compute_loss instead."
            )
        return loss if factors[0] == 1 else loss * factors[0]

    def compute_loss_context_manager(self) -> Any:
        """Context managers of the Trainer around compute_loss, with one that keeps the losses of the samples."""
        stack = super().compute_loss_context_manager()
        if self._kind.reads_operands and self._adapter.reads_losses:
            stack.enter_context(Reductions(self._operands))
        return stack

    def _prepare_inputs(self, inputs: Any) -> Any:
        self._prepared = super()._prepare_inputs(inputs)
        return self._prepared

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """Completions of TRL, with the columns of the ledger of their prompts."""
        return with_prompt_columns(super()._generate_and_score_completions(inputs), inputs, self._adapter.columns)

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """The dataset as TRL tokenizes and packs it, with the ids of the packed documents."""
        return with_packed_ids(super()._prepare_dataset, dataset, self._adapter.columns, *args, **kwargs)

    def floating_point_ops(self, inputs: Any) -> int:
        return super().floating_point_ops(inputs) if self._private is None else 0  # the size of a draw is private

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        if self._private is not None:
            self._private.check_published()
        return super().push_to_hub(*args, **kwargs)

    def _extra_columns(self) -> list[Hashable]:
        """Columns of the batch that the model does not read: ids, and those of ledger, transforms and aggregate."""
        self._set_signature_columns_if_needed()
        return [key for key in self._adapter.columns if key not in self._signature_columns]

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        self._ledger.save()
        return super()._save_checkpoint(*args, **kwargs)

    def _load_callback_state(self) -> None:
        super()._load_callback_state()
        if self._private is None:
            check_not_private(self.state)
        for callback in self.callback_handler.callbacks:  # the Trainer may have made a new object
            if isinstance(callback, LedgerCallback):
                callback.ledger = self._ledger
            elif isinstance(callback, PrivacyCallback):
                callback.private = self._private

    # --- backward pass -----------------------------------------------------------------------------------------------

    def _backward(self, loss: Tensor, model: nn.Module, batch: Any, denominator: float | None) -> None:
        """Backward pass of one batch, with transforms, and its results for the ledger."""
        samples = self._sample_losses(loss, batch, denominator)
        outputs: list[Tensor] = []
        owners = None
        if self._adapter.per_sample:
            outputs, owners = self._kind.outputs(loss, model, self._outputs_hook.inner, batch)
        values = BatchLoss(
            loss,
            outputs,
            self._kind.samples(batch),
            losses=None if samples is None else samples.losses,
            counts=self._kind.counts(batch) if samples is None else samples.counts,
            columns=None if samples is None else samples.columns,
            owners=owners,
        )
        if denominator is None:
            self._announce_unknown_unit(values, model)
        else:
            values, denominator = self._aggregates.scaled(values, denominator, batch)
        self._adapter.backward(values, model, self.accelerator, denominator, batch)

    def _label_counts(self, batch: Any) -> Tensor:
        """(B,) numbers of labels of each sample; 1 if they are not class indices."""
        counts = self._kind.counts(batch)
        return torch.ones(self._kind.samples(batch)) if counts is None else counts

    def _announce_unknown_unit(self, values: BatchLoss, model: nn.Module) -> None:
        """Raise LossesError if a transform reads norms, whose unit is unknown; otherwise log once that they are NaN."""
        remedy = (
            "Pass denominator= to the trainer: what the loss of a batch divides the sum of its samples' losses by, "
            "'samples', 'labels', a number (1 for a sum) or a function of the batch, such as "
            "lambda batch: weight[batch['labels']].sum() for class weights."
        )
        transforms = self._adapter.chain.samples.transforms
        reader = next((t for t in transforms if "norms" in t.needs and t.reference is None), self._adapter.aggregate)
        if reader is not None:
            if values.outputs:
                gradients(
                    values.loss, model, outputs=values.outputs, samples=values.owners
                ).norms()  # its errors come first
            raise LossesError(
                f"{reader} must get the gradients of the samples' own losses; found that the loss of the trainer is "
                f"neither a mean over samples or labels nor a sum. {remedy}"
            )
        if self._adapter.reads_norms and not self._norms_unknown:
            self._norms_unknown = True
            logger.warning(
                "The ledger has no norms: the loss of the trainer is neither a mean over samples or labels nor a sum. "
                "%s",
                remedy,
            )

    def _sample_losses(self, loss: Tensor, batch: Any, denominator: float | None) -> KnownLosses | None:
        """Losses of the samples, checked against the loss of the trainer; None if they are not known or not read."""
        forward = self._outputs_hook.outputs
        if not forward or not (self._adapter.reads_losses or self._aggregates.unverified):
            return None
        with torch.no_grad():
            divisor = torch.nan if denominator is None or self._denominators.losses_differ else denominator
            trainer_loss = TrainerLoss(loss, divisor, forward, self._operands)
            samples = self._kind.losses(trainer_loss, self.per_sample_losses, batch)
            if samples is None:
                return None
            samples = samples.checked(loss - auxiliary_loss(forward[0], self.model), divisor)
        reader = next((t for t in self._adapter.chain.samples.transforms if "losses" in t.needs), None)
        if reader is not None and bool(samples.losses.isnan().any()):
            raise LossesError(
                f"{reader} must get the losses of the samples; found that those of per_sample_losses do not add up to "
                "the loss of the trainer. Override per_sample_losses for your criterion."
            )
        return samples


@contextmanager
def _replace_backward(accelerator: Any, backward: Callable[[Tensor], None]) -> Iterator[None]:
    """Context manager: the next call of accelerator.backward calls `backward`, in which it is the original again."""
    before = vars(accelerator).get("backward")

    def restore() -> None:
        vars(accelerator).pop("backward", None)
        if before is not None:
            accelerator.backward = before

    def call(loss: Tensor, **options: Any) -> None:
        restore()
        backward(loss)
        accelerator.backward = call

    accelerator.backward = call
    try:
        yield
    finally:
        restore()


# --- refused settings -------------------------------------------------------------------------------------------------


def check_supported(trainer: Any) -> None:
    """Raise an error for settings with which the samples' gradients are not known."""
    args = trainer.args
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    if trainer.is_deepspeed_enabled:
        raise unsupported("DeepSpeed, which runs its own backward pass", "Use DDP or FSDP2")
    if args.n_gpu > 1:
        raise unsupported(
            "nn.DataParallel, whose replicas are not the model's parameters",
            "Start one process per device with torchrun or accelerate launch",
        )
    if parallelism is not None and (parallelism.cp_size > 1 or parallelism.sp_size > 1):
        raise unsupported(
            "context or sequence parallelism, in which a rank has parts of samples", "Leave out parallelism_config"
        )
    if trainer.get_tp_size() > 1 or getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise unsupported("a model that transformers has sharded when it was loaded", "Use DDP or FSDP2")
    if args.torch_compile:
        raise unsupported("torch_compile=True, after which the graph cannot be read", "Leave it out", GraphError)
    if str(getattr(args.optim, "value", args.optim)) in ("lomo", "adalomo"):
        raise unsupported(
            f"optim={str(getattr(args.optim, 'value', args.optim))!r}, which updates parameters during the backward "
            "pass",
            "Use another optimizer",
            GraphError,
        )
    if trainer.is_fsdp_enabled and getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1) != 2:
        raise unsupported("FSDP version 1, which flattens parameters", "Set fsdp_version=2 in fsdp_config")
