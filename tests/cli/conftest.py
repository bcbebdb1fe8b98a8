import sys

import pytest

from samplewise.core import text as progress


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    """Run in a temporary directory; remove modules and paths that a recipe adds. No notices on a busy machine."""
    monkeypatch.setattr(progress, "PATIENCE", 60.0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("recipe") and not getattr(sys.modules[name], "__spec__", None):
            del sys.modules[name]


@pytest.fixture
def recipe(tmp_path):
    def write(text, name="recipe.py"):
        (tmp_path / name).write_text(text)
        return name

    return write
