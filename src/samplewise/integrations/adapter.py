"""Adapter to the training loop of another framework: transforms of its backward passes, and rows of a ledger.

A loop calls `backward` once per batch and `record` once per update, after the optimizer has stepped:

    with adapter.training():
        for update, batches in enumerate(windows):
            for batch in batches:
                adapter.backward(BatchLoss(...), model, through, denominator, batch)
            optimizer.step()
            adapter.record(adapter.take_passes(), update)
            if log_is_written:
                framework.log(adapter.take_log())
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samplewise.core.batches import pick_column
from samplewise.engine.arguments import Parameters
from samplewise.engine.ownership.independence import norms_only_recorded
from samplewise.errors import BatchError, PrivacyError, SamplesInteractError
from samplewise.ledger.ledger import Ledger
from samplewise.parallel import collectives
from samplewise.step.backward import BackwardResult, HasBackward, Rest, backward, check_rest, run_pass, without_norms
from samplewise.transforms.chain import Chain, chain
from samplewise.transforms.stats import SampleStats
from samplewise.transforms.sums import Per
from samplewise.transforms.transform import UnitTransform


@dataclass(frozen=True)
class BatchLoss:
    """Loss of a batch in the loop of a framework, and what is known of its samples.

    loss      scalar
    outputs   tensors (B, ...) that the loss was computed from; read if `Adapter.per_sample` is true
    samples   B
    losses    (B,)
    counts    (B,), such as tokens; None: 1 each
    columns   further columns of the ledger, name -> (B,): label, prediction and margin
    ids       of the samples; None: those in the batch
    scale     (B,), positive: factor of each sample's loss, gradient, norm and count; None: 1 each
    owners    samples of the rows or elements of each output; None: row i is sample i
    """

    loss: Tensor
    outputs: Sequence[Tensor]
    samples: int
    losses: Tensor | None = None
    counts: Tensor | None = None
    columns: Mapping[str, Tensor] | None = None
    ids: Any = None
    scale: Tensor | None = None
    owners: Sequence[Tensor] | None = None


class BatchPass(NamedTuple):
    """Results of one backward pass, for the ledger and the log."""

    results: BackwardResult
    entries: dict[Hashable, Any]  # of the batch, those that the ledger reads, by key; without one, its ids if any
    epoch: int


class Adapter:
    """Transforms and ledger of a training run in the loop of another framework.

    ledger: None records nothing
    aggregate: if it needs a factor for each sample, batches have a `scale`
    logs: False leaves out the norms from the log of the trainer. A private training run must set it, and so must one
        without a log, in which they would pile up
    rest: as in `sw.backward`
    """

    def __init__(self, chain: Chain, ledger: Ledger | None, aggregate: Per | None = None, rest: Rest = "refuse"):
        check_rest(rest)
        self.chain = chain
        self.ledger = ledger
        self.aggregate = aggregate
        self.logs = True
        self.rest = rest
        self._passes: list[BatchPass] = []  # of the open accumulation window
        self._log = NormLog()
        for state in chain.states:
            state.commits_each_pass = False

    @property
    def per_sample(self) -> bool:
        """True if per-sample gradients are computed: for a transform, an aggregate, or the norms in the ledger."""
        scales = self.aggregate is not None and self.aggregate.unit in ("sample", "group")
        return bool(self.chain.transforms) or scales or self._records_norms

    @property
    def reads_norms(self) -> bool:
        """True if norms are used, by a transform or the ledger; or an aggregate, which needs the denominator, too."""
        return "norms" in self.chain.samples.needs or self.aggregate is not None or self._records_norms

    @property
    def _records_norms(self) -> bool:
        return self.ledger is not None and self.ledger.norms

    @property
    def reads_losses(self) -> bool:
        """True if the losses of the samples are used, by a transform or the ledger."""
        return self.ledger is not None or "losses" in self.chain.samples.needs

    @property
    def id_key(self) -> Hashable:
        """Key of the ids in the batch; without a ledger, that of sw.Indexed."""
        return "id" if self.ledger is None else self.ledger._keys["id"]

    @property
    def keys(self) -> list[Hashable]:
        """Keys of the batch that the ledger reads, without duplicates."""
        return [self.id_key] if self.ledger is None else list(dict.fromkeys(self.ledger._keys.values()))

    @property
    def columns(self) -> list[Hashable]:
        """Keys of the batch that ledger, transforms and aggregate read, without duplicates."""
        groups = frozenset() if self.aggregate is None else self.aggregate.batch_keys
        return list(dict.fromkeys([*self.keys, *sorted(self.chain.batch_keys | groups, key=str)]))

    # --- one batch ---------------------------------------------------------------------------------------------------

    def backward(
        self,
        values: BatchLoss,
        model: Parameters,
        through: HasBackward | None,
        denominator: float | None,
        batch: Any,
        epoch: int = 0,
        retain_graph: bool = False,
    ) -> None:
        """Run the backward pass of a batch, and keep its results until the update is recorded.

        through: runs the pass of the framework; None: that of torch
        denominator: what the loss divides the sum of the samples' losses by; read if `per_sample` is true. If it is
            None, the norms in the ledger are NaN
        """
        scale = values.scale
        losses = values.losses
        counts = values.counts
        transforms = self.chain
        if scale is not None:
            losses = None if losses is None else losses * scale
            counts = scale if counts is None else counts * scale
            transforms = chain(UnitTransform("scale", "1/unit", lambda stats: scale), transforms)
        if self.per_sample and (transforms.transforms or denominator is not None):
            try:
                results = backward(
                    values.loss,
                    model,
                    values.outputs,
                    transforms,
                    through,
                    denominator=1 if denominator is None else denominator,
                    losses=losses,
                    counts=counts,
                    batch=batch,
                    samples=values.owners,
                    retain_graph=retain_graph,
                    rest=self.rest,
                )
            except SamplesInteractError as error:
                if self.chain.transforms:
                    raise
                raise norms_only_recorded(error) from None
            if denominator is None:
                results = BackwardResult(replace(results.stats, raw_norms=torch.full_like(results.norms, torch.nan)))
        else:
            run_pass(through, values.loss, retain_graph)
            results = without_norms(values.samples, values.loss.device, losses, counts)
        if self.ledger is None and not (self._logs_norms or self.chain.states):
            return
        stats = results.stats if scale is None else in_units(results.stats, scale)
        entries: dict[Hashable, Any] = {} if values.ids is None else {self.id_key: values.ids}
        with suppress(*(() if self.ledger is not None else (BatchError,))):  # a log needs no ids
            entries = {key: pick_column(batch, key) for key in self.keys if key not in entries} | entries
        names = {} if self.ledger is None else self.ledger._keys
        columns = {name: column for name, column in (values.columns or {}).items() if name not in names}
        self._passes.append(BatchPass(BackwardResult(replace(stats, columns=columns)), entries, epoch))

    @property
    def _logs_norms(self) -> bool:
        return self.logs and self.per_sample

    # --- one update --------------------------------------------------------------------------------------------------

    def take_passes(self) -> list[BatchPass]:
        """Remove and return the passes of the open window."""
        passes = self._passes
        self._passes = []
        return passes

    def record(
        self,
        passes: Sequence[BatchPass],
        update: int,
        *,
        skipped: bool = False,
        epoch: int | None = None,
        log: str = "samplewise",
    ) -> None:
        """Write the passes of an update to the ledger, and change the states of transforms. Every rank must call it.

        epoch: default that of each pass
        log: first part of the names under which the norms are logged
        """
        for state in [] if skipped or not passes else self.chain.states:
            values = torch.cat([state.values(results.stats) for results, _, _ in passes])
            state.commit(torch.cat(collectives.all_gather_tensors(values.double())))
        for results, entries, number in passes:
            if self._logs_norms:
                self._log.add(log, results, entries.get(self.id_key))
            if self.ledger is not None:
                number = number if epoch is None else epoch
                self.ledger.record(results, entries, update=update, epoch=number, skipped=skipped)

    def take_log(self) -> dict[str, Any]:
        """Values for the log of the trainer, of the updates since the last call: see `NormLog`. Every rank must call
        it.
        """
        return self._log.take() if self._logs_norms else {}

    # --- one training ------------------------------------------------------------------------------------------------

    @contextmanager
    def training(self) -> Iterator[None]:
        """Context manager around a training run: write the rows at its end, also after an error."""
        try:
            yield
        except BaseException:
            self.stop()
            raise
        self.finish()

    def finish(self) -> None:
        """Write the last rows and the previews. Every rank must call it."""
        if self.ledger is not None:
            self.ledger.on_fit_end()

    def stop(self) -> None:
        """Write the rows so far, after an error."""
        if self.ledger is not None:
            self.ledger.on_error()


def in_units(stats: SampleStats, scale: Tensor) -> SampleStats:
    """Results with the factor of each sample's loss in its norm, where it was a coefficient."""
    norms = stats.unscaled_norms
    weights = stats.coefficients
    if isinstance(weights, dict):
        weights = {name: c / scale for name, c in weights.items()}
    elif weights is not None:
        weights = weights / scale
    return replace(stats, raw_norms=None if norms is None else norms * scale, coefficients=weights)


