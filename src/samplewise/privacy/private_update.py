"""One private update, in the order of the table in docs/privacy.md. `Step`, its windows and its applier call the hooks:

    admit           the next draw of privacy.loader; every other batch is refused
    begin           model and optimizer are recorded before the first pass over the draw
    accumulator     each sample, or user, adds its clipped gradient to the sum; one that is not finite adds nothing
    check_model     the passes have left nothing of the samples in model or optimizer
    _add_noise      noise_multiplier × sensitivity on every element of the sum, also of parameters without a gradient
    before_apply    a digest of the noisy sum is on disk before a parameter changes: a crash cannot hide an update
    divisor         the sum is divided by a public constant, not by the number of samples
    after_apply     the optimizer has changed the parameters: an adaptive bound moves, and the next draw is due

Nothing else depends on the samples, and nothing else of them is shown unless the plan says `observe`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import exp, sqrt
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from samplewise.core.closure_state import CallSnapshot
from samplewise.core.losses import LossFn
from samplewise.errors import PrivacyError, TransformError
from samplewise.parallel import collectives
from samplewise.parallel.collectives import on_every_rank
from samplewise.privacy.privacy import Privacy, PrivacyMeter
from samplewise.privacy.private_model import ModelState, check_private_parameters, largest_terms
from samplewise.privacy.refusals import (
    OWNED,
    OWNERS,
    check_private_weights,
    check_rows,
    check_settings,
    check_sharded_precision,
    check_transforms,
    private_loss_fn,
)
from samplewise.privacy.release_log import Release, ReleaseChecksum
from samplewise.privacy.rng import Stream, stream
from samplewise.privacy.sampling import DrawnBatch
from samplewise.transforms.chain import Chain, Stage, chain, sensitivity
from samplewise.transforms.clip import clip
from samplewise.transforms.stats import SampleStats
from samplewise.transforms.transform import Grouping, SampleTransform, SumTransform

COUNT_NOISE = 0.05  # noise of the count of unclipped samples, as a share of the expected number of samples
BOUND_RATE = 0.2  # learning rate of an adaptive bound, in the logarithm


class Trained(Protocol):
    """Parameters that the step trains."""

    def trainable(self) -> dict[str, Tensor]:
        """Those that require gradients."""

    def untracked_parameters(self) -> dict[str, Tensor]:
        """Parameters of the model that require gradients and that the optimizer does not have."""

    def gradients(self) -> list[Tensor]:
        """Gradients in `.grad`."""


class PrivateUpdate:
    """Policy of private updates of one step. `plan`: its sw.Privacy. `meter`: what it has spent. `private_accumulator`:
    class of the accumulator that leaves out samples; it belongs to the step, which this package does not import. The
    hooks without a docstring are those of `OrdinaryUpdate` in samplewise.step.policy.
    """

    allows_interaction: ClassVar = False  # clipping a sample bounds its influence only if no other sample has it, too
    empty_updates: ClassVar = True  # a draw without samples is an update, too: that it is empty must not show
    needs_two_samples: ClassVar = True  # a draw may have one sample, with which first checks can compare nothing
    nonfinite_policies: ClassVar = ("zero",)  # a sample that is not finite contributes nothing
    not_compiled: ClassVar = (
        "private updates are not compiled: code is compiled for a number of samples, which is private here, and each "
        "sum must be repeated bit for bit after a resume"
    )

    def __init__(self, plan: Privacy, private_accumulator: Callable[[Any, PrivacyMeter], Any]):
        assert plan.clip.max_norm is not None  # sw.Privacy accepts no other clip
        self.plan = plan
        self.meter = PrivacyMeter(plan)
        self.visible = plan.observe
        self.parameters = 1  # number of trained parameters
        self.term_limit: float | None = None  # norm of a sample's terms above which it is added alone
        self._private_accumulator = private_accumulator
        self._first_bound = plan.clip.max_norm
        self._bound = self._first_bound  # changes if it is adaptive
        self._state = plan._state  # state and log are shared by all steps of the plan
        self._release_log = plan._release_log
        self._stream: Stream | None = None  # of the noise of this update
        self._checksum: ReleaseChecksum | None = None
        self._chain: Chain | None = None
        self._model: ModelState
        self._weights: CallSnapshot | None = None  # state of the user's transforms before their first call

    # --- before the first update -----------------------------------------------------------------------------------

    def complete(self, transforms: Chain) -> Chain:
        """The user's transforms, followed by grouping, clip and noise of the plan; raises unless the sensitivity of the
        result is bounded.
        """
        if self._chain is not None:
            raise PrivacyError(
                "the transforms of a private step must stay as they are; found new ones. Create a new Step."
            )
        check_transforms(transforms, self.plan)
        users = []
        if self.plan.users is not None:
            users = [Grouping("group('user')", lambda batch: batch[OWNERS].tolist(), frozenset({OWNERS}))]
        std = f"{self.plan.noise_multiplier:.4g}·{self._bound:g}" + ("·√P" if self.plan.clip.by_parameter else "")
        noise = SumTransform(f"private noise({std})", f"N(0, ({std})²)", self._add_noise, additive=True)
        private = chain(*transforms.transforms, *users, self._clip(), noise)
        try:
            sensitivity(private, parameters=1)
        except TransformError as error:
            raise PrivacyError(str(error)) from error
        self._chain = replace(private, divisor=self.plan._divisor)
        return self._chain

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        check_settings(settings, self.plan)

    def wrap_loss_fn(self, loss_fn: LossFn, constants: Collection[Any]) -> LossFn:
        return private_loss_fn(loss_fn, self.plan, constants)

    def attach(self, modules: Sequence[nn.Module], optimizer: Any, sharded: bool, precision: str | None) -> None:
        """Use the key of rank 0 on all ranks. Collective."""
        check_sharded_precision(sharded, precision)
        self._model = ModelState(modules, not sharded, optimizer)
        self._state.share_secret()

    # --- 1: Poisson sampling, of which this is the next draw -------------------------------------------------------

    def admit(self, batch: Any) -> tuple[Any, Tensor | None]:
        state = self._state
        state.check_process()
        if not isinstance(batch, DrawnBatch) or batch.source != state.secret.public_id:
            kind = "one of another Privacy" if isinstance(batch, DrawnBatch) else type(batch).__name__
            raise PrivacyError(
                "batches of a private step must come from privacy.loader(dataset), whose sampling the accountant "
                f"assumes; found {kind}. Pass that loader."
            )
        if (batch.draw, batch.branch) != (state.update, state.branch):
            raise PrivacyError(
                f"each update must use the next draw, number {state.update}; found draw {batch.draw}. Iterate over the "
                "loader again: it continues with the next draw."
            )
        check_rows(batch.batch, batch.samples)
        self._pay()
        if batch.batch is None or self.plan.users is None:
            return batch.batch, batch.owners
        return {OWNED: batch.batch, OWNERS: batch.owners}, batch.owners

    def check_manual(self) -> None:
        raise PrivacyError("a private update is one draw; found a call of accumulate. Use step.over(loader).")

    def _pay(self) -> None:
        """Raise unless another update is paid for, and begin the stream of its noise."""
        state = self._state
        if self.meter.is_spent:
            raise PrivacyError(
                f"a private step must make at most the {self.plan.updates} updates that are paid for; found that they "
                f"are made ({self.meter.spent()!r}). Plan more with sw.Privacy(updates=...), before the training."
            )
        if self.plan._divisor.value is None:
            raise PrivacyError(
                "sums are divided by sample_rate × number of samples; found no number. Call privacy.loader."
            )
        self._stream = stream(state.secret, "noise", state.branch, state.update, self.plan.secure)

    # --- 2: a sum in which each sample has at most the sensitivity -------------------------------------------------

    def begin(self, trained: Trained) -> None:
        assert self._chain is not None
        self._model.remember()
        parameters = trained.trainable()
        check_private_parameters(parameters, trained.untracked_parameters())
        self.parameters = len(parameters)
        self.term_limit = self.sensitivity * largest_terms(parameters)
        if self._weights is None:
            stages = (self._chain.samples, self._chain.groups)
            self._weights = CallSnapshot(t.coefficients for stage in stages for t in stage.transforms)

    def _clip(self) -> SampleTransform:
        """Clip of the plan; an adaptive one reads the current bound for every microbatch."""
        if self.plan.adaptive is None:
            return self.plan.clip
        return replace(
            self.plan.clip,
            name=f"clip({self._bound}, adaptive={self.plan.adaptive})",
            formula="min(1, C/‖{g}‖)",
            coefficients=lambda stats: clip(self._bound).coefficients(stats),
        )

    @property
    def sensitivity(self) -> float:
        """Largest norm by which one unit changes the sum, with the current bound."""
        assert self._chain is not None
        return sensitivity(self._chain, self.parameters) * self._bound / self._first_bound

    def accumulator(self, inner: Any) -> Any:
        return self._private_accumulator(inner, self.meter)

    def refuse_unchecked(self, reason: str) -> None:
        raise PrivacyError(
            "the first update of a private step must be rechecked, because samples that interact break the bound; "
            f"found that {reason}. Compute the values from the number of the update."
        )

    def check_coefficients(self, stage: Stage, stats: SampleStats) -> None:
        assert self._weights is not None
        check_private_weights(stage, stats, self._weights)

    def check_model(self) -> None:
        self._model.check()

    def restore_model(self) -> None:
        self._model.restore()

    # --- 3: Gaussian noise on every element of the sum -------------------------------------------------------------

    def _add_noise(self, sums: list[Tensor]) -> None:
        """Last transform of the chain. With several ranks, each draws the same noise for the whole sum."""
        assert self._stream is not None
        std = self._noise_std()
        for total in sums:
            noise = self._stream.normal(total.shape, total.dtype).mul_(std)  # also the imaginary part of complex values
            total.add_(noise.to(total.device))

    def _noise_std(self) -> float:
        """Standard deviation of the noise on each element of the sum: noise multiplier × sensitivity."""
        return self._gradient_noise_multiplier() * self.sensitivity

    def _gradient_noise_multiplier(self) -> float:
        """Noise multiplier of the gradients. With an adaptive bound it is larger than that of the plan, such that
        gradients and count together have the privacy of the plan.
        """
        if self.plan.adaptive is None:
            return self.plan.noise_multiplier
        # The count, of values ±1/2, has sensitivity 1/2: its noise multiplier is 2 × count noise.
        return 1 / sqrt(self.plan.noise_multiplier**-2 - (2 * self._count_noise()) ** -2)

    def before_apply(self, trained: Trained) -> None:
        """Record the noisy sum before it is used. Raises if another one was released with this noise. Collective."""
        state = self._state
        if self._checksum is None or self._checksum.secret != state.secret:
            self._checksum = ReleaseChecksum(state.secret)
        digests = collectives.all_gather_object(self._checksum.digest(trained.gradients()))
        digest = state.secret.derive(f"release of ranks {digests}", 16).hex()
        release = Release(state.update, state.branch, state.secret.public_id, digest)
        try:
            is_replay = self._release_log.is_replay(release)
        except PrivacyError:
            state.choose_branch(self._release_log.diverged)
            raise
        if not is_replay:
            on_every_rank(lambda: self._release_log.add(release))

    # --- 4: nothing else depends on the samples --------------------------------------------------------------------

    def divisor(self, parts: Sequence[SampleStats], total: float | None) -> float:
        """The constant of the plan: the number of samples, which the arguments show, is private, and not read."""
        assert self.plan._divisor.value is not None
        return self.plan._divisor.value

    def after_apply(self, parts: Sequence[SampleStats]) -> None:
        if self.plan.adaptive is not None:
            self._adapt(parts)
        self._state.update += 1

    def _adapt(self, parts: Sequence[SampleStats]) -> None:
        """Move the bound towards the quantile, by a noisy count of the samples that were not clipped. Collective."""
        state = self._state
        halves = 0.0  # Σ ±1/2, so that one sample changes it by 1/2
        for part in parts:
            if isinstance(part.coefficients, Tensor):
                halves += float((part.coefficients.eq(1).double() - 0.5).sum())
        (total,) = collectives.all_reduce_scalars(halves)
        draw = stream(state.secret, "bound", state.branch, state.update, self.plan.secure)
        noise = float(draw.normal((1,), torch.float64)) * self._count_noise()
        assert self.plan.adaptive is not None
        share = (total + noise) / self._expected_units() + 0.5
        self._bound *= exp(-BOUND_RATE * (share - self.plan.adaptive))

    def _count_noise(self) -> float:
        """Standard deviation of the noise on the count of unclipped samples, with an adaptive bound."""
        return max(COUNT_NOISE * self._expected_units(), self.plan.noise_multiplier)

    def _expected_units(self) -> float:
        """Expected number of samples, or users, of a draw; 0 until a loader is made."""
        return self.plan.sample_rate * (self._state.units or 0)

    def check_recording(self) -> None:
        if not self.visible:
            raise PrivacyError(
                "values of single samples must not be recorded with privacy=, because the guarantee does not cover "
                "them; found that norms or columns are requested, as the ledger and the noise scale do. Leave these "
                "out, or pass sw.Privacy(observe=True)."
            )

    # --- state -----------------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        return {"privacy": self.plan}

    def state_dict(self) -> dict[str, Any]:
        """Position, bound and spending. It contains no secret."""
        state = {
            "update": self._state.update,
            "spent": self._release_log.count,
            "bound": self._bound,
            "zeroed": self.meter.zeroed if self.visible else 0,  # the guarantee does not cover it
            "units": self._recorded_units(),
        }
        return {"privacy": state}

    def _recorded_units(self) -> int | str | None:
        """Number of samples, or users; if it is not public, a hash that only the owner of the key can compute."""
        state = self._state
        if state.units is None or not state.hides_units:
            return state.units
        return f"{state.secret.public_id} {state.secret.derive(f'units {state.units}', 16).hex()}"

    def load_state_dict(self, saved: dict[str, Any] | None) -> None:
        """Continue from a state. Updates that were made after it was saved are repeated with the same noise."""
        if saved is None:
            raise PrivacyError(
                "a private step must be continued as one; found a state without privacy. Use the same privacy= as "
                "before."
            )
        state = self._state
        units = saved["units"]
        other_key = isinstance(units, str) and not units.startswith(state.secret.public_id)
        expected = self._recorded_units() if isinstance(units, str) else state.units
        if None not in (units, expected) and units != expected and not other_key:
            before = "another number" if isinstance(units, str) else units
            raise PrivacyError(
                f"a private run must be continued with the same dataset; found {state.units} {self.plan._unit}s in "
                f"place of {before}. Use the same dataset, or start a new run directory."
            )
        self._release_log.assume(saved["spent"])
        state.update = saved["update"]
        self._bound = saved["bound"]
        self.meter.zeroed = saved["zeroed"]
        state.choose_branch(self._release_log.diverged)
