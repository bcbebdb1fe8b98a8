"""Training data attribution: which training samples affect a prediction. Works without a trainer.

influence       TracIn, and influence functions: dot products of training and query gradients
curvature       interface of the curvature in influence functions
ekfac           curvature in Kronecker factors with corrected eigenvalues, of any size of model
hessian         exact curvature of small models
store           random projections of gradients on disk, for repeated searches
"""

from samplewise.attribution.curvature import Curvature as Curvature
from samplewise.attribution.ekfac import EKFAC as EKFAC
from samplewise.attribution.ekfac import ekfac as ekfac
from samplewise.attribution.hessian import Hessian as Hessian
from samplewise.attribution.hessian import hessian as hessian
from samplewise.attribution.influence import influence as influence
from samplewise.attribution.store import ProjectedStore as ProjectedStore

__all__ = ["EKFAC", "Curvature", "Hessian", "ProjectedStore", "ekfac", "hessian", "influence"]
