"""Tests of frameworks that are not installed are not collected: `make test-integrations` installs all of them."""

import os
from importlib.util import find_spec

import pytest

NEEDED = {
    "test_huggingface_trl.py": "trl",
    "test_huggingface_pairs.py": "trl",
    "test_sentence_transformers.py": "sentence_transformers",
    "test_huggingface_private_trl.py": "trl",
    "test_what_runs.py": "trl",
    "test_keras_snippet.py": "tensorflow",
}
collect_ignore = [file for file, package in NEEDED.items() if find_spec(package) is None]


@pytest.fixture(autouse=True)
def _environment():
    """TrainingArguments of transformers 4 set variables that later ones read, for bf16 and torch_compile."""
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)
