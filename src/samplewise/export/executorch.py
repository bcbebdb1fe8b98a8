"""ExecuTorch programs (.pte): methods update, predict, get_state and set_state that share mutable buffers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from samplewise.export.decompositions import decompositions as decompositions
from samplewise.export.graph import Memory, Method, UpdateProgram, metadata, register_buffers
from samplewise.export.simplify import simplify
from samplewise.step.compiled import CannotCompile

STATE_METHODS = ("get_state", "set_state")
ACTIVATIONS, SHARED = 1, 2  # memory arenas of ExecuTorch: intermediate results, and buffers that methods share


def require() -> None:
    """Raise ImportError, with the command that installs it, unless executorch can be imported.

    Its kernels are compiled for certain versions of torch: with other ones, importing executorch.runtime fails.
    """
    try:
        import executorch.exir
        import executorch.runtime  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"a .pte file needs executorch: pip install 'samplewise[export]', in a version that is made for torch "
            f"{torch.__version__} (found: {error})"
        ) from None


def write(program: UpdateProgram, path: Path) -> tuple[Memory, list[str]]:
    """Write the program to a file; return its memory and the operators that it needs."""
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge
    from executorch.exir.passes import MemoryPlanningPass

    simplify(program.update.graph, scaled_sums=True)
    modules: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
        "update": (StatefulMethod(program, program.update), tuple(program.update.inputs.values())),
        "get_state": (GetState(program), ()),
        "set_state": (SetState(program), tuple(t.clone() for t in program.state.values())),
    }
    if program.predict is not None:
        modules["predict"] = (StatefulMethod(program, program.predict), tuple(program.predict.inputs.values()))
    with torch.no_grad():
        exported = {name: torch.export.export(module, args, strict=False) for name, (module, args) in modules.items()}
        facts = torch.tensor(list(metadata(program).encode()), dtype=torch.uint8)
        edge = to_edge(
            exported,
            constant_methods={"metadata": facts},
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
        # Without their initial values, the buffers of a loaded program are uninitialized memory. If several methods had
        # them, loading one of them after an update would reset the state.
        for node in edge.exported_program("update").graph.find_nodes(op="placeholder"):
            node.meta["et_init_buffer"] = node.name.startswith("b_state_")
        planning = MemoryPlanningPass(share_mutable_buffers=True)
        result = edge.to_executorch(ExecutorchBackendConfig(memory_planning_pass=planning))
    path.write_bytes(result.buffer)
    plans = result.executorch_program.execution_plan
    sizes = [[*plan.non_const_buffer_sizes, 0, 0] for plan in plans]
    mutable = sum(t.nbytes for t in program.state.values())
    memory = Memory(
        constant=sum(t.nbytes for t in program.constants.values()),
        mutable=max(size[SHARED] for size in sizes) or mutable,
        scratch=max(size[ACTIVATIONS] for size in sizes),
    )
    operators = sorted({f"{op.name}.{op.overload}".rstrip(".") for plan in plans for op in plan.operators})
    _check_kernels(operators)
    return memory, operators


def _check_kernels(operators: Sequence[str]) -> None:
    """Raise CannotCompile for an operator without a kernel: loading the file would fail with an error number."""
    from executorch.runtime import Runtime

    missing = sorted(set(operators) - set(Runtime.get().operator_registry.operator_names))
    if missing:
        names = ", ".join(missing)
        raise CannotCompile(f"ExecuTorch has no kernel for {names}; replace the layer, or write a .pt2 file")


# --- methods ----------------------------------------------------------------------------------------------------------


class State(nn.Module):
    """Base of the methods: buffers state_0, state_1, ..., which have the same names in all of them."""

    def __init__(self, program: UpdateProgram):
        super().__init__()
        self.names = register_buffers(self, "state", program.state)

    def read(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.names]

    def write(self, values: Sequence[Tensor]) -> None:
        for tensor, new in zip(self.read(), values, strict=True):
            tensor.copy_(new)


class StatefulMethod(State):
    """Method that reads the state and, if it returns a new one, writes it."""

    def __init__(self, program: UpdateProgram, method: Method):
        super().__init__(program)
        self.method = method
        self.constants = register_buffers(self, "constant", program.constants)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        results = self.method(self.read(), [getattr(self, name) for name in self.constants], *inputs)
        count = len(self.method.outputs)
        if len(results) > count:
            self.write(results[count:])
        return tuple(results[:count])


class GetState(State):
    """All tensors of the state, in the order of `UpdateProgram.state`."""

    def forward(self) -> tuple[Tensor, ...]:
        return tuple(tensor.clone() for tensor in self.read())


class SetState(State):
    """Replace all tensors of the state."""

    def forward(self, *values: Tensor) -> Tensor:
        self.write(values)
        return torch.ones(1)
