"""Keras models on two gloo ranks: `sw.backward` in a hand-written loop; `fit` is refused."""

import subprocess
import sys
from pathlib import Path

import keras_ranks
import pytest
import torch
from keras_double import double


@pytest.mark.slow
def test_two_ranks_give_the_update_of_one(tmp_path):
    script = [sys.executable, str(Path(keras_ranks.__file__)), str(tmp_path)]
    run = subprocess.run(script, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    with double():
        model = keras_ranks.build()
        keras_ranks.update(model, *keras_ranks.data())
        expected = [v.value.data for v in model.trainable_variables]
    for rank in (0, 1):
        torch.testing.assert_close(torch.load(tmp_path / f"rank-{rank}.pt"), expected, rtol=1e-12, atol=1e-12)
        refused = (tmp_path / f"rank-{rank}.txt").read_text()
        assert refused.startswith("fit must run in a single process") and "found 2 ranks" in refused
