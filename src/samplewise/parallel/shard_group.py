"""Collectives of one group of sharded parameters: the all-gather of the parameters and the sum of their gradients.

A group is torch's `FSDPParamGroup`: the parameters of one module on which `fully_shard` was called. Its modules gather
the parameters in every pass, whenever autograd or a forward pass arrives there. Here, a rank first asks the others to
take part (`Requests`), so that ranks may run different passes. While a step accumulates gradients (`summing`), the
gradients of its groups are summed over ranks instead of averaged, right after the backward pass has left their modules.

The methods `unshard` and `post_backward` of the torch group and `_register_pre_backward_hook` of its state are replaced
on these objects; all private interfaces of `fully_shard` that can change its behavior are used in this file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from samplewise.parallel import collectives
from samplewise.parallel.release import handed_over
from samplewise.parallel.requests import GATHER, REDUCE
from samplewise.parallel.sharded_parameters import harmless_hooks


class ShardGroup:
    """Collectives of one group of sharded parameters. Use `ShardGroup.of`, in the same order on all ranks.

    summed: groups whose gradients the backward pass of a step sums over ranks; None outside of such a pass.
    reached: ids of the FSDPParams of this group that got a gradient on this rank since it was cleared.
    """

    summed: ClassVar[Collection[ShardGroup] | None] = None

    def __init__(self, group: Any):
        self._group = group
        self._number = collectives.requests.add(self)
        self._unshard = group.unshard
        self._post_backward = group.post_backward
        self.reached: set[int] = set()
        group.unshard = self.unshard
        group.post_backward = self.post_backward

    @classmethod
    def of(cls, group: Any) -> ShardGroup:
        """The object of a torch group; made once."""
        if not hasattr(group, "_samplewise"):
            group._samplewise = cls(group)
        made: ShardGroup = group._samplewise
        return made

    @property
    def _mesh(self) -> Any:
        return self._group.mesh_info

    @property
    def copies(self) -> int:
        """Number of ranks that have the same shards; 1 without hybrid sharding."""
        return self._mesh.mesh.size() // self._mesh.shard_mesh_size

    def serve(self, kind: int) -> None:
        """Take part in a collective that another rank needs."""
        if kind == GATHER:
            # All-gather of parameters that this rank does not need.
            size = self._mesh.shard_mesh_size
            if size > 1:
                shard = handed_over(torch.cat(self._shards()))
                collectives.note("all_gather", shard.nbytes)
                with collectives.explained("all_gather"):
                    whole = handed_over(shard.new_empty(size * len(shard)))
                    collectives.all_gather_single(whole, shard, group=self._mesh.shard_process_group)
        else:
            self._add_sums({})

    # --- parameters ------------------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> None:
        """Gather the parameters, unless they are there."""
        group = self._group
        backward = group._training_state.name == "PRE_BACKWARD" and not getattr(group, "unshard_in_backward", True)
        if group.is_unsharded or group._all_gather_result is not None or backward:
            return
        if dist.get_world_size() > 1:
            collectives.requests.ask(self._number, GATHER)
            collectives.note("all_gather", sum(shard.nbytes for shard in self._shards()))
        with collectives.explained("all_gather"):
            self._unshard(async_op)

    def _shards(self) -> list[Tensor]:
        """Shards as torch gathers them: in the dtype of the mixed precision policy, as bytes if dtypes differ."""
        shards = [p._sharded_param_data.to(p.param_dtype or p.orig_dtype) for p in self._group.fsdp_params]
        if len({shard.dtype for shard in shards}) > 1:
            shards = [shard.view(torch.uint8) for shard in shards]
        return [shard.detach() for shard in shards]

    def visit(self) -> None:
        """Gather and release the parameters, which creates the whole parameters that graphs contain."""
        self._group.unshard()
        self._group.wait_for_unshard()
        self._group.reshard()

    def reshard(self) -> None:
        """Release the whole parameters, and gradients that were not summed."""
        self._group._to_sharded()
        self._discard_gradients()

    def _discard_gradients(self) -> None:
        for p in self._group.fsdp_params:
            _drop_gradient(p)

    # --- gradients -------------------------------------------------------------------------------------------------

    def post_backward(self, *unused: Any) -> None:
        """Called when a backward pass has left the modules of the group.

        In a pass of a step, gradients of other sharded models are discarded, such as those of a discriminator in the
        loss of its generator: reducing them would be a collective that was not requested.
        """
        # Set `requires_grad` of the shards to that of the whole parameters. torch copies it in the other direction when
        # it gathers them, so that a loss function that freezes a model during its forward pass would freeze it for
        # good.
        if self._group.is_unsharded:
            for p in self._group.fsdp_params:
                p.sharded_param.requires_grad_(p._unsharded_param.requires_grad)
        if ShardGroup.summed is None:
            return self._post_backward(*unused)
        reduces = self._group.reduce_grads
        self._group.reduce_grads = False
        try:
            self._post_backward(*unused)
        finally:
            self._group.reduce_grads = reduces
        if self in ShardGroup.summed:
            self.sum_gradients()
        else:
            self._discard_gradients()
        return None

    def sum_gradients(self) -> None:
        """Add the gradients of the whole parameters, summed over ranks, to `.grad` of the shards, if there are any."""
        if not any(_gradient(p) is not None for p in self._trained()):
            return
        if dist.get_world_size() > 1:
            collectives.requests.ask(self._number, REDUCE)
        taken: dict[int, Tensor] = {}
        for k, p in enumerate(self._trained()):
            gradient = _gradient(p)
            if gradient is not None:
                taken[k] = gradient.to_dense()
                self.reached.add(id(p))
            _drop_gradient(p)
        self._add_sums(taken)

    def _trained(self) -> list[Any]:
        return [p for p in self._group.fsdp_params if p.sharded_param.requires_grad]

    @torch.no_grad()
    def _add_sums(self, gradients: dict[int, Tensor]) -> None:
        """Reduce-scatter. `gradients`: of this rank, by position in `_trained()`; emptied to free them early."""
        params = self._trained()
        if not params:
            return  # frozen on all ranks since they committed themselves to this collective
        size = self._mesh.shard_mesh_size
        widths = [p.padded_sharded_param_size.numel() for p in params]
        dtype = params[0].reduce_dtype or params[0].param_dtype or params[0].orig_dtype
        table = torch.zeros(size, sum(widths), dtype=dtype, device=self._group.device)
        if gradients:
            rows = [_by_rank(gradients.pop(k, None), p, size) for k, p in enumerate(params)]
            torch._chunk_cat(rows, 0, size, out=table)
            del rows
        sums = self._reduced(table).to(params[0].orig_dtype)
        for p, part in zip(params, sums.split(widths), strict=True):
            _accumulate(p, part[: p.sharded_size.numel()].view(p.sharded_size))

    def _reduced(self, table: Tensor) -> Tensor:
        """This rank's row of the sum of the tables of all ranks."""
        mesh = self._mesh
        row = table[0]
        if mesh.shard_mesh_size > 1:
            collectives.note("reduce_scatter", table.nbytes)
            row = torch.empty_like(row)
            flat = handed_over(table.view(-1))
            with collectives.explained("reduce_scatter"):
                collectives.reduce_scatter_single(handed_over(row), flat, group=mesh.shard_process_group)
        if self.copies > 1:
            collectives.note("all_reduce", row.nbytes)
            with collectives.explained("all_reduce"):
                dist.all_reduce(handed_over(row), group=mesh.replicate_process_group)
        return row


