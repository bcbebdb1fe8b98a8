"""Data parallelism (DDP): every rank has a replica of the model, equal at the start; gradients are summed over ranks.

A `DistributedDataParallel` all-reduces mean gradients in each backward pass. A step accumulates the sum of a window and
all-reduces it once, if possible during its last backward pass (`Overlap`): it therefore calls the wrapped module, and
bypasses the wrapper and its reducer. The reducer does not see gradients that are written to `.grad` directly, so
`refuse_replicas` refuses to write them for a wrapped model.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from samplewise.core.losses import LossFn
from samplewise.core.state import Buffers, checksum
from samplewise.errors import DistributedError
from samplewise.parallel import collectives
from samplewise.parallel.mode import RankWindow, SumFunction
from samplewise.parallel.overlap import Overlap
from samplewise.parallel.ranks import Ranks
from samplewise.parallel.sharded_parameters import harmless_hooks, is_dtensor


class DDP(Ranks):
    """Mode in which every rank has the whole model."""

    def __init__(
        self, wrapped: DistributedDataParallel | None, modules: Sequence[nn.Module], empty_updates: bool = False
    ):
        super().__init__(empty_updates)
        self.wrapped = wrapped
        self.modules = modules
        self.overlap = Overlap()
        self._in_loss_fn = False
        refuse_collectives(modules)
        if wrapped is not None:
            _refuse_options(wrapped)
            wrapped.register_forward_pre_hook(self._refuse_wrapper)
        for name, p in (named for root in modules for named in root.named_parameters()):
            if is_dtensor(p):
                raise DistributedError(
                    f"every rank must have the whole model; found a shard of {name!r}. Pass the whole model to "
                    "Step(..., parallel='fsdp'), which shards it; other kinds of sharding are not supported."
                )
        collectives.barrier()
        make_equal(modules, copy=wrapped is None)

    # --- forward passes --------------------------------------------------------------------------------------------

    def wrap_loss_fn(self, loss_fn: LossFn) -> LossFn:
        """Loss function that bypasses the DistributedDataParallel wrapper, and refuses calls of the wrapper."""
        if self.wrapped is None:
            return loss_fn
        reducer: Any = self.wrapped.reducer

        def losses(model: nn.Module, batch: Any) -> Any:
            reducer._reset_state()  # an earlier forward pass may have prepared the reducer for a backward pass
            self._in_loss_fn = True
            try:
                return loss_fn(model, batch)
            finally:
                self._in_loss_fn = False

        vars(losses)["__wrapped__"] = loss_fn  # compiled code looks up what the loss function depends on
        return losses

    def _refuse_wrapper(self, *_: Any) -> None:
        if self._in_loss_fn:
            raise DistributedError(
                "loss_fn must call the model that is passed to it; found a call of the DistributedDataParallel "
                "wrapper, which would all-reduce gradients in every backward pass. In loss_fn(model, batch), call the "
                "argument `model`."
            )

    # --- the end of a window ---------------------------------------------------------------------------------------

    def begin_exchange(
        self, window: RankWindow, expected: int, samples: int | None, tail: str, ended: bool = False
    ) -> Callable[[Tensor], None]:
        def decide(skips: float, total: float, ended: float) -> bool:
            return not skips and self._is_complete(total, ended, samples, tail)

        self.overlap.ask(window.failure is not None, expected, ended, decide)
        return self.overlap.ready

    def agree(self, window: RankWindow, samples: int | None, tail: str, ended: bool = False) -> bool:
        self.overlap.start_buckets()
        complete = super().agree(window, samples, tail, ended)
        if not complete:
            self.overlap.reset()  # no bucket was started: the ranks have decided so with the same numbers
        return complete

    def reduce_gradients(self, named: Mapping[str, Tensor], owned: Mapping[str, Tensor], buffers: Buffers) -> None:
        """Sum `.grad` over all ranks: what is in buckets already, and what is left in `.grad`. `.grad` stays None for a
        parameter that has no gradient on any rank. Buffers are broadcast from rank 0, as in DistributedDataParallel.
        """
        parameters = list(named.values())
        changing = buffers.moving() if self.wrapped is None or self.wrapped.broadcast_buffers else []
        kinds, changed = reached([self._sent_or_left(p) for p in parameters], changing)
        for p, kind in zip(parameters, kinds, strict=True):
            _make_alike(p, kind & ~SENT)
        # Buckets as in `overlap`: the order of sums over ranks, and their rounding, depend on places in buckets.
        collectives.all_reduce_bucketed_(
            [p.grad for p in reversed(parameters) if p.grad is not None and p.grad.layout is torch.strided]
        )
        collectives.broadcast_bucketed_(changed)
        sums = self.overlap.sums()
        for p, kind in zip(parameters, kinds, strict=True):
            if kind & SENT:
                p.grad = sums[id(p)] if p.grad is None else sums[id(p)] + p.grad
        self.overlap.expect(p for p, kind in zip(parameters, kinds, strict=True) if kind & (DENSE | SENT))

    def _sent_or_left(self, p: Tensor) -> int:
        """Kinds of gradient of a parameter on this rank."""
        return _kind(p.grad) | (SENT if id(p) in self.overlap.sent else NONE)

    def discard_sums(self) -> None:
        self.overlap.sums()  # every rank has started the buckets; the sums are not used

    def announce(self, error: Exception) -> None:
        try:
            if not collectives.is_from_another_rank(error):
                self.overlap.start_buckets(error)  # a collective in which the other ranks may be waiting
            super().announce(error)
        finally:
            self.overlap.reset()

    def _transform(self, transform: SumFunction, gradients: list[Tensor], owned: Iterable[Tensor]) -> None:
        transform.apply_(gradients)


NONE, DENSE, SPARSE, SENT = 0, 1, 2, 4
DIGITS = 3


def reached(kinds: Sequence[int], buffers: Sequence[tuple[Tensor, bool]]) -> tuple[list[int], list[Tensor]]:
    """For each parameter the kinds of gradient on any rank, from those on this rank: NONE, or the sum of DENSE and
    SPARSE for `.grad`, and of SENT for a gradient in a bucket; and the buffers that have changed on any rank.
    """
    codes = [*kinds, *(int(moves) for _, moves in buffers)]
    several = collectives.size() + 1  # base of a number with one digit per kind, so that one all-reduce counts all
    counts = collectives.all_reduce_(
        torch.tensor(
            [sum((kind >> k & 1) * several**k for k in range(DIGITS)) for kind in codes], device=collectives.device()
        )
    )
    combined = [sum((c // several**k % several > 0) << k for k in range(DIGITS)) for c in counts.tolist()]
    moved = [buffer for (buffer, _), moves in zip(buffers, combined[len(kinds) :], strict=True) if moves]
    return combined[: len(kinds)], moved


def _kind(gradient: Tensor | None) -> int:
    if gradient is None:
        return NONE
    return DENSE if gradient.layout is torch.strided else SPARSE


def _make_alike(p: Tensor, kind: int) -> None:
    """Give `p.grad` the same layout on every rank, ready for the all-reduce. Sparse gradients are summed here."""
    if kind == NONE:
        return
    if kind != SPARSE:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
        return
    if p.grad is None:
        rows = torch.zeros(0, 1, dtype=torch.long, device=p.device)
        values = p.new_zeros(0, *p.shape[1:])
    else:
        rows = p.grad.coalesce().indices().t()
        values = p.grad.coalesce().values()
    places = collectives.all_gather_rows(rows).t()
    numbers = collectives.all_gather_rows(values)
    p.grad = torch.sparse_coo_tensor(places, numbers, p.shape, check_invariants=False).coalesce()


def make_equal(modules: Sequence[nn.Module], copy: bool = True) -> None:
    """Broadcast parameters and buffers from rank 0, then check that they are equal on all ranks. copy=False: only
    check, because a DistributedDataParallel has broadcast them, but they may have changed since.
    """
    tensors = [(name, t) for m in modules for name, t in [*m.named_parameters(), *m.named_buffers()]]
    if not collectives.all_equal([(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors]):
        raise DistributedError(
            "all ranks must have the same model; found parameters or buffers that differ in name, shape, dtype or "
            "requires_grad. Build the same model on every rank, and freeze the same parameters."
        )
    if copy:
        collectives.broadcast_bucketed_([t for _, t in tensors])
    sums = torch.stack([checksum(t) for _, t in tensors]) if tensors else torch.zeros(0)
    sums_of_ranks = collectives.all_gather_rows(sums[None])
    differ = (sums_of_ranks != sums_of_ranks[:1]).logical_and(~sums_of_ranks.isnan()).any(0)
    if bool(differ.any()):
        name = tensors[int(differ.nonzero()[0])][0]
        raise DistributedError(
            f"all ranks must start with the same parameters and buffers; found that {name!r} differs. Load the same "
            "checkpoint on every rank before the step is created; or use Step(model.module, ..., parallel='ddp'), "
            "which broadcasts them from rank 0."
        )


EXCHANGES = {
    "SyncBatchNorm": "Use GroupNorm",
    "DistributedDataParallel": "Wrap the whole model, or use Step(..., parallel='ddp') without a wrapper",
    "FullyShardedDataParallel": "Use fully_shard, or Step(..., parallel='fsdp')",
}


def refuse_collectives(modules: Sequence[nn.Module]) -> None:
    """Raise if a module calls collectives in its forward or backward pass."""
    for name, module in (named for root in modules for named in root.named_modules()):
        for kind in (base.__name__ for base in type(module).__mro__ if base.__name__ in EXCHANGES):
            raise DistributedError(
                f"forward and backward passes must not contain collectives; found {kind}: {name}. Ranks may have "
                f"different numbers of microbatches in a window, so that a collective would hang. {EXCHANGES[kind]}."
            )


def _refuse_options(wrapped: DistributedDataParallel) -> None:
    """Raise for options of a DistributedDataParallel that a step does not apply."""
    options: dict[str, Callable[[], bool]] = {
        "a process group that is not the default one": lambda: wrapped.process_group is not dist.group.WORLD,
        "mixed_precision": lambda: wrapped.mixed_precision is not None,
        "parameters that it ignores": lambda: bool(wrapped.parameters_to_ignore),
        "communication hooks": lambda: bool(wrapped._comm_hooks),
    }
    for name, is_so in options.items():
        if is_so():
            raise DistributedError(
                f"a DistributedDataParallel must only sum gradients; found one with {name}, which a step does not "
                "support. Use Step(model.module, ..., parallel='ddp') and precision= of the step."
            )


# --- detection of wrappers -------------------------------------------------------------------------------------------

_wrappers: WeakSet[DistributedDataParallel] = WeakSet()  # in this process, since this module was imported
# A wrapper needs a process group: without one, none was made before.
_knows_all_wrappers = not (dist.is_available() and dist.is_initialized())


def _add_wrapper(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """Registration hook for submodules: record a DistributedDataParallel when it registers its inner module."""
    if isinstance(module, DistributedDataParallel):
        _wrappers.add(module)


register_module_module_registration_hook(_add_wrapper)
harmless_hooks.registered += 1  # it sees no gradients


def inner(model: nn.Module) -> nn.Module:
    """Return the module inside a DistributedDataParallel or a module of Lightning Fabric, with the model's own
    parameter names; others unchanged.
    """
    wrapped: Any = model
    while isinstance(wrapped, DistributedDataParallel) or type(wrapped).__name__ == "_FabricModule":
        if isinstance(wrapped, DistributedDataParallel):
            _wrappers.add(wrapped)
        wrapped = wrapped.module
    return wrapped


def is_replica(parameters: Iterable[Tensor]) -> bool:
    """True if one of the parameters belongs to a DistributedDataParallel in a multi-rank process."""
    return bool(_wrappers_of(parameters))


def refuse_static_graph(parameters: Iterable[Tensor]) -> None:
    """Raise DistributedError if one of the parameters belongs to a DistributedDataParallel with static_graph=True."""
    if any(wrapper.static_graph for wrapper in _wrappers_of(parameters)):
        raise DistributedError(
            "sw.backward needs a DistributedDataParallel without static_graph=True; found it, and the gradients would "
            "not be reliable. Leave out static_graph."
        )


def _wrappers_of(parameters: Iterable[Tensor]) -> list[DistributedDataParallel]:
    """Wrappers that one of the parameters belongs to, in a multi-rank process."""
    if collectives.size() == 1:
        return []
    _find_earlier_wrappers()
    replicas = {id(p) for p in parameters if not is_dtensor(p)}
    return [wrapper for wrapper in _wrappers if any(id(p) in replicas for p in wrapper.module.parameters())]


def _find_earlier_wrappers() -> None:
    """Search for wrappers that were made before this module was imported, once, if there may be any. Torch keeps no
    list of them, and their parameters do not refer to them: only the garbage collector knows.
    """
    global _knows_all_wrappers
    if not _knows_all_wrappers:
        _wrappers.update(thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel))
        _knows_all_wrappers = True


def refuse_replicas(parameters: Iterable[Tensor]) -> None:
    """Raise DistributedError if one of the parameters belongs to a DistributedDataParallel in a multi-rank process."""
    if is_replica(parameters):
        raise DistributedError(
            "gradients of a DistributedDataParallel must be summed over ranks; found g.backward(), which bypasses its "
            "reducer. Use sw.backward, sw.Step, or p.grad = g.sum(all_reduce=True)[name] / number of samples."
        )
