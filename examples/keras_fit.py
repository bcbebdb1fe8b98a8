"""Keras: train with per-sample clipping in `fit`, and find wrong labels with the ledger.

Needs keras: pip install 'samplewise[keras,ledger]'. The backend is torch.
"""

import os
import tempfile

os.environ["KERAS_BACKEND"] = "torch"  # before keras is imported

import keras
import numpy as np
from keras import layers

import samplewise as sw
from samplewise.integrations.keras import PerSample

CLASSES, SAMPLES, WRONG = 4, 600, 60

rng = np.random.default_rng(0)
keras.utils.set_random_seed(0)
centers = 3 * rng.normal(size=(CLASSES, 10))
labels = rng.integers(0, CLASSES, SAMPLES)
x = (centers[labels] + 2 * rng.normal(size=(SAMPLES, 10))).astype("float32")
wrong = rng.choice(SAMPLES, WRONG, replace=False)
y = labels.copy()
y[wrong] = (y[wrong] + rng.integers(1, CLASSES, WRONG)) % CLASSES

model = PerSample.of(
    keras.Sequential(
        [keras.Input((10,)), layers.Dense(32, activation="relu"), layers.Dropout(0.2), layers.Dense(CLASSES)]
    )
)
with tempfile.TemporaryDirectory() as run:
    model.compile(
        optimizer=keras.optimizers.Adam(0.003),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        transforms=[sw.clip(1.0)],  # no sample has more influence on an update than a gradient of norm 1
        ledger=sw.Ledger(run),  # ids are the row numbers of x
    )
    history = model.fit(x, y, batch_size=32, epochs=8, verbose=0).history
    visits = sw.read_ledger(run)
    found = sw.suspects(visits)

print(f"accuracy {history['accuracy'][-1]:.3f}, {visits.num_rows} rows in the ledger")
hits = len(set(found.top(WRONG).tolist()) & set(wrong.tolist()))
print(f"{hits} of the {WRONG} most suspicious samples have a wrong label")
assert hits >= 0.8 * WRONG
