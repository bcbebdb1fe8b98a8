"""Growth of a model during a stream: layers with further columns or classes, and compilation that waits for the end of
growth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.errors import ParameterError
from samplewise.step.compiled.runner import CompiledRunner, EagerRunner
from samplewise.step.step import Step

Undo = Callable[[], None]


class GrowingLayers:
    """First and last layer of a model, if they are nn.Linear; None otherwise. A layer is the first or the last one by
    the order in which modules with parameters were assigned to the model. If the model calls its layers in another
    order, the shapes of the grown layers do not match: the update raises, and the growth is undone.
    """

    def __init__(self, model: nn.Module, optimizer: Any):
        layers = [module for module in model.modules() if module._parameters]
        self.first = _as_linear(layers[0]) if layers else None
        self.last = _as_linear(layers[-1]) if layers else None
        self.takes_indices = bool(layers) and isinstance(layers[0], (nn.Embedding, nn.EmbeddingBag))
        self._optimizer = optimizer

    @property
    def sizes(self) -> list[int]:
        """Inputs of the first layer and outputs of the last one, for a state."""
        return [
            0 if self.first is None else self.first.in_features,
            0 if self.last is None else self.last.out_features,
        ]

    def load_sizes(self, sizes: Sequence[int]) -> None:
        """Give both layers the sizes of a state."""
        if self.first is not None and sizes[0] != self.first.in_features:
            self.resize_inputs(sizes[0])
        if self.last is not None and sizes[1] != self.last.out_features:
            self.resize_outputs(sizes[1])

    def resize_inputs(self, columns: int) -> Undo:
        """Give the first layer this number of inputs; new columns are zero. Returns a function that undoes it."""
        assert self.first is not None
        return resize(self.first, self._optimizer, columns, self.first.out_features)

    def resize_outputs(self, outputs: int) -> Undo:
        """Give the last layer this number of outputs; new weights are zero. Returns a function that undoes it."""
        assert self.last is not None
        return resize(self.last, self._optimizer, self.last.in_features, outputs)


def _as_linear(layer: nn.Module) -> nn.Linear | None:
    """The layer if it is an nn.Linear with ordinary parameters: not lazy, and not the result of a parametrization."""
    return layer if type(layer) is nn.Linear and isinstance(layer._parameters.get("weight"), nn.Parameter) else None


def resize(layer: nn.Linear, optimizer: Any, inputs: int, outputs: int) -> Undo:
    """Change the sizes of a layer, and of its tensors in the optimizer's state. New entries are zero.

    The Parameter objects stay, because the optimizer and the step refer to them; their data are replaced.
    """
    weight, bias = layer.weight, layer.bias
    shapes = {weight: (outputs, inputs)} | ({} if bias is None else {bias: (outputs,)})
    states: Mapping[Tensor, dict[str, Any]] = {p: getattr(optimizer, "state", {}).get(p, {}) for p in shapes}
    sizes = layer.in_features, layer.out_features
    before = [(p, p.data, state, dict(state)) for p, state in states.items()]
    after = []
    for p, state in states.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != p.shape:
                raise ParameterError(
                    "a layer can only grow if each tensor in the optimizer's state has the shape of its parameter or "
                    f"is a scalar; found {name!r} of shape {tuple(value.shape)}. Use SGD, Adam or AdamW, or a model "
                    "with enough inputs and outputs from the beginning."
                )
        tensors = {name: v for name, v in state.items() if isinstance(v, Tensor) and v.shape == p.shape}
        padded = {name: _padded(v, shapes[p]) for name, v in tensors.items()}
        after.append((p, _padded(p, shapes[p]), state, padded))

    def write(sizes: tuple[int, int], entries: Sequence[tuple[Tensor, Tensor, dict[str, Any], dict[str, Any]]]) -> None:
        layer.in_features, layer.out_features = sizes
        for p, data, state, values in entries:
            p.grad = None
            _replace(p, data)
            state.update(values)

    write((inputs, outputs), after)
    return lambda: write(sizes, before)


def _replace(p: Tensor, data: Tensor) -> None:
    """Replace the data of a parameter by data of another shape, also if an earlier graph is still alive.

    A traceback, a hook or a reference cycle can keep a graph. Autograd then uses its node of the parameter again, which
    expects gradients of the earlier shape. It discards the node if the assigned data have another dtype.
    """
    p.data = data.new_empty(0, dtype=torch.float32 if data.dtype == torch.float16 else torch.float16)
    p.data = data


def _padded(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Copy of a tensor with another shape: cut, or filled with zeros."""
    new = tensor.detach().new_zeros(shape)
    common = tuple(slice(0, min(old, size)) for old, size in zip(tensor.shape, shape, strict=True))
    new[common] = tensor.detach()[common]
    return new


# --- compilation -----------------------------------------------------------------------------------------------------


class CompileDelay:
    """Delay of compilation while layers grow. `updates`: number of uncompiled updates that remain; 0: no delay.

    Compiled code is bound to the memory of the parameters, so that growth makes it invalid. Compiling takes as long as
    thousands of uncompiled updates. It is therefore repeated only after STABLE updates without growth, and after twice
    as many each further time: the time for compiling stays a bounded share of any stream. The program cache of a step
    gives up after 8 changes; a new one is made here.
    """

    STABLE = 1000

    def __init__(self, step: Step):
        self._step = step
        self.updates = 0
        self.delays = 0
        self._compiles = isinstance(step._runner, CompiledRunner)

    def begin(self) -> Undo:
        """Make updates without compiled code, because a layer has grown. Returns a function that undoes it."""
        step = self._step
        before = step._runner, step._windows.compiled_sums, self.updates, self.delays

        def undo() -> None:
            step._runner, step._windows.compiled_sums, self.updates, self.delays = before

        if self._compiles:
            self.delays += not self.updates
            self.updates = self.STABLE << (self.delays - 1)
            self._make_eager()
        return undo

    def count(self) -> bool:
        """Count an update of the delay. Returns True at its end, when the step has a new program cache."""
        self.updates -= 1
        if not self.updates:
            self._step._runner = self._step._make_runner()
        return not self.updates

    def _make_eager(self) -> None:
        step = self._step
        step._windows.compiled_sums = None
        reason = f"not compiled: layers have grown; compiled after {self.updates} updates without growth"
        step._runner = EagerRunner(step._windows, step._applier, reason)

    def state_dict(self) -> dict[str, int]:
        return {"updates": self.updates, "delays": self.delays}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the delay. Call it before `step.load_state_dict`, which sets the state of the program cache."""
        self.updates = state["updates"]
        self.delays = state["delays"]
        if self._compiles and self.updates:
            self._make_eager()
        elif self._compiles:
            self._step._runner = self._step._make_runner()
