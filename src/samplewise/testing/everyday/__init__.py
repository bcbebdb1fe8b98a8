"""Everyday situations: a small transformer with one ordinary line, or one hook in the process, that is hard on speed.

situation     Situation, its sizes and data; SITUATIONS: name -> class, build(name) -> model
operations    one operation on activations
batches       data decide shapes, structure, or which row belongs to which sample
surroundings  hooks, modes, numbers that change in each step, parametrizations

tests/engine/test_everyday.py compares them with a loop over samples, benchmarks/everyday.py measures them.
"""

from samplewise.testing.everyday import operations as operations  # isort: skip  # first: the baseline
from samplewise.testing.everyday import batches as batches
from samplewise.testing.everyday import surroundings as surroundings
from samplewise.testing.everyday.situation import SITUATIONS as SITUATIONS
from samplewise.testing.everyday.situation import Situation as Situation
from samplewise.testing.everyday.situation import Sizes as Sizes
from samplewise.testing.everyday.situation import build as build
from samplewise.testing.everyday.situation import line as line