# --- arguments and classes of the integrations -----------------------------------------------------------------------


def refuse_privacy(privacy: Any, trainer: str) -> None:
    """Raise PrivacyError if privacy= is given: these trainers draw batches and make updates themselves."""
    if privacy is not None:
        raise PrivacyError(
            "privacy= must be used with sw.Step, which draws samples as the accountant assumes and adds the noise; "
            f"found it in {trainer}, whose loader cannot be replaced. Use sw.Step(model, optimizer, loss_fn, "
            "privacy=privacy) and sw.Trainer."
        )


def check_comes_first(cls: type, mixin: type, base: type) -> None:
    """Raise TypeError if the methods of `base` take precedence over those of the mixin, which then have no effect."""
    order = cls.__mro__
    if base in order and order.index(base) < order.index(mixin):
        bases = [b.__name__ for b in cls.__bases__]
        reordered = sorted(cls.__bases__, key=lambda b: not issubclass(b, mixin))
        raise TypeError(
            f"{mixin.__name__} must come before {base.__name__} in the bases of a class; found "
            f"{cls.__name__}({', '.join(bases)}). Write class {cls.__name__}"
            f"({', '.join(b.__name__ for b in reordered)})."
        )


# --- norms for the log of a trainer -----------------------------------------------------------------------------------


