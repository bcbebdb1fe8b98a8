"""Audit: compare loss and gradient of a sample computed alone with those of the same sample in its batch.

One of the first 8 samples is compared at the first update. With `Step(audit=1000)`, one sample is also compared every
1,000 updates, and any difference is an error. Both run in eval mode, without randomness, and restore modes, buffers and
random state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from samplewise.core.batches import cut, length
from samplewise.core.memory import is_out_of_memory
from samplewise.core.snapshot import modes, snapshot
from samplewise.engine.graph import Graph
from samplewise.engine.reference import jacobian_rows
from samplewise.errors import LossesError, SamplesInteractError
from samplewise.step.checks import check_untracked, warn
from samplewise.step.forward import LossEvaluator

FEW = 8  # number of samples in the first comparison: enough to detect interaction


class Audit:
    """Audits of a step. `every`: number of updates between two audits; None: only the first update; False: never.
    `own_gradients`: transforms use per-sample gradients, so that interacting samples are an error.
    """

    def __init__(self, evaluation: LossEvaluator, every: int | bool | None, own_gradients: bool):
        if not (every is None or every is False or (type(every) is int and every > 0)):
            raise ValueError(f"audit must be a positive number of updates, None or False; found {every!r}.")
        self.evaluation = evaluation
        self.every = every
        self.own_gradients = own_gradients
        self._excused = False  # whether the warning about a failed audit was given

    def due(self, update: int) -> bool:
        """True if the update with this index is audited."""
        return type(self.every) is int and update % self.every == 0

    def look(self, piece: Any, first: bool, update: int) -> None:
        """Audit the first microbatch of a window, if due. Called for every window."""
        if first and self.every is not False:
            total = length(piece)
            few = cut(piece, 0, FEW) if total is not None and total > FEW else piece
            self._settle(self._compare(few, piece, first, update), few)
        elif self.due(update):
            self._settle(self._compare(piece, piece, first, update), piece)

    def _settle(self, difference: str | None, piece: Any) -> None:
        if difference is None:
            return
        culprit = self._broadcast(piece)
        if culprit is not None:
            raise LossesError(f"{difference}. {culprit}")
        if self.own_gradients or self.every:
            raise SamplesInteractError(
                f"samples must not depend on each other if per-sample gradients are used; found that {difference}. "
                "Look for batch statistics, or for losses computed from several samples."
            )
        warn(
            f"samples depend on each other: {difference}. An update then depends on how its window is cut into batches "
            "and microbatches; if this is not intended, look for batch statistics."
        )

    def _compare(self, few: Any, piece: Any, first: bool, update: int) -> str | None:
        """Description of the difference between a sample computed alone and in the batch; None if there is none. `few`:
        the samples of `piece` that are used.
        """
        reached: set[int] = set()
        difference = problem = None

        def examine() -> str | None:
            with undisturbed(self.evaluation.modules):
                losses, _ = self.evaluation.losses(few)
                reached.update(_leaves(losses) if first else ())
                return self._alone(few, losses, update)

        try:
            difference = examine()
        except Exception as error:
            self._raise_unless_caused_here(error, piece, examine)
            problem = str(error).partition("\n")[0]
        check_untracked(self.evaluation.trained.untracked_parameters(), reached)
        if problem is not None and self.every and not self._excused:
            self._excused = True
            warn(f"the audit could not compute a sample alone in eval mode: {problem}")
        return difference

    def _raise_unless_caused_here(self, error: Exception, piece: Any, examine: Callable[[], object]) -> None:
        """Return if the comparison itself causes the error, through eval mode or through a batch of one sample: it then
        occurs every time, and training may succeed. Raise it if training fails too, or if it does not occur again.
        """
        if is_out_of_memory(error):  # training may use smaller microbatches, or raises the same error
            return
        restore = snapshot(*self.evaluation.modules)
        try:
            self.evaluation.losses(piece)  # in training mode, with the whole microbatch
        except Exception as of_training:
            if is_out_of_memory(of_training):
                return
            raise
        finally:
            restore()
        try:
            examine()
        except Exception:
            return
        raise error

    def _alone(self, piece: Any, losses: Tensor, update: int) -> str | None:
        again = self.evaluation.losses(piece)[0].detach()
        total = length(piece)
        if total is None or total < 2 or len(losses) != total or not torch.equal(losses, again):
            return None  # cannot be cut, has several samples per row, or is random even in eval mode
        place = int(torch.randint(total, (), generator=torch.Generator().manual_seed(update)))
        alone, _ = self.evaluation.losses(cut(piece, place, place + 1))
        return self._difference(piece, losses, alone, place)

    def _difference(self, piece: Any, losses: Tensor, alone: Tensor, place: int) -> str | None:
        name = f"sample {place} of {len(losses)}"
        tolerance = self._tolerance(losses)
        if len(alone) != 1:
            return f"{name} has {len(alone)} losses instead of 1 when it is computed alone"
        here = losses[place].detach()
        there = alone[0].detach()
        if not (here - there).abs() <= tolerance * (losses.detach().abs().max() + 1):
            return f"{name} has loss {here.item():.6g} in the batch and {there.item():.6g} alone"
        wanted = self.evaluation.trained.wanted()
        scale = self.evaluation.precision.scale
        if self.own_gradients:
            row_of_each = self.evaluation.gradients(losses, piece)[place : place + 1]
            among = {parameter: row / scale for parameter, row in row_of_each.items()}
        else:
            among = jacobian_rows(losses[place : place + 1], wanted)
        off, size = _distance(among, jacobian_rows(alone, wanted))
        if not isfinite(off):
            return None  # an overflow, which the finite check of the update handles
        if not off <= tolerance * (size + 1e-6):
            return f"the gradient of {name} differs by {off:.3g} from that of the sample alone, of norm {size:.3g}"
        return None

    def _tolerance(self, losses: Tensor) -> float:
        """Relative tolerance: three times the square root of the machine epsilon, about half of the digits."""
        cast = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(self.evaluation.precision.name or "")
        return 3 * torch.finfo(cast or losses.dtype).eps ** 0.5

    def _broadcast(self, piece: Any) -> str | None:
        """Description of an operation that combines shapes (B, 1) and (B,), as of prediction and target; None if there
        is none.
        """
        total = length(piece)
        with undisturbed(self.evaluation.modules), Broadcasts(total or 0) as seen:
            self.evaluation.losses(piece)
        if seen.found is None:
            return None
        return (
            f"In {seen.found}, tensors of shapes ({total}, 1) and ({total},) broadcast to ({total}, {total}), which "
            "compares every prediction with every target. Use squeeze(1) or unsqueeze(1)."
        )


class Broadcasts(TorchFunctionMode):
    """Records the first torch function that gets tensors of shapes (B, 1) and (B,)."""

    def __init__(self, samples: int):
        super().__init__()
        self.samples = samples
        self.found: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = {tuple(x.shape) for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor)}
        if {(self.samples, 1), (self.samples,)} <= shapes and self.found is None:
            self.found = getattr(func, "__name__", str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def undisturbed(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Context manager: eval mode inside; restores modes, buffers and random state on exit."""
    restore = snapshot(*modules)
    restore_modes = modes(*modules)
    for module in (m for root in modules for m in root.modules()):
        module.training = False
    try:
        yield
    finally:
        restore_modes()
        restore()


def _leaves(losses: Tensor) -> set[int]:
    """Ids of the leaf tensors in the graph of the losses."""
    nodes = Graph(losses, {}).nodes
    return {id(v) for node in nodes if (v := getattr(node, "variable", None)) is not None}


def _distance(here: dict[str, Tensor], there: dict[str, Tensor]) -> tuple[float, float]:
    """Norm of the difference, and norm of `there`."""
    off = sum((here[name] - row).abs().square().sum().item() for name, row in there.items())
    return off**0.5, sum(row.abs().square().sum().item() for row in there.values()) ** 0.5
