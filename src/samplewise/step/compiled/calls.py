"""Calls made by an update, recorded to find out what it reads, and refused if compiled code cannot repeat them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from samplewise.core.reachable import CONTAINERS, Reachable, is_library_name
from samplewise.step.compiled import CannotCompile

# C functions whose results or effects are not values of variables, by module or by class of their object.
CHANGING_MODULES = {
    *("time", "posix", "nt", "_io", "io", "_socket", "select", "_queue", "_sqlite3", "gc", "_signal", "_ssl"),
    "resource",
}
CHANGING_BUILTINS = {"input", "eval", "exec", "globals"}
CHANGING_METHODS = {
    "datetime": {"now", "utcnow", "today"},
    "_datetime": {"now", "utcnow", "today"},
    "_thread": {"locked"},
}
PURE = {"fspath"}  # of the operating system
ADDRESSES = {"from_address", "from_buffer", "string_at"}  # of ctypes: read memory that belongs to other objects
# Packages that torch needs. When it calls them depends on caches in the process: `typing` calls typing_extensions for
# each type that its cache has lost.
NEEDED = {"numpy", "opt_einsum", "sympy", "mpmath", "typing_extensions", "filelock", "networkx", "jinja2", "fsspec"}
TRUSTED = {*sys.stdlib_module_names, *NEEDED}


class Calls:
    """Context manager that records the calls of the user's code: all but torch, samplewise and functions that they call
    from C. `modules`: module of each Python function that was called, by its code. `cached`: code of functions that may
    not be called because their results are cached.
    """

    def __init__(self, cached: Collection[CodeType] = ()) -> None:
        self.modules: dict[CodeType, str] = {}
        self.cached = cached
        self._functions: dict[int, Any] = {}  # C functions by id

    def __enter__(self) -> Calls:
        self._collects = gc.isenabled()
        gc.disable()  # callbacks and finalizers of the garbage collector are not calls of the update
        self._profile = sys.getprofile()
        sys.setprofile(self._record)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._profile)
        if self._collects:
            gc.enable()

    def _record(self, frame: FrameType, event: str, function: Any) -> None:
        if event not in ("call", "c_call"):
            return
        module = _module_of(frame)
        caller = frame
        # What torch calls in the standard library, as when it is used for the first time in a process, is not a call of
        # the user's code; a resumed run would otherwise compile other updates than an uninterrupted one.
        while caller.f_back is not None and _is_trusted(_module_of(caller)):
            caller = caller.f_back
        if is_library_name(_module_of(caller)):
            return
        if event == "call":
            self.modules[frame.f_code] = module
        elif event == "c_call":
            self._functions[id(function)] = function

    @property
    def codes(self) -> set[CodeType]:
        """Code of all Python functions whose variables matter."""
        return {*self.modules, *self.cached}

    def check(self, reachable: Reachable) -> None:
        """Raise CannotCompile if an update depends on something that cannot be compared before each update."""
        for function in self._functions.values():
            if _is_changing(function):
                name = getattr(function, "__qualname__", str(function))
                raise CannotCompile(f"the model or the loss function calls {name}, which can change with every call")
        for value in reachable.opaque:
            raise CannotCompile(f"the model or the loss function can read {description(value)}")
        for code, module in self.modules.items():
            if code not in reachable.codes and not _is_trusted(module):
                raise CannotCompile(f"the variables that {module}.{code.co_qualname} reads are not known")


def _module_of(frame: FrameType) -> str:
    return frame.f_globals.get("__name__") or ""


def _is_trusted(module: str) -> bool:
    """Test for a module of the standard library or one that torch calls: a changed setting of it is not a concern."""
    top = module.partition(".")[0]
    return top in TRUSTED or top.startswith("namedtuple_")


def _is_changing(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    kind = owner if isinstance(owner, type) else type(owner)
    module = getattr(function, "__module__", None) or kind.__module__
    name = getattr(function, "__name__", "")
    if module == "builtins":
        return name in CHANGING_BUILTINS
    if module in CHANGING_METHODS:
        return name in CHANGING_METHODS[module]
    return name in ADDRESSES or (module in CHANGING_MODULES and name not in PURE)


def description(value: Any) -> str:
    """Description of an object whose state cannot be compared, and why."""
    kind = type(value).__name__
    if hasattr(type(value), "__next__"):
        return f"an iterator ({kind}), whose state cannot be compared"
    if isinstance(value, CONTAINERS) or hasattr(value, "nbytes"):
        return f"a {kind} that is too large to be compared before each update"
    return f"an object of type {kind}, whose state cannot be compared"


# Functions of tensors that read shapes, types and settings, not values.
ABOUT = frozenset(
    "__get__ __len__ __hash__ size dim ndimension numel nelement stride storage_offset element_size "
    "get_device type _is_view has_names result_type can_cast broadcast_shapes".split()
)
# Functions that read the memory of tensors in a list, which no mode of torch notices.
READING = frozenset(("tensor", "as_tensor", "asarray", "new_tensor", "new"))
READ = "the model or the loss function reads the value of a tensor ({})"


class NumberReads(TorchDispatchMode):
    """Raises CannotCompile if torch itself reads the value of a tensor in tracing, as for a tensor that is the size of
    another one, the end of a slice, or an argument that must be a number. The tracer, which is below this mode, answers
    reads of the engine: it refuses those of values that are not constant.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and not _is_called_by_engine():
            raise CannotCompile(READ.format("as a number"))
        return func(*args, **(kwargs or {}))


def _is_called_by_engine() -> bool:
    """Test whether the innermost code besides torch and the modes of this module belongs to the engine."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (_module_of(frame) == __name__ or _module_of(frame).partition(".")[0] == "torch"):
        frame = frame.f_back
    return frame is not None and _module_of(frame).startswith("samplewise.engine.")


class ValueReads(TorchFunctionMode):
    """Raises CannotCompile if the value of a tensor becomes a Python number, string, list or NumPy array in tracing:
    compiled code would contain it as a constant.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        values = (*args, *(kwargs or {}).values())
        in_lists = name in READING and any(map(_has_tensors, values))
        if in_lists or (name == "tensor_split" and any(isinstance(value, Tensor) for value in values[1:])):
            raise CannotCompile(READ.format(name))
        result = func(*args, **(kwargs or {}))
        asks_type = name.startswith("is_") and name != "is_nonzero"
        if isinstance(result, Tensor) or result is None or name in ABOUT or asks_type:
            return result
        plain = isinstance(result, (bool, int, float, complex, str, list)) or type(result).__module__ == "numpy"
        if plain and any(isinstance(value, Tensor) for value in args) and not _has_tensors(result):
            raise CannotCompile(READ.format(name))
        return result


def _has_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) or _has_tensors(item) for item in value)
