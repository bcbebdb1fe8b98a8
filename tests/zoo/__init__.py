"""Zoo: the cases that the library ships in samplewise.testing, and those of the tests, a file per family."""

from samplewise.testing.cases import CASES as SHIPPED
from zoo import attention as attention
from zoo import convolutions as convolutions
from zoo import interacting as interacting
from zoo import layers as layers
from zoo import losses as losses
from zoo import mechanics as mechanics
from zoo import recurrent as recurrent
from zoo import routing as routing
from zoo import weights as weights
from zoo.register import OWN

assert not SHIPPED.keys() & OWN.keys(), "case names must be unique"
CASES = {**SHIPPED, **OWN}
INDEPENDENT = [case for case in CASES.values() if not case.interacts]
INTERACTING = [case for case in CASES.values() if case.interacts]
