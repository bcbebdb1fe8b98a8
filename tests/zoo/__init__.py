"""Small models, each named for its trap, and the oracle they are compared with."""

from . import attention as attention
from . import convolutions as convolutions
from . import interacting as interacting
from . import layers as layers
from . import losses as losses
from . import mechanics as mechanics
from . import recurrent as recurrent
from . import routing as routing
from . import weights as weights
from .case import CASES as CASES
from .case import DEFAULT_B as DEFAULT_B
from .case import Case as Case
from .case import Net as Net
from .case import as_losses as as_losses
from .case import cast as cast
from .case import confident_loss as confident_loss
from .case import default_dtype as default_dtype
from .case import noise as noise
from .case import seeded as seeded
from .case import squared_loss as squared_loss
from .case import tokens as tokens
from .case import weight as weight
from .compare import CORE as CORE
from .compare import EXACT as EXACT
from .compare import HALF as HALF
from .compare import QUANTITIES as QUANTITIES
from .compare import SECOND_ORDER as SECOND_ORDER
from .compare import SINGLE as SINGLE
from .compare import Probe as Probe
from .compare import Tolerance as Tolerance
from .compare import as_dict as as_dict
from .compare import assert_agrees as assert_agrees
from .compare import assert_same as assert_same
from .compare import other_losses as other_losses
from .compare import probe_for as probe_for
from .compare import questions_for as questions_for
from .oracle import Rows as Rows
from .oracle import rows_of as rows_of
from .oracle import wanted as wanted

INDEPENDENT = [case for case in CASES.values() if not case.interacts]
INTERACTING = [case for case in CASES.values() if case.interacts]
