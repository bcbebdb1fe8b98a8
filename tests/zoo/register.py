"""Cases of the tests, beside those that the library ships."""

from samplewise.testing.case import Cases

OWN = Cases()
case = OWN.add
