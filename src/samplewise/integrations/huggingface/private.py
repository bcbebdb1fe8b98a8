"""`privacy=` of `PerSample`: private updates inside the loop of the Trainer.

The Trainer makes an update of one batch, and here the batch is one draw. A `sw.Step` with the plan makes it, in the
order of the table in docs/privacy.md, but for the last line, which is the Trainer's:

    loader        draws of privacy.loader, also empty ones, in place of the batches of the Trainer
    begin         the release log in args.output_dir is open, at the update of the checkpoint
    update        microbatches of per_device_train_batch_size, clip, sum, noise, release log, division by the constant
    losses        mean over the labels of each sample, from the outputs that compute_loss of the Trainer has computed
    check_alone   the loss of a sample does not depend on the padding of its draw
    Handover      the result is in `.grad`: optimizer and scheduler of the Trainer change the parameters

`public` has what the Trainer may log, `check_private` which settings are refused.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from samplewise.core.batches import cut, leaves
from samplewise.core.state import random_state_restored, reseed
from samplewise.errors import LossesError, PrivacyError
from samplewise.integrations.huggingface.units import METRICS
from samplewise.integrations.transformers_losses import TOLERANCE, KnownLosses
from samplewise.ledger.ledger import Ledger
from samplewise.ledger.sample_ids import split_entries
from samplewise.parallel.collectives import on_every_rank
from samplewise.privacy.privacy import Privacy, PrivacyMeter
from samplewise.privacy.release_log import KEY_FILE
from samplewise.step.step import Step
from samplewise.transforms.chain import Chain
from samplewise.transforms.sums import Per

# Entries of the Trainer's logs that are exact values of private samples, or are computed from the microbatch size.
HIDDEN = ("loss", "train_loss", "total_flos", "train_samples_per_second", "train_tokens_per_second")
LOADER = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "multiprocessing_context", "in_order")
# What the mixin replaces: a class of the user that overrides it would not be asked, or would get draws.
REPLACED = ("get_train_dataloader", "_get_train_sampler", "get_batch_samples", "training_step")
FIRST_DRAWS = 8  # in which padding is looked for
FIRST_ROWS = 4  # of each

logger = logging.getLogger("samplewise")


class PrivateTraining:
    """Private updates of a trainer. `plan`: its sw.Privacy. `meter`: what it has spent. `transforms`: those before the
    clip of the plan.
    """

    def __init__(self, plan: Any, transforms: Chain, ledger: Ledger | None, aggregate: Per | None):
        if not isinstance(plan, Privacy):
            raise TypeError(
                f"privacy must be a sw.Privacy; found {type(plan).__name__}. Write sw.Privacy(epsilon=8, ...)."
            )
        if ledger is not None:
            raise PrivacyError(
                "a ledger must not be recorded with privacy=, because losses and norms of single samples are not "
                "covered by the guarantee; found ledger=. Leave it out."
            )
        if aggregate is not None:
            raise PrivacyError(
                "aggregate must be left out with privacy=, because sums are divided by a public constant; found "
                f"{aggregate!r}. Pass sw.Privacy(divide_by=...) for another constant."
            )
        self.plan = plan
        self.meter = PrivacyMeter(plan)
        self._transforms = transforms
        self._trainer: Any = None
        self._step: Any = None  # of the current training
        self._loader: Any = None
        self._undo = ExitStack()  # what `begin` has changed in the model
        self._unchecked_draws = FIRST_DRAWS  # number of draws that will be compared with samples without padding
        self._knows_shift = False  # whether `_loss_shifts_labels` of the trainer was compared with its loss
        self._outputs: list[Any] = []  # of the forward passes of one call of compute_loss
        self._is_computing = False  # losses of samples: nothing may be logged

    # --- one training ------------------------------------------------------------------------------------------------

    def attach(self, trainer: Any) -> None:
        """Check the settings of the trainer, and set those that follow from the plan."""
        check_private(trainer, self.plan)
        self._trainer = trainer
        trainer.args = copy.copy(trainer.args)  # the user may use the same object for another trainer
        trainer.args.max_steps = self.plan.updates
        trainer.args.ignore_data_skip = True  # the loader itself continues at the draw of the checkpoint
        trainer.add_callback(PrivacyCallback(self))

    @contextmanager
    def training(self) -> Iterator[None]:
        """Context manager around a training run: the release log is closed at its end."""
        check_private(self._trainer, self.plan)
        if not self.plan.observe:
            logger.warning(
                "The training loss and the size of the batches are not logged with privacy=, because the guarantee "
                "does not cover them. Evaluate on other samples, or pass sw.Privacy(observe=True) for public data."
            )
        try:
            yield
        finally:
            self.meter.close()
            self._step = None
            self._undo.close()

    def loader(self) -> DataLoader[Any]:
        """Loader of the draws, with the collator and the loader settings of the trainer."""
        trainer = self._trainer
        dataset = trainer.train_dataset
        collator = trainer.data_collator
        if hasattr(dataset, "column_names") and hasattr(dataset, "remove_columns"):  # a datasets.Dataset
            dataset = trainer._remove_unused_columns(dataset, description="Training")
        else:
            collator = trainer._get_collator_with_removed_columns(collator, description="Training")
        names = [name for name in LOADER if hasattr(trainer.args, f"dataloader_{name}")]
        self._loader = self.plan.loader(
            dataset,
            collate_fn=collator,
            # DataLoader draws a seed at the start of each pass, also in a resumed one: not from the global generator.
            generator=torch.Generator(),
            **{name: getattr(trainer.args, f"dataloader_{name}") for name in names},
        )
        return self._loader

    def begin(self, state: Any) -> None:
        """Create the step, open the release log, and continue from the checkpoint: called when model and optimizer are
        prepared and loaded.
        """
        trainer = self._trainer
        model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
        self._undo.callback(model.register_forward_hook(self._keep_output).remove)
        for module in model.modules():
            if getattr(module, "support_avx512bf16_for_cpu", False):
                # bitsandbytes would pack the weights in the first pass in eval mode, and could not train after that.
                module.support_avx512bf16_for_cpu = False
                self._undo.callback(setattr, module, "support_avx512bf16_for_cpu", True)
        handover: Any = Handover(trainer.optimizer)
        self._step = Step(
            trainer.model_wrapped,
            handover,
            self.losses,
            microbatch=trainer.args.per_device_train_batch_size,
            transforms=self._transforms,
            precision="bf16-mixed" if trainer.args.bf16 else None,  # as accelerate in the forward pass
            privacy=self.plan,
        )
        self.meter = self._step.privacy
        self.meter.open(trainer.args.output_dir)
        if state.global_step:
            saved = state.stateful_callbacks.get(PrivacyCallback.__name__, {})
            self._step.config.policy.load_state_dict(saved.get("attributes", {}).get("privacy"))
        if state.global_step != self.plan._state.update:
            raise PrivacyError(
                "a training must begin after the last update of its sw.Privacy, because these updates are spent; found "
                f"update {state.global_step} after {self.plan._state.update} updates. Pass "
                "resume_from_checkpoint=True, or a new sw.Privacy and another output_dir."
            )

    def state_dict(self) -> dict[str, Any] | None:
        """State for the checkpoint of the Trainer; it contains no secret. None outside of a training."""
        return None if self._step is None else self._step.config.policy.state_dict()["privacy"]

    # --- one update --------------------------------------------------------------------------------------------------

    def update(self, model: nn.Module, draw: Any) -> Tensor:
        """Compute the noisy mean of a draw into `.grad`. Returns the loss for the log of the Trainer: 0 unless the plan
        says `observe`.
        """
        trainer = self._trainer
        if self._unchecked_draws:
            self._unchecked_draws -= 1
            with random_state_restored():
                on_every_rank(lambda: self._check_alone(draw))
        model.train()
        if callable(getattr(trainer.optimizer, "train", None)):  # a schedule-free one
            trainer.optimizer.train()
        (update,) = self._step(draw)
        loss = update.loss if self.plan.observe and update.samples else 0.0
        return torch.as_tensor(loss, device=trainer.args.device, dtype=torch.float32)

    def losses(self, model: nn.Module, microbatch: Any) -> Tensor:
        """Losses (B,) of a microbatch: of each sample, the mean over its labels."""
        trainer = self._trainer
        entries, _ = split_entries(microbatch, trainer._extra_columns())
        inputs = trainer._prepare_inputs(entries)
        labels = dict(inputs)  # compute_loss may remove them
        with self._computing(trainer), trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, inputs)
            if not self._knows_shift and self._outputs and bool(loss.isfinite()):
                self._choose_shift(loss.detach(), labels)
            samples = trainer.per_sample_losses(self._outputs[0], labels) if self._outputs else None
        if samples is not None:
            agree = samples.agree(loss.detach(), _counts(samples).sum().clamp(min=1))
            if bool(agree | ~loss.isfinite()):  # a sample that is not finite contributes nothing
                return samples.losses / _counts(samples).clamp(min=1)
        raise LossesError(
            "privacy= clips the gradient of the loss of each sample, which must be known; found a loss of "
            f"{type(trainer).__name__} that is not the mean of cross-entropies, or of a regression or multi-label "
            "head, over the samples or labels of a batch. Override per_sample_losses(outputs, batch) for it."
        )

    @torch.no_grad()
    def _choose_shift(self, loss: Tensor, labels: Any) -> None:
        """Set whether logits predict the next label, as those of a causal language model do: the Trainer knows it of
        some models only. With one of the two, the losses of the samples add up to the loss of the Trainer.
        """
        trainer = self._trainer
        expected = getattr(trainer, "_loss_shifts_labels", False)
        differences: dict[bool, float] = {}
        for shifted in (expected, not expected):
            trainer._loss_shifts_labels = shifted
            samples = trainer.per_sample_losses(self._outputs[0], labels)
            if samples is not None:
                difference = samples.losses.sum() / _counts(samples).sum().clamp(min=1) - loss
                differences[shifted] = float(difference.abs().nan_to_num(torch.inf))
        trainer._loss_shifts_labels = min(differences, key=lambda shifted: differences[shifted], default=expected)
        self._knows_shift = True

    def _keep_output(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook: also in eval mode and without a graph, in which the step compares samples."""
        if self._is_computing:
            self._outputs.append(output)

    def _check_alone(self, draw: Any) -> None:
        """Raise if the loss of a sample depends on what the collator has made of its draw, such as the length to which
        all of its samples are padded: compare rows of the draw with the same samples, collated alone.
        """
        trainer = self._trainer
        sampler = self._loader.batch_sampler
        model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
        model.eval()
        is_half = trainer.args.bf16 or any(p.dtype in TOLERANCE for p in model.parameters())
        tolerance = TOLERANCE[torch.bfloat16] if is_half else 1e-4
        several = draw.samples > 1 and self.plan.augmentations == 1
        for row, index in enumerate(sampler.draw(draw.draw, draw.branch)[:FIRST_ROWS] if several else ()):
            alone = self._collate_alone(index)
            in_draw = cut(draw.batch, row, row + 1, draw.samples)
            if alone is None or _equal(alone, in_draw):  # random, or not padded
                continue
            expected = self._loss_without_graph(model, alone)
            loss = self._loss_without_graph(model, in_draw)
            if not torch.allclose(loss, expected, rtol=tolerance, atol=tolerance, equal_nan=True):
                raise PrivacyError(
                    "the loss of a sample must not depend on the other samples of its draw with privacy=; found that "
                    "it changes with the padding, or with what else the data collator puts into its row. Pad on the "
                    "right, with an attention mask, or pad all samples to the same length."
                )

    def _collate_alone(self, index: int) -> Any:
        """Batch of one sample; None if the dataset or the collator draws random numbers, as for masked tokens."""
        loader = self._loader
        batches = []
        following = []  # random numbers that are drawn next
        for draws in (False, True, True):
            reseed(0)
            if draws:
                batches.append(loader.collate_fn.collate_fn([loader.dataset[index]]))
            following.append((torch.rand(()).item(), random.random(), numpy.random.random()))
        return batches[0] if len(set(following)) == 1 and _equal(*batches) else None

    def _loss_without_graph(self, model: nn.Module, batch: Any) -> Tensor:
        """Loss of a batch of one sample, as the Trainer computes it in evaluation."""
        trainer = self._trainer
        entries, _ = split_entries(batch, trainer._extra_columns())
        with torch.no_grad(), self._computing(trainer), trainer.compute_loss_context_manager():
            loss: Tensor = trainer.compute_loss(model, trainer._prepare_inputs(entries))
        return loss

    @contextmanager
    def _computing(self, trainer: Any) -> Iterator[None]:
        """Context manager around passes over samples: their metrics are dropped, and nothing is logged."""
        metrics = {name: copy.deepcopy(vars(trainer)[name]) for name in METRICS if name in vars(trainer)}
        # TRL gathers its metrics in compute_loss, but the ranks have different numbers of microbatches.
        trainer.accelerator.gather_for_metrics = lambda values, *args, **kwargs: values
        self._is_computing = True
        self._outputs = []
        try:
            yield
        finally:
            self._is_computing = False
            self._outputs = []
            del trainer.accelerator.gather_for_metrics  # that of the class is seen again
            if not self.plan.observe:
                vars(trainer).update(metrics)

    # --- what is published -------------------------------------------------------------------------------------------

    def check_published(self) -> None:
        """Raise if the files in args.output_dir must not be published."""
        path = Path(self._trainer.args.output_dir) / KEY_FILE
        if path.exists():
            raise PrivacyError(
                "a run must be complete before its files are published, because the noise can be computed from its "
                f"key; found {path}. Resume the training, or remove this file."
            )

    def public(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Logs of the Trainer without values of private samples."""
        if self.plan.observe:
            return logs
        if self._is_computing:
            raise PrivacyError(
                "values of private samples must not be logged, because the guarantee does not cover them; found a call "
                f"of log in compute_loss, with {', '.join(map(repr, logs))}. Leave it out, or pass "
                "sw.Privacy(observe=True)."
            )
        return {name: value for name, value in logs.items() if name not in HIDDEN}

    def public_output(self, output: Any) -> Any:
        """What `train` returns, without values of private samples."""
        if self.plan.observe:
            return output
        return output._replace(training_loss=float("nan"), metrics=self.public(output.metrics))


def _counts(samples: KnownLosses) -> Tensor:
    """(B,) labels of each sample."""
    return torch.ones_like(samples.losses) if samples.counts is None else samples.counts


def _equal(batch: Any, other: Any) -> bool:
    """True if two batches have the same tensors."""
    tensors, others = ([leaf for leaf in leaves(b) if isinstance(leaf, Tensor)] for b in (batch, other))
    return len(tensors) == len(others) and all(map(torch.equal, tensors, others))


class Handover:
    """Optimizer of the step of a trainer: that of the Trainer, which makes the step itself, after the private sum was
    released.
    """

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self._optimizer.param_groups

    @property
    def state(self) -> Any:
        return self._optimizer.state

    def step(self) -> None:
        pass


class PrivacyCallback(TrainerCallback, ExportableState):
    """Callback that begins the private training and puts its state into trainer_state.json."""

    def __init__(self, private: PrivateTraining | None = None):
        self.private = private

    @property
    def privacy(self) -> dict[str, Any] | None:
        return None if self.private is None else self.private.state_dict()

    @privacy.setter
    def privacy(self, state: Any) -> None:
        """Called with restore_callback_states_from_checkpoint. `PrivateTraining.begin` reads the state."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.private is not None
        self.private.begin(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.private is not None
        # The Trainer counts from the start of the pass, but a resumed pass begins inside.
        state.epoch = state.global_step / max(1, round(1 / self.private.plan.sample_rate))
        if self.private.meter.is_exhausted:
            logger.warning("The training ends here: %s. Some updates were repeated.", self.private.meter.spent())
            control.should_training_stop = True

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"privacy": self.privacy}}


