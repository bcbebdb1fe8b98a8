"""What the ranks of a step exchange beyond numbers: settings, per-sample results, and the gradients of a window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.core.microbatch import Auto
from samplewise.core.state import Buffers
from samplewise.errors import DistributedError, NonFiniteLossError
from samplewise.parallel import collectives
from samplewise.parallel.launch import select_mode
from samplewise.parallel.mode import Parallel
from samplewise.parallel.ranks import nonfinite_elsewhere
from samplewise.step.config import StepConfig
from samplewise.step.nonfinite import NO_DENOMINATOR, problem_of_counts, problem_of_losses
from samplewise.step.parameters import TrainedParameters
from samplewise.step.window import Window, empty_stats
from samplewise.transforms.chain import Stage
from samplewise.transforms.stats import PerSample, SampleStats, as_table, cat, from_table, rows_of
from samplewise.transforms.transform import SampleTransform


def make_ranks(
    model: nn.Module,
    config: StepConfig,
    modules: Sequence[nn.Module],
    optimizer: Any,
    before_sums: Callable[[], None],
) -> Parallel:
    """Mode of a step: one process, or the ranks of its process group. Raises if the ranks have different settings.
    `before_sums`: called before gradients of other ranks are added to `.grad`.
    """
    ranks = select_mode(
        model, config.parallel, modules, optimizer, config.settings(), before_sums, config.policy.empty_updates
    )
    if isinstance(config.microbatch, Auto) and not ranks.passes_alone:
        raise DistributedError(
            "microbatch must be a number or None for a sharded model, because its passes are collectives, which a rank "
            f"cannot repeat alone; found {config.microbatch!r}. Pass a number."
        )
    return ranks


# --- per-sample results of all ranks -----------------------------------------------------------------------------


def weigh(
    ranks: Parallel, stage: Stage, parts: Sequence[SampleStats], owned: Tensor | None = None
) -> list[SampleStats]:
    """Per-sample results of this rank with their coefficients. A transform that needs the whole window gets the results
    of all ranks. `owned`: mask of the rows that this rank sends. Collective.
    """
    if not ranks.exchanges:
        return stage.weigh(parts)
    if parts:
        return stage.weigh(parts, lambda transform, stats: _call(ranks, transform, stats, owned))
    for _ in [t for t in stage.transforms if t.window]:
        ranks.sums()
        collectives.all_gather_tensors(torch.zeros(0, dtype=torch.float64))
    return []


def _call(ranks: Parallel, transform: SampleTransform, stats: SampleStats, owned: Tensor | None) -> PerSample:
    """Call a transform with the results of all ranks; return the coefficients of this rank."""
    ranks.sums()
    stats = transform.needed(stats)
    assert stats.positions is not None
    table_here = torch.cat([stats.positions.to(stats.losses.device)[:, None], as_table(stats)], 1)
    rows = table_here if owned is None else table_here[owned]
    table = torch.cat(collectives.all_gather_tensors(rows.flatten())).view(-1, table_here.shape[1])
    table = table[table[:, 0].argsort()]
    positions = table[:, 0].contiguous()
    coefficients = transform(from_table(table[:, 1:], positions.long(), stats))
    return rows_of(coefficients, torch.searchsorted(positions, table_here[:, 0].contiguous()))


# --- gradients of a window ---------------------------------------------------------------------------------------


def reduce_window(
    ranks: Parallel,
    window: Window,
    trained: TrainedParameters,
    buffers: Buffers,
    fingerprint: Callable[[], list[float] | None],
) -> None:
    """Sum the gradients of a window over ranks, into `.grad`; a non-finite value on any rank is raised, or becomes
    `window.failure`. Collective. `fingerprint`: numbers that identify the reference directions of the window.
    """
    config = window.config
    window.parts = window.parts or [empty_stats(next(iter(trained.named.values())))]
    if config.checks_finite or window.failure is not None:
        window.failure = _problem(window)
    if window.failure is not None:
        ranks.discard_sums()
        return
    if config.transforms.references:
        # Raise unless the reference directions are equal on all ranks, up to rounding.
        gathered = collectives.all_gather_object(fingerprint())
        fingerprints = [torch.tensor(other) for other in gathered if other is not None]
        if any(
            not torch.allclose(other, fingerprints[0], rtol=1e-3, atol=1e-5 * float(fingerprints[0].norm()))
            for other in fingerprints
        ):
            raise DistributedError(
                "the reference must be equal on all ranks; found different ones. Compute it from the same samples on "
                "every rank, or average it over ranks: sw.gradients(losses, model).mean(all_reduce=True)."
            )
    ranks.reduce_gradients(trained.named, trained.owned, buffers)


def _problem(window: Window) -> Exception | None:
    """Error for a non-finite value on any rank, None if all are finite. If such updates are skipped, all ranks get an
    error; otherwise it is raised on all ranks.
    """
    config = window.config
    totals = window.totals
    assert totals is not None
    if totals.skips:
        return window.failure or nonfinite_elsewhere()
    if isfinite(totals.losses) and not totals.invalid:
        dropped = config.transforms.drops and totals.denominators == 0  # of all samples: the update is skipped
        if config.policy.empty_updates or dropped or 0 < totals.denominators < inf:
            return None
        return NonFiniteLossError(NO_DENOMINATOR.format(total=totals.denominators))
    problem = problem_of_losses(cat([part.kept_losses for part in window.parts])) or problem_of_counts(window.parts)
    if config.on_nonfinite != "skip":
        collectives.barrier(problem)
    return problem or nonfinite_elsewhere()
