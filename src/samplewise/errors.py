"""Everything samplewise raises or warns of.

    SamplewiseError
    ├── LossesError             what was handed over as `losses` is not one attached value per sample
    ├── ParameterError          a parameter, direction or weight does not fit
    ├── GraphError              the autograd graph cannot be read: freed, opaque, or without the parameters
    ├── SamplesInteractError    one sample's loss depends on another sample's data
    └── NonFiniteGradientError  losses are finite, their gradients are not

    SamplesMayInteractWarning   shapes alone cannot tell whether samples interact

Every message says what must hold, what was found, and what to do.
"""


class SamplewiseError(Exception):
    """Base of all errors raised by samplewise."""


class LossesError(SamplewiseError, ValueError):
    """`losses` must be a 1-D floating-point tensor, one value per sample, attached to the autograd graph."""


class ParameterError(SamplewiseError, ValueError):
    """A parameter, a direction or a weight does not have the kind, name or shape that is needed."""


class GraphError(SamplewiseError, RuntimeError):
    """The autograd graph behind `losses` cannot be used."""


class SamplesInteractError(SamplewiseError, RuntimeError):
    """A sample's loss depends on other samples, so that "the gradient of one sample" has two meanings."""


class NonFiniteGradientError(SamplewiseError, RuntimeError):
    """The gradient of some sample is NaN or infinite though its loss is not."""


class SamplesMayInteractWarning(UserWarning):
    """Something with one row per sample enters a part of the graph where samples are already mixed."""
