"""Hooks of an audit, and the sequence of events that they see: calls, gradients of outputs, updates.

No function of torch is replaced, and no hook returns a value. A forward hook registers a hook on each output of a call
at top level; that hook gets the gradient of the loss with respect to the output when a backward pass begins. Hooks of
torch that are called before and after each step of every optimizer tell which passes the update consists of.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from threading import get_ident
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from samplewise.audit import weights as reading
from samplewise.audit.accumulation import Accumulation
from samplewise.audit.records import (
    SHARES,
    Call,
    OptimizerStep,
    Output,
    Pass,
    Site,
    Slot,
    fingerprints,
    own_weights,
    row_weights,
)
from samplewise.core import observation
from samplewise.core.batches import located_leaves
from samplewise.core.modes import modules_in_eval_mode

LEAVES = 8  # tensors of an output whose gradients are read
DEFERRED_PASSES = 64  # small outputs are read together
DEFERRED_BYTES = 1 << 20
TORCH = torch.__path__[0]
OWN = __file__.rpartition("audit")[0]

Losses = Callable[[Tensor, Any], Tensor]


class Observer:
    """Records what a training loop does, from `start` to `stop`.

    model: only calls of this model or of its modules are recorded; None: calls of all models
    losses: function (outputs, labels) -> losses, for losses that are not known
    labels: name of the argument of the model that holds the labels, or function (args, kwargs) -> labels
    ids: name of the argument of the model that holds the samples' ids, or function (args, kwargs) -> ids (B,)
    norms: record the norm of each update's gradient
    """

    def __init__(self, model: nn.Module | None, losses: Losses | None, labels: Any, ids: Any, norms: bool):
        self.model = model
        self.accumulation = Accumulation()
        self.passes: list[Pass] = []
        self.steps: list[OptimizerStep] = []
        self.optimizers: list[Optimizer] = []
        self.calls = 0
        self.calls_without_graph = 0  # in training mode
        self.eval_modules: dict[str, Site] = {}
        self.changed_between: list[tuple[int, Site | None]] = []  # passes after which gradients were changed by hand
        self.shapes: list[tuple[Site, str, tuple[int, ...], tuple[int, ...]]] = []  # of criteria that broadcast
        self.schedulers: list[Any] = []
        self.averages_ranks = False  # a DDP or FSDP wrapper averages gradients over ranks
        self.failure: str | None = None
        self.compiled: str | None = None
        self.on_update: Callable[[int], None] | None = None
        self._losses = losses
        self._labels = labels
        self._ids = ids
        self._norms = norms
        self._modules = None if model is None else set(map(id, model.modules()))
        self._wrapped: dict[int, bool] = {}
        self._models: dict[int, int] = {}  # number of each model, in the order of the first calls
        self._thread = get_ident()
        self._depth = 0
        self._task = -1
        self._pass: Pass | None = None
        self._unused: list[Pass] = []  # passes since the last step that have reached no parameter
        self._stepping: Optimizer | None = None
        self._before_step: set[int] = set()
        self._written = False
        self._unread: list[Pass] = []
        self._unread_bytes = 0
        self._kinds: dict[Slot, str] = {}
        self._factors: dict[int, Tensor] = {}
        self._scalers: list[Any] | None = None
        self._wrappers: list[nn.Module] = []
        self._versions: list[int] = []
        self._scaled_norm: tuple[float, float] | None = None  # after the last pass, and its loss scale
        self._scaled_norms: tuple[float, float, float] | None = None
        self._sites: dict[tuple[Any, int], Site] = {}
        self._handles: list[Any] = []

    # --- hooks -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._handles = [
            register_module_forward_pre_hook(self._before_call),
            register_module_forward_hook(self._after_call, with_kwargs=True, always_call=True),
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        observation.observers.append(self)
        if self.model is not None:
            self.accumulation.watch_module(self.model)

    def stop(self) -> None:
        """Remove all hooks and read what is left."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self in observation.observers:
            observation.observers.remove(self)
        self._pass = None
        self._guarded(self._note_other_update)
        self._guarded(self._read)
        optimizers = set(map(id, self.optimizers))
        self.schedulers = [s for s in self.schedulers if id(s.optimizer) in optimizers]

    def _guarded(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function of the audit: its errors end the audit, not the training."""
        if self.failure is not None:
            return
        try:
            function(*args)
        except Exception as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            where = "" if trace is None else f" in {trace.tb_frame.f_code.co_name}, line {trace.tb_lineno}"
            self.failure = f"{type(error).__name__}: {error}{where}"
            self._unread = []

    # --- forward calls -----------------------------------------------------------------------------------------------

    def _before_call(self, module: nn.Module, inputs: Any) -> None:
        if get_ident() == self._thread:
            self._depth += 1

    def _after_call(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if get_ident() != self._thread:
            return
        self._depth = max(self._depth - 1, 0)
        ignored = self._depth or output is None or torch.compiler.is_compiling() or _task_id() >= 0
        if ignored or observation.is_hidden():
            return
        self._guarded(self._record_call, module, args, kwargs, output)

    def _record_call(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Register hooks on the outputs of a call at top level."""
        if not torch.is_grad_enabled():
            self.calls_without_graph += module.training and self._is_audited(module)
            return
        if reading.is_criterion(module):
            self._record_criterion(module, args, kwargs, output)
            return
        if not self._is_audited(module):
            return
        tensors = [
            (path, leaf)
            for path, leaf in located_leaves(output)
            if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_floating_point()
        ]
        if not tensors:
            self.calls_without_graph += module.training
            return
        self.calls += 1
        is_new = id(module) not in self._models
        number = self._models.setdefault(id(module), len(self._models))
        if is_new and self.model is None:
            self.accumulation.watch_module(module)
        site = self._site(sys._getframe())
        samples = self._samples(args, kwargs)
        call = Call(site, module, module.training, samples, self._ranks(module), self._labels_of(args, kwargs))
        if is_new or not module.training:
            for name in modules_in_eval_mode([module]):
                self.eval_modules.setdefault(name, site)
        # A scalar, such as a loss that the model computes, is read only if there is nothing else.
        chosen = [(path, z) for path, z in tensors if z.dim()] or tensors
        for path, z in chosen[:LEAVES]:
            slot = Slot(site, ".".join(map(str, path)), number)
            z.register_hook(partial(self._on_gradient, Output(call, slot, z.detach(), z._version)))

    def _record_criterion(self, criterion: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Register a hook on the value of a criterion of torch.nn."""
        names = ("input", "target")
        prediction, target = (args[k] if len(args) > k else kwargs.get(name) for k, name in enumerate(names))
        if not (isinstance(prediction, Tensor) and isinstance(target, Tensor) and isinstance(output, Tensor)):
            return
        if not output.requires_grad:
            self.calls_without_graph += 1
            return
        site = self._site(sys._getframe())
        slot = Slot(site, type(criterion).__name__)
        if prediction.dim() != target.dim() and prediction.numel() == target.numel() > 1:
            self.shapes.append((site, slot.name, tuple(prediction.shape), tuple(target.shape)))
        call = Call(site, criterion, True, None, 0)
        hook = partial(
            self._on_gradient,
            Output(call, slot, output.detach(), output._version, criterion, prediction.detach(), target),
        )
        output.register_hook(hook)

    def _is_audited(self, module: nn.Module) -> bool:
        """True for the audited model, a module of it, a wrapper around it, or any model with trained parameters."""
        if self._modules is None:
            return id(module) in self._models or any(p.requires_grad for p in module.parameters())
        if id(module) in self._modules:
            return True
        if id(module) not in self._wrapped:
            self._wrapped[id(module)] = any(inner is self.model for inner in module.modules())
        return self._wrapped[id(module)]

    def _samples(self, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
        if callable(self._ids):
            return torch.as_tensor(self._ids(args, kwargs)).flatten()
        if self._ids is not None and self._ids in kwargs:
            return torch.as_tensor(kwargs[self._ids]).flatten()
        tensors = [kwargs.get("input_ids"), *args, *kwargs.values()]
        value = next((v for v in tensors if isinstance(v, Tensor) and v.dim()), None)
        if value is None:
            leaves = (leaf for arg in (*args, *kwargs.values()) for _, leaf in located_leaves(arg))
            value = next((v for v in leaves if isinstance(v, Tensor) and v.dim()), None)
        if value is None:
            return None
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == value.shape and not value.is_floating_point():
            value = (value + 1) * mask  # padding has no influence, whatever its token
        return fingerprints(value, self._factors)

    def _labels_of(self, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if self._losses is None:
            return None
        if callable(self._labels):
            return self._labels(args, kwargs)
        return kwargs.get(self._labels or "labels", args[1] if len(args) > 1 else None)

    def _site(self, frame: FrameType | None) -> Site:
        """The line that made the call: the first frame outside of torch and of the audit."""
        while frame is not None and frame.f_back is not None:
            name = frame.f_code.co_filename
            if not name.startswith(TORCH) and not name.startswith(OWN):
                break
            frame = frame.f_back
        if frame is None:
            return Site("?", 0)
        key = (frame.f_code, frame.f_lasti)
        if key not in self._sites:
            self._sites[key] = Site(frame.f_code.co_filename, frame.f_lineno, frame.f_lasti)
        return self._sites[key]

    # --- backward passes ---------------------------------------------------------------------------------------------

    def _on_gradient(self, output: Output, g: Tensor) -> None:
        # After the audit, the tensor may be alive.
        if not self._handles or self.failure is not None or observation.is_hidden():
            return
        self._guarded(self._record_gradient, output, g)

    def _record_gradient(self, output: Output, g: Tensor) -> None:
        if self._pass is None or self._task != _task_id():
            self._begin_pass()
        assert self._pass is not None
        self._pass.outputs.append((output, g.detach()))
        self._pass.sites.add(output.slot.site)

    def _begin_pass(self) -> None:
        """A backward pass has come to its first output: nothing was accumulated yet."""
        if self._scalers is None:
            self._search()
        self._note_other_update()
        self._look()
        number = len(self.passes)
        self._pass = Pass(number, self._scale(), self._rates(), self._stepping is not None)
        self._task = _task_id()
        # Called when the pass is over; queued once more then, behind the callbacks of DDP and FSDP.
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: engine.queue_callback(partial(self._guarded, self._end_pass)))

    def _end_pass(self) -> None:
        current = self._pass
        if current is None:
            return
        self._pass = None
        current.reached = self.accumulation.add(current.number)
        self._scaled_norm = None if current.scale == 1 else (self._norm(self.accumulation.parameters), current.scale)
        if not current.reached:
            self._unused.append(current)  # torch.autograd.grad, as for a penalty on gradients
            return
        self._unused = []
        self._append(current)

    def _append(self, current: Pass) -> None:
        current.number = len(self.passes)
        self.passes.append(current)
        self._unread.append(current)
        self._unread_bytes += sum(z.z.nbytes + g.nbytes for z, g in current.outputs)
        if len(self._unread) >= DEFERRED_PASSES or self._unread_bytes > DEFERRED_BYTES:
            self._read()
        self._versions = self._parameter_versions()

    def _look(self) -> None:
        """Note gradients that were erased, or changed by hand, since the last pass or step."""
        pending = {n for passes in set(self.accumulation.passes.values()) for n in passes}
        change = self.accumulation.look()
        self._note_erased(change.reset)
        waiting = [n for n in pending - change.reset if not self.passes[n].updates]
        if waiting and any(self.accumulation.passes[key] for key in change.changed):
            self.changed_between.append((max(waiting), None))

    def _note_erased(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.passes[number].erased |= not self.passes[number].updates

    def _search(self) -> None:
        """Find loss scalers, schedulers and DDP wrappers. Torch keeps no list of them."""
        self._scalers = []
        lists: dict[type, list[Any]] = {
            torch.amp.GradScaler: self._scalers,
            LRScheduler: self.schedulers,
            nn.parallel.DistributedDataParallel: self._wrappers,
        }
        list_of: dict[type, list[Any] | None] = {}  # of each class, because there are many objects and few classes
        for thing in gc.get_objects():
            kind = type(thing)
            if kind not in list_of:
                list_of[kind] = next((found for base, found in lists.items() if issubclass(kind, base)), None)
            found = list_of[kind]
            if found is not None:
                found.append(thing)

    def _scale(self) -> float:
        """Loss scale of this pass; 1 without a scaler."""
        scales = {s.get_scale() for s in self._scalers or () if s.is_enabled() and s._scale is not None}
        return float(scales.pop()) if len(scales) == 1 else 1.0

    def _rates(self) -> tuple[float, ...]:
        return tuple(float(group["lr"]) for optimizer in self.optimizers for group in optimizer.param_groups)

    def _ranks(self, module: nn.Module) -> int:
        """Number of ranks whose gradients are averaged: those of a DDP or FSDP wrapper around the module."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return 1
        if self._scalers is None:
            self._search()
        is_sharded = any(
            "FSDP" in cls.__name__ or "FullyShardedDataParallel" in cls.__name__ for cls in type(module).__mro__
        )
        is_wrapped = any(module is wrapper or module is wrapper.module for wrapper in self._wrappers)
        if isinstance(module, nn.parallel.DistributedDataParallel) or is_sharded or is_wrapped:
            self.averages_ranks = True
            return dist.get_world_size()
        return 1

    # --- updates -----------------------------------------------------------------------------------------------------

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._guarded(self._begin_step, optimizer)

    def _begin_step(self, optimizer: Optimizer) -> None:
        if not self._is_relevant(optimizer):
            return
        self._stepping = optimizer
        change = self.accumulation.look()
        self._note_erased(change.reset)
        keys = _parameters(optimizer)
        self._written = any(not self.accumulation.passes[key] for key in change.changed & keys)
        self._before_step = self.accumulation.passes_of(keys)
        self._scaled_norms = None
        if self._scaled_norm is not None:
            before, scale = self._scaled_norm
            self._scaled_norms = (before, self._norm(self.accumulation.parameters), scale)

    def _is_relevant(self, optimizer: Optimizer) -> bool:
        if any(optimizer is known for known in self.optimizers):
            return True
        if self.model is not None and not _parameters(optimizer) & self.accumulation.parameters.keys():
            return False
        if self.model is None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            named = ((f"parameter {k} of the optimizer", p) for k, p in enumerate(parameters))
            self.accumulation.watch(named, as_cleared=True)
        self.optimizers.append(optimizer)
        return True

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._stepping is optimizer:
            self._guarded(self._end_step, optimizer)
            self._stepping = None
            if self.on_update is not None and self._handles:
                self.on_update(len(self.steps))

    def _end_step(self, optimizer: Optimizer) -> None:
        keys = _parameters(optimizer)
        numbers = self.accumulation.passes_of(keys) or self._before_step
        if self._written and self._unused:
            for unused in self._unused:  # gradients that were computed by torch.autograd.grad and written by hand
                unused.reached = keys
                self._append(unused)
                numbers = numbers | {unused.number}
            self._written = False
        self._unused = []
        number = next(k for k, known in enumerate(self.optimizers) if known is optimizer)
        self._record_step(numbers, number, tuple(float(group["lr"]) for group in optimizer.param_groups), keys)
        self.accumulation.look()  # changes by the optimizer itself
        self._versions = self._parameter_versions()

    def _record_step(self, numbers: Iterable[int], optimizer: int, rates: tuple[float, ...], keys: set[int]) -> None:
        ordered = sorted(numbers)
        step = len(self.steps)
        stale = [n for n in ordered if any(self.steps[u].optimizer == optimizer for u in self.passes[n].updates)]
        for n in ordered:
            self.passes[n].updates.append(step)
        norm = self._norm(keys) if self._norms else None
        site = self._site(sys._getframe())
        self.steps.append(
            OptimizerStep(step, optimizer, site, ordered, stale, rates, self._written, norm, self._scaled_norms)
        )

    def _norm(self, keys: Iterable[int]) -> float:
        """Norm of the gradients of these parameters."""
        parameters = self.accumulation.parameters
        gradients = [p.grad for p in (parameters[key] for key in keys if key in parameters) if p.grad is not None]
        return float(nn.utils.get_total_norm(gradients)) if gradients else 0.0

    def on_step(self, optimizer: Any, counts: Sequence[Tensor], divisor: Tensor | float, ranks: bool) -> None:
        self._guarded(self._record_own_step, optimizer, counts, divisor, ranks)

    def _record_own_step(self, optimizer: Any, counts: Sequence[Tensor], divisor: Tensor | float, ranks: bool) -> None:
        """Record an update of `sw.Step`, whose weights are known, before transforms."""
        if isinstance(optimizer, Optimizer) and not self._is_relevant(optimizer):
            return
        self.averages_ranks |= ranks
        site = self._site(sys._getframe())
        last = self.steps[-1] if self.steps else None
        if last is None or not last.written or last.passes:  # compiled updates do not call the optimizer
            self._written = True
            self._record_step((), 0, (), set())
            last = self.steps[-1]
        passes = []
        for values in counts:
            current = Pass(len(self.passes), 1.0, (), False)
            current.weights = [own_weights(Slot(site, "losses"), values, float(divisor))]
            current.sites = {site}
            current.updates = [last.number]
            self.passes.append(current)
            passes.append(current.number)
        last.passes = passes

    def _note_other_update(self) -> None:
        """Record an update by an optimizer that is not one of torch: parameters have changed since the last pass."""
        if self.optimizers or not self._versions or self._versions == self._parameter_versions():
            return
        numbers = {n for passes in set(self.accumulation.passes.values()) for n in passes}
        self._written = False
        self._record_step(numbers, -1, (), set(self.accumulation.parameters))
        self._versions = self._parameter_versions()

    def _parameter_versions(self) -> list[int]:
        if self.optimizers:
            return []
        return [p._version for p in self.accumulation.parameters.values()]

    # --- weights -----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Read the weights of the passes since the last time."""
        unread = self._unread
        self._unread = []
        self._unread_bytes = 0
        for current in unread:
            if any(output.criterion is not None for output, _ in current.outputs):
                # A criterion of torch.nn is closer to the loss than outputs of models.
                samples = [output.call for output, _ in current.outputs if output.criterion is None]
                current.outputs = [(output, g) for output, g in current.outputs if output.criterion is not None]
                for output, _ in current.outputs:
                    self._take_samples(output.call, samples)
        self._choose_kinds(unread)
        for current in unread:
            self._read_pass(current)

    def _take_samples(self, criterion: Call, calls: list[Call]) -> None:
        """Give a criterion the samples and ranks of the call whose output it got."""
        criterion.ranks = max((call.ranks for call in calls), default=1)
        known = [call.samples for call in calls if call.samples is not None]
        criterion.samples = known[0] if known else None

    def _choose_kinds(self, passes: Iterable[Pass]) -> None:
        """Find out the kind of the loss of each new slot, from all passes together: one row alone may not tell."""
        together: dict[Slot, list[tuple[Tensor, Tensor]]] = {}
        for current in passes:
            for output, g in current.outputs:
                is_known = output.slot in self._kinds or output.criterion is not None or self._losses is not None
                if not is_known and output.z.dim() and output.z._version == output.version:
                    together.setdefault(output.slot, []).append((output.z, g / current.scale))
        for slot, pairs in together.items():
            shape = pairs[0][0].shape[1:]
            same = [(z, g) for z, g in pairs if z.shape[1:] == shape][:DEFERRED_PASSES]
            kind = reading.kind_of(torch.cat([z for z, _ in same]), torch.cat([g for _, g in same]))
            kind = kind or next((kind for z, g in pairs if (kind := reading.kind_of(z, g))), None)
            if kind is not None:
                self._kinds[slot] = kind

    def _read_pass(self, current: Pass) -> None:
        calls = [output.call for output, _ in current.outputs if output.call.samples is not None]
        current.samples = calls[-1].samples.tolist() if calls else []  # type: ignore[union-attr]
        for output, g in current.outputs:
            current.finite = current.finite and bool(g.isfinite().all() & output.z.isfinite().all())
        known = []
        for output, g in current.outputs:
            kind, targets = self._targets(output, g / current.scale)
            if targets is not None and current.finite:
                known.append(row_weights(output.slot, kind, output.call, targets))
        if not known and current.outputs and current.finite:  # the last output is the one closest to the loss
            output, g = next((pair for pair in reversed(current.outputs) if pair[0].z.dim()), current.outputs[-1])
            if output.z.dim():
                current.comparison = reading.compared_with_mean(output.z, g)
                known = [row_weights(output.slot, SHARES, output.call, reading.shares(output.z, g))]
        current.weights = known
        current.outputs = []

    def _targets(self, output: Output, g: Tensor) -> tuple[str, reading.Targets | None]:
        """Kind of the loss and weights of an output; None if they cannot be read."""
        if output.criterion is not None:
            assert output.prediction is not None and output.target is not None
            targets = reading.criterion_targets(output.criterion, output.prediction, output.target, g)
            return type(output.criterion).__name__, targets
        if not output.z.dim() or output.z._version != output.version:
            return "", None
        if self._losses is not None:
            targets = reading.losses_targets(self._losses, output.z, g, output.call.labels)
            return "losses=", targets if float(targets.error) < 10 * targets.tolerance else None
        kind = self._kinds.get(output.slot)
        if kind is None:
            return "", None
        targets = reading.KINDS[kind](output.z, g)
        single = kind == "binary cross entropy" or output.z.shape[-1] == 2  # one row alone cannot be tested
        is_exact = single or float(targets.error) <= 5 * targets.tolerance
        return kind, targets if is_exact else None


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _task_id() -> int:
    """Number of the backward pass that this thread is in; -1 outside of one."""
    return torch._C._current_graph_task_id()
