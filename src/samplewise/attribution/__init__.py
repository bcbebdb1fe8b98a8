"""Which training samples are behind a prediction. Needs no trainer.

influence   dot products of training with query gradients, over checkpoints
store       projections of gradients on disk, to be searched again and again
"""

from samplewise.attribution.influence import influence as influence
from samplewise.attribution.store import ProjectedStore as ProjectedStore

__all__ = ["ProjectedStore", "influence"]
