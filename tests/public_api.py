"""Text form of the public names: signatures of functions, and of the constructors, methods and properties of classes.

python tests/public_api.py      # make api: writes tests/public_api.txt

tests/test_public_api.py compares the file with the code.
"""

import dataclasses
import inspect
import os
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, get_overloads

os.environ.setdefault("KERAS_BACKEND", "torch")
FILE = Path(__file__).with_suffix(".txt")
MODULES = (
    "samplewise",
    "samplewise.attribution",
    "samplewise.attribution.evaluate",
    "samplewise.diagnostics",
    "samplewise.loop.callbacks",
    "samplewise.loop.loggers",
    "samplewise.parallel",
    "samplewise.testing",
)
# Modules whose import takes seconds, because they import a framework.
FRAMEWORKS = (
    "samplewise.integrations.huggingface",
    "samplewise.integrations.keras",
    "samplewise.integrations.lightning",
)
# Results: the library makes them, and users only read them.
RESULTS = (
    "AttributionResults",
    "BackwardResult",
    "EKFAC",
    "Gradients",
    "Hessian",
    "LDS",
    "Noise",
    "Removal",
    "Similarity",
    "Suspects",
    "Update",
)
WIDTH = 120
SPECIAL = ("__call__", "__getitem__", "__iter__", "__len__", "__enter__")  # special methods that users rely on


def section(name: str) -> str:
    """Public names of a module, one or more lines each, sorted."""
    module = import_module(name)
    entries = [line for public in sorted(public_names(module)) for line in entry(public, getattr(module, public), name)]
    return "\n".join([f"# {name}", *entries]) + "\n"


def public_names(module: ModuleType) -> list[str]:
    """Names in `__all__`; without it, the functions and classes that the module defines or re-exports as `x as x`."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    exported = re.findall(r"^from samplewise\S* import (\w+) as \1$", inspect.getsource(module), re.MULTILINE)
    defined = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return exported + [name for name in defined if not name.startswith("_")]


def entry(name: str, value: Any, module: str) -> Iterator[str]:
    if module != "samplewise" and getattr(import_module("samplewise"), name, None) is value:
        yield f"{name}: samplewise.{name}"
    elif inspect.isclass(value):
        yield from class_lines(name, value)
        yield from (f"    {line}" for member in members(value) for line in member)
    elif callable(value):
        yield from function_lines(name, value)
    else:
        yield f"{name}: {type(value).__name__}"


def class_lines(name: str, kind: type) -> list[str]:
    bases = ", ".join(base.__name__ for base in kind.__bases__ if base is not object)
    end = f": {bases}" if bases else ""
    if issubclass(kind, BaseException) or name in RESULTS:
        return [f"class {name}{end}"]
    return call(f"class {name}", arguments(kind), end)


def members(kind: type) -> Iterator[list[str]]:
    """Methods, properties and, of a result, fields of a class and of its bases in samplewise, sorted by name."""
    is_result = kind.__name__ in RESULTS and dataclasses.is_dataclass(kind)
    fields = {field.name: annotation(field.type) for field in dataclasses.fields(kind)} if is_result else {}
    for name in sorted({*dir(kind), *fields}):
        if name in fields:
            yield [f"{name}: {fields[name]}"]
            continue
        owner = next((base for base in kind.__mro__ if name in vars(base)), None)
        if owner is None or not owner.__module__.startswith("samplewise") or not is_public(name):
            continue
        member = vars(owner)[name]
        getter = getattr(member, "fget", None) or getattr(member, "func", None)  # of a property or a cached property
        function = getattr(member, "__func__", member)  # of a class method or static method
        if getter is not None:
            yield [f"{name}: {annotation(inspect.signature(getter).return_annotation)}"]
        elif inspect.isfunction(function):
            yield list(function_lines(name, function))


def is_public(name: str) -> bool:
    return name in SPECIAL or not name.startswith("_")


# ----------------------------------------------------------------------------------- signatures


def function_lines(name: str, function: Any) -> Iterator[str]:
    """`name(arguments) -> result`, for each overload."""
    variants = get_overloads(function) if inspect.isfunction(function) else []
    for each in variants or [function]:
        result = annotation(inspect.signature(each).return_annotation)
        yield from call(name, arguments(each), f" -> {result}" if result else "")


def call(name: str, words: list[str], end: str) -> list[str]:
    """`name(words)end`, on one line if it is short enough, else with a line for each argument."""
    line = f"{name}({', '.join(words)}){end}"
    return [line] if len(line) <= WIDTH else [f"{name}(", *(f"    {word}," for word in words), f"){end}"]


def arguments(function: Any) -> list[str]:
    """Arguments as in the source, without `self` and `cls`."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")]
    words = []
    for before, parameter in zip([None, *parameters], parameters, strict=False):
        if parameter.kind is parameter.KEYWORD_ONLY and (before is None or before.kind < parameter.VAR_POSITIONAL):
            words.append("*")
        words.append(argument(parameter))
    return words


def argument(parameter: inspect.Parameter) -> str:
    star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    kind = annotation(parameter.annotation)
    word = f"{star}{parameter.name}" + (f": {kind}" if kind else "")
    return word if parameter.default is parameter.empty else f"{word} = {default(parameter.default)}"


def default(value: Any) -> str:
    """The default as a literal; a function by its name, and an object without a short literal by its class."""
    name = getattr(value, "__name__", type(value).__name__)
    return f"<{name}>" if " at 0x" in repr(value) or len(repr(value)) > WIDTH // 2 else repr(value)


def annotation(value: Any) -> str:
    """Annotation as in the source."""
    if value is inspect.Parameter.empty:
        return ""
    return value if isinstance(value, str) else inspect.formatannotation(value)


if __name__ == "__main__":
    FILE.write_text("\n".join(section(name) for name in (*MODULES, *FRAMEWORKS)))
    print(f"{FILE.name}: {len(FILE.read_text().splitlines())} lines", file=sys.stderr)
