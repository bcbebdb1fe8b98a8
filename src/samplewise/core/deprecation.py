"""Deprecations of public names. Each use gives a DeprecationWarning at the line of the caller.

deprecated         decorator of a function or method
renamed_argument   decorator of a function with an argument that had another name
renamed_names      module-level `__getattr__` for names of a module that had another name

`since` is the version with the first warning, `removed_in` the version without the old name. CONTRIBUTING.md has the
policy; tests/test_deprecation.py fails when a version still contains names that it was to remove.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def deprecated(instead: str, *, since: str, removed_in: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for a function or method that will be removed.

    instead: what to use, as in "g.norms(by='parameter')".
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        message = _message(f"{function.__qualname__}()", instead, since, removed_in)

        @wraps(function)
        def warned(*args: P.args, **kwargs: P.kwargs) -> R:
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            return function(*args, **kwargs)

        return warned

    return decorate


def renamed_argument(old: str, new: str, *, since: str, removed_in: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for a function whose argument `new` was named `old`: the old keyword sets the new argument."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = f"{function.__qualname__}()"
        message = _message(f"the argument {old!r} of {name}", repr(new), since, removed_in)

        @wraps(function)
        def renamed(*args: P.args, **kwargs: P.kwargs) -> R:
            if old in kwargs:
                if new in kwargs:
                    raise TypeError(f"{name} must get one of {new!r} and its former name {old!r}; found both.")
                warnings.warn(message, DeprecationWarning, stacklevel=2)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return renamed

    return decorate


def renamed_names(module: str, names: Mapping[str, str], *, since: str, removed_in: str) -> Callable[[str], Any]:
    """Return a `__getattr__` for a module: each old name gives the object of the new name in the same module.

    module: `__name__` of the module.
    names: old name -> new name.
    """

    def module_getattr(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new = names[name]
        message = _message(f"{module}.{name}", f"{module}.{new}", since, removed_in)
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], new)

    return module_getattr


def _message(name: str, instead: str, since: str, removed_in: str) -> str:
    return f"{name} is deprecated since samplewise {since} and will be removed in {removed_in}. Use {instead}."
