"""The installed package: its version, and public names that are imported at their first use.

Torch takes seconds to import, and importing any module of samplewise runs the `__init__.py` of the package. So that the
command line can print its help and errors and complete words at once, `import samplewise` alone does not import torch;
and what a script does not use is not imported.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pkgutil import get_data
from types import ModuleType
from typing import Any

UNKNOWN = "unknown"


def installed_version(package: str = "samplewise") -> str:
    """Return the version of an installed package; "unknown" for one that is imported without being installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return UNKNOWN


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
            return sorted({*vars(self), *self.__all__})

        def __setattr__(self, name: str, value: Any) -> None:
            # Python binds a submodule in its package after importing it, but sw.check is the function, not the module.
            if not (name in self.__all__ and value is sys.modules.get(f"{package}.{name}")):
                super().__setattr__(name, value)

    sys.modules[package].__class__ = LazyPackage
