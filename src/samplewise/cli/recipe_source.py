"""Source of a recipe: content of its file, the names that it defines, with their lines, and the errors of recipes.

Does not import torch.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

SIMILAR = 0.72  # ratio of difflib: loss_fn is similar to loss, calls not to callbacks
SYNONYMS = {
    "criterion": "loss",
    "compute_loss": "loss",
    "optim": "optimizer",
    "opt": "optimizer",
    "net": "model",
    "network": "model",
    "loader": "data",
    "loaders": "data",
    "dataloader": "data",
    "train_loader": "data",
}
VERBS = re.compile("^(get|make|build|create|load|configure)_")


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


# --- names ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Definitions:
    """Names that a recipe defines or imports at its top level."""

    lines: dict[str, int]  # name -> line of its last definition
    unused: list[str]  # public functions and variables that the recipe itself does not use

    def near_misses(self, names: Collection[str]) -> dict[str, str]:
        """Name of a recipe, one of `names` -> unused name that is similar to it."""
        matches = {}
        for unused in self.unused:
            plain = VERBS.sub("", unused)
            if plain in names:
                matches[plain] = unused
            elif SYNONYMS.get(plain) in names:
                matches[SYNONYMS[plain]] = unused
            else:
                matches |= dict.fromkeys(get_close_matches(unused, names, n=1, cutoff=SIMILAR), unused)
        return matches


def read_definitions(source: bytes) -> Definitions:
    """Definitions of a recipe whose source compiles."""
    tree = ast.parse(source)
    visitor = _TopLevel()
    visitor.visit(tree)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    unused = [name for name in visitor.defined if not (name in used or name.startswith("_"))]
    return Definitions(visitor.others | visitor.defined, unused)


class _TopLevel(ast.NodeVisitor):
    """Collects the names that are bound outside of functions, classes and comprehensions."""

    def __init__(self) -> None:
        self.defined: dict[str, int] = {}  # functions and variables
        self.others: dict[str, int] = {}  # classes and imports

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.defined[node.name] = node.lineno

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.others[node.name] = node.lineno

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.defined[node.id] = node.lineno

    def visit_alias(self, node: ast.alias) -> None:
        self.others[(node.asname or node.name).partition(".")[0]] = node.lineno

    def skip(self, node: ast.AST) -> None:
        """These have names of their own."""

    visit_Lambda = visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = skip
