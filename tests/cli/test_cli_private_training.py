"""samplewise train --epsilon: differentially private training of a recipe."""

import json
from pathlib import Path

import pytest
from recipes import HEALTHY, command, one_line

PRIVATE = ("--epsilon", 8, "--delta", 1e-3, "--batch", 16, "--clip", 1.0, "--device", "cpu")


def test_private_training(recipe):
    result = command("train", recipe(HEALTHY), *PRIVATE, "--epochs", 2)
    assert result.exit_code == 0, result.output
    first, *_, done, spent, _log, _checkpoints = result.stdout.splitlines()
    assert first.startswith("privacy      (8, 0.001)-DP for adding or removing one sample; Poisson sampling")
    assert done.endswith("updates in all")
    assert spent.startswith(("spent        (7.99", "spent        (8, 0.001)-DP"))
    assert "0 left" in spent
    lines = [json.loads(line) for line in Path("runs/recipe/log.jsonl").read_text().splitlines()]
    assert not any("loss" in line or "samples" in line for line in lines if line["kind"] == "train")
    assert Path("runs/recipe/privacy.jsonl").exists()
    assert not Path("runs/recipe/privacy.key").exists()


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (("--epsilon", 3), "--epsilon needs --delta, --batch and --clip; found no --delta"),
        (("--epsilon", 3, "--delta", 1e-5, "--batch", 8), "found no --clip"),
        (("--delta", 1e-5), "--delta and --batch must be used with --epsilon"),
        ((*PRIVATE[:4], "--batch", 10**6, "--clip", 1.0), "must be at most"),
    ],
)
def test_bad_arguments(recipe, arguments, output):
    result = command("train", recipe(HEALTHY), *arguments)
    assert result.exit_code == 2
    assert output in one_line(result)
