"""samplewise replay."""

import json
import re
from pathlib import Path

import pytest
from recipes import HEALTHY, command, one_line

import samplewise as sw

GUARDED = """

import samplewise as sw


def transforms():
    return [sw.guard(window="20up")]


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
"""


def rows(result):
    """Position, id, loss, norm and weight of each sample of the table."""
    cells = re.findall(r"^ *(\d+) +(\S+) +(\S+) +(\S+) +(\S+) +\S* *$", result.stdout, re.MULTILINE)
    return [(int(position), id, float(loss), float(norm), float(weight)) for position, id, loss, norm, weight in cells]


@pytest.mark.sweep(2 / 5)
@pytest.mark.parametrize("update", [0, 4, 14, 15, 22])
def test_a_replay_gives_the_recorded_losses_and_norms(recipe, update):
    path = recipe(HEALTHY + GUARDED)
    assert command("train", path, "--ledger", "--epochs", 8, "--samples", 13, "--device", "cpu").exit_code == 0
    files = {file: file.read_bytes() for file in Path("runs/recipe").rglob("*") if file.is_file()}
    result = command("replay", "runs/recipe", "--update", update, "--device", "cpu")
    assert result.exit_code == 0
    assert "largest difference to the losses in the ledger: 0" in result.stdout
    ledger = sw.read_ledger("runs/recipe").to_pandas()
    recorded = ledger[ledger["update"] == update].sort_values("norm", ascending=False)
    assert [int(id) for _, id, *_ in rows(result)] == recorded["id"].tolist()
    for column, name in ((2, "loss"), (3, "norm"), (4, "weight")):
        assert [row[column] for row in rows(result)] == pytest.approx(recorded[name].tolist(), rel=1e-3)
    assert {file: file.read_bytes() for file in Path("runs/recipe").rglob("*") if file.is_file()} == files
    start = json.loads(Path("runs/recipe/recipe.json").read_text())
    assert Path(start["recipe"]).name == "recipe.py"


def test_the_update_that_ended_a_run_is_shown_with_its_samples(recipe):
    broken = HEALTHY.replace("loader = DataLoader", "x[17] = float('nan')\n    loader = DataLoader")
    path = recipe(broken.replace("shuffle=True", "shuffle=False"))
    assert command("train", path, "--epochs", 1, "--device", "cpu").exit_code == 1
    result = command("replay", "runs/recipe", "--update", 0, "--limit", 3, "--device", "cpu")
    assert result.exit_code == 0
    assert "the update was not made: losses must be finite; found nan at sample 17" in result.stdout
    assert re.search(r"^ *17 +None +nan +nan", result.stdout, re.MULTILINE)


def test_a_directory_without_a_recipe_is_refused(tmp_path):
    assert one_line(command("replay", tmp_path, "--update", 3)) == (
        "samplewise: Invalid value for RUN: must be a run of samplewise train, which has a recipe.json; found none "
        f"that can be read in {tmp_path}."
    )


SAMPLED = (
    HEALTHY
    + GUARDED.replace('sw.guard(window="20up")', 'sw.guard(window="20up"), sw.weight("importance")')
    + """

x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
dataset = TensorDataset(x, x[:, :3].argmax(1))
sampler = sw.ImportanceSampler(dataset, 8, every="3up")


def data():
    return DataLoader(sw.Indexed(dataset), batch_sampler=sampler)


def callbacks():
    return [sampler, sw.callbacks.ModelCheckpoint(every="7up")]
"""
)


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("update", [0, 6, 9, 16])
def test_a_replay_of_importance_sampling_draws_the_recorded_samples(recipe, update):
    path = recipe(SAMPLED)
    assert command("train", path, "--ledger", "--epochs", 3, "--samples", 8, "--device", "cpu").exit_code == 0
    result = command("replay", "runs/recipe", "--update", update, "--device", "cpu")
    assert result.exit_code == 0
    assert "largest difference to the losses in the ledger: 0\n" in result.stdout
    ledger = sw.read_ledger("runs/recipe").to_pandas()
    recorded = ledger[ledger["update"] == update].sort_values("norm", ascending=False, kind="stable")
    assert [int(id) for _, id, *_ in rows(result)] == recorded["id"].tolist()
    assert [row[4] for row in rows(result)] == pytest.approx(recorded["weight"].tolist(), rel=1e-3)
