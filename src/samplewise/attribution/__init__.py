"""Training data attribution: which training samples affect a prediction. Works without a trainer.

influence       TracIn, and influence functions: dot products of training and query gradients
curvature       interface of the curvature in influence functions
ekfac           curvature in Kronecker factors with corrected eigenvalues, of any size of model
hessian         exact curvature of small models
outputs         output functions: the number per sample whose gradient is attributed, if it is not the loss
store           random projections of gradients on disk, of several models, for repeated searches
select          training data for a target set
trak            scores from an ensemble of models, on top of the store
evaluate        quality of scores, measured by retraining

`attribute` applies them to the run of a trainer:

attribution_results  `attribute`: plan, scores and page; files of the results
subject              model, loss and data at the parameters of checkpoints; queries
methods              its methods: influence, TRAK, EK-FAC
trained_models       checkpoints of runs
ordered_samples      samples of a loader by their index in the dataset
"""

from samplewise.attribution import evaluate as evaluate
from samplewise.attribution.attribution_results import AttributionResults as AttributionResults
from samplewise.attribution.attribution_results import attribute as attribute
from samplewise.attribution.curvature import Curvature as Curvature
from samplewise.attribution.ekfac import EKFAC as EKFAC
from samplewise.attribution.ekfac import ekfac as ekfac
from samplewise.attribution.hessian import Hessian as Hessian
from samplewise.attribution.hessian import hessian as hessian
from samplewise.attribution.influence import influence as influence
from samplewise.attribution.outputs import margin as margin
from samplewise.attribution.select import select as select
from samplewise.attribution.store import ProjectedStore as ProjectedStore
from samplewise.attribution.trak import trak as trak

__all__ = [
    "EKFAC",
    "AttributionResults",
    "Curvature",
    "Hessian",
    "ProjectedStore",
    "attribute",
    "ekfac",
    "evaluate",
    "hessian",
    "influence",
    "margin",
    "select",
    "trak",
]
