"""Private mechanism of one step: which batches it accepts, clip and noise of its updates, and their record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import exp, sqrt
from typing import Any

import torch
from torch import Tensor

from samplewise.core.batches import has_rows, length, located_leaves, map_leaves, name_of
from samplewise.core.files import sha256
from samplewise.core.losses import LossFn
from samplewise.core.text import plural
from samplewise.errors import BatchError, LossesError, PrivacyError, TransformError
from samplewise.parallel.group import current_group, on_every_rank
from samplewise.privacy.meter import PrivacyMeter
from samplewise.privacy.privacy import Privacy
from samplewise.privacy.sampling import DrawnBatch
from samplewise.privacy.spending import Release
from samplewise.privacy.streams import Stream, stream
from samplewise.transforms.chain import Chain, chain
from samplewise.transforms.clip import clip
from samplewise.transforms.sensitivity import sensitivity
from samplewise.transforms.stats import SampleStats
from samplewise.transforms.transform import Grouping, SampleTransform, SumTransform

COUNT_NOISE = 0.05  # noise of the count of unclipped samples, as a share of the expected number of samples
BOUND_RATE = 0.2  # learning rate of an adaptive bound, in the logarithm
OWNED = "batch"  # keys of a batch with the user of each sample
OWNERS = "user"


class Mechanism:
    """Mechanism of one private step. `plan`: its sw.Privacy. `meter`: what it has spent. `transforms`: the user's
    transforms, then clip and noise.
    """

    def __init__(self, plan: Privacy, transforms: Chain):
        self.plan = plan
        self.meter = PrivacyMeter(plan)
        self.parameters = 1  # number of trained parameters, set before each update
        assert plan.clip.max_norm is not None  # sw.Privacy accepts no other clip
        self._first_bound = plan.clip.max_norm
        self._bound = self._first_bound  # changes if it is adaptive
        self._state = plan._state  # state and spending are shared by all steps of the plan
        self._spending = plan._spending
        self._stream: Stream | None = None
        self.transforms = self._complete(transforms)

    def _complete(self, given: Chain) -> Chain:
        """The user's transforms, followed by grouping, clip and noise of the plan; raises unless the sensitivity of the
        result is bounded.
        """
        if given.on_sum or given.grouping is not None:
            found = given.on_sum[0] if given.on_sum else given.grouping
            remedy = "users= of sw.Privacy groups by user" if given.grouping is not None else "it adds its own noise"
            raise PrivacyError(
                f"transforms must act on single samples with privacy=; found {found}. Leave it out: {remedy}."
            )
        users = []
        if self.plan.users is not None:
            if given.batch_keys or given.reads_whole_batch:
                raise PrivacyError("transforms must not read the batch with users=; found one that does. Leave it out.")
            users = [Grouping("group('user')", lambda batch: batch[OWNERS].tolist(), frozenset({OWNERS}))]
        if self.plan.adaptive is not None and given.transforms:
            raise PrivacyError(f"an adaptive bound must have no other transforms; found {given!r}. Leave them out.")
        std = f"{self.plan.noise_multiplier:.4g}·{self._bound:g}" + ("·√P" if self.plan.clip.by_parameter else "")
        noise = SumTransform(f"private noise({std})", f"N(0, ({std})²)", self._add_noise, additive=True)
        complete = chain(*given.transforms, *users, self._clip(), noise)
        try:
            sensitivity(complete, parameters=1)
        except TransformError as error:
            raise PrivacyError(str(error)) from error
        return replace(complete, divisor=self.plan._divisor)

    def _clip(self) -> SampleTransform:
        """Clip of the plan; an adaptive one reads the current bound for every microbatch."""
        if self.plan.adaptive is None:
            return self.plan.clip
        return replace(
            self.plan.clip,
            name=f"clip({self._bound}, adaptive={self.plan.adaptive})",
            formula="min(1, C/‖{g}‖)",
            answer=lambda stats: clip(self._bound).answer(stats),
        )

    # --- batches ---------------------------------------------------------------------------------------------------

    def admit(self, drawn: Any) -> Any:
        """The user's batch of the next draw; None if it has no samples on this rank. Raises for any other batch."""
        state = self._state
        state.check_process()
        if not isinstance(drawn, DrawnBatch) or drawn.source != state.secret.public_id:
            kind = "one of another Privacy" if isinstance(drawn, DrawnBatch) else type(drawn).__name__
            raise PrivacyError(
                "batches of a private step must come from privacy.loader(dataset), whose sampling the accountant "
                f"assumes; found {kind}. Pass that loader."
            )
        if (drawn.draw, drawn.branch) != (state.update, state.branch):
            raise PrivacyError(
                f"each update must use the next draw, number {state.update}; found draw {drawn.draw}. Iterate over the "
                "loader again: it continues with the next draw."
            )
        _check_rows(drawn.batch, drawn.samples)
        self._begin_update()
        if drawn.batch is None or self.plan.users is None:
            return drawn.batch
        return {OWNED: drawn.batch, OWNERS: drawn.owners}

    def wrap_loss_fn(self, loss_fn: LossFn) -> LossFn:
        """Loss function for the batches that `admit` returns: with one loss per sample, the mean over its views."""
        views = self.plan.augmentations

        def private_loss_fn(model: Any, batch: Any) -> Any:
            if self.plan.users is not None:
                batch = batch[OWNED]
            rows = length(batch)
            result = loss_fn(model, _flat(batch, views) if views > 1 else batch)
            losses = _without_counts(result)
            if not isinstance(losses, Tensor) or losses.dim() != 1:
                return losses  # the caller raises for this shape
            if rows is None or len(losses) != rows * views:
                per_view = f" and {views} views of each" if views > 1 else ""
                raise PrivacyError(
                    "a private loss function must return one loss per sample, because each loss is clipped by itself; "
                    f"found {plural(len(losses), 'loss', 'losses')} for {plural(rows or 0, 'sample')}{per_view}. "
                    "Reduce the losses of each sample to one, and do not combine samples."
                )
            return losses.unflatten(0, (rows, views)).mean(1) if views > 1 else losses

        return private_loss_fn

    # --- updates ---------------------------------------------------------------------------------------------------

    def _begin_update(self) -> None:
        """Raise unless another update is paid for."""
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

    def _add_noise(self, sums: list[Tensor]) -> None:
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

    def _count_noise(self) -> float:
        """Standard deviation of the noise on the count of unclipped samples, with an adaptive bound."""
        return max(COUNT_NOISE * self._expected_units(), self.plan.noise_multiplier)

    def _expected_units(self) -> float:
        """Expected number of samples, or users, of a draw; 0 until a loader is made."""
        return self.plan.sample_rate * (self._state.units or 0)

    @property
    def sensitivity(self) -> float:
        """Largest norm by which one unit changes the sum, with the current bound."""
        return sensitivity(self.transforms, self.parameters) * self._bound / self._first_bound

    def release(self, gradients: Iterable[Tensor]) -> None:
        """Record the noisy sum before it is used. Raises if another one was released with this noise. Collective."""
        state = self._state
        digests = current_group().all_gather_object(sha256(gradients))
        digest = sha256(digests)[:32]
        release = Release(state.update, state.branch, state.secret.public_id, digest)
        try:
            known = self._spending.known(release)
        except PrivacyError:
            state.choose_branch(self._spending.diverged)
            raise
        if not known:
            on_every_rank(lambda: self._spending.add(release))

    def end_update(self, parts: Sequence[SampleStats]) -> None:
        """Adapt the bound, and go to the next draw."""
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
        (total,) = current_group().all_reduce_scalars(halves)
        draw = stream(state.secret, "bound", state.branch, state.update, self.plan.secure)
        noise = float(draw.normal((1,), torch.float64)) * self._count_noise()
        assert self.plan.adaptive is not None
        share = (total + noise) / self._expected_units() + 0.5
        self._bound *= exp(-BOUND_RATE * (share - self.plan.adaptive))

    # --- state -------------------------------------------------------------------------------------------------------

    def share_secret(self) -> None:
        """Use the key of rank 0 on all ranks. Collective."""
        self._state.share_secret()

    def state_dict(self) -> dict[str, Any]:
        """Position, bound and spending. It contains no secret."""
        state = self._state
        spent = self._spending.count
        return {
            "update": state.update,
            "spent": spent,
            "bound": self._bound,
            "zeroed": self.meter.zeroed if self.plan.observe else 0,  # the guarantee does not cover it
            "units": self._recorded_units(),
        }

    def _recorded_units(self) -> int | str | None:
        """Number of samples, or users; if it is not public, a hash that only the owner of the key can compute."""
        state = self._state
        if state.units is None or not state.hides_units:
            return state.units
        return f"{state.secret.public_id} {state.secret.derive(f'units {state.units}', 16).hex()}"

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a state. Updates that were made after it was saved are repeated with the same noise."""
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
        self._spending.assume(saved["spent"])
        state.update = saved["update"]
        self._bound = saved["bound"]
        self.meter.zeroed = saved["zeroed"]
        state.choose_branch(self._spending.diverged)


def _check_rows(batch: Any, samples: int) -> None:
    """Raise unless each entry of a batch has one row per sample. An entry without rows, such as a number, is the same
    for all samples, and may be computed from all of them.
    """
    rows = 0 if batch is None else length(batch)
    found = "a batch that cannot be cut into rows" if rows is None else plural(rows, "row")
    if rows == samples:
        entries = [(path, leaf) for path, leaf in located_leaves(batch) if leaf is not None]
        whole = [(path, leaf) for path, leaf in entries if not has_rows(leaf, samples)]
        if not whole:
            return
        path, leaf = whole[0]
        kind = f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
        found = f"{name_of(path)}, of {kind},"
    raise PrivacyError(
        "a private batch must have one row per sample of its draw, because each row is clipped by itself; found "
        f"{found} for {plural(samples, 'sample')}. Return one row per sample from collate_fn, and keep constants in "
        "the model or the loss function."
    )


def _flat(batch: Any, views: int) -> Any:
    """Batch of (B, K, ...) as one of (B × K, ...), for K views."""

    def flattened(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() < 2:
            raise BatchError(
                f"all entries of a batch must be tensors with augmentations; found {type(leaf).__name__}. Return "
                "tensors and numbers from the dataset."
            )
        if leaf.shape[1] != views:
            raise PrivacyError(
                f"all entries of a batch must have shape (samples, {views}, ...) with augmentations={views}; found "
                f"{tuple(leaf.shape)}. Keep the views of a sample in collate_fn."
            )
        return leaf.flatten(0, 1)

    return map_leaves(batch, flattened)


def _without_counts(result: Any) -> Any:
    """Losses of a loss function. Counts are refused unless they are 0 or 1, as those of a classification."""
    if not isinstance(result, tuple) or not result:
        return result
    losses, counts = result[0], result[1] if len(result) > 1 else None
    if isinstance(counts, Tensor) and bool((counts > 1).any()):
        raise LossesError(
            "a private update divides by a public constant; found counts of single samples above 1, which would depend "
            "on the data. Return one mean loss per sample, without counts."
        )
    return losses
