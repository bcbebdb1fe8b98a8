"""Content of a recipe's file, and the errors of recipes. Does not import torch."""

from __future__ import annotations

import os
from pathlib import Path


class RecipeError(Exception):
    """Raised for an error in the recipe; the message is shown to the user without a traceback of samplewise."""

    code = 1  # exit code


class NoRecipeError(RecipeError):
    """Raised if the recipe file cannot be read; exit code 2, as for a bad argument."""

    code = 2


def read_source(path: Path) -> bytes:
    """The content of a recipe's file."""
    try:
        return path.read_bytes()
    except OSError as why:
        remedy = "Check the path and its permissions."
        if isinstance(why, FileNotFoundError) and os.path.exists(f"{path}.py"):
            remedy = f"Did you mean {path}.py?"
        raise NoRecipeError(
            f"{shortened(path)}: a recipe must be a Python file that can be read; found: {why.strerror}. {remedy}"
        ) from why


def shortened(path: Path) -> str:
    """A path for a message, of at most about 200 characters."""
    text = str(path)
    return text if len(text) <= 200 else f"{text[:100]}... ({len(text)} characters)"
