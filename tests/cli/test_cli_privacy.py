"""samplewise privacy: calibration, tables, figure and errors."""

import sys
from pathlib import Path

import pytest
from recipes import command, one_line

from samplewise.errors import TrainingWarning
from samplewise.privacy.accounting import Releases, calibrate, epsilon

SETTING = ["--delta", 1e-5, "--dataset-size", 1000, "--batch", 200]  # cheap to compute


def rows(text):
    """First word or words of each line of a table -> the other cells."""
    cells = [line.split("  ") for line in text.splitlines() if "  " in line]
    return {line[0]: [cell.strip() for cell in line[1:] if cell.strip()] for line in cells}


def test_calibration():
    result = command("privacy", "--epsilon", 1, *SETTING, "--epochs", 4)
    assert (result.exit_code, result.stderr) == (0, "")
    table = rows(result.stdout)
    noise = calibrate(1.0, 1e-5, 0.2, 20)
    assert table["updates"] != [] and "20 (4 epochs)" in result.stdout
    assert 0 <= float(table["noise multiplier"][0]) - noise < 1.1e-4
    assert table["sample rate"] == ["0.2 (200 of 1,000 samples)"]
    assert table["public divisor"] == ["200 (sample rate × number of samples)"]
    for name, accountant in (("epsilon, PLD", "pld"), ("epsilon, RDP", "rdp")):
        printed = float(table[name][0].split()[0])
        assert 0 <= printed - epsilon(Releases(noise, 0.2, 20), 1e-5, accountant) < 1.1e-4
    assert float(table["epsilon, PLD"][0].split()[0]) <= 1.0
    assert {"1e-09", "1e-05", "1e-03", "2", "10", "20"} <= set(table)
    assert table["20"] == table["1e-05"] == [table[f"epsilon, {name}"][0].split()[0] for name in ("PLD", "RDP")]


def test_the_guarantee_is_described():
    text = command("privacy", "--noise-multiplier", 8, *SETTING, "--updates", 3).stdout
    for words in ("Poisson sampling", "adding or removing one sample", "number of samples is public", "shuffles"):
        assert words in text


def test_epsilon_of_a_noise_multiplier():
    result = command("privacy", "--noise-multiplier", 10, *SETTING, "--updates", 100)
    assert result.exit_code == 0
    table = rows(result.stdout)
    assert table["noise multiplier"] == ["10.0000"]
    printed = float(table["epsilon, PLD"][0].split()[0])
    assert 0 <= printed - epsilon(Releases(10.0, 0.2, 100), 1e-5) < 1.1e-4


def test_rdp_finds_more_noise():
    result = command("privacy", "--epsilon", 1, *SETTING, "--updates", 20, "--accountant", "rdp")
    table = rows(result.stdout)
    assert float(table["epsilon, RDP"][0].split()[0]) <= 1.0
    assert float(table["noise multiplier"][0]) > calibrate(1.0, 1e-5, 0.2, 20)


