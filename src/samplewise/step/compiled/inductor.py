"""PyTorch's tracer and compiler, called directly. Their entry points are private: all that is used of them is here.

`torch.compile` would look at the whole surroundings again before every call, which costs more than a small update does.
So there are no guards here: `samplewise.step.compiled.guards` has those that an update needs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

Flat = Callable[..., Sequence[Tensor]]
Compiled = Callable[[list[Tensor]], Sequence[Tensor]]
Decompositions = Mapping[Any, Callable[..., Any]]


def trace(function: Flat, inputs: Sequence[Tensor], ours: Decompositions) -> fx.GraphModule:
    """What `function` does with the inputs, as a graph. Autograd may run inside, and tensors may be changed."""
    from torch._inductor.decomposition import select_decomp_table

    table = {**select_decomp_table(), **ours}
    found = make_fx(function, decomposition_table=table, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    found.graph.eliminate_dead_code()
    return found


def trace_functional(function: Flat, inputs: Sequence[Tensor], ours: Decompositions) -> fx.GraphModule:
    """The same without autograd inside. Changes of inputs come last, and nothing else is changed."""
    return trace(torch.func.functionalize(function, remove="mutations"), inputs, ours)


@contextmanager
def parameters_replaced(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """The module's parameters and buffers are other tensors for a while."""
    from torch.nn.utils.stateless import _reparametrize_module

    with _reparametrize_module(module, tensors, tie_weights=True):
        yield


def is_kernel(thing: Any) -> bool:
    """Whether the compiler's wrapper has it from a library that it has compiled."""
    return type(thing) is BuiltinFunctionType and thing.__name__ == "kernel" and hasattr(thing.__self__, "__file__")


def address_of(kernel: Any) -> int:
    """Of its C function."""
    library = ctypes.CDLL(kernel.__self__.__file__)
    found = ctypes.cast(library.kernel, ctypes.c_void_p).value
    assert found is not None
    return found


def load_c(source: str) -> Any:
    """A library made from C++, compiled once and for all runs."""
    from torch._inductor.codecache import CppCodeCache

    return CppCodeCache.load(source)


def compile_graph(graph: fx.GraphModule, inputs: Sequence[Tensor], threads: int) -> Compiled:
    """Machine code that takes a list of tensors of just these types and shapes, which it does not check."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    settings = {
        "cpp.threads": threads,
        "size_asserts": False,
        "emulate_precision_casts": True,  # rounds to bfloat16 where the model does
        "realize_reads_threshold": 16,  # a new state is read by two, and must not become a tensor for that
        "compile_threads": 1,  # there is one thing to compile: no pool of processes
        "fallback_random": True,  # dropout draws as it does uncompiled
    }
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(tensor) for tensor in inputs]
    with config.patch(settings), tracing(TracingContext(mode)):
        found: Any = compile_fx_inner(graph, fakes)
    return found.current_callable
