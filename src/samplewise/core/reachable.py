"""Python state that functions and modules can read: found by following references from them.

Followed are closures, global variables and attributes of imported modules that the code names, default arguments,
arguments of functools.partial, attributes of functions, objects and classes, and the contents of containers.
"""

from __future__ import annotations

import builtins
import ctypes
import random
import sys
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dis import get_instructions
from functools import cached_property, lru_cache, partial
from io import IOBase
from mmap import mmap
from types import (
    BuiltinFunctionType,
    CellType,
    ClassMethodDescriptorType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.backends import ContextProp
from torch.nn.parallel import DistributedDataParallel

from samplewise.core.batches import PLAIN

VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()))
CONTAINERS = (dict, list, tuple, set, frozenset, deque, MappingProxyType, *VIEWS)
# As NumPy arrays, numbers that can be compared as bytes.
MEMORY = (bytearray, array, memoryview, mmap, ctypes._SimpleCData, ctypes.Array, ctypes.Structure)
# Pointers to data and to functions lead to memory that belongs to no Python object.
FOREIGN = (ctypes._Pointer, ctypes._CFuncPtr)  # type: ignore[attr-defined]
ENTRIES = 10_000  # maximum number of entries of a container, or bytes of an array, that are compared or restored
VISITS = 20_000  # maximum number of objects that are looked at, if it is not known which functions are called
STEPS = 8  # maximum number of references followed if it is not known which functions are called
ALL_NAMES = {"getattr", "vars", "__dict__", "attrgetter"}  # code with these can read any attribute

BUILTINS = dict(vars(builtins))  # without those that the user adds later
CACHED = type(lru_cache(len))
FUNCTIONS = (FunctionType, staticmethod, classmethod, property)

# Types of values without a state that a program can change. Calls of C functions are checked when they are made.
FIXED = frozenset(
    (
        *PLAIN,
        complex,
        range,
        slice,
        type(Ellipsis),
        type(NotImplemented),
        CodeType,
        GetSetDescriptorType,
        MemberDescriptorType,
        MethodDescriptorType,
        ClassMethodDescriptorType,
        WrapperDescriptorType,
        torch.dtype,
        torch.device,
    )
)
FIXED_OF = {
    "builtins": {"object"},
    "_abc": {"_abc_data"},
    "_thread": {"lock", "RLock"},  # code that asks for their state makes a call of a C function, which is refused
    "_collections": {"_tuplegetter"},
    "operator": {"itemgetter", "methodcaller"},
}
NAMESPACES = ("types", "argparse", "collections", "_thread", "functools", "enum")  # modules with classes for records
# Packages with thousands of functions, in whose globals and classes no forward pass keeps values.
MODEL_PACKAGES = frozenset(("transformers", "peft", "accelerate", "huggingface_hub", "trl", "bitsandbytes"))
FIXED_MODULES = ("datetime", "decimal", "fractions", "re", "typing", "numpy", "zoneinfo", "uuid")


class Variable(NamedTuple):
    """Reference to a closure variable, a dict entry (a global variable or an attribute), a context variable, a weak
    reference, or an attribute of a class or another object.
    """

    holder: Any
    name: str

    @property
    def where(self) -> str:
        """Python expression that reads the variable, with {} for the holder."""
        if isinstance(self.holder, CellType):
            return "{}.cell_contents"
        if isinstance(self.holder, ContextVar):
            return "{}.get(None)"
        if isinstance(self.holder, weakref.ReferenceType):
            return "{}()"
        if type(self.holder) is dict:
            return f"{{}}[{self.name!r}]"
        return f"vars({{}})[{self.name!r}]" if isinstance(self.holder, type) else f"{{}}.{self.name}"

    def read(self) -> Any:
        holder = self.holder
        if isinstance(holder, CellType):
            return holder.cell_contents
        if isinstance(holder, ContextVar):
            try:
                return holder.get()  # its default has precedence over an argument of get()
            except LookupError:
                return None
        if isinstance(holder, weakref.ReferenceType):
            return holder()
        if type(holder) is dict:
            return holder[self.name]
        return vars(holder)[self.name] if isinstance(holder, type) else getattr(holder, self.name)

    def write(self, value: Any) -> None:
        holder = self.holder
        if isinstance(holder, CellType):
            holder.cell_contents = value
        elif isinstance(holder, ContextVar):
            holder.set(value)
        elif type(holder) is dict:
            holder[self.name] = value
        elif not isinstance(holder, weakref.ReferenceType):
            setattr(holder, self.name, value)


