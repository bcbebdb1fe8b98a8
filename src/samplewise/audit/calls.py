"""Forward calls at top level: hooks on their outputs, which get the gradient of the loss."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import get_ident
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from samplewise.audit.reader import Losses
from samplewise.audit.records import UNKNOWN_SITE, Call, Output, Site, Slot, living_objects, number_ids
from samplewise.audit.weights import UnusableError, is_criterion
from samplewise.core import observation
from samplewise.core.batches import Path, located_leaves
from samplewise.core.memory import is_plain
from samplewise.core.modes import mixing_batch_norms, modules_in_eval_mode

LEAVES = 8  # tensors of an output whose gradients are read
SEARCHED = 64  # nodes of the graph of a loss
TORCH = torch.__path__[0]
OWN = __file__.rpartition("audit")[0]


class Calls:
    """Records calls of models and of criteria of torch.nn.

    model: only calls of this model or of its modules are recorded; None: calls of all models
    losses: the user knows the losses, from outputs and labels
    labels: name of the argument of the model that holds the labels, or function (args, kwargs) -> labels
    ids: name of the argument of the model that holds the samples' ids, or function (args, kwargs) -> ids (B,)
    on_gradient: called with each output and the gradient of the loss with respect to it
    on_model: called with each new model
    """

    def __init__(
        self,
        model: nn.Module | None,
        losses: Losses | None,
        labels: Any,
        ids: Any,
        on_gradient: Callable[[Output, Tensor], None],
        on_model: Callable[[nn.Module], None],
    ):
        self.number = 0
        self.without_graph = 0  # in training mode
        self.in_other_threads = False
        self.broadcasts: list[tuple[Site, str, int]] = []  # criteria that got predictions (B, 1) and targets (B,)
        self.batch_norm: list[str] = []  # layers that normalize with statistics of the microbatch
        self.averages_ranks = False  # a DDP or FSDP wrapper averages gradients over ranks
        self._model = model
        self._losses = losses
        self._labels = labels
        self._ids = ids
        self._on_gradient = on_gradient
        self._on_model = on_model
        self._modules = None if model is None else set(map(id, model.modules()))
        self._wrapped: dict[int, bool] = {}
        self._models: dict[int, int] = {}  # number of each model, in the order of the first calls
        self._ranks: dict[int, int] = {}  # number of ranks whose gradients are averaged, of each model
        self._thread = get_ident()
        self._depth = 0
        self._last_child: tuple[nn.Module, Any] | None = None

    def release(self) -> None:
        self._model = None
        self._last_child = None

    def before(self) -> None:
        if get_ident() == self._thread:
            self._depth += 1

    def after(
        self, module: nn.Module, args: Any, results: Sequence[Any]
    ) -> tuple[nn.Module, Any, Any, Any, Any] | None:
        """Return the arguments of `record` if a call at top level is over, and None otherwise. results: keyword
        arguments and output; fewer if the call has failed.
        """
        if get_ident() != self._thread:
            self.in_other_threads = True
            return None
        self._depth = max(self._depth - 1, 0)
        if self._depth:
            if self._depth == 1 and len(results) == 2:
                self._last_child = module, results[1]
            return None
        last = self._last_child
        self._last_child = None
        if len(results) < 2 or torch._C._current_graph_task_id() >= 0 or observation.is_hidden():
            return None  # the call has failed, is repeated in a backward pass, or is one of the engine
        if torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None:
            return None  # inside of torch.func, or of torch.jit.trace
        return module, args, results[0], results[1], last

    def record(
        self, module: nn.Module, args: Any, kwargs: Any, output: Any, last: tuple[nn.Module, Any] | None
    ) -> None:
        """Register hooks on the outputs of a call at top level. last: the last module that it called, and its output"""
        if not torch.is_grad_enabled():
            self.without_graph += module.training and self._is_audited(module)
            return
        if is_criterion(module):
            self._record_criterion(module, args, kwargs, output)
            return
        if not self._is_audited(module):
            return
        tensors = _attached(output)
        if not tensors:
            self.without_graph += module.training
            return
        self.number += 1
        is_new = id(module) not in self._models
        number = self._models.setdefault(id(module), len(self._models))
        if is_new:
            self._on_model(module)
        site = calling_site(sys._getframe())
        samples = self._ids_of(args, kwargs)
        inputs = None if samples else self._inputs(args, kwargs)
        asleep = tuple(modules_in_eval_mode([module])) if is_new or not module.training else ()
        reads = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in (*args, *kwargs.values()))
        labels = self._labels_of(args, kwargs)
        versioned_inputs = None if inputs is None else (inputs, inputs._version)
        if is_new:
            self.batch_norm += [f"{type(module).__name__}.{name}" for name in mixing_batch_norms([module])]
            self._ranks[id(module)] = self._number_of_ranks(module)
        call = Call(site, module, self._ranks[id(module)], samples, versioned_inputs, labels, asleep, reads)
        has_loss = False
        for path, z in tensors[:LEAVES]:
            self._watch_output(Output(call, Slot(site, ".".join(map(str, path)), number), z.detach(), z._version), z)
            node = None if z.dim() or self._losses is not None else _fused_log_probabilities(z)
            if node is not None:
                slot = Slot(site, "log probabilities", number)
                inner = Output(call, slot, z.detach(), z._version, is_log_prob=True)
                node.register_prehook(lambda grads, inner=inner: self._on_gradient(inner, grads[0]))
            has_loss = has_loss or not z.dim()
        if has_loss and last is not None:
            # The loss of the model may be computed from other tensors than those that it returns, such as those before
            # a conversion to float32: then they are those of its last module.
            child, value = last
            for path, z in _attached(value)[:LEAVES]:
                slot = Slot(site, ".".join((type(child).__name__, *map(str, path))), number)
                self._watch_output(Output(call, slot, z.detach(), z._version, is_inner=True), z)

    def _watch_output(self, output: Output, z: Tensor) -> None:
        hook = partial(self._on_gradient, output)
        hook.__torch_unserializable__ = True  # type: ignore[attr-defined]  # torch.save leaves it out
        z.register_hook(hook)

    def _record_criterion(self, criterion: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Register a hook on the value of a criterion of torch.nn."""
        names = ("input", "target")
        prediction, target = (args[k] if len(args) > k else kwargs.get(name) for k, name in enumerate(names))
        if not (isinstance(prediction, Tensor) and isinstance(target, Tensor) and isinstance(output, Tensor)):
            return
        if not output.requires_grad:
            self.without_graph += 1
            return
        site = calling_site(sys._getframe())
        slot = Slot(site, type(criterion).__name__)
        if prediction.dim() != target.dim() and prediction.numel() == target.numel() > 1:
            self.broadcasts.append((site, slot.name, target.numel()))
        call = Call(site, criterion, 0)
        value = Output(call, slot, output.detach(), output._version, criterion, prediction.detach(), target)
        self._watch_output(value, output)

    def _is_audited(self, module: nn.Module) -> bool:
        """True for the audited model, a module of it, a wrapper around it, or any model with trained parameters."""
        if self._modules is None:
            return id(module) in self._models or any(p.requires_grad for p in module.parameters())
        if id(module) in self._modules:
            return True
        if id(module) not in self._wrapped:
            self._wrapped[id(module)] = any(inner is self._model for inner in module.modules())
        return self._wrapped[id(module)]

    def _inputs(self, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
        """Tensor (B, ...) by which samples are known: the first argument with rows."""
        value = next(filter(_has_rows, [kwargs.get("input_ids"), *args, *kwargs.values()]), None)
        if value is None:
            leaves = (leaf for arg in (*args, *kwargs.values()) for _, leaf in located_leaves(arg))
            value = next(filter(_has_rows, leaves), None)
        if value is None:
            return None
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == value.shape and not value.is_floating_point():
            value = (value + 1) * mask  # padding has no influence, whatever its token
        return value.detach()

    def _ids_of(self, args: Any, kwargs: Mapping[str, Any]) -> list[int] | None:
        """Ids that the user has named."""
        if self._ids is None:
            return None
        if not callable(self._ids) and self._ids not in kwargs:
            raise UnusableError(
                f"ids= must name an argument of the model; found {self._ids!r}, and the arguments "
                f"{', '.join(kwargs) or 'have no names'}"
            )
        return number_ids(self._ids(args, kwargs) if callable(self._ids) else kwargs[self._ids])

    def _labels_of(self, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if self._losses is None:
            return None
        if callable(self._labels):
            return self._labels(args, kwargs)
        return kwargs.get(self._labels or "labels", args[1] if len(args) > 1 else None)

    def _number_of_ranks(self, module: nn.Module) -> int:
        """Number of ranks whose gradients are averaged: those of a DDP or FSDP wrapper around the module."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return 1
        wrappers = living_objects(DistributedDataParallel)[DistributedDataParallel]
        if is_sharded(module) or any(module is wrapper or module is wrapper.module for wrapper in wrappers):
            self.averages_ranks = True
            return dist.get_world_size()
        return 1


def calling_site(frame: FrameType | None) -> Site:
    """The line that made the call: the first frame outside of torch and of this package."""
    while frame is not None and frame.f_code.co_filename.startswith((TORCH, OWN)):
        frame = frame.f_back
    return UNKNOWN_SITE if frame is None else Site(frame.f_code.co_filename, frame.f_lineno, frame.f_lasti)


def _attached(output: Any) -> list[tuple[Path, Tensor]]:
    """Tensors of an output that have a graph, with their paths. One tensor may have two names: the first one."""
    if isinstance(output, Tensor):
        return [((), output)] if _is_readable(output) else []
    tensors: dict[int, tuple[Path, Tensor]] = {}
    for path, leaf in located_leaves(output):
        if isinstance(leaf, Tensor) and _is_readable(leaf):
            tensors.setdefault(id(leaf), (path, leaf))
    return list(tensors.values())


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.numel() > 0 and is_plain(value)


def _is_readable(z: Tensor) -> bool:
    """True for an ordinary tensor of real numbers that has a graph."""
    return z.requires_grad and z.is_floating_point() and is_plain(z) and z.numel() > 0


def _fused_log_probabilities(loss: Tensor) -> Any:
    """Node in the graph of a loss that returns the log probabilities of the labels, as the head of TRL that is fused
    with the loss does; None if there is none among the nodes next to the loss.
    """
    nodes = [loss.grad_fn]
    for node in nodes:
        if node is None or len(nodes) > SEARCHED:
            continue
        if "ChunkedLogProb" in node.name():
            return node
        nodes += [child for child, _ in node.next_functions]
    return None


def is_sharded(module: nn.Module) -> bool:
    return bool({cls.__name__ for cls in type(module).__mro__} & {"FSDPModule", "FullyShardedDataParallel"})
