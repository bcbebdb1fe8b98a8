"""privacy= inside other trainers is refused in one sentence."""

import os

import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")

import samplewise as sw
from samplewise.integrations.adapter import refuse_privacy

PRIVACY = dict(noise_multiplier=1.0, delta=1e-5, updates=10, sample_rate=0.1, clip=1.0, seed=0)
MESSAGE = "privacy= must be used with sw.Step, which draws samples as the accountant assumes .* Use sw.Step"


def test_no_privacy_is_accepted():
    refuse_privacy(None, "the Trainer")


def test_hugging_face_refuses_privacy():
    pytest.importorskip("transformers")
    from transformers import Trainer

    from samplewise.integrations.huggingface import PerSample

    class PrivateTrainer(PerSample, Trainer):
        pass

    with pytest.raises(sw.PrivacyError, match=MESSAGE):
        PrivateTrainer(privacy=sw.Privacy(**PRIVACY))


def test_lightning_refuses_privacy():
    pytest.importorskip("lightning")
    from samplewise.integrations.lightning import PerSample

    with pytest.raises(sw.PrivacyError, match=MESSAGE):
        PerSample(privacy=sw.Privacy(**PRIVACY))


def test_keras_refuses_privacy():
    keras = pytest.importorskip("keras")
    from samplewise.integrations.keras import PerSample

    model = PerSample.of(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(sw.PrivacyError, match=MESSAGE):
        model.compile("sgd", "mse", privacy=sw.Privacy(**PRIVACY))
