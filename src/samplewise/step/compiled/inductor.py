"""Direct calls of PyTorch's tracer (make_fx) and compiler (Inductor); all uses of their private APIs are here.

These APIs are imported when they are called, so that a torch version without one of them trains uncompiled.

`torch.compile` evaluates its guards before every call, which takes longer than a small update. Code compiled here has
no guards; `samplewise.step.compiled.guards` implements those that an update needs.
"""

from __future__ import annotations

import ctypes
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn

Flat = Callable[..., Sequence[Tensor]]
Compiled = Callable[[list[Tensor]], Sequence[Tensor]]
Decompositions = Mapping[Any, Callable[..., Any]]


# torch.autograd.graph.increment_version, without its tests of types, which take longer than the rest.
increment_version: Callable[[Sequence[Tensor]], None] = getattr(
    torch._C, "_increment_version", torch.autograd.graph.increment_version
)


def load_compiler() -> None:
    """Import the compiler, before calls of the model are recorded: torch would import parts of it, and packages that it
    uses, in the first of these calls. Decompositions of pooling expect that it was imported.
    """
    import torch._inductor.compile_fx  # noqa: F401


def compiler_decompositions(ours: Decompositions) -> Decompositions:
    """Decompositions of the compiler, and `ours`."""
    from torch._inductor.decomposition import select_decomp_table

    return {**select_decomp_table(), **ours}


def trace(function: Flat, inputs: Sequence[Tensor], decompositions: Decompositions) -> fx.GraphModule:
    """Trace `function` to an fx graph. It may run autograd and change tensors in place."""
    from torch.fx.experimental.proxy_tensor import make_fx

    table = dict(decompositions)
    graph = make_fx(function, decomposition_table=table, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    graph.graph.eliminate_dead_code()
    return graph


def trace_functional(function: Flat, inputs: Sequence[Tensor], decompositions: Decompositions) -> fx.GraphModule:
    """Trace a function without autograd to a functional graph; in-place changes of inputs come last. Equal operations
    of forward and backward pass become one.
    """
    from torch._functorch.compile_utils import fx_graph_cse

    functional = torch.func.functionalize(function, remove="mutations")
    graph = trace(functional, inputs, decompositions)
    graph.graph = fx_graph_cse(graph.graph)
    graph.recompile()
    return graph


def stored(t: Tensor) -> Tensor:
    """Tensor equal to `t`, which compiled code stores in memory. A single number must not be a view."""
    from torch._inductor.inductor_prims import force_stride_order

    if t.numel() == 1:  # there are no strides to force
        return t.as_strided(t.shape, t.stride())
    return force_stride_order(t, torch.empty_like(t).stride())  # dense, also for a view with gaps


@contextmanager
def parameters_replaced(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Replace parameters and buffers of the module inside the block."""
    from torch.nn.utils.stateless import _reparametrize_module

    with _reparametrize_module(module, tensors, tie_weights=True):
        yield


def wrapper_module(compiled: Compiled) -> ModuleType | None:
    """Module that Inductor generated for compiled code; None if it is not found.

    The code is a method of a runner object, or, up to torch 2.8, a function.
    """
    owner = getattr(compiled, "__self__", None)
    return sys.modules.get(compiled.__module__ if owner is None else type(owner).__module__)


@cache
def libtorch_function(symbol: str) -> int | None:
    """Address of a C function of libtorch; None if it is not found."""
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib", "torch_cpu.dll"):
        if (folder / name).exists():
            function = getattr(ctypes.CDLL(str(folder / name)), symbol, None)
            return None if function is None else ctypes.cast(function, ctypes.c_void_p).value
    return None


def tensor_handles(tensors: Sequence[Tensor]) -> list[int]:
    """New handles of tensors for C functions of libtorch, which the caller deletes."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype = ctypes.c_void_p
    pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))
    return [pointer(capsule, None) for capsule in capsules]


