"""Everyday situations: a small transformer with one ordinary line, or one hook in the process, that is hard on speed.

situation     Situation, its sizes and data; SITUATIONS: name -> class, build(name) -> model
operations    one operation on activations
batches       data decide shapes, structure, or which row belongs to which sample
surroundings  hooks, modes, numbers that change in each step, parametrizations

tests/engine/test_everyday_models.py compares them with a loop over samples, benchmarks/everyday.py measures them.
"""

from everyday_zoo import operations as operations  # isort: skip  # first: the baseline
from everyday_zoo import batches as batches
from everyday_zoo import surroundings as surroundings
from everyday_zoo.situation import SITUATIONS as SITUATIONS
from everyday_zoo.situation import Situation as Situation
from everyday_zoo.situation import Sizes as Sizes
from everyday_zoo.situation import build as build
from everyday_zoo.situation import line as line
