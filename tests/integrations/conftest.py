"""Tests of frameworks that are not installed are not collected: `make test-integrations` installs all of them."""

from importlib.util import find_spec

NEEDED = {
    "test_huggingface_trl.py": "trl",
    "test_sentence_transformers.py": "sentence_transformers",
    "test_huggingface_private_trl.py": "trl",
    "test_keras_snippet.py": "tensorflow",
}
collect_ignore = [file for file, package in NEEDED.items() if find_spec(package) is None]
