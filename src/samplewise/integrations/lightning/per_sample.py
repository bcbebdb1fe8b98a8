"""The callback `PerSample`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from samplewise.errors import GraphError
from samplewise.integrations.adapter import Adapter, BatchLoss, refuse_privacy
from samplewise.integrations.lightning.module import (
    Optimizers,
    check_arguments,
    check_trainer,
    for_trainer,
    framework_backward,
    has_gradients,
    loss_scale,
    parse,
    replace_methods,
)
from samplewise.ledger.ledger import Ledger
from samplewise.parallel import collectives
from samplewise.privacy.privacy import Privacy
from samplewise.step.backward import run_pass
from samplewise.transforms.chain import Transforms, as_chain


class PerSample(Callback):
    """Lightning callback that transforms and records the gradients of single samples.

        trainer = L.Trainer(callbacks=[PerSample(transforms=[sw.clip(1.0)], ledger=sw.Ledger("runs/a"))])

    The module's training_step returns one of

        losses (B,), one per sample: the trainer gets their mean
        {"loss": losses (B,) or a scalar, "outputs": tensor (B, ...) or a list of tensors}

    A scalar loss needs the outputs that it was computed from, see `sw.gradients`. Other keys of the dict, all optional:

        losses   (B,) losses of the samples, if the loss is a scalar
        counts   (B,) denominators, for example tokens: the loss is the sum of losses divided by the sum of counts
        labels   (B,) class indices; with outputs (B, classes) the ledger gets the columns label, prediction and margin
        id       ids of the samples, if the batch does not hold them; `sw.Indexed` adds them to the batch

    With manual optimization, call self.manual_backward(losses), or self.manual_backward(loss, outputs=...) with the
    same keys. With several optimizers, as for a GAN, the gradient of a sample is that of the parameters of one
    optimizer, whether the others are toggled off or not; the ledger has the number of the optimizer as the column
    `optimizer`, and its rows are those of the passes since the last step (or zero_grad) of that optimizer.

    transforms: as in `sw.backward`. Norms and bounds refer to the gradient of a sample's own loss, whatever the batch
    size, the accumulation and the loss scale are
    ledger: each row has the trainer's epoch, and as its update the global_step before that update. A ledger without a
    directory writes to the trainer's default_root_dir. Its state is part of the trainer's checkpoints
    exact_accumulation: True makes each update the mean over all samples (or counts) of its accumulation window, on all
    ranks. Lightning itself takes the sum of the batches' means divided by accumulate_grad_batches, also if the last
    window of an epoch has fewer batches. Callbacks that read gradients in on_before_optimizer_step must come after
    this one

    Norms are logged with log_dict, see docs/integrations.md: those of log_every_n_steps batches, and at the end of an
    epoch those since then. Without transforms, training is bit-identical to training without the callback.
    """

    def __init__(
        self,
        transforms: Transforms = (),
        ledger: Ledger | None = None,
        *,
        exact_accumulation: bool = False,
        privacy: Privacy | None = None,
    ):
        refuse_privacy(privacy, "the Lightning Trainer")
        if not (ledger is None or isinstance(ledger, Ledger)):
            raise TypeError(f"ledger must be a sw.Ledger, or None; found {type(ledger).__name__}.")
        self.transforms = as_chain(transforms)
        self.ledger = ledger
        self.exact_accumulation = exact_accumulation
        self._adapter = Adapter(self.transforms, ledger)
        self._restore_methods: Callable[[], None] = _do_nothing
        self._reset()

    def _reset(self, optimizers: Sequence[Any] = ()) -> None:
        self._optimizers = Optimizers(optimizers)
        self._batch: Any = None
        self._stepped = False  # an optimizer, in this batch
        self._batch_loss: BatchLoss | None = None  # of training_step, until its backward pass
        self._window = AccumulationWindow()
        self._record_update: Callable[[], None] = _do_nothing  # rows of the last update, once the optimizer has stepped
        self._adapter.take_passes()

    # --- backward passes -------------------------------------------------------------------------------------------

    def _training_step(self, module: LightningModule, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        if output is None or not module.automatic_optimization:
            return output
        self._batch_loss = parse(output)
        return for_trainer(output, self._batch_loss.loss)

    def _backward(
        self, module: LightningModule, original: Callable[..., Any], loss: Tensor, *args: Any, **entries: Any
    ) -> None:
        """Backward pass of the loss that the trainer has divided by accumulate_grad_batches, and scaled."""
        check_arguments(args, entries)
        retain_graph = bool(entries.pop("retain_graph", False))
        factor = loss_scale(module.trainer)
        if self._batch_loss is None:  # manual_backward
            values = parse({"loss": loss, **entries}, factor)
            loss = values.loss
        else:
            values = self._batch_loss
            factor /= module.trainer.accumulate_grad_batches
        self._batch_loss = None
        count = values.samples if values.counts is None else float(values.counts.sum())
        denominator = count or 1.0
        if self.exact_accumulation:
            loss = loss * self._window.add(count)
            denominator = self._window.unit
        values = replace(values, loss=loss)
        through = framework_backward(module, original)
        parts = self._optimizers.parts(loss, module, self._adapter.per_sample)
        for part in parts:
            retained = retain_graph or part is not parts[-1]
            with part.alone():
                if part.numbers:
                    epoch = module.trainer.current_epoch
                    self._adapter.backward(values, module, through, denominator / factor, self._batch, epoch, retained)
                else:
                    run_pass(through, loss, retained)
            self._optimizers.add(part, self._adapter.take_passes())

    # --- hooks of the trainer --------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        check_trainer(trainer, pl_module, self.exact_accumulation)
        if self.transforms.weighs and trainer.gradient_clip_val:
            rank_zero_info(
                f"samplewise: gradient_clip_val={trainer.gradient_clip_val} also clips the gradient of each update, "
                f"after {self.transforms!r} of the samples' gradients."
            )
        self._reset(trainer.optimizers)
        replacements: dict[str, Callable[..., Any]] = {
            "training_step": self._training_step,
            "backward": self._backward,
            "toggle_optimizer": self._optimizers.toggle,
            "untoggle_optimizer": self._optimizers.untoggle,
        }
        self._restore_methods = replace_methods(pl_module, replacements)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.ledger is not None:
            self.ledger._prepare(
                trainer.default_root_dir, trainer.train_dataloader, dry_run=bool(getattr(trainer, "fast_dev_run", 0))
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch = batch

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Passes whose gradients are reset before an optimizer step had no effect."""
        passes = self._optimizers.take_passes(self._optimizers.number(optimizer))
        self._adapter.record(passes, max(trainer.global_step - 1, 0), skipped=True)
        self._window = AccumulationWindow()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._record_update()  # the one before, if manual optimization has several updates in a training_step
        number = self._optimizers.number(optimizer)
        passed = self._optimizers.has_run(number) or pl_module.automatic_optimization
        if not passed and has_gradients(optimizer):
            raise GraphError(
                "PerSample must run the backward pass; found an optimizer step without it. Call "
                "self.manual_backward(losses), or self.manual_backward(loss, outputs=outputs), in place of "
                "loss.backward()."
            )
        if self.exact_accumulation:
            self._window.divide(optimizer, trainer.accumulate_grad_batches)
            self._window = AccumulationWindow()
        passes = self._optimizers.take_passes(number)
        update = trainer.global_step
        scale = loss_scale(trainer)

        def record_update() -> None:
            self._record_update = _do_nothing
            skipped = loss_scale(trainer) < scale  # a gradient scaler reduces its scale when it skips an update
            self._adapter.record(passes, update, skipped=skipped, log=self._optimizers.log_name(number))

        self._record_update = record_update
        self._stepped = True

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._record_update()
        self._batch = None
        if self._stepped and trainer._logger_connector.should_update_logs:
            self._log(pl_module, on_epoch=False)
        self._stepped = False

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the updates since the last line of the log, if it is not written again in this epoch."""
        self._log(pl_module, on_epoch=True)

    def _log(self, module: LightningModule, on_epoch: bool) -> None:
        dtype = torch.float32 if module.device.type == "mps" else torch.float64  # float32 rounds ids above 2**24
        values = {
            name: torch.tensor(value, dtype=dtype, device=module.device)
            for name, value in self._adapter.take_log().items()
            if not isinstance(value, str)
        }
        # Equal on all ranks; each is logged once, so that its maximum over an epoch is the value itself.
        module.log_dict(values, on_step=not on_epoch, on_epoch=on_epoch, reduce_fx="max", sync_dist=on_epoch)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._adapter.finish()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore_methods()
        self._adapter.stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._restore_methods()

    def state_dict(self) -> dict[str, Any]:
        self._record_update()
        states = {"transforms": self.transforms.state_dict()} if self.transforms.states else {}
        return states if self.ledger is None else {**states, "ledger": self.ledger.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.transforms.load_state_dict(state_dict.get("transforms"))
        if self.ledger is not None and "ledger" in state_dict:
            self.ledger.load_state_dict(state_dict["ledger"])


class AccumulationWindow:
    """Accumulation window of an exact mean over its samples.

    Each loss, a mean over its batch, is multiplied by count / unit, which is 1 for batches of equal size. When the
    window is complete, the gradients are divided by the number of units instead of the number of batches.
    """

    def __init__(self) -> None:
        self.unit = 0.0  # count of the first batch, mean over the ranks; 1 if it is 0
        self.total = 0.0  # counts so far, on this rank

    def add(self, count: float) -> float:
        """Add a batch, and return the factor of its loss. The loss of a batch with the count 0 is 0."""
        if not self.unit:
            self.unit = collectives.all_reduce_scalars(count)[0] / collectives.size() or 1.0
        self.total += count
        return count / self.unit

    def divide(self, optimizer: torch.optim.Optimizer, batches: int) -> None:
        """Replace the division by `batches`, and that by the number of ranks, by one by the total count."""
        if not self.unit:
            return
        total = collectives.all_reduce_scalars(self.total)[0] or 1.0
        factor = batches * self.unit * collectives.size() / total
        if factor != 1:
            for parameters in optimizer.param_groups:
                for p in parameters["params"]:
                    if p.grad is not None:
                        p.grad.mul_(factor)


def _do_nothing() -> None:
    pass
