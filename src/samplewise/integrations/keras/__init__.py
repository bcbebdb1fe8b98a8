"""Keras 3: per-sample gradients with any backend, and `fit` with transforms and a ledger with the torch backend."""

try:
    import keras as _keras  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "keras":  # the backend is missing, and the message names it
        raise
    raise ImportError("samplewise.integrations.keras needs keras: pip install 'samplewise[keras]'") from None

from samplewise.integrations.keras.gradients import RowGradients as RowGradients
from samplewise.integrations.keras.gradients import gradients as gradients
from samplewise.integrations.keras.gradients import input_gradients as input_gradients
from samplewise.integrations.keras.per_sample import PerSample as PerSample

__all__ = ["PerSample", "RowGradients", "gradients", "input_gradients"]