# --- refused settings -------------------------------------------------------------------------------------------------


def check_not_private(state: Any) -> None:
    """Raise PrivacyError if the state that a trainer without privacy= has loaded is that of a private training."""
    if PrivacyCallback.__name__ in state.stateful_callbacks:
        raise PrivacyError(
            "a private training must be continued as one; found a trainer without privacy=. Use the same privacy= as "
            "before."
        )


def check_private(trainer: Any, plan: Privacy) -> None:
    """Raise PrivacyError for settings of a trainer that would void the guarantee, or that it could not follow."""
    args = trainer.args
    strategy = getattr(args, "train_sampling_strategy", "random")
    accelerator_config = args.accelerator_config
    draws = "the batches are Poisson draws, which the accountant assumes"
    wanted = {  # setting -> value that it must have, value found, reason
        "max_grad_norm": (0, args.max_grad_norm or 0, "each sample is clipped already, and this would clip the noise"),
        "gradient_accumulation_steps": (
            1, args.gradient_accumulation_steps, "an update is one draw, in microbatches of per_device_train_batch_size"
        ),
        "group_by_length": (False, getattr(args, "group_by_length", False), draws),
        "train_sampling_strategy": ("random", getattr(strategy, "value", strategy), draws),
        "dataloader_drop_last": (False, args.dataloader_drop_last, draws),
        "split_batches of accelerator_config": (False, accelerator_config.split_batches, draws),
        "dispatch_batches of accelerator_config": (False, bool(accelerator_config.dispatch_batches), draws),
        "packing": (
            False, getattr(args, "packing", False),
            "a row would hold several documents, and of a person any number, in parts; a document per row is clipped "
            "by itself, and users= of sw.Privacy bounds all documents of a person"
        ),
        "padding_free": (False, getattr(trainer, "padding_free", False), "each row is clipped by itself"),
        "fp16": (False, args.fp16, "whether a scaled loss overflows depends on single samples; bf16=True is possible"),
        "auto_find_batch_size": (False, args.auto_find_batch_size, "it begins the training again, and spends again"),
        "hub_strategy": (
            "end", getattr(args.hub_strategy, "value", args.hub_strategy) if args.push_to_hub else "end",
            "privacy.key, from which the noise can be computed, is in output_dir until the training ends"
        ),
        "include_num_input_tokens_seen": (
            "no", args.include_num_input_tokens_seen or "no", "numbers of tokens are not covered by the guarantee"
        ),
    }  # fmt: skip
    for name, (value, setting, reason) in wanted.items():
        if setting != value:
            raise PrivacyError(
                f"{name} must be {value!r} with privacy=, because {reason}; found {setting!r}. Set {name}={value!r}."
            )
    if trainer.is_fsdp_enabled:
        raise PrivacyError(
            "the model must be whole on each rank with privacy= in a Trainer; found FSDP. Use DDP, or sw.Step with "
            "parallel='fsdp'."
        )
    if args.max_steps not in (-1, plan.updates):
        raise PrivacyError(
            f"max_steps must be the {plan.updates} updates of sw.Privacy, for which the noise is chosen; found "
            f"{args.max_steps}. Leave it out."
        )
    classes = [cls for cls in type(trainer).__mro__ if not cls.__module__.startswith(("samplewise.", "transformers."))]
    for cls in classes:
        from_trl = cls.__module__.startswith("trl.")
        if from_trl and cls.__name__ not in ("SFTTrainer", "_BaseTrainer"):
            raise PrivacyError(
                f"a row of the batch must be a sample with privacy=; found {cls.__name__}, whose loss compares or "
                "generates several rows per sample. Use trl.SFTTrainer."
            )
        overridden = [name for name in REPLACED if name in vars(cls)]
        if overridden and not from_trl:
            raise PrivacyError(
                "batches and updates must be those of sw.Privacy; found that "
                f"{cls.__name__} overrides {overridden[0]}. Leave it out, and override compute_loss or "
                "per_sample_losses instead."
            )
