"""Recheck: compare losses and gradients of samples computed alone with those of the same samples in their batch.

The first 8 samples are compared at the first update, and the losses of the whole microbatch with those of the same
samples in other orders. With `Step(recheck=1000)`, one sample and one order are also compared every 1,000 updates, and
any difference is an error. Both run in eval mode, without randomness and without TF32, and restore modes, buffers and
random state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.overrides import TorchFunctionMode

from samplewise.core.batches import copied, cut, length
from samplewise.core.closure_state import CallSnapshot
from samplewise.core.comparisons import (
    ORDERS,
    RANDOM,
    NotPerSampleError,
    broadcast_cause,
    changed_by_exchange,
    changed_by_order,
    difference_of_slice,
    differing,
    loss_alone,
    why_not_alone,
)
from samplewise.core.losses import per_sample
from samplewise.core.memory import allow_tf32, is_out_of_memory
from samplewise.core.modes import warn
from samplewise.core.state import eval_mode
from samplewise.core.text import listed
from samplewise.engine.graph.graph import edge_of, is_accumulate_grad
from samplewise.engine.graph.structure import children_below
from samplewise.engine.strategies import gradient_of
from samplewise.errors import LossesError, NonFiniteGradientError, SamplesInteractError
from samplewise.step.forward import AUTOCAST_DTYPES, LossEvaluator

HALF = {torch.float16, torch.bfloat16}
ALONE = 8  # number of samples that are computed alone: enough to detect interaction
PROJECTED = 32  # dimensions of projected gradients, which are compared for sharded models to save memory


class Recheck:
    """Rechecks of a step. `every`: number of updates between two rechecks; None: only the first update; False: never.
    `per_sample_gradients`: transforms use them, so that interacting samples are an error.
    """

    def __init__(self, evaluator: LossEvaluator, every: int | bool | None, per_sample_gradients: bool):
        self.evaluator = evaluator
        self.every = every
        self.per_sample_gradients = per_sample_gradients
        self._interacts = False  # whether the warning about samples that interact was given
        self._warned = False  # whether the warning about a failed recheck was given

    def due(self, update: int) -> bool:
        """True if the update with this index is rechecked."""
        return type(self.every) is int and update % self.every == 0

    def run(self, microbatch: Any, first: bool, update: int) -> None:
        """Recheck the first microbatch of a window, if due. Called for every window."""
        is_first_check = first and self.every is not False
        if not (is_first_check or self.due(update)) or self._would_consume():
            return
        is_large = (length(microbatch) or 0) > ALONE
        subset = cut(microbatch, 0, ALONE) if is_first_check and is_large else microbatch
        self._report(self._compare(subset, microbatch, first, update), subset)

    def _would_consume(self) -> bool:
        """True, with a warning, if the calls of a recheck could consume values of an iterator."""
        iterators = CallSnapshot([self.evaluator.loss_fn], self.evaluator.modules).iterators
        if not iterators:
            return False
        kind = type(iterators[0]).__name__
        self.evaluator.policy.refuse_unchecked(
            f"loss_fn or the model can read an iterator ({kind}), whose values a recheck would consume"
        )
        self._warn(
            f"the update is not rechecked: loss_fn or the model can read an iterator ({kind}), whose values would be "
            "consumed. Pass recheck=False, or compute the values from the number of the update."
        )
        return True

    def compare_slice(self, batch: Any, start: int, stop: int) -> None:
        """Compare the losses of the microbatch of rows start:stop with those in the whole batch: an entry that is not
        per sample, such as a mask, may have as many rows as there are samples. Not for sharded models, whose forward
        passes are collectives.
        """
        evaluator = self.evaluator
        compares = self.every is not False and evaluator.ranks.passes_alone and evaluator.interacting != "allow"
        if compares and not self._would_consume():
            self._report(self._slice_difference(batch, start, stop), cut(batch, start, stop))

    def _slice_difference(self, batch: Any, start: int, stop: int) -> str | None:
        """As `difference_of_slice`, for the losses of the step in eval mode."""
        evaluator = self.evaluator

        def compute(rows: Any) -> Tensor:
            with evaluator.precision.autocast(evaluator.trained.device):
                return per_sample(evaluator.loss_fn(evaluator.model, copied(rows)))[0]

        with self._temporary_eval_mode(), torch.no_grad():
            return difference_of_slice(compute, batch, start, stop, self._tolerance)

    def _report(self, difference: str | None, microbatch: Any) -> None:
        if difference is None:
            return
        # An operation that combines shapes (B, 1) and (B,), as of prediction and target, is the likely cause.
        total = length(microbatch) or 0
        with self._temporary_eval_mode(), Broadcasts(total) as broadcasts:
            self._losses(microbatch)
        if broadcasts.operation is not None:
            raise LossesError(f"{difference}. {broadcast_cause(broadcasts.operation, total)}")
        if self.evaluator.interacting == "allow":
            return
        difference += self._possible_constants(microbatch)
        if self.per_sample_gradients or self.every:
            allow = "; or pass interacting='allow'" if self.evaluator.policy.allows_interaction else ""
            raise SamplesInteractError(
                f"samples must not depend on each other if per-sample gradients are used; found that {difference}. "
                "Look for batch statistics, for losses computed from several samples, and for recurrent or attention "
                "layers without batch_first=True. Mix samples (mixup) in "
                f"collate_fn, so that each loss depends on one row of the batch{allow}."
            )
        if self._interacts:
            return
        self._interacts = True
        warn(
            f"samples depend on each other: {difference}. An update then depends on how its window is cut into batches "
            "and microbatches. If this is intended, pass interacting='allow'; if not, look for batch statistics."
        )

    def _possible_constants(self, microbatch: Any) -> str:
        """Sentence about entries that may not be per sample, and were sliced for the recheck; empty without such."""
        if not self.evaluator.ranks.passes_alone:
            return ""
        try:
            self._slice_difference(microbatch, 0, 1)
        except NotPerSampleError as problem:
            return f", unless {problem.names} is kept whole. If it is not per sample: {problem.remedy}"
        return ""

    def _compare(self, subset: Any, microbatch: Any, first: bool, update: int) -> str | None:
        """Description of the difference between a sample computed alone and in the batch; None if there is none.
        `subset`: the samples of `microbatch` that are used.
        """
        reached: set[int] = set()
        difference = problem = None
        single = False  # the loss function returns one loss

        def examine() -> str | None:
            nonlocal single
            with self._temporary_eval_mode():
                losses = self._losses(subset)
                single = len(losses) == 1
                reached.update(_leaves(losses) if first else ())
                # Orders first: a loss function may fail for one sample alone.
                difference = self._compare_orders(microbatch, subset, losses, update, ORDERS if first else 1)
                return difference or self._compare_alone(subset, losses, update, ALONE if first else 1)

        try:
            difference = examine()
        except Exception as error:
            self._raise_unless_caused_here(error, microbatch, examine)
            problem = str(error).partition("\n")[0]
        if first and single and (length(microbatch) or 1) > 1:
            warn(
                f"the loss function returns one loss for a batch of {length(microbatch)} rows, so that the batch "
                "counts as one sample. If it is a mean over the batch, return one loss per sample: reduction='none'."
            )
        # Warn about parameters that the loss reaches and that the optimizer does not have. `reached`: ids of leaves.
        missed = [name for name, p in self.evaluator.trained.untracked_parameters().items() if id(p) in reached]
        if missed:
            warn(
                f"the loss reaches parameters that the optimizer does not have: {listed(missed)}. They are not "
                "trained. Add them to the optimizer, or freeze them with requires_grad_(False)."
            )
        if problem is not None and self.every:
            self._warn(f"the recheck could not compute a sample alone in eval mode: {problem}")
        return difference

    def _warn(self, message: str) -> None:
        """Warn once."""
        if not self._warned:
            self._warned = True
            warn(message)

    def _raise_unless_caused_here(self, error: Exception, microbatch: Any, examine: Callable[[], object]) -> None:
        """Return if the comparison itself causes the error, through eval mode or through a batch of one sample: it then
        occurs every time, and training may succeed. Raise it if training fails too, or if it does not occur again.
        """
        if is_out_of_memory(error):  # training may use smaller microbatches, or raises the same error
            return
        restore = self.evaluator.saved_state()
        try:
            self._losses(microbatch)  # in training mode, with the whole microbatch
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

    def _losses(self, batch: Any) -> Tensor:
        """Losses of a copy of the batch: the loss function may change it in place, and the update needs it, too."""
        return self.evaluator.losses(copied(batch))[0]

    @contextmanager
    def _temporary_eval_mode(self) -> Iterator[None]:
        """Context manager: eval mode inside; restores modes and what the loss function has changed on exit.

        Without TF32: a sum in another order, as of a smaller batch, changes some roundings to 10 bits, and through them
        the gradients of an ordinary ResNet by several percent.
        """
        restore = self.evaluator.saved_state()
        on_cpu = self.evaluator.trained.device.type == "cpu"
        try:
            with eval_mode(*self.evaluator.modules), nullcontext() if on_cpu else allow_tf32(False):
                yield
        finally:
            restore()

    def _compare_alone(self, microbatch: Any, losses: Tensor, update: int, number: int) -> str | None:
        """Compare up to `number` samples."""
        reason = why_not_alone(self._losses, microbatch, losses)
        if reason == RANDOM:
            return changed_by_exchange(self._losses, microbatch, self.evaluator.saved_state, self._tolerance(losses))
        if reason is not None or len(losses) < 2:
            return None
        generator = torch.Generator().manual_seed(update)
        rows = torch.randperm(len(losses), generator=generator)[:number].tolist()
        weights = torch.zeros_like(losses, requires_grad=False)
        weights[rows] = torch.rand(len(rows), generator=generator).add(0.5).to(losses)
        total: dict[str, Tensor] = {}
        for row in rows:
            alone = loss_alone(self._losses, microbatch, row)
            difference = self._difference_of_loss(losses, alone, row)
            if difference is not None:
                return difference
            gradient = self._gradient_alone(alone)
            weighted = torch._foreach_mul(list(gradient.values()), weights[row].item())
            if total:
                torch._foreach_add_(list(total.values()), weighted)
            else:
                total = dict(zip(gradient, weighted, strict=True))
        # One comparison of weighted sums for all samples; single samples are compared only if the sums differ.
        try:
            if self._are_near(self._gradient_among(microbatch, losses, weights), total, losses):
                return None
        except NonFiniteGradientError:  # an overflow, which the finite check of the update handles
            return None
        for row in rows:
            single = torch.zeros_like(weights)
            single[row] = 1
            there = self._gradient_alone(loss_alone(self._losses, microbatch, row))
            here = self._gradient_among(microbatch, losses, single)
            if not self._are_near(here, there, losses):
                off, size = _distance(here, there)
                return (
                    f"the gradient of sample {row} of {len(losses)} differs by {off:.3g} from that of the sample "
                    f"alone, of norm {size:.3g}"
                )
        return None

    def _compare_orders(self, microbatch: Any, subset: Any, losses: Tensor, update: int, orders: int) -> str | None:
        """Compare the losses of the whole microbatch with those in other orders. `losses`: of `subset`."""
        if subset is not microbatch:
            losses = self._losses(microbatch)
        if len(losses) < 3 or why_not_alone(self._losses, microbatch, losses) is not None:
            return None
        return changed_by_order(self._losses, microbatch, losses, self._tolerance(losses), update, orders)

    def _difference_of_loss(self, losses: Tensor, alone: Tensor, row: int) -> str | None:
        name = f"sample {row} of {len(losses)}"
        if len(alone) != 1:
            return f"{name} has {len(alone)} losses instead of 1 when it is computed alone"
        replaced = losses.detach().clone()
        replaced[row] = alone[0].detach()
        if differing(losses.detach(), replaced, self._tolerance(losses))[row]:
            return f"{name} has loss {losses[row].item():.6g} in the batch and {alone[0].item():.6g} alone"
        return None

    def _are_near(self, here: dict[str, Tensor], there: dict[str, Tensor], losses: Tensor) -> bool:
        """True also if gradients overflow, which the finite check of the update handles."""
        off, size = _distance(here, there)
        return not isfinite(off) or off <= self._tolerance(losses) * (size + 1e-6)

    def _gradient_among(self, microbatch: Any, losses: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """Weighted sum of the gradients of the samples of the microbatch, as transforms use them."""
        if not self.per_sample_gradients:
            return self._gradient_alone((losses * weights).sum()[None])
        g = self.evaluator.gradients(losses, microbatch)
        if self.evaluator.ranks.sharded:  # whole gradients do not exist at one time
            total = {"": weights.to(losses.dtype) @ g.project(PROJECTED).to(losses.dtype)}
        else:
            total = g.sum(weights)
        return {name: gradient / self.evaluator.precision.scale for name, gradient in total.items()}

    def _gradient_alone(self, loss: Tensor) -> dict[str, Tensor]:
        """Gradient of one loss (1,). Of a sharded model a random projection, with the same norm in expectation."""
        if self.evaluator.ranks.sharded:
            return {"": self.evaluator.gradients_of(loss).project(PROJECTED)[0]}
        return gradient_of(loss, self.evaluator.trained.trainable(), torch.ones_like(loss))

    def _tolerance(self, losses: Tensor) -> float:
        """Relative tolerance: three times the square root of the machine epsilon, about half of the digits; of the
        coarsest dtype, because frozen layers in half precision round values between adapters in float32.
        """
        precision = self.evaluator.precision.name
        cast = None if precision is None else AUTOCAST_DTYPES[precision]
        dtypes = {p.dtype for module in self.evaluator.modules for p in module.parameters()} & HALF
        return 3 * max(torch.finfo(dtype).eps for dtype in (cast or losses.dtype, *dtypes)) ** 0.5


class Broadcasts(TorchFunctionMode):
    """Records the first torch function that gets tensors of shapes (B, 1) and (B,)."""

    def __init__(self, samples: int):
        super().__init__()
        self.samples = samples
        self.operation: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = {tuple(x.shape) for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor)}
        if {(self.samples, 1), (self.samples,)} <= shapes and self.operation is None:
            self.operation = getattr(func, "__name__", str(func))
        return func(*args, **(kwargs or {}))


def _leaves(losses: Tensor) -> set[int]:
    """Ids of the leaf tensors in the graph of the losses."""
    return {id(node.variable) for node in children_below(edge_of(losses).node) if is_accumulate_grad(node)}


def _distance(here: dict[str, Tensor], there: dict[str, Tensor]) -> tuple[float, float]:
    """Norm of the difference, and norm of `there`."""
    differences = torch._foreach_sub([here[name] for name in there], list(there.values()))
    return get_total_norm(differences).item(), get_total_norm(there.values()).item()
