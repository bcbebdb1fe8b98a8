"""samplewise: per-sample gradients for PyTorch, and a training step as a value."""

from samplewise.attribution.ekfac import ekfac as ekfac
from samplewise.attribution.hessian import hessian as hessian
from samplewise.attribution.influence import influence as influence
from samplewise.attribution.outputs import margin as margin
from samplewise.attribution.store import ProjectedStore as ProjectedStore
from samplewise.attribution.trak import trak as trak
from samplewise.backward import BackwardResult as BackwardResult
from samplewise.backward import backward as backward
from samplewise.check import check as check
from samplewise.core.batchnorm import freeze_batchnorm as freeze_batchnorm
from samplewise.diagnostics.fisher import fisher as fisher
from samplewise.diagnostics.noise import NoiseScale as NoiseScale
from samplewise.diagnostics.noise import noise_scale as noise_scale
from samplewise.diagnostics.noise import signal_to_noise as signal_to_noise
from samplewise.diagnostics.similarity import similarity as similarity
from samplewise.diagnostics.suspects import suspects as suspects
from samplewise.distributed.fsdp import fsdp as fsdp
from samplewise.distributed.launch import join_process_group as join_process_group
from samplewise.engine.gradients import Gradients as Gradients
from samplewise.engine.gradients import gradients as gradients
from samplewise.engine.inputs import input_gradients as input_gradients
from samplewise.errors import BatchError as BatchError
from samplewise.errors import CheckpointError as CheckpointError
from samplewise.errors import CheckpointWarning as CheckpointWarning
from samplewise.errors import DistributedError as DistributedError
from samplewise.errors import GraphError as GraphError
from samplewise.errors import LedgerError as LedgerError
from samplewise.errors import LedgerWarning as LedgerWarning
from samplewise.errors import LoaderStopped as LoaderStopped
from samplewise.errors import LossesError as LossesError
from samplewise.errors import NonFiniteGradientError as NonFiniteGradientError
from samplewise.errors import NonFiniteLossError as NonFiniteLossError
from samplewise.errors import ParameterError as ParameterError
from samplewise.errors import PrivacyError as PrivacyError
from samplewise.errors import SamplesInteractError as SamplesInteractError
from samplewise.errors import SamplesMayInteractWarning as SamplesMayInteractWarning
from samplewise.errors import SamplewiseError as SamplewiseError
from samplewise.errors import StoreError as StoreError
from samplewise.errors import TrainingWarning as TrainingWarning
from samplewise.errors import TransformError as TransformError
from samplewise.ledger.files import samples as samples
from samplewise.ledger.indexed import Indexed as Indexed
from samplewise.ledger.ledger import Ledger as Ledger
from samplewise.loop import callbacks as callbacks
from samplewise.loop.checkpoint.store import load_checkpoint as load_checkpoint
from samplewise.loop.data.sharding import sharded as sharded
from samplewise.loop.trainer import Trainer as Trainer
from samplewise.privacy.audit import privacy_audit as privacy_audit
from samplewise.privacy.privacy import Privacy as Privacy
from samplewise.scan import scan as scan
from samplewise.step.functional_optim import sgd as sgd
from samplewise.step.microbatch import auto as auto
from samplewise.step.step import Step as Step
from samplewise.step.update import Update as Update
from samplewise.testing.transforms import check_transform as check_transform
from samplewise.transforms.align import align as align
from samplewise.transforms.chain import chain as chain
from samplewise.transforms.clip import clip as clip
from samplewise.transforms.drop import drop as drop
from samplewise.transforms.group import group as group
from samplewise.transforms.noise import noise as noise
from samplewise.transforms.normalize import normalize as normalize
from samplewise.transforms.weight import weight as weight

__all__ = [
    "BackwardResult",
    "BatchError",
    "CheckpointError",
    "CheckpointWarning",
    "DistributedError",
    "Gradients",
    "GraphError",
    "Indexed",
    "Ledger",
    "LedgerError",
    "LedgerWarning",
    "LoaderStopped",
    "LossesError",
    "NoiseScale",
    "NonFiniteGradientError",
    "NonFiniteLossError",
    "ParameterError",
    "Privacy",
    "PrivacyError",
    "ProjectedStore",
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
    "auto",
    "backward",
    "callbacks",
    "chain",
    "check",
    "check_transform",
    "clip",
    "drop",
    "ekfac",
    "fisher",
    "freeze_batchnorm",
    "fsdp",
    "gradients",
    "group",
    "hessian",
    "influence",
    "input_gradients",
    "join_process_group",
    "load_checkpoint",
    "margin",
    "noise",
    "noise_scale",
    "normalize",
    "privacy_audit",
    "samples",
    "scan",
    "sgd",
    "sharded",
    "signal_to_noise",
    "similarity",
    "suspects",
    "trak",
    "weight",
]
