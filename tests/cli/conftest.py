import sys

import pytest


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    """Writer of recipes in a temporary directory; removes the modules and paths that a recipe adds."""
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
