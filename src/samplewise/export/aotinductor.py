"""AOTInductor packages (.pt2): models update, predict and initial_state for C++ programs with libtorch.

The state is a list of tensors that the caller holds: the last arguments of update, which changes them in place, and of
predict. It needs no methods get_state and set_state.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.errors import ExportError
from samplewise.export.graph import Memory, Method, UpdateProgram, metadata, register_buffers
from samplewise.step.compiled import inductor
from samplewise.step.compiled.decompositions import DECOMPOSITIONS

STATE_METHODS = ("initial_state",)


def require() -> None:
    """Raise ExportError unless there is a C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        raise ExportError("a .pt2 file needs a C++ compiler, such as g++; found none.") from error


def decompositions() -> Mapping[Any, Any]:
    """Decompositions that compiled updates use."""
    return inductor.compiler_decompositions(DECOMPOSITIONS)


def write(program: UpdateProgram, path: Path) -> tuple[Memory, list[str]]:
    """Write the package; return its memory. It needs no operators besides libtorch."""
    from torch._inductor.package.package import package_aoti

    state = tuple(t.clone() for t in program.state.values())
    modules: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
        "update": (StatefulMethod(program, program.update), (*program.update.inputs.values(), *state)),
        "initial_state": (InitialState(program), ()),
    }
    if program.predict is not None:
        modules["predict"] = (
            StatefulMethod(program, program.predict),
            (*program.predict.inputs.values(), *state),
        )
    settings = {"aot_inductor.package": True, "aot_inductor.metadata": {"samplewise": metadata(program)}}
    files: dict[str, Any] = {}
    with torch.no_grad():
        for name, (module, inputs) in modules.items():
            exported = torch.export.export(module, inputs, strict=False)
            files[name] = torch._inductor.aot_compile(exported.module(), inputs, options=settings)
    package_aoti(str(path), files)
    memory = Memory(
        constant=sum(t.nbytes for t in program.constants.values()),
        mutable=sum(t.nbytes for t in state),
        scratch=None,
    )
    return memory, []


class StatefulMethod(nn.Module):
    """Method whose last arguments are the state, which is changed in place if the method returns a new one."""

    def __init__(self, program: UpdateProgram, method: Method):
        super().__init__()
        self.method = method
        self.count = len(method.inputs)
        self.constants = register_buffers(self, "constant", program.constants)

    def forward(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        inputs = arguments[: self.count]
        state = arguments[self.count :]
        results = self.method(state, [getattr(self, name) for name in self.constants], *inputs)
        outputs = len(self.method.outputs)
        for tensor, new in zip(state, results[outputs:], strict=False):
            tensor.copy_(new)
        return tuple(results[:outputs])


class InitialState(nn.Module):
    """The state at the export, in the order of the arguments of update."""

    def __init__(self, program: UpdateProgram):
        super().__init__()
        self.names = register_buffers(self, "state", program.state)

    def forward(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name).clone() for name in self.names)
