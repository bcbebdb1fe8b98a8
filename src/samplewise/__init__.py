"""samplewise: per-sample gradients for PyTorch, and a training step as a value."""

# ruff: noqa: F403, F405 (the names of the star import below; tests/test_imports.py compares them with __all__)

from typing import TYPE_CHECKING

from samplewise.core.package import import_at_first_use as _import_at_first_use
from samplewise.core.package import installed_version as _installed_version

__version__ = _installed_version()

__all__ = [
    "BackwardResult",
    "BatchError",
    "CheckpointError",
    "CheckpointWarning",
    "DistributedError",
    "ExportError",
    "FitResult",
    "Gradients",
    "GraphError",
    "ImportanceSampler",
    "Indexed",
    "Ledger",
    "LedgerError",
    "LedgerWarning",
    "LoaderStopped",
    "LossesError",
    "NoiseScale",
    "NonFiniteGradientError",
    "NonFiniteLossError",
    "Online",
    "ParameterError",
    "Privacy",
    "PrivacyError",
    "SamplesInteractError",
    "SamplesMayInteractWarning",
    "SamplewiseError",
    "Step",
    "StoreError",
    "Trainer",
    "TrainingWarning",
    "TransformError",
    "Update",
    "align",
    "already_sharded",
    "attribution",
    "audit",
    "auto",
    "backward",
    "batch_constants",
    "by_samples",
    "callbacks",
    "chain",
    "check",
    "clip",
    "diagnostics",
    "drop",
    "dynamics",
    "ekfac",
    "export_update",
    "fisher",
    "follow_noise",
    "freeze_batchnorm",
    "gradients",
    "group",
    "guard",
    "influence",
    "input_gradients",
    "load_checkpoint",
    "load_update",
    "loggers",
    "metagradient",
    "noise",
    "noise_scale",
    "normalize",
    "parallel",
    "per",
    "privacy_audit",
    "ramp",
    "read_ledger",
    "scan",
    "sgd",
    "similarity",
    "suspects",
    "testing",
    "trak",
    "weight",
]

if TYPE_CHECKING:
    from samplewise.exports import *
else:
    _import_at_first_use(__name__, "exports.py")
