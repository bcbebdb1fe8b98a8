"""Keras runs that are killed and resumed: same parameters, no row lost or doubled."""

import subprocess
import sys
from pathlib import Path

import keras_resume
import numpy as np
import pytest
import torch
from keras_double import keras
from keras_resume import train

import samplewise as sw
from samplewise.integrations.keras import PerSample

layers = keras.layers


def _rows(directory):
    return sw.read_ledger(directory / "run").to_pydict()


def _same(model, other):
    return all(np.array_equal(a, b) for a, b in zip(model.get_weights(), other.get_weights(), strict=True))


@pytest.mark.parametrize("how", ["raise", pytest.param("kill", marks=pytest.mark.slow)])
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(how, tmp_path):
    whole = train(tmp_path / "whole", None)
    if how == "kill":
        script = [sys.executable, str(Path(keras_resume.__file__)), str(tmp_path / "killed"), "kill"]
        assert subprocess.run(script, timeout=600).returncode == 9
    else:
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "killed", "raise")
    killed = _rows(tmp_path / "killed")
    assert len(killed["id"]) > 18  # rows of the second epoch are newer than the backup
    resumed = train(tmp_path / "killed", None)
    assert _same(whole, resumed)
    assert _rows(tmp_path / "killed") == _rows(tmp_path / "whole")


def test_an_epoch_that_is_trained_again_after_a_backup_inside_it_is_recorded_again(tmp_path):
    """Keras restarts the epoch of a backup made in its middle; the rows are those of the updates of the model."""
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, "raise", save_freq=2)
    train(tmp_path, None, save_freq=2)
    updates = _rows(tmp_path)["update"]
    assert sorted(set(updates)) == [*range(max(updates) + 1)]
    assert updates == sorted(updates)


def _small(directory):
    keras.utils.set_random_seed(0)
    model = PerSample.of(keras.Sequential([keras.Input((3,)), layers.Dense(2)]))
    model.compile("sgd", "mse", ledger=sw.Ledger(directory))
    return model


def test_weights_of_another_run_leave_the_ledger_alone(tmp_path):
    x, y = np.ones((4, 3)), np.ones((4, 2))
    first = _small(tmp_path / "first")
    first.fit(x, y, verbose=0)
    first.save_weights(tmp_path / "first.weights.h5")
    second = _small(tmp_path / "second")
    second.load_weights(tmp_path / "first.weights.h5")
    second.fit(x, y, verbose=0)
    assert len(sw.read_ledger(tmp_path / "second")) == 4


def test_files_of_weights_are_exchanged_with_plain_models(tmp_path):
    x, y = np.ones((4, 3)), np.ones((4, 2))
    model = _small(tmp_path / "run")
    model.fit(x, y, verbose=0)
    model.save_weights(tmp_path / "recorded.weights.h5")
    plain = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    plain.compile("sgd", "mse")
    plain.load_weights(tmp_path / "recorded.weights.h5")
    assert _same(plain, model)
    plain.fit(x, y, verbose=0)
    plain.save_weights(tmp_path / "plain.weights.h5")
    model.load_weights(tmp_path / "plain.weights.h5")
    assert _same(plain, model)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded) is keras.Sequential
    assert torch.equal(loaded(x), model(x))


def test_a_new_training_in_the_directory_of_another_is_refused(tmp_path):
    x, y = np.ones((4, 3)), np.ones((4, 2))
    _small(tmp_path).fit(x, y, verbose=0)
    with pytest.raises(sw.LedgerError, match="must have a run directory without parts; found 1 part"):
        _small(tmp_path).fit(x, y, verbose=0)
