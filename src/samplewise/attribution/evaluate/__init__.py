"""Quality of attribution scores, measured by retraining: how well do they predict what training data changes?

subsets     random subsets of the training data
retrain     a model per subset, and its outputs for the queries; cached in a directory
lds         linear datamodeling score, with standard error and noise ceiling
removal     change of a query's output after retraining without its highest-scored training samples
baselines   scores that need no gradients, to compare with
"""

from samplewise.attribution.evaluate.baselines import baselines as baselines
from samplewise.attribution.evaluate.lds import LDS as LDS
from samplewise.attribution.evaluate.lds import lds as lds
from samplewise.attribution.evaluate.lds import subsets as subsets
from samplewise.attribution.evaluate.removal import Removal as Removal
from samplewise.attribution.evaluate.removal import removal as removal
from samplewise.attribution.evaluate.retrain import models as models
from samplewise.attribution.evaluate.retrain import retrain as retrain

__all__ = ["LDS", "Removal", "baselines", "lds", "models", "removal", "retrain", "subsets"]