def _gradient(p: Any) -> Tensor | None:
    """Gradient of a whole parameter that is not summed over ranks yet."""
    waiting: Tensor | None = p.unsharded_accumulated_grad
    return p._unsharded_param.grad if waiting is None else waiting


def _drop_gradient(p: Any) -> None:
    p._unsharded_param.grad = None
    if p.unsharded_accumulated_grad is not None:  # newer torch versions: the same tensor as `.grad`, and read-only
        p.unsharded_accumulated_grad = None


def _by_rank(gradient: Tensor | None, p: Any, size: int) -> Tensor:
    """Gradient with the shards of all ranks one after the other along dim 0; zeros if there is none."""
    if gradient is None:
        return torch.zeros_like(p._unsharded_param)
    dim = p.fsdp_placement.dim
    return gradient if dim == 0 else torch.cat(gradient.chunk(size, dim), 0)


def _accumulate(p: Any, part: Tensor) -> None:
    if p.sharded_param.grad is None:
        p.sharded_param.grad = p.to_sharded_dtensor(part)
    else:
        p.sharded_param.grad.to_local().add_(part)


@contextmanager
def summing(groups: Collection[ShardGroup]) -> Iterator[None]:
    """Context manager: the gradients of backward passes inside are summed over ranks, into `.grad` of the shards of
    these groups, as soon as a pass has left a module.
    """
    ShardGroup.summed = groups
    try:
        yield
        for group in groups:
            group.sum_gradients()  # those that arrived after the pass
    finally:
        ShardGroup.summed = None


def watch_hooks(states: Sequence[Any]) -> None:
    """Count the hooks that these FSDPStates register in forward passes: they do not change gradients."""
    for state in states:
        if not hasattr(state, "_samplewise"):
            state._samplewise = True
            state._register_pre_backward_hook = _counted(state._register_pre_backward_hook)


def _counted(register: Any) -> Any:
    def counted(output: Any) -> Any:
        before = RemovableHandle.next_id
        result = register(output)
        harmless_hooks.registered += RemovableHandle.next_id - before
        return result

    return counted
