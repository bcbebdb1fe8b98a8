"""Windows over several ranks: each rank's share of a window, and the collectives at the end of a window.

Code that may fail runs between two synchronizing collectives, so that an error on one rank reaches the others at the
next one. A non-finite value that may be skipped is also reported there: then all ranks skip the update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.core.snapshot import random_state
from samplewise.distributed import collectives
from samplewise.distributed.group import current_group
from samplewise.errors import DistributedError, NonFiniteGradientError, NonFiniteLossError
from samplewise.step.microbatch_stats import cat, total
from samplewise.step.nonfinite import NO_DENOMINATOR, problem_of_counts, problem_of_losses
from samplewise.step.parameters import TrainedParameters
from samplewise.step.strategy import Spread, Strategy, kind_of, spread
from samplewise.step.window import Agreement, Window
from samplewise.transforms.chain import Stage
from samplewise.transforms.stats import Numbers, PerSample, as_table, from_table, rows_of
from samplewise.transforms.transform import SampleTransform, SumTransform

PLAIN = (int, float, str, tuple, Tensor)  # types of optimizer options whose str() shows their value
AFTER = 2**40  # offset that sorts new samples after those carried over from the previous pass


def team_of(
    model: nn.Module,
    strategy: Strategy,
    modules: Sequence[nn.Module],
    settings: Mapping[str, Any],
    optimizer: Any = None,
) -> DistributedWindow | None:
    """Distributed window of a step; None for one process. Raises if the ranks have different settings."""
    current_group().barrier()
    settings = {**settings, "strategy": kind_of(model, strategy)}
    if not current_group().all_equal({name: repr(value) for name, value in settings.items()}):
        raise DistributedError(
            f"all ranks must create the same step; found settings that differ; on this rank: {settings}. Pass the same "
            "arguments to Step(...) on every rank."
        )
    spread_out = spread(model, strategy, modules, optimizer)
    return None if spread_out is None else DistributedWindow(spread_out)


class DistributedWindow:
    """This rank's view of a window over several ranks. `dealt`: number of samples of all ranks in windows since the
    loaders started; `carried`: number of samples of all ranks in a window carried over from the previous loaders.
    """

    def __init__(self, spread: Spread) -> None:
        self.rank = current_group().rank
        self.size = current_group().size
        self.spread = spread
        self.dealt = 0
        self.carried = 0
        self._first = 0  # number of the first sample of the window that is being computed
        self._kept = 0  # number of this rank's samples in it that were carried over
        self._kept_first = 0  # number of the first carried sample of all ranks
        self.all_ended = False
        self._heard = False  # whether a collective has reported that this window is skipped

    def check_alike(self, trained: TrainedParameters, optimizer: Any) -> None:
        """Raise if the optimizers of the ranks differ: gradients are summed in the order of the optimizer's parameters,
        and each rank runs its own optimizer.
        """
        kind = type(optimizer).__name__
        names = list(trained.named)
        options = [{k: str(v) for k, v in group.items() if isinstance(v, PLAIN)} for group in optimizer.param_groups]
        current_group().barrier()
        if not current_group().all_equal((kind, names, options)):
            raise DistributedError(
                "all ranks must have the same optimizer, with the same parameters in the same order; found that they "
                f"differ; on this rank: {kind} of {', '.join(names)} with {options}. Create the same optimizer on "
                "every rank."
            )

    # --- shares ----------------------------------------------------------------------------------------------------

    def share(self, window: Window, samples: int) -> int:
        """Number of samples of a window that this rank must add. Sample i of the loaders is on rank i mod N."""
        if window.share is None:
            window.share = self._held(self.dealt + samples) - self._held(self.dealt)
        return window.share

    def _held(self, samples: int) -> int:
        return max(0, (samples - self.rank + self.size - 1) // self.size)

    def deal_anew(self, window: Window, samples: int | None) -> None:
        """Restart the numbering of samples for the next loaders; the open window may hold carried samples."""
        self._kept = window.samples if self.carried else 0
        self._kept_first = self.dealt
        self.dealt = -self.carried
        window.share = None if samples is None else window.samples + self._held(samples - self.carried)

    def state(self, window: Window) -> dict[str, int | None]:
        """State of the numbering and of this rank's share, inside a window."""
        known = {"rank": self.rank, "size": self.size, "kept": self._kept, "kept_first": self._kept_first}
        return {**known, "dealt": self.dealt, "carried": self.carried, "share": window.share}

    def check_own(self, state: dict[str, Any]) -> None:
        """Raise unless the state was saved by the same rank of as many ranks."""
        rank = state["rank"]
        size = state["size"]
        if (rank, size) != (self.rank, self.size):
            raise DistributedError(
                "the state of an open window must be loaded by the same rank of as many ranks; found the state of rank "
                f"{rank} of {size} on rank {self.rank} of {self.size}. Save one file per rank."
            )

    def load(self, state: dict[str, Any], window: Window) -> None:
        self.dealt = state["dealt"]
        self.carried = state["carried"]
        window.share = state["share"]
        self._kept = state["kept"]
        self._kept_first = state["kept_first"]

    def _more(self, missing: int, ended: bool) -> int:
        """Number of samples that this rank must add of the `missing` ones; 0 if its loader has ended."""
        going = [rank for rank, has_ended in enumerate(current_group().all_gather_object(ended)) if not has_ended]
        return 0 if ended else missing // len(going) + (going.index(self.rank) < missing % len(going))

    # --- collectives -----------------------------------------------------------------------------------------------

    def meet(self, window: Window, samples: int | None, tail: str, ended: bool = False) -> bool:
        """Sum the window over ranks in one all-reduce; True if the ranks together have its samples. If not, ranks whose
        loader has not ended get a larger share, and all ranks call this again.
        """
        self.spread.open()
        agreed = self._agree(window, ended)
        self.all_ended = agreed.ended == self.size
        missing = 0 if samples is None else samples - agreed.samples
        complete = agreed.samples > 0 and (missing <= 0 or (self.all_ended and tail == "update"))
        if complete:
            self._kept = self._kept if self.carried else 0
            self._first = self.dealt
            self.dealt += agreed.samples
            self.carried = 0
        elif self.all_ended:
            self.carried = agreed.samples if tail == "carry" else 0
        else:
            window.share = self.share(window, samples or 0) + self._more(missing, ended)
        window.agreed = agreed if complete or tail == "drop" else None
        return complete

    def _agree(self, window: Window, ended: bool = False) -> Agreement:
        known = [] if window.failure is not None else window.parts
        losses = cat([part.losses for part in known]).double().sum() if known else 0.0
        odd = any(bool(part.counts.min() < 0) for part in known if part.counts is not None)
        sums = losses, total(known, shares=False), total(known)
        skips, everyones, enders, *rest = current_group().all_reduce_scalars(
            window.failure is not None, window.samples, ended, *sums, odd
        )
        return Agreement(skips, int(everyones), int(enders), *rest)

    def agree_again(self, window: Window) -> None:
        """Sum the window over ranks again, after deferred microbatches were computed."""
        assert window.agreed is not None
        now = None if self._heard else self._agree(window)
        window.agreed = now if now is not None and not now.skips else replace(window.agreed, skips=1.0)
        self._heard = False

    def tell(self, error: Exception) -> None:
        """Send the error to the other ranks, then raise it."""
        if not collectives.is_from_another_rank(error):
            self.spread.open()  # a collective in which the other ranks may be waiting
        current_group().barrier(error)

    def check(self) -> None:
        """Check that no rank has failed or skips the window, before per-sample results are exchanged."""
        self.sums()

    def sums(self, *numbers: float | Tensor) -> list[float]:
        """Sum of each number over ranks. Raises if a rank skips the window."""
        skips, *found = current_group().all_reduce_scalars(0.0, *numbers)
        if skips:
            self._heard = True
            raise _elsewhere()
        return found

    def problem(self, window: Window, may_skip: bool) -> Exception | None:
        """Error for a non-finite value on any rank, None if all are finite. With `may_skip`, all ranks get an error to
        skip the update; otherwise it is raised on all ranks.
        """
        assert window.agreed is not None
        if window.agreed.skips:
            return window.failure or _elsewhere()
        if isfinite(window.agreed.losses) and not window.agreed.odd:
            return None if window.agreed.denominators else NonFiniteLossError(NO_DENOMINATOR)
        mine = problem_of_losses(cat([part.losses for part in window.parts])) or problem_of_counts(window.parts)
        if not may_skip:
            current_group().barrier(mine)
        return mine or _elsewhere()

    def compare(self, fingerprint: list[float] | None) -> None:
        """Raise unless the reference directions are equal on all ranks, up to rounding."""
        told = [torch.tensor(other) for other in current_group().all_gather_object(fingerprint) if other is not None]
        if any(not torch.allclose(other, told[0], rtol=1e-3, atol=1e-5 * float(told[0].norm())) for other in told):
            raise DistributedError(
                "the reference must be equal on all ranks; found different ones. Compute it from the same samples on "
                "every rank, or average it over ranks: sw.gradients(losses, model).mean(reduce=True)."
            )

    # --- per-sample results of all ranks ---------------------------------------------------------------------------

    def places(self, samples: int) -> Tensor:
        """Positions of this rank's samples in the window of all ranks."""
        told = current_group().all_gather_rows(torch.tensor([[self._kept, samples - self._kept]])).tolist()
        turns: list[Tensor] = []
        for rank, (kept, new) in enumerate(told):
            carried = self._turns(kept, rank, self._kept_first)
            turns.append(torch.cat([carried, AFTER + self._turns(new, rank, max(0, self._first))]))
        return torch.searchsorted(torch.cat(turns).sort().values, turns[self.rank])

    def _turns(self, samples: int, rank: int, first: int) -> Tensor:
        """Order of a rank's samples when samples are assigned to ranks in turn, starting with sample `first`."""
        return torch.arange(samples) * self.size + (rank - first) % self.size

    def weigh(self, stage: Stage, parts: Sequence[Numbers], owned: Tensor | None = None) -> list[Numbers]:
        """Per-sample results of this rank with their coefficients. A transform that needs the whole window gets the
        results of all ranks. `owned`: mask of the rows that this rank sends.
        """
        if parts:
            return stage.weigh(parts, lambda t, numbers: self._ask(t, numbers, owned))
        for _ in [t for t in stage.transforms if t.window]:
            self.check()
            current_group().all_gather_tensors(torch.zeros(0, dtype=torch.float64))
        return []

    def _ask(self, t: SampleTransform, numbers: Numbers, owned: Tensor | None) -> PerSample:
        self.check()
        numbers = t.needed(numbers)
        assert numbers.places is not None
        mine = torch.cat([numbers.places.to(numbers.losses.device)[:, None], as_table(numbers)], 1)
        told = current_group().all_gather_tensors((mine if owned is None else mine[owned]).flatten())
        table = torch.cat(told).view(-1, mine.shape[1])
        table = table[table[:, 0].argsort()]
        places = table[:, 0].contiguous()
        answer = t(from_table(table[:, 1:], places.long(), numbers))
        return rows_of(answer, torch.searchsorted(places, mine[:, 0].contiguous()))

    # --- random numbers of all ranks -------------------------------------------------------------------------------

    def act(self, transform: SumTransform, trained: TrainedParameters) -> None:
        """Apply a transform of the sum on every rank with the random state of rank 0, so that all ranks draw the same
        numbers. Other ranks then restore their own random state.
        """
        restore = random_state()
        generators = _generators(transform, trained.gradients())
        states = current_group().broadcast_object([generator.get_state() for generator in generators])
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        self.spread.act(transform, trained)
        if self.rank:
            restore()


def _generators(transform: SumTransform, gradients: Sequence[Tensor]) -> list[torch.Generator]:
    """Random generators that the transform may draw from."""
    if transform.generator is not None:
        return [transform.generator]
    devices = sorted({g.device.index or 0 for g in gradients if g.device.type == "cuda"})
    return [torch.default_generator, *(torch.cuda.default_generators[k] for k in devices)]


def _elsewhere() -> NonFiniteGradientError:
    return NonFiniteGradientError(
        "losses and gradients must be finite on every rank; found a non-finite value on another rank. Nothing was "
        "updated."
    )
