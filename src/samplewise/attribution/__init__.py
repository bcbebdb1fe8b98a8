"""Training data attribution: which training samples affect a prediction. Works without a trainer.

influence       TracIn, and influence functions: dot products of training and query gradients
curvature       interface of the curvature in influence functions; exact curvature of small models
ekfac           curvature in Kronecker factors with corrected eigenvalues, of any size of model
store           random projections of gradients on disk, of several models, for repeated searches
faiss_index     approximate search in a store with FAISS, with its recall
trak            scores from an ensemble of models, and training data for a target set, on top of the store
metagradient    derivative of a recorded run with respect to the weights of its samples
replay          states and batches of the updates of a recorded run
update_derivative  derivative of one update
evaluate        quality of scores, measured by retraining

`attribute` applies them to the run of a trainer:

attribution_results  `attribute`: plan, scores and page; files of the results
subject              model, loss and data at the parameters of checkpoints of runs; queries
methods              its methods: influence, TRAK, EK-FAC
ordered_samples      samples of a loader by their index in the dataset
"""

from samplewise.attribution import evaluate as evaluate
from samplewise.attribution.attribution_results import AttributionResults as AttributionResults
from samplewise.attribution.attribution_results import attribute as attribute
from samplewise.attribution.curvature import Curvature as Curvature
from samplewise.attribution.curvature import Hessian as Hessian
from samplewise.attribution.curvature import hessian as hessian
from samplewise.attribution.ekfac import EKFAC as EKFAC
from samplewise.attribution.ekfac import ekfac as ekfac
from samplewise.attribution.faiss_index import FaissIndex as FaissIndex
from samplewise.attribution.influence import influence as influence
from samplewise.attribution.metagradient import metagradient as metagradient
from samplewise.attribution.projected_features import margin as margin
from samplewise.attribution.store import ProjectedStore as ProjectedStore
from samplewise.attribution.trak import select as select
from samplewise.attribution.trak import trak as trak

__all__ = [
    "EKFAC",
    "AttributionResults",
    "Curvature",
    "FaissIndex",
    "Hessian",
    "ProjectedStore",
    "attribute",
    "ekfac",
    "evaluate",
    "hessian",
    "influence",
    "margin",
    "metagradient",
    "select",
    "trak",
]
