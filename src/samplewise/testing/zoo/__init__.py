"""Test cases (small models, each named after its difficulty) and the oracle that the engine is compared with.

case     Case: model, inputs and loss; the files of models register their cases in CASES
oracle   per-sample gradients row by row with plain autograd, and every quantity computed from those rows
compare  quantities that are computed by engine and oracle, and tolerances
runner   comparison of one case on one device and in one precision, for tests and `samplewise doctor --zoo`
"""

from samplewise.testing.zoo import attention as attention
from samplewise.testing.zoo import convolutions as convolutions
from samplewise.testing.zoo import interacting as interacting
from samplewise.testing.zoo import layers as layers
from samplewise.testing.zoo import losses as losses
from samplewise.testing.zoo import mechanics as mechanics
from samplewise.testing.zoo import recurrent as recurrent
from samplewise.testing.zoo import routing as routing
from samplewise.testing.zoo import weights as weights
from samplewise.testing.zoo.case import CASES as CASES
from samplewise.testing.zoo.case import DEFAULT_B as DEFAULT_B
from samplewise.testing.zoo.case import Case as Case
from samplewise.testing.zoo.case import Net as Net
from samplewise.testing.zoo.case import as_losses as as_losses
from samplewise.testing.zoo.case import cast as cast
from samplewise.testing.zoo.case import confident_loss as confident_loss
from samplewise.testing.zoo.case import default_dtype as default_dtype
from samplewise.testing.zoo.case import noise as noise
from samplewise.testing.zoo.case import seeded as seeded
from samplewise.testing.zoo.case import squared_loss as squared_loss
from samplewise.testing.zoo.case import tokens as tokens
from samplewise.testing.zoo.case import weight as weight
from samplewise.testing.zoo.compare import CORE as CORE
from samplewise.testing.zoo.compare import EXACT as EXACT
from samplewise.testing.zoo.compare import HALF as HALF
from samplewise.testing.zoo.compare import QUANTITIES as QUANTITIES
from samplewise.testing.zoo.compare import SECOND_ORDER as SECOND_ORDER
from samplewise.testing.zoo.compare import SINGLE as SINGLE
from samplewise.testing.zoo.compare import Disagreement as Disagreement
from samplewise.testing.zoo.compare import Probe as Probe
from samplewise.testing.zoo.compare import Tolerance as Tolerance
from samplewise.testing.zoo.compare import as_dict as as_dict
from samplewise.testing.zoo.compare import assert_agrees as assert_agrees
from samplewise.testing.zoo.compare import assert_same as assert_same
from samplewise.testing.zoo.compare import defined_quantities as defined_quantities
from samplewise.testing.zoo.compare import other_losses as other_losses
from samplewise.testing.zoo.compare import probe_for as probe_for
from samplewise.testing.zoo.oracle import ExpectedRows as ExpectedRows
from samplewise.testing.zoo.oracle import rows_of as rows_of
from samplewise.testing.zoo.oracle import wanted as wanted
from samplewise.testing.zoo.runner import BF16 as BF16
from samplewise.testing.zoo.runner import FP32 as FP32
from samplewise.testing.zoo.runner import FP64 as FP64
from samplewise.testing.zoo.runner import PRECISIONS as PRECISIONS
from samplewise.testing.zoo.runner import CaseComparison as CaseComparison
from samplewise.testing.zoo.runner import CaseResult as CaseResult
from samplewise.testing.zoo.runner import ZooPrecision as ZooPrecision
from samplewise.testing.zoo.runner import prepare_comparison as prepare_comparison
from samplewise.testing.zoo.runner import run_case as run_case

INDEPENDENT = [case for case in CASES.values() if not case.interacts]
INTERACTING = [case for case in CASES.values() if case.interacts]
