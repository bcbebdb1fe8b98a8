"""A model that every rank has a replica of: recognised, made equal at the start, its gradients summed over ranks.

A `DistributedDataParallel` reduces gradients in each backward pass, as means. A step adds up a window and reduces its
sum, once: so it computes with the module inside, and the wrapper's own reducer is kept out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from samplewise import ranks
from samplewise.engine.replicas import inner as inner
from samplewise.errors import DistributedError
from samplewise.losses import LossFn
from samplewise.replay import Buffers, checksum
from samplewise.step.parameters import Trained

STRATEGIES = (None, "ddp")


def spread(model: nn.Module, strategy: str | None, modules: Sequence[nn.Module]) -> Replicas | None:
    """How the ranks share a model; None where there is one process."""
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be None or 'ddp'; found {strategy!r}.")
    if not ranks.active():
        return None
    wrapped = model if isinstance(model, DistributedDataParallel) else None
    if wrapped is None and strategy is None:
        raise DistributedError(
            f"a model must be shared by the ranks that train it; found {ranks.size()} ranks, each with a model of its "
            "own. Use Step(..., strategy='ddp'), or hand over a DistributedDataParallel."
        )
    return Replicas(wrapped, modules)


class Replicas:
    """Every rank has the whole model."""

    def __init__(self, wrapped: DistributedDataParallel | None, modules: Sequence[nn.Module]):
        self.wrapped, self.modules = wrapped, modules
        self._inside = False
        _refuse_exchanges(modules)
        if wrapped is not None:
            _refuse_options(wrapped)
            wrapped.register_forward_pre_hook(self._refuse_wrapper)
        self._make_equal()

    def _make_equal(self) -> None:
        """Parameters and buffers of rank 0. A wrapper has done that, but they may have been changed since."""
        tensors = [(name, t) for m in self.modules for name, t in [*m.named_parameters(), *m.named_buffers()]]
        if not ranks.same([(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors]):
            raise DistributedError(
                "all ranks must have the same model; found parameters or buffers of other names, shapes or types. "
                "Build it alike on every rank, and freeze the same parameters."
            )
        if self.wrapped is None:
            ranks.copies([t for _, t in tensors])
        self._check_equal(tensors)

    def _check_equal(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        sums = torch.stack([checksum(t) for _, t in tensors]) if tensors else torch.zeros(0)
        found = ranks.gathered(sums[None])
        differ = (found != found[:1]).logical_and(~found.isnan()).any(0)
        if bool(differ.any()):
            name = tensors[int(differ.nonzero()[0])][0]
            raise DistributedError(
                f"all ranks must begin with the same parameters and buffers; found that {name!r} differs. Load the "
                "same checkpoint on every rank before the step is made; Step(model.module, ..., strategy='ddp') takes "
                "those of rank 0."
            )

    # --- forward passes --------------------------------------------------------------------------------------------

    def around(self, loss_fn: LossFn) -> LossFn:
        """The loss function, called so that the wrapper takes no part."""
        if self.wrapped is None:
            return loss_fn
        reducer: Any = self.wrapped.reducer

        def losses(model: nn.Module, batch: Any) -> Any:
            reducer._reset_state()  # an earlier forward pass may have told it to expect a backward pass
            self._inside = True
            try:
                return loss_fn(model, batch)
            finally:
                self._inside = False

        return losses

    def _refuse_wrapper(self, *_: Any) -> None:
        if self._inside:
            raise DistributedError(
                "a loss function must call the model that it is given; found that it calls the DistributedDataParallel "
                "around it, which would exchange gradients in every backward pass. Write loss_fn(model, batch) with "
                "the model of its argument."
            )

    # --- the end of a window ---------------------------------------------------------------------------------------

    def reduce(self, trained: Trained, buffers: Buffers) -> None:
        """Sums `.grad` over all ranks. A parameter that no rank has reached keeps none; buffers are those of rank 0,
        as a DistributedDataParallel has it.
        """
        parameters, own = list(trained.named.values()), buffers.moving() if self._sends_buffers else []
        found = self._found(parameters, [moves for _, moves in own])
        for p, kind in zip(parameters, found[: len(parameters)], strict=True):
            _make_alike(p, kind)
        ranks.totals([p.grad for p in parameters if p.grad is not None and p.grad.layout is torch.strided])
        moved = [buffer for (buffer, _), moves in zip(own, found[len(parameters) :], strict=True) if moves]
        ranks.copies(moved)

    @property
    def _sends_buffers(self) -> bool:
        return self.wrapped is None or bool(self.wrapped.broadcast_buffers)

    def _found(self, parameters: Sequence[Tensor], moving: Sequence[bool]) -> list[int]:
        """What any rank has: of gradients NONE, DENSE, SPARSE or both; of buffers whether they moved."""
        mine = [_kind(p.grad) for p in parameters] + [int(moves) for moves in moving]
        several = ranks.size() + 1  # a digit for each kind
        counts = ranks.total(torch.tensor([(kind & 1) + several * (kind >> 1) for kind in mine], device=ranks.device()))
        return [int(c % several > 0) + 2 * int(c >= several) for c in counts.tolist()]


NONE, DENSE, SPARSE = 0, 1, 2


def _kind(gradient: Tensor | None) -> int:
    return NONE if gradient is None else DENSE if gradient.layout is torch.strided else SPARSE


def _make_alike(p: Tensor, kind: int) -> None:
    """A gradient that can be added to those of the other ranks; sparse ones are joined here and now."""
    if kind == NONE:
        return
    if kind != SPARSE:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
        return
    none = torch.zeros(0, 1, dtype=torch.long, device=p.device), p.new_zeros(0, *p.shape[1:])
    rows, values = none if p.grad is None else (p.grad.coalesce().indices().t(), p.grad.coalesce().values())
    places, numbers = ranks.gathered(rows).t(), ranks.gathered(values)
    p.grad = torch.sparse_coo_tensor(places, numbers, p.shape, check_invariants=False).coalesce()


def _refuse_exchanges(modules: Sequence[nn.Module]) -> None:
    found = [name for m in modules for name, each in m.named_modules() if isinstance(each, nn.SyncBatchNorm)]
    if found:
        raise DistributedError(
            f"ranks must exchange nothing within a forward pass; found SyncBatchNorm: {found[0]}. A rank may have more "
            "pieces of a window than another, which would wait for ever. Use GroupNorm."
        )


def _refuse_options(wrapped: DistributedDataParallel) -> None:
    """What a wrapper does beyond summing gradients, and would not do here."""
    options: dict[str, Callable[[], bool]] = {
        "a process group that is not the default one": lambda: wrapped.process_group is not dist.group.WORLD,
        "mixed_precision": lambda: wrapped.mixed_precision is not None,
        "parameters that it ignores": lambda: bool(wrapped.parameters_to_ignore),
        "communication hooks": lambda: bool(wrapped._comm_hooks),
    }
    for name, is_so in options.items():
        if is_so():
            raise DistributedError(
                f"a DistributedDataParallel must leave its gradients to the step; found one with {name}, which a step "
                "does not do. Use Step(model, ..., strategy='ddp') with the module inside, and precision= of the step."
            )