def test_full_batches_and_one_update():
    result = command("privacy", "--epsilon", 2, "--delta", 1e-5, "--dataset-size", 100, "--batch", 100, "--updates", 1)
    assert result.exit_code == 0
    assert rows(result.stdout)["sample rate"] == ["1 (100 of 100 samples)"]


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("name", ["curve.png", "curve.svg"])
def test_the_curve_is_drawn(name):
    result = command("privacy", "--noise-multiplier", 20, *SETTING, "--updates", 9, "--to", name)
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, f"curve  {name}")
    start = Path(name).read_bytes()[:100]
    assert start.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--updates", 9], "--epsilon: give one of --epsilon and --noise-multiplier; found neither."),
        (["--epsilon", 1, "--noise-multiplier", 2, "--updates", 9], "--epsilon: give one of --epsilon and "),
        (["--epsilon", 1], "--epochs: give one of --epochs and --updates; found neither."),
        (["--epsilon", 1, "--epochs", 1, "--updates", 9], "--epochs: give one of --epochs and --updates; found both."),
        (
            ["--epsilon", 1, "--epochs", 1, "--sample-rate", 0.1],
            "--batch: give one of --batch and --sample-rate; found b",
        ),
        (["--epsilon", 1, "--epochs", 0], "--epochs: epochs must be a positive number; found 0.0."),
        (["--epsilon", -1, "--epochs", 1], "--epsilon: epsilon must be a finite number > 0; found -1.0."),
        (["--epsilon", 1e9, "--epochs", 1, "--accountant", "rdp"], "--epsilon: epsilon must be one that a noise "),
        (["--epsilon", 1, "--epochs", 1, "--delta", 2], "--delta: delta must be a number in (0, 1); found 2.0."),
        (["--noise-multiplier", 0, "--epochs", 1], "--noise-multiplier: must be a positive number; found 0.0."),
        (["--epsilon", 1, "--epochs", 1, "--batch", 1001], "--batch: must be at most 1000, the number of samples; "),
        (["--epsilon", 1, "--epochs", 1, "--accountant", "prv"], "--accountant: must be pld or rdp; found 'prv'."),
        (["--epsilon", 1, "--epochs", 1, "--to", "."], "--to: must be a file; found a directory, ."),
        (["--epsilon", 1, "--epochs", 1, "--to", "a.jpg"], "--to: must end in .png, .pdf or .svg; found a.jpg."),
    ],
)
def test_bad_options_get_one_line(options, message):
    result = command("privacy", *SETTING, *options)
    assert one_line(result).startswith(f"samplewise: Invalid value for {message}")
    assert result.exit_code == 2


def test_missing_options_are_named():
    result = command("privacy", "--epsilon", 1, "--delta", 1e-5, "--dataset-size", 100, "--updates", 9)
    assert one_line(result).endswith("for --batch: give one of --batch and --sample-rate; found neither.")
    result = command("privacy", "--epsilon", 1, "--delta", 1e-5, "--batch", 100, "--updates", 9)
    assert one_line(result).endswith("for --dataset-size: --batch needs --dataset-size; found none.")


def test_a_sample_rate():
    options = ["--noise-multiplier", 10, "--delta", 1e-5, "--sample-rate", 0.2, "--epochs", 20]
    table = rows(command("privacy", *options).stdout)
    assert table["sample rate"] == ["0.2"]
    assert table["public divisor"] == ["sample rate × number of samples"]
    expected = rows(command("privacy", "--noise-multiplier", 10, *SETTING, "--updates", 100).stdout)
    assert table["updates"] == expected["updates"]
    assert table["epsilon, PLD"] == expected["epsilon, PLD"]
    sized = rows(command("privacy", *options, "--dataset-size", 1002).stdout)
    assert sized["sample rate"] == ["0.2 (200.4 of 1,002 samples)"]


def test_a_delta_that_is_too_large():
    with pytest.warns(
        TrainingWarning, match=r"delta should be below 1 / number of samples, .*; found 0\.01 for at least 100 sam"
    ):
        result = command("privacy", "--noise-multiplier", 10, *SETTING, "--updates", 3, "--delta", 0.01)
    assert result.exit_code == 0


def test_a_curve_that_cannot_be_written():
    result = command("privacy", "--noise-multiplier", 10, *SETTING, "--updates", 3, "--to", "missing/curve.png")
    assert result.exit_code == 1
    assert result.stderr.startswith("the curve cannot be written: ")


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)
    result = command("privacy", "--noise-multiplier", 9.87, *SETTING, "--updates", 3)
    assert one_line(result).endswith("pip install 'samplewise[privacy]'.")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = command("privacy", "--noise-multiplier", 9.87, *SETTING, "--updates", 3, "--to", "curve.png")
    assert one_line(result) == "samplewise: the curve needs matplotlib: pip install 'samplewise[report]'"
    assert result.exit_code == 1
