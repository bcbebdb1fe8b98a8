"""Guards: detect changes since compilation that the compiled code would not see.

Values of tensors and scalars of the optimizer may change, because the code reads them in each update. Everything else
that the model, the loss function or a transform reads is compared: attributes of modules; parameters and buffers by
identity; and what is reachable from the functions that are called in an update, see `Reachable`.
"""

from __future__ import annotations

import inspect
import random
import sys
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from operator import eq, itemgetter
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from samplewise.core.batches import PLAIN
from samplewise.core.closure_state import (
    MODULE_ATTRIBUTES,
    GeneratorSnapshot,
    all_identical,
    roots_of,
    submodules_of,
)
from samplewise.core.reachable import Reachable, bytes_of, is_library_class, is_library_name, items_of
from samplewise.step.compiled import CannotCompile
from samplewise.step.compiled.calls import Calls
from samplewise.step.compiled.optim import hooks_of

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = [getattr(nn_module, f"_global{name}") for name in HOOKS if hasattr(nn_module, f"_global{name}")]
# Functions of torch that return settings of the process; a guard compares them if the code names them.
SETTINGS = (
    *("get_num_threads", "get_num_interop_threads", "are_deterministic_algorithms_enabled", "is_anomaly_enabled"),
    *("is_deterministic_algorithms_warn_only_enabled", "get_deterministic_debug_mode", "get_default_device"),
    *("get_float32_matmul_precision", "initial_seed", "is_inference_mode_enabled"),
)
LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


_hyperparameter_versions = count(1)  # values of `hyperparameter_version`, all different


def hooks_in(modules: Iterable[nn.Module]) -> list[Any]:
    """Dicts of the hooks of modules, and of the hooks of all modules in the process."""
    return [*GLOBAL_HOOKS, *(getattr(module, name) for module in modules for name in HOOKS)]


def has_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


