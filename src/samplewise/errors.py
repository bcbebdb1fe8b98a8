"""Everything samplewise raises or warns of.

    SamplewiseError
    ├── LossesError             what was handed over as `losses` is not one attached value per sample
    │   └── NonFiniteLossError  some of them are NaN or infinite
    ├── ParameterError          a parameter, direction or weight does not fit
    ├── GraphError              the autograd graph cannot be read: freed, opaque, or without the parameters
    ├── SamplesInteractError    one sample's loss depends on another sample's data
    ├── NonFiniteGradientError  losses are finite, their gradients are not
    ├── BatchError              a batch does not have the structure or the size that is asked for
    ├── TransformError          a transform is put together wrongly, or its answer is no coefficient per sample
    ├── DistributedError        several processes do not go together, or another one failed
    ├── CheckpointError         a checkpoint cannot be written, or a file is none that can be read
    ├── StoreError              a store of projections is damaged, or holds something else than is asked for
    └── LedgerError             a ledger cannot be written or read, or an update does not tell what it needs

    SamplesMayInteractWarning   shapes alone cannot tell whether samples interact
    TrainingWarning             the first update shows something that is seldom meant
    CheckpointWarning           a checkpoint is passed over because it cannot be read, or stays though it should go
    LedgerWarning               a part of a ledger is left out because it cannot be read

Every message says what must hold, what was found, and what to do.
"""


class SamplewiseError(Exception):
    """Base of all errors raised by samplewise."""


class LossesError(SamplewiseError, ValueError):
    """`losses` must be a 1-D floating-point tensor, one value per sample, attached to the autograd graph."""


class NonFiniteLossError(LossesError):
    """Losses must be finite."""


class ParameterError(SamplewiseError, ValueError):
    """A parameter, a direction or a weight does not have the kind, name or shape that is needed."""


class GraphError(SamplewiseError, RuntimeError):
    """The autograd graph behind `losses` cannot be used."""


class SamplesInteractError(SamplewiseError, RuntimeError):
    """A sample's loss depends on other samples, so that "the gradient of one sample" has two meanings."""


class NonFiniteGradientError(SamplewiseError, RuntimeError):
    """The gradient of some sample is NaN or infinite though its loss is not."""


class BatchError(SamplewiseError, ValueError):
    """A batch cannot be cut as asked, or does not hold what is looked for in it."""


class TransformError(SamplewiseError, ValueError):
    """A transform is put together wrongly, or answers with something else than coefficients."""


class DistributedError(SamplewiseError, RuntimeError):
    """Processes that train together must do the same; or one of them failed, and the others end with its message."""


class CheckpointError(SamplewiseError):
    """A checkpoint cannot be written; or a file is truncated, corrupt, of a newer format, or no checkpoint at all."""


class StoreError(SamplewiseError):
    """A store of projections is truncated, is none at all, or was made with another size, seed or model."""


class LedgerError(SamplewiseError):
    """A ledger is missing, truncated, of another version, or in the way; or an update does not tell what it needs."""


class SamplesMayInteractWarning(UserWarning):
    """Something with one row per sample enters a part of the graph where samples are already mixed."""


class TrainingWarning(UserWarning):
    """Training goes on, but something about the model, the optimizer or the batches is seldom meant."""


class CheckpointWarning(UserWarning):
    """A checkpoint cannot be read, so that an earlier one is used; or an old one cannot be removed."""


class LedgerWarning(UserWarning):
    """A part of a ledger cannot be read, and is left out."""
