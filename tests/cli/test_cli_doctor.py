"""samplewise doctor."""

import pytest
from recipes import HEALTHY, WITH_BATCH_NORM, command, process

from samplewise.cli import doctor


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(doctor, "ROUNDS", 3)
    monkeypatch.setattr(doctor, "PATIENCE", 60.0)


def test_a_healthy_recipe(recipe):
    result = command("doctor", recipe(HEALTHY))
    said = result.stdout
    assert result.exit_code == 0
    assert result.stderr == ""
    assert said.startswith("engine against the loop, float64, 16 samples: ok\n")
    assert "The plan\n16 samples, strategy " in said
    assert "The first update\nnothing to warn of\n" in said
    assert "Milliseconds per update\n16 samples of a batch of 20\n" in said
    assert "all at once  microbatch 8  microbatch 4\n" in said
    assert "- An update that clips each sample takes " in said
    assert said.endswith("- All is well: nothing speaks against training with this recipe.\n")


def test_batch_norm_in_training_mode(recipe):
    result = command("doctor", recipe(WITH_BATCH_NORM))
    said = result.stdout
    assert result.exit_code == 1
    assert said.startswith("engine against the loop, float64, 16 samples: NOT OK\nrefused: the loss of a sample must ")
    assert "The plan\nrefused, as above\n" in said
    assert "refused, with sw.clip(1.0): the loss of a sample must not depend on other samples" in said
    assert "- BatchNorm in training mode mixes samples (module 1). A sample then has no gradient of its own." in said
    assert "All is well" not in said


def test_warnings_are_told_and_counted(recipe):
    result = command("doctor", recipe(HEALTHY.replace("nn.Linear(8, 3))", "nn.Linear(8, 3)).eval()")))
    assert result.exit_code == 1
    assert "warned, plain: modules are in eval mode while training: the model." in result.stdout
    assert "- See to what is refused or warned of above (2) before you train.\n" in result.stdout


def test_losses_that_are_no_losses(recipe):
    result = command("doctor", recipe(HEALTHY + "\n\ndef loss(model, batch):\n    return model(batch[0]).sum()\n"))
    assert result.exit_code == 1
    assert result.stdout.startswith("refused: ")
    assert "with sw.clip(1.0)  refused" in result.stdout


def test_an_empty_loader(recipe):
    result = command("doctor", recipe(HEALTHY.replace("return loader, loader", "return []")))
    assert result.stderr == "recipe.py: the loader of data() must have a batch; found none.\n"
    assert result.exit_code == 1


def test_it_says_what_takes_so_long(recipe, monkeypatch):
    monkeypatch.setattr(doctor, "PATIENCE", 0.05)
    result = command(
        "doctor", recipe(HEALTHY.replace("def data():\n", "def data():\n    import time; time.sleep(1)\n"))
    )
    assert "... building the model and fetching a batch\n" in result.stderr
    assert result.exit_code == 0


def test_as_a_process(recipe):
    result = process("doctor", recipe(HEALTHY))
    assert result.returncode == 0
    assert "All is well" in result.stdout
