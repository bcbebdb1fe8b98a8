"""Conformance checks for users' rules and transforms, and the models that the engine is tested with."""

from samplewise.testing.rules import check_rule as check_rule
from samplewise.testing.transforms import check_transform as check_transform
