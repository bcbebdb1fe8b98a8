"""Direct calls of PyTorch's tracer (make_fx) and compiler (Inductor); all uses of their private APIs are here.

These APIs are imported when they are called, so that a torch version without one of them trains uncompiled.

`torch.compile` evaluates its guards before every call, which takes longer than a small update. Code compiled here has
no guards; `samplewise.step.compiled.guards` implements those that an update needs.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn

from samplewise.step.compiled.kernels import joined_kernels

Flat = Callable[..., Sequence[Tensor]]
Compiled = Callable[[list[Tensor]], Sequence[Tensor]]
Decompositions = Mapping[Any, Callable[..., Any]]


def load_compiler() -> None:
    """Import the compiler, before calls of the model are recorded: torch would import parts of it, and packages that it
    uses, in the first of these calls. Decompositions of pooling expect that it was imported.
    """
    import torch._inductor.compile_fx  # noqa: F401


def trace(function: Flat, inputs: Sequence[Tensor], ours: Decompositions) -> fx.GraphModule:
    """Trace `function` to an fx graph. It may run autograd and change tensors in place."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    table = {**select_decomp_table(), **ours}
    found = make_fx(function, decomposition_table=table, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    found.graph.eliminate_dead_code()
    return found


def trace_functional(function: Flat, inputs: Sequence[Tensor], ours: Decompositions) -> fx.GraphModule:
    """Trace a function without autograd to a functional graph; in-place changes of inputs come last. Equal operations
    of forward and backward pass become one.
    """
    from torch._functorch.compile_utils import fx_graph_cse

    found = trace(torch.func.functionalize(function, remove="mutations"), inputs, ours)
    found.graph = fx_graph_cse(found.graph)
    found.recompile()
    return found


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
            found = getattr(ctypes.CDLL(str(folder / name)), symbol, None)
            return None if found is None else ctypes.cast(found, ctypes.c_void_p).value
    return None


def tensor_handles(tensors: Sequence[Tensor]) -> list[int]:
    """New handles of tensors for C functions of libtorch, which the caller deletes."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype = ctypes.c_void_p
    pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    made = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))
    return [pointer(capsule, None) for capsule in made]


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
        "compile_threads": 1,  # no process pool: `joined_kernels` compiles in threads
        "fallback_random": True,  # dropout draws the same numbers as uncompiled
    }
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)  # graphs without a ShapeEnv are not cached
    fakes = [mode.from_tensor(tensor) for tensor in inputs]
    with config.patch(settings), tracing(TracingContext(mode)), joined_kernels(AsyncCompile, load_c):
        found: Any = compile_fx_inner(graph, fakes)
    return found.current_callable
