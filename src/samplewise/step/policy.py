"""Policy of updates: the hooks by which private updates differ from ordinary ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from samplewise.core.batches import length
from samplewise.core.closure_state import state_restored
from samplewise.core.losses import LossFn
from samplewise.core.modes import warn
from samplewise.errors import PrivacyError
from samplewise.privacy.privacy import Privacy, PrivacyMeter
from samplewise.privacy.private_update import PrivateUpdate
from samplewise.step.parameters import TrainedParameters
from samplewise.transforms.chain import Chain, Stage
from samplewise.transforms.stats import SampleStats, are_close, cat_values, denominator


class OrdinaryUpdate:
    """Policy of updates without privacy. Its docstrings say what each hook is for, in the order of an update;
    `PrivateUpdate` has the same hooks.

    visible: losses, norms and numbers of samples may be shown.
    allows_interaction: interacting="allow" is not refused.
    empty_updates: a batch without samples is an update.
    needs_two_samples: checks of the first window are repeated until they had two samples to compare.
    nonfinite_policies: values of `on_nonfinite`; the first one is the default.
    not_compiled: why updates cannot be compiled; None: they can.
    term_limit: norm of the terms of a sample above which it is added alone; None: no limit.
    meter: `step.privacy`.
    """

    visible = True
    allows_interaction = True
    empty_updates = False
    needs_two_samples = False
    nonfinite_policies = ("raise", "skip", "ignore")
    not_compiled = None
    term_limit = None
    meter = None

    # --- before the first update -----------------------------------------------------------------------------------

    def complete(self, transforms: Chain) -> Chain:
        """Transforms of the step, from those of the user."""
        return transforms

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raise for settings of `StepConfig` that the policy does not allow."""

    def wrap_loss_fn(self, loss_fn: LossFn, constants: Collection[Any]) -> LossFn:
        """Loss function for admitted batches. `constants`: keys of its batch constants."""
        return loss_fn

    def attach(self, modules: Sequence[nn.Module], optimizer: Any, sharded: bool, precision: str | None) -> None:
        """Prepare for the models of all ranks; called again if a process group is initialized later."""

    # --- windows ---------------------------------------------------------------------------------------------------

    def admit(self, batch: Any) -> tuple[Any, Tensor | None]:
        """Batch for the loss function, None if it has no samples, and the user of each row; raises for a batch that is
        not the next one.
        """
        return batch, None

    def check_manual(self) -> None:
        """Raise if batches may not be accumulated by hand."""

    def begin(self, trained: TrainedParameters) -> None:
        """Called before the first pass of a window."""

    def accumulator(self, inner: Any) -> Any:
        """Accumulator of the window, around one that knows the transforms."""
        return inner

    def refuse_unchecked(self, reason: str) -> None:
        """Raise if an update must not be made without a recheck, which cannot be made for this reason."""

    def check_coefficients(self, stage: Stage, stats: SampleStats) -> None:
        """Check that transforms give each sample a coefficient of its own, with the first results they got."""
        with state_restored([transform.coefficients for transform in stage.transforms]):
            _compare_halves(stage, stats)

    def check_model(self) -> None:
        """Raise if the passes of the window have changed what they must not change."""

    def restore_model(self) -> None:
        """Undo changes of the model by passes of a window that is discarded."""

    # --- the update ------------------------------------------------------------------------------------------------

    def before_apply(self, trained: TrainedParameters) -> None:
        """Called with the sums in `.grad`, after the transforms of the sum and before parameters change."""

    def divisor(self, parts: Sequence[SampleStats], total: float | None) -> Tensor | float:
        """Divisor of the sum. `parts`: results of this rank; `total`: denominator of all ranks, if several."""
        return denominator(parts) if total is None else total

    def after_apply(self, parts: Sequence[SampleStats]) -> None:
        """Called after parameters have changed, with the results of the window."""

    def check_recording(self) -> None:
        """Raise if values of single samples may not be recorded."""

    # --- state -----------------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """Settings that all ranks must share and that run.json shows."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Entries for the state of the step."""
        return {}

    def load_state_dict(self, saved: dict[str, Any] | None) -> None:
        """Restore the entry "privacy" of a state; None if there is none."""
        if saved is not None:
            raise PrivacyError(
                "a private step must be continued as one; found a step without privacy. Use the same privacy= as "
                "before."
            )


UpdatePolicy = OrdinaryUpdate | PrivateUpdate


def make_policy(plan: Any, private_accumulator: Callable[[Any, PrivacyMeter], Any]) -> UpdatePolicy:
    """Policy for the `privacy` argument of `Step`. `private_accumulator`: wraps the accumulator of private sums."""
    if plan is None:
        return OrdinaryUpdate()
    if not isinstance(plan, Privacy):
        raise TypeError(
            f"privacy must be a sw.Privacy; found {type(plan).__name__}. Write sw.Privacy(epsilon=3.0, ...)."
        )
    return PrivateUpdate(plan, private_accumulator)


def _compare_halves(stage: Stage, stats: SampleStats) -> None:
    """Warn if a transform that is called for each microbatch gives a sample a coefficient that depends on the other
    samples of the microbatch: compare the coefficients with those for each half of the samples. `stats`: what the
    transforms of the stage got in the first window.
    """
    rows = list(range(len(stats)))
    halves = [half for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]) if half]
    for transform in stage.transforms:
        if "batch" in transform.needs and length(stats.batch) != len(stats):
            return
        try:
            coefficients = transform(stats)
            repeated = transform(stats)
            parts = [coefficients] if transform.window else [transform(stats.take(half)) for half in halves]
        except Exception:  # it may need a certain number of samples; the calls of the update itself have succeeded
            return
        if not are_close(coefficients, repeated):  # random, or dependent on earlier calls
            return
        if not are_close(coefficients, cat_values(parts)):
            warn(
                f"{transform} gives a sample another weight if it is called with half of the samples, so that an "
                "update depends on batch and microbatch size. Use sw.weight(..., window=True), which calls the "
                "function once with the values of the whole window."
            )
        stats = stats.scaled(coefficients, transform.renormalizes)
