"""Audit: compare loss and gradient of a sample computed alone with those of the same sample in its batch.

One of the first 8 samples is compared at the first update. With `Step(audit=1000)`, one sample is also compared every
1,000 updates, and any difference is an error. Both run in eval mode, without randomness, and restore modes, buffers and
random state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from samplewise.core.batches import cut, length
from samplewise.core.losses import RANDOM, changed_by_exchange, loss_alone, why_not_alone
from samplewise.core.memory import is_out_of_memory
from samplewise.core.snapshot import eval_mode, snapshot
from samplewise.engine.graph import Graph
from samplewise.engine.reference import jacobian_rows
from samplewise.errors import LossesError, SamplesInteractError
from samplewise.step.amp import AUTOCAST_DTYPES
from samplewise.step.checks import check_untracked, warn
from samplewise.step.forward import LossEvaluator

FEW = 8  # number of samples in the first comparison: enough to detect interaction
PROJECTED = 32  # dimensions of projected gradients, which are compared for sharded models to save memory


class Audit:
    """Audits of a step. `every`: number of updates between two audits; None: only the first update; False: never.
    `own_gradients`: transforms use per-sample gradients, so that interacting samples are an error.
    """

    def __init__(self, evaluator: LossEvaluator, every: int | bool | None, own_gradients: bool):
        self.evaluator = evaluator
        self.every = every
        self.own_gradients = own_gradients
        self._warned = False  # whether the warning about a failed audit was given

    def due(self, update: int) -> bool:
        """True if the update with this index is audited."""
        return type(self.every) is int and update % self.every == 0

    def run(self, microbatch: Any, first: bool, update: int) -> None:
        """Audit the first microbatch of a window, if due. Called for every window."""
        if first and self.every is not False:
            total = length(microbatch)
            few = cut(microbatch, 0, FEW) if total is not None and total > FEW else microbatch
            self._report(self._compare(few, microbatch, first, update), few)
        elif self.due(update):
            self._report(self._compare(microbatch, microbatch, first, update), microbatch)

    def _report(self, difference: str | None, microbatch: Any) -> None:
        if difference is None:
            return
        cause = self._broadcast(microbatch)
        if cause is not None:
            raise LossesError(f"{difference}. {cause}")
        if self.evaluator.interacting == "allow":
            return
        if self.own_gradients or self.every:
            raise SamplesInteractError(
                f"samples must not depend on each other if per-sample gradients are used; found that {difference}. "
                "Look for batch statistics, and for losses computed from several samples. Mix samples (mixup) in "
                "collate_fn, so that each loss depends on one row of the batch; or pass interacting='allow'."
            )
        warn(
            f"samples depend on each other: {difference}. An update then depends on how its window is cut into batches "
            "and microbatches. If this is intended, pass interacting='allow'; if not, look for batch statistics."
        )

    def _compare(self, few: Any, microbatch: Any, first: bool, update: int) -> str | None:
        """Description of the difference between a sample computed alone and in the batch; None if there is none. `few`:
        the samples of `microbatch` that are used.
        """
        reached: set[int] = set()
        difference = problem = None

        def examine() -> str | None:
            with _temporary_eval_mode(self.evaluator.modules):
                losses, _ = self.evaluator.losses(few)
                reached.update(_leaves(losses) if first else ())
                return self._compare_alone(few, losses, update)

        try:
            difference = examine()
        except Exception as error:
            self._raise_unless_caused_here(error, microbatch, examine)
            problem = str(error).partition("\n")[0]
        check_untracked(self.evaluator.trained.untracked_parameters(), reached)
        if problem is not None and self.every and not self._warned:
            self._warned = True
            warn(f"the audit could not compute a sample alone in eval mode: {problem}")
        return difference

    def _raise_unless_caused_here(self, error: Exception, microbatch: Any, examine: Callable[[], object]) -> None:
        """Return if the comparison itself causes the error, through eval mode or through a batch of one sample: it then
        occurs every time, and training may succeed. Raise it if training fails too, or if it does not occur again.
        """
        if is_out_of_memory(error):  # training may use smaller microbatches, or raises the same error
            return
        restore = snapshot(*self.evaluator.modules)
        try:
            self.evaluator.losses(microbatch)  # in training mode, with the whole microbatch
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

    def _compare_alone(self, microbatch: Any, losses: Tensor, update: int) -> str | None:
        def compute(batch: Any) -> Tensor:
            return self.evaluator.losses(batch)[0]

        reason = why_not_alone(compute, microbatch, losses)
        if reason == RANDOM:
            rewind = partial(snapshot, *self.evaluator.modules)
            return changed_by_exchange(compute, microbatch, rewind, self._tolerance(losses))
        if reason is not None or len(losses) < 2:
            return None
        row = int(torch.randint(len(losses), (), generator=torch.Generator().manual_seed(update)))
        return self._difference(microbatch, losses, loss_alone(compute, microbatch, row), row)

    def _difference(self, microbatch: Any, losses: Tensor, alone: Tensor, row: int) -> str | None:
        name = f"sample {row} of {len(losses)}"
        tolerance = self._tolerance(losses)
        if len(alone) != 1:
            return f"{name} has {len(alone)} losses instead of 1 when it is computed alone"
        here = losses[row].detach()
        there = alone[0].detach()
        if not (here.isfinite() or there.isfinite()):
            return None  # both are NaN or infinite, which the finite check of the update handles
        size_of_all = losses.detach().abs().nan_to_num(nan=0.0, posinf=0.0).max()
        if not (here - there).abs() <= tolerance * (size_of_all + 1):
            return f"{name} has loss {here.item():.6g} in the batch and {there.item():.6g} alone"
        off, size = _distance(self._gradient_among(microbatch, losses, row), self._gradient_alone(alone))
        if not isfinite(off):
            return None  # an overflow, which the finite check of the update handles
        if not off <= tolerance * (size + 1e-6):
            return f"the gradient of {name} differs by {off:.3g} from that of the sample alone, of norm {size:.3g}"
        return None

    def _gradient_among(self, microbatch: Any, losses: Tensor, row: int) -> dict[str, Tensor]:
        """Gradient of one sample of the microbatch, as transforms use it."""
        if not self.own_gradients:
            return self._gradient_alone(losses[row : row + 1])
        g = self.evaluator.gradients(losses, microbatch)
        scale = self.evaluator.precision.scale
        rows = {"": g.project(PROJECTED)[row]} if self.evaluator.strategy.sharded else g[row : row + 1]
        return {name: gradient / scale for name, gradient in rows.items()}

    def _gradient_alone(self, loss: Tensor) -> dict[str, Tensor]:
        """Gradient of one loss (1,). Of a sharded model a random projection, with the same norm in expectation."""
        if self.evaluator.strategy.sharded:
            return {"": self.evaluator.gradients_of(loss).project(PROJECTED)[0]}
        return jacobian_rows(loss, self.evaluator.trained.wanted())

    def _tolerance(self, losses: Tensor) -> float:
        """Relative tolerance: three times the square root of the machine epsilon, about half of the digits."""
        precision = self.evaluator.precision.name
        cast = None if precision is None else AUTOCAST_DTYPES[precision]
        return 3 * torch.finfo(cast or losses.dtype).eps ** 0.5

    def _broadcast(self, microbatch: Any) -> str | None:
        """Description of an operation that combines shapes (B, 1) and (B,), as of prediction and target; None if there
        is none.
        """
        total = length(microbatch)
        with _temporary_eval_mode(self.evaluator.modules), Broadcasts(total or 0) as seen:
            self.evaluator.losses(microbatch)
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
def _temporary_eval_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Context manager: eval mode inside; restores modes, buffers and random state on exit."""
    restore = snapshot(*modules)
    try:
        with eval_mode(*modules):
            yield
    finally:
        restore()


def _leaves(losses: Tensor) -> set[int]:
    """Ids of the leaf tensors in the graph of the losses."""
    nodes = Graph(losses, {}).nodes
    return {id(v) for node in nodes if (v := getattr(node, "variable", None)) is not None}


def _distance(here: dict[str, Tensor], there: dict[str, Tensor]) -> tuple[float, float]:
    """Norm of the difference, and norm of `there`."""
    off = sum((here[name] - row).abs().square().sum().item() for name, row in there.items())
    return off**0.5, sum(row.abs().square().sum().item() for row in there.values()) ** 0.5
