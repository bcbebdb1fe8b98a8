"""The examples of the Hugging Face trainers find what they are made to find."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed(name, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert list(tmp_path.iterdir()) == [], "an example leaves no files behind"
    return capsys.readouterr().out


def test_wrong_labels_of_a_classification(capsys, monkeypatch, tmp_path):
    output = printed("huggingface_classification.py", capsys, monkeypatch, tmp_path)
    found, first = map(
        int, re.search(r"(\d+) of the (\d+) most suspicious samples have a wrong label", output).groups()
    )
    assert found >= 0.9 * first


@pytest.mark.slow
def test_shuffled_sentences_of_a_fine_tuning(capsys, monkeypatch, tmp_path):
    output = printed("sft_lora.py", capsys, monkeypatch, tmp_path)
    found, first = map(int, re.search(r"(\d+) of the (\d+) most suspicious sentences have shuffled", output).groups())
    assert found >= 0.9 * first