def delete_tensor_handles(address: int, handles: Sequence[int]) -> None:
    """Delete handles with the C function at an address."""
    delete = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(address)
    for handle in handles:
        delete(handle)


def load_c(source: str) -> Any:
    """Compile C++ source to a library and load it; the result is cached on disk across runs."""
    from torch._inductor.codecache import CppCodeCache

    return CppCodeCache.load(source)


def emulates_casts() -> bool:
    """Test whether compiled code rounds to bfloat16 where uncompiled code does. That of torch 2.8 to 2.10 does not."""
    from torch._inductor.codegen import cpp

    return "emulate_precision_casts" in inspect.getsource(cpp)


def compile_graph(graph: fx.GraphModule, inputs: Sequence[Tensor], threads: int) -> Compiled:
    """Compile a graph to a function of a list of tensors; their dtypes and shapes are fixed and not checked."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    settings = {
        "cpp.threads": threads,
        "cpp.simdlen": pick_vec_isa().bit_width(),  # part of the cache's key: its code is for one width of vectors
        "size_asserts": False,
        "emulate_precision_casts": True,  # round to bfloat16 where the uncompiled model does
        "realize_reads_threshold": 16,  # a new state has two readers and must not be materialized for that
        "compile_threads": 1,  # no process pool: `join_kernels` compiles in threads
        "fallback_random": True,  # dropout draws the same numbers as uncompiled
    }
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)  # graphs without a ShapeEnv are not cached
    fakes = [mode.from_tensor(tensor) for tensor in inputs]
    with config.patch(settings), tracing(TracingContext(mode)), join_kernels(AsyncCompile, load_c):
        compiled: Any = compile_fx_inner(graph, fakes)
    return compiled.current_callable


# --- kernels ----------------------------------------------------------------------------------------------------------

# Inductor makes one library for each kernel. For most kernels, starting the C++ compiler, reading headers and linking
# takes longer than compiling the code. Kernels of one graph are therefore compiled together.


ENTRY = re.compile(r'(extern "C"\s+void\s+)kernel\(')
INCLUDE = re.compile(r"^#include .*$", re.MULTILINE)
EACH = 16  # least number of kernels of a library, if there are several libraries


class Kernel:
    """Kernel of a compiled graph. `address`: of its C function, whose arguments are addresses."""

    def __init__(self, library: ctypes.CDLL, index: int, arguments: int):
        self.address = ctypes.cast(getattr(library, f"kernel_{index}"), ctypes.c_void_p).value
        self._call = getattr(library, f"call_{index}")
        self._call.restype = ctypes.c_int
        self._call.argtypes = [ctypes.c_void_p]
        self._block = ctypes.c_void_p * arguments

    def __call__(self, *tensors: Tensor) -> None:
        if self._call(self._block(*[tensor.data_ptr() for tensor in tensors])):
            raise RuntimeError("a kernel failed; an index may be out of range")


class Pending:
    """Kernel that is not compiled yet."""

    def __init__(self, types: Sequence[str], source: str):
        self.types = types
        self.source = source
        self.kernel: Kernel | None = None

    def code(self, index: int) -> str:
        """C++ code of kernel number `index`, and of a function that calls it and returns 1 if it throws."""
        body = ENTRY.sub(rf"\1kernel_{index}(", hoist_scalars(INCLUDE.sub("", self.source)))
        values = ", ".join(f"({kind})given[{k}]" for k, kind in enumerate(self.types))
        return f"namespace kernels_{index} {{\n{body}\n}}\n" + CALL.format(index=index, values=values)


CALL = """
extern "C" int call_{index}(void** given) {{
    try {{ kernels_{index}::kernel_{index}({values}); return 0; }} catch (...) {{ return 1; }}
}}
"""


@contextmanager
def join_kernels(async_compile: type, load: Callable[[str], ctypes.CDLL]) -> Iterator[None]:
    """Compile the kernels of modules that Inductor loads inside the block together. `async_compile`: Inductor's class
    that compiles kernels; `load`: function that compiles and loads C++ source.
    """
    one_by_one: Any = async_compile.cpp_pybinding  # type: ignore[attr-defined]
    wait: Any = async_compile.wait  # type: ignore[attr-defined]

    def cpp_pybinding(self: Any, types: Sequence[str], source: str) -> Any:
        has_usual_form = len(ENTRY.findall(source)) == 1 and all(kind.endswith("*") for kind in types)
        return Pending(types, source) if has_usual_form else one_by_one(self, types, source)

    def compile_and_wait(self: Any, scope: dict[str, Any]) -> None:
        pending = {name: value for name, value in scope.items() if isinstance(value, Pending)}
        _compile(list(pending.values()), load)
        scope.update({name: value.kernel for name, value in pending.items()})
        wait(self, scope)

    # Inductor has no option to compile several kernels together, and generated modules name this class.
    with replaced(async_compile, {"cpp_pybinding": cpp_pybinding, "wait": compile_and_wait}):
        yield


@contextmanager
def replaced(owner: Any, attributes: dict[str, Any]) -> Iterator[None]:
    """Replace attributes of a class or module inside the block."""
    originals = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)


def _compile(pending: Sequence[Pending], load: Callable[[str], ctypes.CDLL]) -> None:
    """Compile kernels to libraries, several at once if there are many."""
    count = max(1, min(len(pending) // EACH, torch.get_num_threads()))
    parts = [pending[k::count] for k in range(count)]
    with ThreadPoolExecutor(count) as pool:
        libraries = list(pool.map(load, map(_source, parts)))
    for part, library in zip(parts, libraries, strict=True):
        for index, kernel in enumerate(part):
            kernel.kernel = Kernel(library, index, len(kernel.types))


def _source(pending: Sequence[Pending]) -> str:
    includes = dict.fromkeys(line for kernel in pending for line in INCLUDE.findall(kernel.source))
    return "\n".join([*includes, *(kernel.code(index) for index, kernel in enumerate(pending))])


# --- hoisted scalars --------------------------------------------------------------------------------------------------

# The loop of an optimizer reads learning rate, momentum and the finite flag from memory. The C++ compiler reads and
# converts them again for each vector, because the store of a vector may change any memory. Tensors of different dtypes
# share none, so that a scalar may be read before a block of loops that stores other dtypes only. Inductor has no option
# and no pass for this, and the kernel exists only as text, so the text is changed. Code that these expressions do not
# recognize stays as it is.
POINTER = re.compile(r"(const )?(\w+)\* (\w+_ptr\d+)(?=[,)])")
BLOCK = re.compile(r"^    \{\n(.*?)^    \}\n", re.MULTILINE | re.DOTALL)
SCALAR = re.compile(r"^( +auto tmp\d+ = )(\w+_ptr\d+)\[static_cast<int64_t>\((\d+)L\)\];$", re.MULTILINE)
NAME = re.compile(r"\w+_ptr\d+")


def hoist_scalars(source: str) -> str:
    """Source of a kernel in which each block of loops reads its scalars first."""
    pointers = POINTER.findall(source)
    types = {name: kind for _, kind, name in pointers}
    writable = {name for const, _, name in pointers if not const}
    return BLOCK.sub(lambda block: _hoist_in_block(block[0], types, writable), source)


def _hoist_in_block(block: str, types: dict[str, str], writable: set[str]) -> str:
    used = set(NAME.findall(SCALAR.sub("", block)))
    stored = {types.get(name, "") for name in used & writable}
    if not used <= types.keys():
        return block
    reads: dict[str, str] = {}

    def read_local(match: re.Match[str]) -> str:
        start, name, index = match.groups()
        if name not in types or types[name] in stored:
            return match[0]
        value = f"{name}_{index}"
        reads[value] = f"        const auto {value} = {name}[{index}];\n"
        return f"{start}{value};"

    changed = SCALAR.sub(read_local, block)
    return "    {\n" + "".join(reads.values()) + changed.removeprefix("    {\n")
