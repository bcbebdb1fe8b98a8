"""Schemas of nested states: required keys and kinds of values.

A schema is a `Kind`, a list of one schema (a list of such values), or a dict of schemas by key. A dict may have further
keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from samplewise.loop.checkpoint.encoding import Malformed, type_name


class Kind(NamedTuple):
    """Named predicate of a value."""

    name: str
    holds: Callable[[Any], bool]


Schema = Kind | list[Any] | dict[str, Any]

COUNT = Kind("a whole number, 0 or more", lambda value: type(value) is int and value >= 0)
WHOLE = Kind("a whole number", lambda value: type(value) is int)
NUMBER = Kind("a number", lambda value: type(value) in (int, float))
POSITIVE = Kind("a finite number above 0", lambda value: type(value) in (int, float) and 0 < value < math.inf)
TEXT = Kind("a text", lambda value: type(value) is str)
TENSOR = Kind("a tensor", lambda value: isinstance(value, Tensor))
DICT = Kind("a dict", lambda value: isinstance(value, dict))
LIST = Kind("a list", lambda value: type(value) is list)


def maybe(kind: Kind) -> Kind:
    """Return a kind that also accepts None."""
    return Kind(f"{kind.name}, or None", lambda value: value is None or kind.holds(value))


def check(value: Any, schema: Schema, place: str = "") -> None:
    """Raise `Malformed` with the path of the first value that is missing or of another kind."""
    if isinstance(schema, Kind):
        if not schema.holds(value):
            raise Malformed(f"{_shown(value)} as {place} in place of {schema.name}")
    elif isinstance(schema, list):
        check(value, LIST, place)
        for k, item in enumerate(value):
            check(item, schema[0], f"{place}.{k}")
    else:
        check(value, DICT, place)
        for key, inner in schema.items():
            where = f"{place}.{key}" if place else key
            if key not in value:
                raise Malformed(f"no {where}")
            check(value[key], inner, where)


def _shown(value: Any) -> str:
    if type(value) in (bool, int, float, str, type(None)):
        return repr(value)[:40]
    return type_name(value)