class Guards:
    """Guards of all programs of a step. `hold()` takes a few microseconds and runs after user code may have run."""

    def __init__(self, modules: Sequence[nn.Module], functions: Sequence[Any], optimizer: Any, calls: Calls):
        """`calls`: made in an update."""
        self._modules = submodules_of(modules)
        self._hooks = [*hooks_in(self._modules), *hooks_of(optimizer)]
        self.hyperparameter_version = 0  # identifies the hyperparameters of the optimizer
        self._fixed = Expression()
        self._hyperparameters = Expression()
        self._guard_modules()
        self._guard_functions(functions, calls)
        self._guard_optimizer(optimizer)
        self.checksum = self._fixed.checksum()  # of plain values, comparable between processes

    def _guard_modules(self) -> None:
        """Guard attributes, submodules, parameters and buffers of all modules."""
        for module in self._modules:
            attributes = vars(module)
            self._fixed.items(attributes, [key for key in attributes if key not in MODULE_ATTRIBUTES])
            self._fixed.add("len({})", attributes)
            if not is_library_class(type(module)):
                self._fixed.add("{}.__class__", module)
            for inside in (module._modules, module._parameters, module._buffers):
                self._fixed.items(inside, list(inside))
                # Layers of a library read only the entries that they define.
                if isinstance(module, LISTS) or not is_library_class(type(module)):
                    self._fixed.add("len({})", inside)

    def _guard_functions(self, functions: Sequence[Any], calls: Calls) -> None:
        """Guard what the called functions read, hooks, autocast and torch settings."""
        roots = roots_of(functions, self._modules)
        reachable = Reachable(roots, excluded=self._modules, executed=calls.codes)
        calls.check(reachable)
        for variable in reachable.variables:
            self._fixed.add(variable.where, variable.holder)
        for attributes in reachable.sized:  # Python notes warnings in the namespace of a module
            self._fixed.add("len({}) - ('__warningregistry__' in {})", attributes)
        for container in reachable.containers:
            self._fixed.contents(container)
        self._fixed.names(bytes_of=bytes_of)
        for values in reachable.arrays:
            self._fixed.equal("bytes_of({})", values)
        self._fixed.names(CellType=CellType)
        for where, holder in reachable.absent:
            self._fixed.add(where, holder)
        for tensor in reachable.tensors:  # values may change
            self._fixed.equal("({}.shape, {}.dtype, {}.requires_grad, {}.grad is None)", tensor)
            if tensor.layout is torch.strided:
                self._fixed.equal("{}.stride()", tensor)
        for generator in reachable.generators:
            if isinstance(generator, torch.Generator):
                self._fixed.equal("{}.initial_seed()", generator)
        self._generators = reachable.generators
        self._fixed.add("any({})", self._hooks)
        self._fixed.names(autocast=torch.is_autocast_enabled, autocast_type=torch.get_autocast_dtype)
        self._fixed.add("autocast('cpu') and autocast_type('cpu')")
        self._fixed.add("{}()", torch.get_default_dtype)
        self._fixed.add("{}()", torch.is_grad_enabled)
        for name in reachable.strings.intersection(SETTINGS):
            self._fixed.equal("{}()", getattr(torch, name))

    def _guard_optimizer(self, optimizer: Any) -> None:
        """Guard groups and state of the optimizer; its hyperparameters are stored separately."""
        self._fixed.add("{}.get('step')", vars(optimizer))  # `step` may be replaced on the instance
        self._fixed.add("len({}.param_groups)", optimizer)
        for group in optimizer.param_groups:
            self._fixed.add("len({})", group["params"])
            self._fixed.items(group, ["params"])
            tensors = [key for key, value in group.items() if isinstance(value, Tensor)]
            for key in tensors:
                self._hyperparameters.equal("float({}[" + repr(key) + "])", group)
            plain = [key for key in group if key not in ("params", *tensors)]
            if plain:
                self._hyperparameters.equal("{}()", partial(itemgetter(*plain), group))
        if hasattr(optimizer, "state"):
            self._fixed.add("{}.state", optimizer)
            self._fixed.add("len({})", optimizer.state)
            if optimizer.state:
                self._fixed.equal("[*map(id, {}.values())]", optimizer.state)
            for state in optimizer.state.values():
                self._fixed.items(state, list(state))

    def bind(
        self,
        trained: Sequence[Tensor],
        tensors: Sequence[Tensor],
        counters: Sequence[Sequence[Any]],
        settings: Callable[[], Any],
    ) -> None:
        """Add guards for the inputs of the compiled code.

        Memory addresses and requires_grad of the tensors must stay, step counters of one bucket must stay equal, and
        the optimizer settings compiled into the code must not change.
        """
        for tensor in (*trained, *tensors):
            self._fixed.equal("{}.data_ptr()", tensor)
            if isinstance(tensor, nn.Parameter):
                self._fixed.add("{}.requires_grad", tensor)
                if has_hooks(tensor):
                    raise CannotCompile("parameters have hooks")
                self._fixed.add("not ({}._backward_hooks or {}._post_accumulate_grad_hooks)", tensor)
        for first, *rest in (cells for cells in counters if cells):
            for cell in rest:
                self._fixed.add("{}[0][0] == {}[1][0]", (first, cell))
        self._settings = settings
        self._set = settings()
        self.hyperparameter_version = next(_hyperparameter_versions)

    def hold(self) -> bool:
        """Test that nothing has changed that requires recompilation. If hyperparameters of the optimizer may have
        changed, `hyperparameter_version` gets another value.
        """
        if not (self._fixed.identical() or self._fixed.holds()):
            return False
        if self._hyperparameters.identical():
            return True
        self._hyperparameters.update_values()
        self.hyperparameter_version = next(_hyperparameter_versions)
        return bool(self._settings() == self._set)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Raise CannotCompile after the block if the model changed its attributes in it, or drew random numbers from
        Python, NumPy or a generator of its own.
        """
        numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
        global_generators = [random._inst] + ([] if numpy is None else [numpy.mtrand._rand])
        generators = [GeneratorSnapshot(generator) for generator in (*self._generators, *global_generators)]
        yield
        if any(generator.changed() for generator in generators):
            raise CannotCompile("the model draws random numbers from Python or NumPy")
        if not (self._fixed.identical() or self._fixed.holds()):
            raise CannotCompile("the model changes its own attributes in the forward pass")


SAME = """
def same():
    try:
        return {}
    except (LookupError, AttributeError, ValueError):  # an entry or attribute was deleted
        return False
