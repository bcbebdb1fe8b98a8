"""The examples of loops of frameworks run, and find the samples that were made wrong."""

import re
import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = [
    "accelerate_loop.py",
    "fabric_loop.py",
    "huggingface_classification.py",
    "keras_fit.py",
    "lightning_trainer.py",
    *(["sft_lora.py"] if find_spec("trl") else []),  # as in conftest.py
]


@pytest.mark.sweep(1 / 5)
@pytest.mark.parametrize("name", NAMES)
def test_wrong_samples_are_found(name, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert list(tmp_path.iterdir()) == [], "an example leaves no files behind"
    found, wrong = map(int, re.search(r"(\d+) of (?:the )?(\d+) ", capsys.readouterr().out).groups())
    assert found >= 0.9 * wrong
