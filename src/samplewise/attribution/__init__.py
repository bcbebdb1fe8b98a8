"""Training data attribution: which training samples affect a prediction. Works without a trainer.

influence   TracIn: dot products of training and query gradients, summed over checkpoints
outputs     output functions: the number per sample whose gradient is attributed, if it is not the loss
store       random projections of gradients on disk, of several models, for repeated searches
trak        scores from an ensemble of models, on top of the store
"""

from samplewise.attribution.influence import influence as influence
from samplewise.attribution.outputs import margin as margin
from samplewise.attribution.store import ProjectedStore as ProjectedStore
from samplewise.attribution.trak import trak as trak

__all__ = ["ProjectedStore", "influence", "margin", "trak"]
