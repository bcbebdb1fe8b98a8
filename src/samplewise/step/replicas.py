"""A model that every rank has a replica of: made equal at the start, its gradients summed over ranks.

A `DistributedDataParallel` reduces gradients in each backward pass, as means. A step adds up a window and reduces its
sum, once: so it computes with the module inside, and the wrapper's own reducer is kept out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from samplewise import ranks
from samplewise.engine.sharded import in_parts
from samplewise.errors import DistributedError
from samplewise.losses import LossFn
from samplewise.replay import Buffers, checksum
from samplewise.step.parameters import Trained
from samplewise.transforms.transform import SumTransform


class Replicas:
    """Every rank has the whole model."""

    sharded = False
    leaves: Mapping[int, tuple[str, Tensor]] = {}  # graphs contain the parameters themselves

    def owned(self, parameters: Iterable[Tensor]) -> Iterable[Tensor]:
        """What an optimizer has of them."""
        return parameters

    def __init__(self, wrapped: DistributedDataParallel | None, modules: Sequence[nn.Module]):
        self.wrapped, self.modules = wrapped, modules
        self._inside = False
        refuse_exchanges(modules)
        if wrapped is not None:
            _refuse_options(wrapped)
            wrapped.register_forward_pre_hook(self._refuse_wrapper)
        _refuse_parts(modules)
        ranks.together()
        make_equal(modules, copy=wrapped is None)

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
        parameters = list(trained.named.values())
        own = buffers.moving() if self.wrapped is None or self.wrapped.broadcast_buffers else []
        found, moved = reached(parameters, own)
        for p, kind in zip(parameters, found, strict=True):
            _make_alike(p, kind)
        ranks.totals([p.grad for p in parameters if p.grad is not None and p.grad.layout is torch.strided])
        ranks.copies(moved)

    def act(self, transform: SumTransform, trained: Trained) -> None:
        transform.act(trained.gradients())

    def open(self) -> None:
        """Everything is there all the time."""

    def gather(self) -> None:
        """Everything is there all the time."""


NONE, DENSE, SPARSE = 0, 1, 2


def reached(parameters: Sequence[Tensor], buffers: Sequence[tuple[Tensor, bool]]) -> tuple[list[int], list[Tensor]]:
    """What any rank has: of gradients NONE, DENSE, SPARSE or both; and the buffers that have moved anywhere."""
    mine = [_kind(p.grad) for p in parameters] + [int(moves) for _, moves in buffers]
    several = ranks.size() + 1  # a digit for each kind
    counts = ranks.total(torch.tensor([(kind & 1) + several * (kind >> 1) for kind in mine], device=ranks.device()))
    found = [int(c % several > 0) + 2 * int(c >= several) for c in counts.tolist()]
    moved = [buffer for (buffer, _), moves in zip(buffers, found[len(parameters) :], strict=True) if moves]
    return found[: len(parameters)], moved


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


def make_equal(modules: Sequence[nn.Module], copy: bool = True) -> None:
    """Parameters and buffers of rank 0. A wrapper has done that, but they may have been changed since."""
    tensors = [(name, t) for m in modules for name, t in [*m.named_parameters(), *m.named_buffers()]]
    if not ranks.same([(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors]):
        raise DistributedError(
            "all ranks must have the same model; found parameters or buffers of other names, shapes or types. "
            "Build it alike on every rank, and freeze the same parameters."
        )
    if copy:
        ranks.copies([t for _, t in tensors])
    sums = torch.stack([checksum(t) for _, t in tensors]) if tensors else torch.zeros(0)
    found = ranks.gathered(sums[None])
    differ = (found != found[:1]).logical_and(~found.isnan()).any(0)
    if bool(differ.any()):
        name = tensors[int(differ.nonzero()[0])][0]
        raise DistributedError(
            f"all ranks must begin with the same parameters and buffers; found that {name!r} differs. Load the same "
            "checkpoint on every rank before the step is made; Step(model.module, ..., strategy='ddp') takes those of "
            "rank 0."
        )


EXCHANGES = {
    "SyncBatchNorm": "Use GroupNorm",
    "DistributedDataParallel": "Wrap the model as a whole, or leave it to Step(..., strategy='ddp')",
    "FullyShardedDataParallel": "Use fully_shard, or Step(..., strategy='fsdp')",
}


def refuse_exchanges(modules: Sequence[nn.Module]) -> None:
    for name, module in (named for root in modules for named in root.named_modules()):
        for kind in (base.__name__ for base in type(module).__mro__ if base.__name__ in EXCHANGES):
            raise DistributedError(
                f"ranks must exchange nothing within a forward or backward pass; found {kind}: {name}. A rank may have "
                f"more pieces of a window than another, which would wait for ever. {EXCHANGES[kind]}."
            )


def _refuse_parts(modules: Sequence[nn.Module]) -> None:
    for name, p in (named for root in modules for named in root.named_parameters()):
        if in_parts(p):
            raise DistributedError(
                f"every rank must have the whole model; found that it has a part of {name!r}. Leave it to "
                "Step(..., strategy='fsdp') to share a model: other ways are not known to it."
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
