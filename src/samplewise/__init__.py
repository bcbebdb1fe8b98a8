"""samplewise: every sample's gradient within reach, on the autograd graph of an unmodified model."""

from samplewise.checking import check as check
from samplewise.engine.gradients import Gradients as Gradients
from samplewise.engine.gradients import gradients as gradients
from samplewise.engine.inputs import input_gradients as input_gradients
from samplewise.errors import GraphError as GraphError
from samplewise.errors import LossesError as LossesError
from samplewise.errors import NonFiniteGradientError as NonFiniteGradientError
from samplewise.errors import ParameterError as ParameterError
from samplewise.errors import SamplesInteractError as SamplesInteractError
from samplewise.errors import SamplesMayInteractWarning as SamplesMayInteractWarning
from samplewise.errors import SamplewiseError as SamplewiseError
from samplewise.scan import scan as scan

__all__ = [
    "Gradients",
    "GraphError",
    "LossesError",
    "NonFiniteGradientError",
    "ParameterError",
    "SamplesInteractError",
    "SamplesMayInteractWarning",
    "SamplewiseError",
    "check",
    "gradients",
    "input_gradients",
    "scan",
]
