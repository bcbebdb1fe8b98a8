"""Training data attribution: which training samples affect a prediction. Works without a trainer.

influence   TracIn: dot products of training and query gradients, summed over checkpoints
store       random projections of gradients on disk, for repeated searches
evaluate    quality of scores, measured by retraining
"""

from samplewise.attribution.influence import influence as influence
from samplewise.attribution.outputs import margin as margin
from samplewise.attribution.store import ProjectedStore as ProjectedStore

__all__ = ["ProjectedStore", "influence", "margin"]
