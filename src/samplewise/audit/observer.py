"""Hooks of an audit, and the sequence of events that they see: calls, gradients of outputs, updates.

No function of torch is replaced, and no hook returns a value. A forward hook registers a hook on each output of a call
at top level; that hook gets the gradient of the loss with respect to the output when a backward pass begins. Hooks of
torch that are called before and after each step of every optimizer tell which passes the update consists of.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from threading import get_ident
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from samplewise.audit.accumulation import Accumulation, local_part
from samplewise.audit.reader import Losses, Reader
from samplewise.audit.records import (
    Call,
    OptimizerStep,
    Output,
    Pass,
    Site,
    Slot,
    number_ids,
    own_weights,
)
from samplewise.audit.weights import UnusableError, is_criterion
from samplewise.core import observation
from samplewise.core.batches import Path, located_leaves
from samplewise.core.modes import mixing_batch_norms, modules_in_eval_mode

SEARCHED = 64  # nodes of the graph of a loss
QUIET_STEPS = 3  # after so many, gradients are not measured any more, until the loop changes them again
PROBED = 3  # parameters whose gradients are compared before and after the loop has changed gradients
SUMMED = 8  # parameters whose values are compared, as long as no optimizer of torch was seen
FRAMES = 16  # of the stack, from a hook of an optimizer to a loss scaler
SCALER_METHODS = {torch.amp.GradScaler.step.__code__, torch.amp.GradScaler._maybe_opt_step.__code__}
LEAVES = 8  # tensors of an output whose gradients are read
TORCH = torch.__path__[0]
OWN = __file__.rpartition("audit")[0]


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
        self.other_threads = False  # modules were called in another thread
        self.calls_without_graph = 0  # in training mode
        self.repeated: dict[int, int] = {}  # step -> number of passes that differentiate the same loss of a batch
        self.eval_modules: dict[str, Site] = {}
        self.changed_between: list[int] = []  # passes after which gradients were changed by hand
        self.shapes: list[tuple[Site, str, tuple[int, ...], tuple[int, ...]]] = []  # of criteria that broadcast
        self.batch_norm: list[str] = []  # layers that normalize with statistics of the microbatch
        self.schedulers: list[Any] = []
        self.other_optimizers = 0  # steps of optimizers that have no parameter of the model
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
        self._last_child: tuple[nn.Module, Any] | None = None
        self._ranks: dict[int, int] = {}  # number of ranks whose gradients are averaged, of each model
        self._task = -1
        self._pass: Pass | None = None
        self._unused: list[Pass] = []  # passes since the last step that have reached no parameter
        self._stepping: Optimizer | None = None
        self._before_step: set[int] = set()
        self._written = False
        self._reader = Reader(losses)
        self._has_searched = False
        self._wrappers: list[nn.Module] = []
        self._scalers: list[Any] | None = None  # searched after the first gradient that was erased
        self._values: list[float] = []
        self._scale = 1.0  # loss scale of the update
        self._scaled_norms: tuple[float, float] | None = None
        self._replaced = False
        self._early: set[int] = set()
        self._quiet = 0  # steps since the loop has changed gradients between a pass and a step
        self._probed: list[int] = []
        self._probe: dict[int, Tensor] = {}
        self._factor: float | None = 1.0
        self._sites: dict[tuple[Any, int], Site] = {}
        self._handles: list[Any] = []

    # --- hooks -------------------------------------------------------------------------------------------------------

    def start(self) -> None:

        # In compiled code the hooks do nothing, and Dynamo leaves them out: the condition is a constant there.
        def before_call(module: nn.Module, args: Any) -> None:
            if not torch.compiler.is_compiling():
                self._before_call()

        def after_call(module: nn.Module, args: Any, *results: Any) -> None:
            if not torch.compiler.is_compiling():
                self._after_call(module, args, results)

        self._handles = [
            register_module_forward_pre_hook(before_call),
            register_module_forward_hook(after_call, with_kwargs=True, always_call=True),
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
        self._filter = warnings.filters[0]
        observation.observers.append(self)
        if self.model is not None:
            self.accumulation.watch_module(self.model)

    def stop(self) -> None:
        """Remove all hooks and read what is left."""
        for handle in self._handles:
            handle.remove()
            for name in ("_global_forward_hooks_with_kwargs", "_global_forward_hooks_always_called"):
                getattr(torch_module, name, {}).pop(handle.id, None)  # torch keeps these entries
        self._handles = []
        if self._filter in warnings.filters:
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]
        if self in observation.observers:
            observation.observers.remove(self)
        self._pass = None
        self._guarded(self._note_other_update)
        self._guarded(self._reader.read)
        self._scalers = None
        optimizers = set(map(id, self.optimizers))
        self.schedulers = [s for s in self.schedulers if id(s.optimizer) in optimizers]
        if self.model is not None and self.model._compiled_call_impl is not None:
            self.compiled = type(self.model).__name__

    def release(self) -> None:
        """Release models, parameters, optimizers and schedulers. Findings must be known."""
        self.model = None
        self.accumulation = Accumulation()
        self.optimizers = []
        self.schedulers = []
        self._wrappers = []
        self._modules = None
        self._last_child = None
        self._reader = Reader(None)
        self._unused = []
        self._stepping = None

    def _guarded(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function of the audit: its errors end the audit, not the training."""
        if self.failure is not None:
            return
        try:
            function(*args)
        except UnusableError as error:
            self.failure = str(error)
            self._reader.discard()
        except Exception as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            where = "" if trace is None else f" in {trace.tb_frame.f_code.co_name}, line {trace.tb_lineno}"
            message = str(error).partition("\n")[0]
            self.failure = f"{type(error).__name__}: {message}{where}"
            self._reader.discard()

    # --- forward calls -----------------------------------------------------------------------------------------------

    def _before_call(self) -> None:
        if get_ident() == self._thread:
            self._depth += 1

    def _after_call(self, module: nn.Module, args: Any, results: Sequence[Any]) -> None:
        """results: keyword arguments and output; fewer if the call has failed."""
        if get_ident() != self._thread:
            self.other_threads = True
            return
        self._depth = max(self._depth - 1, 0)
        if self._depth:
            if self._depth == 1 and len(results) == 2:
                self._last_child = module, results[1]
            return
        last = self._last_child
        self._last_child = None
        if len(results) < 2 or _task_id() >= 0 or observation.is_hidden():
            return
        if torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None:
            return  # inside of torch.func, or of torch.jit.trace
        self._guarded(self._record_call, module, args, *results, last)

    def _record_call(
        self, module: nn.Module, args: Any, kwargs: Any, output: Any, last: tuple[nn.Module, Any] | None
    ) -> None:
        """Register hooks on the outputs of a call at top level. last: the last module that it called, and its output"""
        if not torch.is_grad_enabled():
            self.calls_without_graph += module.training and self._is_audited(module)
            return
        if is_criterion(module):
            self._record_criterion(module, args, kwargs, output)
            return
        if not self._is_audited(module):
            return
        tensors = _attached(output)
        if not tensors:
            self.calls_without_graph += module.training
            return
        self.calls += 1
        is_new = id(module) not in self._models
        number = self._models.setdefault(id(module), len(self._models))
        if is_new and self.model is None and not is_sharded(module):  # FSDP has put other tensors in their place
            self.accumulation.watch_module(module)
        site = self._site(sys._getframe())
        samples = self._ids_of(args, kwargs)
        inputs = None if samples else self._inputs(args, kwargs)
        asleep = tuple(modules_in_eval_mode([module])) if is_new or not module.training else ()
        reads = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in (*args, *kwargs.values()))
        labels = self._labels_of(args, kwargs)
        known = None if inputs is None else (inputs, inputs._version)
        if is_new:
            self.batch_norm += [f"{type(module).__name__}.{name}" for name in mixing_batch_norms([module])]
            self._ranks[id(module)] = self._number_of_ranks(module)
        call = Call(site, module, self._ranks[id(module)], samples, known, labels, asleep, reads)
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
            self.calls_without_graph += 1
            return
        site = self._site(sys._getframe())
        slot = Slot(site, type(criterion).__name__)
        if prediction.dim() != target.dim() and prediction.numel() == target.numel() > 1:
            self.shapes.append((site, slot.name, tuple(prediction.shape), tuple(target.shape)))
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
            self._wrapped[id(module)] = any(inner is self.model for inner in module.modules())
        return self._wrapped[id(module)]

    def _inputs(self, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
        """Tensor (B, ...) by which samples are known: the first argument with rows."""
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
        return value.detach()

    def _ids_of(self, args: Any, kwargs: Mapping[str, Any]) -> list[int] | None:
        """Ids that the user has named."""
        if self._ids is None:
            return None
        ids = self._ids(args, kwargs) if callable(self._ids) else kwargs.get(self._ids)
        return None if ids is None else number_ids(ids)

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
        if not self._has_searched:
            self._search()
        self._note_other_update()
        self._early = self._look()
        number = len(self.passes)
        shown = observation.is_shown()
        self._pass = Pass(number, self._rates(), self._stepping is not None, shown)
        self._task = _task_id()
        # Called when the pass is over; queued once more then, behind the callbacks of DDP and FSDP.
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: engine.queue_callback(partial(self._guarded, self._end_pass)))

    def _end_pass(self) -> None:
        current = self._pass
        if current is None:
            return
        self._pass = None
        current.reached = self.accumulation.reached() | self._early
        self._probe = {} if self._quiet >= QUIET_STEPS else self._probe_norms(current.reached)
        if not current.reached:
            # torch.autograd.grad, as for a penalty on gradients; or FSDP, which adds up gradients elsewhere until they
            # are to be reduced.
            self._unused.append(current)
            return
        unused = self._unused
        self._unused = []
        for earlier in unused:
            if any(is_sharded(output.call.module) for output, _ in earlier.outputs):
                earlier.reached = current.reached
                self._append(earlier)
                self.accumulation.add(current.reached, earlier.number)
        self._append(current)
        self.accumulation.add(current.reached, current.number)

    def _append(self, current: Pass) -> None:
        current.number = len(self.passes)
        self.passes.append(current)
        for output, _ in current.outputs:
            for name in output.call.in_eval_mode:
                self.eval_modules.setdefault(name, output.slot.site)
            current.intended |= output.call.reads_input_gradients
        self._reader.add(current)
        self._values = self._parameter_values()

    def _look(self) -> set[int]:
        """Note gradients that were erased, or changed by hand, since the last pass or step. Returns parameters between
        the outputs and the loss, such as a learned temperature, which the pass that begins has reached already.
        """
        pending = {n for passes in set(self.accumulation.passes.values()) for n in passes}
        filled = {key for key, passes in self.accumulation.passes.items() if passes}
        change = self.accumulation.look()
        self._note_erased(change.reset)
        early = {key for key in change.changed if key not in filled}
        if len(change.changed & filled) < len(filled):
            early |= change.changed
        still = {n for key in filled - early for n in self.accumulation.passes[key]}
        for key in early:
            if not still & set(self.accumulation.passes[key]):  # erased with the others, and filled again
                self.accumulation.passes[key] = ()
        waiting = [n for n in pending - change.reset if not self.passes[n].updates]
        if waiting and change.changed - early:
            self.changed_between.append(max(waiting))
        return early

    def _note_erased(self, numbers: Iterable[int]) -> None:
        lost = [number for number in numbers if not self.passes[number].updates]
        skipped = bool(lost) and self._stepping is None and self._scaler_has_skipped()
        for number in lost:
            self.passes[number].erased = True
            self.passes[number].skipped = skipped

    def _scaler_has_skipped(self) -> bool:
        """True if a loss scaler has just reduced its scale, after gradients that were not finite."""
        if self._scalers is None:
            self._scalers = _living_objects(torch.amp.GradScaler)[torch.amp.GradScaler]
        used = [s for s in self._scalers if s.is_enabled() and s._scale is not None]
        return any(s._get_growth_tracker() == 0 for s in used)

    def _search(self) -> None:
        """Find schedulers, DDP wrappers and optimizers. Torch keeps no list of them."""
        self._has_searched = True
        wrapper = nn.parallel.DistributedDataParallel
        living = _living_objects(LRScheduler, wrapper, Optimizer)
        self.schedulers = living[LRScheduler]
        self._wrappers = living[wrapper]
        if self.model is None:
            for optimizer in living[Optimizer]:
                self._watch_optimizer(optimizer)

    def _rates(self) -> tuple[float, ...]:
        return tuple(float(group["lr"]) for optimizer in self.optimizers for group in optimizer.param_groups)

    def _number_of_ranks(self, module: nn.Module) -> int:
        """Number of ranks whose gradients are averaged: those of a DDP or FSDP wrapper around the module."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return 1
        if not self._has_searched:
            self._search()
        is_wrapped = any(module is wrapper or module is wrapper.module for wrapper in self._wrappers)
        if isinstance(module, nn.parallel.DistributedDataParallel) or is_sharded(module) or is_wrapped:
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
        self._quiet = 0 if change.changed else self._quiet + 1
        self._factor = self._factor_since_pass() if change.changed else 1.0
        self._replaced = change.replaced
        self._scaled_norms = None
        self._scale, is_unscaled = _loss_scale(optimizer)
        if is_unscaled and self._factor:
            self._factor *= self._scale
            norm = self._norm(self.accumulation.parameters)
            self._scaled_norms = (norm / self._factor, norm)

    def _probe_norms(self, keys: Iterable[int]) -> dict[int, Tensor]:
        """Norms of some small gradients, which tell whether all gradients are scaled before the update."""
        parameters = self.accumulation.parameters
        if not self._probed:
            self._probed = sorted(keys, key=lambda key: parameters[key].numel())[:PROBED]
        gradients = {key: parameters[key].grad for key in self._probed}
        dense = {key: g for key, g in gradients.items() if g is not None and g.layout is torch.strided}
        tensors = {key: local_part(gradient) for key, gradient in dense.items()}
        return dict(zip(tensors, torch._foreach_norm(list(tensors.values())), strict=True)) if tensors else {}

    def _factor_since_pass(self) -> float | None:
        """Factor by which all gradients were multiplied since the last pass, as by clipping; None if there is none."""
        after = self._probe_norms(())
        pairs = [(float(self._probe[key]), float(norm)) for key, norm in after.items() if key in self._probe]
        factors = [second / first for first, second in pairs if first > 0]
        if not factors or max(factors) - min(factors) > 1e-3 * max(factors):
            return None
        return sum(factors) / len(factors)

    def _is_relevant(self, optimizer: Optimizer) -> bool:
        if any(optimizer is known for known in self.optimizers):
            return True
        if self.model is not None and not _parameters(optimizer) & self.accumulation.parameters.keys():
            self.other_optimizers += 1
            return False
        if self.model is None:
            self._watch_optimizer(optimizer, as_cleared=True)
        self.optimizers.append(optimizer)
        return True

    def _watch_optimizer(self, optimizer: Optimizer, as_cleared: bool = False) -> None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        named = ((f"parameter {k} of the optimizer", p) for k, p in enumerate(parameters))
        self.accumulation.watch(named, as_cleared)

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._stepping is optimizer:
            self._guarded(self._end_step, optimizer)
            self._stepping = None
            if self.on_update is not None and self._handles:
                self.on_update(len(self.steps))

    def _end_step(self, optimizer: Optimizer) -> None:
        keys = _parameters(optimizer)
        numbers = self.accumulation.passes_of(keys) or self._before_step
        is_unknown = False
        if self._written and self._unused:
            # Gradients that were computed by torch.autograd.grad and written by hand. The first pass of each call.
            is_unknown = not all(unused.shown for unused in self._unused)
            calls: set[int] = set()
            for unused in self._unused:
                own = {id(output.call) for output, _ in unused.outputs}
                if own <= calls:
                    if not unused.shown and _is_repeated(unused, self._unused[0]):
                        self.repeated.setdefault(len(self.steps), 1)
                        self.repeated[len(self.steps)] += 1
                    continue
                calls |= own
                unused.reached = keys
                self._append(unused)
                numbers = numbers | {unused.number}
            self._written = False
        self._unused = []
        number = next(k for k, known in enumerate(self.optimizers) if known is optimizer)
        rates = tuple(float(group["lr"]) for group in optimizer.param_groups)
        self._record_step(numbers, number, rates, keys, is_unknown)
        self._values = self._parameter_values()

    def _record_step(
        self, numbers: Iterable[int], optimizer: int, rates: tuple[float, ...], keys: set[int], is_unknown: bool = False
    ) -> None:
        ordered = sorted(numbers)
        step = len(self.steps)
        stale = [n for n in ordered if any(self.steps[u].optimizer == optimizer for u in self.passes[n].updates)]
        for n in ordered:
            self.passes[n].updates.append(step)
        norm = self._norm(keys) if self._norms else None
        site = self._site(sys._getframe())
        self.steps.append(
            OptimizerStep(
                step,
                optimizer,
                site,
                ordered,
                stale,
                rates,
                self._written,
                is_unknown,
                self._replaced,
                self._factor,
                self._scale,
                norm,
                self._scaled_norms,
            )
        )

    def _norm(self, keys: Iterable[int]) -> float:
        """Norm of the gradients of these parameters; of sharded ones, of the part on this rank."""
        parameters = self.accumulation.parameters
        with_gradient = (parameters[key] for key in keys if key in parameters)
        gradients = [local_part(p.grad) for p in with_gradient if p.grad is not None]
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
            current = Pass(len(self.passes), (), False)
            current.weights = [own_weights(Slot(site, "losses"), values, float(divisor))]
            current.weights[0].microbatch = current.number
            current.sites = {site}
            current.updates = [last.number]
            self.passes.append(current)
            passes.append(current.number)
        last.passes = passes

    def _note_other_update(self) -> None:
        """Record an update by an optimizer that is not one of torch: parameters have changed since the last pass."""
        if self.optimizers or not self._values or self._values == self._parameter_values():
            return
        new = [p for p in self.passes if not p.updates]
        self._written = False
        self._factor = 1.0
        self._scale = 1.0
        # Gradients that were erased before have been added up elsewhere, and divided by a number that is not known.
        is_unknown = any(p.erased for p in new)
        self._record_step([p.number for p in new], -1, (), set(self.accumulation.parameters), is_unknown)
        self._values = self._parameter_values()

    def _parameter_values(self) -> list[float]:
        """Versions of all parameters, and sums of squares of small ones: changes through .data have no version. Empty if the
        optimizer is known.
        """
        if self.optimizers:
            return []
        parameters = list(self.accumulation.parameters.values())
        small = sorted(map(local_part, parameters), key=lambda p: p.numel())
        # FSDP frees the storage of parameters that it has gathered.
        readable = [p for p in small if p.untyped_storage().nbytes() >= p.nbytes][:SUMMED]
        return [*(p._version for p in parameters), *(float(p.detach().square().sum()) for p in readable)]


def _attached(output: Any) -> list[tuple[Path, Tensor]]:
    """Tensors of an output that have a graph, with their paths. One tensor may have two names: the first one."""
    if isinstance(output, Tensor):
        return [((), output)] if output.requires_grad else []
    tensors: dict[int, tuple[Path, Tensor]] = {}
    for path, leaf in located_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_floating_point():
            tensors.setdefault(id(leaf), (path, leaf))
    return list(tensors.values())


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


def _is_repeated(current: Pass, first: Pass) -> bool:
    """True if two passes have the same gradients at outputs with several rows: that of a whole batch, twice."""
    pairs = zip(current.outputs, first.outputs, strict=False)
    return bool(current.outputs) and all(
        a.z.dim() > 0 and g.shape == h.shape and bool((g.flatten(1).any(1)).sum() > 1) and torch.equal(g, h)
        for (a, g), (_, h) in pairs
    )


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _loss_scale(optimizer: Optimizer) -> tuple[float, bool]:
    """Loss scale of the scaler that calls optimizer.step(), and whether it has unscaled the gradients; 1 without one.
    Torch keeps no list of scalers: the one whose method is running is found on the stack.
    """
    frame: FrameType | None = sys._getframe()
    for _ in range(FRAMES):
        frame = None if frame is None else frame.f_back
        if frame is not None and frame.f_code in SCALER_METHODS:
            scale = float(frame.f_locals["self"].get_scale())
            return scale, getattr(optimizer, "grad_scale", None) is None
    return 1.0, False


def _living_objects(*bases: type) -> dict[type, list[Any]]:
    """Objects of these classes in the process."""
    objects: dict[type, list[Any]] = {base: [] for base in bases}
    base_of: dict[type, type | None] = {}  # of each class, because there are many objects and few classes
    for thing in gc.get_objects():
        kind = type(thing)
        if kind not in base_of:
            base_of[kind] = next((base for base in bases if issubclass(kind, base)), None)
        base = base_of[kind]
        if base is not None:
            objects[base].append(thing)
    return objects


def _task_id() -> int:
    """Number of the backward pass that this thread is in; -1 outside of one."""
    return torch._C._current_graph_task_id()
