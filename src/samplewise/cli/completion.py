"""Shell completion of paths: recipes and run directories."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from samplewise.core.files import RUN_FILE

DEPTH = 3  # directories below the one that was typed


def complete_recipe(incomplete: str) -> list[str]:
    """Return the Python files that begin with what was typed, there and one directory below."""
    return _shown(path for depth in range(2) for path in _matches(incomplete, depth, "*.py"))


def complete_run(incomplete: str) -> list[str]:
    """Return the run directories that begin with what was typed, at most three levels below."""
    return _shown(path.parent for depth in range(1, DEPTH + 1) for path in _matches(incomplete, depth, RUN_FILE))


def _matches(incomplete: str, depth: int, name: str) -> Iterator[Path]:
    """Paths `incomplete*/.../name` with `depth` directories between, or `incomplete*` that match `name` for depth 0."""
    start = glob.escape(incomplete)
    pattern = f"{start}{name}" if depth == 0 else os.path.join(f"{start}*", *["*"] * (depth - 1), name)
    return map(Path, glob.iglob(pattern))  # without hidden files


def _shown(paths: Iterable[Path]) -> list[str]:
    return sorted(str(path) for path in paths)
