"""The installed package: its version, public names that are imported at their first use, and deprecations.

Torch takes seconds to import, and importing any module of samplewise runs the `__init__.py` of the package. So that the
command line can print its help and errors and complete words at once, `import samplewise` alone does not import torch;
and what a script does not use is not imported.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import cache, wraps
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pkgutil import get_data
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
UNKNOWN = "unknown"


def installed_version(package: str = "samplewise") -> str:
    """Return the version of an installed package; "unknown" for one that is imported without being installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return UNKNOWN


def import_package(package: str, user: str) -> Any:
    """Import a package that is not a dependency of samplewise; `user`: what needs it, for the error message."""
    try:
        return import_module(package)
    except ImportError as why:
        raise ImportError(f"{user} needs {package}: pip install {package}") from why


def import_at_first_use(package: str, exports: str) -> None:
    """Let a package import a name in its `__all__` when it is used first. The file `exports`, which only type checkers
    import, has a line `from module import name as name` for each of them.
    """

    @cache
    def modules() -> dict[str, str]:
        source = (get_data(package, exports) or b"").decode()
        lines = re.findall(r"^from (\S+) import (\w+) as \w+\s*$", source, re.MULTILINE)
        return {name: module for module, name in lines}

    class LazyPackage(ModuleType):
        def __getattr__(self, name: str) -> Any:
            # Tools such as inspect look for special names, which are in no file.
            module = None if name.startswith("__") else modules().get(name)
            if module is None:
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            parent = None if module == package else import_module(module)
            if parent is not None and hasattr(parent, name):
                value = getattr(parent, name)
            else:  # a module
                value = import_module(f"{module}.{name}")
            vars(self)[name] = value
            return value

        def __dir__(self) -> list[str]:
            """Public and special names, for TAB: not the modules that are imported so far."""
            return sorted({*self.__all__, *(name for name in vars(self) if name.startswith("__"))})

        def __setattr__(self, name: str, value: Any) -> None:
            # Python binds a submodule in its package after importing it, but sw.check is the function, not the module.
            if not (name in self.__all__ and value is sys.modules.get(f"{package}.{name}")):
                super().__setattr__(name, value)

    sys.modules[package].__class__ = LazyPackage


# --- deprecations of public names ------------------------------------------------------------------------------------

# deprecated         decorator of a function or method
# renamed_argument   decorator of a function with an argument that had another name
# renamed_names      module-level `__getattr__` for names of a module that had another name
#
# `since` is the version with the first warning, `removed_in` the version without the old name. CONTRIBUTING.md has the
# policy; tests/test_deprecation.py fails when a version still contains names that it was to remove.


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