class Reachable:
    """State that can be read from `roots`; objects in `excluded` are not followed.

    `executed`: code of the functions that are called. All other functions are then references only, and attributes
    count if the code names them. None: not known; all functions of the user's modules are followed, up to STEPS
    references from a root.

    variables: references whose values can be replaced. sized: dicts of attributes, which can get new entries. caches:
    functions with a cache, which are called without being executed.
    absent: expressions, with {} for an object, that are true as long as a variable does not exist.
    containers, arrays, tensors, generators: objects that can change. opaque: objects whose state
    can be neither compared nor restored. codes: code of all functions that were followed. strings: names and strings in
    the executed code.
    """

    def __init__(
        self, roots: Iterable[Any], excluded: Iterable[Any] = (), executed: Collection[CodeType] | None = None
    ):
        self.variables: list[Variable] = []
        self.sized: list[Mapping[str, Any]] = []
        self.absent: list[tuple[str, Any]] = []
        self.containers: list[Any] = []
        self.arrays: list[Any] = []
        self.tensors: list[Tensor] = []
        self.generators: list[Any] = []
        self.opaque: list[Any] = []
        self.caches: list[Any] = []
        self.codes: set[CodeType] = set()
        self._executed = executed
        self.strings = {name for code in executed or () for name in _strings(code)}
        self._names = None if executed is None or self.strings & ALL_NAMES else self.strings
        roots = list(roots)
        self._roots = {id(root) for root in roots}
        self._seen: dict[Any, Any] = {id(value): value for value in (sys.modules, *excluded)}
        self._pending = [(root, 0) for root in roots]
        while self._pending:
            value, depth = self._pending.pop()
            try:
                self._visit(value, depth)
            except Exception:  # attributes of the user's classes can raise anything
                self.opaque.append(value)

    def _follow(self, depth: int, values: Iterable[Any]) -> None:
        if self._executed is not None or (depth < STEPS and len(self._seen) < VISITS):
            self._pending += [(value, depth + 1) for value in values if type(value) not in FIXED]

    def _refer(self, depth: int, variables: Iterable[Variable]) -> None:
        """Add references, and follow their values."""
        for variable in variables:
            key = (id(variable.holder), variable.name)
            if key not in self._seen:
                self._seen[key] = variable
                self.variables.append(variable)
            self._follow(depth, [variable.read()])

    def _visit(self, value: Any, depth: int) -> None:
        if type(value) in FIXED or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        kind = type(value)
        if kind in weakref.ProxyTypes:
            self._follow(depth, [value.__repr__.__self__])
        elif isinstance(value, Tensor):
            self.tensors.append(value)
            self._refer(depth, [Variable(vars(value), name) for name in vars(value)])
            if value.is_leaf and value.grad is not None and self._names is not None and "grad" in self._names:
                self._refer(depth, [Variable(value, "grad")])
        elif isinstance(value, DistributedDataParallel):
            self._follow(-1, [value.module])  # torch counts forward passes in its attributes
        elif isinstance(value, nn.Module):
            inside = [vars(value), *vars(value).values()]
            self._follow(-1, [*inside, kind])  # nesting of modules is not limited
        elif isinstance(value, FunctionType):
            self._visit_function(value, depth)
        elif isinstance(value, (MethodType, BuiltinFunctionType, MethodWrapperType)):
            if not isinstance(value.__self__, ModuleType):
                self._follow(depth, [value.__self__, getattr(value, "__func__", None)])
        elif isinstance(value, (staticmethod, classmethod)):
            self._follow(depth, [value.__func__])
        elif isinstance(value, property):
            self._follow(depth, [value.fget])
        elif isinstance(value, cached_property):
            self._follow(depth, [value.func])
        elif isinstance(value, partial):
            self._follow(depth, [value.func, value.args, value.keywords])
        elif isinstance(value, ModuleType):
            self._visit_module(value, self.strings, depth)
        elif isinstance(value, type):
            self._visit_class(value, depth)
        elif isinstance(value, (torch.Generator, random.Random)) or bits_of(value) is not None:
            (self.opaque if isinstance(value, random.SystemRandom) else self.generators).append(value)
        elif isinstance(value, (ContextVar, weakref.ReferenceType)):
            self._refer(depth, [Variable(value, "")])
        else:
            self._visit_object(value, depth)

    def _visit_function(self, function: FunctionType, depth: int) -> None:
        code = function.__code__
        library = is_library_name(function.__globals__.get("__name__", ""))
        if not (library or self._executed is None or code in self._executed):
            return
        # A wrapper of a library keeps the user's function in its closure.
        cells = [cell for cell in function.__closure__ or () if _is_filled(cell)]
        self._refer(depth, [Variable(cell, "") for cell in cells])
        self.absent += [("{} == CellType()", cell) for cell in function.__closure__ or () if not _is_filled(cell)]
        if library or (self._executed is None and _has_foreign_code(function.__globals__.get("__name__", ""))):
            return
        self.codes |= set(_nested(code))
        self._refer(depth, [Variable(function, name) for name in ("__code__", "__defaults__", "__kwdefaults__")])
        self._refer(depth, [Variable(vars(function), name) for name in vars(function)])
        names = set(_strings(code))
        scope = function.__globals__
        for name in names & scope.keys():
            if isinstance(scope[name], ModuleType):
                self._visit_module(scope[name], names, depth)
            else:
                self._refer(depth, [Variable(scope, name)])
        for name in names - scope.keys():
            if isinstance(sys.modules.get(name), ModuleType):  # imported in the function, or read from sys.modules
                self._visit_module(sys.modules[name], names, depth)
        if self._executed is not None:
            loads = (step for part in _nested(code) for step in get_instructions(part))
            unknown = {step.argval for step in loads if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")} - scope.keys()
            self.absent += [(f"{name!r} not in {{}}", scope) for name in sorted(unknown - BUILTINS.keys())]
            new_builtins = unknown & (vars(builtins).keys() - BUILTINS.keys())
            self._refer(depth, [Variable(vars(builtins), name) for name in sorted(new_builtins)])

    def _visit_module(self, module: ModuleType, names: set[str], depth: int) -> None:
        """Follow the attributes of a Python module that have one of these names."""
        library = is_library_name(module.__name__)
        if self._executed is None and (library or _has_foreign_code(module.__name__)):
            return
        if self._executed is not None and not (library or _is_foreign_name(module.__name__)):
            self.sized.append(vars(module))
            if names & ALL_NAMES:
                names = {name for name in vars(module) if not name.startswith("__")}
        for name in sorted(names & vars(module).keys()):
            value = vars(module)[name]
            if isinstance(value, ModuleType):
                key = (id(value), *sorted(names))
                if key not in self._seen:
                    self._seen[key] = value
                    self._visit_module(value, names, depth)
            elif isinstance(value, BuiltinFunctionType):
                self._follow(depth, [value])
            elif not library or isinstance(value, PLAIN):
                self._refer(depth, [Variable(vars(module), name)])
        settings = vars(type(module))  # flags in torch.backends
        self._refer(depth, [Variable(module, name) for name in names if isinstance(settings.get(name), ContextProp)])

    def _visit_class(self, kind: type, depth: int) -> None:
        for base in kind.__mro__:
            module = _module_of(base)
            foreign = module == "builtins" or (self._executed is None and _has_foreign_code(module))
            if foreign or (base is not kind and id(base) in self._seen):
                continue
            if is_library_name(module):  # the user may have added numbers
                numbers = [name for name, value in vars(base).items() if isinstance(value, PLAIN)]
                read = [name for name in numbers if name in (self._names or ()) and not name.startswith("__")]
                self._refer(depth, [Variable(base, name) for name in read])
                continue
            self._seen[id(base)] = base
            self.sized.append(vars(base))
            self._refer(
                depth, [Variable(base, name) for name, value in list(vars(base).items()) if self._is_read(name, value)]
            )
        self._follow(depth, [type(kind)] if type(kind) is not type else [])

    def _is_read(self, name: str, value: Any) -> bool:
        """Test whether the code can read an attribute. A called function counts also if only a library names it."""
        if isinstance(value, FUNCTIONS):
            function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
            code = getattr(function, "__code__", None)
            return self._executed is None or code is None or code in self._executed
        if name.startswith(("__", "_abc_")) and name != "__wrapped__":
            return False
        return self._names is None or name in self._names or name == "__wrapped__"

    def _visit_object(self, value: Any, depth: int) -> None:
        kind = type(value)
        if _module_of(kind).startswith("samplewise.parallel."):
            return  # counts the passes of ranks; no loss depends on it
        if isinstance(value, CONTAINERS):
            if len(value) > ENTRIES:  # type: ignore[arg-type]
                self.opaque.append(value)
            else:
                self.containers.append(value)
                self._follow(depth, list(items_of(value)))
        elif isinstance(value, MEMORY) or _is_numpy_array(value):
            view = value if _is_numpy_array(value) else memoryview(value)
            comparable = view.nbytes <= ENTRIES and not getattr(getattr(value, "dtype", None), "hasobject", False)
            (self.arrays if comparable else self.opaque).append(value)
        elif is_library_class(kind) and id(value) not in self._roots and self._executed is None:
            attributes = getattr(value, "__dict__", {}).values()
            self._follow(depth, [v for v in attributes if isinstance(v, (FunctionType, MethodType, partial))])
            return
        elif isinstance(value, (IOBase, *FOREIGN)) or not (hasattr(value, "__dict__") or "__slots__" in vars(kind)):
            if not _is_fixed(value):
                self.opaque.append(value)
            return
        if isinstance(value, CACHED):
            self.caches.append(value)
        top = _module_of(kind).partition(".")[0]
        if self._executed is None and _is_foreign_name(top) and top not in NAMESPACES:
            return
        attributes = getattr(value, "__dict__", {})
        if isinstance(attributes, dict):
            if attributes or not isinstance(value, CONTAINERS):
                self.sized.append(attributes)
            # Calls of a library are not recorded: methods of its objects, such as a scheduler, may have read anything.
            unrecorded = is_library_class(kind) and not _module_of(kind).startswith("torch._")
            read_all = id(value) in self._roots or unrecorded
            names = [name for name in attributes if read_all or self._is_read(name, attributes[name])]
            self._refer(depth, [Variable(attributes, name) for name in names])
        slots = [slot for slot in _slots(kind) if hasattr(value, slot)]
        slots += ["__class__"] if hasattr(value, "__dict__") and not isinstance(value, CONTAINERS) else []
        slots += ["args"] if isinstance(value, BaseException) else []
        self._refer(depth, [Variable(value, slot) for slot in slots])
        self._follow(depth, [kind])


def items_of(container: Any) -> Iterable[Any]:
    """Items of a container; for a dict, keys and values alternately. Methods that a subclass overrides are not called,
    because they can have effects.
    """
    if isinstance(container, dict):
        kind = OrderedDict if isinstance(container, OrderedDict) else dict  # each has an order of its own
        return (value for pair in kind.items(container) for value in pair)
    if isinstance(container, MappingProxyType):
        return (value for pair in container.items() for value in pair)
    sequence: Any = next(kind for kind in CONTAINERS if isinstance(container, kind))
    return sequence.__iter__(container)


def bits_of(value: Any) -> Any:
    """Bit generator of a random number generator of NumPy, which has the state; None for other objects."""
    kind = type(value)
    if not _module_of(kind).startswith("numpy.random"):
        return None
    names = [name for name in ("bit_generator", "_bit_generator") if hasattr(kind, name)]
    return getattr(value, names[0]) if names else value if hasattr(kind, "random_raw") else None


def bytes_of(value: Any) -> bytes:
    """Content of an array or another object with a buffer."""
    return value.tobytes() if hasattr(value, "tobytes") else bytes(value)


def _is_numpy_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_fixed(value: Any) -> bool:
    kind = type(value)
    module = _module_of(kind)
    if isinstance(value, IOBase) and not value.closed and not value.readable():
        return True  # a stream for messages, as that of a logger, has no values to read
    if hasattr(kind, "__next__"):
        return False
    if module.startswith("torch._C"):  # such as the reducer of ranks; generators and tensors are visited before
        return True
    return kind.__name__ in FIXED_OF.get(module, ()) or module.partition(".")[0] in FIXED_MODULES


def _slots(kind: type) -> list[str]:
    """Names of the attributes without a dict."""
    names: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__"):
                hidden = slot.startswith("__") and not slot.endswith("__")
                names.append(f"_{base.__name__.lstrip('_')}{slot}" if hidden else slot)
    return names


def _nested(code: CodeType) -> Iterator[CodeType]:
    """The code and that of the functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _strings(code: CodeType) -> Iterator[str]:
    """Names of global variables, attributes and modules in a function, and its strings, which may be names, too."""
    for part in _nested(code):
        yield from part.co_names
        yield from (constant for constant in part.co_consts if isinstance(constant, str))


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def is_library_class(kind: type) -> bool:
    """Test for a class of torch or samplewise, which does not read the user's globals."""
    return is_library_name(_module_of(kind))


def _module_of(kind: type) -> str:
    """Name of the Python module of a class; "" for a C type without one."""
    return kind.__module__ if isinstance(kind.__module__, str) else ""


def is_library_name(name: str) -> bool:
    """Test for the name of a Python module of torch or samplewise."""
    return name.partition(".")[0] in ("torch", "samplewise")


def _is_foreign_name(name: str) -> bool:
    """Test for the name of a Python module of the standard library or NumPy: only torch's and the global random state
    of these is changed by a loss function.
    """
    top = name.partition(".")[0]
    return top == "numpy" or (top in sys.stdlib_module_names and top != "__main__")


def _has_foreign_code(name: str) -> bool:
    """Test for the name of a Python module whose functions and classes need not be followed. Objects of a model package
    are followed: a model may keep values in them.
    """
    return _is_foreign_name(name) or name.partition(".")[0] in MODEL_PACKAGES
