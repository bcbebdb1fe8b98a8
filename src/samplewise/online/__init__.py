"""Online learning: a model that learns from a stream, one sample per update, with the interface of river's estimators.

online       `sw.Online`: predict, learn, save, and run over a stream
features     columns of dicts of features, checks of rows; labels and numbers, to and from those of the model
rows         memory of a few rows, written without tensor operations; the running update of `Step.over` that reads it
growth       layers that get further columns or classes; compilation waits until they stop growing
drift        test for drift in constant memory
settings     validation of steps; river's base classes
"""

from samplewise.online.online import (
    Online,
    OnlineClassifier,
    OnlineMultiTargetRegressor,
    OnlineRegressor,
    OnlineUpdate,
)
from samplewise.online.stream import StreamTotals

__all__ = [
    "Online",
    "OnlineClassifier",
    "OnlineMultiTargetRegressor",
    "OnlineRegressor",
    "OnlineUpdate",
    "StreamTotals",
]
