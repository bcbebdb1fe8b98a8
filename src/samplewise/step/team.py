"""This rank among those that train with it: whose share of a window is what, and what they agree on at its end.

What may fail stands between two meetings, so that a rank that fails finds the others at one, wherever it was. What is
not finite and may be skipped is told at a meeting, too: then all leave the update out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from samplewise import ranks
from samplewise.errors import DistributedError, NonFiniteGradientError, NonFiniteLossError
from samplewise.replay import random_state
from samplewise.step.parameters import Trained
from samplewise.step.parts import cat, total
from samplewise.step.problems import NO_DENOMINATOR, problem_of_counts, problem_of_losses
from samplewise.step.spread import Spread, Strategy, kind_of, spread
from samplewise.step.window import Agreement, Window
from samplewise.transforms.chain import Stage
from samplewise.transforms.numbers import Numbers, PerSample, as_table, from_table, rows_of
from samplewise.transforms.transform import SampleTransform, SumTransform

PLAIN = (int, float, str, tuple, Tensor)  # options of an optimizer that print as what they are
AFTER = 2**40  # any turn of what was carried over


def team_of(
    model: nn.Module,
    strategy: Strategy,
    modules: Sequence[nn.Module],
    settings: Mapping[str, Any],
    optimizer: Any = None,
) -> Team | None:
    """None where there is one process. What is said about a step must be said on every rank."""
    ranks.together()
    settings = {**settings, "strategy": kind_of(model, strategy)}
    if not ranks.same({name: repr(value) for name, value in settings.items()}):
        raise DistributedError(
            f"all ranks must make the same step; found settings that differ, here {settings}. Give Step(...) the same "
            "arguments on every rank."
        )
    spread_out = spread(model, strategy, modules, optimizer)
    return None if spread_out is None else Team(spread_out)


class Team:
    """`dealt`: how many samples of all ranks are in the windows since the loaders began; `carried`: how many are in one
    that was begun with the loaders before.
    """

    def __init__(self, spread: Spread) -> None:
        self.rank, self.size, self.spread = ranks.rank(), ranks.size(), spread
        self.dealt = self.carried = 0
        self._first = 0  # number of the first sample of the window that is being computed
        self._kept = self._kept_first = 0  # own samples in it that were carried over, and number of the first of all
        self.all_ended = False
        self._heard = False  # whether a meeting has told that this window is left out

    def check_alike(self, trained: Trained, optimizer: Any) -> None:
        """Gradients are summed in the order of the optimizer's parameters, and each rank's makes its own update."""
        kind, names = type(optimizer).__name__, list(trained.named)
        options = [{k: str(v) for k, v in group.items() if isinstance(v, PLAIN)} for group in optimizer.param_groups]
        ranks.together()
        if not ranks.same((kind, names, options)):
            raise DistributedError(
                "the optimizers of all ranks must do the same to the same parameters, in one order; found that they "
                f"differ, here {kind} of {', '.join(names)} with {options}. Make them alike on every rank."
            )

    # --- shares ----------------------------------------------------------------------------------------------------

    def share(self, window: Window, samples: int) -> int:
        """How many samples of a window this rank is to bring: number i of what is dealt out is at rank i mod N."""
        if window.share is None:
            window.share = self._held(self.dealt + samples) - self._held(self.dealt)
        return window.share

    def _held(self, samples: int) -> int:
        return max(0, (samples - self.rank + self.size - 1) // self.size)

    def deal_anew(self, window: Window, samples: int | None) -> None:
        """What comes next is the beginning of what the loaders deal out; some may have been carried over."""
        self._kept, self._kept_first = window.samples if self.carried else 0, self.dealt
        self.dealt = -self.carried
        window.share = None if samples is None else window.samples + self._held(samples - self.carried)

    def state(self, window: Window) -> dict[str, int | None]:
        """Whose turn it is, in the middle of a window."""
        known = {"rank": self.rank, "size": self.size, "kept": self._kept, "kept_first": self._kept_first}
        return {**known, "dealt": self.dealt, "carried": self.carried, "share": window.share}

    def check_own(self, state: dict[str, Any]) -> None:
        """That it is of this rank, among as many."""
        rank, size = state["rank"], state["size"]
        if (rank, size) != (self.rank, self.size):
            raise DistributedError(
                f"what a rank has of an open window must be loaded by the same rank among as many; found that of rank "
                f"{rank} of {size} on rank {self.rank} of {self.size}. Keep a file for each rank."
            )

    def load(self, state: dict[str, Any], window: Window) -> None:
        self.dealt, self.carried, window.share = state["dealt"], state["carried"], state["share"]
        self._kept, self._kept_first = state["kept"], state["kept_first"]

    def _more(self, missing: int, ended: bool) -> int:
        """A part of what a window still lacks, for ranks that can have more."""
        going = [rank for rank, has_ended in enumerate(ranks.everyone(ended)) if not has_ended]
        return 0 if ended else missing // len(going) + (going.index(self.rank) < missing % len(going))

    # --- meetings --------------------------------------------------------------------------------------------------

    def meet(self, window: Window, samples: int | None, tail: str, ended: bool = False) -> bool:
        """The one meeting of a window: whether the ranks together have its samples. If not, those that can will bring
        more of them, and meet again.
        """
        self.spread.open()
        agreed = self._agree(window, ended)
        self.all_ended = agreed.ended == self.size
        missing = 0 if samples is None else samples - agreed.samples
        complete = agreed.samples > 0 and (missing <= 0 or (self.all_ended and tail == "update"))
        if complete:
            self._kept = self._kept if self.carried else 0
            self._first, self.dealt, self.carried = self.dealt, self.dealt + agreed.samples, 0
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
        skips, everyones, enders, *rest = ranks.meet(window.failure is not None, window.samples, ended, *sums, odd)
        return Agreement(skips, int(everyones), int(enders), *rest)

    def agree_again(self, window: Window) -> None:
        """Where samples are computed once their window is complete, this is after that."""
        assert window.agreed is not None
        now = None if self._heard else self._agree(window)
        window.agreed = now if now is not None and not now.skips else replace(window.agreed, skips=1.0)
        self._heard = False

    def tell(self, error: Exception) -> None:
        """Raises it, when the others know of it."""
        if not ranks.is_told(error):
            self.spread.open()  # where they may be waiting
        ranks.together(error)

    def check(self) -> None:
        """Before numbers are exchanged: all ranks have theirs."""
        self.sums()

    def sums(self, *numbers: float | Tensor) -> list[float]:
        """Of numbers of all ranks, if all have theirs."""
        skips, *found = ranks.meet(0.0, *numbers)
        if skips:
            self._heard = True
            raise _elsewhere()
        return found

    def problem(self, window: Window, may_skip: bool) -> Exception | None:
        """What is not finite on any rank, the same everywhere: something to skip, or an error on all ranks."""
        assert window.agreed is not None
        if window.agreed.skips:
            return window.failure or _elsewhere()
        if isfinite(window.agreed.losses) and not window.agreed.odd:
            return None if window.agreed.denominators else NonFiniteLossError(NO_DENOMINATOR)
        mine = problem_of_losses(cat([part.losses for part in window.parts])) or problem_of_counts(window.parts)
        if not may_skip:
            ranks.together(mine)
        return mine or _elsewhere()

    def compare(self, fingerprint: list[float] | None) -> None:
        """Directions that samples are compared with are the same on all ranks, up to rounding."""
        told = [torch.tensor(other) for other in ranks.everyone(fingerprint) if other is not None]
        if any(not torch.allclose(other, told[0], rtol=1e-3, atol=1e-5 * float(told[0].norm())) for other in told):
            raise DistributedError(
                "the reference must be the same on all ranks; found that they have different ones. Make it from the "
                "same samples on every rank, or of all: sw.gradients(losses, model).mean(reduce=True)."
            )

    # --- numbers of all ranks --------------------------------------------------------------------------------------

    def places(self, samples: int) -> Tensor:
        """Where this rank's samples stand in the window of all."""
        told = ranks.gathered(torch.tensor([[self._kept, samples - self._kept]])).tolist()
        turns = [
            torch.cat([self._turns(kept, rank, self._kept_first), AFTER + self._turns(new, rank, max(0, self._first))])
            for rank, (kept, new) in enumerate(told)
        ]
        return torch.searchsorted(torch.cat(turns).sort().values, turns[self.rank])

    def _turns(self, samples: int, rank: int, first: int) -> Tensor:
        """When a rank's samples are dealt out, one to each rank in turn, if number `first` comes first."""
        return torch.arange(samples) * self.size + (rank - first) % self.size

    def weigh(self, stage: Stage, parts: Sequence[Numbers], owned: Tensor | None = None) -> list[Numbers]:
        """The parts of this rank with their coefficients. Where a transform must see the whole window, it is asked with
        the numbers of all ranks; `owned` are those that this rank tells the others.
        """
        if parts:
            return stage.weigh(parts, lambda t, numbers: self._ask(t, numbers, owned))
        for _ in [t for t in stage.transforms if t.window]:
            self.check()
            ranks.by_rank(torch.zeros(0, dtype=torch.float64))
        return []

    def _ask(self, t: SampleTransform, numbers: Numbers, owned: Tensor | None) -> PerSample:
        self.check()
        numbers = t.needed(numbers)
        assert numbers.places is not None
        mine = torch.cat([numbers.places.to(numbers.losses.device)[:, None], as_table(numbers)], 1)
        told = ranks.by_rank((mine if owned is None else mine[owned]).flatten())
        table = torch.cat(told).view(-1, mine.shape[1])
        table = table[table[:, 0].argsort()]
        places = table[:, 0].contiguous()
        answer = t(from_table(table[:, 1:], places.long(), numbers))
        return rows_of(answer, torch.searchsorted(places, mine[:, 0].contiguous()))

    # --- random numbers of all ranks -------------------------------------------------------------------------------

    def act(self, transform: SumTransform, trained: Trained) -> None:
        """On sums that all ranks have, with the random numbers of rank 0: they go on as one would."""
        restore, generators = random_state(), _generators(transform, trained.gradients())
        states = ranks.told([generator.get_state() for generator in generators])
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        self.spread.act(transform, trained)
        if self.rank:
            restore()


def _generators(transform: SumTransform, gradients: Sequence[Tensor]) -> list[torch.Generator]:
    """Where it may draw from."""
    if transform.generator is not None:
        return [transform.generator]
    devices = sorted({g.device.index or 0 for g in gradients if g.device.type == "cuda"})
    return [torch.default_generator, *(torch.cuda.default_generators[k] for k in devices)]


def _elsewhere() -> NonFiniteGradientError:
    return NonFiniteGradientError(
        "losses and gradients must be finite on every rank; found that they are not on another one. Nothing was "
        "updated."
    )
