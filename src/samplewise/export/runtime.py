"""Exported updates, loaded in Python: to test a file, or to continue a state that a device has sent back."""

from __future__ import annotations

import json
import logging
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samplewise.errors import ExportError


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Ignore warnings of exporters and runtimes, and of their imports, which also log the kernels for GPUs that they do
    not find.
    """
    threshold = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(max(threshold, logging.WARNING))
        try:
            yield
        finally:
            logging.disable(threshold)


class UpdateResult(NamedTuple):
    """Results of one update: of each sample its loss, the norm of its gradient, and its weight."""

    loss: Tensor
    norm: Tensor
    weight: Tensor


class LoadedUpdate(ABC):
    """An exported update with its state: `update`, `predict`, `get_state` and `set_state`."""

    def __init__(self, facts: dict[str, Any]):
        self.names: list[str] = facts["state"]
        self.inputs: list[str] = facts["inputs"]
        self._predicts = facts["predict"] is not None
        self._lr = facts["lr"]

    def update(self, *batch: Tensor, lr: float | Tensor | None = None) -> UpdateResult:
        """Make one update. lr: None (default): the learning rate at the export."""
        if len(batch) != len(self.inputs) - 1:
            names = ", ".join(self.inputs[:-1])
            raise TypeError(f"update must have the tensors {names}; found {len(batch)}.")
        rate = torch.as_tensor(self._lr if lr is None else lr, dtype=torch.float32)
        return UpdateResult(*self._call("update", [*(t.contiguous() for t in batch), rate]))

    def predict(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Outputs of the model in eval mode."""
        if not self._predicts:
            raise ExportError("the file must have a method predict; found that it was exported with predict=False.")
        outputs = self._call("predict", [t.contiguous() for t in inputs])
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def get_state(self) -> dict[str, Tensor]:
        """Copies of parameters, optimizer state and step counts, by name."""
        return dict(zip(self.names, self._call("get_state", []), strict=True))

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """Replace the state by one that `get_state` has returned."""
        if set(state) != set(self.names):
            difference = sorted(set(state) ^ set(self.names))
            raise ExportError(f"state must have the names of get_state(); found a difference in {difference[:3]}.")
        for name, tensor in self.get_state().items():
            if state[name].shape != tensor.shape or state[name].dtype != tensor.dtype:
                raise ExportError(
                    f"{name} must be {tensor.dtype} of shape {tuple(tensor.shape)}; found {state[name].dtype} of shape "
                    f"{tuple(state[name].shape)}."
                )
        self._call("set_state", [state[name].detach().clone() for name in self.names])

    @abstractmethod
    def _call(self, method: str, inputs: list[Tensor]) -> list[Tensor]:
        """Call update, predict, get_state or set_state of the file."""


class ExecuTorchUpdate(LoadedUpdate):
    """Update in a .pte file."""

    def __init__(self, path: Path):
        with quiet_imports():
            from executorch.runtime import Runtime

        program = Runtime.get().load_program(path)
        # All methods are loaded before the first call; `update` initializes the state that they share.
        self._methods: Any = {name: program.load_method(name) for name in sorted(program.method_names, reverse=True)}
        super().__init__(json.loads(bytes(self._call("metadata", [])[0].tolist())))

    def _call(self, method: str, inputs: list[Tensor]) -> list[Tensor]:
        return list(self._methods[method].execute(tuple(inputs)))


class AOTInductorUpdate(LoadedUpdate):
    """Update in a .pt2 file, which has no methods get_state and set_state: the state is here."""

    def __init__(self, path: Path):
        with quiet_imports():
            from torch._inductor.package.package import load_package

        def load(name: str) -> Any:
            return load_package(str(path), model_name=name)

        self._methods = {"update": load("update")}
        super().__init__(json.loads(self._methods["update"].get_metadata()["samplewise"]))
        if self._predicts:
            self._methods["predict"] = load("predict")
        self._state: list[Tensor] = list(load("initial_state")())

    def _call(self, method: str, inputs: list[Tensor]) -> list[Tensor]:
        if method == "get_state":
            return [tensor.clone() for tensor in self._state]
        if method == "set_state":
            self._state = inputs
            return []
        return list(self._methods[method](*inputs, *self._state))


def load_update(path: str | os.PathLike[str]) -> LoadedUpdate:
    """Load a file of `sw.export_update`; the state is that of the export."""
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"path must be a file that sw.export_update has written; found {str(path)!r}.")
    kinds: dict[str, type[ExecuTorchUpdate] | type[AOTInductorUpdate]] = {
        ".pte": ExecuTorchUpdate,
        ".pt2": AOTInductorUpdate,
    }
    if file.suffix not in kinds:
        raise ValueError(f"path must end in .pte or .pt2; found {str(path)!r}.")
    return kinds[file.suffix](file)