ROUNDING = 1e-6  # a weight that was divided by the unit of an aggregate may be below 1 by a rounding error


class NormLog:
    """Norms of the samples since the last line of a log, kept on their device until it is written.

    samplewise/norm_median, norm_p95   of the norms of the samples' gradients before transforms
    samplewise/clipped                 share of the samples whose weight is below 1, if there are transforms
    samplewise/largest_id              id of the sample with the largest norm, if ids are known
    """

    def __init__(self) -> None:
        self._parts: dict[str, list[tuple[Tensor, Tensor | None, Any]]] = {}  # norms, which were clipped, ids

    def add(self, name: str, results: BackwardResult, ids: Any) -> None:
        coefficients = results.stats.coefficients
        if isinstance(coefficients, dict):  # by parameter
            coefficients = torch.stack(list(coefficients.values())).amin(0)
        clipped = None if coefficients is None else coefficients < 1 - ROUNDING
        self._parts.setdefault(name, []).append((results.norms, clipped, ids))

    def take(self) -> dict[str, Any]:
        """Values of all ranks by name, as numbers; an id may be a string. Values that are not known are left out."""
        parts = self._parts
        self._parts = {}
        ranks = collectives.all_gather_object({name: _summary(parts[name]) for name in parts})
        values: dict[str, Any] = {}
        for name in dict.fromkeys(name for summaries in ranks for name in summaries):
            summaries = [summaries[name] for summaries in ranks if name in summaries]
            norms = torch.cat([norms for norms, *_ in summaries]).sort().values
            if not len(norms):
                continue
            values[f"{name}/norm_median"] = _quantile(norms, 0.5)
            values[f"{name}/norm_p95"] = _quantile(norms, 0.95)
            clipped = [share for _, share, _ in summaries if share is not None]
            if clipped:
                values[f"{name}/clipped"] = torch.cat(clipped).double().mean().item()
            largest = max((top for *_, top in summaries if top is not None), default=None, key=lambda top: top[0])
            if largest is not None:
                values[f"{name}/largest_id"] = largest[1]
        return values


def _summary(parts: list[tuple[Tensor, Tensor | None, Any]]) -> tuple[Tensor, Tensor | None, tuple[float, Any] | None]:
    """Finite norms on the host, which of these samples were clipped, and the largest norm with the id of its sample."""
    norms = torch.cat([norms.double() for norms, *_ in parts]).cpu()
    finite = norms.isfinite()
    clipped = [share for _, share, _ in parts if share is not None]
    shares = torch.cat(clipped).cpu()[finite] if len(clipped) == len(parts) else None
    largest = None
    if finite.any() and all(ids is not None for *_, ids in parts):
        at = int(torch.where(finite, norms, -1).argmax())
        for values, _, ids in parts:
            if at < len(values):
                largest = (norms[finite].max().item(), ids[at].item() if isinstance(ids, Tensor) else ids[at])
                break
            at -= len(values)
    return norms[finite], shares, largest


def _quantile(values: Tensor, share: float) -> float:
    """Quantile of sorted values, interpolated as by torch.quantile, which refuses more than 16 million."""
    place = share * (len(values) - 1)
    below = int(place)
    above = min(below + 1, len(values) - 1)
    return torch.lerp(values[below], values[above], place - below).item()
