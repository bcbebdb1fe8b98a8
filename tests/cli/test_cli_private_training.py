"""samplewise train --epsilon: differentially private training of a recipe."""

import json
from pathlib import Path

import pytest
from recipes import HEALTHY, command, one_line

from samplewise.privacy import accounting

PRIVATE = ("--epsilon", 8, "--delta", 1e-3, "--batch", 16, "--clip", 1.0, "--device", "cpu")


def test_private_training(recipe):
    result = command("train", recipe(HEALTHY), *PRIVATE, "--epochs", 2)
    assert result.exit_code == 0, result.output
    first, *_, done, spent, _log, _checkpoints = result.stdout.splitlines()
    assert first.startswith("privacy      (8, 0.001)-DP for adding or removing one sample, PLD accountant;")
    assert done.endswith("updates in all")
    assert spent.startswith(("spent        (7.99", "spent        (8, 0.001)-DP"))
    assert "0 left" in spent
    lines = [json.loads(line) for line in Path("runs/recipe/log.jsonl").read_text().splitlines()]
    assert not any("loss" in line or "samples" in line for line in lines if line["kind"] == "train")
    assert Path("runs/recipe/privacy.jsonl").exists()
    assert not Path("runs/recipe/privacy.key").exists()


def test_a_rate_is_a_batch_size(recipe, monkeypatch):
    """The recipe has 60 samples. With the accountant of RDP, which takes less time."""

    def by_rdp(function):
        return lambda *arguments: function(*["rdp" if value == "pld" else value for value in arguments])

    for name in ("calibrate", "epsilon"):
        monkeypatch.setattr(accounting, name, by_rdp(getattr(accounting, name)))
    plans = []
    for k, options in enumerate((("--batch", 15, "--epochs", 2), ("--sample-rate", 0.25, "--updates", 8))):
        result = command("train", recipe(HEALTHY), *PRIVATE[:4], *PRIVATE[6:], *options, "--run", f"runs/{k}")
        assert result.exit_code == 0, result.output
        plans.append(result.stdout.splitlines()[:2])
    assert plans[0] == plans[1]
    assert "8 updates of Poisson samples, rate 0.25" in plans[0][1]


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (("--epsilon", 3), "--epsilon needs --delta, --clip, and --batch or --sample-rate; found no --delta"),
        (("--epsilon", 3, "--delta", 1e-5, "--batch", 8), "found no --clip"),
        (("--delta", 1e-5), "--delta, --batch and --sample-rate must be used with --epsilon"),
        (("--sample-rate", 0.1), "--delta, --batch and --sample-rate must be used with --epsilon"),
        ((*PRIVATE, "--sample-rate", 0.1), "--batch: give one of --batch and --sample-rate; found both"),
        ((*PRIVATE[:4], "--clip", 1.0), "--batch: give one of --batch and --sample-rate; found neither"),
        ((*PRIVATE[:4], "--clip", 1.0, "--sample-rate", 2), "--sample-rate: sample_rate must be a number in (0, 1]"),
        ((*PRIVATE[:4], "--batch", 10**6, "--clip", 1.0), "must be at most"),
        ((*PRIVATE, "--ledger"), "--ledger cannot be used with --epsilon: the guarantee does not cover losses"),
        *[
            ((*PRIVATE, "--epsilon", value), f"--epsilon: must be a finite number above 0; found {float(value)}")
            for value in (-3, 0, "nan", "inf", "-inf")
        ],
        *[
            ((*PRIVATE, "--delta", value), f"--delta: must be a number between 0 and 1; found {float(value)}")
            for value in (-1, 0, 1, 1.5, "nan")
        ],
        *[
            ((*PRIVATE, "--clip", value), f"--clip: must be a finite number above 0; found {float(value)}")
            for value in (-1, 0, "nan", "inf")
        ],
        ((*PRIVATE, "--epsilon", "three"), "'--epsilon': "),
        ((*PRIVATE, "--batch", 0), "'--batch': "),
        ((*PRIVATE, "--epsilon", "1e12"), "--epsilon: epsilon must be one that a noise multiplier between 0.05 and"),
        ((*PRIVATE, "--updates", 10**8), "--updates: updates must be at most 10,000,000 with the accountant 'pld'"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_bad_arguments(recipe, arguments, output):
    result = command("train", recipe(HEALTHY), *arguments)
    assert result.exit_code == 2
    assert output in one_line(result)
    assert not Path("runs").exists()
