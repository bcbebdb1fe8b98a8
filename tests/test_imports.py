"""The import law where a list of forbidden names would leave gaps: what the engine may import."""

import ast
import sys
from pathlib import Path

import pytest

ENGINE = Path(__file__).parents[1] / "src" / "samplewise" / "engine"
ALLOWED = ("torch", "samplewise.errors", "samplewise.engine")


def _imported(path: Path):
    """Absolute names of the modules that `path` imports, wherever in the file."""
    package = ["samplewise", "engine", *path.relative_to(ENGINE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            # `from .. import errors` names the module on the right, `from ..errors import E` left.
            names = [f"{module}.{alias.name}" for alias in node.names]
            yield from names if module == "samplewise" else [module]


def _is_allowed(name: str) -> bool:
    return name.split(".")[0] in sys.stdlib_module_names or any(
        name == allowed or name.startswith(allowed + ".") for allowed in ALLOWED
    )


def _files():
    return sorted(ENGINE.rglob("*.py"))


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(ENGINE)))
def test_the_engine_imports_only_the_standard_library_torch_and_errors(path):
    assert [name for name in _imported(path) if not _is_allowed(name)] == []


def test_there_is_an_engine_to_look_at():
    assert _files()
