"""Signatures of functions that the caller passes."""

from __future__ import annotations

import inspect
from typing import Any


def accepts(function: Any, arguments: int) -> bool:
    """True if a function can be called with this number of positional arguments, or if its signature is unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of functions written in C
        return True
    try:
        signature.bind(*[None] * arguments)
    except TypeError:
        return False
    return True
