"""The installed package: its version, and public names that are imported at the first use of one of them.

Torch takes seconds to import, and importing any module of samplewise runs the `__init__.py` of the package. So that the
command line can print its help and errors and complete words at once, `import samplewise` alone does not import torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
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
    """Let a package import the names in its `__all__` from the module `exports` when an attribute is missing."""

    class LazyPackage(ModuleType):
        def __getattr__(self, name: str) -> Any:
            # Tools such as inspect look for special names, which need no import.
            if name.startswith("__") or self.__all__[0] in vars(self):
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            module = import_module(exports)
            vars(self).update({public: getattr(module, public) for public in self.__all__})
            return getattr(self, name)

        def __dir__(self) -> list[str]:
            return sorted({*vars(self), *self.__all__})

        def __setattr__(self, name: str, value: Any) -> None:
            # Python binds a submodule in its package after importing it, but sw.check is the function, not the module.
            if not (name in self.__all__ and value is sys.modules.get(f"{package}.{name}")):
                super().__setattr__(name, value)

    sys.modules[package].__class__ = LazyPackage