"""


class Expression:
    """Python expressions with the values they had, compared by one generated function.

    One function call per expression would take longer than a small update.
    """

    def __init__(self) -> None:
        self._names: dict[str, Any] = {}
        self._checks: list[tuple[str, str, str]] = []  # (expression, comparison, variable name of the old value)
        self.identical: Callable[[], bool] = self._first

    def names(self, **names: Any) -> None:
        """Define names for use in expressions."""
        self._names.update(names)

    def add(self, where: str, value: Any = None, how: str = "is") -> None:
        """Evaluate and store a Python expression `where`, in which {} stands for the object `value`."""
        name, then = f"thing{len(self._names)}", f"then{len(self._names)}"
        self._names[name] = value
        where = where.replace("{}", name)
        self._names[then] = eval(where, self._names)
        self._checks.append((where, how, then))
        self.identical = self._first

    def equal(self, where: str, value: Any) -> None:
        self.add(where, value, "==")

    def items(self, container: dict[str, Any], keys: Iterable[str]) -> None:
        for key in keys:
            self.add("{}[" + repr(key) + "]", container)

    def contents(self, container: Any) -> None:
        """Guard the items of a container, and their order."""
        kind = type(container)
        if kind in (tuple, frozenset):
            return  # they cannot change; variables that refer to them are guarded
        if kind in (dict, OrderedDict, list, set, deque) and not container:
            self.equal("not {}", container)  # the most frequent case, such as the hooks of a criterion
            return
        self.names(all_identical=all_identical, items_of=items_of)
        if kind in (dict, OrderedDict):
            where = "[*{}, *{}.values()]"
        else:
            where = "[*{}]" if kind in (list, set, deque) else "[*items_of({})]"
        self.add(where, container, "all_identical")

    def checksum(self) -> int:
        """Checksum of all plain values, without lengths of namespaces, to which a process may add entries."""
        values: list[Any] = []
        for where, how, then in self._checks:
            value = self._names[then]
            if how == "all_identical":
                values += value
            elif not where.startswith("len(") and (how == "is" or isinstance(value, bytes)):
                values.append(value)
        return zlib.crc32(repr(sorted(repr(value) for value in values if isinstance(value, PLAIN))).encode())

    def _first(self) -> bool:
        """Generate the function that tests whether all values are identical objects, and call it."""
        checks = " and ".join(
            f"all_identical({where}, {then})" if how == "all_identical" else f"({where}) {how} {then}"
            for where, how, then in self._checks
        )
        exec(SAME.format(checks or True), self._names)
        self.identical = self._names["same"]
        return self.identical()

    def holds(self) -> bool:
        """Test whether all values are identical objects or equal plain values; slower than `identical`."""
        try:
            now = [eval(where, self._names) for where, _, _ in self._checks]
        except (LookupError, AttributeError, ValueError):
            return False
        then = [(how, self._names[name]) for _, how, name in self._checks]
        alike = all(COMPARISONS[how](a, b) for a, (how, b) in zip(now, then, strict=True))
        return alike and self.update_values()

    def update_values(self) -> bool:
        """Store the current values as the ones to compare with; returns True."""
        self._names.update({then: eval(where, self._names) for where, _, then in self._checks})
        return True


def _alike(now: Any, then: Any) -> bool:
    return now is then or (type(now) is type(then) and isinstance(now, PLAIN) and now == then)


COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "is": _alike,
    "==": eq,
    "all_identical": lambda now, then: len(now) == len(then) and all(map(_alike, now, then)),
}


# --- settings, compared over a resume ---------------------------------------------------------------------------------


def describe(settings: tuple[Any, ...]) -> str:
    """Text that is equal for equal settings, in any process. `settings`: transforms, and values with a repr. The names
    of transforms do not tell their functions apart; a checksum of the code does.
    """
    text = repr(settings)
    for function in (f for t in settings[0].samples.transforms for f in _functions(t.coefficients)):
        code = function.__code__
        constants = [value for value in code.co_consts if isinstance(value, PLAIN)]
        text += f" {zlib.crc32(repr((code.co_code, code.co_names, constants)).encode()):08x}"
    return text


def _functions(value: Any) -> Iterator[FunctionType]:
    """The user's functions among a callable object and what it wraps."""
    if isinstance(value, partial):
        yield from _functions(value.func)
    elif isinstance(value, MethodType):
        yield from _functions(value.__func__)
    elif isinstance(value, FunctionType) and is_library_name(value.__module__ or ""):
        for inner in inspect.getclosurevars(value).nonlocals.values():
            yield from _functions(inner)
    elif isinstance(value, FunctionType):
        yield value
    elif callable(value) and isinstance(type(value).__call__, FunctionType):
        yield from _functions(type(value).__call__)
