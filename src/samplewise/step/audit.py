"""A sample computed alone must have the loss and the gradient that it has among others.

At the first update a few samples are compared, for a word in time; with `Step(audit=1000)` one sample of every
thousandth update is, and a difference is an error. Both look in eval mode, where nothing is random, and leave no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from samplewise.batches import cut, length
from samplewise.engine.graph import Graph
from samplewise.engine.reference import jacobian_rows
from samplewise.errors import LossesError, SamplesInteractError
from samplewise.memory import is_out_of_memory
from samplewise.replay import modes, snapshot
from samplewise.step.evaluation import Evaluation
from samplewise.step.mistakes import look_at_strangers, warn

FEW = 8  # samples are enough to see whether they interact


class Audit:
    """`every`: updates between two looks; None: the first update alone; False: never."""

    def __init__(self, evaluation: Evaluation, every: int | bool | None, own_gradients: bool):
        if not (every is None or every is False or (type(every) is int and every > 0)):
            raise ValueError(f"audit must be a positive number of updates, None or False; found {every!r}.")
        self.evaluation, self.every, self.own_gradients = evaluation, every, own_gradients
        self._excused = False

    def due(self, update: int) -> bool:
        return type(self.every) is int and update % self.every == 0

    def look(self, piece: Any, first: bool, update: int) -> None:
        """Called with the first piece of every window."""
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
                f"samples must not depend on each other where each has its own gradient; found that {difference}. "
                "Look for statistics over the batch, or for losses made of several samples."
            )
        warn(
            f"samples depend on each other: {difference}. An update then depends on how its window is cut into batches "
            "and microbatches; if this is not meant, look for statistics over the batch."
        )

    def _compare(self, few: Any, piece: Any, first: bool, update: int) -> str | None:
        """The difference between a sample alone and the same among others, in words. `few`: the samples of `piece` that
        are compared.
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
        look_at_strangers(self.evaluation.trained.strangers(), reached)
        if problem is not None and self.every and not self._excused:
            self._excused = True
            warn(f"the audit could not compute a sample alone in eval mode: {problem}")
        return difference

    def _raise_unless_caused_here(self, error: Exception, piece: Any, examine: Callable[[], object]) -> None:
        """Return if the comparison itself causes the error, by eval mode or by computing one sample: it then comes
        again every time, and training may go well. Raise it if training fails too, or if it does not come again.
        """
        if is_out_of_memory(error):  # training has smaller pieces to try, or fails by itself
            return
        restore = snapshot(*self.evaluation.modules)
        try:
            self.evaluation.losses(piece)  # as in training
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
        again, total = self.evaluation.losses(piece)[0].detach(), length(piece)
        if total is None or total < 2 or len(losses) != total or not torch.equal(losses, again):
            return None  # cannot be cut, has several samples in a row, or is random even in eval mode
        place = int(torch.randint(total, (), generator=torch.Generator().manual_seed(update)))
        alone, _ = self.evaluation.losses(cut(piece, place, place + 1))
        return self._difference(piece, losses, alone, place)

    def _difference(self, piece: Any, losses: Tensor, alone: Tensor, place: int) -> str | None:
        name, tolerance = f"sample {place} of {len(losses)}", self._tolerance(losses)
        if len(alone) != 1:
            return f"{name} alone has {len(alone)} losses"
        here, there = losses[place].detach(), alone[0].detach()
        if not (here - there).abs() <= tolerance * (losses.detach().abs().max() + 1):
            return f"{name} has loss {here.item():.6g} among the others and {there.item():.6g} alone"
        wanted, scale = self.evaluation.trained.wanted(), self.evaluation.precision.scale
        if self.own_gradients:
            among = {
                name: row / scale for name, row in self.evaluation.gradients(losses, piece)[place : place + 1].items()
            }
        else:
            among = jacobian_rows(losses[place : place + 1], wanted)
        off, size = _distance(among, jacobian_rows(alone, wanted))
        if not isfinite(off):
            return None  # an overflow, which is looked for elsewhere
        if not off <= tolerance * (size + 1e-6):
            return f"the gradient of {name} is off by {off:.3g} from that of the sample alone, of norm {size:.3g}"
        return None

    def _tolerance(self, losses: Tensor) -> float:
        """Half of the digits."""
        cast = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(self.evaluation.precision.name or "")
        return 3 * torch.finfo(cast or losses.dtype).eps ** 0.5

    def _broadcast(self, piece: Any) -> str | None:
        """Whether a prediction (B, 1) meets a target (B,)."""
        total = length(piece)
        with undisturbed(self.evaluation.modules), Broadcasts(total or 0) as seen:
            self.evaluation.losses(piece)
        if seen.found is None:
            return None
        return (
            f"In {seen.found} a tensor of shape ({total}, 1) meets one of shape ({total},), which makes "
            f"({total}, {total}): every prediction against every target. Use squeeze(1) or unsqueeze(1)."
        )


class Broadcasts(TorchFunctionMode):
    """Notes where (B, 1) meets (B,)."""

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
    """Eval mode, and afterwards modes, buffers and random state as they were."""
    restore, restore_modes = snapshot(*modules), modes(*modules)
    for module in (m for root in modules for m in root.modules()):
        module.training = False
    try:
        yield
    finally:
        restore_modes()
        restore()


def _leaves(losses: Tensor) -> set[int]:
    nodes = Graph(losses, {}).nodes
    return {id(v) for node in nodes if (v := getattr(node, "variable", None)) is not None}


def _distance(here: dict[str, Tensor], there: dict[str, Tensor]) -> tuple[float, float]:
    """The norm of the difference, and that of the second."""
    off = sum((here[name] - row).abs().square().sum().item() for name, row in there.items())
    return off**0.5, sum(row.abs().square().sum().item() for row in there.values()) ** 0.5
