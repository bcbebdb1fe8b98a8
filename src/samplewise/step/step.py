"""`sw.Step`: a training step, which turns batches into parameter updates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from samplewise.core.batches import check_loader, keep_whole
from samplewise.core.losses import PREDICTION_COLUMNS, PROBABILITY, Criterion, as_loss_fn, constants_of
from samplewise.core.microbatch import Auto, as_microbatch, memory_budget
from samplewise.core.state import Buffers
from samplewise.core.validate import CheckedAttributes
from samplewise.errors import BatchError, DistributedError, LoaderStopped
from samplewise.parallel.collectives import errors_on_all_ranks
from samplewise.parallel.ddp import inner
from samplewise.parallel.fsdp import FSDPConfig
from samplewise.parallel.launch import join_ranks
from samplewise.privacy.privacy import Privacy, PrivacyMeter
from samplewise.step.apply import UpdateApplier
from samplewise.step.compiled.runner import CompiledRunner, EagerRunner, MicrobatchRunner, Runner
from samplewise.step.config import (
    FunctionalOptimizer,
    Rule,
    StepConfig,
    as_optimizer,
    as_record,
    check_order,
    check_scheduler,
)
from samplewise.step.forward import LossEvaluator, Means, MixedPrecision
from samplewise.step.group_means import GroupCounts
from samplewise.step.parameters import OpenWindowGuard, TrainedParameters
from samplewise.step.policy import make_policy
from samplewise.step.ranks import make_ranks
from samplewise.step.schedules import BySamples, FollowNoise, Ramp, SampleScheduler
from samplewise.step.sizes import WindowSizes
from samplewise.step.split_accumulate import PrivateAccumulator
from samplewise.step.update import Totals, Update
from samplewise.step.window import BatchCursor, BatchLayouts, Counters
from samplewise.step.window_builder import WindowBuilder
from samplewise.transforms.chain import Chain, Transforms, as_chain
from samplewise.transforms.sums import Per, sample_means

if TYPE_CHECKING:
    from samplewise.step.config import Tail  # jedi 0.20, TAB in notebooks, fails at properties of type Literal


class Step(CheckedAttributes):
    """Training step: accumulates gradients over `samples` samples and updates the parameters.

        for update in step.over(loader):   # exactly one update per iteration
            ...
        step.run(loader)                   # all updates of the loader; returns their totals
        step(batch)                        # one batch: returns the updates that this batch completes
        step.flush()                       # ... and one update from the samples that remain
        step.accumulate(batch)             # manual accumulation: no update is made
        step.apply()                       # ... until this call

    model, optimizer, loss_fn: `loss_fn(model, batch)` returns losses (B,), or (losses, counts) if each sample has its
    own denominator. The last element of the tuple may be a dict of columns (B,) for `update.columns`. For batches
    (x, y), loss_fn may be a criterion such as nn.CrossEntropyLoss(). The optimizer may be a function
    (params, gradients) -> None, such as sw.sgd(0.1).

    What an update is. Its gradient is Σ c·g / Σ counts over its samples, for any batch and microbatch size.
    samples: number of samples per update; None (default): one update per batch. A number that changes: see `ramp` and
    `follow_noise`.
    tail: handling of samples at the end of a loader that are too few for an update: "update" with the samples
    available (default), "drop" them, or "carry" them into the next pass.
    transforms: coefficients for each sample's gradient before the sum, and noise on the sum: see `chain`.
    aggregate: what the sum is divided by: see `per`. None (default): sw.per("token"), the counts. With "sample", the
    loss of a sample is its mean, and it counts 1; with "group", loss and count of a sample are divided by the counts
    of its group in the window. Transforms, norms, `update.losses` and `update.counts` refer to these. A window of
    several microbatches with "group" needs two forward passes.

    Optimizer.
    scheduler: learning rate scheduler, stepped once per update. By samples, whatever their number per update: see
    `by_samples`.
    max_grad_norm: upper bound on the norm of the update's gradient.

    Safety.
    on_nonfinite: "raise" before the update (default without `privacy`), "skip" the update, or "ignore". On an
    accelerator an update makes one host sync for this. It makes none with a fused optimizer, such as
    AdamW(..., fused=True), which skips the update on the device: the error is then raised when the update is read, or
    before the next one.
    recheck: number of updates between two rechecks, in which one sample is computed alone and compared with its result
    in the batch. None: only at the first update. False: never.
    interacting: "refuse" (default) raises SamplesInteractError if a transform needs per-sample gradients and the loss
    of a sample depends on other samples. "allow" weighs the rows of the Jacobian of each microbatch's losses; an update
    then depends on how its window is cut into microbatches.

    Execution.
    microbatch: number of samples per forward and backward pass. None (default): as they arrive; "auto" or
    sw.auto(memory): as many as fit into memory.
    precision: None (no autocast by the step), "32", "bf16-mixed", or "16-mixed" with a loss scale.
    compile: False (default); True compiles forward pass, backward pass, transforms and the optimizer's update into one
    graph, from the second update on; "auto" does so only if updates have one sample, after 1,000 updates. If
    compilation is not possible or not faster, the step continues uncompiled, and `step.compiled` gives the reason. With
    several ranks, or windows of several microbatches, True compiles the gradients, without their sum and the optimizer.
    parallel: how several processes share the model. "ddp": each rank has the whole model, initialized from rank 0;
    a DistributedDataParallel is recognized without `parallel`. "fsdp": each rank keeps a shard of every parameter, see
    sw.parallel.fsdp; leave `parallel` out for a model that is already sharded. If torchrun has started the processes,
    the step initializes the process group. `samples` counts the samples of all ranks.

    Observation.
    record: "norms" records `update.norms` if no transform needs them; see also `require`.

    Privacy.
    privacy: plan of a differentially private training, see `sw.Privacy`. Batches must come from its loader, one update
    per draw. The step adds clip and noise to `transforms` and divides by a public constant. A sample whose loss or
    gradient is not finite contributes nothing. `step.privacy.spent()` is the privacy spent so far.

    If an exception is raised, the open window is discarded, and parameters, optimizer and buffers are as before it.
    """

    _fixed: ClassVar = {
        **dict.fromkeys(("model", "scheduler", "precision", "counters", "config", "on_nonfinite"), ""),
        **dict.fromkeys(("recheck", "compile", "parallel", "interacting", "privacy", "aggregate"), ""),
        "loss_fn": "Create a new Step, or let the loss function read a variable that you change.",
        "record": "Call step.require(norms=True).",
        "optimizer": "Create a new Step, or change the settings in step.optimizer.param_groups.",
    }

    @errors_on_all_ranks()
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Rule,
        loss_fn: Callable[..., Any],
        samples: int | Ramp | FollowNoise | None = None,
        *,
        microbatch: int | Literal["auto"] | Auto | None = None,
        transforms: Transforms = (),
        tail: Literal["update", "drop", "carry"] = "update",
        scheduler: LRScheduler | BySamples | SampleScheduler | None = None,
        max_grad_norm: float | None = None,
        on_nonfinite: Literal["raise", "skip", "ignore"] | None = None,
        recheck: int | Literal[False] | None = None,
        precision: Literal["32", "bf16-mixed", "16-mixed"] | None = None,
        compile: bool | Literal["auto"] = False,
        parallel: Literal["ddp", "fsdp"] | FSDPConfig | None = None,
        record: Literal["norms"] | Collection[Literal["norms"]] = (),
        interacting: Literal["refuse", "allow"] = "refuse",
        privacy: Privacy | None = None,
        aggregate: Per | None = None,
    ):
        check_order(model, optimizer, loss_fn)
        join_ranks(model, parallel)  # before other arguments are checked: errors then reach all ranks
        policy = make_policy(privacy, PrivateAccumulator)
        self.config = config = StepConfig(
            samples=samples,
            tail=tail,
            transforms=policy.complete(as_chain(transforms)),
            max_grad_norm=max_grad_norm,
            on_nonfinite=on_nonfinite,
            recheck=recheck,
            microbatch=as_microbatch(microbatch),
            precision=precision,
            compile=compile,
            parallel=parallel,
            record=as_record(record),
            interacting=interacting,
            policy=policy,
            aggregate=aggregate,
        )
        check_scheduler(scheduler, optimizer, config.hides_samples)
        self.model = model
        self.loss_fn = as_loss_fn(loss_fn)
        self._allow_columns(config.transforms.batch_keys, config.transforms.reads_whole_batch)
        if config.aggregate is not None and config.aggregate.key is not None:
            self._allow_columns(config.aggregate.batch_keys, callable(config.aggregate.key))
        modules = [inner(model)]
        if isinstance(self.loss_fn, nn.Module):
            modules.append(self.loss_fn)
        ranks = make_ranks(model, config, modules, optimizer, self._begin_window)
        parameters = dict.fromkeys(p for module in modules for p in module.parameters())
        optimizer = as_optimizer(optimizer, ranks.optimizer_parameters(parameters))
        scheduler = scheduler(optimizer) if isinstance(scheduler, BySamples) else scheduler
        trained = TrainedParameters(optimizer, modules, ranks.leaves)
        self._layouts = BatchLayouts()
        self._constants = constants_of(loss_fn)
        self._counters = counters = Counters()
        sizes = WindowSizes(samples, counters)
        self._precision = MixedPrecision(precision)
        buffers = Buffers(modules)
        policy.attach(modules, optimizer, ranks.sharded, precision)
        wrapped = policy.wrap_loss_fn(ranks.wrap_loss_fn(self.loss_fn), self._constants)
        criterion = self.loss_fn if isinstance(self.loss_fn, Criterion) else None
        budget = memory_budget(config.microbatch, modules[0], share=2)
        guard = OpenWindowGuard(trained, optimizer)
        self._evaluator = LossEvaluator(
            modules,
            trained,
            wrapped,
            self._precision,
            budget,
            interacting,
            ranks,
            policy,
            guard,
            criterion,
            _means(config.aggregate),
        )
        self._applier = UpdateApplier(
            config, trained, optimizer, scheduler, self._precision, ranks, counters, buffers, sizes
        )
        self._windows = WindowBuilder(config, self._evaluator, guard, self._layouts, ranks, counters, buffers, sizes)
        self._runner = self._make_runner()
        ranks.check_optimizer(trained.named, optimizer)
        self._complete = True  # from now on, attributes are checked when they are assigned

    def _make_runner(self) -> Runner:
        ranks = self._windows.ranks
        if not self.config.compile:
            return EagerRunner(self._windows, self._applier, "compile=False")
        reason = self.config.policy.not_compiled or ranks.not_compiled(self.config.compile)
        if reason:
            return EagerRunner(self._windows, self._applier, reason)
        eager = EagerRunner(self._windows, self._applier, "not compiled")
        # The sum over ranks, which is not compiled, comes between gradients and optimizer.
        return MicrobatchRunner(eager) if ranks.exchanges else CompiledRunner(eager)

    def __repr__(self) -> str:
        optimizer = self._applier.optimizer  # without waiting for the device
        rule = getattr(optimizer, "rule", optimizer)
        objects = (inner(self.model), rule, getattr(self.loss_fn, "criterion", self.loss_fn))
        names = [getattr(value, "__qualname__", None) or type(value).__name__ for value in objects]
        settings = {name: getattr(self.config, name) for name in ("samples", "microbatch", "precision", "aggregate")}
        arguments = [f"{name}={value!r}" for name, value in settings.items() if value is not None]
        arguments += [f"transforms={self.transforms!r}"] if self.transforms.transforms else []
        return f"Step({', '.join(names + arguments)})"

    def __dir__(self) -> Iterable[str]:
        return [name for name in super().__dir__() if name != "config"]  # read by the package only

    # --- updates ---------------------------------------------------------------------------------------------------

    def over(self, loader: Iterable[Any]) -> Iterator[Update]:
        """Iterate over the updates of a loader. After `break`, unused samples of the current batch are kept for the
        next call.
        """
        return self._over(loader, blocks=False)

    def _over(self, loader: Iterable[Any], blocks: bool) -> Iterator[Update]:
        check_loader(loader)
        with self._windows.discard_on_error(), suppress(LoaderStopped):
            yield from self._use_up(blocks)
            for number, batch in enumerate(loader):
                cursor = batch if isinstance(batch, BatchCursor) else BatchCursor(batch, number=number)
                yield from self._runner.run(self._admit(cursor), blocks)
            yield from map(self._applier.apply, self._windows.end())
            if self.tail == "drop":
                self._applier.follow_samples()  # the samples that are left out count

    def _admit(self, cursor: BatchCursor) -> BatchCursor:
        """Replace the batch by the one that the policy admits, and mark its constants; returns the cursor."""
        cursor.batch, owners = self.config.policy.admit(cursor.batch)
        if owners is not None:
            cursor.keep_together(owners)
        cursor.layouts = self._layouts
        if self._constants and cursor.batch is not None:
            cursor.batch = keep_whole(cursor.batch, self._constants)
        return cursor

    def _use_up(self, blocks: bool = False) -> Iterator[Update]:
        """Updates that the unused samples of the current batch complete."""
        cursor = self._windows.cursor
        if cursor is not None:
            yield from self._runner.run(cursor, blocks)

    def run(self, loader: Iterable[Any]) -> Totals:
        """Make all updates of `over(loader)` and return their totals."""
        totals = Totals()
        for update in self._over(loader, blocks=True):
            totals._add(update)
        return totals

    def __call__(self, batch: Any) -> list[Update]:
        """Make and return the updates that this batch completes. Remaining samples stay in the window until the next
        batch or `flush`.
        """
        with self._windows.discard_on_error():
            updates = list(self._use_up())
            cursor = self._admit(BatchCursor(batch))
            updates += self._runner.run(cursor, blocks=False)
        return updates

    def accumulate(self, batch: Any) -> None:
        """Add a batch of any size to the window without making an update."""
        self.config.policy.check_manual()
        with self._windows.discard_on_error():
            self._windows.accumulate(self._admit(BatchCursor(batch)))

    def apply(self) -> Update:
        """Make one update from the accumulated samples. With several ranks, every rank must call it; some ranks may
        have no samples.
        """
        update = self._close()
        if update is None:
            raise BatchError("an update must have samples; found none accumulated. Call accumulate(batch) first.")
        return update

    def flush(self) -> Update | None:
        """Make one update from the samples in the open window; None if there are none. With several ranks, every rank
        must call it.
        """
        update = self._close()
        self._windows.ranks.next_pass(self._windows.window, self.samples)
        return update

    def _close(self) -> Update | None:
        with self._windows.discard_on_error():
            window = self._windows.close()
            return None if window is None else self._applier.apply(window)

    # --- settings --------------------------------------------------------------------------------------------------

    def require(
        self,
        *,
        norms: bool = False,
        columns: Mapping[str, Hashable] | None = None,
        predictions: Collection[str] = (),
    ) -> None:
        """Declare what a listener reads from updates; recorded from the next window on.

        norms: `update.norms`.
        columns: columns of the batches in `update.columns`: column name -> key of the batch.
        predictions: columns in `update.columns` from nn.CrossEntropyLoss or nn.NLLLoss with one class index per sample:
        "label", "prediction" (class with the largest logit), "margin" (the label's logit minus the largest other),
        "confidence" (probability of the label), "el2n" (norm of the probabilities minus the one-hot label), and
        "probability" (of all classes: columns probability/0, probability/1, ...).
        Other loss functions do not have them, and return columns of their own.
        """
        names = (*PREDICTION_COLUMNS, PROBABILITY)
        if isinstance(predictions, str) or set(predictions) - set(names):
            raise ValueError(f"predictions must be a list of names among {', '.join(names)}; found {predictions!r}.")
        self.config.policy.check_recording()
        self._windows.require(norms, columns or {}, predictions)
        self._allow_columns((columns or {}).values())

    def _allow_columns(self, keys: Iterable[Hashable], any_key: bool = False) -> None:
        """Let a criterion ignore these columns of the batch, which transforms or listeners read."""
        if isinstance(self.loss_fn, Criterion):
            self.loss_fn.allow_columns(keys, any_key)

    @property
    def samples(self) -> int | None:
        """Number of samples of the open window; a new value, or schedule, also applies to the open window."""
        return self._windows.samples

    @samples.setter
    def samples(self, samples: int | Ramp | FollowNoise | None) -> None:
        self._configure(samples=samples)

    @property
    def tail(self) -> Tail:
        """Handling of samples at the end of a loader that are too few for an update."""
        return self.config.tail

    @tail.setter
    def tail(self, tail: Tail) -> None:
        self._configure(tail=tail)

    @property
    def transforms(self) -> Chain:
        """Transforms of per-sample gradients; new ones take effect at the next window."""
        return self.config.transforms

    @transforms.setter
    def transforms(self, transforms: Transforms) -> None:
        chain = self.config.policy.complete(as_chain(transforms))
        self._allow_columns(chain.batch_keys, chain.reads_whole_batch)
        self._configure(transforms=chain)

    @property
    def max_grad_norm(self) -> float | None:
        """Upper bound on the norm of the update's gradient; a new value takes effect at the next window."""
        return self.config.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, max_grad_norm: float | None) -> None:
        self._configure(max_grad_norm=max_grad_norm)

    @property
    def microbatch(self) -> int | Auto | None:
        """Number of samples per forward and backward pass; a new number takes effect at the next microbatch."""
        return self.config.microbatch

    @microbatch.setter
    def microbatch(self, microbatch: int | None) -> None:
        if isinstance(as_microbatch(microbatch), Auto) or self._windows.size.automatic:
            raise ValueError(
                "microbatch can be changed from one number to another; found an automatic size, which is chosen when "
                "the step is created. Create a new Step."
            )
        self._configure(microbatch=microbatch)
        self._windows.size.size = microbatch

    def _configure(self, **changes: Any) -> None:
        config = replace(self.config, **changes)
        vars(self)["config"] = config
        self._windows.configure(config)

    @property
    def optimizer(self) -> torch.optim.Optimizer | FunctionalOptimizer:
        self._applier.settle()
        return self._applier.optimizer

    @property
    def scheduler(self) -> LRScheduler | SampleScheduler | None:
        self._applier.settle()
        return self._applier.scheduler

    @property
    def counters(self) -> Counters:
        """Totals since the creation of the step. If the device decides whether the last update is skipped, this waits
        for its decision.
        """
        self._applier.settle()
        return self._counters

    @property
    def privacy(self) -> PrivacyMeter | None:
        """Privacy of the step: `spent()`, `left`, `zeroed`, `open(directory)`, `close()`; None without privacy=."""
        return self.config.policy.meter

    @property
    def _started_updates(self) -> int:
        """Number of updates so far; the last one counts until the device has decided to skip it."""
        return self._counters.updates

    # --- processes -------------------------------------------------------------------------------------------------

    @errors_on_all_ranks()
    def _attach_process_group(self) -> None:
        """Attach a process group that was initialized after this step was created, as with parallel="ddp". Call it
        before the first update. No effect with one process or if the step already has a group.
        """
        if not self._windows.ranks.outdated:
            return
        if self.config.parallel not in (None, "ddp"):
            raise DistributedError(
                f"the process group must exist before a step with parallel={self.config.parallel!r} is created; found "
                "that it was initialized later. Initialize it before Step(...)."
            )
        config = replace(self.config, parallel="ddp")
        ranks = make_ranks(self.model, config, self._evaluator.modules, self.optimizer, self._begin_window)
        ranks.check_optimizer(self._evaluator.trained.named, self.optimizer)
        config.policy.attach(self._evaluator.modules, self.optimizer, ranks.sharded, config.precision)
        self._windows.attach(ranks)
        self._applier.ranks = ranks
        self._evaluator.ranks = ranks
        self._runner = self._make_runner()

    def _begin_window(self) -> None:
        """Begin the window before gradients of other ranks are added to `.grad`."""
        self._windows.begin()

    @property
    def _passes_alone(self) -> bool:
        """False if forward passes of the model contain collectives, because each rank has a shard of the parameters."""
        return self._windows.ranks.passes_alone

    # --- compilation -----------------------------------------------------------------------------------------------

    @property
    def compiled(self) -> str:
        """State of compilation: "compiled", or the reason why updates are not compiled."""
        return self._runner.status

    def _slow_compile_notice(self, notify: Callable[[str], None]) -> AbstractContextManager[None]:
        """Context manager that passes notices about slow compilation to `notify(line)` instead of printing them.
        `notify` is called from another thread.
        """
        return self._runner.slow_compile_notice(notify)

    # --- state -----------------------------------------------------------------------------------------------------

    @property
    def _has_pending_samples(self) -> bool:
        """True if the window holds samples that are not part of an update yet."""
        return self._windows.window.open

    @property
    def _has_deferred_samples(self) -> bool:
        """True if the open window holds samples that are not computed yet; `state_dict` does not contain them."""
        return bool(self._windows.window.deferred)

    @property
    def _consumed(self) -> int:
        """Number of samples consumed from the current batch; 0 if no partly used batch is left."""
        cursor = self._windows.cursor
        return 0 if cursor is None else cursor.consumed

    def state_dict(self) -> dict[str, Any]:
        """State of the step: counters, loss scale, the microbatch size found by "auto", and the open window as gradient
        sums. Samples that are not computed yet are not included: the first of them is number `counters.samples`. Model,
        optimizer and scheduler have their own state dicts. With several ranks, save it between two updates.
        """
        return self._state_dict(window=True)

    def _state_dict(self, window: bool) -> dict[str, Any]:
        """State of the step. window=False leaves out the open window: see `_window_state`."""
        windows = self._windows
        if window:
            windows.ranks.check_saved(windows.window)
        return {
            "counters": asdict(self.counters),
            "precision": self._precision.state_dict(),
            "microbatch": windows.size.size,
            "memory": None if windows.ranks.exchanges else self._evaluator.budget,  # ranks may have different ones
            "compiling": self._runner.state_dict(),
            "samples_in_windows": windows.ranks.epoch_state(),
            "layouts": self._layouts.state_dict(),
            "sizes": windows.sizes.state_dict(),
            "window": windows.state_dict() if window else WindowBuilder.NO_WINDOW,
            "transforms": self.transforms.state_dict(),
            **self.config.policy.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Discard the open window and restore what `state_dict` returned."""
        windows = self._windows
        windows.discard()
        self._applier.forget_undecided()
        self.counters.load(state["counters"])
        self._precision.load_state_dict(state["precision"])
        windows.size.load(state["microbatch"], state.get("memory"))
        self._evaluator.budget = windows.size.budget
        self.config.policy.load_state_dict(state.get("privacy"))
        self._runner.load_state_dict(state["compiling"])
        windows.ranks.load_epoch_state(state.get("samples_in_windows") or [])
        self._layouts.load_state_dict(state.get("layouts") or BatchLayouts().state_dict())
        windows.sizes.load_state_dict(state.get("sizes") or {})
        self.transforms.load_state_dict(state.get("transforms"))
        windows.load_state_dict(state["window"])

    def _window_state(self) -> dict[str, Any]:
        """State of this rank's part of the open window; only the same rank of the same number of ranks can load it."""
        windows = self._windows
        shares = windows.ranks.window_state(windows.window)
        return {"counters": asdict(self.counters), "shares": shares, "window": windows.state_dict()}

    def _load_window_state(self, state: dict[str, Any]) -> None:
        """Restore this rank's part of the open window. Call it after `load_state_dict`."""
        windows = self._windows
        windows.ranks.check_window_state(state["shares"])
        self.counters.load(state["counters"])
        windows.load_state_dict(state["window"])
        windows.ranks.load_window_state(state["shares"], windows.window)

    def _rank_state(self) -> dict[str, Any]:
        """State of compilation on this rank, in which ranks may differ: which gradients are compiled, and why others
        are not. Empty without ranks or `compile`: it is part of `state_dict` then.
        """
        return self._runner.rank_state()

    def _load_rank_state(self, state: dict[str, Any]) -> None:
        """Restore what `_rank_state` returned on this rank. Call it after `load_state_dict`."""
        if state:
            self._runner.load_rank_state(state)


def _means(aggregate: Per | None) -> Means | None:
    """Function that divides losses and counts, for the evaluator; None if they stay as returned."""
    if aggregate is None or aggregate.unit not in ("sample", "group"):
        return None
    return sample_means if aggregate.unit == "sample" else GroupCounts(aggregate)
