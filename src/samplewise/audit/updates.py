"""Backward passes, and the updates that their gradients are applied in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from samplewise.audit.accumulation import Accumulation, local_part
from samplewise.audit.calls import calling_site, is_sharded
from samplewise.audit.reader import Reader
from samplewise.audit.records import OptimizerStep, Output, Pass, Site, Slot, living_objects, own_weights
from samplewise.core import observation

QUIET_STEPS = 3  # steps after which gradients are not measured, until the loop changes them between pass and step
PROBED = 3  # parameters whose gradients are compared before and after the loop has changed gradients
SUMMED = 8  # parameters whose values are compared, as long as no optimizer of torch was seen
FRAMES = 16  # of the stack, from a hook of an optimizer to a loss scaler
SCALER_METHODS = {torch.amp.GradScaler.step.__code__, torch.amp.GradScaler._maybe_opt_step.__code__}


class Updates:
    """Records backward passes that come to an observed output, and steps of optimizers.

    model: only its parameters are observed; None: those of all models that are called
    reader: reads the weights of passes
    norms: record the norm of each update's gradient
    """

    def __init__(self, model: nn.Module | None, reader: Reader, norms: bool):
        self.passes: list[Pass] = []
        self.steps: list[OptimizerStep] = []
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[Any] = []
        self.accumulation = Accumulation()
        self.other_optimizers = 0  # steps of optimizers that have no parameter of the model
        self.repeated: dict[int, int] = {}  # step -> number of passes that differentiate the same loss of a batch
        self.changed_between: list[int] = []  # passes after which gradients were changed by hand
        self.eval_modules: dict[str, Site] = {}
        self._all_models = model is None
        self._reader = reader
        self._norms = norms
        self._pass: Pass | None = None
        self._task = -1  # number of the backward pass in autograd
        self._early: set[int] = set()  # parameters that the pass has reached before it came to an output
        self._unused: list[Pass] = []  # passes since the last step that have reached no parameter
        self._step: OptimizerStep | None = None  # while optimizer.step() runs
        self._before_step: set[int] = set()
        self._quiet = 0  # steps since the loop has changed gradients between a pass and a step
        self._probed: list[int] = []
        self._probe: dict[int, Tensor] = {}
        self._values: list[float] = []
        self._has_searched = False
        self._scalers: list[Any] | None = None  # searched after the first gradient that was erased
        if model is not None:
            self.accumulation.watch(model.named_parameters())

    def watch(self, module: nn.Module) -> None:
        """Observe the parameters of a model that was called."""
        if self._all_models and not is_sharded(module):  # FSDP has put other tensors in their place
            self.accumulation.watch(module.named_parameters())

    def end(self) -> None:
        """Complete the records when the loop has ended."""
        self._pass = None
        self._note_other_update()
        optimizers = set(map(id, self.optimizers))
        self.schedulers = [s for s in self.schedulers if id(s.optimizer) in optimizers]

    def release(self) -> None:
        """Release parameters, optimizers and schedulers."""
        self.accumulation = Accumulation()
        self.optimizers = []
        self.schedulers = []
        self._unused = []
        self._scalers = None

    # --- backward passes ---------------------------------------------------------------------------------------------

    def on_gradient(self, output: Output, g: Tensor, guarded: Callable[..., None]) -> None:
        """Record the gradient of the loss with respect to an output. `guarded` calls a function at the end of the
        backward pass.
        """
        if self._pass is None or self._task != torch._C._current_graph_task_id():
            self._begin_pass(guarded)
        assert self._pass is not None
        self._pass.outputs.append((output, g.detach()))
        self._pass.sites.add(output.slot.site)

    def _begin_pass(self, guarded: Callable[..., None]) -> None:
        """A backward pass has come to its first output: nothing was accumulated yet."""
        if not self._has_searched:
            # Find schedulers and optimizers. Torch keeps no list of them.
            self._has_searched = True
            living = living_objects(LRScheduler, Optimizer)
            self.schedulers = living[LRScheduler]
            if self._all_models:
                for optimizer in living[Optimizer]:
                    self._watch_optimizer(optimizer)
        self._note_other_update()
        self._early = self._look()
        self._pass = Pass(len(self.passes), self._rates(), self._step is not None, observation.is_shown())
        self._task = torch._C._current_graph_task_id()
        # Called when the pass is over; queued once more then, behind the callbacks of DDP and FSDP.
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: engine.queue_callback(partial(guarded, self._end_pass)))

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
        filled = self.accumulation.filled()
        change = self.accumulation.look()
        self._note_erased(change.reset)
        if not change.changed:
            return set()
        passes = self.accumulation.passes
        by_hand = change.changed & filled
        if len(by_hand) < len(filled):  # not by hand, which would change all of them
            by_hand = set()
        early = change.changed - by_hand
        still = {n for key in filled - early for n in passes[key]}
        for key in early:
            if not still & set(passes[key]):  # erased with the others, and filled again
                passes[key] = ()
        waiting = [n for key in by_hand for n in passes[key] if not self.passes[n].updates]
        if waiting:
            self.changed_between.append(max(waiting))
        return early

    def _note_erased(self, numbers: Iterable[int]) -> None:
        lost = [number for number in numbers if not self.passes[number].updates]
        skipped = bool(lost) and self._step is None and self._scaler_has_skipped()
        for number in lost:
            self.passes[number].erased = True
            self.passes[number].skipped = skipped

    def _scaler_has_skipped(self) -> bool:
        """True if a loss scaler has just reduced its scale, after gradients that were not finite."""
        if self._scalers is None:
            self._scalers = living_objects(torch.amp.GradScaler)[torch.amp.GradScaler]
        used = [s for s in self._scalers if s.is_enabled() and s._scale is not None]
        return any(s._get_growth_tracker() == 0 for s in used)

    def _rates(self) -> tuple[float, ...]:
        return tuple(float(group["lr"]) for optimizer in self.optimizers for group in optimizer.param_groups)

    # --- updates -----------------------------------------------------------------------------------------------------

    def begin_step(self, optimizer: Optimizer) -> None:
        """An optimizer begins its step."""
        if not self._is_relevant(optimizer):
            return
        change = self.accumulation.look()
        self._note_erased(change.reset)
        keys = _parameters(optimizer)
        self._step = step = OptimizerStep(len(self.steps), self.optimizers.index(optimizer))
        step.written = any(not self.accumulation.passes[key] for key in change.changed & keys)
        step.replaced = change.replaced
        step.factor = self._factor_since_pass() if change.changed else 1.0
        step.scale, is_unscaled = _loss_scale(optimizer)
        if is_unscaled and step.factor:
            step.factor *= step.scale
            norm = self._norm(self.accumulation.parameters)
            step.scaled_norms = (norm / step.factor, norm)
        self._quiet = 0 if change.changed else self._quiet + 1
        self._before_step = self.accumulation.passes_of(keys)

    def end_step(self, optimizer: Optimizer) -> bool:
        """The step of an optimizer is over. True if it is an update of observed parameters."""
        step = self._step
        self._step = None
        if step is None:
            return False
        keys = _parameters(optimizer)
        numbers = self.accumulation.passes_of(keys) or self._before_step
        if step.written and self._unused:
            numbers |= self._use_written_gradients(step, keys)
        self._unused = []
        step.rates = tuple(float(group["lr"]) for group in optimizer.param_groups)
        self._append_step(step, numbers, keys)
        return True

    def _use_written_gradients(self, step: OptimizerStep, keys: set[int]) -> set[int]:
        """Numbers of the passes of torch.autograd.grad whose gradients were written by hand: the first of each call."""
        step.written = False
        step.is_unknown = not all(unused.shown for unused in self._unused)
        calls: set[int] = set()
        numbers = set()
        for unused in self._unused:
            calls_of_pass = {id(output.call) for output, _ in unused.outputs}
            if calls_of_pass <= calls:
                if not unused.shown and _is_repeated(unused, self._unused[0]):
                    self.repeated[step.number] = self.repeated.get(step.number, 1) + 1
                continue
            calls |= calls_of_pass
            unused.reached = keys
            self._append(unused)
            numbers.add(unused.number)
        return numbers

    def _append_step(self, step: OptimizerStep, numbers: Iterable[int], keys: Iterable[int]) -> None:
        step.passes = sorted(numbers)
        for n in step.passes:
            earlier = self.passes[n].updates
            if any(self.steps[u].optimizer == step.optimizer for u in earlier):
                step.stale.append(n)
            earlier.append(step.number)
        if self._norms:
            step.norm = self._norm(keys)
        step.site = calling_site(sys._getframe())
        self.steps.append(step)
        self._values = self._parameter_values()

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
        if any(optimizer is candidate for candidate in self.optimizers):
            return True
        if not self._all_models and not _parameters(optimizer) & self.accumulation.parameters.keys():
            self.other_optimizers += 1
            return False
        if self._all_models:
            self._watch_optimizer(optimizer, as_cleared=True)
        self.optimizers.append(optimizer)
        return True

    def _watch_optimizer(self, optimizer: Optimizer, as_cleared: bool = False) -> None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        named = ((f"parameter {k} of the optimizer", p) for k, p in enumerate(parameters))
        self.accumulation.watch(named, as_cleared)

    def _norm(self, keys: Iterable[int]) -> float:
        """Norm of the gradients of these parameters; of sharded ones, of the part on this rank."""
        parameters = self.accumulation.parameters
        with_gradient = (parameters[key] for key in keys if key in parameters)
        gradients = [local_part(p.grad) for p in with_gradient if p.grad is not None]
        return float(nn.utils.get_total_norm(gradients)) if gradients else 0.0

    def add_own_step(self, optimizer: Any, counts: Sequence[Tensor], divisor: float) -> None:
        """Record an update of `sw.Step`, whose weights are known, before transforms."""
        if isinstance(optimizer, Optimizer) and not self._is_relevant(optimizer):
            return
        if not self.steps or not self.steps[-1].written or self.steps[-1].passes:  # the optimizer is none of torch
            self._append_step(OptimizerStep(len(self.steps), 0, written=True), (), ())
        step = self.steps[-1]
        for values in counts:
            current = Pass(len(self.passes), (), False)
            current.weights = [own_weights(Slot(step.site, "losses"), values, divisor, current.number)]
            current.sites = {step.site}
            current.updates = [step.number]
            self.passes.append(current)
            step.passes.append(current.number)

    def _note_other_update(self) -> None:
        """Record an update by an optimizer that is not one of torch: parameters have changed since the last pass."""
        if self.optimizers or not self._values or self._values == self._parameter_values():
            return
        new = [p for p in self.passes if not p.updates]
        step = OptimizerStep(len(self.steps), -1)
        # Gradients that were erased before have been added up elsewhere, and divided by a number that is not known.
        step.is_unknown = any(p.erased for p in new)
        self._append_step(step, [p.number for p in new], self.accumulation.parameters)

    def _parameter_values(self) -> list[float]:
        """Versions of all parameters, and sums of squares of small ones: changes through .data have no version. Empty
        if the optimizer is known.
        """
        if self.optimizers:
            return []
        parameters = list(self.accumulation.parameters.values())
        small = sorted(map(local_part, parameters), key=lambda p: p.numel())
        # FSDP frees the storage of parameters that it has gathered.
        readable = [p for p in small if p.untyped_storage().nbytes() >= p.nbytes][:SUMMED]
        return [*(p._version for p in parameters), *(float(p.detach().square().sum()) for p in readable)]


def _is_repeated(current: Pass, first: Pass) -> bool:
    """True if two passes have the same gradients at outputs with several rows: that of a whole batch, twice."""
    with_rows = [(g, h) for (a, g), (_, h) in zip(current.outputs, first.outputs, strict=False) if a.z.dim()]
    return bool(with_rows) and all(
        g.shape == h.shape and bool(g.flatten(1).any(1).sum() > 1) and torch.equal(g, h) for g, h in with_rows
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
