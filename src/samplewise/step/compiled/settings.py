"""Description of the settings that are part of compiled code, which is compared over a resume."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from samplewise.core.batches import PLAIN
from samplewise.core.reachable import is_library_name


def describe(settings: tuple[Any, ...]) -> str:
    """Text that is equal for equal settings, in any process. `settings`: transforms, and values with a repr. The names
    of transforms do not tell their functions apart; a checksum of the code does.
    """
    functions = [f for t in settings[0].samples.transforms for f in _functions(t.answer)]
    return repr(settings) + "".join(f" {_checksum(function):08x}" for function in functions)


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


def _checksum(function: FunctionType) -> int:
    code = function.__code__
    constants = [value for value in code.co_consts if isinstance(value, PLAIN)]
    return zlib.crc32(repr((code.co_code, code.co_names, constants)).encode())
