"""Training of a Keras model with backups, killed in the second epoch if the second argument is "kill"."""

import os
import sys
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
from keras import layers

import samplewise as sw
from samplewise.integrations.keras import PerSample

BATCHES = 5  # per epoch


class Kill(keras.callbacks.Callback):
    """End the process without clean-up, or raise an error, in the middle of the second epoch."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.batches = 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if self.batches == BATCHES + 3 and self.how == "kill":
            os._exit(9)
        if self.batches == BATCHES + 3 and self.how == "raise":
            raise KeyboardInterrupt


def train(directory, how, save_freq="epoch"):
    """Train three epochs, or what is left of them after the backup in the directory. Returns the model."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(18, 5)), rng.integers(0, 3, 18)
    keras.utils.set_random_seed(0)
    # The backups of Keras contain no state of random numbers: hence neither dropout nor shuffling.
    model = keras.Sequential([keras.Input((5,)), layers.Dense(8, activation="relu"), layers.Dense(3)])
    # Rows are written every 4 samples: most parts are newer than the backup.
    PerSample.of(model).compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        transforms=[sw.clip(0.5)],
        ledger=sw.Ledger(directory / "run", rows_per_file=4),
    )
    backup = keras.callbacks.BackupAndRestore(directory / "backup", save_freq=save_freq, delete_checkpoint=False)
    model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=[backup, Kill(how)])
    return model


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2])
