"""Exceptions and warnings of samplewise.

    SamplewiseError
    ├── LossesError             `losses` is not one value per sample, attached to the autograd graph
    │   └── NonFiniteLossError  some losses are NaN or infinite
    ├── ParameterError          a parameter, direction or weight has the wrong type, name or shape
    ├── GraphError              the autograd graph is freed, opaque, or does not contain the parameters
    ├── SamplesInteractError    one sample's loss depends on another sample's data
    ├── NonFiniteGradientError  losses are finite, their gradients are not
    ├── BatchError              a batch does not have the required structure or size
    ├── TransformError          invalid composition of transforms, or a result that is not one coefficient per sample
    ├── DistributedError        ranks disagree, a collective failed, or another rank failed
    ├── CheckpointError         a checkpoint cannot be written or read
    ├── ExportError             an update cannot be exported, or the exported file does not equal it
    ├── PrivacyError            a private step cannot keep its guarantee
    ├── StoreError              a store of projections is damaged, or does not match the request
    └── LedgerError             a ledger cannot be written or read, or an update lacks required ids or columns

    LoaderStopped               raised by a loader to end `Step.over` early and keep the open window; not an error

    SamplesMayInteractWarning   shapes do not determine whether samples interact
    TrainingWarning             training continues, but something about it is probably not intended
    CheckpointWarning           an unreadable checkpoint is skipped, an old one cannot be deleted, or an upload failed
    LedgerWarning               an unreadable part of a ledger is skipped

Every message says what must hold, what was found, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence


class SamplewiseError(Exception):
    """Base of all errors raised by samplewise."""


class LossesError(SamplewiseError, ValueError):
    """`losses` must be a 1-D floating-point tensor, one value per sample, attached to the autograd graph."""


class NonFiniteLossError(LossesError):
    """A loss is NaN or infinite."""


class ParameterError(SamplewiseError, ValueError):
    """A parameter, direction or weight has the wrong type, name or shape."""


class GraphError(SamplewiseError, RuntimeError):
    """The autograd graph of `losses` cannot be used: freed, opaque, or without the parameters."""


class SamplesInteractError(SamplewiseError, RuntimeError):
    """A sample's loss depends on other samples, so "the gradient of one sample" is ambiguous."""

    # The parts of the message are kept, so that a caller can replace remedies that do not apply to it.
    def __init__(self, finding: str, remedies: Sequence[str] = ()):
        self.finding = finding
        self.remedies = tuple(remedies)
        choice = ", ".join([*remedies[:-1], f"or {remedies[-1]}"]) if len(remedies) > 1 else "".join(remedies)
        super().__init__(f"{finding} {choice[0].upper()}{choice[1:]}." if choice else finding)


class NonFiniteGradientError(SamplewiseError, RuntimeError):
    """The gradient of a sample is NaN or infinite although its loss is finite."""


class BatchError(SamplewiseError, ValueError):
    """A batch cannot be sliced as required, or does not contain a requested key."""


class TransformError(SamplewiseError, ValueError):
    """Transforms are composed incorrectly, or a transform does not return one coefficient per sample."""


class DistributedError(SamplewiseError, RuntimeError):
    """Ranks disagree, a collective failed, or another rank failed; in that case the message contains its error."""


class CheckpointError(SamplewiseError):
    """A checkpoint cannot be written, or it is truncated, corrupt, of another format version, or not a checkpoint."""


class ExportError(SamplewiseError):
    """The updates of a step cannot be exported, or an exported file does not equal them."""


class PrivacyError(SamplewiseError, ValueError):
    """A setting, batch or resumed run would void the privacy guarantee, or its budget is used up."""


class StoreError(SamplewiseError):
    """A store of projections is truncated, is not a store, or was made with another size, seed or model."""


class LedgerError(SamplewiseError):
    """A ledger is missing, truncated, of another version or already exists, or an update lacks ids or columns."""


class LoaderStopped(Exception):
    """Raised by a loader inside `Step.over` to end it in mid-epoch; the open window is kept for the next call."""


class SamplesMayInteractWarning(UserWarning):
    """A tensor with one row per sample enters a part of the graph in which samples are already mixed."""


class TrainingWarning(UserWarning):
    """Training continues, but something about the model, optimizer or batches is probably not intended."""


class CheckpointWarning(UserWarning):
    """A checkpoint cannot be read, so an earlier one is used; an old one cannot be deleted; or an upload has failed."""


class LedgerWarning(UserWarning):
    """A part of a ledger cannot be read and is skipped."""
