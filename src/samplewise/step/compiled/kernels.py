"""Kernels of a graph: the C++ code that Inductor generates, compiled to a few libraries.

Inductor makes one library for each kernel. For most kernels, starting the C++ compiler, reading headers and linking
takes longer than compiling the code. Kernels of one graph are therefore compiled together.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

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
def joined_kernels(async_compile: type, load: Callable[[str], ctypes.CDLL]) -> Iterator[None]:
    """Compile the kernels of modules that Inductor loads inside the block together. `async_compile`: Inductor's class
    that compiles kernels; `load`: function that compiles and loads C++ source.
    """
    one_by_one: Any = async_compile.cpp_pybinding  # type: ignore[attr-defined]
    wait: Any = async_compile.wait  # type: ignore[attr-defined]

    def cpp_pybinding(self: Any, types: Sequence[str], source: str) -> Any:
        known = len(ENTRY.findall(source)) == 1 and all(kind.endswith("*") for kind in types)
        return Pending(types, source) if known else one_by_one(self, types, source)

    def joined_wait(self: Any, scope: dict[str, Any]) -> None:
        pending = {name: value for name, value in scope.items() if isinstance(value, Pending)}
        _compile(list(pending.values()), load)
        scope.update({name: value.kernel for name, value in pending.items()})
        wait(self, scope)

    # Inductor has no option to compile several kernels together, and generated modules name this class.
    with replaced(async_compile, {"cpp_pybinding": cpp_pybinding, "wait": joined_wait}):
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
        for index, each in enumerate(part):
            each.kernel = Kernel(library, index, len(each.types))


def _source(pending: Sequence[Pending]) -> str:
    includes = dict.fromkeys(line for each in pending for line in INCLUDE.findall(each.source))
    return "\n".join([*includes, *(each.code(index) for index, each in enumerate(pending))])


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
    return BLOCK.sub(lambda block: _hoisted(block[0], types, writable), source)


def _hoisted(block: str, types: dict[str, str], writable: set[str]) -> str:
    used = set(NAME.findall(SCALAR.sub("", block)))
    stored = {types.get(name, "") for name in used & writable}
    if not used <= types.keys():
        return block
    reads: dict[str, str] = {}

    def local(found: re.Match[str]) -> str:
        start, name, index = found.groups()
        if name not in types or types[name] in stored:
            return found[0]
        value = f"{name}_{index}"
        reads[value] = f"        const auto {value} = {name}[{index}];\n"
        return f"{start}{value};"

    changed = SCALAR.sub(local, block)
    return "    {\n" + "".join(reads.values()) + changed.removeprefix("    {\n")
