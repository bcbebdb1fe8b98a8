"""Scalars in the kernels that Inductor generates, read once before a loop instead of in each iteration.

The loop of an optimizer reads learning rate, momentum and the finite flag from memory. The C++ compiler reads and
converts them again for each vector, because the store of a vector may change any memory. Tensors of different dtypes
share none, so that a scalar may be read before a block of loops that stores other dtypes only.
"""

from __future__ import annotations

import re

POINTER = re.compile(r"(const )?(\w+)\* (\w+_ptr\d+)(?=[,)])")
BLOCK = re.compile(r"^    \{\n(.*?)^    \}\n", re.MULTILINE | re.DOTALL)
SCALAR = re.compile(r"^( +auto tmp\d+ = )(\w+_ptr\d+)\[static_cast<int64_t>\((\d+)L\)\];$", re.MULTILINE)
NAME = re.compile(r"\w+_ptr\d+")


def hoist_scalars(source: str) -> str:
    """Source of a kernel in which each block of loops reads its scalars first."""
    pointers = POINTER.findall(source)
    types = {name: kind for _, kind, name in pointers}
    writable = {name for const, _, name in pointers if not const}
    return BLOCK.sub(lambda block: _hoisted(block[0], types, writable), source)


def _hoisted(block: str, types: dict[str, str], writable: set[str]) -> str:
    used = set(NAME.findall(SCALAR.sub("", block)))
    stored = {types.get(name, "") for name in used & writable}
    if not used <= types.keys():
        return block
    reads: dict[str, str] = {}

    def local(found: re.Match[str]) -> str:
        start, name, index = found.groups()
        if name not in types or types[name] in stored:
            return found[0]
        value = f"{name}_{index}"
        reads[value] = f"        const auto {value} = {name}[{index}];\n"
        return f"{start}{value};"

    changed = SCALAR.sub(local, block)
    return "    {\n" + "".join(reads.values()) + changed.removeprefix("    {\n")
